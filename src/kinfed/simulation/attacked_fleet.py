"""The fleet around a fleet that sends what attackers make of their models."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..attacks.attack import Attack
from ..core.fleet import Evaluation, Fleet
from ..core.layout import Layout
from ..core.seeding import fold, key, tags
from ..core.trees import Tree
from ..errors import UsageError


class AttackedFleet:
    """A fleet some of whose clients send what the attack makes of their models.

    Only the `theta` of an upload is a lie: whatever else it holds is honest, and so is what a client keeps. Running
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
        if not len(lying) or not hasattr(uploads, "theta"):
            return replied, uploads
        honest = uploads.theta
        told = tree_map(lambda t: t[torch.isin(cohort, replied)], sent)
        before = next((t for t in tree_leaves(told) if t.shape == honest.shape), None)
        if before is None:
            raise UsageError("attack: this method sends no model that what comes back could be compared with")
        keys = fold(key(self._seed, "attack", round, device=self._tags.device), self._tags[replied[lying]])
        theta = self._attack.tamper(before[lying], honest[lying], keys)
        if honest.shape[1] == self._layout.size:
            theta = torch.where(self._layout.trainable_on(theta.device), theta, honest[lying])
        return replied, uploads._replace(theta=honest.index_copy(0, lying, theta))

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation | Callable[[], Evaluation]:
        """Scores of everybody, attackers included."""
        return self._fleet.evaluate(round, cohort, sent)
