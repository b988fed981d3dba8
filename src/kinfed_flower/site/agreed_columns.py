"""What a server says of the columns that the sites agreed on, which may be made up: checked before rows are read."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, get_origin, get_type_hints

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
    pairs = isinstance(inputs, Sequence) and all(
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


def read_description(fields: Mapping[str, Any], key: str = "description") -> Description:
    """The description of columns in a message of the server's; raises UsageError if it is none.

    Its columns are those that were agreed on, in that order, and all of its numbers are finite.
    """
    try:
        description = Description.from_dict(fields[key])
        inputs = [column.name for column in description.inputs]
        scales = [scale for by_column in description.clients.values() for scale in by_column.values()]
        good = inputs == [name for name, _ in fields["agreed"]["inputs"]]
        good &= all(_is_sound(part) for part in (*description.inputs, *description.targets, *scales))
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
    return all(SAID[kind](getattr(part, name)) for name, kind in kinds.items()) and getattr(part, "deviation", 1.0) > 0
