"""Summary: a run's results as plain numbers; a run's folder holds it as summary.json."""

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .extremes import name_extremes
from .history import History
from .tasks import Task, unit_of

Scores = dict[str, dict[str, float]]  # of each named model: `mean`, `std` and more, see History.summary


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's results. The names are the keys of summary.json, which leaves out those that are None.

    A run repeated with several `seeds` has means over these, and no values of single clients.
    """

    method: str
    dataset: str = "your own"
    federation: dict[str, Any] = field(default_factory=dict)  # that table of its config; empty for your own
    rounds: int
    seed: int  # the first of several
    seeds: list[int] | None = None
    clients: int
    parameters: int  # of a model
    metric: str
    higher_is_better: bool
    unit: str | None = None  # of the metric: "%" for a share, which is in 0..1; None in summaries before it was kept
    task: dict[str, Any] | None = None  # its `name` and settings, such as the scale of targets
    selected_by: str = ""  # the validation score that selected the round and the kind of model; "": the metric
    selects_high: bool | None = None  # whether that score is better if it is higher; None: as of the metric
    scores: Scores  # test scores over clients, at the selected round
    # at 95 %, of these means: `low` and `high`, over seeds or clients
    intervals: dict[str, dict[str, Any]] | None = None
    chosen: str  # the named model that validation prefers
    clients_scores: dict[str, list[float]] | None = None  # every client's test score, by named model
    clients_selected: dict[str, list[float | None]] | None = None  # and that of `selected_by`, if it differs
    relation: dict[str, Any] | None = None  # `origin`, and how well it finds the hidden groups; None: no models mixed
    warnings: list[str] = field(default_factory=list)
    by_class: list[dict[str, Any]] | None = None  # see History.by_class, as the next two
    clients_recall: list[list[float | None]] | None = None
    always: dict[str, list[str]] | None = None
    attack: dict[str, Any] | None = None  # `name`, `share`, settings, `attackers`, `scores` of honest clients
    executor: str
    reason: str | None = None  # why this executor was chosen
    workers: int | None = None
    chunk: int | None = None
    onednn: bool | None = None
    precision: str | None = None
    device: str | None = None
    seconds: float
    bytes_up: int  # by all clients, in all rounds
    bytes_down: int
    bytes_by_client: dict[str, dict[str, int]] | None = None  # `up` and `down`, of a federation of sites
    bytes_per_client_and_round: dict[str, int] | None = None
    sharing: dict[str, Any] | None = None  # tensors and numbers that travel, stay and never move; bytes of a round
    verdict: dict[str, Any] | None = None  # what it is worth over Local and FedAvg, see kinfed.Verdict; if compared
    leaking: bool  # whether test examples influenced training; `caution` says how
    caution: str = ""
    names: list[str] | None = None  # of the clients
    shape: list[int] | None = None  # of an example
    outputs: int | None = None  # of a model
    classes: list[Any] | int | None = None  # their names; at sites how many there are
    scale: dict[str, Any] | None = None  # of inputs and targets, if they were scaled
    columns: dict[str, Any] | None = None  # of a table: kinfed.data.tables.schema.Description.from_dict reads them
    bounded: dict[str, dict[str, int]] | None = None  # sites that claim more examples than were counted
    experiment: str | None = None  # by which sites know the run
    identity: str | None = None  # by which the run's files are known to belong together; None in older folders
    reference: dict[str, Any] | None = None  # settings of a centralised reference
    outside: list[dict[str, Any]] | None = None  # standard models that need no federation, best first, see Outside
    refit: bool | None = None  # whether its models were trained once more, on all rows; scores are of those before
    origin: dict[str, Any] | None = None  # the run that this one goes on from: `run`, its `rounds`, who has `joined`
    out: str = ""  # the folder

    @classmethod
    def of(cls, history: History, **others: Any) -> "Summary":
        """The summary of a history; `others` are the fields that a history does not have."""
        values: dict[str, Any] = {
            "rounds": history.done,
            "clients": len(history.names),
            "names": list(history.names),
            "metric": history.task.metric,
            "higher_is_better": history.task.higher_is_better,
            "unit": unit_of(history.task),
            "task": _described(history.task),
            "selected_by": history.selects,
            "selects_high": history.selects_highest,
            "scores": history.summary(),
            "chosen": history.chosen,
            **history.clients_scores(),
            "bytes_up": history.bytes_up,
            "bytes_down": history.bytes_down,
        }
        summary = cls(**values | others)
        return dataclasses.replace(summary, warnings=[*summary.warnings, *filter(None, [summary.extremes])])

    @property
    def several(self) -> list[int]:
        """The seeds of its runs, each of which has a summary of its own; none if it is itself one run."""
        return self.seeds or []

    @property
    def selects(self) -> str:
        """The validation score that selected its round and kind of model."""
        return self.selected_by or self.metric

    @property
    def selects_highest(self) -> bool:
        """Whether the validation score that selected is better if it is higher."""
        known = self.selects_high
        return self.higher_is_better and self.selected_by != "loss" if known is None else known

    @property
    def is_share(self) -> bool:
        """Whether its metric is a share, in 0..1, and so shown in percent."""
        return self.metric.endswith("accuracy") if self.unit is None else self.unit == "%"

    @property
    def honest_scores(self) -> Scores:
        """The scores over honest clients: all clients if there is no attack."""
        return self.scores if self.attack is None else typing.cast(Scores, self.attack["scores"])

    @property
    def attackers(self) -> list[str]:
        """The names of the clients that attacked."""
        return [] if self.attack is None else list(self.attack.get("attackers", []))

    @property
    def of_clients(self) -> dict[str, list[float]]:
        """Every client's test score, by named model; raises UsageError for a run with several seeds."""
        if self.clients_scores is None:
            raise self._of_several()
        return self.clients_scores

    @property
    def extremes(self) -> str:
        """A sentence on clients whose errors alone decide the mean of the chosen model; empty if there are none.

        Of a run with one seed, whose metric is an error.
        """
        if self.higher_is_better or self.clients_scores is None or self.names is None:
            return ""
        attackers, scores = set(self.attackers), self.clients_scores[self.chosen]
        errors = [math.nan if name in attackers else one for name, one in zip(self.names, scores, strict=True)]
        return name_extremes(errors, self.names, self.metric)

    @property
    def client_names(self) -> list[str]:
        """The names of the clients; raises UsageError for a run with several seeds, whose clients may differ."""
        if self.names is None:
            raise self._of_several()
        return self.names

    def _of_several(self) -> UsageError:
        return UsageError(f"{self.out} holds a run for each seed; name one, such as {self.out}/seed-{self.seed}")

    def __getitem__(self, key: str) -> Any:
        """A summary reads as summary.json does: `summary["scores"]` is `summary.scores`; KeyError for no such key."""
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        """Whether summary.json has this key."""
        fields = {f.name for f in dataclasses.fields(self)}
        return key in fields and (key == "relation" or getattr(self, str(key)) is not None)

    def to_dict(self) -> dict[str, Any]:
        """The keys of summary.json."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key in self}

    def to_json(self) -> str:
        """The text of summary.json, of which `from_json` makes the same summary."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: object) -> "Summary":
        """Read a summary, also one by another version of kinfed, whose other keys are ignored.

        Raises UsageError if the text is not a summary; `where` names its file in the error.
        """
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise UsageError(f"{where} cannot be read: {problem}") from None
        if not isinstance(table, dict):
            raise UsageError(f"{where} is not a run's summary: it is not a table but {table!r:.80}")
        hints = typing.get_type_hints(cls)
        known = {f.name: table[f.name] for f in dataclasses.fields(cls) if f.name in table}
        for f in dataclasses.fields(cls):
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and f.name not in table:
                raise UsageError(f"{where} is not a run's summary: it has no '{f.name}'")
            if f.name in known and not _is_a(known[f.name], hints[f.name]):
                raise UsageError(f"{where} is not a run's summary: its '{f.name}' is {known[f.name]!r:.80}")
        summary = cls(**known)
        summary._check(where)
        return summary

    def _check(self, where: object) -> None:
        """Raise UsageError unless every model has the scores that all runs have."""
        for key, scores in (("scores", self.scores), ("attack", self.honest_scores)):
            for name in {self.chosen, *self.scores}:
                lacking = [one for one in ("mean", "std", "worst5", "best5") if one not in scores.get(name, {})]
                if lacking:
                    raise UsageError(
                        f"{where} is not a run's summary: its '{key}' have no '{lacking[0]}' of model '{name}'"
                    )


def _described(task: Task) -> dict[str, Any]:
    """A task's name and settings, without those that a run decides by itself."""
    settings: dict[str, Any] = vars(task) if dataclasses.is_dataclass(task) else {}
    plain = {name: list(one) if isinstance(one, tuple) else one for name, one in settings.items()}
    plain = {name: one for name, one in plain.items() if isinstance(one, bool | int | float | str | list)}
    return {"name": type(task).__name__.lower(), **plain}


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of the annotated kind."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_is_a(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_is_a(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(one, inner[1]) for one in value.values())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
