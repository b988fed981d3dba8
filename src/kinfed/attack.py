"""Attack: what malicious clients do to their examples, or to what they send; a fleet around the fleet sees to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .errors import UsageError
from .federation import Federation
from .fleet import Evaluation, Fleet
from .layout import Layout
from .seeding import fold, key, tags

Tree = Any


@dataclass(frozen=True)
class Attack:
    """A kind of attack, and how many clients carry it out. By default these do nothing wrong.

    Attackers stay among the clients in every other respect: they are sampled, sent to, aggregated and scored. With
    `share=0` a run is the one without an attack, bit for bit.
    """

    share: float = 0.2  # of the clients, at least one of them; 0: nobody

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise UsageError(f"attack: share of the clients must lie in [0, 1); got {self.share}")

    def attackers(self, names: Sequence[str], seed: int) -> Tensor:
        """[N] bool: who attacks. It hangs on names and seed alone, and attackers of a smaller share are among these."""
        count = max(1, round(self.share * len(names))) if self.share else 0
        if count >= len(names):
            raise UsageError(f"attack: share={self.share} makes all {len(names)} clients attackers; leave one honest")
        lots = fold(key(seed, "attackers"), tags(names))
        return lots.argsort().argsort() < count

    def corrupt(self, federation: Federation, attackers: Tensor, seed: int) -> Federation:
        """The federation with the attackers' examples changed; attackers: [N] bool."""
        return federation

    def tamper(self, before: Tensor, after: Tensor, keys: Tensor) -> Tensor:
        """[K, d] what attackers send instead of their trained models, after: [K, d].

        before: [K, d] is what they were sent, keys: [K] are for random numbers of this round.
        """
        return after


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


def exchange(federation: Federation, split: str, made: dict[int, tuple[Tensor, Tensor]]) -> Federation:
    """The federation in which client i's examples of a split are made[i], x: [n_i, ...] and y: [n_i, ...].

    They are added to the pool and nothing in it is changed, because clients may share rows of it.
    """
    rows = list(federation.rows.get(split, [federation.rows["train"][0][:0]] * len(federation)))
    end = len(federation.x)
    for i, (x, _) in made.items():
        rows[i] = torch.arange(end, end + len(x), device=rows[i].device)
        end += len(x)
    x = torch.cat([federation.x, *(x for x, _ in made.values())])
    y = torch.cat([federation.y, *(y for _, y in made.values())])
    return replace(federation, x=x, y=y, rows={**federation.rows, split: rows})
