"""Sites whose numbers lie far from all others': the scale by which the others' become inputs is not theirs."""

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from kinfed.data.tables.column_statistics import DateStatistics, NumberStatistics

FAR = 10.0  # typical deviations from the median of the others' means, or times their typical deviation


def find_odd_sites(by_site: Mapping[str, NumberStatistics]) -> dict[str, str]:
    """Sites whose numbers of a column are far from the others', and what each claims; none if these are not a minority.

    Three sites at least must have numbers. A typical deviation of the others is the median of theirs from the median of
    their means, so that sites which differ among themselves make room for another one.
    """
    there = {site: numbers for site, numbers in by_site.items() if numbers.present}
    if len(there) < 3:
        return {}
    claims = {}
    for site, numbers in there.items():
        others = [other for name, other in there.items() if name != site]
        middle = median(other.mean for other in others)
        typical = median(float(np.hypot(other.deviation, other.mean - middle)) for other in others)
        if typical > 0 and max(numbers.deviation, abs(numbers.mean - middle)) > FAR * typical:
            claims[site] = (
                f"mean {numbers.mean:.4g} and deviation {numbers.deviation:.4g}, where others have {middle:.4g} and "
                f"{typical:.4g}"
            )
    return claims if 2 * len(claims) < len(there) else {}


def forget_numbers(column: Any) -> Any:
    """The statistics of a column as if its numbers were not known."""
    if isinstance(column, DateStatistics):
        return DateStatistics(forget_numbers(column.years), column.clock)
    return NumberStatistics(0, column.missing, 0.0, 0.0, (), {})


def numbers_of(column: Any) -> NumberStatistics | None:
    """The statistics of numbers, or of dates' years; None of text."""
    if isinstance(column, DateStatistics):
        return column.years
    return column if isinstance(column, NumberStatistics) else None
