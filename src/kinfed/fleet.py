"""Fleets run the clients' programs: one by one or all at once here, or elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from .client import Client, Pool, Rows, Training
from .errors import RunError, UsageError
from .federation import Federation
from .method import Method, Roster
from .model import Model
from .seeding import generator, tags

Tree = Any
Key = tuple[str, str, str]  # model, split, metric
Executor = Literal["auto", "loop", "vmap"]

EVALUATED = ("validation", "test")


class Evaluation(NamedTuple):
    """Scores of every named model, and the models themselves, by name."""

    scores: dict[Key, Tensor]  # [K] each
    models: dict[str, Tree]  # [K, ...]


class Fleet(Protocol):
    """All clients, wherever they run. Results come in the order of the cohort's ids.

    An evaluation may be a function to call for it when the next round is over, see `History`.
    """

    names: Sequence[str]

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]: ...  # who replied, with what

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation | Callable[[], Evaluation]: ...


class Simulation:
    """A fleet on this machine. Executors run the same programs in different ways and agree to rounding.

    `loop` runs client by client: plain stack traces, any module, fastest for convolutions on a CPU.
    `vmap` runs `chunk` clients at a time as one batched program: fastest for small dense models, and on a GPU.
    `auto` picks one and says why in `reason`.
    """

    def __init__(
        self,
        federation: Federation,
        model: Model,
        method: Method,
        training: Training,
        *,
        seed: int = 0,
        executor: Executor = "auto",
        chunk: int = 20,
        device: torch.device | str = "cpu",
    ) -> None:
        if executor not in ("auto", "loop", "vmap"):
            raise UsageError(f"executor must be auto, loop or vmap; got '{executor}'")
        if chunk < 1:
            raise UsageError(f"chunk counts clients, so it must be at least 1; got {chunk}")
        self.device = torch.device(device)
        federation = federation.to(self.device)
        self.names, self._tags = federation.names, tags(federation.names).to(self.device)
        self.model, self.method, self.training, self.seed, self.chunk = (
            model.to(self.device),
            method,
            training,
            seed,
            chunk,
        )
        self.task, self.pool = federation.task, Pool(federation.x, federation.y)
        self._rows = _set_aside(federation, method, seed)
        self._sizes = {split: [len(r) for r in rows] for split, rows in self._rows.items()}
        self._padded = {split: _pad(rows) for split, rows in self._rows.items()}
        self.executor, self.reason = self._choose(executor)
        self.state: Tree = ()

    @property
    def sizes(self) -> Tensor:
        """[N] int64 training examples of each client, after what the method set aside."""
        return torch.tensor(self._sizes["train"], device=self.device)

    def introduce(self) -> Tree:
        """What every client says before round 1, [N, ...]; gives every client its first private state."""
        everyone = torch.arange(len(self._sizes["train"]), device=self.device)
        said, self.state = self._each(
            0, everyone, lambda client: (self.method.introduce(client), self.method.join(client))
        )
        return said

    def roster(self, graph: Any = None) -> Roster:
        """What the server knows before round 1."""
        return Roster(
            self.model.theta,
            self.model.layout,
            self.sizes,
            self.training,
            self.seed,
            self._tags,
            graph,
            self.introduce(),
        )

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Local training of the cohort: [K]; private states are kept here."""
        state = tree_map(lambda table: table[cohort], self.state)
        state, uploads = self._each(round, cohort, self.method.train, state, sent)
        raise_if_diverged(self.names, round, cohort, (state, uploads))  # before the states are replaced
        self.state = tree_map(lambda table, rows: table.index_copy(0, cohort, rows), self.state, state)
        return cohort, uploads

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation:
        """Scores of the cohort's models on validation and test examples."""
        splits = [split for split in EVALUATED if all(self._sizes[split])]

        def program(client: Client, state: Tree, received: Tree) -> tuple[dict[str, Tensor], dict[str, Tree]]:
            models = self.method.personalise(client, state, received)
            scores = {}
            for name, personal in models.items():
                for split in splits:
                    x, y, weight = client.examples(split)
                    outputs = [self.method.predict(client, personal, part) for part in x.split(512)]
                    for metric, value in self.task.score(torch.cat(outputs), y, weight).items():
                        scores["\t".join((name, split, metric))] = value
            return scores, models

        state = tree_map(lambda table: table[cohort], self.state)
        scores, models = self._each(round, cohort, program, state, sent)
        keyed = {(model, split, metric): v for k, v in scores.items() for model, split, metric in [k.split("\t")]}
        return Evaluation(keyed, models)

    def _each(self, round: int, ids: Tensor, program: Callable[..., Any], *trees: Tree) -> Tree:
        """Run a client program once a client; trees: [K, ...] in, trees: [K, ...] out, in the order of ids."""
        if self.executor == "loop":
            found = []
            for place, i in enumerate(ids.tolist()):
                rows = {split: Rows(self._rows[split][i], count[i]) for split, (_, count) in self._padded.items()}
                client = self._client(self._tags[i], round, rows, (self._sizes["train"][i],), together=False)
                found.append(program(client, *(tree_map(lambda t, at=place: t[at], tree) for tree in trees)))
            return tree_map(lambda *leaves: torch.stack(leaves), *found)
        # Clients with equally many steps run together, so that few steps are spent on those who are done.
        order = torch.argsort(torch.tensor([self._sizes["train"][i] for i in ids.tolist()]), stable=True).to(ids.device)
        done = []
        for chunk in order.split(self.chunk):
            members = ids[chunk].tolist()
            sizes = tuple(self._sizes["train"][i] for i in members)
            rows = {
                split: Rows(index[ids[chunk], : max(self._sizes[split][i] for i in members)], count[ids[chunk]])
                for split, (index, count) in self._padded.items()
            }

            def together(tag: Tensor, rows: dict[str, Rows], *mine: Tree, sizes: tuple[int, ...] = sizes) -> Tree:
                return program(self._client(tag, round, rows, sizes, together=True), *mine)

            parts = [tree_map(lambda t, at=chunk: t[at], tree) for tree in trees]
            done.append(vmap(together)(self._tags[ids[chunk]], rows, *parts))
        back = torch.argsort(order)
        return tree_map(lambda *leaves: torch.cat(leaves)[back], *done)

    def _client(
        self, tag: Tensor, round: int, rows: dict[str, Rows], sizes: tuple[int, ...], *, together: bool
    ) -> Client:
        return Client(tag, round, self.seed, self.model, self.task, self.training, self.pool, rows, sizes, together)

    def _choose(self, executor: Executor) -> tuple[Executor, str]:
        if executor == "loop":
            return "loop", "as asked"
        problem = self._problem_with_vmap()
        if executor == "vmap":
            if problem:
                raise UsageError(f"this model cannot run under executor 'vmap' ({problem}); use executor 'loop'")
            return "vmap", "as asked"
        if problem:
            return "loop", f"vmap cannot take this model: {problem}"
        if self.device.type != "cpu":
            return "vmap", "on an accelerator batching clients wins"
        if any(isinstance(m, nn.modules.conv._ConvNd) for m in self.model.module.modules()):
            return "loop", "convolutions on a CPU run faster client by client"
        if len(self._sizes["train"]) < 4:
            return "loop", "with fewer than 4 clients there is little to batch"
        return "vmap", "dense models on a CPU run faster batched over clients"

    def _problem_with_vmap(self) -> str:
        """Why the model's training pass cannot be batched over clients; empty if it can."""
        rows = self._rows["train"][0][:2]
        x, y = self.pool.x[rows], self.pool.y[rows]
        weight = torch.ones(len(rows), device=self.device, dtype=self.model.theta.dtype)

        def slope(theta: Tensor, x: Tensor) -> Tensor:
            key = torch.zeros((), dtype=torch.int64, device=self.device)
            tensors = self.model.layout.tensors(theta)
            outputs, _ = self.model.run(tensors, x, weight, key)
            return self.task.loss(outputs, y).mean()

        try:
            vmap(grad(slope))(self.model.theta.expand(2, -1).clone(), x.expand(2, *x.shape))
        except Exception as problem:
            return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")[:160]
        return ""


