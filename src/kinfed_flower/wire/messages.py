"""Messages between server and sites: a few fields as JSON, and trees of tensors as named arrays."""

import hashlib
import json
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kinfed.core import trees
from kinfed.core.layout import Layout
from kinfed.core.trees import Tree
from kinfed.errors import UsageError
from kinfed.runs.config import plugins

Fields = dict[str, Any]  # what JSON can hold
LAST = 1 << 31  # rounds that a message may name
NEEDED: dict[str, dict[str, type]] = {  # what the server's messages must hold
    "join": {"experiment": str, "table": dict, "task": dict, "shape": list, "outputs": int, "layout": str},
    "describe": {"agreed": dict, "split": dict, "seed": int},
    "round": {"experiment": str, "layout": str},
    "verdict": {"experiment": str},
    "offer": {"experiment": str, "round": int, "model": str},
    "share": {"experiment": str, "round": int, "keys": dict},
    "confirm": {"experiment": str, "round": int, "uploaded": list},
    "reveal": {"experiment": str, "round": int, "tags": dict},
}
OPTIONAL: dict[str, type] = {
    "selected": dict,
    "chosen": str,
    "judged": int,
    "agreed": dict,
    "description": dict,
    "covariates": dict,
    "fedavg": str,
    "plan": str,
    "boxes": dict,
}


class Message(NamedTuple):
    """What one side sends to the other."""

    fields: Fields
    arrays: dict[str, Tensor]


class Node(NamedTuple):
    """What is known of a node before it is greeted."""

    stamp: str  # when it last came online
    name: str  # under which its key was registered; empty without keys
    key: bytes = b""  # its public key


class Failure(NamedTuple):
    """Why there is no reply."""

    why: str
    gone: bool  # whether the node was not reached or broke down, so that trying again may help


class Transport(Protocol):
    """What carries messages, see `kinfed_flower.wire.transport.GridTransport`."""

    def nodes(self) -> dict[int, Node]: ...  # those online

    def push(self, node: int, kind: str, message: Message, seconds: float) -> str: ...  # its id, empty if it failed

    def pull(self, ids: Collection[str]) -> dict[str, Message | Failure]: ...  # replies that have arrived, by those ids


def refusal(client: str, why: object) -> Message:
    """What a client replies that cannot, or will not, do what is asked."""
    return Message({"client": client, "refused": str(why)}, {})


def put(tree: Tree, message: Message, part: str) -> None:
    """Add a tree to a message under the name of a part, such as "upload"."""
    message.fields[part] = describe(tree)
    message.arrays.update(trees.pack(tree, f"{part}/"))


def take(message: Message, part: str) -> Tree:
    """The tree that `put` added; raises UsageError if it is missing or incomplete."""
    if part not in message.fields:
        raise UsageError(f"the message has no {part}")
    try:
        return trees.unpack(message.arrays, skeleton(message.fields[part]), f"{part}/")
    except RecursionError:
        raise UsageError(f"the message's {part} is nested too deeply") from None
    except KeyError as missing:
        raise UsageError(f"the message's {part} lacks the array {missing}") from None


def bundle(parts: Mapping[str, Message]) -> Message:
    """Messages to, or of, several clients at one node as one."""
    arrays = {f"{client}/{name}": t for client, part in parts.items() for name, t in part.arrays.items()}
    return Message({"bundle": {client: part.fields for client, part in parts.items()}}, arrays)


def unbundle(message: Message) -> dict[str, Message]:
    """The messages of a bundle, by client; raises UsageError if it is none."""
    fields = message.fields.get("bundle")
    if not isinstance(fields, dict) or not all(isinstance(part, dict) for part in fields.values()):
        raise UsageError("the message is no bundle of messages to clients")
    parts = {client: Message(part, {}) for client, part in fields.items()}
    for name, t in message.arrays.items():
        client, _, array = name.partition("/")
        if client in parts:
            parts[client].arrays[array] = t
    return parts


def describe(tree: Tree) -> Any:
    """A tree's structure as JSON: null for a tensor, [class or "tuple", ...] or {key: ...} for what holds others."""
    match tree:
        case dict():
            return {key: describe(value) for key, value in tree.items()}
        case tuple() if hasattr(tree, "_fields"):
            return [f"{type(tree).__module__}:{type(tree).__qualname__}", *map(describe, tree)]
        case tuple():
            return ["tuple", *map(describe, tree)]
    return None


def skeleton(described: Any) -> Tree:
    """The tree that was described, with a 0 in place of every tensor.

    Only NamedTuples of kinfed, and of files that this side has loaded itself, are made: a message can name a structure
    but never run code.
    """
    match described:
        case None:
            return 0
        case dict():
            return {str(key): skeleton(value) for key, value in described.items()}
        case ["tuple", *parts]:
            return tuple(map(skeleton, parts))
        case [str(name), *parts]:
            module, _, kind = name.partition(":")
            # Nothing is imported for a message: whatever a method sends is of a module that is loaded already.
            is_kinfeds = module.split(".")[0] == "kinfed"
            loaded = sys.modules.get(module) if is_kinfeds else plugins.module_of(module)
            named = getattr(loaded, kind, None)
            fields = getattr(named, "_fields", None)
            if isinstance(named, type) and issubclass(named, tuple) and fields and len(fields) == len(parts):
                return named(*map(skeleton, parts))
    raise UsageError(f"the message holds a structure that this version of kinfed does not know: {described!r:.80}")


