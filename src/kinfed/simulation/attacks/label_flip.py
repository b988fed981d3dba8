"""Label flip: attackers train on wrong labels (Panacea, Lin et al., 2025)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.seeding import generator, tags
from ...core.tasks import Classification
from ...data.federation import Federation
from ...errors import UsageError
from .attack import Attack, exchange


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Each training label becomes one of the others, all with the same probability; other targets are shuffled."""

    def corrupt(self, federation: Federation, attackers: Tensor, seed: int) -> Federation:
        if isinstance(federation.task, Classification) and federation.task.classes < 2:
            raise UsageError("attack: labels of a single class cannot be flipped; choose another attack")
        made, marks = {}, tags(federation.names).tolist()
        for i in attackers.nonzero().squeeze(1).tolist():
            rows = federation.rows["train"][i]
            draw = generator(seed, "label_flip", marks[i])
            x, y = federation.x[rows], federation.y[rows]
            if isinstance(federation.task, Classification):
                classes = federation.task.classes
                y = (y + 1 + torch.randint(classes - 1, y.shape, generator=draw)) % classes
            else:
                y = y[torch.randperm(len(y), generator=draw)]
            made[i] = x, y
        return exchange(federation, "train", made)
