"""Standard models: what could be done without a federation, on the same splits, in seconds.

Those for each client alone need nobody else; those that pool need all rows in one place. They are tuned on the same
validation rows as the federation's methods.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.tasks import Classification, Counts, Forecasting, Quantiles, Regression
from ..data.federation import Federation
from ..errors import UsageError, note_failure
from ..methods.solved.partial_pooling import widen_levels
from ..methods.solved.standard import (
    FEWEST,
    Line,
    constants_of,
    fit_forest,
    fit_line,
    log_counts,
)
from ..models.calendar_means import CalendarMeans, count_times
from ..models.estimator import Estimator
from ..models.holt_winters import HoltWinters
from ..models.repeat import find_season, places_of_season
from ..models.trees import DEEPEST, find_holes
from ..verdict.verdict import EACH, OF_CLIENT
from .config.named_baselines import NamedBaseline

Array = NDArray[np.float64]
Answers = dict[str, Array]  # by split: [n, k] a model's outputs for the rows of all clients, one after the other

PENALTIES = tuple(10.0**power for power in range(-3, 6))  # of ridges, in squared deviations of an input
STRENGTHS = (0.03, 0.3, 3.0)  # C of logistic and Poisson regressions
RAREST = 1e-6  # the least probability of a class
PSEUDO = 5.0  # rows of all clients that are added to a client's, where its mean is an input
ROWS, COLUMNS, CLIENTS = 200_000, 500, 2_000  # with more there are none, or not those that take longest
STEPS = 24  # ahead up to which boosting forecasts each by a model of its own
LONGEST = 366  # steps of a season
REPEATS = "repeat"  # the model that forecasts the last value, or season, once more
SMOOTHS = "holt-winters"
BY_TIME = "calendar-means"
OFTEN = 3  # windows of a client at each time of day, from which a mean is worth something
BOOSTED, TREES = 100, 50  # clients with boosting of their own, and its trees for an output
LIMIT = 60  # seconds after which no other model of an estimator that the user names is fitted
MEAN, MAJORITY = f"{OF_CLIENT}own mean", f"{OF_CLIENT}commonest label"
POOLED = "of all rows"


class Form(NamedTuple):
    """What a client's standard model is as a run of the method `standard`."""

    model: str  # "linear", "changes", "trees", or one that fits itself, such as "repeat,season=7"
    penalty: float = 1.0


@dataclass(frozen=True)
class StandardModel:
    """A standard model, and the outputs that it gives for validation and test rows."""

    name: str
    pools: bool  # whether it needs all rows in one place
    answers: Answers
    form: Form | None = None  # None of one that pools, or is no run of a method


class _Rows(NamedTuple):
    """Training rows that have a target, one client after the other."""

    x: Array  # [n, d]
    y: Any  # [n, k] numbers, [n] numbers, or [n] classes
    who: NDArray[np.int64]  # [n] whose they are
    w: Array | None  # [n] as how many rows each counts; None: all as one

    def by_client(self) -> Iterator[tuple[int, "_Rows"]]:
        """Each client that has rows, and these."""
        for i, mine in _by_client(self.who):
            yield i, _Rows(self.x[mine], self.y[mine], self.who[mine], None if self.w is None else self.w[mine])

    def as_shares(self, classes: int) -> "_Rows":
        """Of classes: each row as the share that each of them has of it, [n, C]."""
        return self._replace(y=np.eye(classes)[self.y])


