"""fit: from a method, a federation and a module to one personalised model per client."""

import math
import time
import warnings
from dataclasses import replace
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from ..core import engine
from ..core.engine import Participation, Rounds, check_seed
from ..core.fleet import Fleet
from ..core.history import Cost, History, Recorder
from ..core.layout import Layout
from ..core.method import Method
from ..core.mixins import Explains, model_for
from ..core.model import Model
from ..core.sharing import Sharing, divide
from ..core.summary import RunCost
from ..core.tasks import TASKS, Classification, Counts, Forecasting, Quantiles, Regression, selected_task
from ..core.training import Training
from ..core.trees import Tree
from ..core.trial import Trial, run_trial
from ..data.federation import Federation
from ..errors import UsageError
from ..models.holt_winters import HoltWinters
from ..models.repeat import Repeat
from ..simulation import distributed
from ..simulation.attacks.attack import Attack
from ..simulation.attacks.attacked_fleet import AttackedFleet
from ..simulation.distributed import Distributed
from ..simulation.execution import Execution
from ..simulation.simulation import WATCHED, Simulation
from .agreement import check_agreement
from .checkpoints import Checkpointer
from .config import plugins
from .config.experiment import default_model
from .footprint import check, footprint
from .pace import Pace
from .run_folder import RunFolder
from .trackers import track_run
from .trained_run import TrainedRun

KINDS: dict[str, tuple[Any, str]] = {  # what arguments of fit must be
    "training": (Training, "like kinfed.Training(epochs=2, batch=16)"),
    "participation": (Real | Participation, "a share in (0, 1], or a kinfed.Participation"),
    "execution": (Execution, "like kinfed.Execution(executor='loop')"),
    "folder": (str | Path | None, "a path, such as 'runs/mine'"),
    "attack": (Attack | None, "one such as kinfed.attacks.Poison(share=0.2)"),
}


