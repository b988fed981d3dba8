"""A step of SGD that is taken as soon as a layer's part of the gradient is known, and what a fused layer is."""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

LONG = 128  # rows of a product up to which the step is taken within it

Named = dict[str, Tensor]


class Unfused(Exception):
    """There is no fused form; the message says why."""


class Descent(NamedTuple):
    r"""SGD on the loss $+ \frac{pull}{2}\|\theta\|^2 + slope \cdot \theta$; weight decay is a part of `pull`.

    If `aligned`, $slope \cdot \theta / \|\theta\|$ takes the place of the last term.
    """

    lr: float
    pull: float = 0.0
    slope: Tensor | None = None  # [K, d]
    aligned: bool = False
    clip: float = math.inf  # the greatest norm of a client's gradient of the loss alone


class Batches(NamedTuple):
    """Which examples every client's steps take; a client's own pool rows are `rows`."""

    rows: Tensor  # [K, n] int64
    place: Tensor  # [K, T, B] int64 positions in `rows`; those that count come first in every batch
    weight: Tensor  # [K, T, B] 1 on rows that count, 0 on those that only fill a batch up
    valid: Tensor  # [K, T] bool, False past the client's last step
    classes: Tensor | None = None  # [K, C] the weight of each class in the loss; None: all the same
    importance: Tensor | None = None  # [K, T, B] example weights over the mean of the client's; None: all count alike

    def select(self, at: slice | Tensor) -> "Batches":
        """The batches of some of the clients."""
        return Batches(*(None if t is None else t[at] for t in self))  # type: ignore[arg-type]

    def shares(self, real: Tensor) -> Tensor:
        """[T, K, B, 1] of each row's loss in that of its batch, which has real: [K, T] rows that count."""
        share = self.weight / real.clamp(min=1).unsqueeze(-1)
        return (share if self.importance is None else share * self.importance).transpose(0, 1).unsqueeze(-1)


class Step:
    """A step of SGD on stacked tensors, each updated as soon as the factors of its gradient are known."""

    def __init__(self, tensors: Named, moving: frozenset[str], descent: Descent, slopes: Named) -> None:
        self.moving, self._tensors, self._slopes = moving, tensors, slopes
        self._descent, self._lr, self._clip = descent, descent.lr, descent.clip
        self._keep: float | Tensor = 1 - descent.lr * descent.pull  # [k] where it differs between clients
        self._lengths: Tensor | None = None  # [k] of the tensors, by which slopes are divided
        self._weigh_penalty()
        self._waiting: list[tuple[str, Tensor, Tensor | None, slice]] = []  # for the norm of a gradient that is cut

    def _weigh_penalty(self) -> None:
        r"""Weigh the penalty of the next step by where the tensors are now.

        The gradient of $slope \cdot \theta / \|\theta\|$ is $(slope - (slope \cdot u) u) / \|\theta\|$ with
        $u = \theta / \|\theta\|$.
        """
        if not self._descent.aligned:
            return
        # In the tensors' order, because a set's differs from process to process, and with it the rounding of sums.
        names = [name for name in self._tensors if name in self.moving]
        moving = [(self._tensors[name].flatten(1), self._slopes[name].flatten(1)) for name in names]
        squares = torch.stack([tensor.square().sum(1) for tensor, _ in moving]).sum(0)
        product = torch.stack([(tensor * slope).sum(1) for tensor, slope in moving]).sum(0)
        self._lengths = squares.sqrt()
        self._keep = 1 - self._lr * (self._descent.pull - product / (squares * self._lengths))

    def descend_product(self, name: str, g: Tensor, x: Tensor, rows: slice = slice(None)) -> None:
        """Move the tensor [k, out, in], or these of its rows, by its gradient g^T x; g: [k, m, out], x: [k, m, in]."""
        if name in self.moving and self._clip < math.inf:
            self._waiting.append((name, g, x, rows))
        elif name in self.moving:
            self._take_product(name, g, x, rows)

    def descend_sum(self, name: str, g: Tensor, rows: slice = slice(None)) -> None:
        """Move the tensor [k, out], or these of its rows, by its gradient, the sum over m of g: [k, m, out]."""
        if name in self.moving and self._clip < math.inf:
            self._waiting.append((name, g, None, rows))
        elif name in self.moving:
            self._take_sum(name, g, rows)

    def finish(self) -> None:
        """End a step of all tensors: those that waited for the norm of the whole gradient move, too."""
        if self._waiting:
            self._take_waiting()
        self._weigh_penalty()

    def _take_waiting(self) -> None:
        """Take the steps that waited, by a gradient whose norm is at most `clip`.

        That of g^T x is the root of the sum of g g^T times x x^T, which are small where a batch is.
        """
        squares = [
            (torch.bmm(g, g.mT) * torch.bmm(x, x.mT)).sum((1, 2)) if x is not None else g.sum(1).square().sum(1)
            for _, g, x, _ in self._waiting
        ]
        norm = torch.stack(squares).sum(0).clamp(min=0).sqrt()  # [k]
        share = (self._clip / norm.clamp(min=1e-12)).clamp(max=1)[:, None, None]
        for name, g, x, rows in self._waiting:
            if x is None:
                self._take_sum(name, g * share, rows)
            else:
                self._take_product(name, g * share, x, rows)
        self._waiting.clear()

    def _take_product(self, name: str, g: Tensor, x: Tensor, rows: slice) -> None:
        tensor = self._tensors[name][:, rows]
        if 8 * x.shape[2] < x.shape[1]:  # a long and narrow x is served badly on this side of a product
            self._shrink(tensor).sub_(torch.bmm(x.mT, g).mT, alpha=self._lr)
        elif x.shape[1] > LONG or isinstance(self._keep, Tensor):
            # Parts of a long sum would be rounded one by one to what the weight can hold.
            self._shrink(tensor).sub_(torch.bmm(g.mT, x), alpha=self._lr)
        else:
            tensor.baddbmm_(g.mT, x, beta=self._keep, alpha=-self._lr)
        self._drift(name, rows)

    def _take_sum(self, name: str, g: Tensor, rows: slice) -> None:
        self._shrink(self._tensors[name][:, rows]).sub_(g.sum(1), alpha=self._lr)
        self._drift(name, rows)

    def _shrink(self, tensor: Tensor) -> Tensor:
        if isinstance(self._keep, Tensor):
            return tensor.mul_(_widen(self._keep, tensor))
        return tensor if self._keep == 1 else tensor.mul_(self._keep)

    def _drift(self, name: str, rows: slice) -> None:
        if not self._slopes:
            return
        tensor, slope = self._tensors[name][:, rows], self._slopes[name][:, rows]
        if self._lengths is None:
            tensor.sub_(slope, alpha=self._lr)
        else:
            tensor.addcdiv_(slope, _widen(self._lengths, tensor), value=-self._lr)


def _widen(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers [k] with the axes of a tensor [k, ...]."""
    return numbers.view(-1, *[1] * (like.ndim - 1))


class Part(Protocol):
    """A piece of a model on stacked batches [k, m, ...]. It may overwrite its inputs."""

    names: tuple[str, ...]  # of its tensors

    def forward(self, tensors: Named, x: Tensor, before: Any) -> tuple[Tensor, Any]:
        """Outputs, and what the backward pass needs; `before` is that of the last step, whose memory may be reused."""

    def backward(self, tensors: Named, saved: Any, g: Tensor, step: Step, deep: bool) -> Tensor:
        """Move the part's tensors, g being the loss's gradient at its outputs; if `deep`, return that at its inputs."""