@dataclass(frozen=True)
class _Data:
    """A federation's rows as arrays."""

    task: Any
    x: Mapping[str, Array]  # by split: [n, d], one client after the other
    y: Mapping[str, Array]  # [n, k] in the units of a model's outputs, or [n] classes
    who: Mapping[str, NDArray[np.int64]]  # [n] whose they are
    weight: Mapping[str, Array | None]  # [n] as how many rows each counts; None: all as one
    clients: int
    holes: Sequence[tuple[int, int]] = ()  # places of numbers that may be missing, and of the inputs that say so
    features: int = 1  # numbers at each step of a window, of which the first is the reading
    dated: bool = False  # whether the others are all of the calendar
    levels: tuple[float, ...] = ()  # of quantiles of the readings

    @classmethod
    def from_federation(cls, federation: Federation) -> "_Data":
        """What is there, of a task that is regression, counts, labels or forecasts."""
        task: Any = federation.task
        x, y, who, weight = {}, {}, {}, dict[str, Array | None]()
        numbers = (
            federation.x.is_floating_point() and federation.x[0].numel() <= COLUMNS and len(federation.x) <= 5 * ROWS
        )
        for split, rows in federation.rows.items():
            at = torch.cat(list(rows))
            x[split] = federation.x[at].flatten(1).double().numpy() if numbers else np.zeros((len(at), 0))
            truth = federation.y[at]
            weight[split] = None if federation.weights is None else federation.weights[at].double().numpy()
            who[split] = np.repeat(np.arange(len(federation)), [len(item) for item in rows])
            if isinstance(task, Regression):
                truth = task.standardise(truth.double()).reshape(len(at), -1)
            elif isinstance(task, Forecasting):
                truth = (truth.double() - task.mean) / task.deviation
            elif isinstance(task, Counts):
                truth = truth.double().reshape(len(at), -1)
            y[split] = truth.numpy()
        features = federation.x.shape[-1] if federation.x.ndim == 3 else 1
        dated = features > 1 and "covariates" not in federation.scale
        levels = task.quantiles if isinstance(task, Quantiles) else ()
        return cls(
            task,
            x,
            y,
            who,
            weight=weight,
            clients=len(federation),
            holes=find_holes(federation.columns),
            features=features,
            dated=dated,
            levels=levels,
        )

    @property
    def splits(self) -> list[str]:
        """Those whose answers are asked: with quantiles also those of training rows, as their errors are."""
        return [split for split in ("train", "validation", "test") if len(self.who[split])][not self.levels :]

    @property
    def has_inputs(self) -> bool:
        return bool(self.x["train"].shape[1])

    @property
    def has_target(self) -> Any:
        """[n] which training rows have a target; where all have, a slice, which copies none."""
        y = self.y["train"]
        missing = np.isnan(y).any(tuple(range(1, y.ndim)))
        return ~missing if missing.any() else slice(None)

    def training(self) -> _Rows:
        """The training rows that have a target."""
        at, w = self.has_target, self.weight["train"]
        return _Rows(self.x["train"][at], self.y["train"][at], self.who["train"][at], None if w is None else w[at])

    def mark_missing(self, split: str) -> Array:
        """[n, d] the inputs of a split with NaN in place of numbers that are missing, as trees read them."""
        x = self.x[split].copy() if self.holes else self.x[split]
        for place, flag in self.holes:
            x[x[:, flag] > 0.5, place] = np.nan
        return x

    def count_times(self) -> int:
        """How many times windows of series are at, by the calendar."""
        every = torch.from_numpy(np.concatenate(list(self.x.values())))
        return count_times(every.view(len(every), -1, self.features), torch.arange(len(every)))

    def last_readings(self, split: str) -> Array:
        """[n, 1] of each window of a series the last reading."""
        return self.x[split][:, -self.features][:, None]

    def as_changes(self) -> "_Data":
        """The windows of series, and the readings to forecast, less the last reading, so that no level is left."""
        x = {split: item.copy() for split, item in self.x.items()}
        for split, item in x.items():
            item[:, :: self.features] -= self.last_readings(split)
        return replace(self, x=x, y={split: item - self.last_readings(split) for split, item in self.y.items()})

    @property
    def rows_each(self) -> float:
        """The median number of training rows of a client."""
        return float(np.median(np.bincount(self.who["train"], minlength=self.clients)))

    def too_large(self, clients: int = 0, times: int = 1) -> str:
        """Why a model takes too long: there are too many rows, or more `clients`, each fitted so many times."""
        if (rows := len(self.who["train"])) > ROWS:
            return f"which takes too long with {rows:,} training rows"
        return f"which takes too long with {self.clients:,} clients" if 0 < clients < self.clients * times else ""