def check(kind: str, fields: Fields) -> None:
    """Raise UsageError unless a message of the server's holds what its kind must, each of the right type."""
    optional = {name: form for name, form in OPTIONAL.items() if name in fields}
    for name, form in (NEEDED[kind] | optional).items():
        if type(fields.get(name)) is not form:
            raise UsageError(f"the server's {name} must be {form.__name__}; got {fields.get(name)!r:.80}")


def round_of(fields: Fields, name: str) -> int:
    """A round that the server names, -1 before the first; it becomes a part of file names."""
    value = fields.get(name)
    if type(value) is not int or not -1 <= value < LAST:
        raise UsageError(f"the server's {name} must be a round; got {value!r:.40}")
    return value


def selection_of(fields: Fields) -> tuple[int, dict[str, int], str]:
    """The last round that is scored, the best round of each kind of model, and the kind that is kept, empty before any.

    Raises UsageError for what says no such thing.
    """
    selected, chosen = fields.get("selected", {}), fields.get("chosen", "")
    rounds = {name: round_of(selected, name) for name in selected}
    if chosen and chosen not in rounds:
        raise UsageError(f"the server's chosen must be one of its selected; got {chosen!r:.40}")
    return round_of({"judged": -1} | fields, "judged"), rounds, chosen


def digest(message: Message) -> str:
    """A hash of a message's fields and arrays."""
    hashed = hashlib.sha256(json.dumps(message.fields, sort_keys=True).encode())
    for name in sorted(message.arrays):
        array = message.arrays[name].detach().cpu().contiguous()
        hashed.update(f"\0{name}\0{array.dtype}\0{list(array.shape)}\0".encode())
        hashed.update(array.flatten().numpy().data)
    return hashed.hexdigest()


def model_digest(message: Message) -> str:
    """A hash of what training starts from."""
    arrays = {name: t for name, t in message.arrays.items() if name.startswith("train/")}
    return digest(Message({"train": message.fields.get("train")}, arrays))


def request_digest(message: Message, model: str) -> str:
    """A hash of a request to train, of which `model` is `model_digest`, so that no array is hashed twice."""
    rest = {name: t for name, t in message.arrays.items() if not name.startswith("train/")}
    return digest(Message(message.fields | {"model": model}, rest))


def run_digest(invitation: Message) -> str:
    """A hash of all by which members of a run with masks must be alike: run, plan and initial model."""
    names = ("experiment", "table", "task", "shape", "outputs", "layout")
    fields = {name: invitation.fields.get(name) for name in names}
    return digest(Message(fields, {"theta": invitation.arrays["theta"]}))


def round_digest(run: str, round: int, model: str) -> bytes:
    """[32 bytes] a hash of all by which members of a masked round must be alike: `run_digest`, round and model."""
    return bytes.fromhex(digest(Message({"run": run, "round": round, "model": model}, {})))


def layout_digest(layout: Layout) -> str:
    """A hash of an architecture: the name, shape and kind of every tensor, in order."""
    parts = [(e.name, list(e.shape), e.trainable) for e in layout.entries if e.dtype is None]  # a site's own are others
    return hashlib.sha256(json.dumps([parts, sorted(layout.head)]).encode()).hexdigest()[:16]


def problem_with(arrays: dict[str, Tensor], like: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    """What is wrong with named arrays that should have these types and shapes and be finite; empty if nothing is."""
    missing = sorted(like.keys() - arrays.keys())
    extra = sorted(arrays.keys() - like.keys())
    if missing or extra:
        problems = [f"lacks {', '.join(missing)}"] if missing else []
        problems += [f"also has {', '.join(extra)}"] if extra else []
        return f"it {' and '.join(problems)}"
    for name, array in arrays.items():
        dtype, shape = like[name]
        if str(array.dtype) != dtype or tuple(array.shape) != shape:
            return f"{name} is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}"
        if array.is_floating_point() and not torch.isfinite(array).all():
            return f"{name} holds NaN or infinity"
    return ""


def forms(arrays: dict[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every array, as `problem_with` compares them."""
    return {name: (str(array.dtype), tuple(array.shape)) for name, array in arrays.items()}


def plain(text: object) -> str:
    """Text of a site's as one printable line, which cannot pass for a line of kinfed's own."""
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(printable.split())[:500]


def numbers(message: Message) -> dict[str, int]:
    """How many numbers each of a message's arrays has that has any."""
    return {name: array.numel() for name, array in message.arrays.items() if array.numel()}


def size(message: Message) -> int:
    """Bytes of a message's arrays and fields."""
    return trees.size(message.arrays) + len(json.dumps(message.fields))
