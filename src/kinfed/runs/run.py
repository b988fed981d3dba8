"""Run: a finished run, just trained or opened from its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core import checkpoint
from ..core.copies import duplicate
from ..core.graph import NeighbourLists, Relation
from ..core.layout import Layout
from ..core.method import Compared, Method
from ..core.mixins import Explains, export, model_for
from ..core.model import Model
from ..core.sharing import Sharing, divide
from ..core.summary import Summary, list_attackers
from ..core.tasks import TASKS, Task
from ..core.trees import Tree
from ..data.tables.schema import Description
from ..data.tables.words import known_name
from ..errors import UsageError, nearest, several
from ..files import read_json
from ..verdict.verdict import Verdict
from . import baselines
from .config import experiment as config
from .config.experiment import Experiment
from .final_state import StateFile
from .models_file import ALL, UNREADABLE, ModelsFile
from .predictor import Answers, Predictor, Source
from .round_tables import add_seed
from .row_owners import Unknown
from .run_folder import RunFolder
from .tested_examples import Tested, read_errors

if TYPE_CHECKING:
    from polars import DataFrame


class Run:
    """One personalised model for each client, and what they are worth: the result of `kinfed.fit`, or `Run.open`.

    `score()` is the mean test score, `scores` has every score as a row, `model(client)` is a client's model and
    `predict(client, rows)` its answers to new rows. `relation` says who learned from whom, `verdict(alone)` what that
    was worth, and `summary` has all numbers. A client is named, a number being the name of its digits; or `position` is
    its place, from 0. An unknown client raises UsageError with the nearest name.

    In the folder of a choice a client may keep the model of Local or FedAvg: `find_kept_run(client)` is the run that
    its model is from, and `theta`, `personal` and `model` give the model that it keeps.
    """

    def __init__(
        self,
        folder: RunFolder,
        module: nn.Module | None = None,
        method: Method | None = None,
        head: str | None = None,
    ) -> None:
        """As `open`, but files are read, and checked, when they are asked for."""
        self.folder, self._module, self._method, self._head = folder, module, method, head
        self._file: ModelsFile | None = None  # of its models; None until these are asked for, or if they are at sites
        self._beside: dict[str, Run] = {}

    def __repr__(self) -> str:
        return f"Run.open({str(self.folder)!r})"

    @staticmethod
    def open(
        folder: str | Path, module: nn.Module | None = None, method: Method | None = None, head: str | None = None
    ) -> "Run":
        """The run in a folder; architecture and method are rebuilt from its config.

        Args:
            folder: of a finished run.
            module: if it was your own, as in a run written by `kinfed.save`.
            method, head: as they were given to `fit`, if the method extends or exports models in its own way.

        Returns:
            The run, whose models are read when they are asked for.

        Raises:
            UsageError: the folder holds no finished run, or its files do not belong together.
        """
        run = Run(RunFolder(folder), module, method, head)
        _ = run.names  # of a run with several seeds there are none: it raises
        if run.summary.sites is not None and not run.folder.models.exists():
            raise UsageError(
                f"{folder}: its models stayed at the sites; predict there: kinfed predict kinfed-site/NAME FILE"
            )
        _ = run.architecture  # which is checked
        return run

    @cached_property
    def summary(self) -> Summary:
        """The results as plain numbers: test scores per named model, the relation's quality, bytes, seconds."""
        return self.folder.read_summary()

    @cached_property
    def experiment(self) -> Experiment | None:
        """That of the config, by which architecture and method are made; None with a module of your own."""
        if self._module is not None:
            return None
        if not self.folder.is_begun:
            _ = self.summary  # without a folder, or a finished run in it, this raises
            raise UsageError(
                f"{self.folder} has no config.toml with the architecture, as kinfed.save writes none; pass the module: "
                "kinfed.Run.open(folder, module)"
            )
        made = config.of_sites if "flower" in self.folder.read_config() else config.of_run
        return made(self.folder.config)

    @cached_property
    def method(self) -> Method | None:
        """What trained it; None: models that predict as plain modules do, of a folder by `kinfed.save`."""
        return self._method if self.experiment is None else self._method or self.experiment.method

    @cached_property
    def architecture(self) -> Model:
        """The model with the initial parameters; its `layout` says where each tensor is in theta."""
        folder, names, data = self.folder, self.names, self.summary.data
        if self.experiment is not None and (data.shape is None or data.outputs is None):
            raise UsageError(f"{folder.summary} is not a run's summary: it has no 'shape' and 'outputs'")
        module = self._module if self.experiment is None else self.experiment.architecture(self.summary)
        if not isinstance(module, nn.Module):
            raise UsageError(f"module must be an nn.Module, such as torch.nn.Linear(8, 2); got {module!r:.80}")
        if self.summary.sites is not None and not folder.models.exists():
            assert self.method is not None
            return model_for(self.method, module, None, torch.float32)
        self._file = file = open_models_file(folder, self.summary)
        if file.method and self.method is None:
            raise UsageError(
                f"{folder}: only its method, {file.method}, knows how its models predict; pass it as it was given "
                "to fit: Run.open(folder, module, method)"
            )
        try:
            keys = file.keys.get(ALL, {}) | next((file.keys[name] for name in names if name in file.keys), {})
            model = _model(module, self.method, self._head, file, keys)
            file.check_module(model)
        except UNREADABLE as problem:
            raise _unfit(folder, problem) from None
        if file.keys.keys() - {ALL} and (lacking := [name for name in names if name not in file.keys]):
            raise UsageError(
                f"{folder}: its files do not belong together: {folder.models.name} has no model of client "
                f"'{lacking[0]}', whom {folder.summary.name} names; copy the whole folder again, or run again"
            )
        return model

    @property
    def layout(self) -> Layout:
        """Where each tensor and each layer of a model lies in theta."""
        return self.architecture.layout

    @cached_property
    def names(self) -> list[str]:
        """The clients' names."""
        return self.summary.clients.names

    @property
    def relation(self) -> Relation | None:
        """[N, N] or [L, N, N] the relation at the chosen model's selected round; None if no models are mixed.

        Of very many clients, of whom each learns from a few, `NeighbourLists`.
        """
        if self.summary.relation is None or not self.folder.relations.exists():
            return None
        relations = self.folder.read_relations()
        kept = relations.kept[relations.selected]
        return kept if isinstance(kept, NeighbourLists) else torch.from_numpy(kept)

    @property
    def scores(self) -> "DataFrame":
        """Every score as a row of a polars frame: seed, round (from 1), client, model, split, metric, value.

        A value is NaN where a client has no such score, as where it stays at its site.
        """
        return add_seed(self.folder.read_rows(), self.summary.seeds[0])

    @property
    def by_client(self) -> Tested:
        """The test scores of the clients that are no attackers, and of test examples."""
        return Tested.read(self.folder)

    @property
    def standard_baselines(self) -> tuple[list[baselines.Baseline], list[str]]:
        """The standard models that this run can be compared with, and what was left out."""
        return baselines.read(self.folder), []

    @cached_property
    def errors(self) -> list[NDArray[Any]]:
        """[n, C] each client's answers to its test rows less the truth, in its unit; none if they were not kept."""
        mine = read_errors(self.folder.errors) or []
        if mine and len(mine) != len(self.names):
            raise self.folder.of_another(self.folder.errors)
        runs = [self.find_kept_run(name) for name in self.names]
        tables = [mine if run is self else run.errors for run in runs]
        return [table[i] for i, table in enumerate(tables)] if all(tables) else []

    @cached_property
    def description(self) -> Description | None:
        """What training rows say of a table's columns; None of other data."""
        return Description.from_summary(self.summary.data.columns, str(self.folder))

    @cached_property
    def task(self) -> Task:
        """What the models were trained for: the task that its score belongs to, with its classes or its scale."""
        described = dict(self.summary.data.task or {})
        name = str(described.pop("name", ""))
        settings: Any = {
            key: tuple(setting) if isinstance(setting, list) else setting for key, setting in described.items()
        }
        if self.experiment is not None and (own_task := self.experiment.task) is not None:
            task: Any = own_task.task
            learnt = {key: settings[key] for key in own_task.learnt if key in settings}
            return cast(Task, replace(task, **learnt) if learnt else task)
        kind: Any = TASKS.get(name)
        if kind is None:
            raise UsageError(f"{self.folder.summary} does not say what the models were trained for; run again")
        return cast(Task, kind(**settings))

    @property
    def classes(self) -> list[str]:
        """The names of the classes in the order of the outputs, or their numbers; none where numbers are predicted."""
        return list(Answers.from_summary(self.summary, self.description).classes)

    def find_kept_run(self, client: str) -> "Run":
        """The run whose model a client keeps: this one, or after a choice that of Local or FedAvg beside it."""
        choice = read_json(self.folder.choice, "choose again")
        for name, key in (("local", "keep_own_model"), ("fedavg", "keep_fedavg_model")):
            if client in choice.get(key, ()):
                if name not in self._beside:
                    self._beside[name] = Run.open(self.folder.reference(name).path)
                return self._beside[name]
        return self

    def personal(self, client: str) -> Tree:
        """What a client's model consists of: `theta: [d]`, and what else its method predicts with, such as a memory."""
        if (kept := self.find_kept_run(client)) is not self:
            return kept.personal(client)
        try:
            model = self.architecture
            return (self._file or ModelsFile(self.folder.models)).read_personal(client, model)
        except UNREADABLE as problem:
            raise _unfit(self.folder, problem) from None

    def view_model(self, client: str) -> nn.Module:
        """A client's model to be used as it is: it shares what is frozen with the modules of all clients."""
        kept, personal = self.find_kept_run(client), self.personal(client)
        try:
            if kept.method is None:
                return kept.architecture.export(personal.theta)
            return export(kept.method, kept.architecture, personal)
        except (*UNREADABLE, AttributeError) as problem:
            raise _unfit(kept.folder, problem) from None

    def name(self, client: int | str | None = None, position: int | None = None) -> str:
        """A client's name, by itself or by its position; raises UsageError, with the nearest, for an unknown one."""
        return self.names[client_index(self.names, client, position)]

    def theta(self, client: int | str | None = None, *, position: int | None = None) -> Tensor:
        """[d] one client's personalised model: of the kind and round that validation prefers."""
        return self.personal(self.name(client, position)).theta

    def model(self, client: int | str | None = None, *, position: int | None = None) -> nn.Module:
        """The client's personalised model, as a plain module in evaluation mode: as scored."""
        return duplicate(self.view_model(self.name(client, position)))

    def predictor(
        self,
        client: int | str | None = None,
        *,
        position: int | None = None,
        unknown: Unknown | None = None,
        interval: float | None = None,
    ) -> Predictor:
        """What applies a client's model to new rows; without a client, that of the client whom each row names.

        `unknown` says what becomes of rows of clients that the run does not know: `error`, `skip` or `mean`. With
        `interval` answers that are numbers have bounds, between which this share of truths lies.
        """

        def find_source(client: str) -> Source:
            kept = self.find_kept_run(client).summary
            return Source(kept.method, kept.selection.chosen)

        name = None if client is None and position is None else self.name(client, position)
        predictor = Predictor.from_summary(self.summary, self.view_model, find_source, name, unknown)
        if interval is None:
            return predictor
        return predictor.with_intervals(self.errors, interval, self.summary.out or "the run")

    def predict(
        self,
        client: int | str | None,
        rows: Any,
        unknown: Unknown | None = None,
        interval: float | None = None,
    ) -> Any:
        """A client's answers to new rows, a frame of polars or pandas or x: [n, ...]; see `kinfed.runs.predictor`.

        Without a client each row is answered by the model of the client that it names. `unknown` says what becomes
        of rows of others, and `interval` asks for bounds of answers, see `predictor`.
        """
        return self.predictor(client, unknown=unknown, interval=interval)(rows)

    def score(self, client: int | str | None = None) -> float:
        """The test score of the chosen model, in the task's metric: of one client, or the mean over those that are
        no attackers."""
        model = self.summary.selection.chosen
        if client is None:
            return self.summary.honest_scores[model]["mean"]
        return self.summary.clients.by_name(model)[self.name(client)]

    def verdict(self, local: "Run", fedavg: "Run | None" = None) -> Verdict:
        """What this run is worth over the best baseline without others, and over the best pooled one.

        The former is one of the run of Local and the standard models for each client, the latter one of the run of
        FedAvg and the standard models of all rows, on the same federation with the same seed.

        Raises UsageError if these were tested on other examples.
        """
        others = [run for run in (local, fedavg) if run is not None]
        mine = self.by_client
        for other in others:
            if other.names != self.names or not mine.is_of_the_same_examples(other.by_client):
                raise not_comparable(self, other)
        summary = self.summary
        candidates = [make_baseline(run, run is fedavg) for run in others]
        standard = next(filter(None, (run.standard_baselines[0] for run in (self, *others))), [])
        floor = baselines.floor(
            [[*candidates, *standard]],
            summary.metric.higher_is_better,
            summary.selection.higher_is_better,
        )
        notes = [] if standard else [baselines.NONE_STANDARD]
        verdict = baselines.verdict(summary.method, summary.metric, [mine], floor, notes=notes)
        assert verdict is not None  # as there is Local
        return verdict


