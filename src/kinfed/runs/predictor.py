"""Predictor: clients' models applied to new rows, to which everything is done that was done to training rows."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core.summary import Summary
from ..core.tasks import Classification
from ..data.federation import tensor_of
from ..data.tables.frame import Frame
from ..data.tables.new_readings import Series
from ..data.tables.open_table import frame_of
from ..data.tables.owners import Owners
from ..data.tables.schema import Description, incomplete
from ..data.tables.words import Codes, Words, known_name, name_of
from ..errors import UsageError, nearest

if TYPE_CHECKING:
    import polars

BLOCK = 1 << 15  # rows in one pass through a model
KEPT = 256  # models that stay in memory
NAMED = 8  # clients that a warning names
ABOUT = ("client", "method", "model")  # columns that say which model answered


class Source(NamedTuple):
    """Where a client's model comes from."""

    method: str
    model: str  # which of those that the method makes


class Batch(NamedTuple):
    """Inputs of models, and whose they are."""

    x: Tensor  # [m, ...]
    at: Tensor  # [n] int64 the rows of x that are asked for
    who: Codes  # [n] whose model answers each, by place in the clients' names
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

    @classmethod
    def of(cls, summary: Summary, description: Description | None) -> "Answers":
        """What the outputs of a run's models mean; raises UsageError if its folder is too old to say."""
        scale, task = summary.data.scale or {}, summary.data.task or {}
        counts, quantiles = task.get("name") == "counts", tuple(task.get("quantiles", ()))
        plain = task.get("name") not in (None, "regression", "counts", "forecasting", "quantiles")  # one's own task
        if description is not None and description.targets:
            targets = description.targets
            names = tuple(one.name for one in targets)
            if targets[0].classes:
                return cls(names, targets[0].classes)
            mean, deviation = (tuple(getattr(one, part) for one in targets) for part in ("mean", "deviation"))
            return cls(names) if plain else cls(names, (), mean, deviation, counts)
        if len(scales := list(scale.get("targets", {}).values())) == 1:
            name, count = scale.get("series", {}).get("target", "reading"), summary.data.outputs or 1
            mean, deviation = ((scales[0][part],) * count for part in ("mean", "deviation"))
            return cls((name,)) if plain else cls((name,), (), mean, deviation, False, quantiles)
        if summary.metric.name != Classification.metric:
            return cls()
        known = summary.data.classes
        return cls(
            (), tuple(map(str, known if isinstance(known, list) and known else range(summary.data.outputs or 0)))
        )

    def columns(self, outputs: Tensor) -> dict[str, Any]:
        """The answers [n] by name, of outputs: [n, C]: the class and each one's probability, or numbers."""
        import polars

        if self.classes:
            chances = outputs.softmax(1)
            answer = polars.Series(self.classes, dtype=polars.String).gather(chances.argmax(1).numpy())
            each = zip(self.classes, chances.T.contiguous().numpy(), strict=True)
            return {_free(self.targets[0] if self.targets else "class"): answer} | {f"P({c})": p for c, p in each}
        values = self.in_units(outputs.double())
        return dict(zip(self._names(values.shape[1]), values.T.contiguous().numpy(), strict=True))

    def in_units(self, outputs: Tensor) -> Tensor:
        """[n, C] numbers in the targets' own units, of outputs: [n, C]."""
        if not self.mean:
            return outputs
        mean = torch.tensor(self.mean, dtype=torch.float64)
        if self.counts:
            return outputs.double().exp() * mean
        return torch.addcmul(mean, outputs.double(), torch.tensor(self.deviation, dtype=torch.float64))

    def _names(self, count: int) -> list[str]:
        """The names of so many numbers: the targets, or steps ahead of one."""
        if len(self.targets) == count:
            return [_free(name) for name in self.targets]
        if not self.targets:
            return [f"output {i + 1}" for i in range(count)]
        each = [f"@{q:g}" for q in self.quantiles] or [""]
        return [f"{self.targets[0]}+{i // len(each) + 1}{each[i % len(each)]}" for i in range(count)]


def only(names: Sequence[str], description: Description | None) -> str | None:
    """The one client, where tables have no column of clients: a newcomer to real sites."""
    return names[0] if len(names) == 1 and description is not None and not description.client else None


