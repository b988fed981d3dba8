"""Claims: what the papers say of their tables, in `claims.toml`, where figures can test it."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PROOF = "a proof"  # what a statement rests on, where no data are needed


@dataclass(frozen=True)
class Claim:
    """One statement on one table; `claims.toml` says what its fields mean."""

    table: str
    says: str
    where: str  # in the paper
    method: str  # as printed, like all names here
    against: Sequence[str] = ()
    except_for: Sequence[str] = ()
    datasets: Sequence[str] = ()
    settings: Sequence[str] = ()
    but: Sequence[Sequence[str]] = ()
    metrics: Sequence[str] = ()
    by: float = 0.0
    worst: bool = False
    than: str = ""
    falling: Sequence[str] = ()
    least: float | None = None
    level: float = 0.0
    tuned: bool = False
    given: str = ""
    lacks: str = ""

    def is_about(self, dataset: str, setting: str, metric: str) -> bool:
        """Whether it speaks of this metric of this column."""
        picked = ((self.datasets, dataset), (self.settings, setting), (self.metrics, metric))
        return all(not some or name in some for some, name in picked) and [dataset, setting] not in self.but


@dataclass(frozen=True)
class Answered:
    """A statement on a figure or in text, and what a page says to it."""

    paper: str
    says: str
    where: str  # in the paper
    answer_there: str  # yes or no, of what was measured or proved; "open" if neither
    on: str  # which data, or a proof
    shows: str  # with the page's numbers
    page: str = ""  # in docs
    why: str = ""  # it cannot be told

    @property
    def answer(self) -> str:
        """Yes, no or cannot tell: data that the paper does not use decide nothing."""
        if self.on == PROOF:
            return self.answer_there
        if not self.why and self.on in read_claims_file()["data"][self.paper]:
            return f"{self.answer_there} at this scale, on {self.on}"
        why = self.why or f"measured on {self.on} alone, which the paper does not use: {self.answer_there} there"
        return f"cannot tell ({why})"


@cache
def read_claims_file() -> dict[str, Any]:
    """What `claims.toml` holds."""
    return tomllib.loads((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))


@cache
def claims() -> tuple[Claim, ...]:
    """All claims on tables, in the order of the papers' tables."""
    return tuple(Claim(**values) for values in read_claims_file()["claims"])


@cache
def answered_claims() -> tuple[Answered, ...]:
    """All claims that pages answer, paper by paper."""
    return tuple(Answered(**values) for values in read_claims_file().get("answered", []))


def deviation(table: str, metric: str) -> tuple[float, bool]:
    """The largest standard deviation over seeds of a cell of a paper's tables, and whether it is a share of the mean.

    NaN where no run has been repeated.
    """
    deviations = read_claims_file()["deviations"].get(table.partition(".")[0], {})
    return float(deviations.get(metric, math.nan)), not metric.endswith("_pct") or metric == "MAPE_pct"


def classes(dataset: str) -> int:
    """How many classes a data set has, by its printed name; 0 if that is not said."""
    names = [name for name in read_claims_file()["classes"] if dataset.startswith(name)]
    return int(read_claims_file()["classes"][max(names, key=len)]) if names else 0
