"""Members: what becomes of the server's tables when clients join, fall silent or come back."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..core.graph import Origin
from ..core.history import History
from ..core.method import Method, Roster
from ..core.seeding import fold, key, uniform
from ..core.tables import put
from ..core.trees import Tree


def lengthen(history: History, names: Sequence[str]) -> None:
    """Make room in a history for clients added at the end; they have no scores in the rounds before."""
    more = len(names) - len(history.names)
    history.names = tuple(names)

    def pad(t: Tensor, counting: int, value: float) -> Tensor:
        return torch.nn.functional.pad(t, (0, more) * counting, value=value)

    history.scores = [{k: pad(v, 1, torch.nan) for k, v in scores.items()} for scores in history.scores]
    history.relations = [pad(relation, 2, 0.0) for relation in history.relations]
    history.diagnostics = [
        {k: pad(v, 1, torch.nan) if v.ndim else v for k, v in diagnostics.items()}
        for diagnostics in history.diagnostics
    ]


class Axes(tuple[int, ...]):
    """The axes of one tensor that count clients; not a plain tuple, so that a tree of them looks like the state."""


class Heard(NamedTuple):
    """The server's state, and who was missing when it was made."""

    inner: Tree
    missed: Tensor  # [N] int64 rounds in a row that a client did not answer


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
        return tree_map(lambda t: t.new_zeros(len(cohort), *t.shape[1:]).index_copy(0, at, t), rows)

    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        out = self.silent(roster, server)
        if not out.any():
            return Heard(self.method.aggregate(roster, server.inner, cohort, uploads), self.missed())
        ids, place, inner = self._reduce(roster, server, ~out)
        after = self.method.aggregate(roster.part(ids), inner, place[cohort], uploads)

        def restore(whole: Tensor, part: Tensor, counting: Axes) -> Tensor:
            if not counting:
                return part
            shape = [whole.shape[i] if i in counting else n for i, n in enumerate(part.shape)]
            table = whole.clone() if list(whole.shape) == shape else part.new_zeros(shape)
            index = [ids.view(-1, *[1] * (len(counting) - 1 - counting.index(i))) for i in counting]
            table[tuple(index[counting.index(i)] if i in counting else slice(None) for i in range(table.ndim))] = part
            return table

        return Heard(tree_map(restore, server.inner, after, self._axes(roster)), self.missed())

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        out = self.silent(roster, server)
        if not out.any():
            return self.method.relation(roster, server.inner, cohort)
        ids, place, inner = self._reduce(roster, server, ~out)
        part = self.method.relation(roster.part(ids), inner, place[cohort[~out[cohort]]])
        if part is None:
            return None
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

        def select(t: Tensor, counting: Axes) -> Tensor:
            for axis in counting:
                t = t.index_select(axis, ids)
            return t

        return ids, place, tree_map(select, server.inner, self._axes(roster))

    def _axes(self, roster: Roster) -> Tree:
        """For each tensor of the state, the axes that would be one longer in the first state with one client more."""
        more, count = torch.cat((roster.everyone, roster.everyone[:1])), len(roster)

        def differing(a: Tensor, b: Tensor) -> Axes:
            sizes = zip(a.shape, b.shape, strict=True)
            return Axes(i for i, (m, n) in enumerate(sizes) if (m, n) == (count, count + 1))

        return tree_map(differing, self.method.start(roster), self.method.start(roster.part(more)))
