"""Late: clients that join a running federation, and how soon their scores match those of the others."""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from kinfed.core.engine import latecomers
from kinfed.core.seeding import tags
from kinfed.errors import RunError, UsageError
from kinfed.plots.drawing import Array, scale_metric, with_unit
from kinfed.runs.run_folder import RunFolder
from kinfed.search.study import Finding, Row, Study, score, scores_by_round, setting

from ..plots.joining import LINES, early_and_late


def late(
    study: Study,
    methods: Sequence[str] = ("local", "fedavg", "per-fedavg", "fedamp", "pfedgat", "fedaghn"),
    share: float = 0.2,
    joins: int | None = None,
) -> Finding:
    """Test scores of a `share` of clients that join after `joins` rounds, and of the others.

    This is pFedGAT's Figure 4. By default they join after half of the rounds. Until then the server does not know
    them, and they are scored with the model they would be sent. They have caught up in the first round in which their
    mean is no worse than that of the others; or, as their data may be harder, than their own in a second run of each
    method, in which they take part from the start.
    """
    rounds = study.experiment().rounds.count
    joins = rounds // 2 if joins is None else joins
    if not 0 < joins < rounds:
        raise UsageError(f"analysis.joins must lie between 0 and the {rounds} rounds; got {joins}")
    requested = {name: [setting("method.name", name)] for name in methods}
    missed = {name: [*overrides, hold_back(study, share, joins)] for name, overrides in requested.items()}
    from_the_start = {f"{name}-from-the-start": overrides for name, overrides in requested.items()}
    notes = list[str]()
    folders = study.runs(missed | from_the_start, failed=notes)
    if not any(name in folders and f"{name}-from-the-start" in folders for name in methods):
        raise RunError(f"no method has both of its runs: {notes[0]}")
    rows: list[Row] = []
    panels: dict[str, dict[str, Array]] = {}
    for name in methods:
        if name not in folders or f"{name}-from-the-start" not in folders:
            continue
        result = score(folders[name])
        at, tests = scores_by_round(folders[name], result.model)  # [T], [S, T, N]
        _, control = scores_by_round(folders[f"{name}-from-the-start"], result.model)
        if not (at <= joins).any():
            raise UsageError(
                f"no round is evaluated before the late clients join after round {joins}; lower evaluate_every"
            )
        absent = held_back(folders[name], share)
        lines = [average_clients(tests, ~absent), average_clients(tests, absent), average_clients(control, absent)]
        panels[name] = dict(zip(LINES, lines, strict=True))
        rows.append(
            {"method": name, "model": result.model, **_row(at, lines, joins, result.metric, result.higher_is_better)}
        )
    picture = study.out / "late.png"
    early_and_late(at, panels, joins, f"test {result.metric}", picture)
    return Finding(
        f"test {with_unit(result.metric)} of clients that join after round {joins}, and of the others",
        rows,
        [picture],
        notes,
    )


def hold_back(study: Study, share: float, joins: int) -> str:
    """The override by which a share of clients joins after so many rounds."""
    participation = replace(study.experiment().participation, late=share, joins=joins)
    settings = ", ".join(setting(key, value) for key, value in asdict(participation).items())
    return f"participation={{{settings}}}"


def held_back(folder: RunFolder, share: float) -> Array:
    """[S, N] bool: which clients of a finished run were held back, for each of its seeds."""
    masks = []
    for summary in (run.read_summary() for run in folder.repeats()):
        absent = np.zeros(summary.data.clients, dtype=bool)
        absent[latecomers(summary.seeds[0], tags(summary.clients.names), share).numpy()] = True
        masks.append(absent)
    return np.stack(masks)


def average_clients(scores: Array, chosen: Array) -> Array:
    """[S, T] means of scores: [S, T, N] over the clients chosen: [S, N]."""
    return np.stack([np.nanmean(values[:, clients], 1) for values, clients in zip(scores, chosen, strict=True)])


def _row(at: Array, lines: Sequence[Array], joins: int, metric: str, higher_is_better: bool) -> Row:
    """The table's row for the lines of early clients, late clients and those from the start, [S, T] each."""
    early, late, control = (scale_metric(line.mean(0), metric) for line in lines)
    before, after = np.flatnonzero(at <= joins)[-1], np.flatnonzero(at > joins)
    last = scale_metric(lines[1][:, -1], metric)

    def rounds_to(level: Array) -> int | None:
        there = (late >= level if higher_is_better else late <= level)[after]
        return int(at[after][there.argmax()]) - joins if there.any() else None

    return {
        f"early, round {at[before]}": float(early[before]),
        f"late, round {at[before]}": float(late[before]),
        f"late, round {at[after[0]]}": float(late[after[0]]),
        f"late, round {at[-1]}": float(late[-1]),
        "over seeds": float(last.std(ddof=1)) if len(last) > 1 else None,
        f"early, round {at[-1]}": float(early[-1]),
        "late, from the start": float(control[-1]),
        "rounds to the others": rounds_to(early),
        "rounds to from the start": rounds_to(control),
    }
