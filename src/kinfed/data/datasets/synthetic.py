"""Synthetic domains on a spiral, each with a classifier of its own; near directions are linked."""

import math
from pathlib import Path
from typing import Literal

import torch

from ...core.graph import Graph
from ...core.seeding import generator
from ...core.tasks import Classification
from ...errors import UsageError
from ..dataset import Dataset


def synthetic(
    data_dir: Path | None = None,
    *,
    clients: int = 60,  # how many directions
    per_class: int = 50,  # points of a class of a client
    seed: int = 0,  # of the points and links; that of a run does not change them
    # "separable": data like DG-60; "printed": as the text of Panacea says
    mode: Literal["separable", "printed"] = "separable",
) -> Dataset:
    r"""Points [n, 2] of two classes, in another direction for every client; near directions are linked.

    Client i has a direction $\varphi_i \sim U(0, 2\pi)$, and its classes lie around $m_i$ and $-m_i$.

    `separable` makes data like DG-60 (Xu et al., 2022): $m_i$ lies $1 + 6 \varphi_i / 2\pi$ from the origin, points
    are normal around it but within radius 1, so every client is linearly separable; clients i and j are linked with
    probability $\cos(\varphi_i - \varphi_j)$, never if that is below 0.2.
    `printed` follows the text of Panacea: $m_i = (\omega_i / \pi) [\cos \varphi_i, \sin \varphi_i]$ with $\omega_i$ the
    angle in $(-\pi, \pi]$, points are standard normal around it, links have probability
    $(1 + \cos(\varphi_i - \varphi_j)) / 2$. No classifier exceeds 84.1 % there.

    Examples are owned (`client`) and the links are the data set's graph. Raises UsageError on a bad setting.
    """
    if mode not in ("separable", "printed"):
        raise UsageError(f"synthetic: mode must be separable or printed; got '{mode}'")
    if clients < 1 or per_class < 1:
        raise UsageError(f"synthetic: clients and per_class must be at least 1; got {clients} and {per_class}")
    draw = generator(seed, "synthetic")
    angle = 2 * math.pi * torch.rand(clients, generator=draw, dtype=torch.float64)  # [N]
    direction = torch.stack((angle.cos(), angle.sin()), 1)  # [N, 2]
    cosines = direction @ direction.T  # [N, N] cosines of angle differences
    if mode == "separable":
        mean = (1 + 6 * angle / (2 * math.pi))[:, None] * direction
        link = torch.where(cosines < 0.2, 0.0, cosines)
        # The squared radius of a normal point in the plane is exponential with mean 2; here it is cut off at 1.
        share = torch.rand(clients, 2, per_class, generator=draw, dtype=torch.float64)
        radius = (-2 * torch.log1p(share * math.expm1(-0.5))).sqrt()
        turn = 2 * math.pi * torch.rand(radius.shape, generator=draw, dtype=torch.float64)
        noise = torch.stack((radius * turn.cos(), radius * turn.sin()), -1)  # [N, 2, per_class, 2]
    else:
        mean = torch.atan2(direction[:, 1], direction[:, 0])[:, None] / math.pi * direction
        link = (1 + cosines) / 2
        noise = torch.randn(clients, 2, per_class, 2, generator=draw, dtype=torch.float64)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)  # class 0 lies around +mean
    x = mean[:, None, None] * sign[:, None, None] + noise  # [N, 2, per_class, 2]
    upper = (torch.rand(clients, clients, generator=draw, dtype=torch.float64) < link).triu(1)
    return Dataset(
        x.reshape(-1, 2).to(torch.float32),
        torch.arange(2).repeat_interleave(per_class).repeat(clients),
        Classification(2),
        client=torch.arange(clients).repeat_interleave(2 * per_class),
        graph=Graph((upper | upper.T).to(torch.float32), "given"),
    )
