"""Tasks: the loss that a model is trained with and the scores that it is judged by."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError, nearest
from .settings import Count, In, Positive, Settings
from .shelf import Shelf

UNEVEN = 1.5  # labels count as imbalanced if the largest class has more than this many times its even share
BY_CLASS = ("balanced_accuracy", "auc")
ALWAYS = "always"  # the class that a model predicts for every example; NaN if it predicts several
RECALL = "recall@"  # before the number of a class


@runtime_checkable
class Task(Protocol):
    """`loss` is per example; `score` returns numbers for one client and runs under vmap."""

    metric: ClassVar[str]  # the score that heads tables, and selects rounds unless select_by names another
    higher_is_better: ClassVar[bool]
    selectable: ClassVar[tuple[str, ...]]  # scores that may select rounds; "loss" is the one that is better if lower

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor: ...  # [B]

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]: ...  # [] each

    def check(self, y: Tensor) -> None: ...


@dataclass(frozen=True)
class Classification:
    """Cross-entropy and accuracy; outputs are logits [B, C], y is int64 [B] in 0..C-1.

    With `by_class` there are also scores that show what accuracy hides if most examples are of one class. None: a
    federation decides by its training labels, see `is_uneven`. If a client's examples are all of one class, all these
    scores are NaN except the recall of that class:
    - `recall@c`, the share of the examples of class c for which the model predicts c; NaN without such examples.
    - `balanced_accuracy`, the mean of these over the classes that the client has.
    - `auc`, the area under the ROC curve: the share of pairs, an example of a class and one of the rest, in which the
      model gives the former the higher probability of that class; ties count half. With two classes it is that of
      class 1, with more the mean over the classes that the client has (one against the rest, macro).
    - `always`, the class that the model predicts for all examples; NaN if it predicts several.

    With `reweighted` a run's summary also has the accuracy of each client's model on all clients' test examples,
    weighted by the client's shares of labels in training; this takes a pass of every model at the end of a run.
    """

    classes: int
    by_class: bool | None = None
    reweighted: bool = False
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    selectable: ClassVar[tuple[str, ...]] = ("accuracy", *BY_CLASS, "loss")

    def is_uneven(self, y: Tensor) -> bool:
        """Whether labels y: [n] need scores by class: there are two, or the largest is above UNEVEN even shares."""
        counts = torch.bincount(y, minlength=self.classes)
        return self.classes < 3 or bool(counts.max() * self.classes > UNEVEN * counts.sum())

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none")

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        hit = (outputs.argmax(-1) == y).to(outputs.dtype)
        # As `loss`, to the bit. Under vmap F.cross_entropy would import PyTorch's compiler: half a second.
        loss = -F.log_softmax(outputs, -1).gather(-1, y[:, None]).squeeze(-1)
        scores = {"accuracy": _mean(hit, weight), "loss": _mean(loss, weight)}
        return scores | self._by_class(outputs, y, weight) if self.by_class else scores

    def _by_class(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        predicted, real = outputs.argmax(-1), weight > 0
        of_class = (y == torch.arange(self.classes, device=y.device)[:, None]) & real  # [C, n]
        count = of_class.sum(-1)  # [C]
        recall = (of_class & (predicted == y)).sum(-1).to(outputs.dtype) / count
        several = (count > 0).sum() > 1
        least, most = torch.where(real, predicted, predicted.max()).min(), torch.where(real, predicted, 0).max()
        by_class = {
            "balanced_accuracy": _mean(torch.where(count > 0, recall, 0), count > 0),
            "auc": self._auc(outputs, of_class),
            ALWAYS: torch.where(least == most, most.to(outputs.dtype), torch.nan),
        }
        by_class = {name: torch.where(several, value, torch.nan) for name, value in by_class.items()}
        return by_class | {f"{RECALL}{c}": value for c, value in enumerate(recall.unbind())}

    def _auc(self, outputs: Tensor, of_class: Tensor) -> Tensor:
        if self.classes == outputs.shape[-1] == 2:
            # The difference ranks as the probability of class 1 does, and still ranks where that is rounded to 1.
            p = (outputs[:, 1] - outputs[:, 0])[None]
        else:
            p = outputs.softmax(-1).T[1 if self.classes == 2 else 0 : self.classes]  # [C, n]
        p, of_this = p.contiguous(), of_class[-len(p) :]
        rest = of_class.any(0) & ~of_this
        ordered = torch.where(rest, p, torch.inf).sort(-1).values
        twice_below = torch.searchsorted(ordered, p) + torch.searchsorted(ordered, p, right=True)
        pairs = of_this.sum(-1) * rest.sum(-1)
        area = (twice_below * of_this).sum(-1).to(p.dtype) / (2 * pairs).clamp(min=1)
        return _mean(area, pairs > 0) + 0 * p.sum()  # NaN where the outputs are

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
    selectable: ClassVar[tuple[str, ...]] = ("mse", "loss")

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


@dataclass(frozen=True)
class Forecasting(Settings):
    """The next H readings of a series; y is float [B, H] in the readings' own unit, NaN where one is missing.

    A model's outputs [B, H] are in standard deviations from the mean, and so is the loss: absolute or squared error, in
    which every known reading counts alike. Scores are in the readings' own unit: MAE, RMSE and MAPE (in %, over
    readings other than 0) over all known readings, and at each of `horizons` (steps ahead, from 1) that y has, as in
    `mae@3`; NMSE is the mean squared error in standard deviations, over all known readings.
    """

    mean: Annotated[float, In("(-inf, inf)")] = 0.0  # of the readings
    deviation: Positive = 1.0  # their standard deviation
    error: Literal["absolute", "squared"] = "absolute"  # the loss
    horizons: tuple[Count, ...] = (3, 6, 12)  # steps ahead that are scored
    metric: ClassVar[str] = "mae"
    higher_is_better: ClassVar[bool] = False
    selectable: ClassVar[tuple[str, ...]] = ("mae", "rmse", "mape", "nmse", "loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = torch.get_default_dtype()
        if torch.finfo(kind).eps * abs(self.mean) > 0.01 * self.deviation:
            raise UsageError(
                f"forecasting: readings with a mean of {self.mean:g} and a deviation of {self.deviation:g} are so far "
                f"from zero that {str(kind).partition('.')[2]} cannot distinguish them; subtract a constant"
            )

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        known = ~y.isnan()
        truth = (torch.where(known, y, self.mean) - self.mean) / self.deviation
        error = (outputs.reshape(y.shape) - truth) * known
        return (error.abs() if self.error == "absolute" else error.square()).mean(-1)

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        known = (~y.isnan()).to(outputs.dtype) * weight[:, None]  # [B, H]
        truth = torch.where(y.isnan(), 0.0, y)
        error = (outputs.reshape(y.shape) * self.deviation + self.mean - truth).abs()
        nonzero = known * (truth != 0)
        relative = error / torch.where(truth == 0, 1.0, truth.abs())
        parts = (known, known * error, known * error.square(), nonzero, nonzero * relative)
        sums = torch.stack([part.sum(0) for part in parts], 1)  # [H, 5]
        scores = {"loss": _mean(self.loss(outputs, y), weight)}
        for name, at in (("", slice(None)), *((f"@{h}", slice(h - 1, h)) for h in self.horizons if h <= y.shape[1])):
            count, absolute, squared, countable, relative = sums[at].sum(0)
            scores |= {
                f"mae{name}": absolute / count,
                f"rmse{name}": (squared / count).sqrt(),
                f"mape{name}": 100 * relative / countable,
            }
        scores["nmse"] = (scores["rmse"] / self.deviation).square()
        return scores

    def check(self, y: Tensor) -> None:
        if not y.is_floating_point() or y.ndim != 2:
            raise UsageError(f"forecasting needs float targets [n, H], H readings each; got {y.dtype} {list(y.shape)}")
        if any(bool(part.isinf().any()) for part in y.split(2**16)):  # a view of windows is larger than its series
            raise UsageError("forecasting: y holds infinity; a missing reading must be NaN")


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    return (values * weight).sum() / weight.sum().clamp(min=1)


TASKS = Shelf(
    "kinfed.core",
    {"classification": "tasks:Classification", "regression": "tasks:Regression", "forecasting": "tasks:Forecasting"},
    base="kinfed.core.tasks:Task",
)


def check_selection(metric: str, *others: Task) -> None:
    """Raise UsageError unless some task, `others` included, has a score of this name that may select rounds."""
    every = {name for kind in (*TASKS.values(), *others) for name in kind.selectable}
    if not isinstance(metric, str) or metric not in every:
        raise UsageError(f"select_by: there is no score {metric!r:.80}; {nearest(str(metric), every)}")


def selected_task(task: Task, metric: str) -> Task:
    """The task with the score that selects rounds among its scores; raises UsageError if it has none of this name."""
    check_selection(metric, task)
    if metric not in task.selectable:
        raise UsageError(
            f"select_by: {type(task).__name__.lower()} has no '{metric}'; choose one of {', '.join(task.selectable)}"
        )
    return replace(task, by_class=True) if isinstance(task, Classification) and metric in BY_CLASS else task
