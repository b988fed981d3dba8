"""Cards: what a reader of an exported model must know of it, as Markdown."""

from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..core.summary import list_attackers
from ..data.tables.columns import Calendar, Category, Number
from ..errors import UsageError, several
from ..runs.run import Run
from ..runs.run_folder import RunFolder
from .pipeline import onnx_outputs

MOST = 5  # clients that a card lists
CLOCK = "the time of day, from 0 to 1"


def card(saved: Run, client: str, path: Path, digest: str, licence: str, gap: float | None) -> str:
    """The card of a client's exported model."""
    kept = saved.find_kept_run(client)
    summary = kept.summary
    facts = {
        "licence": licence or "(none given: fill in under which licence the model may be used)",
        "file": path.name,
        "sha256": digest,
        "client": client,
        "method": f"{summary.method}, model '{summary.selection.chosen}'",
        "round": f"{summary.chosen_scores.get('round', '?')} of {summary.rounds}",
        "data": _data(saved),
        "parameters": f"{summary.cost.parameters:,}",
        "made with": f"kinfed {__version__}, seed {summary.seeds[0]}",
    }
    lines = [f"# {path.name}: the model of client {_cell(client)}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    lines += [
        "",
        "## Scores",
        "",
        *_scores(saved, client),
        "",
        "## Clients that it learns from",
        "",
        *_listens(kept, client),
    ]
    lines += ["", "## Cautions", "", *_cautions(saved, kept), "", "## Use", "", *_use(saved, path, client, gap)]
    return "\n".join(lines) + "\n"


def _cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _data(saved: Run) -> str:
    dataset = saved.summary.data.federation.get("dataset", {})
    path = f" ({dataset['path']})" if isinstance(dataset, dict) and "path" in dataset else ""
    return f"{saved.summary.data.dataset}{path}, {several(saved.summary.data.clients, 'client')}"


def _score_of(folder: RunFolder, client: str) -> float | None:
    """A client's test score in a finished run; None if there is none."""
    if not folder.is_finished:
        return None
    summary = folder.read_summary()
    return None if summary.by_client is None else summary.clients.by_name(summary.selection.chosen).get(client)


def _scores(saved: Run, client: str) -> list[str]:
    """A table of this model's test score, and those of Local and FedAvg for the same client."""
    folder, summary = saved.folder, saved.find_kept_run(client).summary
    places = {f"this model ({summary.method})": saved.find_kept_run(client).folder}
    others = {"local": "Local: learning alone", "fedavg": "FedAvg: one model for all"}
    places |= {title: folder.reference(name) for name, title in others.items() if name != summary.method}
    if summary is not saved.summary:
        places[f"the run's method ({saved.summary.method})"] = folder
    rows = [f"| | test {summary.metric.name} of {_cell(client)} |", "| --- | --- |"]
    for title, place in places.items():
        score = _score_of(place, client)
        rows.append(f"| {title} | {'not trained beside the run' if score is None else f'{score:.4g}'} |")
    better = "higher" if summary.metric.higher_is_better else "lower"
    return [*rows, "", f"A {better} score is better."]


def _listens(kept: Run, client: str) -> list[str]:
    """The clients with the largest weights in this one's model."""
    try:
        relations = kept.folder.read_relations()
    except UsageError as problem:
        return [f"{problem}."]
    weights: Any = relations.row(kept.names.index(client))[relations.selected]
    row = weights.mean(0) if weights.ndim == 2 else weights  # over layers
    order = [i for i in np.argsort(-row, kind="stable")[:MOST] if row[i] > 0]
    listed = [f"- {_cell(kept.names[i])}{' (itself)' if kept.names[i] == client else ''}: {row[i]:.3f}" for i in order]
    layers = ", the mean over layers" if weights.ndim == 2 else ""
    return [f"The largest weights in its mixture ({relations.origin} relation{layers}):", "", *listed]


def _cautions(saved: Run, kept: Run) -> list[str]:
    warnings = [kept.summary.selection.caution] if kept.summary.selection.caution else []
    warnings += kept.summary.warnings
    attackers = list_attackers(saved.summary)
    if attackers:
        warnings.append(f"trained under attack by {', '.join(attackers[:MOST])}")
    general = (
        "It was made for this client's rows; the scores are of this client's test rows, and say nothing of others'."
    )
    return [f"- {_cell(text)}" for text in [general, *warnings]]


def _use(saved: Run, path: Path, client: str, gap: float | None) -> list[str]:
    description, named = saved.description, _windows(saved, client)
    if path.suffix == ".safetensors":
        return [
            "The tensors alone, by the names of the module's state: load them with `safetensors.torch.load_file`. "
            "Inputs are scaled as the run's summary.json says under `scale` and `columns` of its `data`.",
            *(["", *named] if named else []),
        ]
    agree = f" Its answers are within {gap:.1e} of PyTorch's, relative to the largest." if gap is not None else ""
    lines = [f"Load it with `onnxruntime.InferenceSession`; scales and missing cells are inside.{agree}", ""]
    if description is None:
        what = "windows in the columns' own units, NaN where a cell is missing" if named else "as in training"
        listed = ", ".join(str(size) for size in saved.summary.data.shape or ())
        return [*lines, f"- `x`: float32 [n, {listed}], {what}", *named]
    for column in description.inputs:
        name = _cell(column.name)
        if isinstance(column, Number):
            lines.append(f"- `{name}`: float64 [n], NaN where it is missing")
        elif isinstance(column, Calendar):
            lines.append(f"- `{name}`: float64 [n], seconds since 1970 in UTC, NaN where it is missing")
        elif isinstance(column, Category) and column.parts:
            lines.append(f'- `{name}`: text [n], "" where it is missing')
    if saved.classes:
        answers = onnx_outputs(saved.predictor(client))
        lines += ["", f"`{answers[0]}` and `{answers[1]}` [n, C] of the classes {', '.join(map(repr, saved.classes))}."]
    return lines


def _windows(saved: Run, client: str) -> list[str]:
    """A line on each input of a window's steps; none of other examples."""
    predictor = saved.predictor(client)
    if predictor.series is not None:
        named = predictor.series.inputs
    else:
        named = ["the reading", CLOCK][: predictor.shape[-1]] if predictor.readings else []
    return [f"- `x[..., {i}]`: {_cell(name)}" for i, name in enumerate(named)]
