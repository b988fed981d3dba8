"""What all sites and the server have agreed to learn, as the server's config says it."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch

from kinfed.core.field_checks import Count, CountOrZero, In, NonNegative, Positive, Settings
from kinfed.core.graph import Graph
from kinfed.core.mixins import model_for
from kinfed.core.model import Model
from kinfed.core.private.private_sums import protects_clients
from kinfed.core.tasks import Classification, Counts, Forecasting, Quantiles, Regression, Task, check_quantiles
from kinfed.core.training import Training
from kinfed.data.graph_files import GraphFile
from kinfed.data.split import Split
from kinfed.data.steps import Feature
from kinfed.data.tables import disclosure
from kinfed.data.tables.schema import Description
from kinfed.data.tables.times import Clock
from kinfed.errors import UsageError
from kinfed.runs.config import experiment, parts, plugins
from kinfed.runs.config.experiment import Learning, Table

NUMBERS: dict[str, type] = {task.__name__: task for task in (Regression, Counts, Forecasting, Quantiles)}
BESIDE: tuple[list[str], ...] = (["local", "fedavg"], ["local"], [])


@dataclass(frozen=True)
class Deployment(Settings):
    """How the server deals with sites that are late, offline, new or wrong."""

    clients: Count = 2  # sites that must be connected before round 1
    sites: Sequence[str] = ()  # the sites that are asked, by the names of their keys; none: all
    deadline: Positive = 600.0  # seconds after which a round continues with the sites that have replied
    quorum: Annotated[float, In("(0, 1]")] = 0.5  # of the sites asked, the share that must have; otherwise it waits
    patience: Positive = 3600.0  # seconds after which a run that waits ends, to be resumed later
    norm_bound: NonNegative = (
        10.0  # an upload is left out if its norm exceeds the cohort's median so many times; 0: never
    )
    size_bound: NonNegative = 10.0  # a site's examples count up to this many times the others' median; 0: no bound
    # whether others keep using a client that missed rounds ("keep"), less and less, or not
    stale: Literal["keep", "decay", "drop"] = "keep"
    # "decay": a client that missed k rounds is used in a share decay**k of the rounds
    decay: Annotated[float, In("(0, 1)")] = 0.5
    classes: CountOrZero = 0  # 0: taken from the sites' labels
    by_class: bool | None = None  # scores by class; None: if there are two classes
    # a file on the server with a known relation of the clients, or a table of its path and how it is read, as in tables
    graph: str | GraphFile = ""
    # of tables: whose training rows give the scale of inputs
    scale: Literal["federation", "client", "auto"] = "federation"
    categories: Count = 50  # of tables: of a column of text, the most that are told apart
    labels: bool = True  # of tables: whether few whole numbers as a target are classes
    counts: bool = False  # of tables: whether the target counts something: whole numbers from 0
    horizons: Sequence[Count] = ()  # of series: steps ahead that are scored too, from 1
    quantiles: Sequence[float] = ()  # of series: to forecast in place of one number, such as [0.1, 0.5, 0.9]
    calendar: Sequence[Feature] | None = None  # of series, as in a table
    beside: Sequence[str] = ("local",)  # what each site compares its model with in the end: local, and perhaps fedavg

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("norm_bound", "size_bound"):
            if 0 < getattr(self, name) <= 1:
                raise UsageError(f"flower.{name} must be above 1, or 0 for no bound; got {getattr(self, name)}")
        if self.quantiles:
            check_quantiles(self.quantiles)
        if sorted(self.beside, reverse=True) not in BESIDE:
            choices = " or ".join(map(str, BESIDE))
            raise UsageError(f"flower.beside must be {choices}; got {list(self.beside)!r:.80}")


@dataclass(frozen=True)
class Plan:
    """A federation's experiment with all its parts made and checked; `table` is its complete config."""

    table: Table
    learning: Learning
    split: Split
    deployment: Deployment

    def model(self, shape: tuple[int, ...], outputs: int, described: Table | None = None) -> Model:
        """The architecture with the initial values that the seed gives, in float32.

        `described` is what all sites' training rows say of a table's columns, in the names that the sites agreed on.
        """
        columns = None if described is None else Description.from_dict(described)
        module = experiment.build_model(self.learning.model, self.learning.seed, shape, outputs, columns)
        return model_for(self.learning.method, module, dtype=torch.float32, seed=self.learning.seed)

    def columns(self, described: Table | None) -> tuple[str, ...]:
        """For each of a model's inputs the column that it is made of; nothing unless examples are rows of a table."""
        return () if described is None else tuple(Description.from_dict(described).sources)

    def parameters(self, shape: tuple[int, ...], outputs: int, described: Table | None = None) -> int:
        """How many parameters a model of this architecture has, found without memory for them unless it is own code."""
        columns = None if described is None else Description.from_dict(described)
        device = "cpu" if plugins.is_path(self.table["model"]["name"]) else "meta"
        try:
            with torch.device(device):
                module = experiment.build_model(self.learning.model, self.learning.seed, shape, outputs, columns)
        except RuntimeError as problem:
            raise UsageError(
                f"the plan's model cannot be built for examples of {list(shape)}: {problem!s:.200}"
            ) from None
        return sum(p.numel() for p in module.parameters())


