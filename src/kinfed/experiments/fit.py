"""fit: from a method, a federation and a module to one personalised model a client."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..attacks.attack import Attack
from ..core import checkpoint, engine
from ..core.checkpoint import Progress
from ..core.client import Training
from ..core.fleet import Fleet
from ..core.history import History
from ..core.method import Method, model_for
from ..core.model import Model
from ..core.sharing import Sharing, divide
from ..core.tasks import Classification, Forecasting, Regression, selected_task
from ..data.federation import Federation
from ..errors import RunError, UsageError
from ..files import make_folder
from ..interrupts import held
from ..ops.gemm import has_amx
from ..simulation import distributed
from ..simulation.attacked_fleet import AttackedFleet
from ..simulation.distributed import Distributed
from ..simulation.simulation import Simulation
from .devices import pick_device
from .run import Run

CHECKPOINT = "checkpoint.safetensors"
PAUSE = 20  # times as long as a checkpoint took is the least between two of them


def fit(
    method: Method,
    federation: Federation,
    module: nn.Module,
    *,
    rounds: int = 20,
    training: Training | None = None,
    participation: float | engine.Participation = 1.0,
    seed: int = 0,
    evaluate_every: int = 1,
    head: str | None = None,
    executor: str = "auto",
    workers: int | None = None,
    chunk: int | None = None,
    precision: str | None = None,
    device: str = "auto",
    folder: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    progress: Callable[[History, int], None] = lambda history, rounds: None,
    attack: Attack | None = None,
    select_by: str = "",
) -> Run:
    """Train one personalised model a client and return the Run.

    `module` gives architecture and initial numbers; `head` names its classifier (default: the last nn.Linear).
    With a `folder` the run keeps a checkpoint there, at most every `checkpoint_seconds` and on KeyboardInterrupt, and
    goes on from the one it finds, to the same bits: in the same precision, on the same device, by the same executor.
    Another of the last two may be asked for; a warning says that the bits will be others. Signals are left to you.
    `select_by` is the validation score that selects the round and the kind of model in place of the task's metric, such
    as "auc" or "loss"; its mean is over the clients that have it. `progress(history, rounds)` is called after every
    round. With an `attack` some clients carry it out; they have no say in which round is selected, and the summary has
    scores of the others beside those of all. Raises UsageError for requests that cannot work and RunError when training
    diverges or a file cannot be written; the last good checkpoint is kept.
    """
    for given, kind, such in (
        (method, Method, "kinfed.FedAvg()"),
        (federation, Federation, "kinfed.Federation.from_arrays(x, y, client)"),
        (module, nn.Module, "torch.nn.Linear(8, 2)"),
    ):
        if not isinstance(given, kind):
            what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)[:80]
            raise UsageError(f"fit takes a method, a federation and a module: {what} is no {kind.__name__} like {such}")
    engine.check_counts(rounds, evaluate_every, seed)
    if training is not None and not isinstance(training, Training):
        raise UsageError(f"training must be like kinfed.Training(epochs=2, batch=16); got {training!r}")
    if not isinstance(participation, Real | engine.Participation):
        raise UsageError(f"participation must be a share in (0, 1], or a kinfed.Participation; got {participation!r}")
    if not isinstance(folder, str | Path | None):
        raise UsageError(f"folder must be a path, such as 'runs/mine'; got {folder!r}")
    folder = None if folder is None else Path(folder)
    if not isinstance(checkpoint_seconds, Real) or not checkpoint_seconds >= 0:
        raise UsageError(f"checkpoint_seconds must be a number, zero or more; got {checkpoint_seconds!r:.80}")
    if not callable(progress):
        raise UsageError(f"progress must be a function of a history and the number of rounds; got {progress!r:.80}")
    if select_by:
        federation = replace(federation, task=selected_task(federation.task, select_by))
    started = time.perf_counter()
    if attack is not None:
        if not isinstance(attack, Attack):
            raise UsageError(f"attack must be one such as kinfed.Poison(share=0.2); got {attack!r:.80}")
        attackers = attack.attackers(federation.names, seed)
        federation = attack.corrupt(federation, attackers, seed)
    path = folder / CHECKPOINT if folder else None
    resumed = path is not None and path.exists()
    settings = {"executor": executor, "workers": workers, "chunk": chunk, "precision": precision, "device": device}
    asked: dict[str, Any] = {name: value for name, value in settings.items() if value not in (None, "auto")}
    data = federation.digest() if path else ""
    how = checkpoint.how(path) if path and resumed else {}  # another choice would round differently
    if how.pop("data", data) != data:
        raise RunError(
            f"the data are not those that the run in {folder} began with; bring these back, or begin anew elsewhere"
        )
    if how:
        how = _go_on_with(how, asked, f"the run in {folder} began with")
    model = model_for(method, module, head, federation.x.dtype, seed)
    build = Distributed if distributed.is_on() else Simulation
    _check_fit(model, federation)
    sharing = Sharing.of(method, model.layout)
    divided, model = divide(method, model)
    begun = how.pop("device", "auto")
    where = pick_device(asked.pop("device", begun), f"where the run in {folder} began" if resumed else "")
    fleet = build(
        federation,
        model,
        divided,
        training or Training(),
        seed=seed,
        device=where,
        share=participation.share if isinstance(participation, engine.Participation) else participation,
        folder=folder,
        **how | asked,
    )
    if "executor" in how:
        fleet.reason = "as before the interruption"
    if folder and distributed.leads():
        make_folder(folder)
        checkpoint.remember(fleet.how, folder)
    roster = fleet.roster(federation.graph)
    history = History(tuple(federation.names), federation.task, evaluate_every, select_by=select_by)
    whole: Fleet = fleet
    if attack is not None and attackers.any():
        history.honest = ~attackers
        whole = AttackedFleet(fleet, attack, attackers.to(fleet.device), sharing.shared, seed)
    at = Progress(0, None, (), 0.0)
    if path and resumed:
        at = checkpoint.load(path, divided.start(roster), fleet.states.keep(), history)
        fleet.states.restore(at.state)
        at = at._replace(server=tree_map(lambda t: t.to(fleet.device), at.server), state=())
    saved, took, before, kept = time.perf_counter(), 0.0, at.seconds, at.done

    def after(round: int, server: Any) -> None:
        nonlocal at, saved, took
        now = time.perf_counter()
        fleet.states.settle()  # first: who is interrupted between the two goes on from the checkpoint before
        at = Progress(round + 1, server, (), before + now - started, {**fleet.how, "data": data})
        if path and round + 1 < rounds and distributed.agree(now - saved >= max(checkpoint_seconds, PAUSE * took)):
            keep()
            saved = time.perf_counter()
            took = saved - now
        progress(history, rounds)

    def keep() -> None:
        nonlocal kept
        whole = at._replace(state=fleet.states.keep())
        if path and distributed.leads():
            checkpoint.save(path, whole, history)
        kept = at.done

    try:
        engine.run(
            divided,
            roster,
            whole,
            history,
            rounds=rounds,
            participation=participation,
            groups=None if federation.groups is None else federation.groups.to(fleet.device),
            server=at.server,
            begin=at.done,
            after=after,
        )
    except (RunError, KeyboardInterrupt) as problem:
        # Several processes are interrupted in different rounds, and the last checkpoint stands.
        apart = isinstance(problem, KeyboardInterrupt) and distributed.is_on()
        if path and kept < at.done == history.done and not apart:
            with held():
                fleet.states.undo()  # what the broken round has changed
                keep()
        raise
    return Run(
        method,
        federation,
        model,
        history,
        divided.origin_of(roster),
        seed,
        fleet.how,
        fleet.reason,
        at.seconds,
        attack,
    )


def _go_on_with(how: dict[str, Any], asked: dict[str, Any], begun: str) -> dict[str, Any]:
    """The settings of an interrupted run, but for those that are `asked` for instead.

    Warns where these end the run in other bits; raises UsageError for another precision, which would make it neither.
    """
    changed = {name: value for name, value in asked.items() if name in how and how[name] != value}
    if "precision" in changed:
        raise UsageError(
            f"{begun} precision {how['precision']}, and a part in {asked['precision']} would make it neither; "
            "leave precision out to go on, or begin anew elsewhere"
        )
    if changed and (changed.keys() - {"workers"} or how["executor"] != "loop"):  # whose workers are all alike
        told = (f"{name} {how[name]}" for name in changed)
        warnings.warn(f"{begun} {', '.join(told)}: with another it ends in other bits, equal to rounding", stacklevel=3)
    kept = {name: value for name, value in how.items() if name not in changed}
    if "executor" in changed:
        kept.pop("chunk", None)  # of the other executor
    if kept.get("onednn") and has_amx():
        del kept["onednn"]  # it rounds to bfloat16 here, which nobody has agreed to
    return kept


def _check_fit(model: Model, federation: Federation) -> None:
    """Raise UsageError unless the model takes the examples, and gives what the task needs."""
    example, task = federation.x[:1], federation.task
    try:
        with torch.no_grad():
            given = list(model(model.theta, example.to(model.theta.device)).shape[1:])
    except Exception as problem:
        shape = list(example.shape[1:])
        raise UsageError(f"the model cannot take an example, which is {shape}: {problem}") from problem
    if isinstance(task, Classification) and (len(given) != 1 or given[0] < task.classes):
        unused = [c for c in range(task.classes) if not (federation.y == c).any()]
        said = f"; no example has the label {unused[0]}, and labels should count from 0" if unused else ""
        raise UsageError(f"the model gives {given} for an example, but there are {task.classes} classes{said}")
    if isinstance(task, Regression | Forecasting) and math.prod(given) != federation.outputs:
        raise UsageError(f"the model gives {given} for an example, but its target is {list(federation.y.shape[1:])}")
