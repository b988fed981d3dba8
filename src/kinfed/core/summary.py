"""Summary: a run's results as plain numbers; a run's folder holds it as summary.json."""

import dataclasses
import json
import math
import statistics
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import UsageError
from .history import History
from .metrics import ALWAYS, BY_CLASS, RECALL, mean_over_clients
from .tasks import Task, unit_of

Scores = dict[str, dict[str, float]]  # of each named model: `mean`, `std` and more, see `score_models`
TIMES, FEW = 10, 20  # an extreme error is so many times the median; one client in so many, or one, may have such


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What test scores are in."""

    name: str
    higher_is_better: bool
    unit: str = ""  # "%" for a share, which is in 0..1

    @classmethod
    def from_task(cls, task: Task) -> "Metric":
        """A task's own."""
        return cls(name=task.metric, higher_is_better=task.higher_is_better, unit=unit_of(task))

    @property
    def is_share(self) -> bool:
        """Whether it is a share, in 0..1, and so shown in percent."""
        return self.unit == "%"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What was selected, and by what."""

    chosen: str  # the named model that validation prefers
    by: str  # the validation score that selected the round and the kind of model
    higher_is_better: bool  # of that score
    caution: str = ""  # how test examples influenced training, so that test scores are no fair estimate


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a run was trained and tested on."""

    dataset: str = "your own"
    federation: dict[str, Any] = field(default_factory=dict)  # that table of its config; empty for your own
    clients: int
    task: dict[str, Any] = field(default_factory=dict)  # its `name` and settings, such as the scale of targets
    shape: list[int] | None = None  # of an example
    outputs: int | None = None  # of a model
    classes: list[Any] | int | None = None  # their names; at sites how many there are
    scale: dict[str, Any] | None = None  # of inputs and targets, if they were scaled
    columns: dict[str, Any] | None = None  # of a table: kinfed.data.tables.schema.Description.from_dict reads them


@dataclass(frozen=True, kw_only=True)
class ClientScores:
    """The test scores of single clients, [N] by named model."""

    names: list[str]
    scores: dict[str, list[float]]  # in the metric
    selecting: dict[str, list[float | None]] | None = None  # the score that selected, if it is not the metric

    @classmethod
    def from_history(cls, history: History) -> "ClientScores":
        """Those at the round that validation selects for each model; None for a client without the selecting one."""
        names, by = history.named_models, history.selector.score
        scores = {name: history.test(name).tolist() for name in names}
        if by == history.task.metric:
            return cls(names=list(history.names), scores=scores)
        selecting = {n: [None if math.isnan(v) else v for v in history.test(n, by).tolist()] for n in names}
        return cls(names=list(history.names), scores=scores, selecting=selecting)

    def by_name(self, model: str) -> dict[str, float]:
        """The test score of each client by its name, of a named model; NaN without a score."""
        return dict(zip(self.names, self.scores[model], strict=True))


