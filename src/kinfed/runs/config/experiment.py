"""Config: TOML tables and overrides become experiments; no part ever reads a config."""

import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import tomli_w
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...core import seeding
from ...core.engine import AUTO, Participation, Rounds, check_seed
from ...core.graph import Graph
from ...core.layout import head_of
from ...core.method import Method
from ...core.mixins import Advises
from ...core.private.privacy import Privacy
from ...core.registry import load
from ...core.seeding import generator, tags
from ...core.summary import Summary
from ...core.tasks import TASKS, Classification, Counts, Forecasting, Regression, Scored, Task, check_selection
from ...core.training import Training
from ...data.dataset import Dataset, Partition
from ...data.datasets import DATASETS, OWNED
from ...data.datasets.your_files import YOURS, display_name, usual_model
from ...data.federation import Federation, divide
from ...data.graphs import GRAPHS
from ...data.partitions import PARTITIONS
from ...data.split import Split
from ...data.tables.public_columns import describe_publicly
from ...data.tables.schema import Description
from ...data.tables.words import known_name
from ...errors import UsageError, nearest
from ...files import replacing
from ...methods.solved import KNOWN
from ...models import MODELS
from ...simulation.attacks import ATTACKS
from ...simulation.attacks.attack import Attack
from . import plugins
from .named_baselines import WHERE, NamedBaseline, read_baselines
from .parts import call, check_keys, make, require_name, table_of, take, value_of
from .plugins import Table as Table

DEFAULT = Path(__file__).parent / "rotated-digits.toml"
PUBLISHED = "kinfed_papers.published_table:named_experiment"  # makes the raw config of papers/PAPER/TABLE/COLUMN
CLIP = 5.0  # the greatest norm of a gradient on a table, whose targets may have heavy tails
BY_CLASS = ("by_class", "reweighted")  # optional scores of classification


@dataclass(frozen=True)
class Learning:
    """What is learned and how, every part made and checked; `table` is the complete config of these parts."""

    table: Table
    method_name: str  # or a path, see `plugins`
    method: Method
    rounds: Rounds
    seed: int  # the first of `seeds`
    seeds: int
    training: Training
    participation: Participation
    model: Callable[..., nn.Module]


@dataclass(frozen=True)
class Experiment(Learning):
    """An experiment: what is learned, and of which data."""

    dataset_name: str  # its display name, see `called`
    dataset: Callable[..., Any]
    clients: int  # 0: as many as the data set has owners
    partition: Partition
    split: Split
    graph: Callable[[Federation, int], Graph | None]
    by_class: Table  # which optional scores of classification are set, and to what
    attack: Attack | None = None
    task: "AskedTask | None" = None  # in place of the data set's own
    newcomers: int | Sequence[str] = 0  # clients that are left out, to be onboarded later: how many, or their names
    baselines: Sequence[NamedBaseline] = ()  # of the user, that the verdict is against too

    @property
    def every_seed(self) -> range:
        """The seed of each run."""
        return range(self.seed, self.seed + self.seeds)

    def federation(
        self, data_dir: Path | None, seed: int, dataset: Dataset | None = None, former: Summary | None = None
    ) -> Federation:
        """Load the data set, unless it is given, divide it among the clients and build their graph.

        Newcomers are left out. `former` is the summary of an earlier run, as whose inputs and targets these are scaled.
        """
        federation, new = self.everyone(data_dir, seed, dataset, former)
        if not new:
            return federation
        return federation.part(torch.tensor([i for i in range(len(federation)) if i not in new]))

    def everyone(
        self, data_dir: Path | None, seed: int, dataset: Dataset | None = None, former: Summary | None = None
    ) -> tuple[Federation, list[int]]:
        """The federation with its newcomers, whose rows say nothing of its scale, and which these are."""
        dataset = self.dataset(data_dir) if dataset is None else dataset
        if former is not None:
            columns = Description.from_summary(former.data.columns, former.out)
            dataset = replace(dataset, columns=columns, scale=former.data.scale or {})
        elif self.training.privacy is not None and self.training.privacy.columns is not None:
            dataset = describe_publicly(dataset, self.training.privacy.columns)
        if self.task is not None:
            dataset = replace(dataset, task=self.task.adapt_to(dataset.task))
        owned, dataset, groups, lots = self.partition(dataset, self.clients, generator(seed, "partition"))
        if isinstance(dataset.task, Classification):
            dataset = replace(dataset, task=replace(dataset.task, **cast(Any, self.by_class)))
        elif without := [score for score, value in self.by_class.items() if value]:
            value = str(self.by_class[without[0]]).lower()
            raise UsageError(f"federation.{without[0]}={value} is a score of classes, but this data has none")
        new = self._new(list(dataset.owners) or [str(i) for i in range(len(owned))], seed)
        federation = divide(dataset, owned, self.split, seed, groups, lots, new)
        return replace(federation, graph=self.graph(federation, seed)), new

    def _new(self, names: list[str], seed: int) -> list[int]:
        """Which clients are newcomers: those that are named, or as many as are asked for, drawn by their names."""
        if isinstance(self.newcomers, int):
            if not 0 <= self.newcomers < len(names):
                raise UsageError(f"federation.newcomers must leave some of {len(names)} clients; got {self.newcomers}")
            lots = seeding.fold(seeding.key(seed, "newcomers"), tags(names))
            return lots.argsort()[: self.newcomers].sort().values.tolist()
        chosen = [known_name(name, names) for name in self.newcomers]
        for name in chosen:
            if name not in names:
                raise UsageError(f"federation.newcomers: there is no client '{name}'; {nearest(name, names)}")
        if len(set(chosen)) == len(names):
            raise UsageError("federation.newcomers names every client, so nobody is left to train")
        return [i for i, name in enumerate(names) if name in chosen]

    def module(self, federation: Federation, seed: int) -> nn.Module:
        """The model with its initial parameters, the same for every client."""
        module = build_model(self.model, seed, federation.x.shape[1:], federation.outputs, federation.columns)
        if weights := self.table["model"].get("weights"):
            load_weights(module, Path(weights))
        return module

    def architecture(self, former: Summary) -> nn.Module:
        """The model of a finished run, whose summary this is, without weights from a file."""
        columns = Description.from_summary(former.data.columns, former.out)
        return build_model(self.model, former.seeds[0], former.data.shape or (), former.data.outputs or 0, columns)


