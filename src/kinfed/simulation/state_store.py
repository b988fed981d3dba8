"""Private states of all clients: in memory, or in files of which only the rows in use are read and written."""

import mmap
import os
import tempfile
import weakref
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


class RowFile:
    """A table [count, ...] like the rows of like: [k, ...], in a file without a name; rows take room once written."""

    def __init__(self, count: int, like: Tensor, folder: Path | None) -> None:
        """Raises RunError if there can be no such file in the folder."""
        dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
        self._row, self._where = like[:1].nbytes, folder or tempfile.gettempdir()
        self._reserved = [False] * count
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, as it is open as long as the table
            weakref.finalize(self, self._file.close)
            size = max(dtype.itemsize, count * self._row)  # of rows without numbers, too, which no map may be
            self._file.truncate(size)
            self._memory = mmap.mmap(self._file.fileno(), size)
        except OSError as problem:
            raise self._full(count, problem) from None
        numbers = np.frombuffer(self._memory, dtype)[: count * like[:1].numel()]
        self.table = torch.from_numpy(numbers).view(count, *like.shape[1:])

    def reserve(self, ids: Tensor) -> None:
        """Take room for rows; raises RunError if there is none, which would otherwise kill the process in a write."""
        new = [i for i in ids.tolist() if not self._reserved[i]]
        try:
            for i in new if hasattr(os, "posix_fallocate") and self._row else ():  # not on macOS
                os.posix_fallocate(self._file.fileno(), i * self._row, self._row)
                self._reserved[i] = True
        except OSError as problem:
            raise self._full(len(new), problem) from None

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Write rows: [k, ...] of ids: [k]; raises RunError if there is no room for them."""
        self.reserve(ids)
        self.table.index_copy_(0, ids, rows)
        self.forget()

    def forget(self) -> None:
        """What was read or written is no longer in memory, but in the file."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def _full(self, rows: int, problem: OSError) -> RunError:
        size = rows * self._row / 1e9
        return RunError(
            f"no room for {size:.3g} GB of clients' states or models in {self._where}: {problem.strerror}; free some, "
            "or set TMPDIR or a run folder on a larger disk"
        )


class States:
    """A tree of tables [N, ...]. Only `take` and `put` touch it, and only the rows they name.

    Large tables are files without a name, in `folder` or where temporary files go. There a client has a row once it has
    taken part, and until then the first state is made whenever it is needed.
    """

    def __init__(self, count: int, join: Callable[[Tensor], Tree], device: torch.device, folder: Path | None) -> None:
        """`join(ids)` makes the first states, [k, ...], of clients ids: [k]."""
        self._join, self._files = join, list[RowFile]()
        self._before: tuple[Tensor, Tree, Tensor] | None = None
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
        if not self._files:  # all have joined, which a GPU would be waited for to say
            return self._rows(ids)
        new = ~self.joined[ids]
        if new.all():
            return self._join(ids) if len(ids) else self._rows(ids)
        if not new.any():
            return self._rows(ids)
        rows = self._rows(ids.masked_fill(new, int(ids[~new][0])))
        first = self._join(ids[new])
        return tree_map(lambda table, some: table.index_copy_(0, new.nonzero().squeeze(1), some), rows, first)

    def put(self, ids: Tensor, states: Tree, before: Tree) -> None:
        """Replace the states of clients ids: [k], which `take` gave as `before`, by states: [k, ...].

        Raises RunError if there is no room for them.
        """
        for file in self._files:
            file.reserve(ids)
        self._before = ids, before, self.joined[ids]
        self._write(ids, states)
        if self._files:
            self.joined[ids] = True

    def settle(self) -> None:
        """The round is over: its states are final."""
        self._before = None

    def undo(self) -> None:
        """Restore the states from before the current round, even if `put` was interrupted."""
        if self._before is not None:
            ids, before, joined = self._before
            self._write(ids, before)
            self.joined[ids], self._before = joined, None

    def keep(self) -> tuple[Tensor, Tree]:
        """Ids: [M] of the clients that have a state, and their states: [M, ...], or `Part`s of files; for `restore`."""
        ids = self.joined.nonzero().squeeze(1)
        return ids, tree_map(lambda table: Part(table, ids), self.tables) if self._files else self.tables

    def restore(self, kept: tuple[Tensor, Tree]) -> None:
        """Restore the states that `keep` gave, or a file of them that can be sliced."""
        ids, states = kept
        for file in self._files:
            file.reserve(ids)
        for at in pieces(len(ids), sum(table[:1].nbytes for table in tree_leaves(self.tables))):
            self._write(ids[at], tree_map(lambda rows, at=at: rows[at], states))
        self.joined[ids.to(self.joined.device)] = True

    def _rows(self, ids: Tensor) -> Tree:
        """[k, ...] copies of rows."""
        return tree_map(lambda table: table[ids.to(table.device)].to(ids.device), self.tables)

    def _write(self, ids: Tensor, states: Tree) -> None:
        tree_map(lambda table, rows: table.index_copy_(0, ids.to(table.device), rows.to(table)), self.tables, states)
        for file in self._files:
            file.forget()

    def _map_rows(self, count: int, like: Tensor, folder: Path | None) -> Tensor:
        self._files.append(RowFile(count, like, folder))
        return self._files[-1].table