def standard_models(
    federation: Federation, pool: bool = True, named: Sequence[NamedBaseline] = ()
) -> tuple[list[StandardModel], list[str]]:
    """Those that suit a federation's task and size, and in a line each which failed or are too large to fit.

    Where examples are no rows of numbers, or too wide, there is what needs no input, such as the commonest label.
    Without `pool` there are those alone that each client can have by itself. Those that the user has `named` are fitted
    for each client, and to all rows with the client's mean as one more input.
    """
    task = federation.task
    suits = isinstance(task, Regression | Counts | Classification | Forecasting)
    if not suits or not len(torch.cat(list(federation.rows["test"]))):
        return [], []
    data = _Data.from_federation(federation)
    if isinstance(task, Classification):
        recipes = _of_labels(data)
    else:
        recipes = _of_counts(data) if isinstance(task, Counts) else _of_numbers(data)
    models, problems = list[StandardModel](), list[str]()
    if not data.has_inputs:
        why = f"which takes rows of at most {COLUMNS} numbers, at most {5 * ROWS:,} of them"
        problems += [f"baseline left out: {baseline.name}, {why}" for baseline in named]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fits that have not converged: validation rows say what they are worth
        of_user = chain.from_iterable(_of_user(data, baseline) for baseline in named)
        for recipe in chain(recipes, of_user if data.has_inputs else ()):
            if recipe.pools and not pool:
                continue
            if recipe.too_large:
                problems.append(f"baseline left out: {recipe.name}, {recipe.too_large}")
                continue
            with note_failure(problems, f"baseline left out: {recipe.name}"):
                answers, strength = recipe.fit_tuned()
                if data.levels and not recipe.quantiles:
                    answers = _add_errors(data, answers)
                form = Form(recipe.form, strength) if recipe.form else None
                if recipe.form in (REPEATS, SMOOTHS):
                    form = Form(f"{recipe.form},season={int(strength)}")
                models.append(StandardModel(recipe.name, recipe.pools, answers, form))
    return models, problems


class Tuned(NamedTuple):
    """The answers of a model whose strength validation rows chose, or that has the only one there is."""

    answers: Answers
    strength: Any


class _Recipe(NamedTuple):
    """A standard model that has not been fitted."""

    name: str
    fit: Callable[[], Answers | Tuned]
    pools: bool = False
    too_large: str = ""  # why it is not fitted
    form: str = ""  # the model that can hold it, one for each client, whose season tuning may choose; "": none
    quantiles: bool = False  # whether it answers with the quantiles that are asked, where others answer with a mean

    def fit_tuned(self) -> Tuned:
        """Its answers, with a strength of 1 where none is chosen."""
        made = self.fit()
        return made if isinstance(made, Tuned) else Tuned(made, 1.0)


def _of_numbers(data: _Data) -> Iterator[_Recipe]:
    rows, forecasts = data.training(), isinstance(data.task, Forecasting)
    if not len(rows.x):
        return
    mean = _client_means(rows, data.clients)
    yield _Recipe(MEAN, lambda: _constant(data, mean), form="linear")
    if forecasts:
        yield from _of_series(data, rows.y.shape[1])
    if not data.has_inputs:
        return
    yield from _of_ridges(data)
    yield from _of_changes(data) if forecasts and not data.too_large() else _of_trees(data)