@dataclass(frozen=True, kw_only=True)
class Recall:
    """The chosen model's test scores for each class, see `kinfed.verdict.class_counts.recall_by_class`."""

    by_class: list[dict[str, Any]]
    by_client: list[list[float | None]] | None = None
    always: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a run took, and how it was carried out."""

    parameters: int  # of a model
    seconds: float
    bytes_up: int  # by all clients, in all rounds
    bytes_down: int
    bytes_per_client_and_round: dict[str, int] | None = None
    executor: str
    reason: str | None = None  # why this executor was chosen
    workers: int | None = None
    chunk: int | None = None
    onednn: bool | None = None
    precision: str | None = None
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class SiteFacts:
    """What only a federation of real sites has."""

    experiment: str  # by which sites know the run
    bytes_by_client: dict[str, dict[str, int]]  # `up` and `down`
    bounded: dict[str, dict[str, int]]  # sites that claim more examples than were counted


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a run's models are from."""

    identity: str | None = None  # by which the run's files are known to belong together; None for sites
    former: dict[str, Any] | None = None  # the run that this one goes on from: `run`, its `rounds`, who has `joined`
    refit: bool = False  # whether models were trained once more, on all rows; scores are of those before


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's results. The names are the keys of summary.json, which leaves out those that are None.

    A run repeated with several seeds has means over these, and no values of single clients.
    """

    method: str
    rounds: int
    seeds: list[int]
    metric: Metric
    selection: Selection
    scores: Scores  # test scores over clients, at the selected round
    # at 95 %, of these means: `low` and `high`, over seeds or clients
    intervals: dict[str, dict[str, Any]] | None = None
    by_client: ClientScores | None = None  # None for several seeds
    recall: Recall | None = None  # of classes
    relation: dict[str, Any] | None = None  # `origin`, and how well it finds the hidden groups; None: no models mixed
    verdict: dict[str, Any] | None = None  # what it is worth over the baselines, see kinfed.Verdict; if compared
    baselines: list[dict[str, Any]] | None = None  # standard models on the same rows, best first
    attack: dict[str, Any] | None = None  # `name`, `share`, settings, `attackers`, `scores` of honest clients
    privacy: dict[str, Any] | None = None  # the promise, and each client's `noise`, `steps` and `spent` epsilon
    warnings: list[str] = field(default_factory=list)
    data: DataFacts
    cost: RunCost
    sharing: dict[str, Any] | None = None  # tensors and numbers that travel, stay and never move; bytes of a round
    sites: SiteFacts | None = None  # None for a simulation
    provenance: Provenance = Provenance()
    out: str = ""  # the folder

    @property
    def clients(self) -> ClientScores:
        """The scores of single clients; raises UsageError for a run with several seeds, whose clients may differ."""
        if self.by_client is None:
            raise UsageError(f"{self.out} holds a run for each seed; name one, such as {self.out}/seed-{self.seeds[0]}")
        return self.by_client

    @property
    def chosen_scores(self) -> dict[str, float]:
        """Those over all clients, by its name, of the chosen model; `round`, from 1, is the one that was selected."""
        return self.scores[self.selection.chosen]

    @property
    def honest_scores(self) -> Scores:
        """The scores over honest clients: all clients if there is no attack."""
        return self.scores if self.attack is None else typing.cast(Scores, self.attack["scores"])

    def to_dict(self) -> dict[str, Any]:
        """The keys of summary.json."""
        return _without_none(self)


def summarise_history(
    history: History,
    *,
    data: DataFacts,
    recall: dict[str, Any] | None = None,
    caution: str = "",
    warnings: Sequence[str] = (),
    **others: Any,
) -> Summary:
    """The summary of a history; `recall` is as of `recall_by_class`, `others` are further fields."""
    task, by, facts = history.task, history.selector, dict(recall or {})
    warned = [*facts.pop("warnings", ()), *warnings]
    values: dict[str, Any] = {
        "rounds": history.cost.done,
        "metric": Metric.from_task(task),
        "selection": Selection(
            chosen=history.chosen, by=by.score, higher_is_better=by.higher_is_better, caution=caution
        ),
        "scores": score_models(history),
        "by_client": ClientScores.from_history(history),
        "recall": Recall(**facts) if facts else None,
        "data": dataclasses.replace(data, task=_describe_task(task)),
    }
    summary = Summary(**values | others)
    return dataclasses.replace(summary, warnings=[*warned, *filter(None, [find_extremes(summary)])])


def parse_summary(text: str, where: object) -> Summary:
    """The summary whose `to_dict` is this text in JSON; keys of another version of kinfed are ignored.

    Raises UsageError if the text is not a summary; `where` names its file in the error.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{where} cannot be read: {problem}") from None
    lacks = f"{where} is not a run's summary: it"
    if not isinstance(table, dict):
        raise UsageError(f"{lacks} is not a table but {table!r:.80}")
    if "executor" in table:  # it stands under `cost` now
        raise UsageError(f"{where} was written by an older version of kinfed, which alone reads it; run again")
    if isinstance(attack := table.get("attack"), dict):
        try:
            attack["scores"] = _read_value(attack.get("scores"), Scores, lacks, "attack.")
        except TypeError:
            raise UsageError(f"{lacks}s 'attack' has no scores of honest clients") from None
    summary: Summary = _read_record(Summary, table, lacks)
    for key, scores in (("scores", summary.scores), ("attack", summary.honest_scores)):
        for name in {summary.selection.chosen, *summary.scores}:
            for score in ("mean", "std", "worst5", "best5"):
                if score not in scores.get(name, {}):
                    raise UsageError(f"{lacks}s '{key}' have no '{score}' of model '{name}'")
    return summary


