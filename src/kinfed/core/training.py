"""Training: how every client trains locally: epochs, batch size, optimiser and its learning rate."""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from ..errors import UsageError
from .field_checks import Count, In, Positive, Settings
from .optimiser import SGD, Adam, Optimiser
from .private.privacy import Privacy
from .tasks import Classification, Task


@dataclass(frozen=True)
class Training(Settings):
    """How every client trains locally, unless its method says otherwise.

    `class_weights` multiply the loss of each example of a class, wherever a client's loss or gradient is taken: a
    number for every class, or "balanced". Then the weight of a class is n / (k m) for a client with n training
    examples, m of them of this class, and k classes in all: its classes count equally, and the mean weight is 1.

    >>> kinfed.Training(epochs=1, optimiser=kinfed.Adam(0.001)).batch
    8
    """

    epochs: Count = 2  # passes over a client's training examples in a round
    batch: Count = 8  # examples in a step
    optimiser: SGD | Adam | Optimiser = SGD(0.1)  # of local training
    steps: Count | None = None  # in a round, in place of epochs: the same for clients with many or few examples
    # "balanced", or a positive number for every class, by which the loss of its examples is multiplied
    class_weights: tuple[Positive, ...] | Literal["balanced"] | None = None
    clip: Annotated[float, In("(0, inf]")] = math.inf  # the greatest norm of a step's gradient; inf: no limit
    privacy: Privacy | None = None  # what uploads may reveal of rows or clients, in a config [privacy]; none: no limit

    def __post_init__(self) -> None:
        weights: Any = self.class_weights
        if weights is not None and not isinstance(weights, str):
            with suppress(TypeError, ValueError, OverflowError):  # what is no list of numbers is refused below
                object.__setattr__(self, "class_weights", tuple(map(float, weights)))
        super().__post_init__()
        if self.noise is not None and self.noise.unit == "row" and self.class_weights == "balanced":
            raise UsageError(
                "training.class_weights 'balanced' counts a client's rows of each class, which has no price under "
                "privacy; give a number for each class, or leave them out"
            )

    @property
    def noise(self) -> Privacy | None:
        """Its privacy, if that has an epsilon: then noise is added, and what has no price does not leave a client."""
        return None if self.privacy is None or self.privacy.epsilon is None else self.privacy

    @property
    def masks(self) -> Privacy | None:
        """Its privacy, if a server of sites is to see sums of uploads alone."""
        return None if self.privacy is None or not self.privacy.masked else self.privacy

    def check(self, task: Task) -> None:
        """Raise UsageError unless the class weights fit the task."""
        weights = self.class_weights
        if weights is not None and not isinstance(task, Classification):
            raise UsageError("training: class_weights need labels, and this data has none; leave them out")
        if isinstance(task, Classification) and isinstance(weights, tuple) and len(weights) != task.classes:
            raise UsageError(
                f"training: class_weights must be {task.classes} numbers, one per class; got {len(weights)}"
            )

    def count_steps(self, sizes: Tensor, epochs: int | None = None) -> Tensor:
        """[...] int64: the local steps of clients with sizes: [...] int64 training examples."""
        if epochs is None and self.steps is not None:
            return torch.full_like(sizes, self.steps)
        return (self.epochs if epochs is None else epochs) * -(-sizes // self.batch)

    def count_examples(self, sizes: Tensor) -> Tensor:
        """[...] int64: the examples in these steps; a method that trains more often in a round takes more."""
        if self.steps is None:
            return self.epochs * sizes
        passes = self.steps // (steps_an_epoch := -(-sizes // self.batch))
        return passes * sizes + (self.steps - passes * steps_an_epoch) * self.batch

    def span(self, rounds: int) -> dict[str, int]:
        """Epochs, or steps, as many as in so many rounds: what `Client.descend` and `Client.batches` take."""
        return {"epochs": rounds * self.epochs} if self.steps is None else {"steps": rounds * self.steps}