def _of_changes(data: _Data) -> Iterator[_Recipe]:
    """Ridges and boosting of series, by their changes since a window's last reading.

    No tree answers beyond the levels of its training windows, and a ridge answers wildly there.
    """
    changes = data.as_changes()

    def fit_since(recipe: _Recipe) -> Tuned:
        """In the units of the forecasts again."""
        answers, strength = recipe.fit_tuned()
        return Tuned({split: item + data.last_readings(split) for split, item in answers.items()}, strength)

    for recipe in (*_of_ridges(changes, "a ridge of changes", "changes"), *_of_trees(changes)):
        yield recipe._replace(fit=partial(fit_since, recipe))


def _of_ridges(data: _Data, name: str = "a ridge", form: str = "linear") -> Iterator[_Recipe]:
    """A ridge of numbers for each client, which a model of this form holds, and one of all rows."""
    yield _fit_lines(data, name, PENALTIES, CLIENTS, form)
    yield _Recipe(
        f"{name} {POOLED}",
        lambda: _tune_pooled(data, PENALTIES, _pooled_ridge(data.training(), data.clients)),
        pools=True,
        too_large=data.too_large(CLIENTS),
    )


def _fit_lines(data: _Data, name: str, penalties: Sequence[float], most: int, form: str = "linear") -> _Recipe:
    """A linear model for each of at most so many clients."""
    rows = data.training()
    return _Recipe(
        f"{name} {EACH}",
        lambda: _tune(data, penalties, lambda c: _fit_each(data, rows, partial(fit_line, data.task, penalty=c))),
        too_large=data.too_large(most),
        form=form,
    )


def _of_trees(data: _Data) -> Iterator[_Recipe]:
    """Boosting of numbers: for each client, and of all rows."""
    rows = data.training()
    mean, outputs = _client_means(rows, data.clients), rows.y.shape[1]
    yield from _boost_each(data, rows, outputs)
    losses: list[dict[str, Any]] = [{"loss": "quantile", "quantile": level} for level in data.levels]
    losses = losses or [{"loss": "squared_error"}]

    def boost() -> Answers:
        by_output = [
            _boost(data, rows._replace(y=rows.y[:, h]), mean[:, h, None], loss)
            for h in range(outputs)
            for loss in losses
        ]
        return {split: np.hstack([answers[split] for answers in by_output]) for split in data.splits}

    many = outputs * len(losses)
    large = f"it has {many} outputs" if many > STEPS or rows.y.size * len(losses) > ROWS else data.too_large()
    yield _Recipe(f"boosting {POOLED}", boost, True, large, quantiles=bool(data.levels))


def _boost_each(data: _Data, rows: _Rows, outputs: int) -> Iterator[_Recipe]:
    """Boosting for each client, if clients are few and half of them have rows enough."""
    if not data.too_large(BOOSTED, outputs) and data.rows_each >= FEWEST:
        inputs = rows._replace(x=data.mark_missing("train")[data.has_target])
        boost = partial(fit_forest, data.task, trees=TREES, depth=DEEPEST)
        yield _Recipe(
            f"boosting {EACH}",
            lambda: _answers(data, _fit_each(data, inputs, boost), missing=True),
            form="trees",
        )


