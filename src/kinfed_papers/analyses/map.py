"""Map: how the score depends on one setting of an experiment, or on two at once."""

import math
import re
from collections.abc import Sequence

import numpy as np

from kinfed.errors import UsageError
from kinfed.search.study import Finding, Row, Study, score, setting

from ..plots.scores import score_by_setting, score_grid

Value = str | int | float | bool


def map(study: Study, x: str, xs: Sequence[Value], y: str = "", ys: Sequence[Value] = ()) -> Finding:
    """Test score for each of the values `xs` of setting `x`, such as method.clusters; and `ys` of a second one, `y`.

    The best setting has the best validation score; of equal ones the first. The picture is a heat map, or without `y`
    a line over `xs`.
    """
    if bool(y) != bool(ys):
        raise UsageError("analysis.y names a second setting and analysis.ys lists its values: give both or neither")
    points: list[Row] = [{x: a, y: b} if y else {x: a} for a in xs for b in ys or [""]]
    requested = {_folder(point): [setting(key, value) for key, value in point.items()] for point in points}
    if x == y or len(requested) < len(points):
        raise UsageError("a map is over different settings, each with different values; leave out what is repeated")
    failed = list[str]()
    folders = study.runs(requested, failed=failed)
    scores = [score(folders[name]) if name in folders else None for name in requested]
    first = next(result for result in scores if result is not None)
    metric = f"test {first.metric}"
    best = None
    notes = ["no validation data, so no value is chosen", *failed]
    if first.validation is not None:
        validation = np.array([math.nan if result is None else result.validation for result in scores], np.float64)
        best = int(np.nanargmax(validation) if first.selects_highest else np.nanargmin(validation))
        notes[0] = f"best on validation data: {', '.join(f'{key}={value}' for key, value in points[best].items())}"
    tests = [np.full_like(first.test, math.nan) if result is None else result.test for result in scores]
    picture = study.out / "map.png"
    names, others = [str(value) for value in xs], [str(value) for value in ys]
    if y:
        grid = np.array([values.mean() for values in tests]).reshape(len(xs), len(ys))
        chosen = None if best is None else divmod(best, len(ys))
        score_grid(grid, (x, names), (y, others), metric, picture, chosen)
    else:
        score_by_setting(names, np.stack(tests), x, metric, picture, best)
    empty: Row = dict.fromkeys(first.row())
    rows = [point | (empty if result is None else result.row()) for point, result in zip(points, scores, strict=True)]
    return Finding(f"{metric} by {x}{f' and {y}' if y else ''}", rows, [picture], notes)


def _folder(point: Row) -> str:
    """A name for the run's folder, without characters that a file system may not allow."""
    return ",".join(re.sub(r"[^\w.+=-]", "-", f"{key}={value}") for key, value in point.items())
