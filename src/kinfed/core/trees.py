"""States and messages: which of their axes index clients, conversion to named arrays and back, size in bytes.

A field of a server state or of a message declares its tensors' axes:

    class Server(NamedTuple):
        theta: PerClient  # [N, d]
        mean: Shared  # [d]
        links: Pairwise  # [N, N]

All code that sends, scores, saves or widens them reads that declaration. A client's private state and uploads need
none: every field belongs to that client. A field of an upload may declare that the server uses no more of it than the
mean or the sum over the clients of a round, and then its method gets no more (`mixins.reduce_uploads`):

    class Upload(NamedTuple):
        theta: ModelOf[Averaged]  # [d] of a client; the server gets [d], their mean
        control: Summed  # [d] of a client; the server gets [d], their sum
"""

from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from ..errors import UsageError

Tree = Any  # a NamedTuple, tuple or dict of tensors: a state or a message
FORMER = {  # fields, and what files called them; rows were the whole of what they are now a part of
    "inner": "own",
    "seen": "known",
    "cosines": "alike",
    "notes": "words",
    "rows": "",
}


class Axis(Enum):
    """Which axes of a tensor index clients."""

    PER_CLIENT = "the first"
    SHARED = "none"
    PAIRWISE = "the last two"


class Reduction(Enum):
    """What the server gets of a tensor that clients upload."""

    NONE = "that of each client"
    MEAN = "the mean"
    SUM = "the sum"


class Role(Enum):
    """What else a field can declare."""

    MODEL = "the model itself"
    SIZES = "of how many clients each cluster is"
    DERIVED = "is found again where a file of before lacks it"


@dataclass(frozen=True)
class Like:
    """Marks an optimiser's state, whose lists run parallel to the tensors of another field, named before it."""

    field: str


PerClient = Annotated[Tensor, Axis.PER_CLIENT]  # [N, ...] in a state, [K, ...] in a message to a cohort
Shared = Annotated[Tensor, Axis.SHARED]  # [...] the same for all clients
Pairwise = Annotated[Tensor, Axis.PAIRWISE]  # [..., N, N], in states only
ClusterSizes = Annotated[Tensor, Axis.SHARED, Role.SIZES]  # [C] in a state: of how many clients each cluster is
Averaged = Annotated[Tensor, Reduction.MEAN]  # [...] in an upload: the server gets the mean over the cohort, [...]
Summed = Annotated[Tensor, Reduction.SUM]  # [...] in an upload: the server gets the sum over the cohort, [...]
_T = TypeVar("_T")
ModelOf = Annotated[_T, Role.MODEL]  # ModelOf[PerClient] or ModelOf[Shared]: the one field that is a model
Derived = Annotated[_T, Role.DERIVED]  # Derived[PerClient]: what a method finds again if it starts as at first


def axes(tree: Tree) -> Tree:
    """The declared axes of a server state or of a message: the same tree with an `Axis` in place of each tensor.

    A field's declaration holds for everything inside it that has none of its own. Raises UsageError with the name of
    a tensor that nothing declares.
    """
    return _axes(tree, None, type(tree).__name__)


def _axes(tree: Tree, axis: Axis | None, where: str) -> Tree:
    kind: Any = type(tree)
    if fields := _fields(kind):
        axes_of: dict[str, Tree] = {}
        for name, field in fields.items():
            value = getattr(tree, name)
            if field.like:
                axes_of[name] = _parallel(value, tree_leaves(axes_of[field.like]))
            else:
                axes_of[name] = _axes(value, field.axis or axis, f"{where}.{name}")
        return kind(**axes_of)
    if isinstance(tree, tuple):
        return tuple(_axes(value, axis, f"{where}[{i}]") for i, value in enumerate(tree))
    if isinstance(tree, dict):
        return {key: _axes(value, axis, f"{where}[{key!r}]") for key, value in tree.items()}
    if axis is None:
        raise UsageError(
            f"{where} does not declare which of its axes index clients; make it a field of a NamedTuple with the "
            "annotation kinfed.methods.PerClient, kinfed.methods.Shared or kinfed.methods.Pairwise"
        )
    return axis