def fit(
    method: Method,
    federation: Federation,
    module: nn.Module | Model | None = None,
    *,
    rounds: int | str | Rounds = 20,
    training: Training = Training(),
    participation: float | Participation = 1.0,
    seed: int = 0,
    execution: Execution = Execution(),
    folder: str | Path | None = None,
    attack: Attack | None = None,
) -> TrainedRun:
    """Train one personalised model for each client.

    Args:
        method: what server and clients do in a round, such as `kinfed.Kin()`.
        federation: the clients' examples, already split.
        module: architecture and initial parameters; by default a small MLP. Its head is the last nn.Linear, unless it
            is given as `Model(module, head="NAME")`.
        rounds: how many, or "auto", until validation stops improving; or a `Rounds`, which also says which of them are
            scored and by which score one is selected.
        training: how every client trains locally.
        participation: the share of clients in a round, or a `Participation`.
        seed: fixes every draw: same seed, same bytes, on one machine's CPU.
        execution: where and how it runs; changes results by rounding at most.
        folder: where checkpoints are written, also on KeyboardInterrupt. A checkpoint that is there is continued, with
            bit-identical results in the same precision, on the same device, by the same executor; with another device
            or executor, after a warning, up to rounding.
        attack: what some clients do to their examples or uploads; they do not count when the round is selected.

    Returns:
        The `Run`, with every client's model at the round that validation prefers. Nothing but checkpoints is written:
        `kinfed.save` keeps it.

    Raises:
        UsageError: the request cannot work.
        RunError: training diverges, or a file cannot be written; the last good checkpoint is kept.

    >>> import torch
    >>> x, client = torch.randn(60, 4), torch.arange(60) % 3
    >>> federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    >>> run = kinfed.fit(kinfed.FedAvg(), federation, torch.nn.Linear(4, 2), rounds=2)
    >>> run.history.test("shared").shape, run.model("1")
    (torch.Size([3]), Linear(in_features=4, out_features=2, bias=True))
    """
    check_seed(seed)
    given = {"training": training, "participation": participation, "execution": execution}
    _check_arguments(method, federation, module, **given, folder=folder, attack=attack)
    rounds = Rounds.parse(rounds)
    participation = participation if isinstance(participation, Participation) else Participation(float(participation))
    checkpointer = Checkpointer(None if folder is None else RunFolder(folder), execution.checkpoint_seconds)
    federation, attackers = _corrupt_data(_selecting(federation, rounds, training), attack, seed)
    model = _model(method, module, federation, seed)
    how = checkpointer.execution(execution, federation, model, rounds, training, seed)
    divided, model = divide(method, model)
    fleet = _gather(federation, model, divided, training, seed, how, participation.share, folder, rounds)
    fleet.reason = checkpointer.reason or fleet.reason
    sharing, size = Sharing.from_method(method, model.layout), model.theta.element_size()
    need = footprint(method, sharing.shared_layout, len(federation), participation.share, rounds, size)
    check(need, len(federation), fleet.device)
    roster = fleet.roster(federation.graph)
    history = History(tuple(federation.names), federation.task)
    all_clients = _attack_fleet(fleet, history, attack, attackers, sharing.shared_layout, seed)
    at = checkpointer.resume(divided, roster, fleet, history)
    history.origin = Explains.from_method(divided).origin_of(roster)
    execution.planned(sharing)
    tracked = track_run(execution.track, checkpointer.folder, rounds.count, sharing.layers)
    pace = Pace(all_clients, method, rounds, at.done)
    with checkpointer.lock(), tracked as follow, checkpointer.guard():

        def record_round(round: int, server: Tree) -> None:
            checkpointer.record_round(round, server, rounds.last)
            pace.check(round + 1)
            execution.progress(history, rounds.count)
            follow(history)

        engine.run(
            divided,
            roster,
            pace,
            Recorder(history),
            rounds=rounds,
            participation=participation,
            groups=None if federation.groups is None else federation.groups.to(fleet.device),
            server=at.server,
            begin=at.done,
            after=record_round,
        )
    if rounds.until:
        checkpointer.keep()
    final = checkpointer.final_state(roster, participation, rounds) if execution.keep_state else None
    cost = _sum_cost(checkpointer, fleet, model, history.cost)
    privacy = fleet.describe_privacy(history.cost.taken)
    made = TrainedRun(method, federation, model, history, seed, cost, attack, final, privacy)
    return made if rounds.until else check_agreement(made, fleet)  # a paused run is one to go on with


def _sum_cost(checkpointer: Checkpointer, fleet: Simulation | Distributed, model: Model, cost: Cost) -> RunCost:
    """What a run took in all."""
    return RunCost(
        parameters=model.layout.parameters,
        seconds=round(checkpointer.at.seconds, 3),
        bytes_up=cost.bytes_up,
        bytes_down=cost.bytes_down,
        reason=fleet.reason,
        **fleet.how,
    )


def _check_arguments(method: Any, federation: Any, module: Any, **others: Any) -> None:
    """Raise UsageError for arguments of fit that are of a wrong kind; warn of more neighbours than there are."""
    for given, kind, example in (
        (method, Method, "kinfed.FedAvg()"),
        (federation, Federation, "kinfed.Federation.from_arrays(x, y, client)"),
        (module.original if isinstance(module, Model) else module or nn.Identity(), nn.Module, "torch.nn.Linear(8, 2)"),
    ):
        if not isinstance(given, kind):
            what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)[:80]
            raise UsageError(
                f"fit takes a method, a federation and a module: {what} is not a {kind.__name__} such as {example}"
            )
    for name, given in others.items():
        if not isinstance(given, KINDS[name][0]):
            raise UsageError(f"{name} must be {KINDS[name][1]}; got {given!r:.80}")
    if (neighbours := getattr(method, "neighbours", 0)) >= len(federation):
        warnings.warn(
            f"neighbours={neighbours} leaves nobody out, as there are {len(federation)} clients; below "
            f"{len(federation) - 1} it would make lists",
            stacklevel=3,
        )


