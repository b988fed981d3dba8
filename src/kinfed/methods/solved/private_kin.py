"""Private kin: private pooling about several centres, of which no one but a client knows to which it belongs."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...core.field_checks import Count
from ...errors import UsageError
from .laplace import takes
from .private_pooling import PrivatePooling

BLUNT = 0.15  # how far likelihoods count in the first round
NARROW = 0.05  # the variance of coefficients about a centre at the begin, of targets whose variance is 1
APART = 0.3  # the deviation of a centre's coefficients at the begin
SHRINKS = 0.8  # the variance of coefficients, in a round, at least, while likelihoods do not count in full


@dataclass(frozen=True)
class PrivateKin(PrivatePooling):
    r"""$c_i \sim \sum_k \pi_k N(\mu_k, D)$: a mixture of mixed models, by EM from bounded steps.

    A client works out at home how likely it belongs to each centre, by its rows (Verbeke and Lesaffre 1996,
    JASA 91, Section 2), and uploads its step of `private-pooling` for each, times that share, and the
    shares. All of it adds up, so no one else learns whose kin it is. Until half of the rounds likelihoods count in part
    (Ueda and Nakano 1998, doi:10.1016/S0893-6080(97)00133-0), and variances shrink, so that centres come apart.
    """

    centres: Count = 6  # K, as many as there may be groups, 2 or more

    reach: ClassVar[float] = 1.5  # so that the clip leaves shares, which have no such unit, as they are
    weighs: ClassVar[str] = "clients share centres and variances, and no one knows to which a client belongs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centres < 2:
            raise UsageError(f"private-kin: centres must be 2 or more; got {self.centres}; one is private-pooling")

    def start(self, roster):
        server = super().start(roster)
        width = server.centres.shape[1]
        draw = torch.randn(self.centres, width, generator=roster.generator("centres"), dtype=torch.float64)
        like = server.spread
        shares = torch.full((self.centres,), 1 / self.centres).to(like)
        noise = like[0] if takes(roster.task) else like[0] / 2
        return server._replace(centres=draw.to(like) * APART, shares=shares, spread=like * NARROW, noise=noise)

    def sharpness(self, roster):
        return float(BLUNT ** max(0.0, 1 - 2 * roster.round / max(roster.rounds, 1)))

    def limit_growth(self, roster, grown):
        return grown.clamp(max=SHRINKS) if self.sharpness(roster) < 1 else grown
