"""Config: TOML tables and overrides become constructor arguments; no part ever reads a config."""

import inspect
import tomllib
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch
from torch import nn

from ..attacks import ATTACKS
from ..attacks.attack import Attack
from ..core.client import Training
from ..core.engine import Participation, Rounds, check_seed
from ..core.graph import Graph
from ..core.method import Method
from ..core.seeding import generator
from ..core.settings import check, kinds_of, name_of, options_of, parted, wanted
from ..core.shelf import Shelf
from ..core.tasks import TASKS, Classification, Task, check_selection
from ..data.dataset import Partition
from ..data.federation import Federation, divide
from ..data.split import Split
from ..datasets import DATASETS, OWNED, called, is_table
from ..errors import UsageError, nearest
from ..files import replacing
from ..graphs import GRAPHS
from ..methods import METHODS
from ..models import MODELS
from ..papers import published_table
from ..partitions import PARTITIONS
from . import own_parts

Table = dict[str, Any]

EMBEDDED = Path(__file__).parent
DEFAULT = EMBEDDED / "rotated-digits.toml"
BY_CLASS = ("by_class", "reweighted")  # optional scores of classification


class Learning(NamedTuple):
    """What is learned and how; `table` is the complete config of these parts."""

    table: Table
    method_name: str  # or a path, see `own_parts`
    method: Method
    rounds: Rounds
    seed: int
    seeds: int
    training: Training
    participation: Participation
    model_name: str
    model: Callable[..., nn.Module]


@dataclass(frozen=True)
class Experiment:
    """An experiment whose every part is made and checked; `table` is its complete config."""

    table: Table
    method_name: str
    method: Method
    rounds: Rounds
    seed: int  # the first of `seeds`
    seeds: int
    training: Training
    participation: Participation
    dataset_name: str  # its display name, see `called`
    dataset: Callable[..., Any]
    clients: int  # 0: as many as the data set has owners
    partition: Partition
    split: Split
    graph_name: str
    graph: Callable[[Federation, int], Graph | None]
    by_class: dict[str, bool]  # which optional scores of classification are set, and to what
    model_name: str
    model: Callable[..., nn.Module]
    attack: Attack | None = None
    task: Task | None = None  # in place of the data set's own

    @property
    def every_seed(self) -> range:
        """The seed of each run."""
        return range(self.seed, self.seed + self.seeds)

    def federation(self, data_dir: Path | None, seed: int) -> Federation:
        """Load the data set, divide it among the clients and build their graph."""
        dataset = self.dataset(data_dir)
        if self.task is not None and dataset.prepare is not None:
            raise UsageError(
                "federation.task: time series have their own task, which knows their scale; leave federation.task out"
            )
        dataset = replace(dataset, task=self.task or dataset.task)
        owned, dataset, groups, lots = self.partition(dataset, self.clients, generator(seed, "partition"))
        if isinstance(dataset.task, Classification):
            dataset = replace(dataset, task=replace(dataset.task, **self.by_class))
        elif without := [score for score, value in self.by_class.items() if value]:
            raise UsageError(f"federation.{without[0]}=true is a score of classes, but this data has none")
        federation = divide(dataset, owned, self.split, seed, groups, lots)
        return replace(federation, graph=self.graph(federation, seed))

    def module(self, federation: Federation, seed: int) -> nn.Module:
        """The model with its initial parameters, the same for every client; the global random state is unchanged."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(seed, "model").initial_seed())
            return self.model(tuple(federation.x.shape[1:]), federation.outputs)


def read(source: str, overrides: list[str]) -> Table:
    """The raw config: a file's, a published experiment's, or the embedded one's for a method name.

    Overrides, dotted.key=value, are applied. If they name your own table, the embedded config is dropped entirely,
    since its settings are for its own data.
    """
    path = Path(source)
    if source in METHODS or own_parts.is_path(source):
        path, overrides = DEFAULT, [f'method.name="{source}"', *overrides]
        requested = override({}, list(overrides))
        if _is_yours(_dataset_in(requested)):
            return requested
    elif not path.exists() and source.startswith("papers/"):
        published = published_table.experiments()
        if source not in published:
            raise UsageError(f"there is no '{source}'; {nearest(source, published)} (kinfed list papers names all)")
        return override(published_table.experiment(*published[source]), overrides)
    elif path.suffix in (".csv", ".parquet"):
        settings = {"name": path.suffix[1:], "path": path, "client": "COLUMN", "target": "COLUMN"}
        hint = " ".join(f"federation.dataset.{key}={value}" for key, value in settings.items())
        raise UsageError(f"'{source}' is a table, not a config: name it in one, or run a method with {hint}")
    elif path.suffix == ".py":
        raise UsageError(f"'{source}' is a file of code: name a method in it, such as {source}:Stay")
    elif path.suffix != ".toml" and not path.exists():
        raise UsageError(f"'{source}' is neither a method nor a config file; {nearest(source, METHODS)}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise UsageError(f"cannot read {path}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise UsageError(f"{path} is not valid TOML: {problem}") from None
    return override(table, overrides)


def of_run(path: Path) -> Experiment:
    """The experiment of a run's config.toml, which is complete."""
    try:
        return resolve(read(str(path), []))
    except UsageError as problem:
        raise UsageError(
            f"{path} is not a config that this version of kinfed can run ({problem}); change it so, or begin a new run"
        ) from None


