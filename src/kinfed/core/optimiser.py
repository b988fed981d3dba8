"""SGD and Adam as pure functions on lists of tensors, for clients and server alike."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import torch
from torch import Tensor

from .settings import In, NonNegative, Positive, Settings

Tensors = tuple[Tensor, ...] | list[Tensor]


class OptState(NamedTuple):
    """What an optimiser remembers between steps; lists run parallel to the parameters."""

    step: Tensor  # []
    first: tuple[Tensor, ...]
    second: tuple[Tensor, ...]


class Optimiser(Protocol):
    """`init` makes the memory; `step` returns new parameters and new memory.

    It changes nothing in place, except with `inplace` the parameters, which are then returned themselves.
    """

    @property
    def lr(self) -> float: ...

    def init(self, values: Tensors) -> OptState: ...

    def step(
        self, values: Tensors, slopes: Tensors, memory: OptState, inplace: bool = False
    ) -> tuple[list[Tensor], OptState]: ...


@dataclass(frozen=True)
class SGD(Settings):
    """Stochastic gradient descent; momentum and weight decay as in `torch.optim.SGD`."""

    lr: Positive = 0.01  # learning rate
    momentum: NonNegative = 0.0  # share of the former step that is added to the next
    weight_decay: NonNegative = 0.0  # times a parameter, added to its gradient

    def init(self, values: Tensors) -> OptState:
        kept = tuple(torch.zeros_like(v) for v in values) if self.momentum else ()
        return OptState(torch.zeros(()), kept, ())

    def step(
        self, values: Tensors, slopes: Tensors, memory: OptState, inplace: bool = False
    ) -> tuple[list[Tensor], OptState]:
        if self.weight_decay:
            slopes = [s + self.weight_decay * v for v, s in zip(values, slopes, strict=True)]
        if self.momentum:
            slopes = [self.momentum * m + s for m, s in zip(memory.first, slopes, strict=True)]
            memory = memory._replace(first=tuple(slopes))
        if inplace:
            torch._foreach_add_(values, slopes, alpha=-self.lr)
            return list(values), memory
        return [torch.add(v, s, alpha=-self.lr) for v, s in zip(values, slopes, strict=True)], memory


@dataclass(frozen=True)
class Adam(Settings):
    """Adam (Kingma & Ba, 2015), with bias correction; weight decay is added to the gradient."""

    lr: Positive = 0.001  # learning rate
    beta1: Annotated[float, In("[0, 1)")] = 0.9  # decay of the mean of gradients
    beta2: Annotated[float, In("[0, 1)")] = 0.999  # decay of the mean of their squares
    eps: NonNegative = 1e-8  # added to the root of that mean
    weight_decay: NonNegative = 0.0  # times a parameter, added to its gradient

    def init(self, values: Tensors) -> OptState:
        zeros = tuple(torch.zeros_like(v) for v in values)
        step = values[0].new_zeros(()) if values else torch.zeros(())
        return OptState(step, zeros, zeros)

    def step(
        self, values: Tensors, slopes: Tensors, memory: OptState, inplace: bool = False
    ) -> tuple[list[Tensor], OptState]:
        if self.weight_decay:
            slopes = [s + self.weight_decay * v for v, s in zip(values, slopes, strict=True)]
        step = memory.step + 1
        first = tuple(torch.lerp(s, m, self.beta1) for m, s in zip(memory.first, slopes, strict=True))
        second = tuple(torch.lerp(s * s, m, self.beta2) for m, s in zip(memory.second, slopes, strict=True))
        rate = self.lr / (1 - self.beta1**step)
        scale = (1 - self.beta2**step).sqrt()
        moved = [v - rate * m / (q.sqrt() / scale + self.eps) for v, m, q in zip(values, first, second, strict=True)]
        if inplace:
            torch._foreach_copy_(values, moved)
            moved = list(values)
        return moved, OptState(step, first, second)


def shorten(slopes: list[Tensor], limit: float) -> list[Tensor]:
    """The gradient, shortened to the norm `limit` if it is longer."""
    norm = torch.stack([s.square().sum() for s in slopes]).sum().sqrt()
    shrink = (limit / norm.clamp(min=1e-12)).clamp(max=1)
    return [s * shrink for s in slopes]