def read_split(federation: Table, training: Training) -> tuple[Split, Table]:
    """The split in the table `federation`, and its complete table; under privacy no row's part depends on labels."""
    requested = table_of(federation, "split", "federation.")
    if training.noise is not None:
        if requested.get("stratify"):
            raise UsageError(
                "federation.split.stratify deals rows by the labels of all, which has no price under privacy; leave it "
                "out"
            )
        requested = {**requested, "stratify": False}
    return call(Split, requested, "federation.split")


def build_model(
    model: Callable[..., nn.Module],
    seed: int,
    shape: Sequence[int],
    outputs: int,
    columns: Description | None = None,
) -> nn.Module:
    """A model with the initial parameters that a seed gives; the global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "model").initial_seed())
        return model(tuple(shape), outputs, columns=columns)


def default_model(federation: Federation, name: str = "", settings: Table | None = None, seed: int = 0) -> nn.Module:
    """A model for data of one's own, by default a small MLP, with initial values that are fixed by the seed.

    For windows of series it is an MLP of changes since the last reading.
    """
    forecasts = isinstance(federation.task, Forecasting) and federation.x.ndim == 3
    name = name or ("changes-mlp" if forecasts else "mlp")
    part, _ = make(MODELS, {"name": name, **(settings or {})}, "model", given=2)
    return build_model(part, seed, federation.x.shape[1:], federation.outputs, federation.columns)


def load_weights(module: nn.Module, path: Path) -> None:
    """Copy a .safetensors file's tensors into the module's parameters and buffers of the same names.

    The head, the last nn.Linear, keeps its initial numbers if the file has none of its name and shape, as a network for
    other classes has not; what else the file has is left aside. Raises UsageError if it lacks another tensor of the
    module, or has one of another shape.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        why = "there is no such file" if not path.exists() else f"it is not a .safetensors file ({problem})"
        raise UsageError(f"model.weights: {path}: {why}; save one by safetensors.torch.save_file") from None
    head = head_of(module)
    for name, target in module.state_dict().items():
        given = tensors.get(name)
        if given is not None and given.shape == target.shape:
            with torch.no_grad():
                target.copy_(given)
        elif (head is None or name.rpartition(".")[0] != head) and not name.endswith("num_batches_tracked"):
            has = "nothing" if given is None else list(given.shape)
            raise UsageError(
                f"model.weights: {path} has {has} for the model's '{name}', which is {list(target.shape)}; name a file "
                "of the same model, whose head alone may differ"
            )