def open_models_file(folder: RunFolder, summary: Summary) -> ModelsFile:
    """The file of a run's models; raises UsageError for one that cannot be read, or of another run."""
    try:
        file = ModelsFile(folder.models)
    except UNREADABLE as problem:
        why = f"{folder.models} cannot be read ({problem!s:.200}); copy the whole folder again, or run again"
        raise UsageError(why) from None
    if file.identity != summary.provenance.identity:
        raise folder.of_another(folder.models)
    return file


def open_seeds(folder: RunFolder) -> list[Run]:
    """The finished runs in a folder, one for each seed."""
    return [Run(seed) for seed in folder.seeds() or [folder]]


def make_baseline(run: Run, pools: bool) -> baselines.Baseline:
    """A finished run of Local or FedAvg, with one seed, as a baseline; `pools`: it learns from all clients."""
    method = run.summary.method
    return baselines.Baseline(baselines.NAMES.get(method, method), pools, False, _read_validation(run), run.by_client)


def _read_validation(run: Run) -> dict[str, float]:
    """By client the validation score that selected the chosen model's round; empty without validation rows."""
    selection, selected = run.summary.selection, run.summary.chosen_scores
    if "validation" not in selected:
        return {}
    rows = run.scores.filter(round=int(selected["round"]), model=selection.chosen)
    rows = rows.filter(split="validation", metric=selection.by)
    attackers = list_attackers(run.summary)
    if len(rows) and rows["client"].to_list() != run.names:
        raise run.folder.not_whole()
    return {name: value for name, value in rows.select("client", "value").iter_rows() if name not in attackers}


