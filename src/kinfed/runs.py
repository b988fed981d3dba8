"""Run folders: what a run leaves behind, how it is taken up again, how its models are loaded."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from . import checkpoint, config, distributed
from .checkpoint import HOW
from .config import Experiment, Table
from .datasets import called
from .errors import DataError, RunError, UsageError
from .experiment import CHECKPOINT, Run, client_index, fit
from .federation import Origin
from .files import make_folder, replacing, sweep_up
from .interrupts import held
from .model import Model
from .record import History, over_seeds, preferred, selects_highest
from .tasks import Classification

Progress = Callable[[History, int], None]

OPEN = ("device", "executor", "workers", "precision")  # what decides about rounding, and may be left open


@dataclass(frozen=True)
class Machine:
    """Where and how to run: nothing here changes a result, but for rounding."""

    data_dir: Path | None = None
    device: str = "auto"
    executor: str = "auto"
    workers: int | None = None  # cores to use: loop trains a client on each; None: all
    precision: str | None = None  # of local training: float32, tf32 or bf16; None: as before, or float32
    checkpoint_seconds: float = 10.0
    progress: Progress = lambda history, rounds: None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers counts threads, so it must be at least 1; got {self.workers}")
        if not self.checkpoint_seconds >= 0:
            raise UsageError(
                f"checkpoint is a time in seconds, so it must be zero or more; got {self.checkpoint_seconds}"
            )

    @property
    def asked(self) -> dict[str, Any]:
        """What is not left open of what decides about rounding."""
        given = {name: getattr(self, name) for name in OPEN}
        return {name: value for name, value in given.items() if value not in (None, "auto")}

    def as_begun(self, folder: Path) -> "Machine":
        """The same, and what it leaves open as the run in this folder has had it."""
        begun = checkpoint.recall(folder)
        return replace(self, **{name: begun[name] for name in OPEN if name in begun} | self.asked)


def launch(experiment: Experiment, out: Path | None, machine: Machine) -> dict[str, Any]:
    """Run an experiment in a folder of its own and return its summary.

    Without `out` the folder is runs/METHOD/DATASET/TIME. Raises UsageError if `out` holds a run already.
    A request that cannot be carried out leaves no folder, nor do data that cannot be read.
    """
    table = experiment.table
    if distributed.is_on() and table["seeds"] > 1:
        raise UsageError("several processes run one seed at a time; leave seeds out, or run without torchrun")
    if out is None:
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        parent = Path("runs") / table["method"]["name"] / called(table["federation"]["dataset"])
        out = next(p for i in range(1000) if not (p := parent / (f"{stamp}-{i}" if i else stamp)).exists())
    if (out / "config.toml").exists():
        raise UsageError(f"{out} holds a run already; go on with it: kinfed resume {out}, or choose another --out")
    out = distributed.agree(out)
    new = not out.exists()
    if distributed.leads():
        make_folder(out)
        checkpoint.remember(machine.asked, out)
        config.write(table, out / "config.toml")  # last: with it there is something to go on with
    try:
        return _go_on(experiment, out, machine)
    except (UsageError, DataError):  # such as data that is not there: what was begun with it is not worth going on with
        begun = ("config.toml", HOW)
        if new and distributed.leads() and all(path.name in begun or path.is_dir() for path in out.rglob("*")):
            shutil.rmtree(out)
        raise


def resume(folder: Path, machine: Machine) -> dict[str, Any]:
    """Go on with an interrupted run, or return the summary of a finished one.

    What `machine` leaves open is as it was when the run began.
    """
    path = folder / "config.toml"
    if not path.exists():
        raise UsageError(f"{folder} is not a run's folder: it has no config.toml")
    if distributed.agree((folder / "summary.json").exists()):
        if distributed.leads():
            _tidy(folder)
        return read_summary(folder)
    experiment = config.resolve(config.read(str(path), []))
    try:
        return _go_on(experiment, folder, machine)
    except (UsageError, RunError, OSError, MemoryError):
        raise
    except Exception as problem:  # whatever a checkpoint from elsewhere can end in
        kept = next(folder.rglob(CHECKPOINT), None)
        if kept is None:
            raise
        raise RunError(
            f"{kept} is not what this kinfed writes ({problem!s:.300}; --debug shows where); delete it to start over"
        ) from problem


def once(experiment: Experiment, folder: Path, machine: Machine) -> Path:
    """The folder of an experiment's finished run: launched, taken up, or left as it is.

    Raises UsageError if the folder holds another experiment.
    """
    check_same(experiment, folder)
    if (folder / "config.toml").exists():
        resume(folder, machine)
    else:
        launch(experiment, folder, machine)
    return folder


def check_same(experiment: Experiment, folder: Path) -> None:
    """Raise UsageError if the folder holds another experiment."""
    path = folder / "config.toml"
    if path.exists() and config.resolve(config.read(str(path), [])).table != experiment.table:
        raise UsageError(f"{folder} holds another experiment than the one asked for; choose another folder")


def load_model(folder: str | Path, client: int | str, module: nn.Module | None = None) -> nn.Module:
    """A client's personalised model from a run's folder, as a plain module in evaluation mode.

    `client` is a position or a name. The architecture is rebuilt from the run's config; pass `module` if it was your
    own, as that of a run written by `save` is. Raises UsageError if the folder holds no finished run or no such client.
    """
    folder = Path(folder)
    found = read_summary(folder)
    with reading(folder):
        if "seeds" in found:
            raise UsageError(f"{folder} holds a run for each seed; name one, such as {folder}/seed-{found['seed']}")
        name = str(found["names"][client_index(list(found["names"]), client)])
    if module is None:
        if not (folder / "config.toml").exists():
            raise UsageError(
                f"{folder} has no config.toml that could tell the architecture, as kinfed.save writes none; pass a "
                "module of it: load_model(folder, client, module)"
            )
        table = config.read(str(folder / "config.toml"), [])
        build = config.resolve(table).model
        with reading(folder):
            module = build(tuple(found["shape"]), found["outputs"])
    if not isinstance(module, nn.Module):
        raise UsageError(f"module must be an nn.Module, such as torch.nn.Linear(8, 2); got {module!r:.80}")
    layout = Model(module).layout
    try:
        with safe_open(folder / "models.safetensors", "pt") as file:
            known = set(file.keys())
            names = {e: f"{name}/{e}" for e in layout.names}
            tensors = {e: file.get_tensor(at if at in known else f"*/{e}") for e, at in names.items()}
        kind = next(tensors[e.name] for e in layout.entries if e.trainable).dtype
        module.to(kind).load_state_dict(tensors, strict=False)
    except (SafetensorError, OSError, RuntimeError, TypeError) as problem:
        why = f"{problem!s:.300}"
        raise UsageError(f"{folder}: the models do not fit this module or cannot be read ({why})") from None
    return module.eval()


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Whatever the summary of a folder can end in that no run has written becomes a UsageError that names it."""
    try:
        yield
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration, RuntimeError) as problem:
        why = f"it has no {problem}" if isinstance(problem, KeyError) else " ".join(str(problem).split())
        raise UsageError(f"{folder}/summary.json is not a run's summary: {why or 'it has no scores'}") from None


