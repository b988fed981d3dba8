"""Openers: whose models a folder holds, a run's or, opened by `kinfed_flower`, those of a site of a real federation."""

from pathlib import Path

from torch import nn

from ..core.copies import duplicate
from ..core.method import Method
from ..core.registry import load
from .predictor import Predictor
from .run import Run, client_index
from .run_folder import RunFolder

SITE = "join.safetensors"  # marks the folder of an experiment at a site
SITES = "kinfed_flower.site.site_predictor"  # opens such folders


def open_models(folder: RunFolder) -> Run | None:
    """The run in a folder; None if it has no config, or if its models stayed elsewhere."""
    return Run.open(folder.path) if folder.models.exists() and folder.is_begun else None


def experiment_at(path: Path) -> Path | None:
    """The folder of a site's experiment, by itself or by the site's folder that holds this one only; None: no site's.

    Raises UsageError if there are several, and without kinfed_flower.
    """
    if (path / "summary.json").exists():  # of a run
        return None
    if not any(next(path.glob(depth + SITE), None) for depth in ("", "*/", "*/*/")):
        return None
    return load(f"{SITES}:experiment_at")(path)


def predictor_at(experiment: Path, interval: float | None = None) -> Predictor:
    """What applies a site's selected model, with bounds of answers that hold this share of truths, if `interval`.

    Raises UsageError if its folder lacks what that needs.
    """
    return load(f"{SITES}:predictor_at")(experiment, interval)


def load_model(
    folder: str | Path,
    client: int | str | None = None,
    module: nn.Module | None = None,
    method: Method | None = None,
    head: str | None = None,
    *,
    position: int | None = None,
) -> nn.Module:
    """A client's personalised model from a run's folder, or a site's own from its folder at the site.

    Args:
        folder: of a run, a choice or, at a site of a real federation, an experiment.
        client: its name; a site's folder has one client, which need not be named.
        module, method, head: what was your own in the run, see `kinfed.Run.open`.
        position: the client's place, from 0, in place of its name.

    Returns:
        The module that was scored, in evaluation mode; of a choice the model that the client keeps, which may be
        Local's or FedAvg's.

    Raises:
        UsageError: there is no finished run or no such client, or the run needs your module.
    """
    experiment = experiment_at(Path(folder))
    if experiment is None:
        return Run.open(folder, module, method, head).model(client, position=position)
    predictor = predictor_at(experiment)
    names, is_unnamed = predictor.names, client is None and position is None
    return duplicate(predictor.module(names[0 if is_unnamed else client_index(names, client, position)]))
