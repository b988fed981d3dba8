"""Results of clients, gathered into tables with a row for each."""

import threading
from collections.abc import Callable

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..core.rows import blank
from ..core.trees import Tree


class Gathered:
    """Gathers clients' trees as one tree [K, ...], whose tables `room(K, like)` makes."""

    def __init__(self, count: int, room: Callable[[int, Tensor], Tensor] = blank) -> None:
        self._count, self._room, self._lock = count, room, threading.Lock()
        self._tables: list[Tensor] | None = None

    def put(self, place: int | slice | Tensor, tree: Tree) -> None:
        """Keep the tree of the client at `place`: int, or trees: [k, ...] of those at k places."""
        leaves, structure = tree_flatten(tree)
        with self._lock:
            if self._tables is None:
                self._structure = structure
                self._tables = [self._table(place, leaf) for leaf in leaves]
        for table, leaf in zip(self._tables, leaves, strict=True):
            if table is not leaf:
                table[place] = leaf

    def _table(self, place: int | slice | Tensor, leaf: Tensor) -> Tensor:
        if isinstance(place, int):
            return self._room(self._count, leaf.unsqueeze(0))
        complete = len(leaf) == self._count and isinstance(place, slice)
        return leaf if complete and leaf.is_contiguous() else self._room(self._count, leaf)

    def tree(self) -> Tree:
        """The gathered tree."""
        assert self._tables is not None
        return tree_unflatten(self._tables, self._structure)