def read(source: str, overrides: list[str]) -> Table:
    """The raw config: a file's, a published experiment's, or the embedded one's for a method name.

    Overrides, dotted.key=value, are applied. If they name your own table, the embedded config is dropped entirely,
    since its settings are for its own data.
    """
    path = Path(source)
    if source in KNOWN or plugins.is_path(source):
        path, overrides = DEFAULT, [f'method.name="{source}"', *overrides]
        requested = override({}, list(overrides))
        if _is_yours(_dataset_in(requested)):
            return requested
    elif not path.exists() and source.startswith("papers/"):
        return override(load(PUBLISHED)(source), overrides)
    elif path.suffix in (".csv", ".parquet"):
        settings = {"name": path.suffix[1:], "path": path, "client": "COLUMN", "target": "COLUMN"}
        hint = " ".join(f"federation.dataset.{key}={value}" for key, value in settings.items())
        raise UsageError(
            f"'{source}' is a table, not a config: name a method in its place with {hint}, or a config that kinfed run "
            f"{source} --client COLUMN --target COLUMN has written"
        )
    elif path.suffix == ".py":
        raise UsageError(f"'{source}' is a file of code: name a method in it, such as {source}:Stay")
    elif path.suffix != ".toml" and not path.exists():
        raise UsageError(f"'{source}' is neither a method nor a config file; {nearest(source, KNOWN)}")
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


def of_sites(path: Path) -> Experiment:
    """The experiment of a federation of sites, by the config in its folder; its examples cannot be loaded."""

    def refuse(*_: Any) -> Any:
        raise UsageError(f"the examples of {path.parent} stayed at its sites")

    raw = read(str(path), [])
    try:
        parts = learning(raw, frozenset({"federation", "flower"}))
        split, split_table = call(Split, table_of(raw["federation"], "split", "federation."), "federation.split")
        table = {**parts.table, "federation": {"split": split_table}, "flower": raw["flower"]}
        table |= plugins.code(table, raw.get("code", {}))
    except (UsageError, LookupError, TypeError) as problem:
        raise UsageError(
            f"{path} is not a config of a federation for this version of kinfed ({problem}); use the version and the "
            "files that it was run with"
        ) from None
    absent: Any = refuse
    return Experiment(
        **vars(parts) | {"table": table},
        dataset_name="sites",
        dataset=absent,
        clients=0,
        partition=absent,
        split=split,
        graph=absent,
        by_class={},
    )


def warn_of_idle(source: str, overrides: Sequence[str], methods: Mapping[str, Method]) -> None:
    """Warn of each of these methods, by name, that ignores training.optimiser if `overrides`, or a config file of
    yours, set it.

    There is no warning for the configs that come with kinfed, which have one optimiser for all methods, nor for a
    config that a run has written, which has every setting.
    """
    yours = read(source, []) if source not in KNOWN and Path(source).exists() else {}
    with suppress(UsageError):
        if resolve(yours).table == yours:  # every setting, as `write` has written it
            yours = {}
    if "optimiser" not in override(yours, list(overrides)).get("training", {}):
        return
    for name, method in methods.items():
        if rates := Advises.from_method(method).rates:
            where = "method" if len(methods) == 1 else f"methods.{plugins.short_name(name)}"
            rates_set = " and ".join(f"{where}.{rate}" for rate in rates)
            warnings.warn(
                f"{plugins.short_name(name)} ignores training.optimiser; its rates are {rates_set}", stacklevel=2
            )


def override(table: Table, overrides: list[str]) -> Table:
    """Apply dotted.key=value; values are TOML, and anything that is not valid TOML is taken as text.

    A new `name` makes a new part: the former part's settings are dropped, and only those in `overrides` apply, in
    any order. If a key is given several times the last one counts, but a part has one name. A new data set whose
    examples have owners is divided by owner, however the former one was divided.
    """
    requested = {text.partition("=")[0] for text in overrides}
    before, names = _dataset_in(table), dict[str, tuple[str, str]]()
    for key, parsed, text in _names_first([(*_parse_override(text), text) for text in overrides]):
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
    now = _dataset_in(table)
    if now != before and isinstance(now, str) and (now in OWNED or plugins.is_path(now)):
        federation = table["federation"]
        if not any(key.startswith("federation.partition") for key in requested):
            federation.pop("partition", None)
        if find_name(federation.get("partition", "natural")) == "natural" and "federation.clients" not in requested:
            federation.pop("clients", None)
    return table


def _parse_override(text: str) -> tuple[str, Any]:
    """The key and the value of an override."""
    dotted, equals, value = text.partition("=")
    if not equals or not dotted:
        raise UsageError(f"'{text}' is not an override; write dotted.key=value, such as training.epochs=5")
    try:
        text.encode()  # the command line may hold any bytes
    except UnicodeEncodeError:
        raise UsageError(
            f"{text!a} is not UTF-8, as everything in a config must be; if it is a file's name, rename the file"
        ) from None
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
    """Whether a data set is the user's own files or code."""
    return str(dataset) in YOURS or plugins.is_path(dataset)