def save(run: Run, folder: str | Path) -> dict[str, Any]:
    """Write a run made with `kinfed.fit` as a run's folder, and return its summary.

    The folder has no config.toml: your own data and module are not in a config. Its models load with
    `load_model(folder, client, module)`. Raises UsageError if the folder holds a finished run already.
    """
    folder = Path(folder)
    if (folder / "summary.json").exists():
        raise UsageError(f"{folder} holds a run already; choose another folder")
    make_folder(folder)
    return _write(run, {"method": {"name": type(run.method).__name__.lower()}}, folder)


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run; raises UsageError if there is none."""
    try:
        found = json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        raise UsageError(f"{folder} is not the folder of a finished run: it has no summary.json") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise UsageError(f"{folder}/summary.json cannot be read: {problem}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{folder}/summary.json is not a run's summary: it is no table but {found!r:.80}")
    return found


def _go_on(experiment: Experiment, out: Path, machine: Machine) -> dict[str, Any]:
    table, machine = experiment.table, machine.as_begun(out)
    try:
        if table["seeds"] == 1:
            return _one(experiment, table["seed"], out, machine)
        if distributed.leads():
            checkpoint.remember(machine.asked, out)
        found = []
        for seed in range(table["seed"], table["seed"] + table["seeds"]):
            folder = out / f"seed-{seed}"
            if (folder / "summary.json").exists():
                found.append(read_summary(folder))
                continue
            make_folder(folder)
            config.write({**table, "seed": seed, "seeds": 1}, folder / "config.toml")
            found.append(_one(experiment, seed, folder, machine.as_begun(folder)))
    except KeyboardInterrupt as stop:
        raise type(stop)(f"interrupted; go on with: kinfed resume {out}") from None
    summary = _over_seeds(found, out)
    _write_json(summary, out / "summary.json")
    _tidy(out)
    return summary


def _one(experiment: Experiment, seed: int, out: Path, machine: Machine) -> dict[str, Any]:
    table = experiment.table
    federation = experiment.federation(machine.data_dir, seed)
    run = fit(
        experiment.method,
        federation,
        experiment.module(federation, seed),
        rounds=table["rounds"],
        training=experiment.training,
        participation=experiment.participation,
        seed=seed,
        evaluate_every=table["evaluate_every"],
        executor=machine.executor,
        workers=machine.workers,
        precision=machine.precision,
        device=machine.device,
        folder=out,
        checkpoint_seconds=machine.checkpoint_seconds,
        progress=machine.progress,
        attack=experiment.attack,
        select_by=table.get("select_by", ""),
    )
    if not distributed.leads():
        return {}
    with held():
        return _write(run, table, out)


def _write(run: Run, table: Table, out: Path) -> dict[str, Any]:
    """Everything that a finished run leaves in its folder; the summary comes last and marks it as finished.

    `table` is the config of what was not your own.
    """
    from .report import charts  # here, as it would add to every start: on Flower a program starts with every message

    history, names, task = run.history, list(run.federation.names), run.federation.task
    if isinstance(task, Classification):
        classes = run.federation.class_names
        charts.classes_by_client(run.federation.class_counts().numpy(), classes, names, out / "classes.png")
    layout = run.model.layout
    found, layers = run.summary(), [layer.name for layer in layout.layers]
    write_history(history, run.relation, run.origin, layers, out, run.federation.groups, found["caution"])
    write_recall(found, names, out)
    arrays: dict[str, torch.Tensor] = {}
    for part, values in history.models.items():
        # Rows gathered from several processes lie apart, even if they are the same.
        shared = len(names) > 1 and (values.stride(0) == 0 or all(torch.equal(row, values[0]) for row in values[1:]))
        for name, own in zip(["*"] if shared else names, values[:1] if shared else values, strict=True):
            mine = layout.tensors(own) if part == "theta" and own.numel() == layout.size else {part: own}
            arrays |= {f"{name}/{key}": value for key, value in mine.items()}
    checkpoint.write(arrays, out / "models.safetensors")
    dealt = table.get("federation", {})
    if run.attack is not None and "attack" in table:
        found["attack"] |= table["attack"]  # its name in configs
    summary = {
        **found,
        "method": table["method"]["name"],
        "dataset": called(dealt["dataset"]) if dealt else "your own",
        "federation": dealt,
        "names": names,
        "shape": list(run.federation.x.shape[1:]),
        "outputs": run.federation.outputs,
        "classes": list(run.federation.classes),
        "scale": run.federation.scale,
        "reason": run.reason,
        "out": str(out),
    }
    _write_json(summary, out / "summary.json")
    _tidy(out)
    return summary


def _tidy(out: Path) -> None:
    """Remove from a finished run's folder what was there to go on with, and what a kill left half-written."""
    sweep_up(out)
    for path in (out / CHECKPOINT, out / HOW):
        path.unlink(missing_ok=True)


