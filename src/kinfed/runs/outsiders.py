"""Outsiders: what could be done without a federation, by standard models on the same splits, in seconds.

Those for each client alone need nobody else; those that pool need all rows in one place. They are tuned on the same
validation rows, and scored on the same test rows, as the federation's methods.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.tasks import TASKS, Classification, Counts, Forecasting, Quantiles, Regression, unit_of
from ..data.federation import Federation
from ..verdict.one_client import write_score
from ..verdict.verdict import LEVEL, difference, evidence
from .test_scores import Tested, of_examples

Array = NDArray[np.float64]
Answers = dict[str, Array]  # by split: [n, k] a model's outputs for the rows of all clients, one after the other

PENALTIES = tuple(10.0**power for power in range(-3, 5))  # of ridges, in squared deviations of an input
STRENGTHS = (0.03, 0.3, 3.0)  # C of logistic regressions
PSEUDO = 5.0  # rows of all clients that are added to a client's, where its mean is an input
ROWS, COLUMNS, CLIENTS = 200_000, 500, 2_000  # with more there are none, or not those that take longest
STEPS = 24  # ahead up to which boosting forecasts each by a model of its own
LONGEST = 366  # steps of a season
OFTEN = 3  # windows of a client at each time of day, from which a mean is worth something
EACH, POOLED, NOBODY = "for each client", "pooled, knowing the client", "nothing needs to be shared"
EVERYTHING = "but needs all rows in one place"
PLAIN = (
    "the client's own mean",
    "the client's own majority",
    "the last value",
    "the last season",
    "the mean at this time of day",
)  # what needs no model at all


@dataclass(frozen=True)
class Outsider:
    """A standard model, and the outputs that it gives for validation and test rows."""

    name: str
    pools: bool  # whether it needs all rows in one place
    answers: Answers

    @property
    def needs(self) -> str:
        """What it takes, in words."""
        return EVERYTHING if self.pools else NOBODY


@dataclass(frozen=True)
class _Data:
    """A federation's rows as arrays."""

    x: Mapping[str, Array]  # by split: [n, d], one client after the other
    y: Mapping[str, Array]  # [n, k] in the units of a model's outputs, or [n] classes
    who: Mapping[str, NDArray[np.int64]]  # [n] whose they are
    clients: int
    features: int = 1  # numbers at each step of a window, of which the first is the reading
    dated: bool = False  # whether the others are all of the calendar

    @classmethod
    def of(cls, federation: Federation) -> "_Data":
        """What is there, of a task that is regression, counts, labels or forecasts."""
        task: Any = federation.task
        x, y, who = {}, {}, {}
        for split, rows in federation.rows.items():
            at = torch.cat(list(rows))
            x[split] = federation.x[at].flatten(1).double().numpy()
            truth = federation.y[at]
            who[split] = np.repeat(np.arange(len(federation)), [len(one) for one in rows])
            if isinstance(task, Regression):
                truth = task.scaled(truth.double()).reshape(len(at), -1)
            elif isinstance(task, Forecasting):
                truth = (truth.double() - task.mean) / task.deviation
            elif isinstance(task, Counts):
                truth = truth.double().reshape(len(at), -1)
            y[split] = truth.numpy()
        features = federation.x.shape[-1] if federation.x.ndim == 3 else 1
        return cls(x, y, who, len(federation), features, features > 1 and "covariates" not in federation.scale)


