"""Predictor: clients' models applied to new rows, to which everything is done that was done to training rows."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.summary import Summary
from ..core.tasks import Scored
from ..data.federation import tensor_of
from ..data.tables.frame import Frame
from ..data.tables.new_readings import Series
from ..data.tables.open_table import frame_of
from ..data.tables.owners import Owners
from ..data.tables.schema import Description, Target, incomplete
from ..data.tables.words import Codes
from ..errors import UsageError
from .prediction_intervals import find_half_widths
from .row_owners import RowOwners, Unknown, check_unknown
from .tested_examples import write_errors

if TYPE_CHECKING:
    import polars

BLOCK = 1 << 15  # rows in one pass through a model
KEPT = 256  # models that stay in memory
ABOUT = ("client", "method", "model")  # columns that say which model answered
MEAN = "mean of all clients"  # the model that answers these under "mean"


class Source(NamedTuple):
    """Where a client's model comes from."""

    method: str
    model: str  # which of those that the method makes


class Batch(NamedTuple):
    """Inputs of models, and whose they are."""

    x: Tensor  # [m, ...]
    at: Tensor  # [n] int64 the rows of x that are asked for
    owners: Owners  # whose model answers each; places behind the clients' own are of names that nobody has
    beside: Mapping[str, "polars.Series"] = {}  # columns [n] that the answers repeat


@dataclass(frozen=True)
class Answers:
    """What a model's outputs mean."""

    targets: tuple[str, ...] = ()  # what is predicted; none: outputs have no names
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()  # of each output, where they are in standard deviations from it
    deviation: tuple[float, ...] = ()
    counts: bool = False  # whether outputs are logarithms of expected counts over the mean
    quantiles: tuple[float, ...] = ()  # side by side for each step ahead, in place of one number
    bounds: tuple[tuple[float, ...], ...] = ()  # of each output, where there are such: the least and the largest

    @classmethod
    def from_targets(cls, targets: Sequence[Target], counts: bool) -> "Answers":
        """What the outputs mean of which these columns are the targets, which may be counts."""
        names, bounds = tuple(target.name for target in targets), tuple(target.bounds for target in targets)
        if targets[0].classes:
            return cls(names, targets[0].classes)
        mean, deviation = (tuple(getattr(target, part) for target in targets) for part in ("mean", "deviation"))
        return cls(names, mean=mean, deviation=deviation, counts=counts, bounds=bounds if all(bounds) else ())

    @classmethod
    def from_summary(cls, summary: Summary, description: Description | None) -> "Answers":
        """What the outputs of a run's models mean; raises UsageError if its folder is too old to say."""
        scale, task = summary.data.scale or {}, summary.data.task or {}
        counts, quantiles = task.get("name") == "counts", tuple(task.get("quantiles", ()))
        plain = task.get("name") not in (None, "regression", "counts", "forecasting", "quantiles")  # one's own task
        if description is not None and description.targets:
            answers = cls.from_targets(description.targets, counts)
            return cls(answers.targets) if plain and not answers.classes else answers
        if len(scales := list(scale.get("targets", {}).values())) == 1:
            name = scale.get("series", {}).get("target", "reading")
            if plain:
                return cls((name,))
            count = summary.data.outputs or 1
            mean, deviation = ((scales[0][part],) * count for part in ("mean", "deviation"))
            return cls(targets=(name,), mean=mean, deviation=deviation, quantiles=quantiles)
        if summary.metric.name not in get_args(Scored):
            return cls()
        classes = summary.data.classes
        return cls(
            (), tuple(map(str, classes if isinstance(classes, list) and classes else range(summary.data.outputs or 0)))
        )

    def columns(self, values: Tensor) -> dict[str, Any]:
        """The answers [n] by name, of `values`: [n, C]: the class and each one's probability, or numbers."""
        import polars

        by_output = values.T.contiguous().numpy()  # [C, n]
        if not self.classes:
            return dict(zip(self._names(len(by_output)), by_output, strict=True))
        answer = polars.Series(self.classes, dtype=polars.String).gather(values.argmax(1).numpy())
        names = [_free(self.targets[0] if self.targets else "class"), *(f"P({label})" for label in self.classes)]
        return dict(zip(names, [answer, *by_output], strict=True))

    def bounds_of(self, values: Tensor, half: Tensor) -> dict[str, Any]:
        """The bounds [n] of intervals by name, of numbers: [n, C] and half of their widths: [n, C]."""
        low, result = values - half, dict[str, Any]()
        ends = ((low.clamp(min=0) if self.counts else low).T, (values + half).T)
        for name, least, largest in zip(self._names(values.shape[1]), *ends, strict=True):
            result |= {f"{name} low": least.numpy(), f"{name} high": largest.numpy()}
        return result

    def values(self, outputs: Tensor) -> Tensor:
        """[n, C] probabilities, or numbers in the targets' own units, of outputs: [n, C]."""
        return outputs.softmax(1) if self.classes else self.in_units(outputs.double())

    def in_units(self, outputs: Tensor) -> Tensor:
        """[n, C] numbers in the targets' own units, of outputs: [n, C]."""
        if not self.mean:
            return outputs
        mean = torch.tensor(self.mean, dtype=torch.float64)
        if self.counts:
            values = outputs.double().exp() * mean
        else:
            values = torch.addcmul(mean, outputs.double(), torch.tensor(self.deviation, dtype=torch.float64))
        if not self.bounds:
            return values
        low, high = torch.tensor(self.bounds, dtype=torch.float64).unbind(1)
        return values.maximum(low).minimum(high)

    def _names(self, count: int) -> list[str]:
        """The names of so many numbers: the targets, or steps ahead of one."""
        if len(self.targets) == count:
            return [_free(name) for name in self.targets]
        if not self.targets:
            return [f"output {i + 1}" for i in range(count)]
        suffixes = [f"@{q:g}" for q in self.quantiles] or [""]
        return [f"{self.targets[0]}+{i // len(suffixes) + 1}{suffixes[i % len(suffixes)]}" for i in range(count)]