def warn_of_idle(source: str, overrides: Sequence[str], methods: Sequence[str]) -> None:
    """Warn of each method with learning rates of its own if `overrides`, or a config file of yours, set
    training.optimiser.

    There is no warning for the configs that come with kinfed, which have one optimiser for all methods, nor for a
    config that a run has written, which has every setting.
    """
    yours = read(source, []) if source not in METHODS and Path(source).exists() else {}
    if _is_complete(yours):
        yours = {}
    if "optimiser" not in override(yours, list(overrides)).get("training", {}):
        return
    for name in methods:
        if rates := take(METHODS, name, "method").rates:
            where = "method" if len(methods) == 1 else f"methods.{own_parts.called(name)}"
            rates_set = " and ".join(f"{where}.{rate}" for rate in rates)
            warnings.warn(
                f"{own_parts.called(name)} ignores training.optimiser; its rates are {rates_set}", stacklevel=2
            )


def _is_complete(table: Table) -> bool:
    """Whether a config has every setting of its experiment, as what `write` has written."""
    try:
        return resolve(table).table == table
    except UsageError:
        return False


def override(table: Table, overrides: list[str]) -> Table:
    """Apply dotted.key=value; values are TOML, and anything that is not valid TOML is taken as text.

    A new `name` makes a new part: the former part's settings are dropped, and only those in `overrides` apply, in
    any order. If a key is given several times the last one counts, but a part has one name. A new data set whose
    examples have owners is divided by owner, however the former one was divided.
    """
    requested = {text.partition("=")[0] for text in overrides}
    before, names = _dataset_in(table), dict[str, tuple[str, str]]()
    for key, parsed, text in _names_first([(*_parsed(text), text) for text in overrides]):
        is_name = isinstance(parsed, str) and any(other.startswith(f"{key}.") for other in requested)
        dotted = f"{key}.name" if is_name else key  # of the part whose settings are set beside it
        *outer, last = dotted.split(".")
        if last == "name" and isinstance(parsed, str):
            name, where = names.setdefault(".".join(outer), (parsed, text))
            if name != parsed:
                raise UsageError(f"'{where}' and '{text}' name two parts where only one is possible; leave one out")
        inner = table
        for part in outer:
            entry = inner.setdefault(part, {})
            if isinstance(entry, str):  # a part given by its name only
                entry = inner[part] = {"name": entry}
            if not isinstance(entry, dict):
                raise UsageError(f"'{dotted}': '{part}' is not a table")
            inner = entry
        if last == "name" and inner.get("name", parsed) != parsed:
            for key in [key for key in inner if ".".join([*outer, key]) not in requested]:
                del inner[key]
        inner[last] = parsed
    if (now := _dataset_in(table)) != before and (now in OWNED or own_parts.is_path(now)):
        federation = table["federation"]
        if not any(key.startswith("federation.partition") for key in requested):
            federation.pop("partition", None)
        if _name_in(federation.get("partition", "natural")) == "natural" and "federation.clients" not in requested:
            federation.pop("clients", None)
    return table


def _parsed(text: str) -> tuple[str, Any]:
    """The key and the value of an override."""
    dotted, equals, value = text.partition("=")
    if not equals or not dotted:
        raise UsageError(f"'{text}' is not an override; write dotted.key=value, such as training.epochs=5")
    if not _is_unicode(text):
        raise UsageError(
            f"{text!a} is not UTF-8, as everything in a config must be; if it is a file's name, rename the file"
        )
    try:
        return dotted, tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return dotted, value


