"""Estimators of scikit-learn: one model for each group of rows, and each group learns from its kin."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self, overload

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
    _check_sample_weight,
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from ..core.engine import Rounds
from ..core.method import Method
from ..core.optimiser import Adam
from ..core.seeding import generator
from ..core.training import Training
from ..data.dataset import rows_by_owner
from ..data.federation import Federation
from ..data.tables.frame import series_of
from ..data.tables.open_table import convert_pandas, frame_of
from ..data.tables.table_reader import TableReader
from ..data.tables.words import join_names
from ..errors import UsageError, list_names, nearest, several
from ..methods.solved import KNOWN, SUITED
from ..methods.solved.personal_boosting import PersonalBoosting
from .config.experiment import default_model
from .config.from_table import GROWING
from .config.parts import take
from .fit import fit
from .prediction_intervals import read_percent
from .predictor import KEPT
from .row_owners import Unknown, check_unknown

# Columns beside those of X, with underscores where these have the names.
GROUP, TARGET, WEIGHT = "group", "target", "sample_weight"
MISSING = ("None", "nan", "NaT", "<NA>")  # how what is no group is written
# The method and the model by default, by whether targets are labels.
USUAL: dict[bool, tuple[str | Method, str]] = {False: ("partial-pooling", "additive"), True: ("kin", "mlp")}
MONOTONE = "personal-boosting"  # the method where answers only rise, or only fall, with a column
ROUNDS = 20  # of training, where trees are not grown
ALL = "all"  # what the one client is called where rows have no groups


class _Grouped(BaseEstimator):  # type: ignore[misc]
    """What `Classifier` and `Regressor` share; see there."""

    def __init__(
        self,
        method: str | Method | None = None,
        *,
        groups: str | int | Sequence[str] | None = None,
        unknown: Unknown | None = None,
        model: str | Mapping[str, Any] | None = None,
        rounds: int | None = None,
        epochs: int = 2,
        batch_size: int = 32,
        learning_rate: float = 0.01,
        validation: float = 0.1,
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.groups = groups
        self.unknown = unknown
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

    def _train(self, X: Any, target: Sequence[Any], groups: Any, weights: Any, labels: bool) -> Self:
        """Train on rows whose targets: [n] are texts, if `labels`, or numbers, and which count as weights: [n]."""
        if len(target) < 2:
            raise ValueError(f"a model needs two rows or more, and one sample is none; got n_samples={len(target)}")
        check_unknown(self.unknown)
        frame, names = self._split_groups(X, groups)
        method, model, settings = self._read_model(labels)
        if names is None:
            warnings.warn(
                "fit got no groups, so all rows share one model; pass groups, or set groups='COLUMN' of X", stacklevel=3
            )
            names = polars.Series([ALL] * len(frame))
        self._columns = tuple(_find_unused_name(name, frame.columns) for name in (GROUP, TARGET, WEIGHT))
        group, answer, weight = self._columns
        frame = frame.with_columns(names.alias(group), polars.Series(answer, target))
        if weights is not None:
            frame = frame.with_columns(polars.Series(weight, weights))
        named = frame_of(frame, "X")[group].words()
        if named.empty.any():
            raise ValueError(f"groups: row {int(named.empty.argmax()) + 1} of X has none; in fit every row needs one")
        self.groups_ = [] if groups is None and self.groups is None else named.names
        counted = "" if weights is None else weight
        federation = self._federation(frame, TableReader(client=group, target=answer, labels=labels, weight=counted))
        seed = self._seed()
        self.run_ = fit(
            method,
            federation,
            default_model(federation, model, settings, seed),
            rounds=self._plan_rounds(method, federation),
            training=Training(epochs=self.epochs, batch=self.batch_size, optimiser=Adam(lr=self.learning_rate)),
            seed=seed,
        )
        return self

    def _read_model(self, labels: bool) -> tuple[Method, str, dict[str, Any]]:
        """The method, and its model's name and settings."""
        settings = dict(self.model) if isinstance(self.model, Mapping) else {"name": self.model}
        method, usual = USUAL[labels] if self.method is None else (self.method, SUITED.get(str(self.method), "mlp"))
        if settings.get("monotone"):  # which trees alone keep
            method, usual = method if self.method is not None else MONOTONE, SUITED[MONOTONE]
        method = take(KNOWN, method, "method")() if isinstance(method, str) else method
        return method, settings.pop("name", None) or usual, settings

    def _plan_rounds(self, method: Method, federation: Federation) -> Rounds | int:
        """The rounds of training: those that were asked for, or what grows all trees where they are boosted."""
        if self.rounds is not None or not isinstance(method, PersonalBoosting):
            return ROUNDS if self.rounds is None else self.rounds
        held_back = any(map(len, federation.rows["validation"]))
        return GROWING if held_back else replace(GROWING, patience=0.0)

    def _federation(self, frame: polars.DataFrame, reader: TableReader) -> Federation:
        """All rows, of which a share of each group's selects the round, where no group has too few for that."""
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation must be in [0, 1); got {self.validation!r:.80}")
        dataset = reader.read_frame(frame_of(frame, "X"))
        names = self.groups_ or [ALL]  # in the order of X, as no draw may depend on what groups are called
        of = dict(zip(dataset.owners, rows_by_owner(dataset), strict=True))
        owned = [of[name] for name in names]
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
            # Test rows say how wide intervals are; where none are held back, they only fill their place.
            {"train": train, "validation": held, "test": held if min(counts) else owned},
            dataset.task,
            tuple(names),
            classes=dataset.classes,
            scale=dataset.scale,
            columns=dataset.columns,
            weights=dataset.weights,
        )

    def _seed(self) -> int:
        if self.random_state is None or isinstance(self.random_state, int):
            return self.random_state or 0
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _split_groups(self, X: Any, groups: Any, reset: bool = True) -> tuple[polars.DataFrame, polars.Series | None]:
        """X: [n, d] as a frame of inputs, and the name of each row's group: [n], if it has any.

        Frames of polars or pandas are as they are, and anything else are numbers named x0, x1, ...
        """
        if groups is not None and self.groups is not None:
            raise ValueError(f"groups are column {self.groups!r} of X, so give no others beside")
        if hasattr(X, "columns") and hasattr(X, "dtypes"):
            _check_feature_names(self, X, reset=reset)
            _check_n_features(self, X, reset=reset)
            frame = X if isinstance(X, polars.DataFrame) else convert_pandas(X)
            if self.groups is None:
                return frame, _name_groups(groups, len(frame))
            column = self.groups
            if isinstance(column, Sequence) and not isinstance(column, str):
                line = join_names(column)
                joined = frame_of(frame, "groups: X").with_joined(line)
                joined.need([line])
                return frame.drop(column), joined[line].values
            if isinstance(column, int) and -frame.width <= column < frame.width:
                column = frame.columns[column]
            if column not in frame.columns:
                raise ValueError(f"groups: X has no column {column!r}; {nearest(str(column), frame.columns)}")
            return frame.drop(column), frame[column]
        if isinstance(self.groups, Sequence):
            raise ValueError(f"groups={self.groups!r} names a column, which needs a frame; of an array give its place")
        if self.groups is not None:
            X = np.asarray(X)
            if X.ndim != 2 or not -X.shape[1] <= self.groups < X.shape[1]:
                raise ValueError(f"groups: X has no column {self.groups}; its shape is {list(X.shape)}")
            X, groups = np.delete(X, self.groups, 1), X[:, self.groups]
        numbers = validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan")
        frame = polars.DataFrame({f"x{i}": column for i, column in enumerate(numbers.T)}).fill_nan(None)
        return frame, _name_groups(groups, len(frame))

    def _answers(self, X: Any, groups: Any, interval: float | None = None) -> NDArray[np.float64]:
        """[n, C] probabilities, or [n, 1] numbers, with an interval [n, 3]; NaN in rows that are skipped."""
        check_is_fitted(self)
        share = None if interval is None else self._read_interval(interval)
        frame, names = self._split_groups(X, groups, reset=False)
        # In double precision a row's answer does not depend on the rows that are asked for beside it.
        module = lru_cache(KEPT)(lambda name: self.run_.model(name).double())
        predictor = replace(self.run_.predictor(interval=share), module=module, unknown=self.unknown or "error")
        if names is None and not self.groups_:
            predictor = predictor.of_client(ALL)
        else:
            if names is None:
                predictor = replace(predictor, unknown=self._answer_without_groups())
                names = polars.Series([None] * len(frame), dtype=polars.String)
            elif not self.groups_ and self.unknown != "mean":
                raise ValueError("fit got no groups, so there is one model; leave groups out, or fit with groups")
            frame = frame.with_columns(names.alias(self._columns[0]))
        answers, answered = predictor.answer_rows(frame_of(frame, "X"))
        values = answers.select(polars.selectors.numeric()).to_numpy().astype(np.float64)
        result = np.full((len(frame), values.shape[1]), np.nan)
        result[answered] = values
        return result

    def _read_interval(self, percent: float) -> float:
        """The share of truths that intervals are to hold; raises UsageError if no rows say how wide they are."""
        share = read_percent(percent, "interval")
        if not self.run_.errors:
            raise UsageError(
                f"intervals need rows that fit held back, and with validation={self.validation:g} some group is too "
                "small for one; raise validation, such as 0.2"
            )
        return share

    def _answer_without_groups(self) -> Unknown:
        """What answers rows that come without groups: the mean, with a warning, unless it was asked for."""
        if self.unknown == "mean":
            return "mean"
        what = (
            f"X came without groups, but fit had {several(len(self.groups_), 'group')} ({list_names(self.groups_, 3)})"
        )
        fix = "pass groups, set groups='COLUMN' of X, or set unknown='mean'"
        if self.unknown is not None:
            raise ValueError(f"{what}; {fix}")
        warnings.warn(f"{what}, so the mean of all their models answers; {fix}", stacklevel=4)
        return "mean"