def write_history(
    history: History,
    relation: torch.Tensor | None,
    origin: Origin,
    layers: list[str],
    out: Path,
    groups: torch.Tensor | None = None,
    caution: str = "",
) -> None:
    """Tables and pictures of what is known of a run, its models apart; `caution` says why to beware of its scores."""
    from .report import charts, heatmaps

    names, metric = list(history.names), history.task.metric
    history.write_csv(out / "history.csv", caution)
    if any(history.notes):
        history.write_notes(out / "notes.csv")
    if history.relations:
        history.write_relations(out / "relations.npz", origin, layers)
    split = "validation" if (history.headline, "validation", metric) in history.scores[0] else "test"
    curves = {name: history.curve(name, split, metric).numpy() for name in history.named_models}
    rounds = np.array(history.rounds) + 1
    selected = {name: history.select(name) + 1 for name in history.named_models}
    said, whose = "LEAKING " if caution else "", ""
    if history.honest is not None:
        lying = ~history.honest.numpy()
        curves = {name: np.where(lying, np.nan, curve) for name, curve in curves.items()}
        names = [f"{name} (attacker)" if lies else name for name, lies in zip(names, lying, strict=True)]
        said, whose = said + "attacked ", "honest clients' "
    charts.accuracy_by_round(rounds, curves, f"{said}{whose}{split} {metric}", out / f"{metric}-by-round.png", selected)
    scores = {name: history.test(name).numpy() for name in history.named_models}
    charts.accuracy_by_client(scores, names, f"{said}test {metric}", out / f"{metric}-by-client.png")
    if relation is not None:
        hidden = None if groups is None else groups.numpy()
        picture = out / "relation.png"
        heatmaps.relation_heatmap(relation.numpy(), names, said + origin, picture, groups=hidden, layers=layers)


