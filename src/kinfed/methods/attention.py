"""Attention: dynamic attention mixes models, trained on the losses of the mixtures; kinfed's own, beside pFedGAT.

It differs from pFedGAT in four ways: attention is dynamic (Brody et al., 2022, Equation 7), so each receiver has an
order of senders of its own; features are how models differ from their mean; the network takes several steps of Adam a
round; and clients judge their mixtures on their training examples.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F

from ..core.field_checks import Count, Positive
from ..core.optimiser import Adam
from ..core.trees import Shared
from .pfedgat import PFedGAT


class Heads(NamedTuple):
    """The network of dynamic attention."""

    listen: Shared  # [H, f, m] projects the listener
    speak: Shared  # [H, f, m] projects the speaker
    score: Shared  # [H, f] a


@dataclass(frozen=True)
class Dynamic(PFedGAT):
    """pFedGAT with heads that look at listener and speaker together: each listener has its own ranking."""

    projections: ClassVar[int] = 2

    def network(self, glorot, size):
        project = glorot(size + self.width, size), glorot(size + self.width, size)
        return Heads(*project, glorot(self.width + 1))

    def scores(self, network, features):
        listener, speaker = (torch.einsum("hfm,km->hkf", w, features) for w in (network.listen, network.speak))
        together = F.leaky_relu(listener[:, :, None] + speaker[:, None, :], self.slope)  # [H, K, K, f]
        return torch.einsum("hijf,hf->hij", together, network.score)


@dataclass(frozen=True)
class Attention(Dynamic):
    r"""$\theta_i \leftarrow \sum_j R_{ij} \theta_j$ over the cohort, with weights $R$ of dynamic attention.

    $R_{ij} = \frac1H \sum_h \mathrm{softmax}_j\, a_h^\top \mathrm{LeakyReLU}(U_h h_i + V_h h_j)$, where $h_i$ is the
    normalised difference of $\theta_i$ from the cohort's mean. In a round $U$, $V$ and $a$ take `steps` steps of Adam
    down $\sum_{ij} G_{ij} R_{ij}$, where $G_{ij} = \langle \nabla L_i, \theta_j \rangle$ is that of the last mixtures.
    """

    lr: Positive = 0.0003  # learning rate of the network
    steps: Count = 10  # of the network in a round, along one G
    feedback: Literal["train", "held-out", "validation"] = "train"  # examples of L_i

    @property
    def rule(self):
        return Adam(self.lr)

    def features(self, roster, server, cohort):
        rows = super().features(roster, server, cohort)
        return F.layer_norm(rows - rows.mean(0), rows.shape[1:])