class Classifier(ClassifierMixin, _Grouped):  # type: ignore[misc]
    """A classifier with one model for each group of rows; see `Regressor` for its settings.

    >>> import numpy as np
    >>> X, groups = np.random.default_rng(0).normal(size=(90, 3)), np.repeat(["a", "b", "c"], 30)
    >>> kinfed.Classifier().fit(X, X[:, 0] > 0, groups).predict(X, groups).shape
    (90,)

    After `fit`: `classes_` [C]; `groups_`, the names of the groups; `run_`, the `kinfed.Run`, whose `relation` says who
    learned from whom.
    """

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Train on rows X: [n, d], their classes y: [n] and the group of each: [n]; without groups all are one.

        With sample_weight: [n] a row of weight 2 counts as two, and one of weight 0 not at all.
        Raises ValueError that says what cannot be used.
        """
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        check_consistent_length(X, y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        sample_weight = _check_weights(sample_weight, X)
        if sample_weight is not None and (idle := {*self.classes_} - {*y[sample_weight > 0]}):
            raise ValueError(f"sample_weight is 0 in all rows of class {idle.pop()}; leave these rows out")
        if len(self.classes_) < 2:
            raise ValueError("y has only one class, so there is nothing to learn; got one class in all rows")
        return self._train(X, list(map(str, codes)), groups, sample_weight, labels=True)

    def predict_proba(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """[n, C] the probability of each of `classes_`, by the model of each row's group; see `unknown` for others."""
        return self._answers(X, groups)

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:
        """[n] the most probable class of each row X: [n, d], by its group's model; None in rows that are skipped."""
        check_is_fitted(self)
        chances = self.predict_proba(X, groups)
        answered = ~np.isnan(chances[:, 0])
        classes: NDArray[Any] = self.classes_[np.nan_to_num(chances).argmax(1)]
        if not answered.all():
            classes = classes.astype(object)
            classes[~answered] = None
        return classes

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:
        """The accuracy on rows X: [n, d] with classes y: [n], of which those that are skipped do not count."""
        answers = self.predict(X, groups)
        rows = np.array([answer is not None for answer in answers])
        y, answers, sample_weight = _take_rows(rows, y, answers, sample_weight)
        return float(accuracy_score(y, answers.astype(self.classes_.dtype), sample_weight=sample_weight))