def read_reductions(upload: Tree) -> Tree:
    """What the server gets of an upload: the same tree with a `Reduction` in place of each tensor.

    A field's declaration holds for everything inside it that has none of its own.
    """
    return _read_marks(upload, "reduction", Reduction.NONE)


def _read_marks(tree: Tree, what: str, outer: Any) -> Tree:
    """The same tree with `what` a `_Field` says in place of each tensor; `outer` holds where nothing is said."""
    kind: Any = type(tree)
    if fields := _fields(kind):
        marks = {name: getattr(field, what) or outer for name, field in fields.items()}
        return kind(*(_read_marks(getattr(tree, name), what, mark) for name, mark in marks.items()))
    if isinstance(tree, tuple):
        return tuple(_read_marks(value, what, outer) for value in tree)
    if isinstance(tree, dict):
        return {key: _read_marks(value, what, outer) for key, value in tree.items()}
    return outer


def _parallel(state: Tree, leaves: list[Axis]) -> Tree:
    """The axes of an optimiser's state whose lists run parallel to tensors with axes `leaves`."""
    return type(state)(*(tuple(leaves[: len(part)]) if isinstance(part, tuple) else Axis.SHARED for part in state))


class _Field(NamedTuple):
    """What the annotation of a NamedTuple's field says."""

    axis: Axis | None
    reduction: Reduction | None
    role: Role | None
    like: str


@cache
def _fields(kind: type) -> dict[str, _Field]:
    """What the fields of a NamedTuple declare, in order; nothing for another type."""
    declarations = {}
    try:
        hints = get_type_hints(kind, include_extras=True) if issubclass(kind, tuple) else {}
    except NameError as problem:  # under `from __future__ import annotations`
        raise UsageError(
            f"the annotations of {kind.__name__} cannot be read: {problem}; import that name, or remove the quotes"
        ) from None
    for name, hint in hints.items():
        marks = set(_marks(hint))
        declared = [mark for mark in marks if isinstance(mark, Axis | Reduction)]
        if len(declared) > 1:
            raise UsageError(f"{kind.__name__}.{name} declares several axes; use a field for each tensor")
        axis = next((mark for mark in declared if isinstance(mark, Axis)), None)
        reduction = next((mark for mark in declared if isinstance(mark, Reduction)), None)
        like = next((mark.field for mark in marks if isinstance(mark, Like)), "")
        role = next((mark for mark in marks if isinstance(mark, Role)), None)
        declarations[name] = _Field(axis, reduction, role, like)
    return declarations


def _marks(hint: Any) -> Iterator[Any]:
    """All that is annotated anywhere in a type hint, such as tuple[Shared, ...]."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from _marks(part)


def names(tree: Tree, mark: Axis | Role) -> list[str]:
    """The names, as in `pack`, of the tensors with this declaration."""
    marks = axes(tree) if isinstance(mark, Axis) else _read_marks(tree, "role", None)
    return [name for name, declared in pack(marks).items() if cast(Any, declared) is mark]


def model_field(tree: Tree) -> str:
    """The name of the field that is declared as the model; empty if there is none."""
    kind: Any = type(tree)
    return next((name for name, field in _fields(kind).items() if field.role is Role.MODEL), "")


def model_of(tree: Tree) -> Tensor | None:
    """The value of that field, if there is one."""
    name = model_field(tree)
    return getattr(tree, name) if name else None


def pick(message: Tree, at: Any) -> Tree:
    """The part of a message to a cohort for the clients at these places; `at` is any index of a table.

    A message too large for memory is a function of these places.
    """
    if callable(message):
        return message(at)
    return tree_map(lambda t, axis: t if axis is Axis.SHARED else t[at], message, axes(message))


def reorder(state: Tree, order: Tensor) -> Tree:
    """A server's state for the clients order: [M] of those that it lists, in that order."""

    def pick_from(axis: Axis, t: Tensor) -> Tensor:
        if axis is Axis.SHARED:
            return t
        at = order.to(t.device)
        return t[at] if axis is Axis.PER_CLIENT else t[..., at, :][..., at]

    return tree_map(pick_from, axes(state), state)