def not_comparable(first: Run, second: Run) -> UsageError:
    """The error for runs on other test examples."""
    return UsageError(f"{second} was not tested on the examples of {first}; run both on the same federation")


def client_index(names: Sequence[str], client: object = None, position: int | None = None) -> int:
    """The position, from 0, of a client given by name, a number being the name of its digits, or by `position`.

    Raises UsageError for one that is not there, or unless exactly one of both is given.
    """
    if (client is None) == (position is None):
        raise UsageError(f"name one client, such as '{names[0]}', or give a position from 0, such as position=0")
    if position is not None:
        if not isinstance(position, Integral) or not -len(names) <= position < len(names):
            raise UsageError(
                f"there is no client at position {position!r:.80}; there are {several(len(names), 'client')}"
            )
        return int(position) % len(names)
    if (name := known_name(str(client), names)) in names:
        return list(names).index(name)
    fix = f"; for its position, from 0, write position={client}" if isinstance(client, Integral) else ""
    raise UsageError(f"there is no client '{client!s:.80}'; {nearest(str(client), names)}{fix}")


class FinalServer:
    """A finished run's server as it was after the last round, with its method, model and roster, to ask it something.

    All are from the state that its folder keeps.
    """

    def __init__(self, saved: Run, task: Task) -> None:
        """Raises UsageError if the run kept no state, or has no config."""
        experiment, method = saved.experiment, saved.method
        if experiment is None or method is None:
            raise UsageError(f"{saved.folder} has no config.toml, as kinfed.save writes none, so it cannot be reopened")
        self.saved, self.task, self.experiment = saved, task, experiment
        self.state = StateFile(saved.folder)
        if self.state.every_name != saved.names:
            raise saved.folder.of_another(saved.folder.state)
        model = saved.architecture
        roster = self.state.roster(model.layout, experiment.training, saved.summary.seeds[0])
        model.theta = roster.theta.to(model.theta.dtype)
        self.method, self.model = divide(method, model)
        columns = () if saved.description is None else tuple(saved.description.sources)
        self.roster = replace(roster, layout=self.model.layout, task=task, columns=columns)
        self.server = self.state.server(self.method.start(replace(self.roster, round=0)))

    def compare_clients(self) -> Compared | None:
        """What the method compared after the last round; None if nothing of it is kept, or clients never joined."""
        if self.state.names != self.saved.names:
            return None
        return Explains.from_method(self.method).similarity(self.roster, self.server)

    def own_weights(self) -> Tensor | None:
        """[N, f] how much a client's own rows weigh in its coefficient of each input of the head; None as above."""
        if self.state.names != self.saved.names:
            return None
        return Explains.from_method(self.method).own_weights(self.roster, self.server)