@dataclass(frozen=True)
class Predictor:
    """Answers of clients' models to new rows, when called with a frame of polars or pandas, or with x: [n, ...].

    Text, numbers, missing cells, dates and the readings of series become inputs as in training. Each row is answered by
    the model of `client`, or if that is None by that of the client whom the table's column of clients names. The result
    is a frame of the same library with a row for each row, or for each row with a past, in the same order, except rows
    of clients that the run does not know, which are skipped while there are others, with a warning: `client`,
    `method` and `model` say which model answered; then the predicted class and the probability of each, or numbers in
    the targets' own units. Raises UsageError that names the row and column of what cannot be used.
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

    @classmethod
    def of(
        cls,
        summary: Summary,
        module: Callable[[str], nn.Module],
        source: Callable[[str], Source],
        client: str | None = None,
    ) -> "Predictor":
        """The predictor of a run whose clients' models `module` gives; raises UsageError if its folder is too old."""
        names, scale = summary.clients.names, summary.data.scale or {}
        if summary.data.shape is None:
            raise UsageError(f"{summary.out or 'the run'} does not say what an example is; run again")
        inputs, series = scale.get("inputs", {}), None
        description = Description.kept(summary.data.columns, summary.out)
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
        answers = Answers.of(summary, description)
        kept, client = lru_cache(KEPT)(module), client or only(names, description)
        return cls(names, client, tuple(summary.data.shape), answers, kept, source, description, series, readings)

    def of_client(self, client: str | None) -> "Predictor":
        """The same, answering with the model of another client; None: of the client that each row names."""
        return replace(self, client=client)

    def __call__(self, data: Any) -> Any:
        if isinstance(data, np.ndarray | Tensor):
            return self.arrays(data)
        frame = data if isinstance(data, Frame) else frame_of(data)
        answered = self._select_rows(frame)
        found = self.frame(frame if answered.all() else frame.keep(answered))
        if strange := self.strangers(frame):
            listed = "', '".join(strange)
            warnings.warn(f"{frame.name}: ignored columns that the run was not trained with: '{listed}'", stacklevel=2)
        if frame is data or not type(data).__module__.startswith("pandas"):
            return found
        columns = {name: found[name].to_list() for name in found.columns}
        return sys.modules["pandas"].DataFrame(columns, index=None if self.series else data.index[answered])

    def _select_rows(self, frame: Frame) -> NDArray[np.bool_]:
        """[n] which rows are of clients of the run, if some are; a warning counts the others, as training left out."""
        layout = self.description or self.series
        if self.client is not None or layout is None or layout.client not in frame.columns:
            return np.ones(len(frame), bool)
        words, places = frame.words(layout.client), self._places
        unknown = np.array([name not in places for name in words.names])[words.codes]
        if unknown.any() and not unknown.all():
            counts = Words(words.names, words.codes[unknown]).counts
            told = [f"{int(words.empty.sum())} without one"] * bool(words.empty.any())
            told += [f"{name} ({count})" for name, count in [*counts.items()][:NAMED]] + ["..."] * (len(counts) > NAMED)
            warnings.warn(
                f"{frame.name}: skipped {int(unknown.sum()):,} of {len(frame):,} rows, of no client of the run: "
                f"{', '.join(told)}; the first: {frame.row(int(unknown.argmax()))}",
                stacklevel=3,
            )
        return ~unknown | unknown.all()

    def frame(self, frame: Frame) -> "polars.DataFrame":
        """The answers to a table's rows; raises UsageError for one of a client that is not of the run."""
        if self.series is not None:
            owners = self._owners(frame, self.series.client, alone=True)
            frame.need(self.series.columns)
            ahead = self.series.windows(frame, owners)
            time = frame.column(self.series.time).gather(ahead.rows)
            return self._answer(Batch(ahead.x, ahead.at, ahead.who, {_free(self.series.time): time}))
        if self.description is None:
            raise UsageError("the run was trained on arrays, not on a table; give x: [n, ...], or a file .npz with x")
        owners = self._owners(frame, self.description.client)
        x = self.description.encode(frame, self.client)  # [n, d]
        return self._answer(Batch(x, torch.arange(len(x)), owners.who))

    def strangers(self, frame: Frame) -> list[str]:
        """The columns of a table that the training table had not, used or dropped; answers do not depend on them."""
        known = {*frame.added}
        if self.series is not None:
            known |= {self.series.client, *self.series.columns, *self.series.dropped}
        if self.description is not None:
            known |= {self.description.client, *self.description.dropped}
            known |= {one.name for one in (*self.description.inputs, *self.description.targets)}
        return [name for name in frame.columns if name not in known]

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
        names = [self.client] if self.client is not None else [str(one) for one in clients or ()]
        who = np.array([self._place(name) for name in names])
        if len(who) not in (1, len(x)):
            raise UsageError(f"{len(x)} examples need as many names of clients; got {len(who)}")
        x = x.float().div(127.5).sub(1) if x.dtype == torch.uint8 else x.float()
        given = [self.names[i] for i in np.broadcast_to(who, len(x))]
        if self.scales(given[0]):
            x = scale_windows(x, torch.tensor([self.scales(name) for name in given], dtype=torch.float64))
        if not bool(x.isfinite().all()):
            bad = int((~x.isfinite()).flatten(1).any(1).nonzero()[0])
            raise UsageError(f"x holds NaN or infinity, first in example {bad}; fill or drop these values first")
        return self._answer(Batch(x, torch.arange(len(x)), np.broadcast_to(who, len(x))))

    def scales(self, client: str) -> Sequence[tuple[float, float]]:
        """[C] mean and deviation by which the first inputs of a step of a client's windows are scaled, if they are."""
        return self.readings if self.series is None else self.series.scales(client)

    def _place(self, name: str) -> int:
        try:
            return self._places[known_name(name, self._places)]
        except KeyError:
            raise UsageError(f"there is no client '{name}'; {nearest(name, self.names)}") from None

    @property
    def _places(self) -> dict[str, int]:
        names = {name: i for i, name in enumerate(self.names)}
        return {name_of(name): i for name, i in names.items()} | names

    def _owners(self, frame: Frame, column: str, alone: bool = False) -> Owners:
        """Whose model answers each row; -1: none, as rows of others where `client` answers for its own `alone`."""
        if column not in frame.columns or (self.client is not None and not alone):
            if self.client is None:
                frame.need([column])  # raises
            return Owners([*self.names], np.full(len(frame), self._place(str(self.client))), None)
        words = frame.text(column)
        places = self._places if self.client is None else {self.client: self._place(self.client)}
        each = [places.get(name, -1) for name in words.names]
        who = np.array(each)[words.codes]
        if self.client is not None and max(each) < 0:
            raise UsageError(f"{frame.name} has no row of client '{self.client}' in column '{column}'")
        if self.client is None and min(each) < 0:
            at = int((who < 0).argmax())
            name = words.names[words.codes[at]]
            raise UsageError(f"{frame.place(at, column)}: there is no client '{name}'; {nearest(name, self.names)}")
        return Owners([*self.names], who, None)

    def _answer(self, batch: Batch) -> "polars.DataFrame":
        import polars

        answers = self.answers.columns(self.outputs(batch))
        asked, where = np.unique(batch.who, return_inverse=True)
        clients = [self.names[i] for i in asked]
        about = zip(ABOUT, zip(*((name, *self.source(name)) for name in clients), strict=True), strict=True)
        which = {name: polars.Series(values).gather(where) for name, values in about}
        return polars.DataFrame(which | dict(batch.beside) | answers)

    def outputs(self, batch: Batch) -> Tensor:
        """[n, C] what the models make of the inputs."""
        order = np.argsort(batch.who, kind="stable")
        begin = np.flatnonzero(np.diff(batch.who[order], prepend=-1))
        result: Tensor | None = None
        with torch.inference_mode():
            for rows in np.split(order, begin[1:]):
                module = self.module(self.names[batch.who[rows[0]]])
                kind = next(module.parameters()).dtype
                for part in torch.from_numpy(rows).split(BLOCK):
                    outputs = module(batch.x[batch.at[part]].to(kind)).flatten(1)
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
