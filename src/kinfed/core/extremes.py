"""Extremes: few clients whose errors are so large that they alone decide a mean over all."""

import statistics
from collections.abc import Sequence

TIMES, FEW = 10, 20  # an extreme error is so many times the median; one client in so many, or one, may have such


def name_extremes(errors: Sequence[float], names: Sequence[str], metric: str) -> str:
    """A sentence that names the clients whose errors make up more than half of the mean over all, and the mean without.

    Errors are by client, NaN where one has none. Empty if there are no such clients, or more than a few.
    """
    known = sorted(((error, name) for error, name in zip(errors, names, strict=True) if error >= 0), reverse=True)
    if len(known) < 3:
        return ""
    each = [error for error, _ in known]
    count = sum(error > TIMES * statistics.median(each) for error in each)
    if not 0 < count <= max(1, len(each) // FEW) or sum(each[:count]) <= sum(each) / 2:
        return ""
    shown = ", ".join(f"{name} ({_number(error)})" for error, name in known[: min(count, 5)])
    more = f" and {count - 5} more" * (count > 5)
    whose = "client" if count == 1 else f"{count} clients:"
    mean, rest = _number(statistics.fmean(each)), _number(statistics.fmean(each[count:]))
    return f"the mean {metric} of {mean} comes from {whose} {shown}{more}; that of the others is {rest}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"
