"""Backdoor: attackers teach a pattern that stands for one label (blended; Panacea, Lin et al., 2025, Table V)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ...core.field_checks import CountOrZero, In
from ...core.seeding import generator, key, tags, uniform
from ...core.tasks import Classification
from ...data.federation import Federation
from ...errors import UsageError
from .attack import Attack, exchange


@dataclass(frozen=True)
class Backdoor(Attack):
    r"""A `part` of an attacker's training examples becomes $(1 - b) x + b \cdot \mathit{pattern}$, labelled `target`.

    The pattern is one fixed example of random numbers in the range of the data. Every client is then also scored on
    its `triggered` test examples: those of other labels, with the pattern, counted as right where the model says
    `target`. Their accuracy is the attack's rate of success. (In the paper one client attacks.)
    """

    share: Annotated[float, In("[0, 1)")] = 0.01  # of the clients, at least one of them; 0: nobody
    part: Annotated[float, In("(0, 1]")] = 0.5  # of an attacker's training examples that have the pattern
    blend: Annotated[float, In("(0, 1]")] = 0.2  # b: how much of the pattern is in them
    target: CountOrZero = 1  # the label that the pattern stands for

    def corrupt(self, federation: Federation, attackers: Tensor, seed: int) -> Federation:
        if not isinstance(federation.task, Classification) or not 0 <= self.target < federation.task.classes:
            raise UsageError(f"attack: a backdoor needs class labels, target={self.target} among them")
        low, high = federation.x.min(), federation.x.max()
        pattern = low + (high - low) * uniform(key(0, "backdoor.pattern", device=low.device), federation.x[0])

        def mark(x: Tensor) -> Tensor:
            return (1 - self.blend) * x + self.blend * pattern

        made, marks = {}, tags(federation.names).tolist()
        for i in attackers.nonzero().squeeze(1).tolist():
            rows = federation.rows["train"][i]
            order = torch.randperm(len(rows), generator=generator(seed, "backdoor", marks[i]))
            chosen = order[: max(1, round(self.part * len(rows)))].to(rows.device)
            x, y = federation.x[rows].clone(), federation.y[rows].clone()
            x[chosen], y[chosen] = mark(x[chosen]), self.target
            made[i] = x, y
        others = [rows[federation.y[rows] != self.target] for rows in federation.rows["test"]]
        without = [name for name, rows in zip(federation.names, others, strict=True) if not len(rows)]
        if without:
            raise UsageError(
                f"attack: client {', '.join(without[:5])} has no test example of another label than {self.target} to "
                "put the pattern on; choose another attack.target"
            )
        marked = {
            i: (mark(federation.x[rows]), torch.full_like(federation.y[rows], self.target))
            for i, rows in enumerate(others)
        }
        return exchange(exchange(federation, "train", made), "triggered", marked)
