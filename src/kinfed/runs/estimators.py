"""Estimators of scikit-learn: one model for each group of rows, and each group learns from its kin."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import polars
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from ..core.method import Method
from ..core.optimiser import Adam
from ..core.seeding import generator
from ..core.training import Training
from ..data.dataset import rows_by_owner
from ..data.federation import Federation
from ..data.tables.open_table import convert_pandas, frame_of
from ..data.tables.table_reader import TableReader
from ..data.tables.words import name_of
from ..errors import UsageError
from ..methods.solved import KNOWN
from .config.experiment import default_model
from .config.parts import take
from .fit import fit
from .predictor import KEPT

GROUP, TARGET = "group", "target"  # columns beside those of X, with underscores where these have the names
ALL = "all"  # the group of all rows, where none are given


class _Grouped(BaseEstimator):  # type: ignore[misc]
    """What `Classifier` and `Regressor` share; see there."""

    def __init__(
        self,
        method: str | Method = "kin",
        *,
        model: str = "mlp",
        rounds: int = 20,
        epochs: int = 2,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        validation: float = 0.1,
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.model = model
        self.rounds = rounds
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation = validation
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    def _train(self, X: Any, target: Sequence[Any], groups: Any, labels: bool) -> Self:
        """Train on rows whose targets: [n] are texts, if `labels`, or numbers."""
        if len(target) < 2:
            raise ValueError(f"a model needs two rows or more, and one sample is none; got n_samples={len(target)}")
        names = self._names_of(groups, len(target))
        self.groups_ = list(dict.fromkeys(names))
        frame = self._frame(X)
        self._columns = tuple(_find_unused_name(name, frame.columns) for name in (GROUP, TARGET))
        group, answer = self._columns
        frame = frame.with_columns(polars.Series(group, names), polars.Series(answer, target))
        federation = self._federation(frame, TableReader(client=group, target=answer, labels=labels))
        seed = self._seed()
        self.run_ = fit(
            take(KNOWN, self.method, "method")() if isinstance(self.method, str) else self.method,
            federation,
            default_model(federation, self.model, seed),
            rounds=self.rounds,
            training=Training(epochs=self.epochs, batch=self.batch_size, optimiser=Adam(lr=self.learning_rate)),
            seed=seed,
        )
        return self

    def _federation(self, frame: polars.DataFrame, reader: TableReader) -> Federation:
        """All rows, of which a share of each group's selects the round, where no group has too few for that."""
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation must be in [0, 1); got {self.validation!r:.80}")
        dataset = reader.of(frame_of(frame, "X"))
        owned = rows_by_owner(dataset)
        counts = [math.floor(self.validation * len(rows)) for rows in owned]
        counts = counts if min(counts) else [0] * len(owned)
        draw = generator(self._seed(), "split")
        mixed = [rows[torch.randperm(len(rows), generator=draw)] for rows in owned]
        train = [rows[count:] for rows, count in zip(mixed, counts, strict=True)]
        held = [rows[:count] for rows, count in zip(mixed, counts, strict=True)]
        if dataset.prepare:
            dataset = dataset.prepare(dataset, torch.cat(train))
        return Federation(
            dataset.x,
            dataset.y,
            {"train": train, "validation": held, "test": owned},  # nothing is said of the last
            dataset.task,
            tuple(dataset.owners),
            classes=dataset.classes,
            scale=dataset.scale,
            columns=dataset.columns,
        )

    def _seed(self) -> int:
        if self.random_state is None or isinstance(self.random_state, int):
            return self.random_state or 0
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _frame(self, X: Any, reset: bool = True) -> polars.DataFrame:
        """X: [n, d] as a frame: of polars or pandas as it is, and anything else as numbers named x0, x1, ..."""
        if hasattr(X, "columns") and hasattr(X, "dtypes"):
            _check_feature_names(self, X, reset=reset)
            _check_n_features(self, X, reset=reset)
            return X if isinstance(X, polars.DataFrame) else convert_pandas(X)
        numbers = validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan")
        return polars.DataFrame({f"x{i}": column for i, column in enumerate(numbers.T)}).fill_nan(None)

    def _names_of(self, groups: Any, count: int) -> list[str]:
        """[n] the name of each row's group."""
        if groups is None:
            return [ALL] * count
        values = column_or_1d(check_array(groups, ensure_2d=False, dtype=None, input_name="groups"))
        if len(values) != count:
            raise ValueError(f"groups must name the group of each row: X has {count} rows, groups {len(values)}")
        return [name_of(str(value)) for value in values]

    def _answers(self, X: Any, groups: Any) -> NDArray[np.float64]:
        """[n, C] probabilities, or [n, 1] numbers."""
        check_is_fitted(self)
        frame = self._frame(X, reset=False)
        names = np.array(self._names_of(groups, len(frame)), object)
        # In double precision a row's answer does not depend on the rows that are asked for beside it.
        module = lru_cache(KEPT)(lambda name: self.run_.model(name).double())
        predictor, group = replace(self.run_.predictor(), module=module), self._columns[0]
        known = np.isin(names, self.groups_)
        parts = [np.empty((0, 0))] * 2
        if known.any():
            named = frame.with_columns(polars.Series(group, names.tolist()))
            parts[0] = self._values(predictor.of_client(None)(named.filter(known)))
        if not known.all():
            others = frame.filter(~known)
            sizes = self.run_.federation.sizes.double()
            weights = (sizes / sizes.sum()).tolist()
            each = (self._values(predictor.of_client(name)(others)) for name in self.run_.federation.names)
            parts[1] = sum(weight * values for weight, values in zip(weights, each, strict=True))
        result = np.empty((len(frame), max(part.shape[1] for part in parts)))
        for rows, values in zip((known, ~known), parts, strict=True):
            if rows.any():
                result[rows] = values
        return result

    def _values(self, answers: polars.DataFrame) -> NDArray[np.float64]:
        """[n, C] the numbers of a predictor's answers."""
        return answers.select(polars.selectors.numeric()).to_numpy().astype(np.float64)


