"""Noised steps: training in which no row moves the model by more than its clipped gradient, hidden in noise.

Each step draws a batch of its own, of which every row is part with the same chance, independently of all others
(Poisson sampling), as the accountant of `kinfed.core.private.privacy` assumes.
"""

import math
import os
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from ..batches import Batch, Draw, is_real
from ..client import Client, Request
from ..seeding import fold, key, normal
from ..trainers import FunctionalTrainer
from .privacy import Privacy

CHOICE, NOISE, MODEL = 1, 2, 3  # what a step's random numbers are for
DIGITS = 53  # bits of a double's fraction


class Lots(Protocol):
    """Where the random numbers of noised steps come from."""

    def draw_uniform(self, key: Tensor, count: int) -> Tensor:
        """[..., count] float64 in [0, 1), for keys: [...]."""

    def draw_normal(self, key: Tensor, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape and type of `like`."""


class SeededLots:
    """Random numbers that follow from the run's seed, for a simulation: whoever knows the seed can take them away."""

    def draw_uniform(self, key: Tensor, count: int) -> Tensor:
        """[..., count] float64 in [0, 1), for keys: [...]."""
        bits = fold(key[..., None], torch.arange(count, device=key.device)) & ((1 << DIGITS) - 1)
        return bits.double().div(2**DIGITS)

    def draw_normal(self, key: Tensor, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape and type of `like`."""
        return normal(key, like)


class SecretLots:
    """Random numbers of the operating system's cryptographic generator, for one client at its own place.

    Keys are ignored, because they follow from the run's seed, which the server knows. A normal number is the sum of
    four, halved, so that the rounding of one does not give it away (Holohan and Braghin, 2021).
    """

    def draw_uniform(self, key: Tensor, count: int) -> Tensor:
        """[count] float64 in [0, 1)."""
        bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(64 - DIGITS)
        numbers: Tensor = torch.from_numpy(bits / 2**DIGITS)
        return numbers.to(key.device)

    def draw_normal(self, key: Tensor, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape and type of `like`."""
        radius, angle = self.draw_uniform(key, 8 * like.numel()).view(2, 4, -1)
        parts: Tensor = (-2 * (1 - radius).log()).sqrt() * (2 * math.pi * angle).cos()
        return (parts.sum(0) / 2).to(like).view(like.shape)


def count_steps(draw: Draw, rows: int) -> int:
    """How many steps a draw takes of a client with so many rows."""
    return draw.epochs * -(-rows // draw.size) if draw.steps is None else draw.steps


def sample_batches(client: Client, draw: Draw, lots: Lots) -> Iterator[Batch]:
    """A client's batches by Poisson sampling, filled up at weight 0 to the largest of all clients that run together.

    A row's chance is `draw.size` over the client's rows. Importance is the row's own example weight, as its ratio to
    the mean would depend on the other rows.
    """
    shuffler, device = client.shuffler, client.tag.device
    rows, sizes = shuffler.rows, torch.tensor(client.member.sizes, device=device)
    counter = torch.arange(len(rows.at), device=device)
    totals = [count_steps(draw, n) for n in client.member.sizes]
    start = key(client.seed, "private", client.round, draw.number, device=device)
    per_epoch = -(-rows.size // draw.size)
    own_steps = per_epoch * draw.epochs if draw.steps is None else torch.full_like(per_epoch, draw.steps)
    for t in range(max(totals)):
        if shuffler.halt is not None and shuffler.halt.is_set():
            raise CancelledError
        step = fold(fold(start, client.tag), t)
        chance = (draw.size / rows.size.double()).clamp(max=1)
        chosen = (lots.draw_uniform(fold(step, CHOICE), len(rows.at)) < chance) & is_real(rows)
        if len(sizes) == 1:
            most = int(chosen.sum())
        else:  # under vmap no size may depend on one client's draws, so those of all clients are drawn again
            steps = fold(fold(start, client.member.tags), t)
            chances = (draw.size / sizes.double()).clamp(max=1)
            everyone = lots.draw_uniform(fold(steps, CHOICE), len(rows.at)) < chances[:, None]
            most = int((everyone & (counter < sizes[:, None])).sum(1).max())
        place = (~chosen).long().argsort(stable=True)[: max(most, 1)]
        at = rows.at[place]
        yield Batch(
            shuffler.pool.x[at],
            shuffler.pool.y[at],
            chosen[place].to(client.model.theta.dtype),
            None if min(totals) > t else t < own_steps,
            step,
            None if shuffler.pool.weight is None else shuffler.pool.weight[at],
        )


class PrivateTrainer(FunctionalTrainer):
    """Steps along the sum of the rows' clipped gradients and noise (Abadi et al., 2016, algorithm 1)."""

    def __init__(self, privacy: Privacy, lots: Lots) -> None:
        self.privacy, self.lots = privacy, lots

    def batches(self, client: Client, draw: Draw) -> Iterator[Batch]:
        """Batches by Poisson sampling."""
        return sample_batches(client, draw, self.lots)

    def step_gradients(
        self, client: Client, tensors: dict[str, Tensor], batch: Batch, request: Request
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The noised sum over the expected size of a batch, and the penalty's gradient; no buffer changes."""
        moving, layout = request.moving, client.model.layout
        params = [tensors[name] for name in moving]

        def value_row(params: list[Tensor], x: Tensor, y: Tensor, row_key: Tensor) -> Tensor:
            row = Batch(x[None], y[None], None, None, row_key)
            now = tensors | dict(zip(moving, params, strict=True))
            loss, _ = client.loss_and_buffers(now, row, request.objective)
            return loss

        row_keys = fold(fold(batch.key, MODEL), torch.arange(len(batch.x), device=batch.x.device))
        grads = vmap(grad(value_row), in_dims=(None, 0, 0, 0))(params, batch.x, batch.y, row_keys)
        total = sum_clipped(grads, batch, self.privacy.clip)
        noise = self.lots.draw_normal(fold(batch.key, NOISE), total)
        expected = client.size.clamp(max=request.draw.size).to(total.dtype)
        noised = (total + client.member.noise * self.privacy.clip * noise) / expected
        parts = noised.split([p.numel() for p in params])
        result = [part.view_as(p) for part, p in zip(parts, params, strict=True)]
        if request.penalty is not None:
            penalty = request.penalty

            def value_penalty(params: list[Tensor]) -> Tensor:
                return penalty(layout.flatten(tensors | dict(zip(moving, params, strict=True))))

            result = [g + p for g, p in zip(result, grad(value_penalty)(params), strict=True)]
        return result, {}


def sum_clipped(grads: list[Tensor], batch: Batch, clip: float) -> Tensor:
    """[m] the sum over a batch of the rows' gradients, [B, ...] for each tensor, none longer than `clip`.

    Rows that only fill the batch up, and those whose gradient is not finite, count as zero.
    """
    flat = torch.cat([g.reshape(len(g), -1) for g in grads], 1)  # [B, m]
    if batch.importance is not None:
        flat = flat * batch.importance[:, None].to(flat.dtype)
    norm = flat.square().sum(1).sqrt()
    usable = norm.isfinite() & (batch.weight > 0 if batch.weight is not None else True)
    shrink = (clip / norm.clamp(min=1e-12)).clamp(max=1)
    return torch.where(usable[:, None], flat * shrink[:, None], 0).sum(0)
