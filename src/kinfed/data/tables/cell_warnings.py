"""Warnings of cells of a table: codes read as numbers, one cell that decides a scale, a target among the inputs."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import list_names
from .frame import Frame
from .schema import Raw
from .words import Numbers

ABSURD = 10.0  # times that a cell widens the deviation of all others from which it is doubted
RARE = 0.01  # the largest share of rows that may hold such a cell
CODE = r"^\s*0\d+\s*$"  # text that is a number, and as a number would lose its zeros
ZIP = re.compile(r"(?i)(^|[^a-z])(zip|zip ?code|postal|postal ?code|post ?code|plz)([^a-z]|$)")  # of a column's name
EQUAL = 1e-9  # of a target's deviation, what may be left of it where it is an input again
FEWEST = 10  # rows from which equal columns are no chance
FAR = 100.0  # times that numbers of a client are as large as those of most from which they are warned of
GAP = 10.0  # times that they are as large as those of all others, or as small


def warn(frame: Frame, raw: Mapping[str, Raw], targets: Mapping[str, Numbers], labelled: bool) -> None:
    """Warn, in one line each, of odd columns of inputs, and of targets, each [n], NaN where missing.

    `labelled`: targets are the places of classes.
    """
    numbers = {name: column.values for name, column in raw.items() if not column.texts}
    scaled = numbers | ({} if labelled else dict(targets))
    for name, values in scaled.items():
        for warning in (*_codes(frame, name, values), *_absurd(frame, name, values)):
            warnings.warn(warning, stacklevel=5)
    for name, column in raw.items():
        for target, y in targets.items():
            at = find_copy(column, y, labelled)
            if at is not None:
                warnings.warn(
                    f"{frame[name].quote(at)} tells that '{target}' is "
                    f"'{frame[target].cell(at)}', as in all rows; if it is not known before, leave it out with ignore",
                    stacklevel=4,
                )


def find_copy(column: Raw, y: Numbers, labelled: bool) -> int | None:
    """A row at which a column says what the targets: [n] are, if it does in all rows, else None; see `warn`."""
    return _same_class(column.values, y) if labelled else _same_number(column, y)


def describe_odd_units(column: str, clients: Sequence[str], means: Numbers, deviations: Numbers) -> str:
    """What to say of clients whose numbers are `FAR` times as large as at most, or as small; "" if there are none.

    The largest client of a heavy tail is none, because numbers in another unit lie `GAP` times beyond all others.
    `means`, `deviations`: [N] are 0 for clients without numbers. Where means have both signs, one number alone says
    nothing about its unit, because it may be near 0 by chance.
    """
    sizes = np.hypot(means, deviations)  # [N] root mean squares
    if means.min(initial=0) < 0 < means.max(initial=0):
        sizes = np.where(deviations > 0, sizes, 0)
    positive = np.sort(sizes[sizes > 0])
    if len(positive) < 2:
        return ""
    times = sizes / (positive[0] if len(positive) == 2 else np.median(positive))
    near = times[(times > 1 / FAR) & (times < FAR)]
    large = times >= max(FAR, GAP * near.max())
    small = (times > 0) & (times <= min(1 / FAR, near.min() / GAP))
    far = np.flatnonzero(large | small).tolist()
    if not len(far) or 2 * len(far) > len(positive):
        return ""
    called = [f"{clients[i]} ({f'{times[i]:,.4g}' if times[i] < 1 else f'{times[i]:,.0f}'} times)" for i in far]
    return f"`{column}` may be in another unit than at most clients: {list_names(called)}; write all in one"


def _codes(frame: Frame, name: str, values: Numbers) -> Iterator[str]:
    """Numbers that are codes: written with leading zeros, or of a column that is named as zip codes are."""
    fix = "; numbers say that codes nearby are alike: leave it out with ignore, or put a letter before each"
    if frame[name].is_text:
        zeros = frame[name].values.str.contains(CODE).fill_null(False).to_numpy()
        if zeros.any():
            at = int(zeros.argmax())
            yield f"{frame[name].quote(at)} is read as the number {values[at]:g}{fix}"
            return
    if ZIP.search(name.replace("_", " ")) and (filled := ~np.isnan(values)).any():
        at = int(filled.argmax())
        yield f"{frame[name].quote(at)} is read as a number, though codes are names{fix}"


def _absurd(frame: Frame, name: str, values: Numbers) -> Iterator[str]:
    """A value, in one row or few, without which the deviation of all would be a tenth, or less."""
    present = values[~np.isnan(values)]
    if len(present) < FEWEST:
        return
    worst = present[np.abs(present - np.median(present)).argmax()]
    rest = present[present != worst]
    if (
        not len(rest)
        or len(present) - len(rest) > max(1.0, RARE * len(present))
        or present.std() <= ABSURD * rest.std()
    ):
        return
    if rest.std() > 0:  # else it is a rare flag
        at, more = int((values == worst).argmax()), len(present) - len(rest) - 1
        also = f" (and in {more:,} more rows)" if more else ""
        yield (
            f"{frame[name].quote(at)}{also} makes the deviation of all {present.std():.4g}, "
            f"without it {rest.std():.4g}; correct it, or leave it empty if it is missing"
        )


def _same_class(values: Numbers, y: Numbers) -> int | None:
    """The first row with a value if each value has one class, and each class one value."""
    filled = np.flatnonzero(~np.isnan(values) & ~np.isnan(y))
    for rows in (filled[:1000], filled):  # a thousand rows show of most columns that they are something else
        pairs = np.unique(np.stack([values[rows], y[rows]]), axis=1)
        if len(filled) < FEWEST or any(len(np.unique(row)) < pairs.shape[1] for row in pairs):
            return None
    return int(filled[0]) if pairs.shape[1] > 1 else None


def _same_number(column: Raw, y: Numbers) -> int | None:
    """The first row with a value if the target is that number, in another unit perhaps."""
    filled: NDArray[np.bool_] = ~np.isnan(column.values) & ~np.isnan(y)
    if column.texts or filled.sum() < FEWEST:
        return None
    x, y = column.values[filled], y[filled]
    x, y = x - x.mean(), y - y.mean()
    if not x.any() or not y.any():
        return None
    rest = y - x * ((x @ y) / (x @ x))
    return int(filled.argmax()) if np.abs(rest).max() <= EQUAL * y.std() * len(y) ** 0.5 else None
