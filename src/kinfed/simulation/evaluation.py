"""Evaluation: scores of every named model of many clients, and the models, as they may still be chosen."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.func import vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..core import trees
from ..core.batches import is_real
from ..core.client import Client
from ..core.fleet import Evaluation
from ..core.method import Method
from ..core.mixins import Predicts, predict
from ..core.model import Model
from ..core.rows import Part, Table, index
from ..core.trees import Axis, Tree
from ..errors import UsageError, lacks_gpu_memory
from .client_tables import Gathered
from .clients import Clients
from .state_store import RowFile, States
from .workers import group_by_size

EVALUATED = ("validation", "test", "triggered")  # the last only under a backdoor attack
BLOCK = 512  # examples in one pass through a model
GROUP, BYTES = 256, 1 << 28  # the most clients, and bytes of their models, processed together
KEPT = 1 << 30  # bytes of models kept until it is known which are chosen; larger ones are then computed again


class Evaluator:
    """Scores models on their clients' validation and test examples, if there are any.

    A model that all clients share is applied once to all their examples. Others are run by the executor, client by
    client or batched. Clients are processed in groups, so that memory is limited by the group's size.
    """

    def __init__(
        self, clients: Clients, model: Model, method: Method, run_each: Callable[..., Tree], folder: Path | None = None
    ) -> None:
        """`run_each(round, ids, program, states, sent)` runs a program for each of ids: [k], see `Executor`.

        Models too large for memory are kept in files in `folder`.
        """
        self._clients, self._model, self._method, self._each, self._folder = clients, model, method, run_each, folder
        self._splits = [split for split in EVALUATED if split in clients.sizes and all(clients.sizes[split])]

    def __call__(self, round: int, cohort: Tensor, states: States, sent: Tree) -> Evaluation:
        """Evaluate cohort: [K], by its private states; `sent` is the message to it."""
        plain = not isinstance(self._method, Predicts)
        forms: dict[str, _Form] = {}  # by name, headline first
        strange: dict[int, Tree] = {}  # by name, models of all clients of a group, by its first client
        names = set[tuple[str, ...]]()  # of models, as each client has them
        keep, shared = True, False

        def program(client: Client, state: Tree, received: Tree) -> Tree:
            outputs, models = {}, {}
            named = self._method.personalise(client.restrict(), state, received)
            names.add(tuple(named))
            for name, personal in named.items():
                models[name], forms[name] = _split_own(name, personal)
                if models[name] or not plain:
                    outputs[name] = self._outputs(client, personal, widths)
            if not outputs:
                raise _Alike
            return outputs, models if keep else {}

        scores, models = Gathered(len(cohort)), Gathered(len(cohort))
        for places in self._groups(cohort, states):
            ids = cohort[places]
            widths = {split: max(self._clients.sizes[split][i] for i in ids.tolist()) for split in self._splits}
            outputs, personal = ({}, {}) if shared else self._pass_on(round, ids, places, states, sent, forms)
            if outputs:
                names.add(tuple(outputs))
                strange[int(ids[0])] = personal
            elif not shared:
                try:
                    outputs, personal = self._each(round, ids, program, states.take(ids), trees.pick(sent, places))
                except _Alike:
                    shared = True
            _check_names(names)
            for name in forms.keys() - outputs.keys():
                outputs[name] = self._predict_pooled(_join_own((), forms[name]).theta, ids)
            scores.put(places, {name: self._score(ids, outputs[name]) for name in forms})
            keep = keep and sum(t.nbytes // len(ids) for t in tree_leaves(personal)) * len(cohort) <= KEPT
            if keep:
                models.put(places, personal)
        keyed = {
            (name, split, metric): values
            for name, by_split in scores.tree().items()
            for split, by_metric in by_split.items()
            for metric, values in by_metric.items()
        }
        if keep:
            personal = {} if shared else models.tree()
            return Evaluation(keyed, {name: _join_own(personal.get(name, ()), form) for name, form in forms.items()})
        return Evaluation(
            keyed, _Again(forms, lambda name: self._again(name, forms[name], round, cohort, states, sent, strange))
        )

    def _pass_on(
        self, round: int, ids: Tensor, places: slice | Tensor, states: States, sent: Tree, forms: dict[str, "_Form"]
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, tuple[Tensor, ...]]]:
        """By name, outputs and models, [k, ...], of ids: [k], who have never taken part and are sent the same.

        Nothing unless their first states are the first model, and `personalise` hands that or the message on, the same
        for each. All of them are asked, and no tables are made.
        """
        if len(ids) < 2 or isinstance(self._method, Predicts) or states.joined[ids].any():
            return {}, {}
        received = trees.pick(sent, places)
        leaves, axes = tree_leaves(received), tree_leaves(trees.axes(received))
        if not all(axis is Axis.SHARED or _has_equal_rows(t) for t, axis in zip(leaves, axes, strict=True)):
            return {}, {}
        handed, made = set[tuple[tuple[str, tuple[int, ...]], ...]](), list[Tensor]()

        def program(client: Client, _: Tree, received: Tree) -> Tensor:
            given = [id(t) for t in (client.model.theta, *tree_leaves(received))]
            state = self._method.init_client(client.restrict())
            models = dict[str, tuple[Tensor, ...]]()
            for name, personal in self._method.personalise(client.restrict(), state, received).items():
                models[name], forms[name] = _split_own(name, personal)
            made.extend(t for t in tree_leaves(state) if id(t) != given[0])
            made.extend(t for t in tree_leaves(models) if id(t) not in given)
            handed.add(
                tuple((name, tuple(given.index(id(t)) for t in parts)) for name, parts in models.items() if not made)
            )
            return client.model.theta[:0]

        self._each(round, ids, program, (), received)
        rows = [t if axis is Axis.SHARED else t[0] for t, axis in zip(leaves, axes, strict=True)]
        rows, (first, *others) = [self._model.theta, *rows], handed
        if made or others:
            return {}, {}
        parts = {name: tuple(rows[i] for i in at) for name, at in first}
        outputs = {name: self._predict_pooled(_join_own(parts[name], forms[name]).theta, ids) for name in parts}
        return outputs, {name: tuple(t.expand(len(ids), *t.shape) for t in rows) for name, rows in parts.items()}

    def _again(
        self,
        name: str,
        form: "_Form",
        round: int,
        cohort: Tensor,
        states: States,
        sent: Tree,
        strange: Mapping[int, Tree],
    ) -> Tree:
        """[K, ...] one of the named models of the cohort; the parts that are each client's own are computed again."""
        if all(leaf is not None for leaf in form.leaves):
            return _join_own((), form)

        def program(client: Client, state: Tree, received: Tree) -> Tree:
            return _split_own(name, self._method.personalise(client.restrict(), state, received)[name])[0]

        everyone = torch.arange(len(cohort))
        files, places_of, common = list[RowFile](), everyone.clone(), everyone[:0]
        for places in self._groups(cohort, states):
            ids, at = cohort[places], everyone[places if isinstance(places, slice) else places.cpu()]
            if handed := strange.get(int(ids[0])):
                personal, same = tuple(rows[:1] for rows in handed[name]), at
                repeats = len(common) and all(
                    torch.equal(f.table[common], r.cpu()) for f, r in zip(files, personal, strict=True)
                )
                at = common = common if repeats else at[:1]
                places_of[same] = common
            else:
                personal = self._each(round, ids, program, states.take(ids), trees.pick(sent, places))
            files = files or [RowFile(len(cohort), rows, self._folder) for rows in personal]
            for file, rows in zip(files, personal, strict=True):
                file.write(at, rows.cpu())
        repeated = not torch.equal(places_of, everyone)
        return _join_own(tuple(Part(f.table, places_of) if repeated else f.table for f in files), form)

    def _groups(self, cohort: Tensor, states: States) -> Iterator[slice | Tensor]:
        """Places in the cohort, see `index`, of clients with about as many examples; of those without a state apart."""
        sizes = [sum(self._clients.sizes[split][i] for split in self._splits) for i in cohort.tolist()]
        most = max(1, min(GROUP, BYTES // self._model.theta.nbytes))
        joined = states.joined[cohort]
        for part in (joined.nonzero().squeeze(1).tolist(), (~joined).nonzero().squeeze(1).tolist()):
            for group in group_by_size([sizes[place] for place in part], most) if part else ():
                yield index([part[i] for i in group], cohort.device)

    def _outputs(self, client: Client, personal: Tree, widths: dict[str, int]) -> dict[str, Tensor]:
        """By split, [n, ...] outputs for the client's examples, padded to the widths."""
        x = [client.examples(split).x for split in self._splits]
        parts = [predict(self._method, client.restrict(), personal, part) for part in torch.cat(x).split(BLOCK)]
        outputs = zip(self._splits, torch.cat(parts).split([len(part) for part in x]), strict=True)
        return {s: torch.cat([t, t.new_zeros(widths[s] - len(t), *t.shape[1:])]) for s, t in outputs}

    def _predict_pooled(self, theta: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """By split, [k, n, ...] outputs of one model: [d] for the examples of all these clients."""
        rows = self._clients.several(ids)[1]
        real = {split: is_real(rows[split]) for split in self._splits}
        at = torch.cat([rows[split].at[real[split]] for split in self._splits])
        tensors = self._model.tensors(theta)
        parts = torch.cat([self._predict_outputs(tensors, block) for block in at.split(BLOCK)])
        outputs = {}
        for split, part in zip(self._splits, parts.split([int(r.sum()) for r in real.values()]), strict=True):
            outputs[split] = part.new_zeros(*real[split].shape, *part.shape[1:])
            outputs[split][real[split]] = part
        return outputs

    def _predict_outputs(self, tensors: dict[str, Tensor], at: Tensor) -> Tensor:
        """[n, ...] outputs for the examples at: [n]; in two halves if the device runs out of memory."""
        try:
            return self._model.predict(tensors, self._clients.pool.x[at])
        except RuntimeError as problem:
            if len(at) == 1 or not lacks_gpu_memory(problem):
                raise
        return torch.cat([self._predict_outputs(tensors, half) for half in at.tensor_split(2)])

    def _score(self, ids: Tensor, outputs: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """By split and metric, [k] scores of outputs: [k, n, ...]."""
        rows, scores = self._clients.several(ids)[1], {}
        for split, values in outputs.items():
            _, y, weights = self._clients.pool
            at, weight = rows[split].at, is_real(rows[split]).to(values.dtype)
            if weights is not None:  # over their mean, so that a score may take a sum of weights for a count
                counted = weight * weights[at]
                weight = counted * (weight.sum(1) / counted.sum(1))[:, None]
            scores[split] = vmap(self._clients.task.score)(values, y[at], weight)
        return scores


class _Alike(CancelledError):
    """No client has a model of its own, so no other client needs to be evaluated.

    For executors it ends the work without being a client's failure, which takes precedence.
    """


class _Again(Mapping[str, Tree]):
    """Models by name, each computed on access."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tree]) -> None:
        self._names, self._make = list(names), make

    def __getitem__(self, name: str) -> Tree:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Form(NamedTuple):
    """A named model without the parts that are each client's own."""

    structure: TreeSpec
    leaves: list[Tensor | None]  # the tensors that all clients share; None for a client's own


def _check_names(names: set[tuple[str, ...]]) -> None:
    """Raise UsageError unless all clients name the same models."""
    if len(names) > 1:
        sets = " and ".join(sorted(map(", ".join, names)))
        raise UsageError(f"personalise names other models for some clients: {sets}; name the same for all")


def _has_equal_rows(table: Tensor) -> bool:
    """Whether all rows of a table: [k, ...] are equal."""
    return table.stride(0) == 0 or bool((table == table[:1]).all())


def _split_own(name: str, personal: Tree) -> tuple[tuple[Tensor, ...], _Form]:
    """The tensors of a client's model that are its own, and the rest of the model."""
    leaves, structure = tree_flatten(personal)
    shared = [axis is Axis.SHARED for axis in tree_leaves(trees.axes(personal))]
    rest = [leaf if common else None for leaf, common in zip(leaves, shared, strict=True)]
    if any(leaf is not None and is_batchedtensor(leaf) for leaf in rest):
        raise UsageError(
            f"the model '{name}' is declared as shared but differs between clients: return it as kinfed.Params"
        )
    return tuple(leaf for leaf, common in zip(leaves, shared, strict=True) if not common), _Form(structure, rest)


def _join_own(leaves: tuple[Table, ...], form: _Form) -> Tree:
    """The models whose client-specific tensors, as split off by `_split_own`, are `own`: [K, ...] each."""
    tables = iter(leaves)
    return tree_unflatten([next(tables) if leaf is None else leaf for leaf in form.leaves], form.structure)
