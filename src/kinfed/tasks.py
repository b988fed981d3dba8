"""What a model's outputs mean: the loss it is trained with and the scores it is judged by."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import UsageError


class Task(Protocol):
    """`loss` is per example; `score` gives numbers for one client and runs under vmap."""

    metric: ClassVar[str]  # the score that selects rounds and heads tables
    higher_is_better: ClassVar[bool]

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor: ...  # [B]

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]: ...  # [] each

    def check(self, y: Tensor) -> None: ...


@dataclass(frozen=True)
class Classification:
    """Cross-entropy and accuracy; outputs are logits [B, C], y is int64 [B] in 0..C-1."""

    classes: int
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none")

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        hit = (outputs.argmax(-1) == y).to(outputs.dtype)
        return {"accuracy": _mean(hit, weight), "loss": _mean(self.loss(outputs, y), weight)}

    def check(self, y: Tensor) -> None:
        if y.dtype != torch.int64 or y.ndim != 1:
            raise UsageError(f"classification needs labels as int64 [n]; got {y.dtype} {list(y.shape)}")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            raise UsageError(
                f"labels must lie in 0..{self.classes - 1} for {self.classes} classes; "
                f"got {int(y.min())}..{int(y.max())}"
            )


@dataclass(frozen=True)
class Regression:
    """Mean squared error over all outputs of an example; y is float [B, ...]."""

    metric: ClassVar[str] = "mse"
    higher_is_better: ClassVar[bool] = False

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (
            (outputs.reshape(y.shape) - y).square().flatten(1).mean(1)
            if y.ndim > 1
            else (outputs.reshape(y.shape) - y).square()
        )

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        loss = _mean(self.loss(outputs, y), weight)
        return {"mse": loss, "loss": loss}

    def check(self, y: Tensor) -> None:
        if not y.is_floating_point():
            raise UsageError(f"regression needs float targets; got {y.dtype}")


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    return (values * weight).sum() / weight.sum().clamp(min=1)
