"""Novel: models for clients that never train, made from the others' models."""

from collections.abc import Sequence

import numpy as np
import torch

from kinfed.core.model import Model
from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.plots.drawing import Array, scale_metric, with_unit
from kinfed.runs.run import Run
from kinfed.runs.run_folder import RunFolder
from kinfed.search.study import Finding, Row, Study, setting

from ..plots.scores import score_by_source
from .late import held_back, hold_back

ABLATIONS = {  # of Panacea: without its graph generator, and without any graph
    "panacea-gn": ["method.reconstruction=0.0"],
    "panacea-mlp": ["method.reconstruction=0.0", "method.encoder=mlp"],
}


def novel(
    study: Study,
    shares: Sequence[float] = (0.1, 0.2, 0.4),
    others: Sequence[str] = ("fedavg", "fedavg-ft", "per-fedavg", "pfedhn"),
) -> Finding:
    """Test scores after the last round of clients that never train, each of `shares` held back (Panacea, Table III).

    The models are those sent by the experiment's method, by Panacea's ablations and by `others`; for comparison the
    mean of their trained neighbours' models, if a graph is known, a model trained on their own data alone, and the
    method's model if they take part from the start. No round is selected, so no data of these clients is used before
    the test, except for the scale of series, which is that of all training windows, and by methods that tune the model
    on the client's training examples.
    """
    if not shares or not all(0 < share < 1 for share in shares):
        raise UsageError(f"analysis.shares are shares of clients, in (0, 1); got {list(shares)}")
    method, rounds = study.method, study.experiment().rounds.count
    last = [setting("evaluate_every", rounds)]
    senders = {method: last}
    if method == "panacea":
        senders |= {name: [*last, *changes] for name, changes in ABLATIONS.items()}
    senders |= {name: [*last, setting("method.name", name)] for name in others}
    requested = {
        f"{name}-{share}": [*changes, hold_back(study, share, rounds)]
        for share in shares
        for name, changes in senders.items()
    }
    requested |= {f"{method}-from-the-start": last, "local": [*last, setting("method.name", "local")]}
    folders = study.runs(requested)
    federations = study.federations()
    metric = federations[0].task.metric
    rows: list[Row] = []
    panels: dict[str, dict[str, Array]] = {}
    for share in shares:
        absent = held_back(folders[f"{method}-{share}"], share)  # [S, N]
        by_source = {name: _read_sent_model(folders[f"{name}-{share}"]) for name in senders}
        if federations[0].graph is not None:
            by_source["neighbours' mean"] = _neighbours(folders[f"{method}-{share}"], federations, absent)
        by_source |= {
            "own data alone": _read_sent_model(folders["local"]),
            f"{method}, from the start": _read_sent_model(folders[f"{method}-from-the-start"]),
        }
        panel = panels[f"{share:.0%} of clients held back"] = {}
        for source, (model, scores) in by_source.items():
            panel[source] = _mean(scores, absent)
            rows.append({"held back": f"{share:.0%}", "source": source, "model": model, **_row(scores, absent, metric)})
    picture = study.out / "novel.png"
    score_by_source(panels, f"test {metric}", picture)
    return Finding(f"test {with_unit(metric)} of clients that never train", rows, [picture])


def _read_sent_model(folder: RunFolder) -> tuple[str, Array]:
    """A run's first model other than `own`, the one after local training, and its test scores [S, N]."""
    summaries = [run.read_summary() for run in folder.repeats()]
    names = list(summaries[0].scores)
    model = next((name for name in names if name != "own"), names[0])
    return model, np.array([summary.clients.scores[model] for summary in summaries])


def _neighbours(folder: RunFolder, federations: Sequence[Federation], absent: Array) -> tuple[str, Array]:
    """As `_sent`: the mean of the trained neighbours' models, or of all if there are none; NaN for trained clients.

    absent: [S, N] bool marks the clients held back.
    """
    scores = np.full(absent.shape, np.nan)
    for seed, (run, federation) in enumerate(zip(folder.repeats(), federations, strict=True)):
        trained = np.flatnonzero(~absent[seed])
        saved = Run.open(run.path)
        models = [Model(saved.model(position=i)) for i in trained.tolist()]
        theta = torch.stack([model.theta for model in models])  # [n, d]
        assert federation.graph is not None
        links = federation.graph.weights[..., trained].view(-1, len(federation), len(trained)).mean(0)  # [N, n]
        for i in np.flatnonzero(absent[seed]).tolist():
            near = links[i] if links[i].any() else torch.ones_like(links[i])
            mean = (near / near.sum()).to(theta.dtype) @ theta
            rows = federation.rows["test"][i]
            x, y = federation.x[rows], federation.y[rows]
            with torch.no_grad():
                result = federation.task.score(models[0].export(mean)(x), y, torch.ones(len(x), dtype=mean.dtype))
            scores[seed, i] = float(result[federation.task.metric])
    return folder.read_summary().selection.chosen, scores


def _mean(scores: Array, chosen: Array) -> Array:
    """[S] means of scores: [S, N] over the clients chosen: [S, N]."""
    return np.array([values[selected].mean() for values, selected in zip(scores, chosen, strict=True)])


def _row(scores: Array, absent: Array, metric: str) -> Row:
    novel, others = (scale_metric(_mean(scores, chosen), metric) for chosen in (absent, ~absent))
    spread = [scale_metric(values[selected], metric).std() for values, selected in zip(scores, absent, strict=True)]
    return {
        "never trained": float(novel.mean()),
        "over clients": float(np.mean(spread)),
        "over seeds": float(novel.std(ddof=1)) if len(novel) > 1 else None,
        "the others": None if np.isnan(others).any() else float(others.mean()),
    }
