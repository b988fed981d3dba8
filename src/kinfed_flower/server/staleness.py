"""A wrapper around a method whose server ignores clients that have stopped replying until they are back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kinfed.core.graph import Relation, whole_relation
from kinfed.core.method import Around, Method, Roster
from kinfed.core.mixins import Lists, Solves
from kinfed.core.rows import put
from kinfed.core.seeding import fold, key, uniform
from kinfed.core.trees import Axis, PerClient, Tree, axes


class StalenessState(NamedTuple):
    """The method's server state, and which clients had stopped replying when it was made."""

    inner: Tree
    missed: PerClient  # [N] int64 rounds in a row in which a client did not reply


class StalenessWrapper(Around, Lists, Solves):
    """A method whose server ignores stale clients: those that missed rounds, until they reply again.

    The method is run on the tables of the others, as if there were nobody else; the rows of stale clients are kept and
    used again when they are back. With `decay=0` a client is stale as soon as it has missed a round; otherwise a client
    that missed k rounds is stale in a round with probability 1 - decay^k, drawn anew each round. Rows are whole: none
    are held as lists.
    """

    def __init__(self, method: Method, decay: float, missed: Callable[[], Tensor]) -> None:
        """`missed()` gives, [N] at the end of the round, how many rounds in a row clients did not reply."""
        self.method, self.decay, self.missed = method, decay, missed
        self.last_stale: Tensor | None = None  # [N] bool, who was stale when something was last sent

    @property
    def solves(self) -> bool:  # type: ignore[override]
        return Solves.from_method(self.method).solves

    def is_solved(self, server: Tree) -> bool:
        return not server.missed.any() and Solves.from_method(self.method).is_solved(server.inner)

    def stale(self, roster: Roster, server: Tree) -> Tensor:
        """[N] bool: who is ignored in this round; nobody if it would be everybody."""
        start = key(roster.seed, "stale", roster.round)
        draws = torch.stack([uniform(fold(start, tag), torch.empty(())) for tag in roster.tags])
        stale: Tensor = (draws >= self.decay**server.missed) & (server.missed > 0)
        return stale & ~stale.all()

    def start(self, roster: Roster) -> Tree:
        return StalenessState(self.method.start(roster), torch.zeros_like(roster.sizes))

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tree:
        missed = put(torch.zeros_like(roster.sizes), roster.others(newcomers), server.missed)
        return StalenessState(self.method.add_clients(roster, server.inner, newcomers), missed)

    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        """Rows of stale clients are zeros."""
        stale = self.last_stale = self.stale(roster, server)
        if not stale.any():
            return self.method.send(roster, server.inner, cohort)
        ids, place, inner = self._reduce(roster, server, ~stale)
        active = ~stale[cohort]
        rows = self.method.send(roster.part(ids), inner, place[cohort[active]])
        at = active.nonzero().squeeze(1)

        def widen(axis: Axis, t: Tensor) -> Tensor:
            return t if axis is Axis.SHARED else t.new_zeros(len(cohort), *t.shape[1:]).index_copy(0, at, t)

        return tree_map(widen, axes(rows), rows)

    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        stale = self.stale(roster, server)
        if not stale.any():
            return StalenessState(self.method.aggregate(roster, server.inner, cohort, uploads), self.missed())
        ids, place, inner = self._reduce(roster, server, ~stale)
        after = self.method.aggregate(roster.part(ids), inner, place[cohort], uploads)

        def restore(axis: Axis, before: Tensor, part: Tensor) -> Tensor:
            if axis is Axis.SHARED:
                return part
            if axis is Axis.PER_CLIENT:
                return put(before, ids, part)
            table = before.clone()
            table[..., ids[:, None], ids] = part
            return table

        return StalenessState(tree_map(restore, axes(after), server.inner, after), self.missed())

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Relation | None:
        stale = self.stale(roster, server)
        if not stale.any():
            return self.method.relation(roster, server.inner, cohort)
        ids, place, inner = self._reduce(roster, server, ~stale)
        part = self.method.relation(roster.part(ids), inner, place[cohort[~stale[cohort]]])
        if not isinstance(part, Tensor):
            return None
        part = whole_relation(part)
        relation = torch.eye(len(roster), dtype=part.dtype).expand(*part.shape[:-2], -1, -1).clone()
        relation[..., ids[:, None], ids] = part
        return relation

    def diagnostics(self, roster: Roster, server: Tree, cohort: Tensor, sent: Tree, uploads: Tree) -> dict[str, Tensor]:
        return self.method.diagnostics(roster, server.inner, cohort, sent, uploads)

    def train(self, client: Any, state: Tree, received: Tree) -> tuple[Tree, Tree]:
        raise NotImplementedError("the client's half runs at the sites")

    def personalise(self, client: Any, state: Tree, received: Tree) -> dict[str, Tree]:
        raise NotImplementedError("the client's half runs at the sites")

    def _reduce(self, roster: Roster, server: Tree, active: Tensor) -> tuple[Tensor, Tensor, Tree]:
        """[M] ids of the active clients, [N] their place among these, and the state of these."""
        ids = active.nonzero().squeeze(1)
        place = put(torch.full_like(roster.sizes, -1), ids, torch.arange(len(ids)))

        def select(axis: Axis, t: Tensor) -> Tensor:
            if axis is Axis.PAIRWISE:
                return t[..., ids[:, None], ids]
            return t if axis is Axis.SHARED else t[ids]

        return ids, place, tree_map(select, axes(server.inner), server.inner)