def _names_first(overrides: list[tuple[str, Any, str]]) -> list[tuple[str, Any, str]]:
    """The overrides in an order where a part's name comes before its settings. A whole table stays in its place."""
    parts = [dotted.removesuffix(".name") for dotted, _, _ in overrides]

    def place(i: int) -> tuple[int, int]:
        within = [j for j, part in enumerate(parts) if f"{part}.".startswith(f"{parts[i]}.")]
        return (min(within) if isinstance(overrides[i][1], str) else i), parts[i].count(".")

    return [overrides[i] for i in sorted(range(len(overrides)), key=place)]


def _is_yours(dataset: Any) -> bool:
    """Whether a data set is the user's own table or code."""
    return is_table(str(dataset)) or own_parts.is_path(dataset)


def _dataset_in(table: Table) -> Any:
    federation = table.get("federation")
    return _name_in(federation.get("dataset")) if isinstance(federation, dict) else None


def _name_in(part: Any) -> Any:
    """The name of a part, which may be given as a table or as its name only."""
    return part.get("name") if isinstance(part, dict) else part


def _is_unicode(text: str) -> bool:
    """Whether text from the command line, which may hold any bytes, can be written to a file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def learning(raw: Table, beside: frozenset[str] = frozenset({"federation"})) -> Learning:
    """The settings that do not depend on where the examples are; `beside` names the config's other tables."""
    known = {"rounds", "seed", "seeds", "participation", "evaluate_every", "select_by"}
    _only(raw, known | {"model", "training", "method", "methods", "code"} | beside, "")
    top = {
        "rounds": _value(raw, "rounds", int, 20),
        "seed": _value(raw, "seed", int, 0),
        "seeds": _value(raw, "seeds", int, 1),
        "evaluate_every": _value(raw, "evaluate_every", int, 1),
    }
    check_seed(top["seed"])
    if top["seeds"] < 1:
        raise UsageError(f"seeds counts runs, so it must be at least 1; got {top['seeds']}")
    if "select_by" in raw:
        top["select_by"] = _value(raw, "select_by", str, "")
        if not own_parts.is_path(_dataset_in(raw)) and "task" not in _table(raw, "federation", ""):
            check_selection(
                top["select_by"]
            )  # otherwise it may be a score of the user's own task, which the run checks
    rounds = Rounds(top["rounds"], top["evaluate_every"], top.get("select_by", ""))
    requested = raw.get("participation", 1.0)
    requested = requested if isinstance(requested, dict) else {"share": _check(requested, float, "participation")[0]}
    participation, participation_table = call(Participation, requested, "participation")
    training, training_table = call(Training, _table(raw, "training", ""), "training")
    chosen = _named(raw.get("method"), "method", METHODS)
    tuned, name = _table(raw, "methods", ""), own_parts.called(chosen["name"])
    _only(tuned, {*METHODS, name}, "methods.")
    method, method_table = make(METHODS, _over(_table(tuned, name, "methods."), chosen), "method")
    model, model_table = make(MODELS, raw.get("model"), "model", given=2)
    table = {
        **top,
        "participation": participation_table,
        "model": model_table,
        "training": training_table,
        "method": method_table,
    }
    counts = top["seed"], top["seeds"]
    return Learning(table, chosen["name"], method, rounds, *counts, training, participation, model_table["name"], model)


def _over(settings: Table, chosen: Table) -> Table:
    """`settings` updated by `chosen`; a part of the same name, or of no name, keeps its other settings."""
    merged = {**settings, **chosen}
    for name, value in chosen.items():
        if not isinstance(value, dict) and not isinstance(settings.get(name), dict):
            continue
        default, value = ({"name": one} if isinstance(one, str) else one for one in (settings.get(name), value))
        if isinstance(value, dict) and isinstance(default, dict) and value.get("name") in (None, default.get("name")):
            merged[name] = {**default, **value}
    return merged


