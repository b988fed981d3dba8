"""Scoring: which model of which round is a client's score, read from a run's history once it has ended.

One run so answers under several protocols. Points are pairs of an evaluated round and a kind of model. Where points
are level the first counts: the earlier round, and within a round the kind that is named first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kinfed.errors import UsageError, nearest
from kinfed.runs.run_folder import Array, RunFolder

ROUNDS = {
    "mean": "at the round with the best mean validation score",
    "own": "each client at its own best point by its own validation score",
    "last": "after the last round",
    "test": "each client at its own best point by its test score",
}
SOURCES = {
    "printed": "as printed",
    "code": "as in the public code",
    "ours": "kinfed's choice, as the paper does not say",
}
BY_TEST = "best by test"  # the flag of a score that reads test examples


@dataclass(frozen=True)
class Scoring:
    """Which `models`, by the names that a method gives them (none: all), at which `round`; and why.

    `source` says where that comes from, `why` what exactly. Raises UsageError for a word that is not known.
    """

    models: tuple[str, ...] = ()
    round: str = "mean"
    source: str = "ours"
    why: str = ""

    def __post_init__(self) -> None:
        for what, word, choices in (("round", self.round, ROUNDS), ("source", self.source, SOURCES)):
            if word not in choices:
                raise UsageError(f"a protocol's {what} must be one of {', '.join(choices)}; {nearest(word, choices)}")

    @property
    def reads_test(self) -> bool:
        """Whether test examples choose the model, so that no verdict may rest on the score."""
        return self.round == "test"

    @property
    def is_simple(self) -> bool:
        """Whether it is one kind of model, at the same round for all clients."""
        return len(self.models) < 2 and self.round in ("mean", "last")

    def read(self, folder: RunFolder, score: str) -> Array:
        """[N] a test score of each client of a finished run; NaN of attackers.

        Raises UsageError for a kind of model that the run has not, without scores by round, and if a client has no
        validation score by which its own round could be chosen.
        """
        summary = folder.read_summary()
        models = self.models or ((summary.selection.chosen,) if self.is_simple else tuple(summary.scores))
        for model in models:
            if model not in summary.scores:
                raise UsageError(f"{folder} has no model '{model}'; it has {', '.join(summary.scores)}")
        tests = [folder.read_scores(model, score)[1] for model in models]  # [T, N] each
        if len({scores.shape for scores in tests}) > 1:
            raise folder.not_whole()
        if self.is_simple and self.round == "mean":
            rounds = folder.read_scores(models[0], score)[0]
            at = int(summary.scores[models[0]]["round"])
            if at not in rounds:
                raise folder.not_whole()
            return tests[0][rounds == at][0]
        test = np.stack(tests, axis=1)  # [T, M, N]
        points = test.reshape(-1, test.shape[2])  # [T x M, N], in the order in which ties are settled
        if self.round == "test":
            return _own(points, points, self._sign(summary.metric.higher_is_better), folder, summary.clients.names)
        chosen_by = summary.selection.by
        validations = [folder.read_scores(model, chosen_by, "validation", missing=True)[1] for model in models]
        if not all(scores.shape == test[:, 0].shape for scores in validations):  # without validation examples
            if self.round == "own":
                raise UsageError(f"{folder}: no client has validation examples, so none has a best round of its own")
            return test[-1, 0]
        validation = np.stack(validations, axis=1).reshape(points.shape)
        sign = self._sign(summary.selection.higher_is_better)
        if self.round == "own":
            return _own(validation, points, sign, folder, summary.clients.names)
        first = len(points) - len(models) if self.round == "last" else 0
        with np.errstate(all="ignore"):
            counted = np.isfinite(validation)
            means = np.where(counted, validation, 0.0).sum(1) / counted.sum(1)  # NaN where no client has a score
        means[:first] = np.nan
        at = first if np.isnan(means).all() else int(np.nanargmax(sign * means))
        return points[at]

    def describe(self) -> str:
        """At which round, and why there."""
        return f"{ROUNDS[self.round]} ({SOURCES[self.source]}{f': {self.why}' if self.why else ''})"

    @staticmethod
    def _sign(higher_is_better: bool) -> int:
        return 1 if higher_is_better else -1


def kind_names(models: tuple[str, ...]) -> str:
    """Kinds of models in words."""
    return f"the better of {' and '.join(models)}" if len(models) > 1 else "".join(models) or "the preferred model"


def scoring(values: Mapping[str, Any], shared: Scoring) -> Scoring:
    """The protocol that a row of a table declares: `score`, one kind of model or several, and perhaps `protocol`."""
    models = values.get("score", "")
    models = tuple(filter(None, [models] if isinstance(models, str) else models))
    changes = values.get("protocol", {})
    if unknown := set(changes) - {"round", "source", "why"}:
        raise UsageError(f"a protocol has round, source and why; got '{min(unknown)}'")
    return Scoring(models, **{"round": shared.round, "source": shared.source, "why": shared.why, **changes})


def _own(by: Array, points: Array, sign: int, folder: RunFolder, names: Any) -> Array:
    """[N] of each client the first of its best points; NaN for one without any test score.

    Raises UsageError for a client that has a test score, but none to choose by.
    """
    blind = np.isnan(by).all(0) & ~np.isnan(points).all(0)
    if blind.any():
        name = list(names)[int(np.flatnonzero(blind)[0])]
        raise UsageError(
            f"{folder}: client {name} has no validation examples, so no best round of its own; score all clients at "
            f"one round, or make federation.split.validation larger"
        )
    at = np.where(np.isnan(by), -np.inf, sign * by).argmax(0)  # [N]
    return np.take_along_axis(points, at[None], 0)[0]
