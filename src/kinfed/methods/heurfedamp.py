"""HeurFedAMP: FedAMP for large models, by cosines and a fixed weight for oneself (Huang et al., 2021, Section 5).

Differs: in its values only, as the paper has none for all data: the own weight, sigma, lambda and alpha are those that
FedAGHN's tables give for HeurFedAMP.
"""

from dataclasses import dataclass

import torch

from ..core.field_checks import NonNegative, Share
from ..core.method import Compared
from .fedamp import ALIKE, MessagePassing, distances


@dataclass(frozen=True)
class HeurFedAMP(MessagePassing):
    r"""$w_{ii}$ is fixed, $w_{ij} = (1 - w_{ii}) \frac{e^{\sigma c_{ij}}}{\sum_{k \ne i} e^{\sigma c_{ik}}}$.

    $c_{ij}$ is the cosine of the models of $i$ and $j$. Training is FedAMP's: from the client's own model, drawn to
    $u_i = \sum_j w_{ij} \theta_j$ by a proximal term.
    """

    sharpness: NonNegative = 100.0  # sigma: how strongly weights favour those who are alike; 0: all others alike
    home: Share = 0.05  # a client's weight for its own model
    pull: NonNegative = 1.0  # lambda / alpha: how strongly local training is drawn to the mixture

    remedy = "lower the learning rate or method.pull"

    @property
    def strength(self):
        return self.pull

    def vectors(self, theta, layout):
        """Of length 1, as the squared distance of two directions is 2 - 2 c; nearly equal ones lose no digits so."""
        length = torch.stack([theta[:, layer.trainable].norm(dim=1) for layer in layout.layers]).norm(dim=0)
        return theta / length.clamp(min=torch.finfo(theta.dtype).tiny)[:, None]

    def weights(self, apart, itself):
        if apart.shape[1] == 1:  # nobody else is there
            return torch.ones_like(apart)
        others = (self.sharpness / -2 * apart).masked_fill(itself, -torch.inf).softmax(1)
        return torch.where(itself, self.home, (1 - self.home) * others)

    def doubt(self, apart, others):
        if not self.sharpness or self.home == 1 or others.max() >= ALIKE * others.min():
            return ""
        return (
            f"all others weigh alike, as cosines of models differ by {float(apart.max() - apart.min()) / 2:.1g} only; "
            "raise method.sharpness, or use kin, which compares how far models moved"
        )

    def similarity(self, roster, server):
        apart = distances(self.vectors(server.theta, roster.layout), roster.layout)
        return Compared("cosine of models", 1 - apart / 2)