def _of_series(data: _Data, steps: int) -> Iterator[_Recipe]:
    """What a window itself says of the next `steps` readings."""
    past = data.x["train"].shape[1] // data.features
    if not past:
        return

    def repeat(season: int) -> Model:
        """The readings one season before, the last season again and again."""
        at = [place * data.features for place in places_of_season(past, season, steps)]
        return lambda x, who: x[:, at]

    yield _Recipe("the last value", lambda: _answers(data, repeat(1)), form=REPEATS)
    rows = data.training()
    season = 1
    if past > 1:  # training windows tell the season, as nothing is fitted to them
        readings, y = torch.from_numpy(rows.x[:, :: data.features]), torch.from_numpy(rows.y)
        season = find_season(readings, y, range(2, min(past, LONGEST) + 1))
        yield _Recipe("the last season", lambda: Tuned(_answers(data, repeat(season)), season), form=REPEATS)

    def fit_each(module: Estimator) -> Model:
        return _fit_each(data, rows, partial(_fit_estimator, module, (past, data.features)))

    def smooth() -> Tuned:
        """The season is that one or a part of it; as many constants are fitted with each."""
        models = {m: fit_each(HoltWinters(past, steps, m)) for m in range(1, season + 1) if season % m == 0}
        errors = {m: _times((model(rows.x, rows.who) - rows.y) ** 2, rows.w).mean() for m, model in models.items()}
        best = min(errors, key=errors.__getitem__)
        return Tuned(_answers(data, models[best]), best)

    yield _Recipe(f"Holt-Winters {EACH}", smooth, too_large=data.too_large(CLIENTS), form=SMOOTHS)
    if data.dated and (times := data.count_times()) > 1 and len(rows.y) >= OFTEN * data.clients * times:
        yield _Recipe(
            f"{OF_CLIENT}mean by the calendar",
            lambda: _answers(data, fit_each(CalendarMeans(steps, times))),
            form=f"{BY_TIME},times={times}",
        )


class _Estimate(NamedTuple):
    """A module that has fitted itself to a client's windows."""

    module: Estimator
    shape: tuple[int, int]  # of a window

    def answer(self, x: Array) -> Array:
        """[n, H] forecasts for windows as rows, x: [n, past * F]."""
        with torch.no_grad():
            answers: Array = self.module(torch.from_numpy(x).view(-1, *self.shape)).numpy()
        return answers


def _fit_estimator(module: Estimator, shape: tuple[int, int], x: Array, y: Array, w: Array | None = None) -> _Estimate:
    return _Estimate(module.fit_copy(x.reshape(-1, *shape), y, w), shape)


def _of_counts(data: _Data) -> Iterator[_Recipe]:
    """Their outputs are logarithms of counts over the mean of all."""
    rows, middle = data.training(), data.task.mean
    mean = log_counts(_client_means(rows, data.clients, PSEUDO / 10), middle)
    yield _Recipe(MEAN, lambda: _constant(data, mean), form="linear")
    if not data.has_inputs:
        return
    yield _fit_lines(data, "a Poisson regression", [1 / c for c in STRENGTHS], CLIENTS)
    yield from _boost_each(data, rows, 1)
    rows = rows._replace(y=rows.y[:, 0])
    if not (_times(rows.y, rows.w) > 0).any():  # the logarithm of a mean of 0 has no gradient
        return

    def boost() -> Answers:
        counts = _boost(data, rows, np.exp(mean) * middle, {"loss": "poisson"})
        return {split: log_counts(item, middle) for split, item in counts.items()}

    large = data.too_large()
    yield _Recipe(f"a Poisson regression {POOLED}", lambda: _pooled_poisson(data, rows, middle), True, large)
    yield _Recipe(f"boosting {POOLED}", boost, True, large)


