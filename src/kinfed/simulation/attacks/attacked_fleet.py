"""A fleet in which attackers tamper with the models that they send."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...core.fleet import Evaluation, Fleet, raise_if_diverged
from ...core.layout import Layout
from ...core.seeding import fold, key, tags
from ...core.trees import Tree, model_field, model_of, pick
from ...errors import UsageError
from .attack import Attack


class AttackedFleet:
    """A fleet around another one, some of whose clients send models that the attack has changed.

    Only the model in an upload is changed: the rest of it is honest, and so is the client's own state. Running
    statistics are unchanged when whole models are sent.
    """

    def __init__(self, fleet: Fleet, attack: Attack, attackers: Tensor, layout: Layout, seed: int) -> None:
        self.names = fleet.names
        self._fleet, self._attack, self._attackers, self._layout, self._seed = fleet, attack, attackers, layout, seed
        self._tags = tags(fleet.names).to(attackers.device)

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """The clients that replied and their uploads, those of attackers changed by the attack."""
        replied, uploads = self._fleet.train(round, cohort, sent)
        attacking = self._attackers[replied].nonzero().squeeze(1)
        field = model_field(uploads)
        if not len(attacking) or not tree_leaves(uploads) or type(self._attack).tamper is Attack.tamper:
            return replied, uploads
        before = model_of(pick(sent, torch.isin(cohort, replied))) if field else None
        if before is None:
            raise UsageError(
                "attack: it changes an upload by the one model that a client was sent, and this method sends none or "
                "several; choose an attack on examples (label_flip, backdoor) or another method"
            )
        honest = getattr(uploads, field)
        before = before.expand_as(honest)
        keys = fold(key(self._seed, "attack", round, device=self._tags.device), self._tags[replied[attacking]])
        theta = self._attack.tamper(before[attacking], honest[attacking], keys)
        if honest.shape[1] == self._layout.size:
            theta = torch.where(self._layout.trainable_on(theta.device), theta, honest[attacking])
        raise_if_diverged(self.names, round, replied[attacking], theta, "lower the attack's factor", theta)
        return replied, uploads._replace(**{field: honest.index_copy(0, attacking, theta)})

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation | Callable[[], Evaluation]:
        """Scores of all clients, including attackers."""
        return self._fleet.evaluate(round, cohort, sent)
