"""A choice in a folder: from a config to candidates, the winner's finished run, and the config that repeats it."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.engine import Rounds
from ..core.summary import Summary
from ..data.federation import Federation
from ..errors import UsageError, log_failure
from ..files import replacing, to_json
from ..interrupts import defer_signals
from ..methods.solved import KNOWN
from ..runs.config import experiment as config, plugins
from ..runs.config.experiment import Experiment, Table
from ..runs.pool import can_copy, share_work, side_by_side
from ..runs.results import write_run
from ..runs.run_folder import CANDIDATES, RunFolder
from ..simulation import distributed
from ..simulation.execution import Execution
from .arena import Arena
from .budget import FILE, begun_with, seconds_of, whole_request
from .choose import Choice, Entrant, candidate_models, candidates, carry_out, split_settings, standard_forms, usual
from .successive_halving import Candidate, Entry, plan_rounds

SMALL = 1e8  # rows times parameters of a federation of which one core computes a round about as fast as several


class Chosen(NamedTuple):
    """What is in the folder of a finished choice."""

    choice: dict[str, Any]  # choice.json
    summary: Summary  # of the winner's run
    earlier: bool = False  # whether it was chosen before, and is only read


@dataclass(frozen=True)
class Request:
    """What is to be chosen, and where: `table` is a raw config, whose method is ignored."""

    table: Table
    out: Path
    data_dir: Path | None = None
    budget: str | None = None
    methods: Sequence[str] = ()  # none: the usual ones
    jobs: int | None = None  # candidates at a time; None: as many as there are cores where they are small
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)  # methods.NAME.KEY and the values that are tried
    models: bool = False  # whether models are candidates too, beside the config's
    refit: bool = False  # whether the models that are kept are trained once more, on all rows

    def check(self) -> None:
        """Raise UsageError for what can be refused before the data are read: the folder, and numbers."""
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"jobs counts parallel runs, so it must be at least 1; got {self.jobs}")
        if self.budget is not None and not self.budget.isdecimal():
            seconds_of(self.budget)
        if (model := self.table.get("model")) and isinstance(model, dict) and model.get("monotone"):
            raise UsageError(
                "choosing compares with Local and FedAvg, which do not keep answers monotone; name a method that does, "
                "such as --method personal-boosting"
            )
        folder = RunFolder(self.out)
        if folder.is_begun and not (folder.choice.exists() or (self.out / CANDIDATES / FILE).exists()):
            raise UsageError(f"{self.out} already holds a run; choose another --out")

    @property
    def seeds(self) -> int:
        """How often each candidate is trained, each time with other examples for validation."""
        return config.resolve(config.override(deepcopy(self.table), ['method.name="local"'])).seeds

    def experiment(
        self,
        method: str,
        settings: Sequence[str] = (),
        lr: float | None = None,
        model: str = "",
        own_rounds: Rounds | None = None,
    ) -> Experiment:
        """The experiment, once, with a method and settings of it, a rate, a model, and rounds of its own."""
        overrides = [f'method.name="{method}"', *(f"method.{setting}" for setting in settings)]
        if lr is not None:
            overrides.append(f"training.optimiser.lr={lr!r}")
        if model:
            kind, of_model = split_settings(model)
            overrides += [f'model.name="{kind}"', *(f"model.{key}={value}" for key, value in of_model.items())]
        table = config.override(deepcopy(self.table), overrides)
        rounds = plan_rounds(config.resolve(table).rounds, own_rounds)
        often = {"rounds": rounds.count, "evaluate_every": rounds.evaluate_every, "patience": rounds.patience}
        return config.resolve({**table, **often, "seeds": 1})

    def arena(self, execution: Execution, federation: Federation | None = None) -> Arena:
        """What the candidates are trained on; reads the data, unless their federation is given."""
        made = self.experiment("local")
        if made.attack is not None:
            raise UsageError("choosing takes no attack; leave it out, and run the method that is chosen under attack")
        federation = federation or made.federation(self.data_dir, made.seed)
        models = self.models and not self.methods
        solved, standard = (candidate_models(federation), standard_forms(federation)) if models else ((), ())
        return Arena(
            federation,
            module=partial(made.module, federation),
            folder=self.out / CANDIDATES,
            models={name: partial(self._build, federation, name) for name in solved},
            standard={name: partial(self._build, federation, name) for name in standard},
            rounds=made.rounds,
            training=made.training,
            participation=made.participation,
            seed=made.seed,
            execution=execution,
            baselines=made.baselines,
        )

    def _build(self, federation: Federation, name: str, seed: int) -> nn.Module:
        """The model of this name, as name,key=value."""
        return self.experiment("local", model=name).module(federation, seed)

    def candidates(self, arena: Arena) -> list[Candidate]:
        """Every method, with the settings that the config has for it and those of the grid, at every rate."""
        entrants = []
        for name in dict.fromkeys(self.methods or usual(arena.federation)):
            start = f"methods.{plugins.short_name(name)}."
            keys = {key.removeprefix(start): values for key, values in self.grid.items() if key.startswith(start)}
            for values in itertools.product(*keys.values()):
                settings = tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True))
                entrants.append(Entrant(plugins.short_name(name), self.experiment(name, settings).method, settings))
        return candidates(entrants, arena)


def _train(request: Request, candidate: str, fold: int, until: int, execution: Execution) -> None:
    """Train a candidate until a round, in a process of its own."""
    arena = request.arena(execution)
    arena.train(next(entrant for entrant in request.candidates(arena) if entrant.name == candidate), fold, until)


def choose_in(
    request: Request,
    execution: Execution,
    on_rung: Callable[[int, Sequence[Candidate]], None],
    on_begin: Callable[[Entry], None],
    federation: Federation | None,
) -> Chosen:
    """Choose, and write the winner's run into the folder, with Local and FedAvg in its folder `beside`.

    An interrupted choice goes on with the same request; a finished one is read. Raises UsageError for a folder that
    holds another request, or a run.
    """
    if distributed.is_on():
        raise UsageError("several processes share one run; choose without torchrun, with --jobs for runs in parallel")
    folder = RunFolder(request.out)
    request.check()
    arena = request.arena(execution, federation)
    tried = request.candidates(arena)
    terms = {"budget": request.budget, "seeds": request.seeds, "config": request.experiment("local").table}
    if folder.choice.exists():
        begun_with(arena.folder, whole_request(arena, tried, terms))
        return Chosen(json.loads(folder.choice.read_text(encoding="utf-8")), folder.read_summary(), earlier=True)
    advance = partial(arena.advance, on_begin=on_begin)
    jobs = request.jobs or _usual_jobs(arena)
    if jobs > 1 and can_copy(execution):
        advance = partial(_advance_together, arena, jobs, on_begin)
    elif jobs > 1:
        advance = partial(_side_by_side, request, arena, jobs, on_begin)
    try:
        choice = carry_out(arena, tried, terms, advance, on_rung, on_begin, request.refit)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"interrupted; run the same command with --out {request.out} to go on") from None
    with defer_signals():
        return _write(request, choice)


def _usual_jobs(arena: Arena) -> int:
    """How many candidates are trained at a time: one on each core where a round is too short to share among cores."""
    small = arena.build_model().theta.numel() * sum(map(len, arena.federation.rows["train"])) <= SMALL
    return torch.get_num_threads() if small and can_copy(arena.execution) else 1


def _advance_together(
    arena: Arena, jobs: int, on_begin: Callable[[Entry], None], entries: Sequence[Entry], until: int
) -> dict[Entry, str]:
    """As `Arena.advance`, in this process and copies of it."""
    entries = [entry for entry in entries if not arena.has_reached(entry, until)]
    silent = replace(arena.execution, progress=Execution.progress, planned=Execution.planned)
    here, alone = os.getpid(), replace(arena, execution=silent)

    def advance(i: int) -> list[str]:
        if os.getpid() == here:
            on_begin(entries[i])
        return list(alone.advance([entries[i]], until).values())

    problems = share_work(advance, len(entries), min(jobs, len(entries)))
    ended = {entries[i]: problem for i, lines in problems.items() for problem in lines}
    left = [entry for entry in entries if entry not in ended]  # of copies that were killed
    return ended | arena.advance(left, until, on_begin)


def _side_by_side(
    request: Request,
    arena: Arena,
    jobs: int,
    on_begin: Callable[[Entry], None],
    entries: Sequence[Entry],
    until: int,
) -> dict[Entry, str]:
    """As `Arena.advance`, with several entries at a time."""
    waiting = {
        f"{candidate.name}/{fold}": Entry(candidate, fold)
        for candidate, fold in entries
        if not arena.has_reached((candidate, fold), until)
    }
    tasks = {name: partial(_train, request, candidate.name, fold, until) for name, (candidate, fold) in waiting.items()}
    ended: dict[Entry, str] = {}
    with closing(side_by_side(tasks, arena.execution, jobs, lambda name: on_begin(waiting[name]))) as outcomes:
        for name, problem in outcomes:
            if problem is not None:
                ended[waiting[name]] = log_failure(problem)
    return ended


def _write_config(request: Request, candidate: Candidate, folder: RunFolder) -> Table:
    """Begin the folder of a candidate's run, with the config that repeats it."""
    methods = (*request.methods, *KNOWN)
    name = next(name for name in methods if plugins.short_name(name) == candidate.method_name)
    lr = getattr(candidate.training.optimiser, "lr", None)
    table = request.experiment(name, candidate.settings, lr, candidate.model, candidate.own_rounds).table
    folder.create()
    config.write(table, folder.config)
    return table


def _write(request: Request, choice: Choice) -> Chosen:
    """The winner's run, Local and FedAvg beside it, and what the choice found, which comes last."""
    out = RunFolder(request.out)
    for base, run in choice.runs.items():
        table = _write_config(request, choice.bases[base].candidate, out.reference(base))
        write_run(run, table, out.reference(base), refit=choice.refits.get(base))
    table = _write_config(request, choice.winner.candidate, out)
    summary = write_run(
        choice.run, table, out, choice.verdict, choice.problems, choice.refits.get("kin"), choice.standard
    )
    shutil.copyfile(out.config, request.out / "best.toml")
    record = choice.to_dict() | {"out": str(request.out)}
    with replacing(out.choice) as part:
        part.write_text(to_json(record, indent=1) + "\n", encoding="utf-8")
    return Chosen(record, summary)
