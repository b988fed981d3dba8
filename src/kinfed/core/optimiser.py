"""SGD and Adam as pure functions on lists of tensors, for clients and server alike."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import torch
from torch import Tensor

from .field_checks import In, NonNegative, Positive, Settings

Tensors = tuple[Tensor, ...] | list[Tensor]


class OptState(NamedTuple):
    """What an optimiser keeps between steps; lists run parallel to the parameters."""

    step: Tensor  # []
    first: tuple[Tensor, ...]
    second: tuple[Tensor, ...]


class Optimiser(Protocol):
    """`init` makes the first state; `step` returns new parameters and a new state.

    Nothing changes in place, unless `inplace` is set: then the parameters do, and they themselves are returned.
    """

    @property
    def lr(self) -> float: ...

    def init(self, params: Tensors) -> OptState: ...

    def step(
        self, params: Tensors, grads: Tensors, state: OptState, inplace: bool = False
    ) -> tuple[list[Tensor], OptState]: ...


@dataclass(frozen=True)
class SGD(Settings):
    """Stochastic gradient descent; momentum and weight decay as in `torch.optim.SGD`.

    >>> import torch
    >>> sgd, weights = kinfed.SGD(lr=0.1), (torch.tensor([1.0]),)
    >>> weights, state = sgd.step(weights, (torch.tensor([2.0]),), sgd.init(weights))
    >>> weights[0].item()
    0.800000011920929
    """

    lr: Positive = 0.1  # learning rate
    momentum: NonNegative = 0.0  # share of the previous step that is added to the next
    weight_decay: NonNegative = 0.0  # times a parameter, added to its gradient

    def init(self, params: Tensors) -> OptState:
        first = tuple(torch.zeros_like(p) for p in params) if self.momentum else ()
        return OptState(torch.zeros(()), first, ())

    def step(
        self, params: Tensors, grads: Tensors, state: OptState, inplace: bool = False
    ) -> tuple[list[Tensor], OptState]:
        if self.weight_decay:
            grads = [g + self.weight_decay * p for p, g in zip(params, grads, strict=True)]
        if self.momentum:
            grads = [self.momentum * m + g for m, g in zip(state.first, grads, strict=True)]
            state = state._replace(first=tuple(grads))
        if inplace:
            torch._foreach_add_(params, grads, alpha=-self.lr)
            return list(params), state
        return [torch.add(p, g, alpha=-self.lr) for p, g in zip(params, grads, strict=True)], state


@dataclass(frozen=True)
class Adam(Settings):
    """Adam (Kingma and Ba, 2015), with bias correction; weight decay is added to the gradient."""

    lr: Positive = 0.001  # learning rate
    beta1: Annotated[float, In("[0, 1)")] = 0.9  # decay of the mean of gradients
    beta2: Annotated[float, In("[0, 1)")] = 0.999  # decay of the mean of their squares
    eps: NonNegative = 1e-8  # added to the root of that mean
    weight_decay: NonNegative = 0.0  # times a parameter, added to its gradient

    def init(self, params: Tensors) -> OptState:
        zeros = tuple(torch.zeros_like(p) for p in params)
        step = params[0].new_zeros(()) if params else torch.zeros(())
        return OptState(step, zeros, zeros)

    def step(
        self, params: Tensors, grads: Tensors, state: OptState, inplace: bool = False
    ) -> tuple[list[Tensor], OptState]:
        if self.weight_decay:
            grads = [g + self.weight_decay * p for p, g in zip(params, grads, strict=True)]
        step = state.step + 1
        first = tuple(torch.lerp(g, m, self.beta1) for m, g in zip(state.first, grads, strict=True))
        second = tuple(torch.lerp(g * g, m, self.beta2) for m, g in zip(state.second, grads, strict=True))
        rate = self.lr / (1 - self.beta1**step)
        scale = (1 - self.beta2**step).sqrt()
        moved = [p - rate * m / (q.sqrt() / scale + self.eps) for p, m, q in zip(params, first, second, strict=True)]
        if inplace:
            torch._foreach_copy_(params, moved)
            moved = list(params)
        return moved, OptState(step, first, second)


def clip_norm(grads: list[Tensor], limit: float) -> list[Tensor]:
    """The gradient, scaled down to the norm `limit` if it is longer."""
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    shrink = (limit / norm.clamp(min=1e-12)).clamp(max=1)
    return [g * shrink for g in grads]
