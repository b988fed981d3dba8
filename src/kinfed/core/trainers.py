"""Trainers: local training by autograd, for one client and for many that run as one program."""

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.func import grad

from .batches import Batch, Draw, Examples
from .client import Client, Objective, Penalty, Request
from .optimiser import shorten


class EagerTrainer:
    """One client at a time. Its tensors are views of one vector and change in place: so it stays flat at no cost."""

    def refuses(self, request: Request) -> str:
        """Nothing."""
        return ""

    def batches(self, client: Client, draw: Draw) -> Iterator[Batch]:
        """The client's batches, none of them filled up."""
        return client.shuffler.alone(draw)

    def train(self, client: Client, request: Request) -> Tensor:
        """The trained theta: [d]."""
        model, optimiser, moving = client.model, request.optimiser, request.moving
        theta = request.theta.detach().clone()
        # Views that share a version counter would make one's step in place look like a change of what others saved.
        tensors = {name: view.data for name, view in model.layout.tensors(theta).items()}
        values = [tensors[n] for n in moving]
        leaves = [v.data.requires_grad_() for v in values]
        memory = optimiser.init(values)
        bound = model.bound(tensors | dict(zip(moving, leaves, strict=True)), training=True)
        with bound, model.capturing(request.objective is not None):
            for batch in self.batches(client, request.draw):
                outputs = model.forward(batch.x, batch.weight, batch.key)
                loss = client.losses(outputs, batch, request.objective)
                slopes = _differentiate(loss, leaves, _share(loss.shape, loss.dtype, loss.device))
                if request.penalty:
                    whole = theta.detach().requires_grad_()
                    slope = model.layout.tensors(_differentiate(request.penalty(whole), [whole])[0])
                    slopes = [s + slope[n] for s, n in zip(slopes, moving, strict=True)]
                slopes = shorten(slopes, request.clip) if request.clip < math.inf else slopes
                _, memory = optimiser.step(values, slopes, memory, inplace=True)
                del slopes  # the next ones take their memory, while it is in the cache
                model.settle(tensors)
        return theta

    def gradient(self, client: Client, theta: Tensor, batch: Batch | Examples, objective: Objective | None) -> Tensor:
        """[d] gradient of the mean loss at theta: [d]; zero on buffers."""
        layout = client.model.layout
        tensors = layout.tensors(theta)
        leaves = {e.name: tensors[e.name].detach().requires_grad_() for e in layout.entries if e.trainable}
        loss, _ = client.loss_and_buffers(tensors | leaves, batch, objective)
        slopes = dict(zip(leaves, _differentiate(loss, list(leaves.values())), strict=True))
        return layout.flatten({n: slopes.get(n, torch.zeros_like(t)) for n, t in tensors.items()})


class FunctionalTrainer:
    """Without a change in place, for `torch.func.vmap`; a step past a client's last changes nothing."""

    def refuses(self, request: Request) -> str:
        """Nothing."""
        return ""

    def batches(self, client: Client, draw: Draw) -> Iterator[Batch]:
        """Batches as long as the longest of all clients that run together, filled up at weight 0."""
        return client.shuffler.together(draw)

    def train(self, client: Client, request: Request) -> Tensor:
        """The trained theta: [d]."""
        layout, optimiser, moving = client.model.layout, request.optimiser, request.moving
        tensors = layout.tensors(client.own(request.theta))
        memory = optimiser.init([tensors[n] for n in moving])
        for batch in self.batches(client, request.draw):
            old = [tensors[n] for n in moving]
            slopes, buffers = _slopes(client, tensors, moving, batch, request.penalty, request.objective)
            slopes = shorten(slopes, request.clip) if request.clip < math.inf else slopes
            new, memory_after = optimiser.step(old, slopes, memory)
            if batch.valid is not None:
                new = [batch.keep(a, b) for a, b in zip(old, new, strict=True)]
                kept = [
                    tuple(batch.keep(a, b) for a, b in zip(before, after, strict=True))
                    for before, after in zip(memory[1:], memory_after[1:], strict=True)
                ]
                memory_after = type(memory)(batch.keep(memory.step, memory_after.step), *kept)
                buffers = {n: batch.keep(tensors[n], b) for n, b in buffers.items()}
            memory = memory_after
            tensors = tensors | buffers | dict(zip(moving, new, strict=True))
        return layout.flatten(tensors)

    def gradient(self, client: Client, theta: Tensor, batch: Batch | Examples, objective: Objective | None) -> Tensor:
        """[d] gradient of the mean loss at theta: [d]; zero on buffers."""
        layout = client.model.layout
        tensors, moving = layout.tensors(client.own(theta)), tuple(e.name for e in layout.entries if e.trainable)
        found, _ = _slopes(client, tensors, moving, batch, None, objective)
        slopes = dict(zip(moving, found, strict=True))
        return layout.flatten({n: slopes[n] if n in slopes else torch.zeros_like(t) for n, t in tensors.items()})


def _slopes(
    client: Client,
    tensors: dict[str, Tensor],
    moving: tuple[str, ...],
    batch: Batch | Examples,
    penalty: Penalty | None,
    objective: Objective | None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients of the mean loss (and penalty) for the moving tensors, and the buffers after the pass."""

    def total(values: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        now = tensors | dict(zip(moving, values, strict=True))
        loss, buffers = client.loss_and_buffers(now, batch, objective)
        return loss if penalty is None else loss + penalty(client.model.layout.flatten(now)), buffers

    return grad(total, has_aux=True)([tensors[n] for n in moving])  # type: ignore[no-any-return]


@cache
def _share(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient of a mean with respect to what it is taken of."""
    return torch.full(shape, 1 / shape.numel(), dtype=dtype, device=device)


def _differentiate(value: Tensor, leaves: list[Tensor], along: Tensor | None = None) -> list[Tensor]:
    """Gradients of a number, or of the inner product of value and `along`; zero for leaves that it does not touch."""
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    slopes = torch.autograd.grad(value, leaves, along, allow_unused=True)
    return [torch.zeros_like(leaf) if s is None else s for s, leaf in zip(slopes, leaves, strict=True)]
