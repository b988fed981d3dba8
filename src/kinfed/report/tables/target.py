"""What runs take until the mean test score over clients is as good as a target."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from ...errors import UsageError
from ...runs.round_tables import read_cost
from ...verdict.statistics import first_reaching
from .compare import Comparison
from .run_rows import Row
from .run_statistics import names_of
from .text_table import Grid, quantity

TAKEN = ("round", "bytes_down", "bytes_up", "examples", "seconds")  # until a target was reached


def tabulate_target(comparison: Comparison, target: float) -> list[Grid]:
    """A table for each set of comparable runs; raises UsageError for a target that no score can have."""
    grids = []
    for letter, rows in zip(comparison.letters, comparison.sets, strict=True):
        if not math.isfinite(target) or (rows[0].metric.is_share and not 0 <= target <= 1):
            meant = f"; write {target / 100:g}" if 1 < target <= 100 else ""
            raise UsageError(f"--target {target:g}: {rows[0].metric.name} is a share, between 0 and 1{meant}")
        grids.append(_grid(rows, target).of_set(letter))
    return grids


def _grid(rows: tuple[Row, ...], target: float) -> Grid:
    lines, records = [], list[dict[str, Any]]()
    for name, row in zip(names_of(rows), rows, strict=True):
        crossings = [crossing for seed in row.seeds if (crossing := _first(row, seed, target)) is not None]
        values = {key: _mean([crossing[i] for crossing in crossings]) for i, key in enumerate(TAKEN)}
        lines.append([name, f"{len(crossings)} of {len(row.seeds)}", *_cells(values)])
        records.append({"method": name, "target": target, "reached": len(crossings)} | values)
        records[-1]["seeds"] = len(row.seeds)
    sign = ">=" if rows[0].metric.higher_is_better else "<="
    shown = f"{100 * target:g} %" if rows[0].metric.is_share else f"{target:g}"
    notes = ["the first evaluated round whose mean test score over clients reaches it; means over the seeds that do"]
    notes.append(
        "bytes: of all clients until then; examples: in the local training that training.epochs or .steps ask for"
    )
    if any(record["reached"] and record["bytes_up"] is None for record in records):
        notes.append("bytes, examples and seconds are empty where a run has no cost.csv: run it again to have them")
    headings = ("method", "seeds", "round", "bytes\ndown", "bytes\nup", "examples", "seconds")
    title = f"Until test {rows[0].metric.name} {sign} {shown}"
    return Grid("target", title, headings, [lines], notes, records)


def _first(row: Row, seed: int, target: float) -> Sequence[float | None] | None:
    """What the run with a seed had `TAKEN` in the first evaluated round that reaches the target; None if none does."""
    folder = row.by_seed[seed].folder
    rounds, scores = folder.read_scores(row.model, row.metric.name)
    at = first_reaching(np.nanmean(scores, 1), target, row.metric.higher_is_better)
    if at is None:
        return None
    spent = read_cost(folder.cost).get(int(rounds[at]))
    return spent or [int(rounds[at]), None, None, None, None]  # of a run that has not written it


def _mean(values: list[Any]) -> float | None:
    return fmean(values) if values and None not in values else None


def _cells(values: dict[str, float | None]) -> list[str]:
    cells = []
    for key, value in values.items():
        if value is None:
            cells.append("")
        elif key in ("round", "seconds"):
            cells.append(f"{value:.1f}".removesuffix(".0"))
        else:
            cells.append(quantity(value, "B" if key.startswith("bytes") else ""))
    return cells