class Regressor(RegressorMixin, _Grouped):  # type: ignore[misc]
    """A regressor with one model for each group of rows, and each group learns from its kin.

    Settings: `method`, a name that `kinfed list methods` has, or a `kinfed.Method`, by default `partial-pooling` for
    numbers and `kin` for classes; `groups`, the column of X that says each row's group, by name or place, or a list of
    names, such as ["school", "class"], in place of an array beside X, so that scikit-learn's scorers and searches need
    no routing; `unknown`, what becomes of rows of a group that was not trained, or of none: an `error`, `skip` (no
    answer, with a warning), or the `mean` of what all groups' models answer (by default an error, but where no groups
    are given at all, the mean with a warning); `model`, a name that `kinfed list models` has, or a dict of settings,
    perhaps with a `name`, such as `{"monotone": ["age:+"]}` for `personal-boosting` whose answers never fall with age,
    by default curves, `additive`, for numbers without a `method`, and else `mlp`; `rounds` of training, by default 20,
    or as many as 200 boosted trees need; in each, `epochs` over a group's rows in batches of `batch_size`, by Adam with
    `learning_rate`, which methods that solve do not need; `validation`, the share of each group's rows that is held
    back to select the round and to tell how wide intervals are, unless that is less than one row in some group;
    `random_state`, a whole number (None is 0), by which every draw is fixed.

    X is an array of numbers, or a frame of pandas or polars, whose text and dates become inputs too. NaN is a missing
    value. Groups are numbers or text, and 1 and "1" are one group.

    >>> import numpy as np
    >>> X, groups = np.random.default_rng(0).normal(size=(90, 3)), np.repeat(["a", "b", "c"], 30)
    >>> kinfed.Regressor().fit(X, X[:, 0], groups).predict(X, groups).shape
    (90,)
    """

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Train on rows X: [n, d], their numbers y: [n] and the group of each: [n]; without groups all are one.

        With sample_weight: [n] a row of weight 2 counts as two, and one of weight 0 not at all.
        Raises ValueError that says what cannot be used.
        """
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        y = column_or_1d(check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"), warn=True)
        check_consistent_length(X, y)
        return self._train(X, y, groups, _check_weights(sample_weight, X), labels=False)

    @overload
    def predict(self, X: Any, groups: Any = None, interval: None = None) -> NDArray[np.float64]: ...

    @overload
    def predict(
        self, X: Any, groups: Any = None, *, interval: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...

    def predict(
        self, X: Any, groups: Any = None, interval: float | None = None
    ) -> NDArray[np.float64] | tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[n] numbers in the unit of y, by the model of each row's group; NaN in rows that are skipped.

        With interval=90 the numbers, and [n, 2] bounds between which 90 % of truths lie: as `kinfed predict --interval`
        has them, by the errors on the rows that fit held back. It is an argument of `predict`, as `return_std` is in
        scikit-learn, because a Pipeline passes that on. Raises ValueError if these rows are too few.
        """
        answers = self._answers(X, groups, interval)
        return answers[:, 0] if interval is None else (answers[:, 0], answers[:, 1:])

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:
        """R2, the coefficient of determination, on rows X: [n, d] with numbers y: [n], without those skipped."""
        answers = self.predict(X, groups)
        y, answers, sample_weight = _take_rows(~np.isnan(answers), y, answers, sample_weight)
        return float(r2_score(y, answers, sample_weight=sample_weight))


