"""Checkpointer: writes a run's checkpoints to its folder, and resumes the run from them."""

import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..core import checkpoint
from ..core.checkpoint import Progress
from ..core.engine import Participation, Rounds, latecomers
from ..core.history import History
from ..core.method import Method, Roster
from ..core.model import Model
from ..core.training import Training
from ..core.trees import Tree, reorder
from ..data.federation import Federation
from ..errors import RunError, UsageError, is_out_of_memory, out_of_memory
from ..interrupts import defer_signals
from ..ops.gemm import has_amx
from ..simulation import distributed
from ..simulation.devices import pick_device
from ..simulation.distributed import Distributed, ProcessLost
from ..simulation.execution import ROUNDING, Execution
from ..simulation.simulation import Simulation
from .final_state import FinalState, StateFile
from .run_folder import RunFolder

PAUSE = 20  # the pause between two checkpoints is at least this many times the duration of one


class Checkpointer:
    """Resumes a run from its folder's checkpoint, and writes one between rounds and when the run is interrupted.

    A run that goes on from a finished one begins with what that has left. `at` is the run's progress. Without a folder
    nothing is read or written.
    """

    def __init__(self, folder: RunFolder | None, seconds: float) -> None:
        """`seconds` is the minimum time between two checkpoints."""
        self.folder, self._seconds = folder, seconds
        self._path = None if folder is None else folder.checkpoint
        self.resumed = self._path is not None and self._path.exists()
        origin = None if folder is None or self.resumed else folder.read_origin()
        self._former = None if origin is None else StateFile(RunFolder(origin["run"]))
        self._changed = False  # whether the data are not those of the run from which this one goes on
        self.at = Progress(0, None, (), 0.0)
        self.reason = ""  # why this executor was chosen, if the run resumes with it
        self._began = time.perf_counter()
        self._fixed: dict[str, Any] = {}  # what cannot change when a run is resumed

    def execution(
        self, requested: Execution, federation: Federation, model: Model, rounds: Rounds, training: Training, seed: int
    ) -> Execution:
        """How to continue: as requested, with open settings as they were when the run began.

        Raises RunError if the data or the model differ from those that the run began with, UsageError if the seed, the
        score that selects or the privacy do, or if a run that has spent its budget is to go on.
        """
        if self._path is None:
            return requested
        self._fixed = {
            "data": distributed.agree(federation.digest() if distributed.leads() else None),
            "model": model.digest(),
            "select_by": rounds.select_by,
            "seed": seed,
            "privacy": training.noise and {**asdict(training.noise), "rounds": rounds.count},
        }
        if not self.resumed and self._former is None:
            return requested
        if self._former is not None and training.noise is not None:
            raise UsageError(
                f"the run in {self._former} has spent its privacy budget, which was planned for its own rounds; begin "
                "a new run with as many rounds as you need"
            )
        # Another choice would round differently.
        how = checkpoint.how(self._path) if self._former is None else dict(self._former.how)
        begun = f"the run in {self.folder} began" if self._former is None else f"the run in {self._former} was trained"
        former = how.pop("data", self._fixed["data"])
        if former != self._fixed["data"]:
            self._changed = True
            if self._former is None:
                raise RunError(
                    f"the data differ from those that {begun} with; restore the original data, or begin a new run in "
                    "another folder"
                )
            self._former.check_clients(federation.names)
        if how.pop("model", self._fixed["model"]) != self._fixed["model"]:
            raise RunError(
                f"the model differs from the one that {begun} with; restore the original model, with the same initial "
                "values, or begin a new run in another folder"
            )
        for name in ("select_by", "seed", "privacy"):
            if (before := how.pop(name, self._fixed[name])) != self._fixed[name]:
                raise UsageError(
                    f"{begun} with {name}={before!r}; got {name}={self._fixed[name]!r}: "
                    "continue with the first, or begin a new run in another folder"
                )
        going_on = _go_on(how, requested, f"{begun} with") if how else requested
        if how.get("executor") == going_on.executor:
            self.reason = "kept since the run began"
        pick_device(going_on.device, f"where {begun}")
        return going_on

    def resume(self, method: Method, roster: Roster, fleet: Simulation | Distributed, history: History) -> Progress:
        """Where the run goes on: its begin, its checkpoint or a former run's end; fills history and private states."""
        self._fleet, self._history, self._layout = fleet, history, roster.layout
        if self.folder and distributed.leads():
            self.folder.create()
            self.folder.write_how(fleet.how)
        if self._path and self.resumed:
            at = checkpoint.load(self._path, method.start(roster), fleet.states.keep(), history)
            fleet.states.restore(at.state)
            self.at = at._replace(server=tree_map(lambda t: t.to(fleet.device), at.server), state=())
        elif self._former is not None:
            server = self._carried_over(self._former, method, roster)
            self.at = Progress(self._former.done, server, (), self._former.seconds)
        self._saved, self._took, self._before, self._kept = time.perf_counter(), 0.0, self.at.seconds, self.at.done
        return self.at

    def _carried_over(self, former: StateFile, method: Method, roster: Roster) -> Tree:
        """The server's state at the end of another run; fills the fleet's private states, and the history.

        With other data clients may have joined, and scores and selection begin anew: those before are of other
        examples. They begin anew, too, where the run's models were then trained on all rows, those of the test as well.
        """
        fleet, history = self._fleet, self._history
        server = tree_map(lambda t: t.to(fleet.device), former.server(method.start(roster)))
        ids, states = former.states(fleet.states.keep())
        if not self._changed:
            if former.summary.provenance.refit:
                history.cost.done = former.done
            else:
                former.restore(history, self._layout)
            fleet.states.restore((ids, states))
            return server
        place = {name: i for i, name in enumerate(fleet.names)}
        fleet.states.restore((torch.tensor([place[former.every_name[i]] for i in ids.tolist()]), states))
        history.cost.done = former.done
        earlier = torch.tensor(sorted(place[name] for name in former.names), device=fleet.device)
        order = [former.names.index(fleet.names[i]) for i in earlier.tolist()]
        server, new = reorder(server, torch.tensor(order)), roster.others(earlier)
        return method.add_clients(replace(roster, round=former.done), server, new) if len(new) else server

    def final_state(self, roster: Roster, participation: Participation, rounds: Rounds) -> FinalState | None:
        """What the run ends with; None if it only pauses. `roster` lists all clients, also absent ones."""
        if rounds.last < rounds.count:
            return None
        late = latecomers(roster.seed, roster.tags, participation.late if self.at.done <= participation.joins else 0.0)
        joined = roster.others(late)
        names = tuple(self._fleet.names[i] for i in joined.tolist())
        end = self.at._replace(state=self._fleet.states.keep(), how={**self._fleet.how, **self._fixed})
        return FinalState(end, roster.part(joined), names)

    def record_round(self, round: int, server: Tree, rounds: int) -> None:
        """Record a finished round; write a checkpoint if one is due and more rounds follow."""
        now = time.perf_counter()
        self._fleet.states.settle()  # first: an interruption between the two resumes from the former checkpoint
        how = {**self._fleet.how, **self._fixed}
        self.at = Progress(round + 1, server, (), self._before + now - self._began, how)
        self._history.cost.clock(round, self.at.seconds)
        pause = max(self._seconds, PAUSE * self._took)
        if self._path and round + 1 < rounds and distributed.agree(now - self._saved >= pause):
            self.keep()
            self._saved = time.perf_counter()
            self._took = self._saved - now

    def lock(self) -> AbstractContextManager[None]:
        """A block in which no other program works in the folder, if there is one; raises UsageError while one does."""
        return self.folder.lock() if self.folder else nullcontext()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Keep the last complete round of a run that a problem ends in this block.

        Several processes are interrupted in different rounds, or one of them is lost, so there the last checkpoint
        remains.
        """
        try:
            yield
        except (RunError, KeyboardInterrupt) as problem:
            self._on_failure(problem)
            raise
        except Exception as problem:
            if not is_out_of_memory(problem):
                raise
            traceback.clear_frames(problem.__traceback__)  # which hold the tables that took it all
            self._on_failure(problem)
            kept = f"; the rounds before are kept in {self.folder}" if self._path and self.at.done else ""
            raise RunError(f"round {self.at.done + 1}: {out_of_memory(problem)}{kept}") from problem

    def _on_failure(self, problem: BaseException) -> None:
        separate = isinstance(problem, KeyboardInterrupt | ProcessLost) and distributed.is_on()
        if self._path and self._kept < self.at.done == self._history.cost.done and not separate:
            with defer_signals():
                self._fleet.states.undo()  # what the broken round has changed
                self.keep()

    def keep(self) -> None:
        """Write a checkpoint unless the last complete round has one."""
        if self._kept == self.at.done:
            return
        progress = self.at._replace(state=self._fleet.states.keep())
        if self._path and distributed.leads():
            checkpoint.save(self._path, progress, self._history)
        self._kept = self.at.done


def _go_on(how: dict[str, Any], requested: Execution, begun: str) -> Execution:
    """How to resume a run that was computed as in `how`, except for what is requested otherwise.

    Warns if this changes the bits of the result; raises UsageError for another precision.
    """
    settings = requested.rounding_settings
    changed = {name: value for name, value in settings.items() if name in how and how[name] != value}
    if "precision" in changed:
        raise UsageError(
            f"{begun} precision {how['precision']}, and cannot continue in {settings['precision']}; "
            "leave precision out to resume, or begin a new run in another folder"
        )
    if changed and (
        changed.keys() - {"workers"} or how["executor"] != "loop"
    ):  # with loop the number of workers does not change the bits
        before = ", ".join(f"{name} {how[name]}" for name in changed)
        warnings.warn(f"{begun} {before}; with another setting the results are equal only to rounding", stacklevel=4)
    kept = {name: value for name, value in how.items() if name in ROUNDING and name not in changed}
    if "executor" in changed:
        kept.pop("chunk", None)  # of the other executor
    if kept.get("onednn") and has_amx():
        del kept["onednn"]  # on this machine it would round to bfloat16
    return replace(requested, **kept | settings)
