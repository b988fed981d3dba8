"""The files of a finished run: tables, pictures, models and the summary, which may be of several seeds."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..core.history import KINDS, History
from ..core.mixins import exporter
from ..core.round_selection import select_model
from ..core.sharing import Sharing
from ..core.summary import Provenance, Summary, list_attackers, list_warnings, over_seeds
from ..core.tasks import Classification, Forecasting
from ..data.datasets.your_files import display_name
from ..data.federation import Federation, list_owned
from ..errors import UsageError, log_failure, note_failure
from ..plots import charts, heatmaps
from ..verdict.statistics import interval
from ..verdict.verdict import Verdict
from .agreement import check_written
from .baselines import Baseline, rows, write as write_baselines
from .config import experiment, plugins
from .models_file import list_tensors, write_models
from .round_tables import write_confusion
from .run_folder import BESIDE, RunFolder
from .tested_examples import write_errors
from .trained_run import TrainedRun

# What a summary says of one run, others with every seed.
DATA: Any = dict.fromkeys(("shape", "outputs", "classes", "scale"))
COST: Any = dict.fromkeys(("reason", "workers", "chunk", "onednn", "precision", "device"))


def save(run: TrainedRun, folder: str | Path) -> Summary:
    """Write a run made with `kinfed.fit` as a run's folder, as `kinfed run` does.

    The folder has no config.toml, as your own data and module are not in a config, so its models load with
    `load_model(folder, client, module)`.

    Args:
        run: what `fit` returned.
        folder: where it is written; created if it is not there.

    Returns:
        The run's summary, as in summary.json.

    Raises:
        UsageError: the folder holds a finished run already.

    >>> import torch
    >>> x, client = torch.randn(60, 4), torch.arange(60) % 3
    >>> federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    >>> run = kinfed.fit(kinfed.Local(), federation, torch.nn.Linear(4, 2), rounds=1)
    >>> _ = kinfed.save(run, "three-clients")
    >>> kinfed.load_model("three-clients", "1", torch.nn.Linear(4, 2))
    Linear(in_features=4, out_features=2, bias=True)
    """
    run_folder = RunFolder(folder)
    if run_folder.is_finished:
        raise UsageError(f"{folder} already holds a run; choose another folder")
    run_folder.create()
    return write_run(run, {"method": {"name": type(run.method).__name__.lower()}}, run_folder)


def write_run(
    run: TrainedRun,
    table: experiment.Table,
    folder: RunFolder,
    verdict: Verdict | None = None,
    problems: Sequence[str] = (),
    refit: TrainedRun | None = None,
    standard: Sequence[Baseline] = (),
) -> Summary:
    """Write all files of a finished run; the summary comes last and marks it as finished.

    `table` is the config, without parts that were your own. `problems` join the warnings. The models are those of
    `refit`, the same training on all rows, if there is one; all else is of the run. `standard` are the standard models
    that it is compared with.
    """
    summary = run.summary
    layers = Sharing.from_method(run.method, run.architecture.layout).layers
    folder.write_history(run.history, layers, summary.selection.caution)
    if BESIDE not in folder.path.parts[-3:-1]:  # a run beside another, or a seed of it, is faster than its pictures
        _draw_pictures(run, folder, layers)
    identity = identify(table, summary.seeds[0], folder)
    kept = run if refit is None else refit
    tensors = list_tensors(kept.history, kept.architecture)
    write_models(folder.models, tensors, kept.architecture, exporter(run.method), identity)
    check_written(kept, folder)
    folder.write_clients(run.federation)
    if run.final is not None:
        run.final.write(run.history, folder.state, identity)
    problems = list(problems)
    standard = standard or run.__dict__.get("standard_baselines", ([],))[0]  # if they have been fitted
    with note_failure(problems, "single test examples have no scores"):
        _write_examples(run, folder, standard)
    dealt = table.get("federation", {})
    dataset = display_name(dealt["dataset"]) if dealt else "your own"
    attack = summary.attack
    if attack is not None and "attack" in table:
        attack = attack | table["attack"]  # its name in configs
    summary = replace(
        summary,
        method=plugins.short_name(table["method"]["name"]),
        data=replace(summary.data, dataset=dataset, federation=dealt),
        attack=attack,
        verdict=None if verdict is None else verdict.to_dict(),
        warnings=[*summary.warnings, *problems],
        provenance=Provenance(identity=identity, former=former_of(folder, run.history), refit=refit is not None),
        baselines=rows([standard], summary.metric.higher_is_better) or None,
        out=str(folder),
    )
    folder.write_summary(summary)
    folder.tidy()
    return summary


def _draw_pictures(run: TrainedRun, folder: RunFolder, layers: list[str]) -> None:
    """Draw what each client has to predict, and what the run learned."""
    names, federation, summary = list(run.federation.names), run.federation, run.summary
    if isinstance(federation.task, Classification):
        with _picture(folder.path / "classes.png") as picture:
            charts.classes_by_client(federation.class_counts().numpy(), federation.class_names, names, picture)
    else:
        with _picture(folder.path / "targets.png") as picture:
            if targets := _list_targets(federation):
                charts.targets_by_client([values.numpy() for values in targets], names, picture)
    draw_history(run.history, layers, folder, federation.groups, summary.selection.caution, list_attackers(summary))
    draw_recall(summary, folder)


def _write_examples(run: TrainedRun, folder: RunFolder, standard: Sequence[Baseline]) -> None:
    """Write the scores of test examples, by the run's models and by standard ones, and its confusions."""
    if (tested := run.by_client).examples:
        tested.write(folder.tested)
    if errors := run.errors:
        write_errors(folder.errors, errors)
    if standard:
        write_baselines(folder, standard)
    if run.history.kept.arrays and isinstance(run.federation.task, Classification):
        federation = run.federation
        write_confusion(folder.confusion, run.confusion(), federation.names, federation.class_names)


