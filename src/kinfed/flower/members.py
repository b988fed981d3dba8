"""Members: what becomes of the server's tables when clients join, fall silent or come back."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..core.graph import Origin, whole_relation
from ..core.history import History
from ..core.method import Method, Roster
from ..core.seeding import fold, key, uniform
from ..core.tables import put
from ..core.trees import Axis, PerClient, Tree, axes


def lengthen(history: History, names: Sequence[str]) -> None:
    """Make room in a history for clients added at the end; they have no scores in the rounds before."""
    more = len(names) - len(history.names)
    history.names = tuple(names)

    def pad(t: Tensor, counting: int, value: float) -> Tensor:
        return torch.nn.functional.pad(t, (0, more) * counting, value=value)

    history.scores = [{k: pad(v, 1, torch.nan) for k, v in scores.items()} for scores in history.scores]
    history.kept_relations = [pad(relation, 2, 0.0) for relation in history.relations]
    history.diagnostics = [
        {k: pad(v, 1, torch.nan) if v.ndim else v for k, v in diagnostics.items()}
        for diagnostics in history.diagnostics
    ]


class Heard(NamedTuple):
    """The server's state, and who was missing when it was made."""

    inner: Tree
    missed: PerClient  # [N] int64 rounds in a row that a client did not answer


class Attentive(Method):
    """A method whose server leaves clients that have fallen silent out of its sums until they are back.

    Left out means that the method is run on the tables of the others, as if there were nobody else; their rows are kept
    and come back with them. `decay=0` leaves a client out as soon as it missed a round; otherwise a client that missed
    k rounds is left out of a round with probability 1 - decay^k, drawn anew each round.
    """

    def __init__(self, method: Method, decay: float, missed: Callable[[], Tensor]) -> None:
        """`missed()` gives, [N] at the end of the round, how many rounds in a row clients did not answer."""
        self.method, self.decay, self.missed = method, decay, missed
        self.out: Tensor | None = None  # [N] bool, who was left out of what was sent last: the fleet must not send it

    def origin_of(self, roster: Roster) -> Origin:
        return self.method.origin_of(roster)

    def silent(self, roster: Roster, server: Tree) -> Tensor:
        """[N] bool: who is left out of this round."""
        start = key(roster.seed, "stale", roster.round)
        lots = torch.stack([uniform(fold(start, tag), torch.empty(())) for tag in roster.tags])
        out: Tensor = (lots >= self.decay**server.missed) & (server.missed > 0)
        return out & ~out.all()

    def start(self, roster: Roster) -> Tree:
        return Heard(self.method.start(roster), torch.zeros_like(roster.sizes))

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tree:
        missed = put(torch.zeros_like(roster.sizes), roster.others(newcomers), server.missed)
        return Heard(self.method.add_clients(roster, server.inner, newcomers), missed)

    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        """Rows of clients that are left out are zeros."""
        out = self.out = self.silent(roster, server)
        if not out.any():
            return self.method.send(roster, server.inner, cohort)
        ids, place, inner = self._reduce(roster, server, ~out)
        heard = ~out[cohort]
        rows = self.method.send(roster.part(ids), inner, place[cohort[heard]])
        at = heard.nonzero().squeeze(1)

        def widen(axis: Axis, t: Tensor) -> Tensor:
            return t if axis is Axis.SHARED else t.new_zeros(len(cohort), *t.shape[1:]).index_copy(0, at, t)

        return tree_map(widen, axes(rows), rows)

    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        out = self.silent(roster, server)
        if not out.any():
            return Heard(self.method.aggregate(roster, server.inner, cohort, uploads), self.missed())
        ids, place, inner = self._reduce(roster, server, ~out)
        after = self.method.aggregate(roster.part(ids), inner, place[cohort], uploads)

        def restore(axis: Axis, whole: Tensor, part: Tensor) -> Tensor:
            if axis is Axis.SHARED:
                return part
            if axis is Axis.PER_CLIENT:
                return put(whole, ids, part)
            table = whole.clone()
            table[..., ids[:, None], ids] = part
            return table

        return Heard(tree_map(restore, axes(after), server.inner, after), self.missed())

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        out = self.silent(roster, server)
        if not out.any():
            return self.method.relation(roster, server.inner, cohort)
        ids, place, inner = self._reduce(roster, server, ~out)
        part = self.method.relation(roster.part(ids), inner, place[cohort[~out[cohort]]])
        if part is None:
            return None
        part = whole_relation(part)
        whole = torch.eye(len(roster), dtype=part.dtype).expand(*part.shape[:-2], -1, -1).clone()
        whole[..., ids[:, None], ids] = part
        return whole

    def diagnostics(self, roster: Roster, server: Tree, cohort: Tensor, sent: Tree, uploads: Tree) -> dict[str, Tensor]:
        return self.method.diagnostics(roster, server.inner, cohort, sent, uploads)

    def train(self, client: Any, state: Tree, received: Tree) -> tuple[Tree, Tree]:
        raise NotImplementedError("the client's half runs at the sites")

    def personalise(self, client: Any, state: Tree, received: Tree) -> dict[str, Tree]:
        raise NotImplementedError("the client's half runs at the sites")

    def _reduce(self, roster: Roster, server: Tree, heard: Tensor) -> tuple[Tensor, Tensor, Tree]:
        """[M] ids of who is heard, [N] their place among these, and the state of these."""
        ids = heard.nonzero().squeeze(1)
        place = put(torch.full_like(roster.sizes, -1), ids, torch.arange(len(ids)))

        def select(axis: Axis, t: Tensor) -> Tensor:
            if axis is Axis.PAIRWISE:
                return t[..., ids[:, None], ids]
            return t if axis is Axis.SHARED else t[ids]

        return ids, place, tree_map(select, axes(server.inner), server.inner)
