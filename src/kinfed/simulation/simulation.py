"""Simulation: the fleet that runs the clients' programs on this machine."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core.batches import Pool
from ..core.client import Client, Trainers
from ..core.fleet import Evaluation as Evaluation, Key as Key, raise_if_diverged
from ..core.method import Method, Roster
from ..core.mixins import Advises, Explains, Predicts, Solves, predict
from ..core.model import Model
from ..core.private.privacy import NoisedSteps
from ..core.private.private_client import StepCounter
from ..core.private.private_sums import protects_clients
from ..core.seeding import generator, tags
from ..core.sharing import divide, unwrap
from ..core.training import Training
from ..core.trees import Tree, model_of, nest, pack, pick
from ..data.federation import Federation
from ..errors import UsageError
from ..ops.gemm import fast_gemm
from .auto import choose, suits_onednn
from .clients import Clients
from .devices import pick_device
from .evaluation import Evaluator
from .execution import Execution
from .precision import check as check_precision, tf32
from .privacy_budget import Budget, ClientBudget, check_rows_are_separate
from .state_store import States

WATCHED = 8  # examples of a client on which it is tried which buffers training moves


class Simulation:
    """A fleet on this machine. Executors run the same programs in different ways and agree to rounding.

    `loop` runs client by client on `workers` threads (default: as many as PyTorch would use, so all cores): plain stack
    traces, any module, fastest for convolutions on a CPU. `vmap` runs `chunk` clients at a time as one batched program:
    for small dense models, and for a GPU. `fused` does so with plain SGD without autograd, if the model has such a form
    (`kinfed.ops.fused`): fastest for dense and recurrent models. Both use `workers` threads within operations. `auto`
    picks one by a rule (`kinfed.simulation.auto`), for rounds with this `share` of the clients, and says why in
    `reason`. Without a `chunk` it is 20 clients on a CPU, 64 in fused form or where a method without gradients has few
    rows, and on a GPU as many as half of its memory holds. A GPU has a single worker, whatever their number here.

    `onednn` says whether that library computes products on a CPU (default: by the rule in `kinfed.ops.gemm`).
    `precision` is that of local training: `float32`, `bf16`, or on a GPU `tf32`. `how` holds all settings that decide
    about rounding. Large tables of private states are files in `folder`, see `kinfed.simulation.state_store`.
    """

    def __init__(
        self,
        federation: Federation,
        model: Model,
        method: Method,
        training: Training,
        *,
        seed: int = 0,
        execution: Execution = Execution(),
        share: float = 1.0,
        folder: Path | None = None,
        rounds: int = 1,
    ) -> None:
        """`rounds` is in how many a client takes part at most, which decides about the noise of private training."""
        training.check(federation.task)
        self.device = pick_device(execution.device)
        executor, workers, chunk = execution.executor, execution.workers, execution.chunk
        precision = execution.precision or "float32"
        federation = federation.to(self.device)
        self.names, self.task, self._columns = federation.names, federation.task, federation.columns
        check_precision(precision, self.device, model.theta.dtype)
        if method is unwrap(method):
            method, model = divide(method, model.watch(federation.x[federation.rows["train"][0][:WATCHED]]))
        self.model, self.method, self.training, self.seed = model.to(self.device), method, training, seed
        if precision == "bf16":
            self.model = model.twin()  # the caller's model stays unchanged
            self.model.bf16 = True
        self.clients = Clients(
            names=federation.names,
            tags=tags(federation.names).to(self.device),
            rows=_set_aside(federation, method, seed),
            pool=Pool(federation.x, federation.y, federation.weights),
            task=federation.task,
            seed=seed,
        )
        if self.device.type != "cpu":
            workers = 1  # others share its one stream
        workers = workers or torch.get_num_threads()
        onednn = suits_onednn(self.model, training) if execution.onednn is None else execution.onednn
        cohort = max(1, round(share * len(self.clients)))
        self.how: dict[str, Any] = {"workers": workers, "chunk": chunk, "onednn": onednn, "precision": precision}
        with self._set_precision():
            self._run, self._why = choose(
                executor,
                self.clients,
                self.model,
                training,
                cohort,
                workers,
                chunk,
                Solves.from_method(method),
            )
        self.how |= {"executor": self._run.name, "chunk": getattr(self._run, "chunk", chunk)}
        self.how["device"] = str(self.device)
        # Weak: reference cycles would keep all examples in memory until the garbage collector runs.
        self._itself = itself = weakref.proxy(self)
        self._evaluator = Evaluator(self.clients, self.model, method, lambda *args: itself._run_all(*args), folder)
        self._folder, self.budget, self.client_budget = folder, None, None
        if protects_clients(training):
            assert training.noise is not None
            self.client_budget = ClientBudget(training.noise, method, rounds, len(self.clients))
        elif training.noise is not None:
            check_rows_are_separate(self.model, self.clients.pool.x[self.clients.rows["train"][0][:WATCHED]])
            self.budget = Budget(training.noise, method, rounds, self.names, self.clients.sizes["train"])

    @cached_property
    def states(self) -> States:
        """The clients' private states; a client's first one is what its method's `init_client` gives."""

        itself, method = self._itself, self.method

        def join(ids: Tensor) -> Tree:
            return itself._each(0, ids, itself._first(method.init_client))

        return States(len(self.clients), join, self.device, self._folder)

    @property
    def state(self) -> Tree:
        """[N, ...] all private states; if they are in files, zeros for clients that have none yet."""
        return self.states.tables

    @state.setter
    def state(self, state: Tree) -> None:
        self.states.restore((torch.arange(len(self.clients), device=self.device), state))

    @property
    def reason(self) -> str:
        """Why this executor was chosen, and what its preferred trainer could not train."""
        refusals = ", ".join(sorted(self._run.trainers.refusals))
        return f"{self._why}; vmap trains what has no fused form: {refusals}" if refusals else self._why

    @reason.setter
    def reason(self, why: str) -> None:
        self._why = why

    @property
    def executor(self) -> str:
        """The name of the executor that runs the clients' programs."""
        return self._run.name

    @property
    def sizes(self) -> Tensor:
        """[N] int64 training examples of each client, after what the method set aside."""
        return torch.tensor(self.clients.sizes["train"], device=self.device)

    @property
    def weights(self) -> Tensor | None:
        """[N] the sums of these examples' weights; None without any, and under privacy, as they depend on rows.

        They are 1 if clients are protected, because each must weigh the same.
        """
        if self.client_budget:
            return self.sizes.new_ones(len(self.clients), dtype=self.model.theta.dtype)
        weights = None if self.budget else self.clients.pool.weight
        return None if weights is None else torch.stack([weights[rows].sum() for rows in self.clients.rows["train"]])

    def client_statistics(self) -> Tree:
        """What every client reports before round 1, [N, ...]."""
        if type(unwrap(self.method)).client_statistics is Method.client_statistics:
            return ()
        everyone = torch.arange(len(self.clients), device=self.device)
        statistics = self._each(0, everyone, self._first(self.method.client_statistics))
        if self.client_budget:
            self.client_budget.check_statistics(statistics)
        return statistics

    def roster(self, graph: Any = None) -> Roster:
        """What the server knows before round 1."""
        return Roster(
            theta=self.model.theta,
            layout=self.model.layout,
            sizes=self.sizes,
            training=self.training,
            seed=self.seed,
            tags=self.clients.tags,
            graph=graph,
            client_statistics=self.client_statistics(),
            task=self.task,
            example_weights=self.weights,
            columns=() if self._columns is None else tuple(self._columns.sources),
        )

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Local training of the cohort: [K]; private states are kept here."""
        before = self.states.take(cohort)
        program = (
            self.method.train if self.budget is None else self._add_noise(self.budget, round, cohort, before, sent)
        )
        after, uploads = self._each(round, cohort, program, before, sent)
        # Before the states are replaced.
        raise_if_diverged(
            self.names, round, cohort, (after, uploads), Advises.from_method(self.method).remedy, model_of(uploads)
        )
        self.states.put(cohort, after, before)
        if self.client_budget:
            self.client_budget.uploads = bool(tree_leaves(uploads))
        return cohort, uploads

    def _add_noise(self, budget: Budget, round: int, cohort: Tensor, states: Tree, sent: Tree) -> Callable[..., Any]:
        """The method's program with as much noise as each client's budget asks for."""
        if not budget.is_planned:
            counter = Trainers(general=StepCounter())
            client = self.clients.restrict().get_client(int(cohort[0]), round, self.model, self.training, counter, None)
            budget.plan(client, tree_map(lambda table: table[0], states), pick(sent, 0))
            self.clients.noise = budget.noise.to(self.clients.noise)
        return budget.train

    def _first(self, program: Callable[[Client], Tree]) -> Callable[..., Tree]:
        """A program that runs before the first round."""
        return self.budget.restrict(program) if self.budget else lambda client, *_: program(client)

    def price_round(self, round: int, cohort: Tensor, sent: Tree) -> NoisedSteps:
        """The noised steps that a round takes of the first of the cohort: [K]; none if nothing is uploaded."""
        assert self.budget is not None
        self._add_noise(self.budget, round, cohort, self.states.take(cohort), sent)
        first = int(cohort[0])
        return self.budget.steps(self.budget.sizes[first], 1, float(self.budget.noise[first]))

    def describe_privacy(self, rounds: Sequence[int]) -> dict[str, Any] | None:
        """What uploads may reveal and have cost after so many rounds of each client; None without a limit."""
        if self.client_budget:
            return self.client_budget.describe(rounds)
        return self.budget.describe(rounds) if self.budget and self.budget.is_planned else None

    def row_weights(self, round: int, cohort: Tensor, sent: Tree) -> Tensor | None:
        """[K, k, n] by how much each training row counts in the sums that clients upload; None of other methods."""
        weigh = getattr(self.method, "row_weights", None)
        if weigh is None:
            return None
        return self._each(round, cohort, weigh, self.states.take(cohort), sent)

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation:
        """Scores of the cohort's models on validation and test examples."""
        with self._set_precision():
            scores = self._evaluator(round, cohort, self.states, sent)
        losses = {key: values for key, values in scores.scores.items() if key[2] == "loss"}
        # A model that is tuned to a client was not looked at before.
        raise_if_diverged(self.names, round, cohort, losses, Advises.from_method(self.method).remedy)
        return scores._replace(shares=self._read_shares(cohort))

    def _read_shares(self, cohort: Tensor) -> Tensor | None:
        """[K, C] by how much each of the cohort belongs to models that all share, as only private states know."""
        name = Explains.from_method(unwrap(self.method)).belongs
        tables = pack(self.state) if name else {}
        shares = tables.get(name, tables.get(f"inner.{name}"))
        return None if shares is None else shares[cohort.to(shares.device)]

    @property
    def own_ids(self) -> Tensor:
        """[N] the clients that this process simulates: all."""
        return torch.arange(len(self.clients), device=self.device)

    def answers(self, ids: Tensor, states: dict[str, Tensor], common: dict[str, Tensor], count: int) -> Tree:
        """[K, n, ...] inputs and outputs of clients ids: [K] for their first `count` test examples, or fewer.

        Their models, as they were scored, have the named fields `own`: [K, ...] and `common`: [...], see `trees.pack`.
        """
        states, common = ({name: t.to(self.device) for name, t in given.items()} for given in (states, common))
        count = min(count, *(self.clients.sizes["test"][i] for i in ids.tolist()))

        def program(client: Client, state: Tree, received: Tree) -> Tree:
            x = client.examples("test").x[:count]
            return x, predict(self.method, client.restrict(), nest({**common, **state}), x)

        with fast_gemm("off"), tf32(False):  # rounded as little as possible
            if states or isinstance(self.method, Predicts):
                return self._run(self.clients, self.model, self.training, 0, ids, program, states)
            x = torch.stack([self.clients.pool.x[self.clients.rows["test"][i][:count]] for i in ids.tolist()])
            return x, self.model(common["theta"], x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def _each(self, round: int, ids: Tensor, program: Callable[..., Any], states: Tree = (), sent: Tree = ()) -> Tree:
        """Run a client program once a client, see `Executor`."""
        return self._run_all(round, ids, program, states, sent, clients=self.clients.restrict())

    def _run_all(
        self,
        round: int,
        ids: Tensor,
        program: Callable[..., Any],
        states: Tree = (),
        sent: Tree = (),
        clients: Clients | None = None,
    ) -> Tree:
        """The same for a program that may see the examples that are for evaluation alone."""
        with self._set_precision():
            return self._run(clients or self.clients, self.model, self.training, round, ids, program, states, sent)

    @contextmanager
    def _set_precision(self) -> Iterator[None]:
        with fast_gemm("on" if self.how["onednn"] else "off"), tf32(self.how["precision"] == "tf32"):
            yield


def _set_aside(federation: Federation, method: Method, seed: int) -> dict[str, Sequence[Tensor]]:
    """Rows by split, with the method's feedback examples as `held_out`."""
    rows: dict[str, Sequence[Tensor]] = dict(federation.rows)
    name = type(unwrap(method)).__name__
    if method.feedback == "train":
        rows["held_out"] = rows["train"]
    elif method.feedback in ("validation", "test"):
        rows["held_out"] = rows[method.feedback]
    elif method.feedback == "held-out":
        short = [n for n, r in zip(federation.names, rows["train"], strict=True) if len(r) < 2]
        if short:
            raise UsageError(
                f"{name} sets a ninth of each client's training examples aside for feedback, but "
                f"client {', '.join(short[:5])} has only one; use feedback='train' or give these clients more"
            )
        held_out, trained = [], []
        for rows_of, tag in zip(rows["train"], tags(federation.names), strict=True):
            count = max(1, round(len(rows_of) / 9))
            order = torch.randperm(len(rows_of), generator=generator(seed, "held_out", int(tag))).to(rows_of.device)
            held_out.append(rows_of[order[:count]])
            trained.append(rows_of[order[count:]])
        rows |= {"held_out": held_out, "train": trained}
    elif method.feedback != "none":
        raise UsageError(f"feedback must be none, train, held-out, validation or test; got '{method.feedback}'")
    return rows