def raise_if_diverged(names: Any, round: int, cohort: Tensor, uploads: Tree) -> None:
    """Raise RunError naming the clients whose upload holds NaN or infinity."""
    good = torch.ones(len(cohort), dtype=torch.bool, device=cohort.device)
    for leaf in tree_leaves(uploads):
        if leaf.is_floating_point():
            good &= torch.isfinite(leaf).reshape(len(cohort), -1).all(1)
    if not good.all():
        bad = [names[i] for i in cohort[~good].tolist()]
        raise RunError(
            f"round {round + 1}: training diverged to NaN or infinity at client {', '.join(bad[:5])}"
            f"{f' and {len(bad) - 5} more' if len(bad) > 5 else ''}; lower the learning rate"
        )


def _set_aside(federation: Federation, method: Method, seed: int) -> dict[str, list[Tensor]]:
    """Rows by split, with the method's feedback examples as `held_out`."""
    rows = {split: list(parts) for split, parts in federation.rows.items()}
    if method.feedback == "train":
        rows["held_out"] = rows["train"]
    elif method.feedback == "test":
        rows["held_out"] = rows["test"]
    elif method.feedback == "val":
        short = [n for n, r in zip(federation.names, rows["train"], strict=True) if len(r) < 2]
        if short:
            raise UsageError(
                f"{type(method).__name__} sets a ninth of each client's training examples aside for feedback, but "
                f"client {', '.join(short[:5])} has only one; use feedback='train' or give these clients more"
            )
        rows["held_out"] = []
        for i, (mine, tag) in enumerate(zip(rows["train"], tags(federation.names), strict=True)):
            count = max(1, round(len(mine) / 9))
            order = torch.randperm(len(mine), generator=generator(seed, "held_out", int(tag))).to(mine.device)
            rows["held_out"].append(mine[order[:count]])
            rows["train"][i] = mine[order[count:]]
    elif method.feedback != "none":
        raise UsageError(f"feedback must be none, train, val or test; got '{method.feedback}'")
    return rows


def _pad(rows: list[Tensor]) -> Rows:
    """index: [N, n] filled up with each client's own rows, count: [N]."""
    width = max(len(r) for r in rows)
    count = torch.tensor([len(r) for r in rows])
    fill = torch.arange(width)
    index = torch.stack([r[(fill % max(len(r), 1)).to(r.device)] if len(r) else r.new_zeros(width) for r in rows])
    return Rows(index, count.to(index.device))