def _check_weights(weights: Any, X: Any) -> NDArray[np.float64] | None:
    """[n] as how many rows those of X count; None if all count as one. Raises ValueError for what are no weights."""
    if weights is None:
        return None
    counts: NDArray[np.float64] = _check_sample_weight(weights, X, dtype=np.float64)
    if not counts.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    if (counts < 0).any():
        row = int((counts < 0).argmax())
        raise ValueError(
            f"sample_weight: row {row + 1} has {counts[row]:g}, and a weight is a number from 0; correct it"
        )
    return counts


def _name_groups(groups: Any, count: int) -> polars.Series | None:
    """[n] the group of each row, null where there is none."""
    if groups is None:
        return None
    if isinstance(groups, polars.Series):
        names = groups
    elif type(groups).__module__.startswith("pandas") and hasattr(groups, "to_frame"):
        names = convert_pandas(groups.rename(GROUP).to_frame()).to_series()
    else:
        values = column_or_1d(np.asarray(groups, None if isinstance(groups, np.ndarray) else object))
        names = series_of(GROUP, [_read_group(value) for value in values])
    if names.dtype == polars.Object:
        raise ValueError("groups hold values of several kinds, such as dates and text; give all as one of these")
    if len(names) != count:
        raise ValueError(f"groups must name the group of each row: X has {count} rows, groups {len(names)}")
    return names


def _read_group(value: Any) -> Any:
    """A group as a value of Python's own; None where there is none."""
    if not isinstance(value, str) and str(value) in MISSING:
        return None
    value = value.astype("datetime64[us]") if isinstance(value, np.datetime64) else value
    return value.item() if isinstance(value, np.generic) else value


def _take_rows(rows: NDArray[np.bool_], *arrays: Any) -> list[Any]:
    """The arrays: [n] at these rows; None stays."""
    return [None if array is None else np.asarray(array)[rows] for array in arrays]


def _find_unused_name(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name