class Classifier(ClassifierMixin, _Grouped):  # type: ignore[misc]
    """A classifier with one model for each group of rows; see `Regressor` for its settings.

    >>> import numpy as np
    >>> X, groups = np.random.default_rng(0).normal(size=(90, 3)), np.repeat(["a", "b", "c"], 30)
    >>> kinfed.Classifier().fit(X, X[:, 0] > 0, groups).predict(X, groups).shape
    (90,)

    After `fit`: `classes_` [C]; `groups_`, the names of the groups; `run_`, the `kinfed.Run`, whose `relation` says who
    learned from whom.
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows X: [n, d], their classes y: [n] and the group of each: [n]; without groups all are one.

        Raises ValueError that says what cannot be used.
        """
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        check_consistent_length(X, y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y has only one class, so there is nothing to learn; got one class in all rows")
        return self._train(X, list(map(str, codes)), groups, labels=True)

    def predict_proba(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """[n, C] the probability of each of `classes_`; for groups that were not trained the mean of all models'."""
        return self._answers(X, groups)

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:
        """[n] the most probable class of each row X: [n, d], by its group's model; see `predict_proba`."""
        check_is_fitted(self)
        classes: NDArray[Any] = self.classes_[self.predict_proba(X, groups).argmax(1)]
        return classes

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:
        """The accuracy on rows X: [n, d] with classes y: [n]."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class Regressor(RegressorMixin, _Grouped):  # type: ignore[misc]
    """A regressor with one model for each group of rows, and each group learns from its kin.

    Settings: `method`, a name that `kinfed list methods` has, or a `kinfed.Method`; `model`, a name that
    `kinfed list models` has; `rounds` of training; in each, `epochs` over a group's rows in batches of `batch_size`, by
    Adam with `learning_rate`; `validation`, the share of each group's rows that is held back to select the round,
    unless that is less than one row in some group; `random_state`, a whole number (None is 0), by which every draw is
    fixed.

    X is an array of numbers, or a frame of pandas or polars, whose text and dates become inputs too. NaN is a missing
    value. Rows of a group that was not trained, or without a group, get the mean of all groups' models, each weighted
    by its rows.

    >>> import numpy as np
    >>> X, groups = np.random.default_rng(0).normal(size=(90, 3)), np.repeat(["a", "b", "c"], 30)
    >>> kinfed.Regressor().fit(X, X[:, 0], groups).predict(X, groups).shape
    (90,)
    """

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on rows X: [n, d], their numbers y: [n] and the group of each: [n]; without groups all are one.

        Raises ValueError that says what cannot be used.
        """
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        y = column_or_1d(check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"), warn=True)
        check_consistent_length(X, y)
        return self._train(X, y, groups, labels=False)

    def predict(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """[n] numbers in the unit of y, by the model of each row's group; for other groups the mean of all models'."""
        return self._answers(X, groups)[:, 0]

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:
        """The coefficient of determination R2 on rows X: [n, d] with numbers y: [n]."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))


def _find_unused_name(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name