def _gather(
    federation: Federation,
    model: Model,
    method: Method,
    training: Training,
    seed: int,
    how: Execution,
    share: float,
    folder: str | Path | None,
    rounds: Rounds,
) -> Simulation | Distributed:
    """The fleet, in this process or in several."""
    build = Distributed if distributed.is_on() else Simulation
    states = None if folder is None else Path(folder)
    about: dict[str, Any] = {"share": share, "folder": states, "rounds": rounds.count}
    return build(federation, model, method, training, seed=seed, execution=how, **about)


def _selecting(federation: Federation, rounds: Rounds, training: Training) -> Federation:
    """The federation with the score that selects rounds; raises UsageError if it cannot say when training ends."""
    if rounds.patience and training.noise is not None:
        raise UsageError(
            "rounds=auto, or patience, stops by scores, which have no price under privacy, and noise is chosen for all "
            "rounds; give a number of rounds"
        )
    if rounds.patience and not any(map(len, federation.rows["validation"])):
        raise UsageError(
            "rounds=auto, or patience, needs validation examples to stop by, and no client has any; give a number of "
            "rounds, or set federation.split.validation above 0"
        )
    by = rounds.select_by
    return replace(federation, task=selected_task(federation.task, by)) if by else federation


def _corrupt_data(federation: Federation, attack: Attack | None, seed: int) -> tuple[Federation, Tensor]:
    """The federation after an attack on its data, and which clients attack: [N] bool."""
    if attack is None:
        return federation, torch.zeros(len(federation), dtype=torch.bool)
    attackers = attack.attackers(federation.names, seed)
    if type(attack).corrupt is not Attack.corrupt:
        federation = distributed.build_once(partial(attack.corrupt, federation, attackers, seed))
    return federation, attackers


def _attack_fleet(
    fleet: Simulation | Distributed,
    history: History,
    attack: Attack | None,
    attackers: Tensor,
    shared: Layout,
    seed: int,
) -> Fleet:
    """The fleet with its attackers, [N] bool, at work; the history marks all others as honest."""
    if attack is None or not attackers.any():
        return fleet
    history.selector.honest = ~attackers
    return AttackedFleet(fleet, attack, attackers.to(fleet.device), shared, seed)


def _model(method: Method, module: nn.Module | Model | None, federation: Federation, seed: int) -> Model:
    """The model that the method trains; raises UsageError unless it suits the examples."""
    module = default_model(federation, seed=seed) if module is None else module
    module, head = (module.original, module.named_head) if isinstance(module, Model) else (module, None)
    model = model_for(method, module, head, federation.x.dtype, seed)
    check_fit(model, federation)
    _check_task(model, federation)
    return model.watch(federation.x[federation.rows["train"][0][:WATCHED]])


def check_fit(model: Model, federation: Federation, made_up: bool = False) -> None:
    """Raise UsageError unless the model takes the examples, and its outputs fit the task; labels may be made up."""
    outputs, task = run_trial(model, federation.x, Trial.check_predictions), federation.task
    if isinstance(task, Classification) and (len(outputs) != 1 or outputs[0] < task.classes):
        unused = [] if made_up else [c for c in range(task.classes) if not (federation.y == c).any()]
        hint = f"; no example has the label {unused[0]}, and labels should count from 0" if unused else ""
        raise UsageError(f"the model gives {outputs} for an example, but there are {task.classes} classes{hint}")
    if isinstance(task, Classification):
        _warn_of_outputs(model, federation.x[federation.rows["train"][0][:WATCHED]], outputs[0], task.classes)
    if isinstance(task, Quantiles) and isinstance(model.module, Repeat | HoltWinters):
        name = "repeat" if isinstance(model.module, Repeat) else "holt-winters"
        raise UsageError(f"the model {name} has one output for each step, and quantiles need several; use linear")
    quantiles = f", {len(task.quantiles)} quantiles each" if isinstance(task, Quantiles) else ""
    if isinstance(task, Regression | Counts | Forecasting) and math.prod(outputs) != federation.outputs:
        raise UsageError(
            f"the model gives {outputs} for an example, but its target is {list(federation.y.shape[1:])}{quantiles}"
        )


