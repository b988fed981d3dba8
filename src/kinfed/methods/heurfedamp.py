"""HeurFedAMP: FedAMP for large models, by cosines and a fixed weight for oneself (Huang et al., 2021, Section 5).

Differs: in its values only, as the paper has none for all data: the own weight, sigma, lambda and alpha are those that
FedAGHN's tables give for HeurFedAMP.
"""

import math
from dataclasses import dataclass

import torch

from ..core.field_checks import NonNegative, Share
from ..relations import Softmax
from .parts.message_passing import ALIKE, MessagePassing


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
    def weighing(self):
        return Softmax(2 / self.sharpness if self.sharpness else math.inf, self.home)

    @property
    def strength(self):
        return self.pull

    def place(self, theta, layout):
        """Of length 1, as the squared distance of two directions is 2 - 2 c; nearly equal ones lose no digits so."""
        length = torch.stack([theta[:, layer.trainable].norm(dim=1) for layer in layout.layers]).norm(dim=0)
        return theta / length.clamp(min=torch.finfo(theta.dtype).tiny)[:, None]

    def describe_flatness(self, squares):
        spread = float(squares.max() - squares.min()) / 2
        if not self.sharpness or self.home == 1 or self.sharpness * spread >= ALIKE:
            return ""
        return (
            f"all others weigh alike, as cosines of models differ by {spread:.1g} only; "
            "raise method.sharpness, or use kin, which compares how far models moved"
        )

    def similarity(self, roster, server):
        squares = super().similarity(roster, server)
        return squares._replace(what="cosine of models", values=1 - squares.values / 2)