def _dataset_in(table: Table) -> Any:
    federation = table.get("federation")
    return find_name(federation.get("dataset")) if isinstance(federation, dict) else None


def find_name(part: Any) -> Any:
    """The name of a part, which may be given as a table or as its name only."""
    return part.get("name") if isinstance(part, dict) else part


def learning(raw: Table, beside: frozenset[str] = frozenset({"federation"})) -> Learning:
    """The settings that do not depend on where the examples are; `beside` names the config's other tables."""
    keys = {"rounds", "patience", "seed", "seeds", "participation", "evaluate_every", "select_by"}
    check_keys(raw, keys | {"model", "training", "privacy", "method", "methods", "code"} | beside, "")
    if raw.get("rounds") == "auto":
        raw = {"patience": AUTO[1], **raw, "rounds": AUTO[0]}
    usual = {"rounds": 20, "seed": 0, "seeds": 1, "evaluate_every": 1}
    top = {name: value_of(raw, name, int, default) for name, default in usual.items()}
    check_seed(top["seed"])
    if top["seeds"] < 1:
        raise UsageError(f"seeds counts runs, so it must be at least 1; got {top['seeds']}")
    if raw.get("patience"):
        top["patience"] = value_of(raw, "patience", float, 0.0)
    if "select_by" in raw:
        top["select_by"] = value_of(raw, "select_by", str, "")
        if not plugins.is_path(_dataset_in(raw)) and "task" not in table_of(raw, "federation", ""):
            check_selection(
                top["select_by"]
            )  # otherwise it may be a score of the user's own task, which the run checks
    rounds = Rounds(top["rounds"], top["evaluate_every"], top.get("select_by", ""), patience=top.get("patience", 0.0))
    requested = raw.get("participation", 1.0)
    requested = requested if isinstance(requested, dict) else {"share": value_of(raw, "participation", float, 1.0)}
    participation, participation_table = call(Participation, requested, "participation")
    privacy, privacy_table = None, {}
    if "privacy" in raw:
        privacy, privacy_table["privacy"] = call(Privacy, table_of(raw, "privacy", ""), "privacy")
    training, training_table = call(Training, table_of(raw, "training", ""), "training", privacy=privacy)
    chosen = require_name(raw.get("method"), "method", KNOWN)
    tuned, name = table_of(raw, "methods", ""), plugins.short_name(chosen["name"])
    check_keys(tuned, {*KNOWN, name}, "methods.")
    method, method_table = make(KNOWN, _update_settings(table_of(tuned, name, "methods."), chosen), "method")
    requested_model, weights = raw.get("model"), ""
    if isinstance(requested_model, dict):
        weights = value_of(requested_model, "weights", str, "", "model.")
        requested_model = {name: value for name, value in requested_model.items() if name != "weights"}
    model, model_table = make(MODELS, requested_model, "model", given=2)
    if weights:
        model_table["weights"] = str(Path(weights).absolute())
    table = {
        **top,
        "participation": participation_table,
        "model": model_table,
        "training": training_table,
        "method": method_table,
        **privacy_table,
    }
    counts = top["seed"], top["seeds"]
    return Learning(table, chosen["name"], method, rounds, *counts, training, participation, model)


def _update_settings(settings: Table, chosen: Table) -> Table:
    """`settings` updated by `chosen`; a part of the same name, or of no name, keeps its other settings."""
    merged = {**settings, **chosen}
    for name, value in chosen.items():
        if not isinstance(value, dict) and not isinstance(settings.get(name), dict):
            continue
        default, value = ({"name": part} if isinstance(part, str) else part for part in (settings.get(name), value))
        if isinstance(value, dict) and isinstance(default, dict) and value.get("name") in (None, default.get("name")):
            merged[name] = {**default, **value}
    return merged


