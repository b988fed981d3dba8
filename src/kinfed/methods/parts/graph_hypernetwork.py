"""Encoders of a graph hypernetwork, which turn embeddings of clients into ones that depend on their neighbours."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.field_checks import Count, Settings
from ...core.method import Roster

ALL_PAIRS = 512  # up to this many clients the link loss uses every pair
PAIRS = 8192  # pairs that it uses in each step otherwise


@dataclass(frozen=True)
class MLP(Settings):
    """No graph: layers for each client by itself (Panacea-MLP)."""

    layers: Count = 3  # L
    hidden: Count = 100  # e, the width of each
    needs_graph: ClassVar[bool] = False

    def averaging(self, links: Tensor | None) -> Tensor | None:
        """[N, N] P, from links: [N, N]; None: that is I."""
        return None


@dataclass(frozen=True)
class GCN(MLP):
    """Each layer takes the mean over a client's neighbours and itself, by weight: P = D^-1 (A + I)."""

    needs_graph: ClassVar[bool] = True

    def averaging(self, links):
        if links is None:
            return None
        itself = links + torch.eye(len(links)).to(links)
        return itself / itself.sum(1, keepdim=True)


def link_loss(z: Tensor, links: Tensor, pairs: Tensor | None) -> Tensor:
    """[] L_d: cross-entropy of links: [N, N] with sigmoid(z_u z_v), over pairs: [2, *], or over all u != v if None."""
    if len(z) < 2:
        return z.new_zeros(())
    target = (links > 0).to(z.dtype)
    if pairs is not None:
        u, v = pairs
        return F.binary_cross_entropy_with_logits((z[u] * z[v]).sum(1), target[u, v])
    weight = 1 - torch.eye(len(z)).to(z)  # A_uu carries no information
    return F.binary_cross_entropy_with_logits(z @ z.T, target, weight, reduction="sum") / weight.sum()


def draw_pairs(roster: Roster, draw: torch.Generator) -> Tensor | None:
    """[2, PAIRS] pairs of different clients, drawn by name so that order does not matter; None for all pairs."""
    count = len(roster)
    if count <= ALL_PAIRS:
        return None
    u = torch.randint(count, (PAIRS,), generator=draw)
    v = (u + 1 + torch.randint(count - 1, (PAIRS,), generator=draw)) % count
    return roster.tags.argsort()[torch.stack((u, v)).to(roster.tags.device)]
