"""run: the round loop, the same for a simulation and for a real federation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .errors import RunError, UsageError
from .fleet import Fleet
from .method import Method, Roster
from .record import History
from .seeding import fold, key

Tree = Any


@dataclass(frozen=True)
class Participation:
    """The share of clients in a round; every `by_group`-th round that share of each hidden group (0: never)."""

    share: float = 1.0
    by_group: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"participation is the share of clients in a round, in (0, 1]; got {self.share}")
        if self.by_group < 0:
            raise UsageError(f"participation.by_group counts rounds, so it must be zero or more; got {self.by_group}")


def sample(roster: Roster, share: float, groups: Tensor | None = None) -> Tensor:
    """[K] sorted ids of this round's cohort, drawn without replacement; at least one client of each of groups: [N]."""
    groups = torch.zeros_like(roster.sizes) if groups is None else groups
    sizes = torch.bincount(groups)
    count = (share * sizes.double()).round().long().clamp(min=1)
    lots = fold(key(roster.seed, "cohort", roster.round, device=roster.tags.device), roster.tags)
    order = lots.argsort()
    order = order[groups[order].argsort(stable=True)]  # group by group, each in the order of its lots
    place = roster.everyone - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[place < count.repeat_interleave(sizes)].sort().values


def run(
    method: Method,
    roster: Roster,
    fleet: Fleet,
    history: History,
    *,
    rounds: int,
    participation: float | Participation = 1.0,
    groups: Tensor | None = None,
    server: Tree = None,
    begin: int = 0,
    after: Callable[[int, Tree], None] = lambda round, server: None,
) -> Tree:
    """Train for rounds `begin` to `rounds - 1` and return the server's last state.

    `groups: [N]` are for `participation` that draws from each. `server` is the state to go on from when `begin` is not
    0; `after(round, server)` is called when a round is over.
    """
    drawn = participation if isinstance(participation, Participation) else Participation(participation)
    if drawn.by_group and groups is None:
        raise UsageError(
            "participation.by_group draws from each hidden group, but these clients have none; use a partition that "
            "makes them, such as topologies or rotations, or leave by_group out"
        )
    if begin == 0:
        server = method.start(roster)
    for round in range(begin, rounds):
        roster = replace(roster, round=round)
        by_group = drawn.by_group and (round + 1) % drawn.by_group == 0
        cohort = sample(roster, drawn.share, groups if by_group else None)
        sent = method.send(roster, server, cohort)
        asked = cohort
        cohort, uploads = fleet.train(round, asked, sent)
        server = method.aggregate(roster, server, cohort, uploads)
        if not all(bool(torch.isfinite(t).all()) for t in tree_leaves(server) if t.is_floating_point()):
            raise RunError(f"round {round + 1}: the server's state holds NaN or infinity; lower the method's own rates")
        found = relation = notes = None
        if history.is_due(round, rounds):
            everyone = roster.everyone
            found = fleet.evaluate(round, everyone, method.send(roster, server, everyone))
            relation = method.relation(roster, server, cohort)
            replied = torch.isin(asked, cohort)
            notes = method.notes(roster, server, cohort, tree_map(lambda t, at=replied: t[at], sent), uploads)
        history.add(round, sent, uploads, found, relation, notes)
        after(round, server)
    history.settle()
    return server
