"""Messages and states as named arrays and back; their size in bytes."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

Tree = Any  # a NamedTuple, tuple or dict of tensors: what is kept, sent and saved


def pack(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Named arrays of a tree of NamedTuples, tuples and dicts, such as `theta` or `memory.first.0`."""
    leaves, _ = tree_flatten_with_path(tree)
    return {prefix + ".".join(_name(part) for part in path): leaf for path, leaf in leaves}


def unpack(arrays: dict[str, Tensor], like: Tree, prefix: str = "") -> Tree:
    """The tree with the structure of `like` and the arrays that `pack` made."""
    paths, structure = tree_flatten_with_path(like)
    names = [prefix + ".".join(_name(part) for part in path) for path, _ in paths]
    return tree_unflatten([arrays[name] for name in names], structure)


def size(tree: Tree) -> int:
    """Bytes of all arrays, as they would travel."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


def raw(t: Tensor) -> memoryview:
    """The bytes of a tensor, row after row, without a copy where they are so in memory."""
    t = t.detach().cpu().contiguous()
    # A single number may have any stride and count as contiguous; a view of bytes needs 1.
    return memoryview(t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _name(part: Any) -> str:
    for field in ("name", "key", "idx"):
        if hasattr(part, field):
            return str(getattr(part, field))
    raise TypeError(f"states and messages are trees of NamedTuples, tuples and dicts; got {part}")
