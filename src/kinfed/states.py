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

from .errors import RunError
from .executors import Tree, pick

LARGE = 1 << 30  # bytes of states, beyond which they are kept in files


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
        if not tree_leaves(first):
            self.joined = torch.ones(count, dtype=torch.bool, device=device)
        elif count * sum(leaf.nbytes for leaf in tree_leaves(first)) > LARGE:
            self.tables = tree_map(lambda leaf: self._mapped(count, leaf, folder), first)
            self.joined = torch.zeros(count, dtype=torch.bool, device=device)
        else:
            # Copies, for these are written in place, and what a program returns may be seen from elsewhere.
            self.tables = tree_map(torch.clone, join(torch.arange(count, device=device)))
            self.joined = torch.ones(count, dtype=torch.bool, device=device)

    def take(self, ids: Tensor) -> Tree:
        """[k, ...] the states of clients ids: [k]."""
        new = ids[~self.joined[ids]]
        if len(new):
            self._write(new, self._join(new))
            self.joined[new] = True
        return tree_map(lambda table: pick(table, ids.to(table.device)).to(ids.device), self.tables)

    def put(self, ids: Tensor, states: Tree, before: Tree) -> None:
        """Replace the states of clients ids: [k], which `take` gave as `before`, by states: [k, ...]."""
        self._before = ids, before
        self._write(ids, states)

    def settle(self) -> None:
        """The round is over: what was put stays."""
        self._before = None

    def undo(self) -> None:
        """Take back what was put since the last round was over, even if that was interrupted."""
        if self._before is not None:
            self._write(*self._before)
            self._before = None

    def keep(self) -> tuple[Tensor, Tree]:
        """Ids: [M] of the clients that have a state, and their states: [M, ...]; for `restore`."""
        ids = self.joined.nonzero().squeeze(1)
        return ids, self.tables if len(ids) == len(self.joined) else self.take(ids)

    def restore(self, kept: tuple[Tensor, Tree]) -> None:
        """Become the states that `keep` gave."""
        ids, states = kept
        self._write(ids, states)
        self.joined[ids.to(self.joined.device)] = True

    def _write(self, ids: Tensor, states: Tree) -> None:
        tree_map(lambda table, rows: table.index_copy_(0, ids.to(table.device), rows.to(table)), self.tables, states)
        for file in self._files:
            file.madvise(mmap.MADV_DONTNEED)  # no longer in memory, but in the file

    def _mapped(self, count: int, like: Tensor, folder: Path | None) -> Tensor:
        """[count, ...] zeros like the row of like: [1, ...], in a file."""
        size = count * like.nbytes
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # or a full disk would end the process without a word
                self._files.append(mmap.mmap(file.fileno(), size))
        except OSError as problem:
            where = folder or tempfile.gettempdir()
            raise RunError(
                f"cannot make a file of {size / 1e9:.1f} GB for the clients' states in {where}: {problem.strerror}"
            ) from None
        dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
        return torch.from_numpy(np.frombuffer(self._files[-1], dtype)).view(count, *like.shape[1:])