def only(names: Sequence[str], description: Description | None) -> str | None:
    """The one client, where tables have no column of clients: a newcomer to real sites."""
    return names[0] if len(names) == 1 and description is not None and not description.client else None


@dataclass(frozen=True)
class Predictor:
    """Answers of clients' models to new rows, when called with a frame of polars or pandas, or with x: [n, ...].

    Text, numbers, missing cells, dates and the readings of series become inputs as in training. Each row is answered by
    the model of `client`, or if that is None by that of the client whom the table's column of clients names. The result
    is a frame of the same library with a row for each row, or for each row with a past, in the same order: `client`,
    `method` and `model` say which model answered; then the predicted class and the probability of each, or numbers in
    the targets' own units. Raises UsageError that names the row and column of what cannot be used.

    `unknown` says what becomes of rows of a client that the run does not know, or of none: an `error`; `skip`, they are
    left out with a warning while there are others; or the `mean` of what all clients' models answer, each counted
    once. By default rows of a table are skipped, and examples of an array are an error.
    """

    names: Sequence[str]  # of all clients
    client: str | None
    shape: tuple[int, ...]  # of an example
    answers: Answers
    module: Callable[[str], nn.Module] = field(repr=False)  # by client
    source: Callable[[str], Source] = field(repr=False)
    description: Description | None = field(default=None, repr=False)  # of a table's columns
    series: Series | None = None  # of readings in a table
    readings: tuple[tuple[float, float], ...] = ()  # mean and deviation of the readings in arrays that are windows
    unknown: Unknown | None = None
    half: Tensor | None = field(default=None, repr=False)  # [N + 1, C] of intervals, by client; at last of others

    def __post_init__(self) -> None:
        check_unknown(self.unknown)

    @classmethod
    def from_summary(
        cls,
        summary: Summary,
        module: Callable[[str], nn.Module],
        source: Callable[[str], Source],
        client: str | None = None,
        unknown: Unknown | None = None,
    ) -> "Predictor":
        """The predictor of a run whose clients' models `module` gives; raises UsageError if its folder is too old."""
        names, scale = summary.clients.names, summary.data.scale or {}
        if summary.data.shape is None:
            raise UsageError(f"{summary.out or 'the run'} does not say what an example is; run again")
        inputs, series = scale.get("inputs", {}), None
        description = Description.from_summary(summary.data.columns, summary.out)
        try:
            if "series" in scale:
                series = Series.of_scale(scale)
        except (LookupError, TypeError, AttributeError):
            raise incomplete(summary.out) from None
        readings: tuple[tuple[float, float], ...] = ()
        if series is None and description is None and "reading" in inputs:
            readings = ((inputs["reading"]["mean"], inputs["reading"]["deviation"]),)
        if description is None and series is None and inputs and not readings:
            raise UsageError(
                f"{summary.out or 'the run'} has no description of its columns, so new rows cannot be read; "
                "run it again"
            )
        return cls(
            names,
            client or only(names, description),
            tuple(summary.data.shape),
            answers=Answers.from_summary(summary, description),
            module=lru_cache(KEPT)(module),
            source=source,
            description=description,
            series=series,
            readings=readings,
            unknown=unknown,
        )

    def of_client(self, client: str | None) -> "Predictor":
        """The same, answering with the model of another client; None: of the client that each row names."""
        return replace(self, client=client)

    def save_errors(self, x: Tensor, y: Tensor, path: Path) -> None:
        """Write how far the first client's answers are off, for intervals; nothing if they have no unit.

        x: [n, ...] are examples as the models take them, and y: [n, ...] their truths.
        """
        if self.answers.mean and not self.answers.quantiles:
            values = self.answers.values(self._outputs(x, torch.arange(len(x)), np.zeros(len(x), np.int64)))
            write_errors(path, [(values - y.reshape(len(y), -1)).float().numpy()])

    def with_intervals(self, errors: Sequence[NDArray[Any]], level: float, source: object) -> "Predictor":
        """The same with bounds, between which this share of truths lies, by the errors: [n, C] on each client's tests.

        Raises UsageError if there are none, or too few; `source` is whose they are.
        """
        if not isinstance(level, int | float) or not 0 < level < 1:
            raise UsageError(f"interval is the share of truths between its bounds, such as 0.9; got {level!r:.80}")
        if errors:
            return replace(self, half=torch.from_numpy(find_half_widths(errors, level)))
        why = (
            "it keeps no errors of test rows that were not trained on, as that of a table or series does once it has "
            "ended; end the run, or run it again"
        )
        if self.answers.classes:
            why = "its answers are classes, each with a probability"
        elif self.answers.quantiles:
            why = "its answers are quantiles, which are bounds already"
        raise UsageError(f"{source} has no intervals: {why}")

    def __call__(self, data: Any) -> Any:
        if isinstance(data, np.ndarray | Tensor):
            return self.arrays(data)
        frame = data if isinstance(data, Frame) else frame_of(data)
        predictions, answered = self.answer_rows(frame)
        if strange := self.strangers(frame):
            names = "', '".join(strange)
            warnings.warn(f"{frame.name}: ignored columns that the run was not trained with: '{names}'", stacklevel=2)
        if frame is data or not type(data).__module__.startswith("pandas"):
            return predictions
        columns = {name: predictions[name].to_list() for name in predictions.columns}
        return sys.modules["pandas"].DataFrame(columns, index=None if self.series else data.index[answered])

    def answer_rows(self, frame: Frame) -> tuple["polars.DataFrame", NDArray[np.bool_]]:
        """The answers to a table's rows, and which of [n] rows have one: all that are not skipped."""
        layout = self.description or self.series
        others = "left out" if self.series is not None else f"answered by the model of '{self.client}', as asked"
        client = layout.client if layout else ""
        frame = frame.with_joined(client)
        answered = self._owners.select_rows(frame, client, others)
        return self._answer(self._batch(frame if answered.all() else frame.keep(answered))), answered

    def _batch(self, frame: Frame) -> Batch:
        """The inputs that a table's rows are; raises UsageError for one of an unknown client, unless all answer it."""
        if self.series is not None:
            owners = self._owners.find(frame, self.series.client, alone=True)
            frame.need(self.series.columns)
            ahead = self.series.windows(frame, owners)
            time = frame[self.series.time].values.gather(ahead.rows)
            return Batch(ahead.x, ahead.at, owners._replace(who=ahead.who), {_free(self.series.time): time})
        if self.description is None:
            raise UsageError("the run was trained on arrays, not on a table; give x: [n, ...], or a file .npz with x")
        owners = self._owners.find(frame, self.description.client)
        x = self.description.encode(frame, self.client)  # [n, d]
        return Batch(x, torch.arange(len(x)), owners)

    def strangers(self, frame: Frame) -> list[str]:
        """The columns of a table that the training table had not, used or dropped; answers do not depend on them."""
        expected = {*frame.added}
        if self.series is not None:
            expected |= {self.series.client, *self.series.columns, *self.series.dropped}
        if self.description is not None:
            expected |= {self.description.client, *self.description.dropped}
            expected |= {column.name for column in (*self.description.inputs, *self.description.targets)}
        return [name for name in frame.columns if name not in expected]

    def arrays(self, values: NDArray[Any] | Tensor, clients: Sequence[str] | None = None) -> "polars.DataFrame":
        """The answers to values x: [n, ...] by the clients: [n], or by `client`.

        Bytes are images, scaled from 0..255 to -1..1 as kinfed's own are. Readings are in their own unit, NaN where one
        is missing. All else is as it was in training.
        """
        x = tensor_of(values, "x")
        if self.client is None and clients is None:
            raise UsageError("whose model is to answer? name a client, or give an array of their names")
        if tuple(x.shape[1:]) != self.shape or not len(x):
            raise UsageError(f"examples are {list(self.shape)} each, at least one; got {list(x.shape)}")
        given = [self.client] if self.client is not None else [str(owner) for owner in clients or ()]
        if len(given) not in (1, len(x)):
            raise UsageError(f"{len(x)} examples need as many names of clients; got {len(given)}")
        owners, kept = self._owners.find_named([given[i] for i in np.broadcast_to(np.arange(len(given)), len(x))])
        x = x[torch.from_numpy(kept)]
        x = x.float().div(127.5).sub(1) if x.dtype == torch.uint8 else x.float()
        if self.scales(owners.names[0]):
            x = scale_windows(
                x, torch.tensor([self.scales(name) for name in owners.names], dtype=torch.float64)[owners.who]
            )
        if not bool(x.isfinite().all()):
            bad = int((~x.isfinite()).flatten(1).any(1).nonzero()[0])
            raise UsageError(f"x holds NaN or infinity, first in example {bad}; fill or drop these values first")
        return self._answer(Batch(x, torch.arange(len(x)), owners))

    def scales(self, client: str) -> Sequence[tuple[float, float]]:
        """[C] mean and deviation by which the first inputs of a step of a client's windows are scaled, if they are."""
        return self.readings if self.series is None else self.series.scales(client)

    @cached_property
    def _owners(self) -> RowOwners:
        return RowOwners(self.names, self.client, self.unknown)

    def _answer(self, batch: Batch) -> "polars.DataFrame":
        import polars

        places, where = np.unique(batch.owners.who, return_inverse=True)
        sources = (self.source(self.names[i]) if i < len(self.names) else Source("", MEAN) for i in places)
        about = [(batch.owners.names[i], *source) for i, source in zip(places, sources, strict=True)]
        columns = zip(ABOUT, zip(*about, strict=True), strict=True)
        which = {name: polars.Series(values, dtype=polars.String).gather(where) for name, values in columns}
        values = self._values(batch)
        answers = self.answers.columns(values)
        if self.half is not None:
            half = self.half[torch.from_numpy(np.minimum(batch.owners.who, len(self.names)))]
            answers |= self.answers.bounds_of(values, half)
        return polars.DataFrame(which | dict(batch.beside) | answers)

    def _values(self, batch: Batch) -> Tensor:
        """[n, C] probabilities, or numbers in the targets' own units; of unknown clients the mean over all models."""
        who, count = batch.owners.who, len(self.names)
        strange = np.flatnonzero(who >= count)
        if not len(strange):
            return self.answers.values(self._outputs(batch.x, batch.at, who))
        at = batch.at[torch.from_numpy(strange)]
        answers = (self.answers.values(self._outputs(batch.x, at, np.full(len(at), i))) for i in range(count))
        mean = sum(answers, torch.zeros(())) / count
        result = mean.new_empty(len(who), mean.shape[1])
        result[torch.from_numpy(strange)] = mean
        if len(rest := np.flatnonzero(who < count)):
            rows = torch.from_numpy(rest)
            result[rows] = self.answers.values(self._outputs(batch.x, batch.at[rows], who[rest]))
        return result

    def _outputs(self, x: Tensor, at: Tensor, who: Codes) -> Tensor:
        """[n, C] what the models of clients who: [n] make of the rows at: [n] of inputs x: [m, ...]."""
        order = np.argsort(who, kind="stable")
        begin = np.flatnonzero(np.diff(who[order], prepend=-1))
        result: Tensor | None = None
        with torch.inference_mode():
            for rows in np.split(order, begin[1:]):
                module = self.module(self.names[who[rows[0]]])
                kind = next(module.parameters()).dtype
                for part in torch.from_numpy(rows).split(BLOCK):
                    outputs = module(x[at[part]].to(kind)).flatten(1)
                    if result is None:
                        result = outputs.new_empty(len(order), outputs.shape[1])
                    result[part] = outputs
        assert result is not None
        return result


def _free(name: str) -> str:
    """The name of a column of answers beside those that say which model answered."""
    return f"predicted {name}" if name in ABOUT else name


def scale_windows(x: Tensor, scales: Tensor) -> Tensor:
    """Windows x: [n, past, F] with the first C inputs of each step scaled as in training.

    A missing value takes the one before it, or the mean if there is none before. `scales` are means and deviations,
    [C, 2] or [n, C, 2] for each window, float64.
    """
    mean, deviation = scales.unbind(-1)
    count = mean.shape[-1]
    last = torch.zeros_like(x[:, 0, :count].double())
    steps = []
    for step in x[..., :count].double().unbind(1):
        scaled = (step - mean) / deviation
        last = torch.where(scaled.isnan(), last, scaled)
        steps.append(last)
    return torch.cat([torch.stack(steps, 1).to(x.dtype), x[..., count:]], -1)