def resolve(raw: Table) -> Experiment:
    """Make every part; the experiment's table has every default filled in.

    By default examples that have owners are divided by owner, and the model for your own table is a small MLP.
    """
    federation = _table(raw, "federation", "")
    dataset, dataset_table = make(DATASETS, federation.get("dataset"), "federation.dataset", given=1)
    if _is_yours(dataset_table["name"]):
        model = raw.get("model", {})
        raw = raw | {"model": {"name": "mlp", **model} if isinstance(model, dict) else model}
    parts = learning(raw, frozenset({"federation", "attack"}))
    _only(federation, {"dataset", "clients", "partition", "split", "graph", "task", *BY_CLASS}, "federation.")
    dealt = "natural" if dataset_table["name"] in OWNED or _is_yours(dataset_table["name"]) else None
    partition, partition_table = make(PARTITIONS, federation.get("partition", dealt), "federation.partition")
    split, split_table = call(Split, _table(federation, "split", "federation."), "federation.split")
    graph, graph_table = make(GRAPHS, federation.get("graph", "given"), "federation.graph", given=2)
    clients = _value(federation, "clients", int, 0, "federation.")  # 0: as many as the data set has owners
    table = {
        **parts.table,
        "federation": {
            "dataset": dataset_table,
            "clients": clients,
            "partition": partition_table,
            "split": split_table,
            "graph": graph_table,
        },
    }
    by_class = {name: _value(federation, name, bool, False, "federation.") for name in BY_CLASS if name in federation}
    table["federation"] |= by_class
    task = attack = None
    if "task" in federation:
        task, table["federation"]["task"] = make(TASKS, federation["task"], "federation.task")
    if "attack" in raw:
        attack, table["attack"] = make(ATTACKS, raw["attack"], "attack")
    table |= own_parts.code(table, raw.get("code", {}))
    return Experiment(
        **parts._asdict() | {"table": table},
        dataset_name=called(dataset_table),
        dataset=dataset,
        clients=clients,
        partition=partition,
        split=split,
        graph_name=graph_table["name"],
        graph=graph,
        by_class=by_class,
        attack=attack,
        task=task,
    )


def write(table: Table, path: Path) -> None:
    """Write a config that `read` and `resolve` turn into the same experiment."""
    with replacing(path) as part:
        part.write_text(tomli_w.dumps(table), encoding="utf-8")