def _model(
    module: nn.Module,
    method: Method | None,
    head: str | None,
    file: ModelsFile,
    keys: Mapping[str, str],
) -> Model:
    """The model of a saved run, by one client's tensors, whose keys are given; those that are frozen are read."""
    types = {name: dtype for dtype, name in checkpoint.TYPES.items()}
    dtypes = (types[file.dtype(key)] for key in keys.values())
    kind = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    model = Model(module, head, kind) if method is None else model_for(method, module, head, kind)
    model = model.carry(keys.keys())
    if method is None:
        layout = model.layout.freeze(frozenset(e.name for e in model.layout.entries if not (e.trainable or e.buffer)))
    else:
        layout = Sharing.from_method(method, model.layout).layout
    initial = model.layout.tensors(model.theta)
    for name in layout.frozen:
        frozen = file.read(keys[name])
        if frozen.shape != initial[name].shape:
            raise TypeError(f"'{name}' is {list(frozen.shape)}, not {list(initial[name].shape)}")
        initial[name] = frozen
    model.theta = model.layout.flatten(initial)
    return model.freeze(layout)


def _unfit(folder: RunFolder, problem: Exception) -> UsageError:
    why = f"it has no {problem}" if isinstance(problem, KeyError) else f"{problem!s:.300}"
    return UsageError(f"{folder}: the models do not fit this module or cannot be read ({why})")
