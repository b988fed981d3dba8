"""Tasks: the loss that a model is trained with and the scores that it is judged by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError, nearest
from . import metrics
from .field_checks import Count, In, NonNegative, Positive, Settings
from .registry import Registry

MARGIN = 0.1  # of the range of targets that were trained on, how far beyond it an answer may be
RARE = 0.2  # labels count as imbalanced if the rarest class has less than this share, and an even share is more
UNEVEN = 1.5  # labels count as imbalanced if the largest class has more than this many times its even share
Scored = Literal["accuracy", "log_loss"]  # what heads the tables of labels


@runtime_checkable
class Task(Protocol):
    """`loss` is per example; `score` returns numbers for one client and runs under vmap.

    A task may have more attributes: `unit`, what its metric is counted in ("%" for a share, which is in 0..1 and shown
    times 100), `opposite`, the scores for which the opposite of `higher_is_better` holds ("loss" is always better if
    lower), and `outputs(y)`, how many numbers a model gives for an example of targets y: [n, ...] (else as many as y).
    """

    @property
    def metric(self) -> str:
        """The score that heads tables, and selects rounds unless select_by names another."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a client does better with a higher metric."""

    @property
    def selectable(self) -> tuple[str, ...]:
        """The scores that may select rounds."""

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor: ...  # [B]

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]: ...  # [] each

    def check(self, y: Tensor) -> None:
        """Raise UsageError unless y: [n, ...] are targets of this task; called when a federation is made."""


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

    And these, which are lower the better and defined for every client:
    - `brier`, the mean squared distance of the probabilities from 0 and 1, summed over classes; of two classes, that of
      class 1 alone (Brier 1950).
    - `ece`, the expected calibration error: how far the share of right answers is from the probability of the predicted
      class, on average over 15 bins of that probability, weighted by their examples (Guo et al. 2017).
    - `log_loss`, the mean of -log of the probability of the true class.

    `selects` is the score that selects rounds unless a run's `select_by` names another: "loss" where users get
    probabilities, as from a table of theirs, and accuracy says little of these.

    `scored` is the metric, the score that heads tables and that verdicts compare. Where nearly all examples are of one
    class, "log_loss" shows differences that accuracy does not.

    With `reweighted` a run's summary also has the accuracy of each client's model on all clients' test examples,
    weighted by the client's shares of labels in training; this takes a pass of every model at the end of a run.
    """

    classes: int
    by_class: bool | None = None
    reweighted: bool = False
    selects: str = ""
    scored: Scored = "accuracy"
    selectable: ClassVar[tuple[str, ...]] = ("accuracy", *metrics.BY_CLASS, *metrics.CALIBRATION, "loss")

    @property
    def metric(self) -> str:
        """The score that heads tables."""
        return self.scored

    @property
    def higher_is_better(self) -> bool:
        """Whether it is accuracy."""
        return self.scored == "accuracy"

    @property
    def unit(self) -> str:
        """ "%" of accuracy."""
        return "%" if self.higher_is_better else ""

    @property
    def opposite(self) -> tuple[str, ...]:
        """The scores that are better if lower where the metric is better if higher, or the other way round."""
        recalls = (f"recall@{c}" for c in range(self.classes))
        return metrics.CALIBRATION if self.higher_is_better else ("accuracy", *metrics.BY_CLASS, *recalls)

    def outputs(self, y: Tensor) -> int:
        """How many numbers a model gives: one for each class."""
        return self.classes

    def is_uneven(self, y: Tensor) -> bool:
        """Whether labels y: [n] need scores by class.

        They do if there are two classes, if the largest is above UNEVEN even shares, or if an even share is above RARE
        and the smallest is below.
        """
        counts = torch.bincount(y, minlength=self.classes)
        rare = self.classes * RARE < 1 and bool(counts.min() < RARE * counts.sum())
        return self.classes < 3 or rare or bool(counts.max() * self.classes > UNEVEN * counts.sum())

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none")

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        hit = (outputs.argmax(-1) == y).to(outputs.dtype)
        # As `loss`, to the bit. Under vmap F.cross_entropy would import PyTorch's compiler: half a second.
        loss = -F.log_softmax(outputs, -1).gather(-1, y[:, None]).squeeze(-1)
        scores = {"accuracy": metrics.weighted_mean(hit, weight), "loss": metrics.weighted_mean(loss, weight)}
        if not self.by_class:
            return scores if self.scored in scores else scores | {self.scored: scores["loss"]}
        calibration = metrics.calibration_errors(outputs, y, weight) | {"log_loss": scores["loss"]}
        return scores | metrics.scores_by_class(outputs, y, weight, self.classes) | calibration

    def check(self, y: Tensor) -> None:
        if y.dtype != torch.int64 or y.ndim != 1:
            raise UsageError(f"classification needs labels as int64 [n]; got {y.dtype} {list(y.shape)}")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            raise UsageError(
                f"labels must lie in 0..{self.classes - 1} for {self.classes} classes; "
                f"got {int(y.min())}..{int(y.max())}"
            )


@dataclass(frozen=True)
class Regression(Settings):
    """Numbers, scored in their own unit; y is float [B, ...].

    A model's outputs are in standard deviations from the mean, and so is the loss, the mean squared error over all
    outputs of an example. Without `mean` and `deviation` these are 0 and 1. Answers beyond `low` and `high`, in the
    targets' unit, are taken for these where they are scored and given, but not in the loss.
    Scores are `mae`, `rmse`, `mse` and `r2`:
    1 - (sum of squared errors) / (sum of squared differences from the mean of this client's targets), averaged over
    targets, NaN where a client's targets are all the same.

    Several targets with `names`, each in a unit of its own, have `mae@NAME`, `rmse@NAME` and `r2@NAME`; over all of
    them there are `nmae`, the mean absolute error in standard deviations, and `r2`.
    """

    mean: tuple[Annotated[float, In("(-inf, inf)")], ...] = ()  # of each target
    deviation: tuple[Positive, ...] = ()  # their standard deviations
    names: tuple[str, ...] = ()
    low: tuple[Annotated[float, In("(-inf, inf)")], ...] = ()  # of each target the least answer, see `find_bounds`
    high: tuple[Annotated[float, In("(-inf, inf)")], ...] = ()  # and the largest
    higher_is_better: ClassVar[bool] = False
    opposite: ClassVar[tuple[str, ...]] = ("r2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.deviation):
            raise UsageError(
                f"regression needs as many means as deviations; got {len(self.mean)} and {len(self.deviation)}"
            )
        if self.names and self.mean and len(self.names) != len(self.mean):
            raise UsageError(
                f"regression needs as many names as means; got {len(self.names)} ({', '.join(self.names):.80}) and "
                f"{len(self.mean)}"
            )
        for i, (mean, deviation) in enumerate(zip(self.mean, self.deviation, strict=True)):
            _check_scale("regression", f"values of '{self.names[i]}'" if self.names else "targets", mean, deviation)

    @property
    def metric(self) -> str:
        """`mae`, or `nmae` of several targets in units of their own."""
        return "nmae" if len(self.names) > 1 else "mae"

    @property
    def selectable(self) -> tuple[str, ...]:
        """The scores over all targets."""
        return ("nmae", "r2", "loss") if len(self.names) > 1 else ("mae", "rmse", "mse", "r2", "loss")

    def _scale(self, like: Tensor) -> tuple[Any, Any]:
        """Mean and deviation: numbers of a single target, [k] of several."""
        count = max(len(self.mean), len(self.names), 1)
        mean, deviation = self.mean or (0.0,) * count, self.deviation or (1.0,) * count
        if count == 1:
            return mean[0], deviation[0]
        kind: Any = {"dtype": like.dtype, "device": like.device}
        return torch.tensor(mean, **kind), torch.tensor(deviation, **kind)

    def standardise(self, y: Tensor) -> Tensor:
        """y: [B, ...] in standard deviations from the mean."""
        if not self.mean:
            return y
        mean, deviation = self._scale(y)
        return (y - mean) / deviation

    def clamp(self, outputs: Tensor) -> Tensor:
        """[B, k] outputs as they are answered: no lower than `low` and no higher than `high`."""
        if not (self.low and self.high):
            return outputs
        mean, deviation = self._scale(outputs)
        low, high = ((outputs.new_tensor(bound) - mean) / deviation for bound in (self.low, self.high))
        return outputs.clamp(low, high)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        squares = (outputs.reshape(y.shape) - self.standardise(y)).square()
        return squares.flatten(1).mean(1) if y.ndim > 1 else squares

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        truth = self.standardise(y).flatten(1) if y.ndim > 1 else self.standardise(y)[:, None]
        outputs = self.clamp(outputs.reshape(truth.shape))
        error = outputs - truth
        column, count = weight[:, None], metrics.positive(weight.sum())
        absolute = (error.abs() * column).sum(0) / count
        squared = (error.square() * column).sum(0) / count  # [k]
        r2 = metrics.r2_score(squared, truth, weight)  # [k]
        defined = ~r2.isnan()
        mean_r2 = torch.where(defined.any(), metrics.weighted_mean(r2.nan_to_num(), defined), torch.nan)
        deviation = self._scale(outputs)[1]
        loss = metrics.weighted_mean(self.loss(outputs, y), weight)
        if len(self.names) < 2:
            mse = loss * deviation**2
            scores = {"mae": (absolute * deviation).mean(), "rmse": mse.sqrt(), "mse": mse, "r2": mean_r2}
            return scores | {"loss": loss}
        scores = {"nmae": absolute.mean(), "r2": mean_r2, "loss": loss}
        for i, name in enumerate(self.names):
            errors = {"mae": absolute[i] * deviation[i], "rmse": squared[i].sqrt() * deviation[i], "r2": r2[i]}
            scores |= {f"{score}@{name}": value for score, value in errors.items()}
        return scores

    def check(self, y: Tensor) -> None:
        if not y.is_floating_point():
            raise UsageError(f"regression needs float targets; got {y.dtype}")
        count = max(len(self.mean), len(self.names))
        if count > 1 and (y.ndim != 2 or y.shape[1] != count):
            raise UsageError(f"regression of {count} targets needs y [n, {count}]; got {list(y.shape)}")


@dataclass(frozen=True)
class Counts(Settings):
    """Whole numbers from 0, such as articles sold; y is float [B] or [B, 1].

    A model's output is the logarithm of the expected count over `mean`. Scores are `deviance`, Poisson's, the mean of
    2 (y log(y / expected) - (y - expected)), 0 at best, and `mae` and `rmse` of the expected count. The loss is half
    the deviance, divided by the mean if that is above 1, so that learning rates for other targets fit. Beyond the
    output of the largest answer it is its tangent there, because a step along an exponential may explode.
    """

    mean: Positive = 1.0  # of the counts
    high: NonNegative = 0.0  # the largest answer, where it is scored and given; 0: there is none
    metric: ClassVar[str] = "deviance"
    higher_is_better: ClassVar[bool] = False
    selectable: ClassVar[tuple[str, ...]] = ("deviance", "mae", "rmse", "loss")

    def _deviances(self, outputs: Tensor, y: Tensor) -> Tensor:
        """[B] of each example."""
        return metrics.poisson_deviance(outputs.flatten() + math.log(self.mean), y.flatten().to(outputs.dtype))

    @property
    def highest(self) -> float:
        """The output of the largest answer."""
        return math.log(self.high / self.mean) if self.high else math.inf

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        inside = outputs.clamp(max=self.highest)
        beyond = (outputs - inside).flatten() * (inside.detach().exp().flatten() * self.mean - y.flatten())
        return (self._deviances(inside, y) + 2 * beyond) / (2 * max(1.0, self.mean))

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        outputs = outputs.clamp(max=self.highest)
        deviance = metrics.weighted_mean(self._deviances(outputs, y), weight)
        error = outputs.flatten().exp() * self.mean - y.flatten()
        return {
            "deviance": deviance,
            "mae": metrics.weighted_mean(error.abs(), weight),
            "rmse": metrics.weighted_mean(error.square(), weight).sqrt(),
            "loss": deviance / (2 * max(1.0, self.mean)),
        }

    def check(self, y: Tensor) -> None:
        if not y.is_floating_point() or y.numel() != len(y):
            raise UsageError(f"counts need float targets [n] or [n, 1]; got {y.dtype} {list(y.shape)}")
        wrong = (y < 0) | (y != y.round())
        if wrong.any():
            raise UsageError(
                f"counts must be whole numbers from 0; example {int(wrong.flatten().nonzero()[0])} has "
                f"{float(y[wrong][0]):g}"
            )


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
        _check_scale("forecasting", "readings", self.mean, self.deviation)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        present = ~y.isnan()
        truth = (torch.where(present, y, self.mean) - self.mean) / self.deviation
        error = (outputs.reshape(y.shape) - truth) * present
        return (error.abs() if self.error == "absolute" else error.square()).mean(-1)

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        present = (~y.isnan()).to(outputs.dtype) * weight[:, None]  # [B, H]
        truth = torch.where(y.isnan(), 0.0, y)
        error = (outputs.reshape(y.shape) * self.deviation + self.mean - truth).abs()
        nonzero = present * (truth != 0)
        relative = error / torch.where(truth == 0, 1.0, truth.abs())
        parts = (present, present * error, present * error.square(), nonzero, nonzero * relative)
        sums = torch.stack([part.sum(0) for part in parts], 1)  # [H, 5]
        scores = {"loss": metrics.weighted_mean(self.loss(outputs, y), weight)}
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


@dataclass(frozen=True)
class Quantiles(Forecasting):
    """Quantiles of the next H readings; a model's outputs are [B, H * Q], the quantiles of a step side by side.

    The loss is the pinball loss (Koenker and Bassett 1978) in standard deviations, whatever `error` is: the error times
    q where the reading is above its quantile q, and times 1 - q where it is below. Scores are `pinball`, in the
    readings' own unit, over all known readings and quantiles, and of several quantiles `coverage`, the share of
    readings from the lowest to the highest quantile, and `width`, their mean distance; at each of `horizons`, too. If
    0.5 is a quantile, it is scored as a forecast is.
    """

    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)
    metric: ClassVar[str] = "pinball"
    selectable: ClassVar[tuple[str, ...]] = ("pinball", "loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_quantiles(self.quantiles)

    def outputs(self, y: Tensor) -> int:
        """How many numbers a model gives: each quantile of each reading of y: [n, H]."""
        return y.shape[1] * len(self.quantiles)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        present = ~y.isnan()
        truth = (torch.where(present, y, self.mean) - self.mean) / self.deviation
        return (metrics.pinball_loss(outputs.reshape(*y.shape, -1), truth, self.quantiles).mean(-1) * present).mean(-1)

    def score(self, outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        says = outputs.reshape(*y.shape, -1)
        scores = {}
        if 0.5 in self.quantiles:
            scores = super().score(says[..., self.quantiles.index(0.5)], y, weight)
        present = (~y.isnan()).to(outputs.dtype) * weight[:, None]  # [B, H]
        truth, values = torch.where(y.isnan(), 0.0, y), says * self.deviation + self.mean
        parts = {"pinball": metrics.pinball_loss(values, truth, self.quantiles).mean(-1)}
        if len(self.quantiles) > 1:
            low, high = values[..., 0], values[..., -1]
            # NaN where the outputs are.
            parts["coverage"] = ((low <= truth) & (truth <= high)).to(outputs.dtype) + 0 * low + 0 * high
            parts["width"] = high - low
        count = present.sum(0)  # [H]
        for name, values in parts.items():
            total = (values * present).sum(0)
            scores[name] = total.sum() / count.sum()
            scores |= {f"{name}@{h}": total[h - 1] / count[h - 1] for h in self.horizons if h <= y.shape[1]}
        return scores | {"loss": metrics.weighted_mean(self.loss(outputs, y), weight)}


def find_bounds(y: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The least and the largest answer for each of k targets that were trained on, y: [n, k]: `MARGIN` beyond them.

    Nothing is below 0 where no target is.
    """
    low, high = y.double().amin(0), y.double().amax(0)
    margin = MARGIN * (high - low)
    least = torch.where(low >= 0, (low - margin).clamp(min=0), low - margin)
    return tuple(least.tolist()), tuple((high + margin).tolist())


def check_quantiles(quantiles: Sequence[Any]) -> None:
    """Raise UsageError unless these are quantiles, in order."""
    numbers = all(isinstance(q, int | float) and 0 < q < 1 for q in quantiles)
    if not quantiles or not numbers or any(a >= b for a, b in pairwise(quantiles)):
        listed = ", ".join(f"{q!r:.20}" for q in quantiles[:8])
        raise UsageError(
            "quantiles must be numbers above 0 and below 1 in increasing order, such as [0.1, 0.5, 0.9]; "
            f"got [{listed}]"
        )


def outputs_of(task: Task, y: Tensor) -> int:
    """How many numbers a model gives for an example, of targets y: [n, ...]."""
    count = getattr(task, "outputs", None)
    return y[:1].numel() if count is None else int(count(y))


def unit_of(task: Task) -> str:
    """What a task's metric is counted in: "%" for a share, "" if it says nothing."""
    return str(getattr(task, "unit", "%" if task.metric.endswith("accuracy") else ""))


def is_higher_better(task: Task, score: str) -> bool:
    """Whether a score of a task is better if it is higher."""
    return score != "loss" and task.higher_is_better != (score in getattr(task, "opposite", ()))


def _check_scale(task: str, what: str, mean: float, deviation: float) -> None:
    """Raise UsageError for numbers so far from zero that they cannot be told apart."""
    kind = torch.get_default_dtype()
    if torch.finfo(kind).eps * abs(mean) > 0.01 * deviation:
        raise UsageError(
            f"{task}: {what} with a mean of {mean:g} and a deviation of {deviation:g} are so far from zero that "
            f"{str(kind).partition('.')[2]} cannot distinguish them; subtract a constant"
        )


TASKS = Registry(
    "kinfed.core",
    {
        "classification": "tasks:Classification",
        "regression": "tasks:Regression",
        "counts": "tasks:Counts",
        "forecasting": "tasks:Forecasting",
        "quantiles": "tasks:Quantiles",
    },
    base="kinfed.core.tasks:Task",
)
SELECTABLE = {
    name
    for task in (Classification(2), Regression(), Regression(names=("a", "b")), Counts(), Forecasting(), Quantiles())
    for name in task.selectable
}


def check_selection(metric: str, *others: Task) -> None:
    """Raise UsageError unless some task, `others` included, has a score of this name that may select rounds."""
    every = SELECTABLE.union(*(task.selectable for task in others))
    if not isinstance(metric, str) or metric not in every:
        raise UsageError(f"select_by: no score {metric!r:.80} can select rounds; {nearest(str(metric), every)}")


def selected_task(task: Task, metric: str) -> Task:
    """The task with the score that selects rounds among its scores; raises UsageError if it has none of this name."""
    check_selection(metric, task)
    if metric not in task.selectable:
        raise UsageError(
            f"select_by: {type(task).__name__.lower()} has no '{metric}'; choose one of {', '.join(task.selectable)}"
        )
    if isinstance(task, Classification) and metric in (*metrics.BY_CLASS, *metrics.CALIBRATION):
        return replace(task, by_class=True)
    return task
