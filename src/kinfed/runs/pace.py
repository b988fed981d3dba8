"""Pace: what a run's rounds take, as its first ones are measured, and what would make a long run shorter."""

import time
import warnings
from typing import Any

from torch import Tensor

from ..core.engine import Rounds
from ..core.fleet import Fleet
from ..core.method import Method
from ..core.trees import Tree
from .footprint import find_cheaper

FIRST, LONG = 60.0, 2 * 3600.0  # seconds that are measured first, and of a run that is long


class Pace:
    """A fleet that measures how long it trains and scores; the rest of a round is the server's."""

    def __init__(self, fleet: Fleet, method: Method, rounds: Rounds, done: int) -> None:
        """`done` rounds of the run were trained before."""
        self.names = fleet.names
        self._fleet, self._method, self._rounds, self._first = fleet, method, rounds, done
        self._took = {"train": 0.0, "evaluate": 0.0}
        self._begun = time.perf_counter()
        self._warned = False

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Local training, as of the fleet."""
        return self._measure("train", round, cohort, sent)

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Any:
        """Scores, as of the fleet."""
        return self._measure("evaluate", round, cohort, sent)

    def check(self, done: int) -> None:
        """Warn once, by the mean of the rounds so far, of a run that will take hours."""
        spent, left = time.perf_counter() - self._begun, self._rounds.last - done
        ahead = spent / (done - self._first) * left
        if self._warned or spent < FIRST or ahead < LONG:
            return
        self._warned = True
        took = {**self._took, "serve": spent - sum(self._took.values())}
        what, instead = {
            "train": ("local training", "have fewer clients take part, such as participation=0.1, or fewer rounds"),
            "evaluate": ("scoring all clients", "set evaluate_every=10 or higher"),
            "serve": ("the server", find_cheaper(self._method)),
        }[max(took, key=took.__getitem__)]
        warnings.warn(
            f"{done} of {self._rounds.last} rounds took {spent / 60:.0f} minutes, so the others will take about "
            f"{ahead / 3600:.0f} hours; most goes into {what}: {instead}",
            stacklevel=2,
        )

    def _measure(self, name: str, *what: Any) -> Any:
        begun = time.perf_counter()
        try:
            return getattr(self._fleet, name)(*what)
        finally:
            self._took[name] += time.perf_counter() - begun