def list_attackers(summary: Summary) -> list[str]:
    """The names of the clients that attacked."""
    return [] if summary.attack is None else list(summary.attack.get("attackers", []))


def list_warnings(summaries: Sequence[Summary]) -> list[str]:
    """The warnings of several seeds' summaries, each with its seed."""
    return [f"seed {summary.seeds[0]}: {warning}" for summary in summaries for warning in summary.warnings]


def find_extremes(summary: Summary) -> str:
    """A sentence on clients whose errors alone decide the mean of the chosen model; empty if there are none.

    Of a run with one seed, whose metric is an error.
    """
    if summary.metric.higher_is_better or summary.by_client is None:
        return ""
    attackers = list_attackers(summary)
    scores = summary.by_client.by_name(summary.selection.chosen)
    errors = [math.nan if name in attackers else error for name, error in scores.items()]
    return name_extremes(errors, summary.by_client.names, summary.metric.name)


def score_models(history: History, attacked: bool = False) -> Scores:
    """Per named model: its test metric over clients (see `spread`), and the means of the task's other test metrics.

    Also the selected round (from 1) and its validation, or if the run was `attacked` the success of a backdoor; then
    all are over honest clients only.
    """
    result, selector = {}, history.selector
    for name in history.named_models:
        scores, values = history.scores[history.place(name)], history.test(name)
        if attacked:
            others: dict[str, float] = {}
            if (triggered := scores.get((name, "triggered", history.task.metric))) is not None:
                others["success"] = float(selector.mask(triggered).double().nanmean())
            values = selector.mask(values)
        else:
            validation = history.validation(name)
            others = {"round": history.select(name) + 1}
            if validation is not None:
                others["validation"] = selector.mean(validation, selector.score)
        result[name] = spread(values, history.task.higher_is_better) | _mean_others(history, name) | others
    return result


def _mean_others(history: History, model: str) -> dict[str, float]:
    """Means over honest clients of the test metrics other than the task's own and the loss, at the selected round.

    For a metric that not every client has, such as `auc` or `r2`, `auc_clients` is the number of clients with it.
    """
    means: dict[str, float] = {}
    for (name, split, metric), values in history.scores[history.place(model)].items():
        honest = values[history.selector.honest]
        defined = honest[~honest.isnan()]
        excluded = metric in (history.task.metric, "loss", ALWAYS) or metric.startswith(RECALL)
        if (name, split) != (model, "test") or excluded or not len(defined) or not defined.isfinite().all():
            continue
        means[metric] = mean_over_clients(defined, metric)
        if metric in BY_CLASS or (metric.partition("@")[0] == "r2" and len(defined) < len(honest)):
            means[f"{metric}_clients"] = len(defined)
    return means


def over_seeds(summaries: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over seeds of several summaries; `std_seeds` is the deviation over seeds of the mean over clients."""
    scores = {}
    for name, first in summaries[0].items():
        of_model = [summary[name] for summary in summaries]
        shared = set[str].intersection(*map(set, of_model)) - {"round"}
        by_seed = {key: [scores_of_seed[key] for scores_of_seed in of_model] for key in first if key in shared}
        scores[name] = {key: statistics.fmean(values) for key, values in by_seed.items()}
        scores[name]["std_seeds"] = statistics.stdev(by_seed["mean"]) if len(summaries) > 1 else 0.0
    return scores


def spread(values: Tensor, higher_is_better: bool) -> dict[str, float]:
    """Mean and standard deviation over clients: [N], and those of the worst and best 5 and 10 % (at least one).

    Clients without a score (NaN) are left out.
    """
    scored = values[~values.isnan()] if not values.isnan().all() else values[:1]  # NaN, where all scores stay at sites
    ordered = scored.double().sort(descending=not higher_is_better).values
    result = {"mean": float(ordered.mean()), "std": float(ordered.std(correction=0))}
    for percent in (5, 10):
        few = max(1, math.ceil(len(ordered) * percent / 100))
        for name, part in ((f"worst{percent}", ordered[:few]), (f"best{percent}", ordered[-few:])):
            result |= {name: float(part.mean()), f"{name}_std": float(part.std(correction=0))}
    return result


def _describe_task(task: Task) -> dict[str, Any]:
    """A task's name and settings, without those that a run decides by itself."""
    settings: dict[str, Any] = vars(task) if dataclasses.is_dataclass(task) else {}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    plain = {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str | list)}
    return {"name": type(task).__name__.lower(), **plain}


