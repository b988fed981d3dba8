"""Fixed point: numbers as integers modulo 2^64, in which masks cancel exactly."""

import math

import numpy as np
from numpy.typing import NDArray

from kinfed.errors import UsageError

Whole = NDArray[np.uint64]
MOST = 1000  # bits of a fraction: a power of two that a double can hold
SIGNED = 62  # bits for the sum, so that half of the range stays free


class FixedPoint:
    """How numbers of at most `largest` in size become integers, of which so many members' sum does not wrap around."""

    def __init__(self, largest: float, members: int) -> None:
        """Raises UsageError for numbers so large that no bit is left for their fractions."""
        self.largest, self.members = largest, members
        self.bits = SIGNED - math.ceil(math.log2(members * largest))  # of the fraction; negative steps are refused
        if self.bits > MOST:
            raise UsageError(f"numbers of at most {largest:.3g} in size are too small for a masked sum; scale them up")
        if self.bits < 1:
            raise UsageError(
                f"privacy.largest is {largest:g}, which leaves no digits for the sum of {members:,} clients; lower it"
            )

    def encode(self, values: NDArray[np.float64]) -> Whole:
        """[m] the nearest integers; raises UsageError for NaN, infinity and numbers above the bound."""
        most = max(float(values.max(initial=0)), -float(values.min(initial=0)))  # NaN if there is one
        if not math.isfinite(most):
            raise UsageError("its upload holds NaN or infinity, which no masked sum can hold; lower the learning rate")
        if most > self.largest:
            raise UsageError(
                f"its upload holds a number of size {most:.3g}, above the bound of the plan, {self.largest:g}"
            )
        scaled = values * 2.0**self.bits
        return np.rint(scaled, out=scaled).astype(np.int64).view(np.uint64)

    def decode(self, total: Whole) -> NDArray[np.float64]:
        """[m] the numbers whose sum this is; raises UsageError for one that no members' sum can be."""
        values: NDArray[np.float64] = total.view(np.int64) / 2.0**self.bits
        if float(np.abs(values).max(initial=0)) > self.members * self.largest * (1 + 1e-9):
            raise UsageError("masks did not cancel: a site has sent what is no masked upload of this round")
        return values