def resolve(raw: Table) -> Experiment:
    """Make every part; the experiment's table has every default filled in.

    By default examples that have owners are divided by owner, and the model for your own data is a small MLP, or for
    text the model `text`.
    """
    federation = table_of(raw, "federation", "")
    dataset, dataset_table = make(DATASETS, federation.get("dataset"), "federation.dataset", given=1)
    parts = learning(_name_model(raw, dataset_table), frozenset({"federation", "attack", WHERE}))
    check_keys(
        federation,
        {"dataset", "clients", "partition", "split", "graph", "task", "newcomers", "scored", *BY_CLASS},
        "federation.",
    )
    dealt = "natural" if dataset_table["name"] in OWNED or _is_yours(dataset_table["name"]) else None
    partition, partition_table = make(PARTITIONS, federation.get("partition", dealt), "federation.partition")
    split, split_table = read_split(federation, parts.training)
    graph, graph_table = make(GRAPHS, federation.get("graph", "given"), "federation.graph", given=2)
    clients = value_of(federation, "clients", int, 0, "federation.")  # 0: as many as the data set has owners
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
    by_class = {name: value_of(federation, name, bool, False, "federation.") for name in BY_CLASS if name in federation}
    by_class |= _read_metric(federation)
    newcomers = _newcomers(federation.get("newcomers", 0))
    table["federation"] |= by_class | ({"newcomers": newcomers} if newcomers else {})
    task = attack = None
    if "task" in federation:
        task, table["federation"]["task"] = _read_task(federation["task"])
    if "attack" in raw:
        attack, table["attack"] = make(ATTACKS, raw["attack"], "attack")
    baselines, listed = read_baselines(raw.get(WHERE, ()))
    table |= {WHERE: listed} if listed else {}
    table |= plugins.code(table, raw.get("code", {}))
    return Experiment(
        **vars(parts) | {"table": table},
        dataset_name=display_name(dataset_table),
        dataset=dataset,
        clients=clients,
        partition=partition,
        split=split,
        graph=graph,
        by_class=by_class,
        attack=attack,
        task=task,
        newcomers=newcomers,
        baselines=baselines,
    )


def _name_model(raw: Table, dataset: Table) -> Table:
    """The raw config, with the usual model where the data are the user's own and it names none."""
    model = raw.get("model", {})
    if not _is_yours(dataset["name"]) or not isinstance(model, dict):
        return raw
    return raw | {"model": {"name": usual_model(dataset), **model}}


class AskedTask(NamedTuple):
    """A task in place of the data set's own, and what it learns from that."""

    task: Task
    learnt: frozenset[str]  # its settings that the data set's task has

    def adapt_to(self, default: Task) -> Task:
        """The task for data whose default task this is; raises UsageError if it is for other targets."""
        base = next((kind for kind in FAMILIES if isinstance(self.task, kind)), None)
        fits = base is None or isinstance(default, (base, Regression) if base is Counts else base)
        if base is not None and not fits and self.learnt:
            name, theirs = type(self.task).__name__, type(default).__name__.lower()
            raise UsageError(
                f"federation.task: {name} is a task of {base.__name__.lower()}, but that of this data is {theirs}; "
                "predict another column, or name another task"
            )
        learnt = {name: getattr(default, name) for name in self.learnt} if base and isinstance(default, base) else {}
        return cast(Task, replace(cast(Any, self.task), **learnt)) if learnt else self.task


# The settings of tasks that a data set knows; a task derived from one of these need not name them.
FAMILIES: dict[type, tuple[str, ...]] = {
    Classification: ("classes",),
    Regression: ("mean", "deviation", "names", "low", "high"),
    Counts: ("mean", "high"),
    Forecasting: ("mean", "deviation", "error", "horizons"),
}


def _read_task(requested: Any) -> tuple[AskedTask, Table]:
    """The task that a config names, and the complete table, which leaves out what is learnt from the data set."""
    where = "federation.task"
    requested = require_name(requested, where, TASKS)
    part = take(TASKS, requested["name"], where)
    base = next((kind for kind in FAMILIES if isinstance(part, type) and issubclass(part, kind)), None)
    learnt = frozenset(FAMILIES[base] if base else ()).difference(requested)
    unknown = {"classes": 2} if "classes" in learnt else {}  # until the data set is read
    task, table = make(TASKS, requested | unknown, where)
    return AskedTask(task, learnt), {name: value for name, value in table.items() if name not in learnt}


def _read_metric(federation: Table) -> Table:
    """The score of labels that heads tables, if a config names one."""
    if "scored" not in federation:
        return {}
    if federation["scored"] not in get_args(Scored):
        raise UsageError(f"federation.scored is {' or '.join(get_args(Scored))}; got {federation['scored']!r:.40}")
    return {"scored": federation["scored"]}


def _newcomers(given: Any) -> int | list[str]:
    """How many newcomers there are, or who they are."""
    if isinstance(given, list):
        return [str(name) for name in given]
    if isinstance(given, bool) or not isinstance(given, int):
        raise UsageError(
            f'federation.newcomers is how many clients, or their names: 4 or ["3", "7"]; got {given!r:.80}'
        )
    return given


def write(table: Table, path: Path) -> None:
    """Write a config that `read` and `resolve` turn into the same experiment."""
    with replacing(path) as part:
        part.write_text(tomli_w.dumps(table), encoding="utf-8")
