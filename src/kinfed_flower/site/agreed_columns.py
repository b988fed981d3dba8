"""What a server says of the columns that the sites agreed on, which may be made up: checked before rows are read."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from kinfed.core.tasks import Classification, Counts, Forecasting, Regression, Task
from kinfed.data.steps import Feature
from kinfed.data.tables import disclosure
from kinfed.data.tables.schema import Description
from kinfed.errors import UsageError

from ..wire.messages import Fields

SAID: dict[Any, Callable[[Any], bool]] = {  # what JSON must hold where a description has a field of this kind
    str: lambda value: type(value) is str,
    bool: lambda value: type(value) is bool,
    int: lambda value: type(value) is int and value >= 0,  # counts of rows
    float: lambda value: type(value) in (int, float) and math.isfinite(value),
    tuple[str, ...]: lambda value: all(type(name) is str for name in value) and len({*value}) == len(value),
    tuple[float, ...]: lambda value: all(SAID[float](number) for number in value),
}


def read_inputs(agreed: Fields) -> dict[str, str]:
    """The kind of each column that is an input; raises TypeError for what says no such thing."""
    inputs = agreed["inputs"]
    pairs = isinstance(inputs, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(type(part) is str for part in pair) for pair in inputs
    )
    if not pairs or len(kinds := dict(inputs)) < len(inputs) or not {*kinds.values()} <= {*disclosure.FORMS}:
        raise TypeError("inputs are columns, each once, and their kinds")
    return kinds


def read_classes(agreed: Fields) -> list[str] | None:
    """The names of the classes, None if the targets are numbers; raises TypeError for what says no such thing."""
    targets = agreed["targets"]
    classes: list[str] | None = agreed["classes"]
    good = classes is None or (isinstance(classes, list) and bool(classes) and SAID[tuple[str, ...]](classes))
    if not good or type(agreed["counts"]) is not bool or (classes is not None and len(targets) != 1):
        raise TypeError("classes are different names, of one target")
    return classes


def read_windows(agreed: Fields) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, int] | None]:
    """Steps ahead that are scored, the calendar, and the steps at which validation and test begin, once known.

    Raises TypeError for what says no such thing.
    """
    horizons, calendar, cuts = agreed["horizons"], agreed["calendar"], agreed.get("cuts", [0, 0])
    are_steps = all(isinstance(part, list) and all(map(SAID[int], part)) for part in (horizons, cuts))
    if not are_steps or len(cuts) != 2 or not cuts[0] <= cuts[1] or len({*horizons}) < len(horizons):
        raise TypeError("horizons are different steps, and cuts are two steps, the later one last")
    if not isinstance(calendar, list) or not SAID[tuple[str, ...]](calendar) or not {*calendar} <= {*get_args(Feature)}:
        raise TypeError("a calendar is a list of different features of times")
    return tuple(horizons), tuple(calendar), (cuts[0], cuts[1]) if "cuts" in agreed else None


def check_task(task: Task, fields: Fields) -> None:
    """Raise UsageError unless the server's task is the one of the columns that it describes.

    A model learns by the task, and a site's answers are made by the description.
    """
    agreed = fields["agreed"]
    if "times" in agreed:
        good = isinstance(task, Forecasting) and task.horizons == tuple(agreed["horizons"])
    elif classes := agreed["classes"]:
        good = isinstance(task, Classification) and task.classes == len(classes)
    else:
        targets = read_description(fields).targets
        means, deviations = zip(*((target.mean, target.deviation) for target in targets), strict=True)
        wanted: Task = Regression(means, deviations, tuple(agreed["targets"]))
        good = task == (Counts(*means) if agreed["counts"] else wanted)
    if not good:
        raise UsageError(f"the server's task, {type(task).__name__}, is not that of the columns that it describes")


def read_description(fields: Mapping[str, Any], key: str = "description") -> Description:
    """The description of columns in a message of the server's; raises UsageError if it is none.

    Its columns are those that were agreed on, in that order, all of its numbers are finite, and it says nothing of what
    only a site's own file says, such as how numbers are written, or between which numbers answers lie.
    """
    try:
        description = Description.from_dict(fields[key])
        inputs = [column.name for column in description.inputs]
        scales = [scale for by_column in description.clients.values() for scale in by_column.values()]
        good = inputs == [name for name, _ in fields["agreed"]["inputs"]]
        good &= all(_is_sound(part) for part in (*description.inputs, *description.targets, *scales))
        targets = tuple(replace(target, bounds=()) for target in description.targets)
        good &= description == Description("", description.inputs, targets, description.clients)
        if key == "description":
            classes, names = fields["agreed"]["classes"], [target.name for target in description.targets]
            good &= names == fields["agreed"]["targets"]
            good &= all(target.classes == tuple(classes or ()) for target in description.targets)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        good = False
    if not good:
        raise UsageError("the server's description of the columns cannot be used; install the same version")
    return description


def _is_sound(part: Any) -> bool:
    """Whether each field of a part of a description is of its kind, and it can scale numbers."""
    kinds = {name: kind for name, kind in get_type_hints(type(part)).items() if get_origin(kind) is not ClassVar}
    if not all(SAID[kind](getattr(part, name)) for name, kind in kinds.items()):
        return False
    middle = max(abs(getattr(part, name, 0.0)) for name in ("mean", "median"))
    return middle <= disclosure.LARGEST and getattr(part, "deviation", 1.0) > 0
