"""Estimators of the user's own, such as lightgbm:LGBMRegressor, that a verdict is against too."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import UsageError
from . import plugins

WHERE = "baselines"


class NamedBaseline(NamedTuple):
    """An estimator with `fit(X, y)` and `predict(X)`, for labels `predict_proba(X)`, as scikit-learn's are."""

    name: str
    make: Callable[[], Any]  # a new one, unfitted


def read_baselines(wanted: str | Sequence[Any]) -> tuple[list[NamedBaseline], list[dict[str, Any]]]:
    """The estimators that are named, as PACKAGE:NAME, FILE.py:NAME, or a table of a name and settings.

    An estimator itself is copied before each fit. The second result is the config's complete list, without these.
    Raises UsageError for a name that is none, and for what has no `fit`.
    """
    if not isinstance(wanted, str | list | tuple):
        raise UsageError(f"{WHERE} must be a list of estimators; got {wanted!r:.80}")
    items: list[Any] = [part.strip() for part in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    read = [_read_baseline(item) for item in items]
    names = Counter(baseline.name for baseline, _ in read)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"{WHERE} has two that are called '{twice[0]}'; name a function of a file for one of them")
    return [baseline for baseline, _ in read], [table for _, table in read if table]


def _read_baseline(item: Any) -> tuple[NamedBaseline, dict[str, Any]]:
    if hasattr(item, "fit") and not inspect.isclass(item):
        from sklearn.base import clone

        return NamedBaseline(type(item).__name__, lambda: _fix_draws(clone(item))), {}
    table = {"name": item} if isinstance(item, str) else item
    if not isinstance(table, Mapping) or not plugins.is_path(table.get("name")):
        raise UsageError(
            f"{WHERE} are estimators such as lightgbm:LGBMRegressor or mine.py:Model, or tables of a name and "
            f"settings; got {item!r:.80}"
        )
    name = table["name"]
    settings = {key: value for key, value in table.items() if key != "name"}
    part = plugins.load(name, WHERE)
    if not callable(part):
        raise UsageError(f"{WHERE}: '{name}' is not a class or function that makes an estimator")

    def make() -> Any:
        return _fix_draws(part(**settings))

    try:
        made = make()
    except Exception as problem:
        raise UsageError(f"{WHERE}: '{name}' cannot be made: {type(problem).__name__}: {problem}") from problem
    if not hasattr(made, "fit"):
        raise UsageError(f"{WHERE}: what '{name}' makes has no fit(X, y); got {made!r:.80}")
    return NamedBaseline(plugins.short_name(name), make), {"name": name, **settings}


def _fix_draws(estimator: Any) -> Any:
    """The estimator, with a seed if it draws and has none."""
    settings = estimator.get_params() if hasattr(estimator, "get_params") else {}
    if settings.get("random_state", 0) is None:
        estimator.set_params(random_state=0)
    return estimator