def write_recall(summary: dict[str, Any], names: Sequence[str], out: Path) -> None:
    """The picture of a run's recall by class, if its summary has it."""
    from .report import heatmaps

    if "by_class" in summary:
        said = "LEAKING " * summary["leaking"] + "attacked " * ("attack" in summary)
        rows, lying = summary["by_class"], summary.get("attack", {}).get("attackers", [])
        heatmaps.recall_heatmap(
            np.array(summary["clients_recall"], np.float64),
            [row.get("pooled", row["recall"]) for row in rows],
            [row["class"] for row in rows],
            [f"{name} (attacker)" if name in lying else name for name in names],
            f"{said}test recall by class",
            out / "recall.png",
        )


def _over_seeds(found: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """One summary of several: means over seeds, and the spread over seeds beside the one over clients."""
    first = found[0]
    scores = over_seeds([f["scores"] for f in found])
    relation = first["relation"]
    if relation is not None:
        numbers = {
            key: float(np.mean([f["relation"][key] for f in found]))
            for key in relation
            if key != "origin" and all(key in f["relation"] for f in found)
        }
        relation = {"origin": relation["origin"], **numbers}
    kept = (
        "method",
        "dataset",
        "federation",
        "rounds",
        "clients",
        "parameters",
        "metric",
        "higher_is_better",
        "selected_by",
        "executor",
        "leaking",
        "caution",
    )
    attacked = {}
    if "attack" in first:  # which clients attack is another draw with every seed
        shown = {key: value for key, value in first["attack"].items() if key != "attackers"}
        attacked["attack"] = shown | {"scores": over_seeds([f["attack"]["scores"] for f in found])}
    return {
        **{key: first[key] for key in kept},
        **attacked,
        "warnings": [f"seed {one['seed']}: {warning}" for one in found for warning in one["warnings"]],
        "seed": first["seed"],
        "seeds": [f["seed"] for f in found],
        "scores": scores,
        "chosen": preferred(scores, selects_highest(first)),
        "relation": relation,
        **{key: sum(f[key] for f in found) for key in ("seconds", "bytes_up", "bytes_down")},
        "out": str(out),
    }


def _write_json(values: dict[str, Any], path: Path) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=1) + "\n")