def replace_rows(state: Tree, ids: Tensor, other: Tree) -> Tree:
    """A server's state in which the rows of clients ids: [M] are those of another of its kind; the rest stays."""

    def put_rows(axis: Axis, now: Tensor, new: Tensor) -> Tensor:
        at = ids.to(now.device)
        if axis is Axis.SHARED or not now.numel():
            return now
        dim = 0 if axis is Axis.PER_CLIENT else -2
        return now.index_copy(dim, at, new.index_select(dim, at).to(now.dtype))

    return tree_map(put_rows, axes(state), state, other)


def for_one(message: Tree) -> Tree:
    """A message to one client as a message to a cohort of one."""
    return tree_map(lambda t, axis: t if axis is Axis.SHARED else t[None], message, axes(message))


def bytes_down(message: Tree, count: int) -> int:
    """Bytes of a message to a cohort of `count` clients; shared tensors are sent to each of them."""
    sizes = tree_map(lambda t, axis: t.nbytes * (count if axis is Axis.SHARED else 1), message, axes(message))
    return sum(tree_leaves(sizes))


def pack(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Named arrays of a tree of NamedTuples, tuples and dicts, such as `theta` or `opt_state.first.0`."""
    leaves, _ = tree_flatten_with_path(tree)
    return {prefix + ".".join(_name(part) for part in path): leaf for path, leaf in leaves}


def unpack(arrays: Mapping[str, Tensor], like: Tree, prefix: str = "") -> Tree:
    """The tree with the structure of `like` and the arrays that `pack` made."""
    paths, structure = tree_flatten_with_path(like)
    names = [prefix + ".".join(_name(part) for part in path) for path, _ in paths]
    arrays = adopt(arrays, like, prefix)
    return tree_unflatten([arrays[name] for name in names], structure)


def adopt(arrays: Mapping[str, Tensor], like: Tree, prefix: str = "") -> dict[str, Tensor]:
    """The arrays of a file by their names of now, and those that are `Derived` of `like` where the file has none."""
    renamed, wanted = dict(arrays), pack(like, prefix)
    for name in wanted:
        former = ".".join(FORMER.get(part, part) for part in name.split(".")).strip(".")
        if name not in renamed and former in renamed:
            renamed[name] = renamed.pop(former)
    return {prefix + name: wanted[prefix + name] for name in names(like, Role.DERIVED)} | renamed


def nest(arrays: dict[str, Tensor]) -> Tree:
    """A tree with the fields that `pack` named: NamedTuples, and tuples where the names are numbers."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in arrays.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = tensor
    values = {first: part[""] if "" in part else nest(part) for first, part in parts.items()}
    if all(first.isdecimal() for first in values):
        return tuple(values[first] for first in sorted(values, key=int))
    return namedtuple("Named", values)(**values)


def size(tree: Tree) -> int:
    """Bytes of all arrays."""
    return sum(t.nbytes for t in tree_leaves(tree))


def raw(t: Tensor) -> memoryview:
    """The bytes of a tensor, row by row, without a copy if memory has that order."""
    t = t.detach().cpu().contiguous()
    # A single number may have any stride and count as contiguous; a view of bytes needs 1.
    return memoryview(t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _name(part: Any) -> str:
    for field in ("name", "key", "idx"):
        if hasattr(part, field):
            return str(getattr(part, field))
    raise TypeError(f"states and messages are trees of NamedTuples, tuples and dicts; got {part}")
