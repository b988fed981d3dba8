"""Several models to start from, where all would stay equal if they began as one."""

from torch import Tensor

from ...core.method import Roster
from ...core.seeding import fold, key, uniform


def shuffle_models(roster: Roster, count: int) -> Tensor:
    """[count, d] models whose learned tensors hold the numbers of the initial model in an order of their own."""
    models = roster.theta.repeat(count, 1)
    for number, entry in enumerate(e for e in roster.layout.entries if e.trainable):
        start = key(roster.seed, "ifca", number, device=models.device)
        for c, model in enumerate(models):
            part = model[entry.at]
            part.copy_(part[uniform(fold(start, c), part.double()).argsort()])
    return models