def outsiders(federation: Federation, pool: bool = True) -> list[Outsider]:
    """Those that suit a federation's task and size; none where examples are no rows of numbers.

    Without `pool` those alone that each client can have by itself.
    """
    task, inputs = federation.task, federation.x[0].numel()
    suits = isinstance(task, Regression | Counts | Classification | Forecasting) and not isinstance(task, Quantiles)
    sizes = sum(len(rows) for rows in federation.rows["train"])
    if not suits or not federation.x.is_floating_point() or inputs > COLUMNS or not 0 < sizes <= ROWS:
        return []
    data = _Data.of(federation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fits that have not converged: validation rows say what they are worth
        if isinstance(task, Classification):
            return list(_of_labels(data, task.classes, pool))
        if isinstance(task, Counts):
            return list(_of_counts(data, task.mean, pool))
        return list(_of_numbers(data, isinstance(task, Forecasting), pool))


def _of_numbers(data: _Data, forecasts: bool, pool: bool) -> Iterator[Outsider]:
    known = ~np.isnan(data.y["train"]).any(1)
    x, y, who = data.x["train"][known], data.y["train"][known], data.who["train"][known]
    if not len(x):
        return
    mean = _client_means(y, who, data.clients)
    yield Outsider("the client's own mean", False, _answers(data, lambda x, who: mean[who]))
    if forecasts:
        yield from _of_series(data, y.shape[1])
    if data.clients <= CLIENTS:
        yield Outsider(f"a ridge {EACH}", False, _tune(data, PENALTIES, lambda c: _ridges(x, y, who, data.clients, c)))
    if not pool:
        return
    if data.clients <= CLIENTS:
        yield Outsider(f"a ridge, {POOLED}", True, _tune(data, PENALTIES, _ridge_with_clients(x, y, who, data.clients)))
    if y.shape[1] <= STEPS and y.size <= ROWS:
        steps = [_boost(data, x, y[:, h], who, mean[:, h, None]) for h in range(y.shape[1])]
        together = {split: np.hstack([one[split] for one in steps]) for split in steps[0]}
        yield Outsider(f"boosting, {POOLED}", True, together)


def _of_series(data: _Data, steps: int) -> Iterator[Outsider]:
    """What a window itself says of the next `steps` readings."""
    past = data.x["train"].shape[1] // data.features

    def repeat(season: int) -> Model:
        """The readings one season before, the last season again and again."""
        at = [(past - season + step % season) * data.features for step in range(steps)]
        return lambda x, who: x[:, at]

    yield Outsider("the last value", False, _answers(data, repeat(1)))
    if past > 1:
        yield Outsider("the last season", False, _tune(data, range(2, min(past, LONGEST) + 1), repeat))
    if data.dated and (means := _means_by_time(data)) is not None:
        yield Outsider("the mean at this time of day", False, means)


def _means_by_time(data: _Data) -> Answers | None:
    """A client's mean readings after windows that end at the same time, by the calendar; None where these are few.

    At a time that a client has no window of it is the mean of all its readings.
    """
    ends = {split: x[:, 1 - data.features :].round(6) for split, x in data.x.items()}
    every, at = np.unique(np.vstack(list(ends.values())), axis=0, return_inverse=True)
    sizes = [len(one) for one in ends.values()]
    times = dict(zip(ends, np.split(at.reshape(-1), np.cumsum(sizes)[:-1]), strict=True))
    known = ~np.isnan(data.y["train"]).any(1)
    y, who, when = data.y["train"][known], data.who["train"][known], times["train"][known]
    if len(every) < 2 or len(y) < OFTEN * data.clients * len(every):
        return None
    cell = who * len(every) + when
    own = _client_means(y, who, data.clients)
    mean = _client_means(y, cell, data.clients * len(every))
    seen = np.bincount(cell, minlength=len(mean)) > 0
    answers = {}
    for split in ("validation", "test"):
        asked = data.who[split] * len(every) + times[split]
        answers[split] = np.where(seen[asked, None], mean[asked], own[data.who[split]])
    return answers


def _of_counts(data: _Data, middle: float, pool: bool) -> Iterator[Outsider]:
    """Their outputs are logarithms of counts over the mean of all."""
    x, y, who = data.x["train"], data.y["train"], data.who["train"]
    mean = _client_means(y, who, data.clients, PSEUDO / 10)

    def logarithm(values: Array) -> Array:
        return np.log(np.maximum(values, 1e-3 * middle) / middle)

    yield Outsider("the client's own mean", False, _answers(data, lambda x, who: logarithm(mean[who])))
    if not pool:
        return
    found = _boost(data, x, y[:, 0], who, mean[:, :1], "poisson")
    yield Outsider(f"boosting, {POOLED}", True, {split: logarithm(one) for split, one in found.items()})


def _of_labels(data: _Data, classes: int, pool: bool) -> Iterator[Outsider]:
    """Their outputs are logarithms of the classes' probabilities."""
    x, y, who = data.x["train"], data.y["train"].astype(np.int64), data.who["train"]
    shares = _client_means(np.eye(classes)[y], who, data.clients, 0.1)  # [N, C]
    yield Outsider("the client's own majority", False, _answers(data, lambda x, who: np.log(shares[who])))
    if data.clients <= CLIENTS // 2:
        each = _tune(data, STRENGTHS, lambda c: _logistic_each(x, y, who, shares, c))
        yield Outsider(f"a logistic regression {EACH}", False, each)
    if not pool:
        return
    yield Outsider(f"a logistic regression, {POOLED}", True, _logistic_with_clients(data, x, y, who, classes))
    yield Outsider(f"boosting, {POOLED}", True, _boosted_labels(data, x, y, who, classes))


Model = Callable[[Array, NDArray[np.int64]], Array]  # of x: [n, d] and whose they are: [n], to [n, k]


def _answers(data: _Data, model: Model) -> Answers:
    """Those of the splits that have rows."""
    asked = [split for split in ("validation", "test") if len(data.who[split])]
    return {split: model(data.x[split], data.who[split]) for split in asked}


def _tune(data: _Data, strengths: Sequence[Any], make: Callable[[Any], Model]) -> Answers:
    """The answers of the strength whose validation error is lowest: squared, or the share of wrong labels."""
    found = [_answers(data, make(one)) for one in strengths]
    truth = data.y["validation"]

    def error(answers: Answers) -> float:
        given = answers["validation"]
        if truth.ndim == 1:
            return -float((given - np.log(np.exp(given).sum(1, keepdims=True)))[np.arange(len(truth)), truth].mean())
        return float(np.nanmean((given - truth) ** 2))

    return min(found, key=error) if len(truth) else found[len(found) // 2]


def _client_means(y: Array, who: NDArray[np.int64], clients: int, pseudo: float = 0.0) -> Array:
    """[N, k] the mean of each client's rows, with some of all clients' among them; of one without rows, of all."""
    total, count = np.zeros((clients, y.shape[1])), np.bincount(who, minlength=clients)[:, None].astype(float)
    np.add.at(total, who, y)
    every = y.mean(0)
    means: Array = np.where(count + pseudo > 0, (total + pseudo * every) / np.maximum(count + pseudo, 1e-9), every)
    return means


def _ridges(x: Array, y: Array, who: NDArray[np.int64], clients: int, penalty: float) -> Model:
    """A ridge for each client, of its own rows alone."""
    weights, means, middles = (
        np.zeros((clients, *shape)) for shape in ((x.shape[1], y.shape[1]), x.shape[1:], y.shape[1:])
    )
    middles[:] = y.mean(0)
    for i, own in _by_client(who):
        means[i], middles[i] = x[own].mean(0), y[own].mean(0)
        weights[i] = _ridge(x[own] - means[i], y[own] - middles[i], penalty)
    return lambda x, who: middles[who] + np.einsum("nd,ndk->nk", x - means[who], weights[who])


def _ridge(x: Array, y: Array, penalty: float) -> Array:
    """[d, k] of centred x: [n, d], y: [n, k]; solved in the smaller of both sizes."""
    n, d = x.shape
    if n < d:
        return np.asarray(x.T @ np.linalg.solve(x @ x.T + penalty * np.eye(n), y), np.float64)
    return np.asarray(np.linalg.solve(x.T @ x + penalty * np.eye(d), x.T @ y), np.float64)


def _ridge_with_clients(x: Array, y: Array, who: NDArray[np.int64], clients: int) -> Callable[[float], Model]:
    """A ridge of all rows, whose intercept differs by client, with the same penalty on all coefficients."""
    every, middle = x.mean(0), y.mean(0)
    count = np.bincount(who, minlength=clients).astype(float)
    sums, totals = np.zeros((clients, x.shape[1])), np.zeros((clients, y.shape[1]))
    np.add.at(sums, who, x - every)
    np.add.at(totals, who, y - middle)
    square, product = (x - every).T @ (x - every), (x - every).T @ (y - middle)

    def make(penalty: float) -> Model:
        # The clients' intercepts are eliminated: each is (total - sums w) / (count + penalty).
        shrunk = sums / (count + penalty)[:, None]
        left = square + penalty * np.eye(len(square)) - sums.T @ shrunk
        weights = np.linalg.solve(left, product - shrunk.T @ totals)
        intercepts = middle + (totals - sums @ weights) / (count + penalty)[:, None]
        return lambda x, who: intercepts[who] + (x - every) @ weights

    return make


def _boost(
    data: _Data, x: Array, y: Array, who: NDArray[np.int64], mean: Array, loss: str = "squared_error"
) -> Answers:
    """Gradient boosting of all rows, in which the client's mean is one more input."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    count = np.bincount(who, minlength=data.clients)[:, None]
    encoded = (mean * count + PSEUDO * y.mean()) / (count + PSEUDO)  # [N, 1]
    model = HistGradientBoostingRegressor(loss=loss, random_state=0, early_stopping=True)
    model.fit(np.hstack([x, encoded[who]]), y)
    return _answers(data, lambda x, who: model.predict(np.hstack([x, encoded[who]]))[:, None])


def _boosted_labels(data: _Data, x: Array, y: NDArray[np.int64], who: NDArray[np.int64], classes: int) -> Answers:
    from sklearn.ensemble import HistGradientBoostingClassifier

    encoded = _client_means(np.eye(classes)[y], who, data.clients, PSEUDO)  # [N, C]
    model = HistGradientBoostingClassifier(random_state=0, early_stopping=len(np.unique(y)) * 10 <= len(y))
    model.fit(np.hstack([x, encoded[who]]), y)
    return _answers(data, lambda x, who: _logs(model, np.hstack([x, encoded[who]]), classes))


def _logistic_each(x: Array, y: NDArray[np.int64], who: NDArray[np.int64], shares: Array, strength: float) -> Model:
    """A logistic regression for each client with rows of two classes or more; of others, their shares."""
    from sklearn.linear_model import LogisticRegression

    models = {
        i: LogisticRegression(C=strength, max_iter=50).fit(x[own], y[own])
        for i, own in _by_client(who)
        if len(np.unique(y[own])) > 1
    }

    def answer(x: Array, who: NDArray[np.int64]) -> Array:
        outputs = np.log(shares[who])
        for i, own in _by_client(who):
            if i in models:
                outputs[own] = _logs(models[i], x[own], shares.shape[1])
        return outputs

    return answer


def _logistic_with_clients(
    data: _Data, x: Array, y: NDArray[np.int64], who: NDArray[np.int64], classes: int
) -> Answers:
    """A logistic regression of all rows, in which the client is a category."""
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression

    def wide(x: Array, who: NDArray[np.int64]) -> Any:
        own = sparse.csr_matrix((np.ones(len(who)), (np.arange(len(who)), who)), (len(who), data.clients))
        return sparse.hstack([sparse.csr_matrix(x), own]).tocsr()

    def make(strength: float) -> Model:
        model = LogisticRegression(C=strength, max_iter=100).fit(wide(x, who), y)
        return lambda x, who: _logs(model, wide(x, who), classes)

    return _tune(data, STRENGTHS, make)


def _logs(model: Any, x: Any, classes: int) -> Array:
    """[n, C] logarithms of a model's probabilities, of which that of a class it has not seen is tiny."""
    found = np.full((x.shape[0], classes), 1e-6)
    found[:, model.classes_] = np.maximum(model.predict_proba(x), 1e-6)
    logarithms: Array = np.log(found)
    return logarithms


def _by_client(who: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each client that has rows, and their positions."""
    order = np.argsort(who, kind="stable")
    names, begins = np.unique(who[order], return_index=True)
    yield from zip(names.tolist(), np.split(order, begins)[1:], strict=True)


class Outside(NamedTuple):
    """The standard models' test scores, and what to say of those that do better than the answer."""

    rows: list[dict[str, Any]]  # best first: `name`, `pools`, `needs`, `mean` over clients of the task's metric
    first: str  # a sentence that comes before the verdict: an answer is behind what needs no model
    last: str  # and one that comes after it

    def around(self, sentence: str) -> str:
        """A verdict's sentence that also says which of them do better."""
        return "; ".join(filter(None, [self.first, sentence, self.last]))


def compare(federation: Federation, answer: Tested, pool: bool = True) -> Outside | None:
    """Train them and compare them with an answer; None where none suits, or single examples have no scores.

    Without `pool` those that need all rows in one place are left out.
    """
    task = federation.task
    if type(task) not in TASKS.values() or answer.examples is None:
        return None
    names = [name for name in federation.names if name in answer.examples]
    mine = [answer.examples[name] for name in names]
    found = [(one, _scores(federation, one, names)) for one in outsiders(federation, pool)]
    sign = 1 if task.higher_is_better else -1
    found.sort(key=lambda one: -sign * _mean(one[1]))
    if not found:
        return None
    rows = [{"name": one.name, "pools": one.pools, "needs": one.needs, "mean": _mean(scores)} for one, scores in found]
    ahead = [(one, scores) for one, scores in found if sign * (_mean(scores) - _mean(mine)) > 0]
    plain = [pair for pair in ahead if pair[0].name in PLAIN]
    level = max((sign * _mean(scores) for _, scores in plain), default=-math.inf)
    models = [pair for pair in ahead if pair[0].name not in PLAIN and sign * _mean(pair[1]) > level]
    said = models[:1] + [pair for pair in models[1:] if models[0][0].pools and not pair[0].pools][:1]
    unit = unit_of(task)

    def tell(pair: tuple[Outsider, Sequence[Array]]) -> str:
        one, scores = pair
        clearly = _is_behind(mine, scores, names, task.higher_is_better)
        both = f"{task.metric} {write_score(_mean(scores), unit)} against {write_score(_mean(mine), unit)}"
        what = "better" if clearly else "at least as well"
        return f"{one.name} does {what} ({both}){', ' if one.pools else ': '}{one.needs}"

    return Outside(rows, "; ".join(map(tell, plain[:1])), "; ".join(map(tell, said)))


def _is_behind(mine: Sequence[Any], scores: Sequence[Any], names: Sequence[str], higher_is_better: bool) -> bool:
    """Whether scores are better beyond noise: by clients or, of one client, by its test examples."""
    if len(names) > 1:
        return difference(mine, scores, names, higher_is_better).high < 0
    return evidence([mine], [scores], names, higher_is_better)[names[0]].p <= 1 - LEVEL


def _scores(federation: Federation, one: Outsider, names: Sequence[str]) -> list[Array]:
    """[n] the score of each test example, by client."""
    at = list(federation.rows["test"])
    outputs = torch.from_numpy(one.answers["test"]).to(federation.x.dtype)
    y = federation.y[torch.cat(at)]
    scores = of_examples(federation.task, outputs.reshape(len(y), -1), y).split([len(rows) for rows in at])
    by_name: Mapping[str, Array] = {name: each.numpy() for name, each in zip(federation.names, scores, strict=True)}
    return [by_name[name] for name in names]


def _mean(scores: Sequence[Array]) -> float:
    """Over clients, of the means of their examples that have a score."""
    return float(np.nanmean([np.nanmean(one) for one in scores if np.isfinite(one).any()]))