def _warn_of_outputs(model: Model, x: Tensor, outputs: int, classes: int) -> None:
    """Warn of outputs that cross-entropy, which takes logits, trains badly or not at all; x: [B, ...] are examples."""
    if outputs > classes:
        warnings.warn(
            f"the model gives {outputs} outputs for {classes} classes; {outputs - classes} are never a label, so give "
            "its last layer as many as there are classes",
            stacklevel=4,
        )
    with torch.no_grad():
        values = model(model.theta.clone(), x.to(model.theta.device)).double()
    if outputs > 1 and (values >= 0).all() and torch.allclose(values.sum(1), values.new_ones(len(x)), atol=1e-3):
        warnings.warn(
            "the model's outputs are probabilities, as after a softmax, and the loss takes logits, to which it applies "
            "a softmax of its own; end the model with its last linear layer",
            stacklevel=4,
        )


def _check_task(model: Model, federation: Federation) -> None:
    """Raise UsageError unless a task of the user's own says what it must, tried on two examples."""
    task, name = federation.task, type(federation.task).__name__
    if type(task) in TASKS.values():
        return
    rows = federation.rows["train"][0][:2]
    x, y = federation.x[rows], federation.y[rows]
    weight, trying = x.new_ones(len(rows), dtype=model.theta.dtype), "loss"
    try:
        with torch.no_grad():
            outputs = model(model.theta.clone(), x.to(model.theta.device)).to(x.device)
            loss = task.loss(outputs, y)
            trying = "score"
            scores = task.score(outputs, y, weight)
            if isinstance(scores, dict) and all(isinstance(value, torch.Tensor) for value in scores.values()):
                trying = "score, for many clients at once (torch.func.vmap),"
                vmap(task.score)(outputs[None], y[None], weight[None])
    except Warning:
        raise
    except Exception as problem:
        raise UsageError(f"the task {name}: its {trying} fails: {plugins.reason(problem, type(task))}") from problem
    if not isinstance(loss, torch.Tensor) or loss.shape != (len(rows),):
        shape = list(getattr(loss, "shape", ())) or f"{loss!r:.40}"
        raise UsageError(
            f"the task {name}: its loss must be one number for each example, [B]; of {len(rows)} got {shape}"
        )
    if not isinstance(scores, dict) or not all(isinstance(value, torch.Tensor) for value in scores.values()):
        raise UsageError(f"the task {name}: its score must be a dict of tensors [] by name; got {scores!r:.60}")
    if not str(task.metric).replace("-", "_").isidentifier():
        raise UsageError(
            f"the task {name}: its metric must be a word, as files are named by it; got {task.metric!r:.40}"
        )
    opposite = getattr(task, "opposite", ())
    if lacks := [name for name in (task.metric, *task.selectable, *opposite) if name not in scores]:
        raise UsageError(f"the task {name}: its score has no '{lacks[0]}', but {', '.join(scores)}")
    if wide := [name for name, value in scores.items() if value.shape]:
        shape = list(scores[wide[0]].shape)
        raise UsageError(f"the task {name}: the score '{wide[0]}' must be one number for a client, []; got {shape}")
    if not isinstance(task.higher_is_better, bool):
        raise UsageError(f"the task {name}: higher_is_better must be True or False; got {task.higher_is_better!r:.40}")


def seconds_by_round(*what: Any, execution: Execution, **how: Any) -> list[float]:
    """The seconds of each round that `fit` takes, evaluation included; the first one warms up."""
    times = [time.perf_counter()]

    def tick(history: History, rounds: int) -> None:
        times.append(time.perf_counter())

    fit(*what, execution=replace(execution, progress=tick), **how)
    return [after - before for before, after in pairwise(times)]
