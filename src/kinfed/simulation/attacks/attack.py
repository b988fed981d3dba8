"""Attack: what malicious clients do to their examples or uploads; `simulation.attacked_fleet` carries it out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from ...core.field_checks import In, Settings
from ...core.seeding import fold, key, tags
from ...data.federation import Federation
from ...errors import UsageError


@dataclass(frozen=True)
class Attack(Settings):
    """A kind of attack, and how many clients carry it out. By default they behave like honest clients.

    Attackers stay among the clients in every other respect: they are sampled, sent to, aggregated and scored. With
    `share=0` a run is the one without an attack, bit for bit.
    """

    share: Annotated[float, In("[0, 1)")] = 0.2  # of the clients, at least one of them; 0: nobody

    def attackers(self, names: Sequence[str], seed: int) -> Tensor:
        """[N] bool: the attackers. They depend only on names and seed; those of a smaller share are among them."""
        count = max(1, round(self.share * len(names))) if self.share else 0
        if count >= len(names):
            raise UsageError(f"attack: share={self.share} makes all {len(names)} clients attackers; leave one honest")
        lots = fold(key(seed, "attackers"), tags(names))
        return lots.argsort().argsort() < count

    def list_attackers(self, names: Sequence[str], seed: int) -> list[str]:
        """The attackers' names."""
        return [names[i] for i in self.attackers(names, seed).nonzero().flatten().tolist()]

    def corrupt(self, federation: Federation, attackers: Tensor, seed: int) -> Federation:
        """The federation with the attackers' examples changed; attackers: [N] bool."""
        return federation

    def tamper(self, before: Tensor, after: Tensor, keys: Tensor) -> Tensor:
        """[K, d] what attackers send instead of their trained models, after: [K, d].

        before: [K, d] is what they were sent, keys: [K] are for random numbers of this round.
        """
        return after


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
