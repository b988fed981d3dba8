"""The fleet around a fleet that sends what attackers make of their models."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..attacks.attack import Attack
from ..core.fleet import Evaluation, Fleet
from ..core.layout import Layout
from ..core.seeding import fold, key, tags
from ..core.trees import Tree, model_field, model_of, pick
from ..errors import UsageError


class AttackedFleet:
    """A fleet some of whose clients send what the attack makes of their models.

    Only the model in an upload is a lie: whatever else it holds is honest, and so is what a client keeps. Running
    statistics are left alone where whole models travel.
    """

    def __init__(self, fleet: Fleet, attack: Attack, attackers: Tensor, layout: Layout, seed: int) -> None:
        self.names = fleet.names
        self._fleet, self._attack, self._attackers, self._layout, self._seed = fleet, attack, attackers, layout, seed
        self._tags = tags(fleet.names).to(attackers.device)

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Who replied, with what: the attackers among them with what the attack makes of it."""
        replied, uploads = self._fleet.train(round, cohort, sent)
        lying = self._attackers[replied].nonzero().squeeze(1)
        field = model_field(uploads)
        if not len(lying) or not field:
            return replied, uploads
        honest = getattr(uploads, field)
        before = model_of(pick(sent, torch.isin(cohort, replied)))
        if before is None:
            raise UsageError("attack: this method sends no model that what comes back could be compared with")
        before = before.expand_as(honest)
        keys = fold(key(self._seed, "attack", round, device=self._tags.device), self._tags[replied[lying]])
        theta = self._attack.tamper(before[lying], honest[lying], keys)
        if honest.shape[1] == self._layout.size:
            theta = torch.where(self._layout.trainable_on(theta.device), theta, honest[lying])
        return replied, uploads._replace(**{field: honest.index_copy(0, lying, theta)})

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation | Callable[[], Evaluation]:
        """Scores of everybody, attackers included."""
        return self._fleet.evaluate(round, cohort, sent)