def _without_none(record: Any) -> dict[str, Any]:
    """The fields of a record, and of records in it, that are not None."""
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return {
        name: _without_none(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
        if value is not None
    }


def _read_record(kind: Any, table: dict[str, Any], what: str, inside: str = "") -> Any:
    """A record of that kind from a table of JSON; `inside` names the table in the error that begins with `what`."""
    hints, values = typing.get_type_hints(kind), {}
    for f in dataclasses.fields(kind):
        name = f"{inside}{f.name}"
        if f.name in table:
            try:
                values[f.name] = _read_value(table[f.name], hints[f.name], what, f"{name}.")
            except TypeError:
                raise UsageError(f"{what}s '{name}' is {table[f.name]!r:.80}") from None
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UsageError(f"{what} has no '{name}'")
    return kind(**values)


def _read_value(value: Any, kind: Any, what: str, inside: str) -> Any:
    """A value from JSON of the annotated kind, where null is None or else NaN; raises TypeError for one of another."""
    inner = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        for option in inner:
            with suppress(TypeError):
                return _read_value(value, option, what, inside)
    elif dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _read_record(kind, value, what, inside)
    elif typing.get_origin(kind) is list and isinstance(value, list):
        return [_read_value(entry, inner[0], what, inside) for entry in value]
    elif typing.get_origin(kind) is dict and isinstance(value, dict):
        return {key: _read_value(entry, inner[1], what, inside) for key, entry in value.items()}
    elif kind is Any or (kind in (str, bool) and isinstance(value, kind)):
        return value
    elif kind is float and value is None:
        return math.nan
    elif kind in (int, float) and isinstance(value, int | kind) and not isinstance(value, bool):
        return value
    raise TypeError


def describe_privacy(summary: Summary) -> str:
    """What a run's uploads may reveal of a training row, or of a client, and how much of that was spent, in a line.

    Empty without a limit.
    """
    privacy = summary.privacy
    if privacy is None:
        return ""
    unit = "client" if privacy["unit"] == "client" else "training row"
    promise = f"epsilon {privacy['epsilon']:g} at delta {privacy['delta']:g} for each {unit}"
    if "spent" not in privacy:
        return f"{promise}, in the run of each seed"
    spent, noise = privacy["spent"], [value for value in privacy["noise"] if value]
    if not noise:
        return f"nothing is uploaded, so none of {promise} is spent"
    least, most = min(noise), max(noise)
    deviation = f"{most:.2f}" if most - least < 0.005 else f"{least:.2f} to {most:.2f}"
    return f"{max(spent):.2f} spent of {promise}; the noise is {deviation} times the clip of {privacy['clip']:g}"


def name_extremes(errors: Sequence[float], names: Sequence[str], metric: str) -> str:
    """A sentence that names the clients whose errors make up more than half of the mean over all, and the mean without.

    Errors are by client, NaN where one has none. Empty if there are no such clients, or more than a few.
    """
    ranked = sorted(((error, name) for error, name in zip(errors, names, strict=True) if error >= 0), reverse=True)
    if len(ranked) < 3:
        return ""
    descending = [error for error, _ in ranked]
    count = sum(error > TIMES * statistics.median(descending) for error in descending)
    if not 0 < count <= max(1, len(descending) // FEW) or sum(descending[:count]) <= sum(descending) / 2:
        return ""
    shown = ", ".join(f"{name} ({_number(error)})" for error, name in ranked[: min(count, 5)])
    more = f" and {count - 5} more" if count > 5 else ""
    whose = "client" if count == 1 else f"{count} clients:"
    mean = _number(statistics.fmean(descending))
    rest = _number(statistics.fmean(descending[count:]))
    return f"the mean {metric} of {mean} comes from {whose} {shown}{more}; that of the others is {rest}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"