def intervals_over(summaries: Sequence[Summary]) -> dict[str, dict[str, Any]]:
    """The interval over seeds of each named model's mean."""
    means = {name: [[summary.honest_scores[name]["mean"]] for summary in summaries] for name in summaries[0].scores}
    share = summaries[0].metric.is_share
    return {
        name: interval(means_by_seed, share=share).to_dict()
        for name, means_by_seed in means.items()
        if np.isfinite(means_by_seed).all()
    }


def run_seeds(summaries: Sequence[Summary], out: str) -> Summary:
    """One summary of several: means over seeds, and the spread over seeds beside the one over clients."""
    first, costs = summaries[0], [summary.cost for summary in summaries]
    scores = over_seeds([summary.scores for summary in summaries])
    relation, attack = first.relation, first.attack
    relations = [summary.relation or {} for summary in summaries]
    if relation is not None:
        everywhere = set.intersection(*map(set, relations))
        shared = [key for key in relation if key != "origin" and key in everywhere]
        means = {key: float(np.mean([numbers[key] for numbers in relations])) for key in shared}
        relation = {"origin": relation["origin"], **means}
    if attack is not None:  # which clients attack is another draw with every seed
        shown = {key: value for key, value in attack.items() if key != "attackers"}
        attack = shown | {"scores": over_seeds([summary.honest_scores for summary in summaries])}
    chosen, privacy = select_model(scores, first.selection.higher_is_better), first.privacy
    if privacy is not None:  # scores select nothing, and the clients of other seeds are others
        chosen = first.selection.chosen
        privacy = {key: value for key, value in privacy.items() if not isinstance(value, list)}
    return replace(
        first,
        by_client=None,
        recall=None,
        data=replace(first.data, **DATA),
        cost=replace(
            first.cost,
            **COST,
            seconds=sum(cost.seconds for cost in costs),
            bytes_up=sum(cost.bytes_up for cost in costs),
            bytes_down=sum(cost.bytes_down for cost in costs),
        ),
        intervals=intervals_over(summaries),
        attack=attack,
        warnings=list_warnings(summaries),
        seeds=[summary.seeds[0] for summary in summaries],
        scores=scores,
        selection=replace(first.selection, chosen=chosen),
        privacy=privacy,
        relation=relation,
        out=out,
    )


def former_of(folder: RunFolder, history: History) -> dict[str, Any] | None:
    """From which run this one has gone on, for its summary; None if it began by itself.

    Its folder as `run`, its `rounds`, who has `joined`, and whether its `scores` are among this run's.
    """
    origin = folder.read_origin()
    if origin is None:
        return None
    joined = [name for name in history.names if name not in origin["clients"]]
    kept = history.rounds[0] < origin["rounds"]
    return {"run": origin["run"], "rounds": origin["rounds"], "joined": joined, "scores": kept}


