"""Privacy: how little uploads may depend on any single row or client, and the noise that it takes.

Noised steps are those of differentially private SGD (Abadi et al., 2016). Two tables are neighbours if one has a row
whose gradient counts as zero in the other; how many rows a client has is public.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

from ...errors import UsageError
from ..field_checks import LARGEST, Count, In, Positive, Settings

LEAST_NOISE, LARGEST_NOISE = 0.2, 1e4  # times the clip: what is always added, and in which nothing is learned
PRECISION = 1e-3  # relative, to which a noise multiplier is found
FINEST, SHARE = 1e-3, 1e-3  # interval of the accountant's losses: at most this, and this share of epsilon


@dataclass(frozen=True)
class Privacy(Settings):
    """A guarantee for every training row of a client, or for every client, by an (epsilon, delta).

    With `unit="row"` all that a client uploads is private in each of its rows, whatever the server sends, asks or
    already knows. Uploads are then made of noised steps alone: each row's gradient is clipped, and Gaussian noise is
    added to the sum. With `unit="client"` what is made of all clients' uploads is private in each client: their
    differences from what was sent are clipped and added up, and Gaussian noise is added to the sum in every round. How
    much noise is worked out for the whole run. With `masked` a server of sites sees sums of uploads alone, with an
    epsilon or without. Raises UsageError for what is no promise.

    >>> kinfed.Privacy(epsilon=2.0).clip
    1.0
    """

    # by which factor, e^epsilon, the odds of anything may change with a row or client; none: masks without noise
    epsilon: Positive | None = None
    delta: Annotated[float, In("(0, 1)")] = (
        1e-5  # the chance that this does not hold; below 1 / rows of any client, or 1 / clients
    )
    clip: Positive = 1.0  # the greatest norm of a row's gradient, or of a client's upload in a round
    unit: Literal["row", "client"] = "row"  # what is protected: each training row, or all that a client has
    masked: bool = False  # whether a server of sites sees sums of uploads only
    members: Annotated[int, In("[3, 4096]")] = 3  # with masks, the fewest sites in a sum that the server sees
    largest: Positive = 1e4  # with masks, the largest size of an uploaded number; with unit "client" it follows
    rows: Count = 1_000_000  # with masks, as how many training rows a site may count in a mean at most
    # of tables, what is public of each column: the least and the largest number, or its categories
    columns: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is None and (not self.masked or self.unit == "client"):
            raise UsageError(
                "privacy needs an epsilon, such as privacy.epsilon=2, unless it is privacy.masked=true alone"
            )
        for name, public in (self.columns or {}).items():
            if not (_are_bounds(public) or _are_categories(public)):
                raise UsageError(
                    f"privacy.columns.{name} must be the least and the largest number, such as [0, 100], or a list of "
                    f"categories; got {public!r:.80}"
                )

    @property
    def limit(self) -> float:
        """The epsilon, of a privacy that has one."""
        assert self.epsilon is not None
        return self.epsilon

    def check_count(self, clients: int) -> None:
        """Raise UsageError if delta is no promise for a client among so many."""
        if clients * self.delta >= 1:
            raise UsageError(
                f"privacy.delta must be below 1 / clients, as publishing all of a client at random would keep to it "
                f"otherwise; there are {clients:,}, so set it below {1 / clients:.2g}; got {self.delta:g}"
            )

    def check_size(self, client: str, rows: int) -> None:
        """Raise UsageError if delta is no promise for a client with so many rows."""
        if rows * self.delta >= 1:
            raise UsageError(
                f"privacy.delta must be below 1 / rows of every client, as publishing a row at random would keep to it "
                f"otherwise; client {client} has {rows:,} rows, so set it below {1 / rows:.2g}; got {self.delta:g}"
            )


def _are_bounds(public: Any) -> bool:
    """Whether these are the least and the largest number of a column."""
    if not isinstance(public, list | tuple) or len(public) != 2:
        return False
    is_number = all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in public)
    return is_number and -LARGEST < public[0] < public[1] < LARGEST


def _are_categories(public: Any) -> bool:
    """Whether these are the categories of a column."""
    return isinstance(public, list | tuple) and bool(public) and all(isinstance(name, str) for name in public)


class NoisedSteps(NamedTuple):
    """Noised steps of one kind, each with a batch of its own, of which every row is part with the same chance."""

    rate: float  # that chance
    noise: float  # the deviation of the noise over the clip
    steps: int


def count_epsilon(steps: Iterable[NoisedSteps], delta: float, interval: float = FINEST) -> float:
    """The epsilon of all these steps together, at a delta, by dp-accounting's privacy loss distributions.

    Losses are rounded up to multiples of an interval, so the result is never too low.
    """
    accounting, accountant = _import_accountant()
    ledger = accountant(value_discretization_interval=interval)
    for rate, noise, number in steps:
        if number:
            event = accounting.GaussianDpEvent(noise)
            event = event if rate >= 1 else accounting.PoissonSampledDpEvent(rate, event)
            ledger.compose(accounting.SelfComposedDpEvent(event, number))
    return float(ledger.get_epsilon(delta))


def choose_interval(epsilon: float) -> float:
    """An interval of the accountant's losses that is fine enough for budgets of this size."""
    return min(FINEST, SHARE * epsilon)


@cache
def noise_for(epsilon: float, delta: float, rate: float, count: int) -> float:
    """The least noise multiplier, to about a thousandth, at which so many steps cost no more than epsilon.

    Raises UsageError if it would be above `LARGEST_NOISE`.
    """
    from scipy.optimize import brentq

    interval = choose_interval(epsilon)

    @cache
    def excess(exponent: float) -> float:
        """The logarithm of the budgets that these steps cost."""
        spent = count_epsilon([NoisedSteps(rate, math.exp(exponent), count)], delta, interval)
        return math.log(max(spent, 1e-12) / epsilon)

    # The central limit of the losses: so many steps are as a single step with noise of about this deviation.
    start = math.log(max(0.3, rate * math.sqrt(2 * count * math.log(1.25 / delta)) / epsilon))
    low = high = start
    while high > math.log(LARGEST_NOISE) or excess(high) > 0:
        low, high = high, high + 0.4
        if high > math.log(LARGEST_NOISE):
            raise UsageError(
                f"privacy.epsilon is so small that noise above {LARGEST_NOISE:,.0f} times the clip would be needed, in "
                "which nothing is learned; plan fewer rounds or epochs, or a larger epsilon"
            )
    while excess(low) <= 0:
        low, high = low - 0.4, low
        if low < math.log(LEAST_NOISE):
            return LEAST_NOISE
    return math.exp(brentq(excess, low, high, xtol=PRECISION / 2) + PRECISION / 2)


@cache
def _import_accountant() -> tuple[Any, Any]:
    """dp-accounting, and its accountant."""
    try:
        import dp_accounting
        from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
    except ImportError:
        raise UsageError("privacy needs the package dp-accounting; install it: pip install 'kinfed[privacy]'") from None
    return dp_accounting, PLDAccountant
