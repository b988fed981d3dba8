"""Trainers: local training by autograd, for one client and for many that run as one program."""

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.func import grad

from .batches import Batch, Draw, Examples
from .client import Client, Objective, Penalty, Request
from .optimiser import clip_norm


class EagerTrainer:
    """One client at a time. Its tensors are views of one vector and change in place, so theta stays flat at no cost."""

    def refuses(self, request: Request) -> str:
        """Nothing."""
        return ""

    def batches(self, client: Client, draw: Draw) -> Iterator[Batch]:
        """The client's batches, none of them filled up."""
        return client.shuffler.draw_alone(draw)

    def train(self, client: Client, request: Request) -> Tensor:
        """The trained theta: [d]."""
        model, optimiser, moving = client.model, request.optimiser, request.moving
        theta = request.theta.detach().clone()
        # With views that share a version counter, autograd would mistake a step in place for a change of saved tensors.
        tensors = {name: view.data for name, view in model.tensors(theta).items()}
        params = [tensors[n] for n in moving]
        leaves = [v.data.requires_grad_() for v in params]
        state = optimiser.init(params)
        bound = model.bound(tensors | dict(zip(moving, leaves, strict=True)), training=True)
        with bound, model.capturing(request.objective is not None):
            for batch in self.batches(client, request.draw):
                outputs = model.forward(batch.x, batch.weight, batch.key)
                loss = client.losses(outputs, batch, request.objective)
                share = _share(loss.shape, loss.dtype, loss.device)
                share = share if batch.importance is None or not loss.ndim else share * batch.importance
                grads = _differentiate(loss, leaves, share)
                if request.penalty:
                    point = theta.detach().requires_grad_()
                    of_penalty = model.layout.tensors(_differentiate(request.penalty(point), [point])[0])
                    grads = [g + of_penalty[n] for g, n in zip(grads, moving, strict=True)]
                grads = clip_norm(grads, request.clip) if request.clip < math.inf else grads
                _, state = optimiser.step(params, grads, state, inplace=True)
                del grads  # so that the next ones reuse their memory while it is in the cache
                model.settle(tensors)
        model.layout.settle(theta, tensors)
        return theta

    def gradient(self, client: Client, theta: Tensor, batch: Batch | Examples, objective: Objective | None) -> Tensor:
        """[d] gradient of the mean loss at theta: [d]; zero on buffers."""
        layout = client.model.layout
        tensors = client.model.tensors(theta)
        leaves = {e.name: tensors[e.name].detach().requires_grad_() for e in layout.entries if e.trainable}
        loss, _ = client.loss_and_buffers(tensors | leaves, batch, objective)
        grads = dict(zip(leaves, _differentiate(loss, list(leaves.values())), strict=True))
        return layout.flatten({n: grads.get(n, torch.zeros_like(t)) for n, t in tensors.items()})


class FunctionalTrainer:
    """Changes nothing in place, as `torch.func.vmap` needs; a step past a client's last has no effect."""

    def refuses(self, request: Request) -> str:
        """Nothing."""
        return ""

    def batches(self, client: Client, draw: Draw) -> Iterator[Batch]:
        """Batches as long as the longest of all clients that run together, filled up at weight 0."""
        return client.shuffler.draw_together(draw)

    def train(self, client: Client, request: Request) -> Tensor:
        """The trained theta: [d]."""
        layout, optimiser, moving = client.model.layout, request.optimiser, request.moving
        tensors = client.model.tensors(client.own(request.theta))
        state = optimiser.init([tensors[n] for n in moving])
        for batch in self.batches(client, request.draw):
            old = [tensors[n] for n in moving]
            grads, buffers = self.step_gradients(client, tensors, batch, request)
            grads = clip_norm(grads, request.clip) if request.clip < math.inf else grads
            new, state_after = optimiser.step(old, grads, state)
            if batch.valid is not None:
                new = [batch.keep(a, b) for a, b in zip(old, new, strict=True)]
                lists = [
                    tuple(batch.keep(a, b) for a, b in zip(before, after, strict=True))
                    for before, after in zip(state[1:], state_after[1:], strict=True)
                ]
                state_after = type(state)(batch.keep(state.step, state_after.step), *lists)
                buffers = {n: batch.keep(tensors[n], b) for n, b in buffers.items()}
            state = state_after
            tensors = tensors | buffers | dict(zip(moving, new, strict=True))
        return layout.flatten(tensors)

    def step_gradients(
        self, client: Client, tensors: dict[str, Tensor], batch: Batch, request: Request
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """What a step follows, for each tensor that it moves, and the buffers after the pass."""
        return _grads(client, tensors, request.moving, batch, request.penalty, request.objective)

    def gradient(self, client: Client, theta: Tensor, batch: Batch | Examples, objective: Objective | None) -> Tensor:
        """[d] gradient of the mean loss at theta: [d]; zero on buffers."""
        layout = client.model.layout
        tensors = client.model.tensors(client.own(theta))
        moving = tuple(e.name for e in layout.entries if e.trainable)
        moving_grads, _ = _grads(client, tensors, moving, batch, None, objective)
        grads = dict(zip(moving, moving_grads, strict=True))
        return layout.flatten({n: grads[n] if n in grads else torch.zeros_like(t) for n, t in tensors.items()})


def _grads(
    client: Client,
    tensors: dict[str, Tensor],
    moving: tuple[str, ...],
    batch: Batch | Examples,
    penalty: Penalty | None,
    objective: Objective | None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients of the mean loss (and penalty) for the moving tensors, and the buffers after the pass."""

    def total(params: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        now = tensors | dict(zip(moving, params, strict=True))
        loss, buffers = client.loss_and_buffers(now, batch, objective)
        return loss if penalty is None else loss + penalty(client.model.layout.flatten(now)), buffers

    return grad(total, has_aux=True)([tensors[n] for n in moving])


@cache
def _share(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient of a mean with respect to its terms."""
    return torch.full(shape, 1 / shape.numel(), dtype=dtype, device=device)


def _differentiate(value: Tensor, leaves: list[Tensor], along: Tensor | None = None) -> list[Tensor]:
    """Gradients of a number, or of the inner product of value and `along`; zero for leaves without influence."""
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(value, leaves, along, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(dense, leaves, strict=True)]
