"""Whom to look at among many clients: those whose updates have sketches most like one's own."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ...core.method import Roster
from ...core.seeding import fold, key, normal
from ...ops.sketch import SIZE, candidates, sketch_models


def width(count: int) -> int:
    """How many numbers a sketch has; none if everyone is looked at, which `count` = 0 says."""
    return SIZE if count else 0


def sketched(roster: Roster, change: Tensor, count: int) -> Tensor:
    """[K, s] sketches of the directions of updates: [K, d]."""
    if not count:
        return change.new_zeros(len(change), 0)
    draw = key(roster.seed, "fedaghn.sketch", device=change.device)  # one for all rounds: old ones are compared
    return F.normalize(sketch_models(change, draw, roster.layout.trainable_on(change.device)))


def look(roster: Roster, sketch: Tensor, seen: Tensor, cohort: Tensor, count: int) -> Tensor | None:
    """[K, M] int64 whom each of the cohort looks at, itself and then up to `count` others; None for everyone.

    sketch: [N, s]. Who has no update of its own, by seen: [N], looks at anyone.
    """
    if not count:
        return None
    draw = fold(key(roster.seed, "fedaghn.look", roster.round, device=roster.tags.device), roster.tags[cohort])
    anyone = vmap(lambda mine: normal(mine, sketch[0]))(draw)
    like = torch.where(seen[cohort, None], sketch[cohort], anyone)
    return torch.cat([cohort[:, None], candidates(like, sketch, cohort, count, seen | ~seen.any())], 1)
