"""Settings that check themselves, and the sentence that each has.

A part (a method, an optimiser, a partition ...) is a frozen dataclass that derives from `Settings`; methods do already.
The annotation of a field says what it may be, and the comment behind it, or in the lines above, what it is for:

    mu: NonNegative = 0.1  # weight of the proximal term
    steps: Count | None = None  # local steps a round; left out: as many as training.epochs give
    sign: Literal["descent", "paper"] = "descent"  # of the server's step
    decay: Annotated[float, In("(0, 1)")] = 0.5  # of a client's weight, for each round that it missed

What one field must be to another is for `__post_init__`, which begins with `super().__post_init__()`.
"""

import inspect
import io
import math
import textwrap
import tokenize
import types
import typing
from ast import AnnAssign, AsyncFunctionDef, ClassDef, FunctionDef, Name, arg, parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any

from ..errors import UsageError

LARGEST = 3.4e38  # a number that is not infinite: what single precision can hold
LARGEST_COUNT = 2**31


class In:
    """An interval that a number must lie in, such as "[0, 1)".

    >>> 1.0 in kinfed.methods.In("[0, 1)")
    False
    """

    def __init__(self, interval: str) -> None:
        self.interval = interval
        low, self.end = interval[1:-1].split(", ")
        base, _, power = self.end.partition("**")
        self.low, self.high = float(low), float(base) ** float(power or 1)

    def __contains__(self, value: float) -> bool:
        above = value > self.low or (value == self.low and self.interval[0] == "[")
        return above and (value < self.high or (value == self.high and self.interval[-1] == "]"))

    def describe_for(self, value: float) -> str:
        """What a number must be that is not in it: by the upper limit, however large, if it exceeds that."""
        if value >= self.high >= LARGEST_COUNT:
            return "finite" if self.high == math.inf else f"below {self.end}"
        return str(self)

    def __str__(self) -> str:
        """What the number must be, for an error; a limit that only a slip of the hand exceeds is not mentioned."""
        if self.high < LARGEST_COUNT:
            return f"in {self.interval}"
        if self.low == -math.inf:
            return "finite"
        if self.low == 0:
            return "zero or more" if self.interval[0] == "[" else "positive"
        return f"{'at least' if self.interval[0] == '[' else 'above'} {self.low:g}"


Positive = Annotated[float, In("(0, inf)")]
NonNegative = Annotated[float, In("[0, inf)")]
Share = Annotated[float, In("[0, 1]")]
Count = Annotated[int, In("[1, 2**31)")]
CountOrZero = Annotated[int, In("[0, 2**31)")]


class Settings:
    """The base of all dataclasses that a config can make: their fields are checked when they are made.

    >>> kinfed.SGD(lr=-1.0)
    Traceback (most recent call last):
        ...
    kinfed.errors.UsageError: SGD.lr must be positive; got -1.0 (learning rate)
    """

    def __post_init__(self) -> None:
        """Raise UsageError unless every field is what its annotation says."""
        validate(self)


def validate(part: Any) -> None:
    """Raise UsageError unless every field of a dataclass is what its annotation says."""
    kind: Any = type(part)
    kinds = kinds_of(kind)
    for field in fields(part):
        if field.init and field.name in kinds:
            check(getattr(part, field.name), kinds[field.name], f"{kind.__name__}.{field.name}", kind)


def check(value: Any, kind: Any, where: str, part: Any = None) -> None:
    """Raise UsageError, which says where and what for, unless a value is of a kind; `part` has the setting."""
    try:
        _check(value, kind, where)
    except UsageError as problem:
        use = sentences(part).get(where.rpartition(".")[2]) if part is not None else None
        raise UsageError(f"{problem} ({use})" if use else problem) from None


def _check(value: Any, kind: Any, where: str) -> None:
    options = [split_interval(option) for option in options_of(kind)]
    fitting = [option for option in options if _is(value, option[0])]
    if not fitting:
        expected = [
            f"{base.__name__}(...)" if isinstance(base, type) and is_dataclass(base) else describe_kind(base)
            for base, _ in options
        ]
        raise UsageError(f"{where} must be {' or '.join(expected)}; got {value!r:.80}")
    base, bound = fitting[0]
    if bound is not None and value not in bound:
        raise UsageError(f"{where} must be {bound.describe_for(value)}; got {value!r}")
    if (base is float or isinstance(value, float)) and LARGEST < abs(value) < math.inf:
        raise UsageError(f"{where} must be at most {LARGEST:g}, what single precision can hold; got {value!r}")
    if held := _inner(base):
        for i, inner in enumerate(value):
            _check(inner, held, f"{where}[{i}]")


