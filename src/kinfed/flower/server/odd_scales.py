"""Sites whose numbers lie far from all others': the scale by which the others' become inputs is not theirs."""

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from ...data.tables.column_statistics import DateStatistics, NumberStatistics

FAR = 10.0  # typical deviations from the median of the others' means, or times their typical deviation


def odd(known: Mapping[str, NumberStatistics]) -> dict[str, str]:
    """Sites whose numbers of a column are far from the others', and what each claims; none if these are not a minority.

    Three sites at least must have numbers. A typical deviation of the others is the median of theirs from the median of
    their means, so that sites which differ among themselves make room for another one.
    """
    there = {site: one for site, one in known.items() if one.known}
    if len(there) < 3:
        return {}
    found = {}
    for site, one in there.items():
        others = [other for name, other in there.items() if name != site]
        middle = median(other.mean for other in others)
        typical = median(float(np.hypot(other.deviation, other.mean - middle)) for other in others)
        if typical > 0 and max(one.deviation, abs(one.mean - middle)) > FAR * typical:
            found[site] = (
                f"mean {one.mean:.4g} and deviation {one.deviation:.4g}, where others have {middle:.4g} and "
                f"{typical:.4g}"
            )
    return found if 2 * len(found) < len(there) else {}


def without(known: Any) -> Any:
    """The statistics of a column as if its numbers were not known."""
    if isinstance(known, DateStatistics):
        return DateStatistics(without(known.years), known.clock)
    return NumberStatistics(0, known.missing, 0.0, 0.0, (), {})


def numbers_of(known: Any) -> NumberStatistics | None:
    """The statistics of numbers, or of dates' years; None of text."""
    if isinstance(known, DateStatistics):
        return known.years
    return known if isinstance(known, NumberStatistics) else None