def settings(part: Callable[..., Any], given: int = 0) -> dict[str, inspect.Parameter]:
    """A part's settings: its constructor's arguments after the first `given`, which the user cannot set.

    All arguments of a dataclass are settings; its objects are called with the `given` arguments.
    """
    parameters = list(inspect.signature(part).parameters.values())
    given = 0 if is_dataclass(part) else given
    return {p.name: p for p in parameters[given:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def make(shelf: Shelf, requested: Any, where: str, given: int = 0) -> tuple[Any, Table]:
    """The part that `requested` names, with its settings, and the complete table.

    With `given` the part is a function whose first arguments are passed later: it is returned with the others set.
    """
    requested = _named(requested, where, shelf)
    name = requested.pop("name")
    part = take(shelf, name, where, given)
    if own_parts.is_path(name):
        part = own_parts.checked(part, name, where, shelf)
    made, table = call(part, requested, where, given=given)
    return made, {"name": name, **table}


def call(
    part: Callable[..., Any], requested: Table, where: str, given: int = 0, default: Any = None, **ready: Any
) -> tuple[Any, Table]:
    """Call a part with checked settings; returns the result and the complete table without the `ready` arguments.

    Settings missing from `requested` are taken from `default`, an object made by the same part, if there is one.
    """
    if not isinstance(requested, dict):
        raise UsageError(f"{where} must be a table; got {requested!r}")
    known = {name: p for name, p in settings(part, given).items() if name not in ready}
    _only(requested, set(known), where + ".", set(ready))
    hints = kinds_of(inspect.unwrap(part))
    values, table = {}, {}
    for name, p in known.items():
        values[name] = getattr(default, name, p.default)
        if name in requested:
            at, kind = f"{where}.{name}", hints.get(name, Any)
            values[name], table[name] = _check(requested[name], kind, at, values[name], inspect.unwrap(part))
        elif (written := plain(values[name])) is not None:
            table[name] = written
    missing = [name for name, value in values.items() if value is inspect.Parameter.empty]
    if missing:
        raise UsageError(f"{where} needs a value for {', '.join(missing)}")
    if given and not is_dataclass(part):
        return (lambda *first: part(*first, **values)), table
    return part(**values, **ready), table


def take(shelf: Mapping[str, Any], name: str, where: str, given: int = 0) -> Any:
    """The part with this name in a shelf, or the user's own at this path; raises UsageError if there is none."""
    if own_parts.is_path(name):
        part = own_parts.load(name, where)
        if isinstance(shelf, Shelf):
            own_parts.check_kind(part, name, where, shelf, given)
        return part
    if name not in shelf:
        raise UsageError(f"{where}: there is no '{name}'; {nearest(name, shelf)}")
    return shelf[name]


def _named(requested: Any, where: str, known: Iterable[str]) -> Table:
    requested = {"name": requested} if isinstance(requested, str) else requested
    if not isinstance(requested, dict) or not isinstance(requested.get("name"), str):
        raise UsageError(f"{where} needs a name; known: {', '.join(sorted(known))}")
    return dict(requested)


def _part(kinds: Sequence[type], requested: Any, where: str, default: Any) -> tuple[Any, Table]:
    """The object that a setting names, of one of `kinds` or of the user's own class, and its complete table.

    A table without a name changes the setting's default; naming the default's own class keeps its other settings.
    """
    known: dict[str, Any] = {name_of(kind): kind for kind in kinds if is_dataclass(kind)}
    named = isinstance(default, tuple(known.values()))
    if isinstance(requested, dict) and "name" not in requested and named:
        requested = {"name": name_of(type(default)), **requested}
    requested = _named(requested, where, known)
    name = requested.pop("name")
    kind = take(known, name, where)
    if own_parts.is_path(name):
        common = set.intersection(*({name for name in dir(kind) if name[0] != "_"} for kind in kinds))
        common -= {name for kind in kinds if is_dataclass(kind) for name in kind.__dataclass_fields__}
        if not inspect.isclass(kind) or (lacks := sorted(common - set(dir(kind)))):
            why = f"it has no {', '.join(lacks)}" if inspect.isclass(kind) else "it is not a class"
            raise UsageError(f"{where}: '{name}' cannot stand here: {why}")
    made, table = call(kind, requested, where, default=default if type(default) is kind else None)
    return made, {"name": name, **table}


def plain(value: Any) -> Any:
    """A setting's value as it is written in a config."""
    if is_dataclass(value):
        values = {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"name": name_of(type(value)), **{name: inner for name, inner in values.items() if inner is not None}}
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


def _table(table: Table, name: str, where: str) -> Table:
    inner = table.get(name, {})
    if not isinstance(inner, dict):
        raise UsageError(f"{where}{name} must be a table; got {inner!r}")
    return inner


def _value(table: Table, name: str, kind: type, default: Any, where: str = "") -> Any:
    return _check(table.get(name, default), kind, where + name)[0]


def _only(table: Table, known: set[str], where: str, read: Iterable[str] = ()) -> None:
    """Raise UsageError for a key that is not known; `read` names further keys for the hint."""
    for name in table:
        if name not in known:
            raise UsageError(f"unknown key '{where}{name}'; {nearest(name, known.union(read))}")


def _check(value: Any, kind: Any, where: str, default: Any = None, part: Any = None) -> tuple[Any, Any]:
    """The value as the annotated kind, and as a complete config has it; or UsageError. `part` has the setting."""
    options = options_of(kind)
    scalar = isinstance(value, str) and any(parted(option)[0] in (str, Any) for option in options)
    literal = any(
        typing.get_origin(option) is typing.Literal and value in typing.get_args(option) for option in options
    )
    if any(map(is_dataclass, options)) and isinstance(value, str | dict) and not (scalar or literal):
        return _part([option for option in options if option is not type(None)], value, where, default)
    objects = all(is_dataclass(option) or getattr(option, "_is_protocol", False) for option in options)
    if objects and isinstance(value, bool | int | float | list):
        raise UsageError(f"{where} must be {' or '.join(map(wanted, options))}; got {value!r:.80}")
    check(value, kind, where, part)
    made = _made(value, [parted(option)[0] for option in options])
    return made, plain(made)


def _made(value: Any, kinds: Sequence[Any]) -> Any:
    """A checked value as a part takes it: integers become floats where a float is expected, lists become tuples."""
    if isinstance(value, list | tuple):
        inner = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) in (tuple, Sequence)), Any)
        return tuple(_made(one, [parted(option)[0] for option in options_of(inner)]) for one in value)
    return float(value) if float in kinds and int not in kinds and isinstance(value, int) else value