@cache
def kinds_of(part: Any) -> dict[str, Any]:
    """The annotations of a part's settings, none where they name what is not there."""
    try:
        return typing.get_type_hints(part.__init__ if inspect.isclass(part) else part, include_extras=True)
    except NameError:
        return {}


def options_of(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the one kind."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def split_interval(kind: Any) -> tuple[Any, In | None]:
    """A kind and its interval."""
    if typing.get_origin(kind) is Annotated:
        base, *notes = typing.get_args(kind)
        return base, next((note for note in notes if isinstance(note, In)), None)
    return kind, None


def name_of(kind: type) -> str:
    """What a config calls a class: KnownGraph is "known-graph", QP is "qp"."""
    name, spaced = kind.__name__, ""
    for before, letter, after in zip(f" {name}", name, f"{name[1:]} ", strict=False):
        begins = letter.isupper() and (before.islower() or before.isdigit() or after.islower())
        spaced += f"-{letter}" if spaced and begins else letter
    return spaced.lower()


def describe_kind(kind: Any) -> str:
    """A kind in words."""
    base, _ = split_interval(kind)
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false", type(None): "left out"}
    names[Path] = "a path"
    if base in names:
        return names[base]
    if typing.get_origin(base) is typing.Literal:
        values = typing.get_args(base)
        listed = ", ".join(map(repr, values))
        return f"one of {listed}" if len(values) > 1 else listed
    if _inner(base):
        return "a list"
    if typing.get_origin(base) in (dict, Mapping):
        return "a table"
    if isinstance(base, type):
        return f"'{name_of(base)}'" if is_dataclass(base) else "'FILE.py:NAME'"
    return str(base)


def describe_setting(kind: Any) -> str:
    """A kind in words, with the interval that a number must lie in."""
    result = []
    for option in options_of(kind):
        _, bound = split_interval(option)
        result.append(describe_kind(option) if bound is None else f"{describe_kind(option)}, {bound}")
    return " or ".join(result)


def sentences(part: Callable[..., Any]) -> dict[str, str]:
    """The comment on each setting of a part, by its name, as it stands in the source."""
    parts = reversed(part.__mro__) if inspect.isclass(part) else (part,)
    result = {name: text for source in parts for name, text in _comments(source).items()}
    return {name: text for name, text in result.items() if text}


@cache
def _comments(part: Callable[..., Any]) -> dict[str, str]:
    """By name, the comment behind a setting's last line in the part's own source, with what goes on, or that above."""
    try:
        source = textwrap.dedent(inspect.getsource(part))
    except (OSError, TypeError):  # built in, or its file is gone
        return {}
    node, named = parse(source).body[0], dict[str, AnnAssign | arg]()
    if isinstance(node, ClassDef):
        named = {n.target.id: n for n in node.body if isinstance(n, AnnAssign) and isinstance(n.target, Name)}
    elif isinstance(node, FunctionDef | AsyncFunctionDef):
        named = {argument.arg: argument for argument in [*node.args.args, *node.args.kwonlyargs]}
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string[1:] for token in tokens if token.type == tokenize.COMMENT}
    alone = {line for line in comments if lines[line - 1].lstrip().startswith("#")}
    result = {}
    for name, at in named.items():
        first, last = at.lineno, at.end_lineno or at.lineno
        chosen = [last] if last in comments and last not in alone else []
        while chosen and chosen[-1] + 1 in alone and comments[chosen[-1] + 1].startswith("   "):
            chosen.append(chosen[-1] + 1)
        above = first - 1
        while not (chosen and chosen[0] == last) and above in alone and not comments[above].startswith("   "):
            chosen.insert(0, above)
            above -= 1
        result[name] = " ".join(comments[line].strip() for line in chosen)
    return result


def _inner(kind: Any) -> Any:
    """What a list holds, if the kind is one."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) in (tuple, Sequence, list) else None


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind that is no union, its interval and what it holds apart."""
    if kind is Any:
        return True
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if typing.get_origin(kind) is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(kind))
    if _inner(kind):
        return isinstance(value, list | tuple)
    if typing.get_origin(kind) in (dict, Mapping):
        return isinstance(value, Mapping)
    if isinstance(kind, type):
        if getattr(kind, "_is_protocol", False):  # an object of one's own
            functions = [name for name, member in vars(kind).items() if not name.startswith("_") and callable(member)]
            return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in functions)
        return isinstance(value, kind)
    return True  # a kind that is not checked here