def resolve(raw: Table) -> Plan:
    """Make every part of a federation's config: that of an experiment, with [flower] in place of a data set.

    Of `federation` only `split` is used, as each site knows where its examples are.
    """
    learning = experiment.learning(raw, frozenset({"federation", "flower"}))
    if learning.seeds != 1:
        raise UsageError("a federation runs one seed at a time; leave out seeds")
    if learning.rounds.patience:
        raise UsageError("sites agree to a number of rounds, so rounds=auto and patience are for simulations only")
    if getattr(learning.method, "needs_masks", False) and learning.training.masks is None:
        raise UsageError(
            f"{learning.method_name} sends sums of so few rows that a server of sites could read them; set "
            "privacy.masked=true, with which it gets the sums over sites alone, or simulate the run"
        )
    if "weights" in learning.table["model"]:
        raise UsageError("model.weights names a file of this machine, which sites do not have; leave it out of a plan")
    if learning.participation.late or learning.participation.by_group:
        raise UsageError(
            "participation.late and by_group are for simulations only; in a federation sites join when started"
        )
    federation = raw.get("federation", {})
    if not isinstance(federation, dict) or set(federation) - {"split"}:
        raise UsageError(
            "of federation only split may be set here, as the examples are at the sites; "
            f"got federation = {federation!r:.80}"
        )
    split, split_table = experiment.read_split(federation, learning.training)
    given = raw.get("flower", {})
    if not isinstance(given, dict):
        raise UsageError(f"flower must be a table; got {given!r}")
    deployment, deployment_table = parts.call(Deployment, given, "flower")
    _check_masks(learning.training, deployment if given else None)
    table = {**learning.table, "federation": {"split": split_table}, "flower": deployment_table}
    table |= plugins.code(table, raw.get("code", {}))
    return Plan(table, learning, split, deployment)


def _check_masks(training: Training, deployment: Deployment | None) -> None:
    """Raise UsageError for masks that a deployment cannot have, and for noise that needs masks.

    Sites are sent a plan without its deployment.
    """
    privacy = training.masks
    if protects_clients(training) and privacy is None:
        raise UsageError(
            "privacy.unit='client' protects clients in a noised sum, and a server of sites sees each upload; set "
            "privacy.masked=true as well, or unit='row', or simulate the run"
        )
    if privacy is None or deployment is None:
        return
    if deployment.clients < privacy.members:
        raise UsageError(
            f"privacy.members={privacy.members} sites must be in a masked sum, and round 1 begins with "
            f"flower.clients={deployment.clients}; raise that to {privacy.members} or more"
        )
    if protects_clients(training):
        privacy.check_count(deployment.clients)
    if deployment.stale != "keep":
        raise UsageError("flower.stale leaves single clients out of a mean, which masks hide; set it to 'keep'")


def with_method(planned: Plan, name: str, **flower: Any) -> Plan:
    """The plan of another method for the same sites, with nothing beside it; what is frozen stays frozen."""
    table = {key: value for key, value in planned.table.items() if key != "code"}
    method = {"name": name, "frozen": table["method"].get("frozen", [])}
    deployment = table["flower"] | {"graph": "", "beside": []} | flower
    if (masks := planned.learning.training.masks) is not None:  # a site knows no deployment
        deployment |= {"clients": max(masks.members, deployment["clients"])}
    return resolve({**table, "method": method, "flower": deployment})


def describe_task(task: Task) -> dict[str, Any]:
    """A task as JSON."""
    if isinstance(task, Classification):
        decided: dict[str, Any] = {} if task.by_class is None else {"by_class": task.by_class}
        decided |= {"selects": task.selects} if task.selects else {}
        return {"name": "Classification", "classes": task.classes, **decided}
    settings: dict[str, Any] = asdict(task) if is_dataclass(task) else {}
    return {"name": type(task).__name__, **settings}


def read_task(described: dict[str, Any]) -> Task:
    """The task that was described."""
    name, numbers = described.get("name"), [*described.values()]
    for part in [part for part in numbers if isinstance(part, list)]:
        numbers += part
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise UsageError(f"a task has finite numbers; got {json.dumps(described):.80}")
    if name == "Classification" and isinstance(described.get("classes"), int) and described["classes"] > 0:
        selects = "loss" if described.get("selects") == "loss" else ""
        return Classification(described["classes"], by_class=described.get("by_class") is True, selects=selects)
    if isinstance(name, str) and name in NUMBERS:
        given = {
            key: tuple(value) if isinstance(value, list) else value for key, value in described.items() if key != "name"
        }
        return parts.call(NUMBERS[name], given, "task")[0]
    names = ", ".join(["Classification", *NUMBERS])
    raise UsageError(f"a federation has no task {json.dumps(described):.80}; known: {names}")


def graph_of(weights: list[list[float]] | None, count: int) -> Graph | None:
    """The known relation of so many clients; those that joined after it was read have no links."""
    if weights is None:
        return None
    more = count - len(weights)
    return Graph(torch.nn.functional.pad(torch.tensor(weights), (0, more, 0, more)), "given")


def digest(table: Table) -> str:
    """The hash of a plan: of all that decides what a site computes, without the server's own settings."""
    return hash_json({key: value for key, value in table.items() if key != "flower"})


def clock_of(agreed: Table) -> Clock:
    """The steps that the sites agreed on."""
    return Clock.from_times(np.array(disclosure.expand_stretches(agreed["times"])))


def hash_json(values: Any) -> str:
    """The hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
