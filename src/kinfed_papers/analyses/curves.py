"""Curves: how fast several methods learn the same experiment, and how far they get."""

from collections.abc import Sequence

import numpy as np

from kinfed.plots.charts import accuracy_by_round
from kinfed.plots.drawing import Array, scale_metric
from kinfed.search.study import Finding, Row, Study, score, scores_by_round, setting


def curves(
    study: Study, methods: Sequence[str] = ("local", "fedavg", "fedamp", "fedaghn"), target: float | None = None
) -> Finding:
    """Mean test score by round of each of `methods`: its best, its last, and the round in which it comes near its best.

    A curve is the mean over clients and seeds, of the model that validation prefers. Near is nine tenths of the best;
    for an error, the best divided by nine tenths. `target` asks for the first round at a score of your own, given as
    in files: 0.9 for an accuracy of 90 %.
    """
    notes = list[str]()
    folders = study.runs({name: [setting("method.name", name)] for name in methods}, failed=notes)
    curve_of: dict[str, Array] = {}
    rows: list[Row] = []
    for name, folder in folders.items():
        result = score(folder)
        rounds, tests = scores_by_round(folder, result.model)
        curve_of[name] = np.nanmean(tests, 2).T  # [T, S]
        mean = curve_of[name].mean(1)
        best = float(mean.max() if result.higher_is_better else mean.min())
        row: Row = {"method": name, **result.row(), "best": float(scale_metric(best, result.metric))}
        row["last"] = float(scale_metric(mean[-1], result.metric))
        near = best * 0.9 if result.higher_is_better else best / 0.9
        row["near best in round"] = _find_round(rounds, mean, near, result.higher_is_better)
        if target is not None:
            row["at target in round"] = _find_round(rounds, mean, target, result.higher_is_better)
        rows.append(row)
    picture = study.out / "curves.png"
    accuracy_by_round(rounds, curve_of, f"test {result.metric}", picture, over="seeds", target=target)
    return Finding("test scores by round", rows, [picture], notes)


def _find_round(rounds: Array, mean: Array, level: float, higher_is_better: bool) -> int | None:
    """The first evaluated round at which mean: [T] reaches the level."""
    there = mean >= level if higher_is_better else mean <= level
    return int(rounds[there.argmax()]) if there.any() else None
