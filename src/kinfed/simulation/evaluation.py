"""Evaluation: scores of every named model of many clients, and these models while they may still be chosen."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from ..core.batches import Rows
from ..core.client import Client
from ..core.fleet import Evaluation
from ..core.method import Method
from ..core.model import Model
from ..core.tables import index, pick
from ..core.trees import Tree
from ..errors import is_out_of_memory
from .clients import Clients
from .gather import Gathered
from .state_store import mapped
from .workers import alike

EVALUATED = ("validation", "test", "triggered")  # the last only where a backdoor is tried
BLOCK = 512  # examples in one pass through a model
GROUP, BYTES = 256, 1 << 28  # the most clients, and bytes of their models, that are dealt with together
KEPT = 1 << 30  # bytes of models that are kept until it is known which are chosen; larger ones are then made again


class Evaluator:
    """Scores models on their clients' validation and test examples, as far as there are any.

    A model that all clients share goes once over all their examples. Others are run by the executor, client by client
    or batched. All is done for a group of clients at a time, so that memory grows with the group.
    """

    def __init__(
        self, clients: Clients, model: Model, method: Method, each: Callable[..., Tree], folder: Path | None = None
    ) -> None:
        """`each(round, ids, program, *trees)` runs a program for each of ids: [k], with its row of trees: [k, ...].

        Models too large to be kept are made in files in `folder`.
        """
        self._clients, self._model, self._method, self._each, self._folder = clients, model, method, each, folder
        self._splits = [split for split in EVALUATED if split in clients.sizes and all(clients.sizes[split])]

    def __call__(self, round: int, cohort: Tensor, states: Callable[[Tensor], Tree], sent: Tree) -> Evaluation:
        """Evaluate cohort: [K]; `states(ids)` are private states, `sent` is what it received, [K, ...]."""
        plain = type(self._method).predict is Method.predict
        repeated = [leaf.stride(0) == 0 for leaf in tree_leaves(sent)]
        shared: dict[str, Tree | None] = {}  # by name, headline first: where in `sent` to find it, None if personal
        keep, alike = True, False

        def program(client: Client, mine: Tree, received: Tree) -> Tree:
            places = {id(leaf): i for i, leaf in enumerate(tree_leaves(received)) if repeated[i]}
            outputs, models = {}, {}
            for name, personal in self._method.personalise(client.limited(), mine, received).items():
                common = plain and all(id(leaf) in places for leaf in tree_leaves(personal))
                shared[name] = tree_map(lambda leaf: places[id(leaf)], personal) if common else None
                if not common:
                    outputs[name], models[name] = self._outputs(client, personal, widths), personal
            if not outputs:
                raise _Alike
            return outputs, models if keep else {}

        scores, models = Gathered(len(cohort)), Gathered(len(cohort))
        for places in self._groups(cohort):
            ids = cohort[places]
            widths = {split: max(self._clients.sizes[split][i] for i in ids.tolist()) for split in self._splits}
            outputs, personal = {}, {}
            if not alike:
                try:
                    outputs, personal = self._each(round, ids, program, states(ids), _rows(sent, places))
                except _Alike:
                    alike = True
            common = {name: _find(sent, where) for name, where in shared.items() if where is not None}
            outputs |= {name: self._pooled(tree.theta[0], ids) for name, tree in common.items()}
            scores.put(places, {name: self._score(ids, outputs[name]) for name in shared})
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
            return Evaluation(keyed, {name: (models.tree() | common)[name] for name in shared})
        return Evaluation(
            keyed, _Again(shared, lambda name: self._again(name, shared[name], round, cohort, states, sent))
        )

    def _again(
        self, name: str, where: Tree, round: int, cohort: Tensor, states: Callable[[Tensor], Tree], sent: Tree
    ) -> Tree:
        """[K, ...] one of the named models of the cohort; if all share it, `where` in `sent` it is."""
        if where is not None:
            return _find(sent, where)

        def program(client: Client, mine: Tree, received: Tree) -> Tree:
            return self._method.personalise(client.limited(), mine, received)[name]

        models = Gathered(len(cohort), lambda count, like: mapped(count, like, self._folder)[0])
        for places in self._groups(cohort):
            ids = cohort[places]
            found = self._each(round, ids, program, states(ids), _rows(sent, places))
            models.put(places if isinstance(places, slice) else places.cpu(), tree_map(Tensor.cpu, found))
        return models.tree()

    def _groups(self, cohort: Tensor) -> Iterator[slice | Tensor]:
        """Places in the cohort, see `index`, of clients with about as many examples."""
        sizes = [sum(self._clients.sizes[split][i] for split in self._splits) for i in cohort.tolist()]
        most = max(1, min(GROUP, BYTES // self._model.theta.nbytes))
        for group in alike(sizes, most):
            yield index(group, cohort.device)

    def _outputs(self, client: Client, personal: Tree, widths: dict[str, int]) -> dict[str, Tensor]:
        """By split, [n, ...] outputs for the client's examples, filled up to the widths."""
        x = [client.examples(split).x for split in self._splits]
        parts = [self._method.predict(client.limited(), personal, part) for part in torch.cat(x).split(BLOCK)]
        found = zip(self._splits, torch.cat(parts).split([len(part) for part in x]), strict=True)
        return {s: torch.cat([t, t.new_zeros(widths[s] - len(t), *t.shape[1:])]) for s, t in found}

    def _pooled(self, theta: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """By split, [k, n, ...] outputs of one model: [d] for the examples of all these clients."""
        rows = self._clients.several(ids)[1]
        real = {split: _real(rows[split]) for split in self._splits}
        at = torch.cat([rows[split].at[real[split]] for split in self._splits])
        tensors = self._model.layout.tensors(theta)
        parts = torch.cat([self._predicted(tensors, block) for block in at.split(BLOCK)])
        found = {}
        for split, part in zip(self._splits, parts.split([int(r.sum()) for r in real.values()]), strict=True):
            found[split] = part.new_zeros(*real[split].shape, *part.shape[1:])
            found[split][real[split]] = part
        return found

    def _predicted(self, tensors: dict[str, Tensor], at: Tensor) -> Tensor:
        """[n, ...] outputs for the examples at: [n]; where a device's memory does not hold all, for half and half."""
        try:
            return self._model.predict(tensors, self._clients.pool.x[at])
        except RuntimeError as problem:
            if len(at) == 1 or not is_out_of_memory(problem):
                raise
        return torch.cat([self._predicted(tensors, half) for half in at.tensor_split(2)])

    def _score(self, ids: Tensor, outputs: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """By split and metric, [k] scores of outputs: [k, n, ...]."""
        rows, found = self._clients.several(ids)[1], {}
        for split, values in outputs.items():
            weight = _real(rows[split]).to(values.dtype)
            found[split] = vmap(self._clients.task.score)(values, self._clients.pool.y[rows[split].at], weight)
        return found


class _Alike(CancelledError):
    """No client has a model of its own, so that nobody else need be asked.

    To executors it is the end of what they were asked for, and not a client's failure, which goes before it.
    """


class _Again(Mapping[str, Tree]):
    """Models by name, each made when it is asked for."""

    def __init__(self, names: Mapping[str, Any], make: Callable[[str], Tree]) -> None:
        self._names, self._make = list(names), make

    def __getitem__(self, name: str) -> Tree:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _rows(tree: Tree, at: slice | Tensor) -> Tree:
    return tree_map(lambda table: pick(table, at), tree)


def _find(sent: Tree, where: Tree) -> Tree:
    leaves = tree_leaves(sent)
    return tree_map(lambda i: leaves[i], where)


def _real(rows: Rows) -> Tensor:
    """[k, n] bool: which of the clients' rows are not there only to fill up."""
    return torch.arange(rows.at.shape[1], device=rows.at.device) < rows.size[:, None]
