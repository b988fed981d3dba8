"""run: the round loop, the same for a simulation and for a real federation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .errors import RunError
from .fleet import Fleet
from .method import Method, Roster
from .record import History
from .seeding import fold, key

Tree = Any


def sample(roster: Roster, participation: float) -> Tensor:
    """[K] sorted ids of this round's cohort, drawn without replacement; at least one client."""
    count = max(1, round(participation * len(roster)))
    if count == len(roster):
        return roster.everyone
    lots = fold(key(roster.seed, "cohort", roster.round, device=roster.tags.device), roster.tags)
    return lots.argsort()[:count].sort().values


def run(
    method: Method,
    roster: Roster,
    fleet: Fleet,
    history: History,
    *,
    rounds: int,
    participation: float = 1.0,
    server: Tree = None,
    begin: int = 0,
    after: Callable[[int, Tree], None] = lambda round, server: None,
) -> Tree:
    """Train for rounds `begin` to `rounds - 1` and return the server's last state.

    `server` is the state to go on from when `begin` is not 0; `after(round, server)` is called when a round is over.
    """
    if begin == 0:
        server = method.start(roster)
    for round in range(begin, rounds):
        roster = replace(roster, round=round)
        cohort = sample(roster, participation)
        sent = method.send(roster, server, cohort)
        cohort, uploads = fleet.train(round, cohort, sent)
        server = method.aggregate(roster, server, cohort, uploads)
        if not all(bool(torch.isfinite(t).all()) for t in tree_leaves(server) if t.is_floating_point()):
            raise RunError(f"round {round + 1}: the server's state holds NaN or infinity; lower the method's own rates")
        found = relation = None
        if history.is_due(round, rounds):
            everyone = roster.everyone
            found = fleet.evaluate(round, everyone, method.send(roster, server, everyone))
            relation = method.relation(roster, server, cohort)
        history.add(round, sent, uploads, found, relation)
        after(round, server)
    return server