def identify(table: experiment.Table, seed: int, folder: RunFolder) -> str:
    """A short hash of a run's config, seed and history: equal for equal runs, also of the same rows in another file."""
    learning = {key: value for key, value in table.items() if key not in ("federation", "attack", "code")}
    content = json.dumps([learning, seed], sort_keys=True, default=str).encode() + folder.history.read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


def draw_history(
    history: History,
    layers: list[str],
    folder: RunFolder,
    groups: Tensor | None = None,
    caution: str = "",
    attackers: Sequence[str] = (),
) -> None:
    """Draw a run's scores and its relation; `caution` says why its scores are not a fair estimate."""
    names = _mark_attackers(history.names, attackers)
    metric = history.task.metric
    out = folder.path
    split = "validation" if (history.headline, "validation", metric) in history.scores[0] else "test"
    curves = {name: history.selector.mask(history.curve(name, split, metric)).numpy() for name in history.named_models}
    rounds = np.array(history.rounds) + 1
    selected = {name: history.select(name) + 1 for name in history.named_models}
    prefix = ("LEAKING " if caution else "") + ("attacked " if attackers else "")
    honest = "honest clients' " if attackers else ""
    with _picture(out / f"{metric}-by-round.png") as picture:
        what = f"{prefix}{honest}{split} {metric}"
        charts.accuracy_by_round(rounds, curves, what, picture, selected, kinds=KINDS)
    with _picture(out / f"{metric}-by-client.png") as picture:
        scores = {name: history.test(name).numpy() for name in history.named_models}
        others = _read_local_scores(folder, history.names, metric)
        charts.accuracy_by_client(scores, names, f"{prefix}test {metric}", picture, others, KINDS)
    relation = history.relations[history.place()] if history.kept_relations else None
    if isinstance(relation, Tensor):  # lists are of too many clients for a picture
        hidden = None if groups is None else groups.numpy()
        with _picture(out / "relation.png") as picture:
            heatmaps.relation_heatmap(
                relation.numpy(), names, prefix + history.origin, picture, groups=hidden, layers=layers
            )


@contextmanager
def _picture(path: Path) -> Iterator[Path]:
    """A picture that cannot be drawn takes nothing else away: a warning says why it is missing."""
    try:
        yield path
    except Exception as problem:
        warnings.warn(f"{path.name} is missing, as it cannot be drawn: {log_failure(problem)}", stacklevel=2)


def _read_local_scores(folder: RunFolder, names: Sequence[str], metric: str) -> dict[str, NDArray[np.float64]]:
    """[N] the test scores of the run of Local beside a run, if there is one."""
    if not (local := folder.reference("local")).is_finished:
        return {}
    summary = local.read_summary()
    if summary.metric.name != metric:
        return {}
    scores = summary.clients.by_name(summary.selection.chosen)
    return {"Local, learning alone": np.array([scores.get(name, np.nan) for name in names])}


def draw_recall(summary: Summary, folder: RunFolder) -> None:
    """Draw a run's recall by class, if its summary has it."""
    if summary.recall is None or summary.recall.by_client is None:
        return
    rows = summary.recall.by_class
    prefix = "LEAKING " if summary.selection.caution else ""
    if summary.attack is not None:
        prefix += "attacked "
    with _picture(folder.path / "recall.png") as picture:
        heatmaps.recall_heatmap(
            np.array(summary.recall.by_client, np.float64),
            [row.get("pooled", row["recall"]) for row in rows],
            [row["class"] for row in rows],
            _mark_attackers(summary.clients.names, list_attackers(summary)),
            f"{prefix}test recall by class",
            picture,
        )


def _list_targets(federation: Federation) -> list[Tensor]:
    """Every client's numbers to be predicted, [n_i] of all splits; of windows the first; [] of several targets."""
    y = federation.y
    if y[:1].numel() > 1 and not isinstance(federation.task, Forecasting):
        return []
    return [y[rows].reshape(len(rows), -1)[:, 0] for rows in list_owned(federation)]


def _mark_attackers(names: Sequence[str], attackers: Sequence[str]) -> list[str]:
    return [f"{name} (attacker)" if name in attackers else name for name in names]
