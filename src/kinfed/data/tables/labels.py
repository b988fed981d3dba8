"""Labels in a column of a table."""

from collections.abc import Container

import numpy as np

from ...errors import Fault, UsageError
from .cells import MISSING, looks_like_number
from .column import FEW, Column
from .words import Words, merge_names

GAPLESS = 5  # values from which labels are whole numbers without a gap


def read_labels(column: Column) -> Words | None:
    """The labels in a column, "" where there is none; None if it holds numbers that are not labels.

    Raises UsageError if most of the column are such numbers, or all except words for a missing value.
    """
    import polars

    if _are_no_labels(column):
        return None
    texts = column.words()
    texts = merge_names(["" if label.lower() == "nan" else label for label in texts.names], texts.codes)  # no number
    if column.name in column.formats.text:
        return texts
    labels = polars.Series([label for label in texts.names if label], dtype=polars.String)
    numbers = column.formats.parse_numbers(labels)
    values = np.unique(numbers[np.isfinite(numbers)])
    odd = {*labels.filter(~np.isfinite(numbers)).to_list()}  # words, and those for a missing value
    like = odd and {*labels.filter(looks_like_number(labels)).to_list()} & odd
    if 2 * (len(values) + len(like)) > len(labels) and like:
        row = _find_first(texts, like)
        what = column.describe_odd(np.array([row]), infinite=True)
        raise UsageError(f"{what}, or set labels to true if these are classes", Fault.NUMBER)
    if not len(values):
        return texts
    few = len(values) <= FEW and (values == values.round()).all()
    # Codes of classes leave no gaps, as scores such as 0, 2, 4 ... do.
    few = few and (len(values) < GAPLESS or np.ptp(values) == len(values) - 1)
    missing = all(label.lower() in MISSING for label in odd)
    if not odd or (missing and not few):
        return texts if few else None
    if missing or (not few and np.isin(texts.names, [*odd])[texts.codes].mean() < 0.5):
        at = _find_first(texts, odd)
        raise UsageError(
            f"{column.place(at)}: '{texts.names[texts.codes[at]]}' is not a number, as most of this "
            "column are; leave it empty if it is missing",
            Fault.NUMBER,
        )
    return texts


def _find_first(texts: Words, names: Container[str]) -> int:
    return int(np.array([name in names for name in texts.names])[texts.codes].argmax())


def _are_no_labels(column: Column) -> bool:
    """Whether all cells are numbers, and these too many or too broken for labels; known without a look at each."""
    present = column.as_numbers[~np.isnan(column.as_numbers)]
    if not len(present) or np.isinf(present).any():
        return False
    return bool((present != present.round()).any() or len(np.unique(present)) > FEW)
