"""Private states of all clients: in memory, or in files of which only the rows in use are read and written."""

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core.rows import Part, pieces
from ..core.trees import Tree
from ..errors import RunError

LARGE = 1 << 30  # bytes of states, beyond which they are kept in files


def mapped(count: int, like: Tensor, folder: Path | None) -> tuple[Tensor, mmap.mmap]:
    """[count, ...] zeros like the rows of like: [k, ...], in a file without a name, and that file.

    Raises RunError if there is no room for it.
    """
    dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
    numbers = count * like[:1].numel()
    size = max(1, numbers) * like.element_size()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(
                    file.fileno(), 0, size
                )  # otherwise a full disk would kill the process without an error
            else:
                file.truncate(size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as problem:
        where = folder or tempfile.gettempdir()
        raise RunError(
            f"cannot make a file of {size / 1e9:.1f} GB for clients' states or models in {where}: {problem.strerror}"
        ) from None
    return torch.from_numpy(np.frombuffer(memory, dtype)[:numbers]).view(count, *like.shape[1:]), memory


class States:
    """A tree of tables [N, ...]. Only `take` and `put` touch it, and only the rows they name.

    Large tables are files without a name, in `folder` or where temporary files go. There a client's first state is made
    when it is first needed, so that neither time nor memory is spent on clients that never take part.
    """

    def __init__(self, count: int, join: Callable[[Tensor], Tree], device: torch.device, folder: Path | None) -> None:
        """`join(ids)` makes the first states, [k, ...], of clients ids: [k]."""
        self._join, self._files = join, list[mmap.mmap]()
        self._before: tuple[Tensor, Tree] | None = None
        first = join(torch.zeros(1, dtype=torch.int64, device=device))
        self.tables: Tree = first
        self.joined = torch.ones(count, dtype=torch.bool, device=device)
        leaves = tree_leaves(first)
        size = sum(leaf.nbytes for leaf in leaves)
        if count * size > LARGE:
            self.tables = tree_map(lambda leaf: self._map_rows(count, leaf, folder), first)
            self.joined = torch.zeros(count, dtype=torch.bool, device=device)
        elif leaves:
            # Tables of their own, as they are written in place, and a program's result may be referenced elsewhere.
            self.tables = tree_map(lambda leaf: leaf.new_empty(count, *leaf.shape[1:]), first)
            ids = torch.arange(count, device=device)
            for at in pieces(count, size):  # so that there are never two tables
                self._write(ids[at], join(ids[at]))

    def take(self, ids: Tensor) -> Tree:
        """[k, ...] the states of clients ids: [k]."""
        new = ids[~self.joined[ids]]
        if len(new):
            self._write(new, self._join(new))
            self.joined[new] = True
        return tree_map(lambda table: table[ids.to(table.device)].to(ids.device), self.tables)

    def put(self, ids: Tensor, states: Tree, before: Tree) -> None:
        """Replace the states of clients ids: [k], which `take` gave as `before`, by states: [k, ...]."""
        self._before = ids, before
        self._write(ids, states)

    def settle(self) -> None:
        """The round is over: its states are final."""
        self._before = None

    def undo(self) -> None:
        """Restore the states from before the current round, even if `put` was interrupted."""
        if self._before is not None:
            self._write(*self._before)
            self._before = None

    def keep(self) -> tuple[Tensor, Tree]:
        """Ids: [M] of the clients that have a state, and their states: [M, ...], or `Part`s of files; for `restore`."""
        ids = self.joined.nonzero().squeeze(1)
        return ids, tree_map(lambda table: Part(table, ids), self.tables) if self._files else self.tables

    def restore(self, kept: tuple[Tensor, Tree]) -> None:
        """Restore the states that `keep` gave, or a file of them that can be sliced."""
        ids, states = kept
        for at in pieces(len(ids), sum(table[:1].nbytes for table in tree_leaves(self.tables))):
            self._write(ids[at], tree_map(lambda rows, at=at: rows[at], states))
        self.joined[ids.to(self.joined.device)] = True

    def _write(self, ids: Tensor, states: Tree) -> None:
        tree_map(lambda table, rows: table.index_copy_(0, ids.to(table.device), rows.to(table)), self.tables, states)
        for file in self._files:
            file.madvise(mmap.MADV_DONTNEED)  # no longer in memory, but in the file

    def _map_rows(self, count: int, like: Tensor, folder: Path | None) -> Tensor:
        table, file = mapped(count, like, folder)
        self._files.append(file)
        return table
