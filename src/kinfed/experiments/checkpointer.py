"""Checkpointer: what a run's folder keeps so that the run can go on from it."""

import time
import warnings
from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_map

from ..core import checkpoint
from ..core.checkpoint import Progress
from ..core.engine import Rounds
from ..core.history import History
from ..core.method import Method, Roster
from ..core.trees import Tree
from ..data.federation import Federation
from ..errors import RunError, UsageError
from ..interrupts import held
from ..ops.gemm import has_amx
from ..simulation import distributed
from ..simulation.devices import pick_device
from ..simulation.distributed import Distributed
from ..simulation.execution import ROUNDING, Execution
from ..simulation.simulation import Simulation
from .run_folder import RunFolder

PAUSE = 20  # times as long as a checkpoint took is the least between two of them


class Checkpointer:
    """Takes a run up from its folder's checkpoint, and writes one between rounds and when the run breaks off.

    `at` is where the run stands. Without a folder nothing is read or written.
    """

    def __init__(self, folder: RunFolder | None, seconds: float) -> None:
        """A checkpoint is written every so many `seconds` at most."""
        self.folder, self._seconds = folder, seconds
        self._path = None if folder is None else folder.checkpoint
        self.resumed = self._path is not None and self._path.exists()
        self.at = Progress(0, None, (), 0.0)
        self.reason = ""  # why the executor is the one it is, if the run goes on with it
        self._began = time.perf_counter()
        self._fixed: dict[str, Any] = {}  # what a run cannot change on its way

    def execution(self, requested: Execution, federation: Federation, rounds: Rounds, seed: int) -> Execution:
        """How to continue: as requested, and what that leaves open as it was when the run began.

        Raises RunError if the data, the seed or the score that selects are others than those that the run began with.
        """
        if self._path is None:
            return requested
        self._fixed = {"data": federation.digest(), "select_by": rounds.select_by, "seed": seed}
        if not self.resumed:
            return requested
        how = checkpoint.how(self._path)  # another choice would round differently
        if how.pop("data", self._fixed["data"]) != self._fixed["data"]:
            raise RunError(
                f"the data are not those that the run in {self.folder} began with; "
                "bring these back, or begin anew elsewhere"
            )
        for name in ("select_by", "seed"):
            if (begun := how.pop(name, self._fixed[name])) != self._fixed[name]:
                raise UsageError(
                    f"the run in {self.folder} began with {name}={begun!r}; got {name}={self._fixed[name]!r}: "
                    "continue with the first, or begin anew elsewhere"
                )
        going_on = _go_on(how, requested, f"the run in {self.folder} began with") if how else requested
        if how.get("executor") == going_on.executor:
            self.reason = "as before the interruption"
        pick_device(going_on.device, f"where the run in {self.folder} began")
        return going_on

    def begin(self, method: Method, roster: Roster, fleet: Simulation | Distributed, history: History) -> Progress:
        """Where the run begins or goes on; fills the history and the fleet's private states."""
        self._fleet, self._history = fleet, history
        if self.folder and distributed.leads():
            self.folder.make()
            self.folder.write_how(fleet.how)
        if self._path and self.resumed:
            at = checkpoint.load(self._path, method.start(roster), fleet.states.keep(), history)
            fleet.states.restore(at.state)
            self.at = at._replace(server=tree_map(lambda t: t.to(fleet.device), at.server), state=())
        self._saved, self._took, self._before, self._kept = time.perf_counter(), 0.0, self.at.seconds, self.at.done
        return self.at

    def after(self, round: int, server: Tree, rounds: int) -> None:
        """Count a round of so many; write a checkpoint if it is time for one, and another round is to come."""
        now = time.perf_counter()
        self._fleet.states.settle()  # first: who is interrupted between the two goes on from the checkpoint before
        how = {**self._fleet.how, **self._fixed}
        self.at = Progress(round + 1, server, (), self._before + now - self._began, how)
        pause = max(self._seconds, PAUSE * self._took)
        if self._path and round + 1 < rounds and distributed.agree(now - self._saved >= pause):
            self._keep()
            self._saved = time.perf_counter()
            self._took = self._saved - now

    def on_failure(self, problem: BaseException) -> None:
        """Keep the last whole round of a run that a problem has ended.

        Several processes are interrupted in different rounds, and the last checkpoint stands.
        """
        apart = isinstance(problem, KeyboardInterrupt) and distributed.is_on()
        if self._path and self._kept < self.at.done == self._history.done and not apart:
            with held():
                self._fleet.states.undo()  # what the broken round has changed
                self._keep()

    def _keep(self) -> None:
        whole = self.at._replace(state=self._fleet.states.keep())
        if self._path and distributed.leads():
            checkpoint.save(self._path, whole, self._history)
        self._kept = self.at.done


def _go_on(how: dict[str, Any], requested: Execution, begun: str) -> Execution:
    """How to go on with a run that was computed so, but for what is requested instead.

    Warns where this ends the run in other bits; raises UsageError for another precision, which would make it neither.
    """
    asked = requested.requested
    changed = {name: value for name, value in asked.items() if name in how and how[name] != value}
    if "precision" in changed:
        raise UsageError(
            f"{begun} precision {how['precision']}, and a part in {asked['precision']} would make it neither; "
            "leave precision out to go on, or begin anew elsewhere"
        )
    if changed and (changed.keys() - {"workers"} or how["executor"] != "loop"):  # whose workers are all alike
        said = ", ".join(f"{name} {how[name]}" for name in changed)
        warnings.warn(f"{begun} {said}: with another it ends in other bits, equal to rounding", stacklevel=4)
    kept = {name: value for name, value in how.items() if name in ROUNDING and name not in changed}
    if "executor" in changed:
        kept.pop("chunk", None)  # of the other executor
    if kept.get("onednn") and has_amx():
        del kept["onednn"]  # it rounds to bfloat16 here, which nobody has agreed to
    return replace(requested, **kept | asked)