def _of_labels(data: _Data) -> Iterator[_Recipe]:
    """Their outputs are logarithms of the classes' probabilities."""
    rows, classes = data.training(), data.task.classes
    shares = _client_means(rows.as_shares(classes), data.clients, 0.1)  # [N, C]
    yield _Recipe(MAJORITY, lambda: _constant(data, np.log(np.maximum(shares, RAREST))), form="linear")
    if not data.has_inputs:
        return
    yield _fit_lines(data, "a logistic regression", [1 / c for c in STRENGTHS], CLIENTS // 2)
    yield from _boost_each(data, rows, classes)
    if (rows.y == rows.y[0]).all():  # scikit-learn tells classes from each other, and here is nothing to tell
        return
    large = data.too_large()
    yield _Recipe(f"a logistic regression {POOLED}", lambda: _pooled_logistic(data, rows, classes), True, large)
    yield _Recipe(f"boosting {POOLED}", lambda: _boosted_labels(data, rows, classes), True, large)


class _Fitted(NamedTuple):
    """Estimators of the user, one for each output, or one for all classes."""

    models: Sequence[Any]
    outputs: Callable[[Any, Array], Array]  # of a model and x: [n, d]

    def answer(self, x: Array) -> Array:
        """[n, k] outputs for x: [n, d]; raises UsageError if an estimator fails."""
        with _blame_user():
            return np.hstack([self.outputs(model, x) for model in self.models])


@contextmanager
def _blame_user() -> Iterator[None]:
    """What an estimator of the user raises is a line about it, and no fault of kinfed's."""
    try:
        yield
    except Exception as problem:
        raise UsageError(f"{type(problem).__name__}: {problem}") from problem


def _of_user(data: _Data, baseline: NamedBaseline) -> Iterator[_Recipe]:
    """An estimator of the user for each client, and of all rows with the client's mean as one more input."""
    rows, task = data.training(), data.task
    classes = getattr(task, "classes", 0)
    end = time.monotonic() + LIMIT

    def outputs(model: Any, x: Array) -> Array:
        if classes:
            return _logs(model, x, classes)
        answers = np.asarray(model.predict(x), float).reshape(len(x), 1)
        return log_counts(answers, task.mean) if isinstance(task, Counts) else answers

    def fit(x: Array, y: Any, w: Array | None = None) -> Line | _Fitted:
        if time.monotonic() > end:
            raise UsageError(f"its {LIMIT} seconds are over")
        if classes and len(np.unique(y)) < 2:
            return Line(np.zeros((x.shape[1], classes)), constants_of(task, y, w))
        weights = {} if w is None else {"sample_weight": w}
        with _blame_user():
            models = [baseline.make().fit(x, target, **weights) for target in ([y] if classes else y.T)]
        return _Fitted(models, outputs)

    means = _client_means(rows.as_shares(classes) if classes else rows, data.clients, PSEUDO)  # [N, k]

    def pool() -> Answers:
        model = fit(np.hstack([rows.x, means[rows.who]]), rows.y, rows.w)
        return _answers(data, lambda x, who: model.answer(np.hstack([x, means[who]])))

    yield _Recipe(f"{baseline.name} {EACH}", lambda: _answers(data, _fit_each(data, rows, fit)))
    yield _Recipe(f"{baseline.name} {POOLED}", pool, True, data.too_large())


Model = Callable[[Array, NDArray[np.int64]], Array]  # of x: [n, d] and whose they are: [n], to [n, k]


def _answers(data: _Data, model: Model, missing: bool = False) -> Answers:
    """Those of the splits that have rows; `missing` numbers are NaN in the inputs."""
    return {
        split: model(data.mark_missing(split) if missing else data.x[split], data.who[split]) for split in data.splits
    }


def _add_errors(data: _Data, answers: Answers) -> Answers:
    """[n, H * Q] forecasts: [n, H] with the quantiles of each client's errors on its training rows."""
    errors, who = data.y["train"] - answers["train"], data.who["train"]
    shift = np.zeros((data.clients, errors.shape[1], len(data.levels)))
    for i, mine in _by_client(who):
        levels = widen_levels(np.array(data.levels), len(mine))
        shift[i] = np.nan_to_num(np.nanquantile(errors[mine], levels, axis=0).T)
    return {
        split: (item[:, :, None] + shift[data.who[split]]).reshape(len(item), -1)
        for split, item in answers.items()
        if split != "train"
    }


def _constant(data: _Data, values: Array) -> Tuned:
    """Each client's own answer to all questions, values: [N, k]: what an infinite penalty leaves of a linear model."""
    return Tuned(_answers(data, lambda x, who: values[who]), math.inf)


def _tune(data: _Data, strengths: Sequence[Any], make: Callable[[Any], Model]) -> Tuned:
    """The answers of the strength whose validation loss is lowest: the squared error, or the log loss of labels.

    Of counts it is the part of their deviance that answers change. Without validation rows it is the strength in the
    middle.
    """
    models = [_answers(data, make(item)) for item in strengths]
    truth, w = data.y["validation"], data.weight["validation"]

    def error(answers: Answers) -> float:
        given = answers["validation"]
        if isinstance(data.task, Classification):
            chances = given - np.log(np.exp(given).sum(1, keepdims=True))
            return -float(np.average(chances[np.arange(len(truth)), truth], weights=w))
        if isinstance(data.task, Counts):
            return float(np.average((data.task.mean * np.exp(given) - truth * given)[:, 0], weights=w))
        squares = (given - truth) ** 2
        return float(np.nanmean(squares) if w is None else np.average(squares.mean(1), weights=w))

    best = min(range(len(models)), key=lambda i: error(models[i])) if len(truth) else len(models) // 2
    return Tuned(models[best], strengths[best])


def _times(values: Array, weights: Array | None) -> Array:
    """[n, ...] values times weights: [n]."""
    return values if weights is None else values * weights.reshape(-1, *[1] * (values.ndim - 1))


def _client_means(rows: _Rows, clients: int, pseudo: float = 0.0) -> Array:
    """[N, k] the mean target of each client's rows, with some of all clients' among them; of one without rows, of all.

    Targets are [n, k].
    """
    total = np.zeros((clients, rows.y.shape[1]))
    count = np.bincount(rows.who, rows.w, clients)[:, None].astype(float)
    np.add.at(total, rows.who, _times(rows.y, rows.w))
    every = np.average(rows.y, 0, rows.w)
    means: Array = np.where(count + pseudo > 0, (total + pseudo * every) / np.maximum(count + pseudo, 1e-9), every)
    return means


def _fit_each(data: _Data, rows: _Rows, fit: Callable[..., Any]) -> Model:
    """A model that is fitted for each client to its own rows; of one without rows it answers with the mean of all."""
    rest = constants_of(data.task, rows.y, rows.w)  # [k]
    models = {i: fit(mine.x, mine.y, w=mine.w) for i, mine in rows.by_client()}

    def answer(x: Array, who: NDArray[np.int64]) -> Array:
        outputs = np.tile(rest, (len(x), 1))
        for i, mine in _by_client(who):
            if i in models:
                outputs[mine] = models[i].answer(x[mine])
        return outputs

    return answer


def _tune_pooled(data: _Data, strengths: Sequence[float], make: Callable[[float, bool], Model]) -> Tuned:
    """The same of a model of all rows, which may know the client; it does if there are no validation rows.

    Strengths are an odd number, so such a model is in the middle.
    """
    options = [(strength, knows) for strength in strengths for knows in (False, True)]
    return _tune(data, options, lambda option: make(*option))


def _pooled_ridge(rows: _Rows, clients: int) -> Callable[[float, bool], Model]:
    """A ridge of all rows, with one penalty of all coefficients; if it knows the client, each has its own intercept."""
    x, y, who, w = rows
    every, middle = np.average(x, 0, w), np.average(y, 0, w)
    count = np.bincount(who, w, clients).astype(float)
    sums, totals = np.zeros((clients, x.shape[1])), np.zeros((clients, y.shape[1]))
    away, rest = _times(x - every, w), _times(y - middle, w)
    np.add.at(sums, who, away)
    np.add.at(totals, who, rest)
    square, product = away.T @ (x - every), away.T @ (y - middle)

    def make(penalty: float, knows: bool) -> Model:
        # The clients' intercepts are eliminated: each is (total - sums w) / (count + penalty), or 0.
        heavy = (count + (penalty if knows else math.inf))[:, None]
        shrunk = sums / heavy
        left = square + penalty * np.eye(len(square)) - sums.T @ shrunk
        weights = np.linalg.solve(left, product - shrunk.T @ totals)
        intercepts = middle + (totals - sums @ weights) / heavy
        return lambda x, who: intercepts[who] + (x - every) @ weights

    return make


def _boost(data: _Data, rows: _Rows, mean: Array, loss: Mapping[str, Any]) -> Answers:
    """Gradient boosting of all rows, in which the client's mean: [N, 1] is one more input."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    count = np.bincount(rows.who, rows.w, data.clients)[:, None]
    encoded = (mean * count + PSEUDO * np.average(rows.y, weights=rows.w)) / (count + PSEUDO)  # [N, 1]
    model = HistGradientBoostingRegressor(**loss, random_state=0, early_stopping=True)
    model.fit(np.hstack([rows.x, encoded[rows.who]]), rows.y, rows.w)
    return _answers(data, lambda x, who: model.predict(np.hstack([x, encoded[who]]))[:, None])


def _boosted_labels(data: _Data, rows: _Rows, classes: int) -> Answers:
    from sklearn.ensemble import HistGradientBoostingClassifier

    encoded = _client_means(rows.as_shares(classes), data.clients, PSEUDO)  # [N, C]
    counts = np.unique(rows.y, return_counts=True)[1]
    stops = counts.min() > 1 and len(counts) * 10 <= len(rows.y)  # else no tenth of the rows has a row of each class
    model = HistGradientBoostingClassifier(random_state=0, early_stopping=bool(stops))
    model.fit(np.hstack([rows.x, encoded[rows.who]]), rows.y, rows.w)
    return _answers(data, lambda x, who: _logs(model, np.hstack([x, encoded[who]]), classes))


def _pooled_logistic(data: _Data, rows: _Rows, classes: int) -> Tuned:
    """A logistic regression of all rows, in which the client may be a category."""
    from sklearn.linear_model import LogisticRegression

    def make(strength: float, knows: bool) -> Model:
        inputs = partial(_widen, clients=data.clients if knows else 0)
        model = LogisticRegression(C=strength, max_iter=100).fit(inputs(rows.x, rows.who), rows.y, rows.w)
        return lambda x, who: _logs(model, inputs(x, who), classes)

    return _tune_pooled(data, STRENGTHS, make)


def _pooled_poisson(data: _Data, rows: _Rows, middle: float) -> Tuned:
    """A Poisson regression of all rows, in which the client may be a category."""
    from sklearn.linear_model import PoissonRegressor

    total = len(rows.x) if rows.w is None else rows.w.sum()

    def make(strength: float, knows: bool) -> Model:
        inputs = partial(_widen, clients=data.clients if knows else 0)
        model = PoissonRegressor(alpha=1 / (strength * total), max_iter=300, tol=1e-7)
        model.fit(inputs(rows.x, rows.who), rows.y, rows.w)
        return lambda x, who: log_counts(model.predict(inputs(x, who)), middle)[:, None]

    return _tune_pooled(data, STRENGTHS, make)


def _widen(x: Array, who: NDArray[np.int64], clients: int) -> Any:
    """Sparse [n, d + N]: rows x: [n, d], and for each client whether a row is its own; x of no clients."""
    from scipy import sparse

    if not clients:
        return x

    category = sparse.csr_matrix((np.ones(len(who)), (np.arange(len(who)), who)), (len(who), clients))
    return sparse.hstack([sparse.csr_matrix(x), category]).tocsr()


def _logs(model: Any, x: Any, classes: int) -> Array:
    """[n, C] logarithms of a model's probabilities, of which that of a class it has not seen is tiny."""
    models = np.full((x.shape[0], classes), RAREST)
    models[:, model.classes_] = np.maximum(model.predict_proba(x), RAREST)
    logarithms: Array = np.log(models)
    return logarithms


def _by_client(who: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each client that has rows, and their positions."""
    order = np.argsort(who, kind="stable")
    names, begins = np.unique(who[order], return_index=True)
    yield from zip(names.tolist(), np.split(order, begins)[1:], strict=True)
