"""A graph that is learned as the mixtures nearest to the clients' models, by a quadratic program for each client."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.settings import Positive
from ...ops.sparsify import nearest_mixtures
from .graph_learning import Similarity


@dataclass(frozen=True)
class QP(Similarity):
    r"""Learned likewise, but on the same links row i of the new graph is the mixture a of models that minimises
    $\lambda \|v_i - \sum_j a_j v_j\|^2 / \sigma^2 + \gamma \|a - S_i\|^2$.
    """

    gamma: Positive = 1.0  # weight of the distance to the similarities S

    def weigh(self, alike: Tensor, linked: Tensor, square: Tensor, pull: float) -> Tensor:
        centre = torch.eye(len(square), dtype=torch.float64, device=square.device) - 1 / len(square)
        inner = -pull / 2 * centre @ square.double() @ centre  # lambda times the centred models' inner products
        return nearest_mixtures(inner, alike.double(), linked, self.gamma).to(square.dtype)
