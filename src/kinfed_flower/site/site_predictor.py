"""A site's model of a federation, applied to new rows at the site."""

import json
from pathlib import Path

from torch import nn

from kinfed.core import trees
from kinfed.core.mixins import export
from kinfed.core.tasks import Classification, Counts, Quantiles
from kinfed.data.federation import Federation
from kinfed.data.tables.new_readings import Series
from kinfed.data.tables.schema import Description
from kinfed.errors import RunError, UsageError
from kinfed.runs.config import plugins
from kinfed.runs.openers import SITE
from kinfed.runs.predictor import Answers, Predictor, Source
from kinfed.runs.tested_examples import read_errors

from .. import plan
from ..plan import Plan
from ..wire.messages import Fields
from .site_files import ERRORS, ExperimentFolder, expecting_own, hash_owner, read_tensors

VERDICT = "verdict.json"


def experiment_at(path: Path) -> Path | None:
    """The folder of a site's experiment, by itself or by the site's folder that holds this one only; None: no site's.

    Raises UsageError if there are several.
    """
    if (path / SITE).exists():
        return path
    folders = sorted(file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/{SITE}"))
    beside = [json.loads(file.read_text()).get("beside") for folder in folders if (file := folder / VERDICT).exists()]
    folders = [folder for folder in folders if folder.name not in beside]  # FedAvg, which another one was compared with
    if len(folders) > 1:
        raise UsageError(f"{path} holds {len(folders)} experiments of sites; name one of them, such as {folders[-1]}")
    return folders[0] if folders else None


def predictor_at(folder: Path, interval: float | None = None) -> Predictor:
    """What applies the site's selected model, with bounds of answers that hold this share of truths, if `interval`.

    Raises UsageError if its folder lacks what that needs.
    """
    client = folder.resolve().parent.name
    files = ExperimentFolder(folder.parent, folder.name)
    invitation, description = files.invitation(), files.description()
    if invitation is None or description is None:
        raise UsageError(
            f"{folder} was made before sites kept how their tables are read, so it cannot predict; train again, or "
            "load model.safetensors by hand as docs/deploy.md shows"
        )
    if not (folder / "model.safetensors").exists():
        raise UsageError(f"{folder} has no model yet: no round has been evaluated at this site")
    fields = invitation.fields
    with plugins.local([Path(file) for file in description["code"]]):
        plugins.check_sent(fields["table"])
        planned = plan.resolve(fields["table"])
    with expecting_own(folder / "description.json"):
        columns = Description.from_dict(description["columns"]) if "columns" in description else None
        series = None
        if "series" in description:
            series = Series.from_dict(description["series"], description["reading"], description.get("covariates"))
    module, source = model_of(folder, planned, fields)
    predictor = Predictor(
        names=[client],
        client=client,
        shape=tuple(fields["shape"]),
        answers=_answers(fields, columns, series),
        module=lambda _: module,
        source=lambda _: source,
        description=columns,
        series=series,
    )
    if interval is None:
        return predictor
    return predictor.with_intervals(read_errors(folder / ERRORS) or [], interval, folder)


def keep_errors(folder: Path, federation: Federation) -> None:
    """Keep how far off the selected model is on the site's test rows, unless that is kept, or there is no model."""
    if (folder / "model.safetensors").exists() and not (folder / ERRORS).exists():
        rows = federation.rows["test"][0]
        predictor_at(folder).save_errors(federation.x[rows].cpu(), federation.y[rows].cpu(), folder / ERRORS)


def model_of(folder: Path, planned: Plan, fields: Fields) -> tuple[nn.Module, Source]:
    """The selected model, and the method and the kind of model that it is of."""
    path = folder / "model.safetensors"
    model = planned.model(tuple(fields["shape"]), fields["outputs"], fields.get("description"))
    arrays, text = read_tensors(path)
    if text.get("owner", owner := hash_owner(folder)) != owner:
        raise RunError(
            f"{path} is of another site or run, or description.json beside it is, so its answers would be wrong; put "
            "both back as this site wrote them"
        )
    with expecting_own(path):
        origin = str(json.loads(text["origin"])["model"])
        model = model.carry(arrays.keys())
        tensors = {e.name: arrays.pop(e.name) for e in model.layout.entries}
        for e in model.layout.entries:
            if tensors[e.name].shape != e.shape:
                raise ValueError(f"'{e.name}' is {list(tensors[e.name].shape)}, not {list(e.shape)}")
            if e.dtype is None and not tensors[e.name].is_floating_point():
                raise ValueError(f"'{e.name}' is of {tensors[e.name].dtype}")
            if not tensors[e.name].isfinite().all():
                raise ValueError(f"'{e.name}' holds NaN or infinity")
        personal = trees.nest({"theta": model.layout.flatten(tensors), **arrays})
        module = export(planned.learning.method, model, personal)
    return module, Source(plugins.short_name(planned.learning.method_name), origin)


def _answers(fields: Fields, description: Description | None, series: Series | None) -> Answers:
    """What the outputs mean."""
    task = plan.read_task(fields["task"])
    if description is not None:
        return Answers.from_targets(description.targets, isinstance(task, Counts))
    if series is not None:
        count = fields["outputs"]
        quantiles = task.quantiles if isinstance(task, Quantiles) else ()
        mean, deviation = (series.mean,) * count, (series.deviation,) * count
        return Answers((series.target,), mean=mean, deviation=deviation, quantiles=quantiles)
    return Answers(classes=tuple(map(str, range(task.classes)))) if isinstance(task, Classification) else Answers()
