"""Explained: every setting of a config with the sentence that the code has for it, and the command that repeats it."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from ...core.engine import Participation
from ...core.field_checks import kinds_of, name_of, options_of, sentences, split_interval
from ...core.private.privacy import Privacy
from ...core.tasks import TASKS
from ...core.training import Training
from ...data.datasets import DATASETS
from ...data.graphs import GRAPHS
from ...data.partitions import PARTITIONS
from ...data.split import Split
from ...methods.solved import KNOWN
from ...models import MODELS
from ...runs.run_folder import RunFolder
from ...simulation.attacks import ATTACKS

TOP = {
    "rounds": "rounds of training",
    "patience": "the share of rounds without a better validation score that ends training",
    "seed": "fixes every random draw: the split, the model's first weights, cohorts and batches",
    "seeds": "how many times the run is repeated, with seed, seed + 1, ...",
    "evaluate_every": "rounds between two evaluations",
    "select_by": "the validation score that selects the round and the kind of model",
    "baselines": "estimators of yours that the verdict is against too",
    "federation.clients": "number of clients; 0: as many as the data set has owners",
    "federation.by_class": "whether scores by class are kept",
    "federation.reweighted": "whether accuracy is also weighted by each client's shares of labels",
}
REGISTRIES: Mapping[str, Mapping[str, Any]] = {
    "method": KNOWN,
    "model": MODELS,
    "attack": ATTACKS,
    "federation.dataset": DATASETS,
    "federation.partition": PARTITIONS,
    "federation.graph": GRAPHS,
    "federation.task": TASKS,
}
TABLES: Mapping[str, Callable[..., Any]] = {
    "training": Training,
    "privacy": Privacy,
    "participation": Participation,
    "federation.split": Split,
}
WHAT = {
    "method": "the method",
    "model": "the network that every client trains",
    "federation.dataset": "the data",
    "federation.partition": "how examples are dealt to clients",
    "federation.graph": "the known graph that methods may use",
    "federation.task": "what is learned from the data",
    "attack": "what malicious clients do",
}


class Setting(NamedTuple):
    """A setting as a person reads it."""

    key: str
    value: str
    use: str


def settings(folder: RunFolder) -> list[Setting]:
    """Every setting of a run; none for a run without a config, such as one saved from Python.

    A part from a file of yours has no sentences: no code is loaded for a report.
    """
    if not folder.is_begun:
        return []
    return list(_list_settings(folder.read_config(), "", None))


def _list_settings(table: Mapping[str, Any], where: str, part: Callable[..., Any] | None) -> Iterator[Setting]:
    uses = {} if part is None else sentences(part)
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    for key, value in table.items():
        at = f"{where}.{key}" if where else key
        if key == "name":
            yield Setting(where, _text(value), WHAT.get(where, uses.get(key, "")))
        elif key not in inner:
            yield Setting(at, _text(value), TOP.get(at) or uses.get(key, ""))
    for key, value in inner.items():
        at = f"{where}.{key}" if where else key
        yield from _list_settings(value, at, _part(at, key, value, part))


def _part(at: str, key: str, table: Mapping[str, Any], owner: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The part that a table describes, if kinfed has it."""
    if at in TABLES:
        return TABLES[at]
    name = str(table.get("name"))
    if at in REGISTRIES:
        return REGISTRIES[at].get(name)
    kinds = options_of(kinds_of(owner).get(key, Any)) if owner is not None else ()
    named = (split_interval(kind)[0] for kind in kinds)
    return next(
        (kind for kind in named if is_dataclass(kind) and isinstance(kind, type) and name_of(kind) == name), None
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(_text, value)) or "none" if isinstance(value, list) else str(value)


def command(folder: RunFolder, name: str) -> str:
    """What to type to repeat a run into a folder that is called so, and again; empty without a config."""
    config = folder.path / "best.toml" if folder.choice.exists() else folder.config
    out = shlex.quote(f"{name}-again")
    if not config.exists() and (seeds := [folder.config for folder in folder.seeds() if folder.is_begun]):
        return f"kinfed run {shlex.quote(str(seeds[0]))} seeds={len(seeds)} --out {out}"
    return f"kinfed run {shlex.quote(str(config))} --out {out}" if config.exists() else ""
