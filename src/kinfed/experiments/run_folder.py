"""Run folders: what a run leaves behind, how it is taken up again, how its models are loaded."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..core import checkpoint, trees
from ..core.checkpoint import HOW
from ..core.graph import Origin
from ..core.history import History
from ..core.method import Method, model_for
from ..core.model import Model
from ..core.tasks import Classification
from ..datasets import called
from ..errors import UsageError
from ..files import make_folder, replacing, sweep_up
from . import config, own_parts
from .config import Experiment, Table
from .fit import CHECKPOINT
from .run import Run, client_index


def check_same(experiment: Experiment, folder: Path) -> None:
    """Raise UsageError if the folder holds another experiment."""
    path = folder / "config.toml"
    if path.exists() and config.resolve(config.read(str(path), [])).table != experiment.table:
        raise UsageError(f"{folder} holds another experiment than the one asked for; choose another folder")


def load_model(
    folder: str | Path,
    client: int | str,
    module: nn.Module | None = None,
    method: Method | None = None,
    head: str | None = None,
) -> nn.Module:
    """A client's personalised model from a run's folder, as a plain module in evaluation mode: what was scored.

    `client` is a position or a name. Architecture and method are rebuilt from the run's config. Pass `module` if it
    was your own, as that of a run written by `save` is; and `method` and `head` as they were given to `fit` if the
    method extends or exports models in a way of its own. Raises UsageError if the folder holds no finished run or no
    such client.
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
        experiment = config.resolve(config.read(str(folder / "config.toml"), []))
        method = method or experiment.method
        with reading(folder):
            module = experiment.model(tuple(found["shape"]), found["outputs"])
    if not isinstance(module, nn.Module):
        raise UsageError(f"module must be an nn.Module, such as torch.nn.Linear(8, 2); got {module!r:.80}")
    try:
        with safe_open(folder / "models.safetensors", "pt") as file:
            maker = (file.metadata() or {}).get("method")
            names = list(file.keys())
            places = {part[len(who) + 1 :]: part for who in ("*", name) for part in names if part.startswith(f"{who}/")}
            arrays = {part: file.get_tensor(place) for part, place in places.items()}
        if maker and method is None:
            raise UsageError(
                f"{folder}: only its method, {maker}, can tell how its models predict; pass it as it was given to fit: "
                "load_model(folder, client, module, method)"
            )
        kind = next((t.dtype for t in arrays.values() if t.is_floating_point()), None)
        model = Model(module, head, kind) if method is None else model_for(method, module, head, kind)
        parts = {e.name: arrays.pop(e.name) for e in model.layout.entries}
        for e in model.layout.entries:
            if (got := parts[e.name]).shape != e.shape or got.dtype != kind:
                raise TypeError(f"'{e.name}' is {got.dtype} {list(got.shape)}, not floating-point {list(e.shape)}")
        theta = model.layout.flatten(parts)
        personal = trees.named({"theta": theta, **arrays})
        return model.export(theta) if method is None else method.export(model, personal)
    except (SafetensorError, OSError, RuntimeError, TypeError, LookupError) as problem:
        why = f"it has no {problem}" if isinstance(problem, KeyError) else f"{problem!s:.300}"
        raise UsageError(f"{folder}: the models do not fit this module or cannot be read ({why})") from None


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
    return write_run(run, {"method": {"name": type(run.method).__name__.lower()}}, folder)


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


def write_run(run: Run, table: Table, out: Path) -> dict[str, Any]:
    """Everything that a finished run leaves in its folder; the summary comes last and marks it as finished.

    `table` is the config of what was not your own.
    """
    from ..plots import charts

    history, names, task = run.history, list(run.federation.names), run.federation.task
    if isinstance(task, Classification):
        classes = run.federation.class_names
        charts.classes_by_client(run.federation.class_counts().numpy(), classes, names, out / "classes.png")
    layout = run.model.layout
    found, layers = run.summary(), run.sharing.layers
    write_history(history, run.relation, run.origin, layers, out, run.federation.groups, found["caution"])
    write_recall(found, names, out)
    arrays: dict[str, torch.Tensor] = {}
    for part, values in history.kept_models.items():
        shared = part in history.shared
        for name, own in zip(["*"] if shared else names, [values] if shared else values, strict=True):
            mine = layout.tensors(own) if part == "theta" and own.numel() == layout.size else {part: own}
            arrays |= {f"{name}/{key}": value for key, value in mine.items()}
    kind = type(run.method)
    own = kind.export is not Method.export or kind.extend is not Method.extend
    checkpoint.write(arrays, out / "models.safetensors", {"method": kind.__name__} if own else None)
    dealt = table.get("federation", {})
    if run.attack is not None and "attack" in table:
        found["attack"] |= table["attack"]  # its name in configs
    summary = {
        **found,
        "method": own_parts.called(table["method"]["name"]),
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
    write_json(summary, out / "summary.json")
    tidy(out)
    return summary


def tidy(out: Path) -> None:
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
    from ..plots import charts, heatmaps

    names, metric = list(history.names), history.task.metric
    history.write_csv(out / "history.csv", caution)
    if any(history.diagnostics):
        history.write_diagnostics(out / "diagnostics.csv")
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
    from ..plots import heatmaps

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


def write_json(values: dict[str, Any], path: Path) -> None:
    """A whole JSON file, or none."""
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=1) + "\n")
