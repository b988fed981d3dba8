"""fit: from a method, a federation and a module to one personalised model a client."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from . import checkpoint, distributed, engine
from .attack import Attack, AttackedFleet
from .checkpoint import Progress
from .client import Training
from .distributed import Distributed
from .errors import RunError, UsageError
from .federation import Federation, Origin
from .files import make_folder
from .fleet import Fleet, Simulation
from .gemm import has_amx
from .interrupts import held
from .method import Method
from .metrics.classification import count_correct, reweighted_accuracy
from .metrics.graphs import edge_auroc, group_weights
from .model import Model
from .record import History
from .tasks import Classification, Forecasting, Regression, selected_task

CHECKPOINT = "checkpoint.safetensors"
PAUSE = 20  # times as long as a checkpoint took is the least between two of them


@dataclass
class Run:
    """A finished run."""

    method: Method
    federation: Federation
    model: Model
    history: History
    origin: Origin  # of the relation
    seed: int
    how: dict[str, Any]  # executor, workers, chunk, onednn, precision, device: what decides about rounding
    reason: str  # why this executor
    seconds: float
    attack: Attack | None = None

    def __repr__(self) -> str:
        return f"Run({self.method}, {len(self.federation)} clients, {self.history.done} rounds, seed {self.seed})"

    @property
    def executor(self) -> str:
        """The name of the executor that ran the clients."""
        return str(self.how["executor"])

    @property
    def relation(self) -> Tensor | None:
        """[N, N] or [L, N, N] the relation at the chosen model's selected round, if models are mixed."""
        if not self.history.relations:
            return None
        return self.history.relations[self.history.rounds.index(self.history.select(self.history.chosen))]

    def theta(self, client: int | str) -> Tensor:
        """[d] one client's personalised model, by position or name: of the kind and round that validation prefers."""
        return self.history.models["theta"][client_index(self.federation.names, client)].cpu()

    def load_model(self, client: int | str) -> nn.Module:
        """The client's personalised model as a plain module in evaluation mode."""
        return self.model.export(self.theta(client))

    def reweighted_accuracy(self) -> Tensor:
        """[N] accuracy of each client's model on all clients' test examples, weighted by its shares of labels.

        These are of the client's training examples. pFedGraph's protocol, which takes a pass of every model over
        everybody's test examples. Raises UsageError if the task has no classes.
        """
        task = self.federation.task
        if not isinstance(task, Classification):
            raise UsageError("reweighted accuracy needs class labels; this task has none")
        federation = self.federation.to(torch.device("cpu"))
        rows = torch.cat(list(federation.rows["test"])).unique()
        x, y = federation.x[rows], federation.y[rows]
        counts = federation.class_counts(["train"]).double()
        correct = []
        with torch.no_grad():
            for i in range(len(federation)):
                module = self.load_model(i)
                outputs = torch.cat([module(part) for part in x.split(512)])
                correct.append(count_correct(outputs, y, task.classes))
        total = torch.bincount(y, minlength=task.classes)
        return reweighted_accuracy(torch.stack(correct), total, counts / counts.sum(1, keepdim=True))

    def _pooled(self, model: str) -> dict[str, float]:
        """The test metric over all clients' test examples alike, where it is a mean over examples."""
        if isinstance(self.federation.task, Forecasting):
            return {}
        sizes = torch.tensor([len(rows) for rows in self.federation.rows["test"]]).double()
        values = self.history.test(model).double()
        known = ~values.isnan()
        return {"pooled": float((values * sizes)[known].sum() / sizes[known].sum())}

    def _by_class(self) -> dict[str, Any]:
        """See `History.by_class`."""
        task = self.federation.task
        if not isinstance(task, Classification) or not task.by_class:
            return {}
        return self.history.by_class(self.federation.class_names, self.federation.class_counts(["test"]).cpu())

    def summary(self) -> dict[str, Any]:
        """What the run found, as plain numbers: test scores per named model, the relation's quality, bytes, seconds."""
        history, task = self.history, self.federation.task
        cautions = [why for why in (self.method.caution, self.federation.caution) if why]
        found: dict[str, Any] = {
            "method": type(self.method).__name__,
            "rounds": history.done,
            "seed": self.seed,
            "clients": len(self.federation),
            "parameters": self.model.layout.parameters,
            "metric": task.metric,
            "higher_is_better": task.higher_is_better,
            "selected_by": history.selects,
            "scores": {name: score | self._pooled(name) for name, score in history.summary().items()},
            "chosen": history.chosen,
            **history.clients_scores(),
            "relation": None,
            "warnings": [],
            **self._by_class(),
            **self.how,
            "seconds": round(self.seconds, 3),
            "bytes_up": history.bytes_up,
            "bytes_down": history.bytes_down,
            "leaking": bool(cautions),
            "caution": "; ".join(cautions),
        }
        if isinstance(task, Classification) and task.reweighted and history.models:  # none where they stay at sites
            found["scores"][history.chosen]["reweighted"] = float(self.reweighted_accuracy().nanmean())
        if self.attack is not None:
            attackers = self.attack.attackers(self.federation.names, self.seed)
            found["attack"] = {
                "name": type(self.attack).__name__,
                **asdict(self.attack),
                "attackers": [n for n, lies in zip(self.federation.names, attackers.tolist(), strict=True) if lies],
                "scores": history.under_attack(),
            }
        relation, groups = self.relation, self.federation.groups
        if relation is not None:
            found["relation"] = {"origin": self.origin}
            if groups is not None:
                quality = {"auroc": edge_auroc(relation, groups), **group_weights(relation, groups)._asdict()}
                # What a single group, or groups of one, leave undefined is left out.
                found["relation"] |= {name: value for name, value in quality.items() if math.isfinite(value)}
        return found


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
        (method, Method, "kinfed.METHODS['fedavg']()"),
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
        raise UsageError(f"participation must be a share in (0, 1], or a Participation; got {participation!r}")
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
            raise UsageError(f"attack must be one such as kinfed.attacks.Poison(share=0.2); got {attack!r:.80}")
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
    model = Model(module, head, federation.x.dtype)
    build = Distributed if distributed.is_on() else Simulation
    _check_fit(model, federation)
    begun = how.pop("device", "auto")
    where = pick_device(asked.pop("device", begun), f"where the run in {folder} began" if resumed else "")
    fleet = build(
        federation,
        model,
        method,
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
        whole = AttackedFleet(fleet, attack, attackers.to(fleet.device), model.layout, seed)
    at = Progress(0, None, (), 0.0)
    if path and resumed:
        at = checkpoint.load(path, method.start(roster), fleet.states.keep(), history)
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
            method,
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
        method.origin_of(roster),
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


def pick_device(name: str, what: str = "") -> torch.device:
    """The device named auto, cpu, cuda or cuda:i; raises UsageError if this machine does not have it.

    `what` tells in that error what the device is, where it was not just asked for.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(f"device must be auto, cpu, cuda or cuda:NUMBER; got {name!r:.80}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise UsageError(f"device must be auto, cpu, cuda or cuda:NUMBER; got '{name}'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        said = f"device '{name}'{what and f', {what},'} is not here"
        raise UsageError(f"{said}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def client_index(names: Any, client: int | str) -> int:
    """The position of a client given by position or by name."""
    if isinstance(client, str) and client in names:
        return int(list(names).index(client))
    if isinstance(client, int) and -len(names) <= client < len(names):
        return client
    raise UsageError(f"there is no client {client!r}; the {len(names)} clients are named {names[0]} to {names[-1]}")
