"""Executors: one client's program run for many clients, one by one on workers or as one batched program."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .client import Client, Pool, Rows, Training
from .errors import RunError, UsageError
from .fused import Fused
from .graph import blank
from .model import Model
from .tasks import Task

GRAIN = 1 << 24  # operations of a training step that are worth a worker: in less, workers mostly wait for Python
PAIR = 2  # threads of a fused worker: two share an operation, where two workers would wait for one Python

Tree = Any
Program = Callable[..., Tree]  # a client and its row of every tree -> a tree of what it found


class Clients:
    """The clients of a simulation: their rows of the pool by split, and what else their programs need."""

    def __init__(
        self, names: Sequence[str], tags: Tensor, rows: dict[str, list[Tensor]], pool: Pool, task: Task, seed: int
    ) -> None:
        self.names, self.tags, self.rows, self.pool, self.task, self.seed = names, tags, rows, pool, task, seed
        self.sizes = {split: [len(r) for r in parts] for split, parts in rows.items()}
        self._padded = {split: _pad(parts) for split, parts in rows.items()}

    def __len__(self) -> int:
        return len(self.tags)

    def one(self, i: int, round: int, model: Model, training: Training, halt: threading.Event | None) -> Client:
        """Client i as its program sees itself."""
        rows = {split: Rows(self.rows[split][i], count[i]) for split, (_, count) in self._padded.items()}
        sizes = (self.sizes["train"][i],)
        return Client(
            self.tags[i], round, self.seed, model, self.task, training, self.pool, rows, sizes, False, halt=halt
        )

    def several(self, ids: Tensor) -> tuple[Tensor, dict[str, Rows], tuple[int, ...]]:
        """Tags and rows of ids: [k], to be batched over, and their training sizes."""
        members = ids.tolist()
        rows = {
            split: Rows(index[ids, : max(self.sizes[split][i] for i in members)], count[ids])
            for split, (index, count) in self._padded.items()
        }
        return self.tags[ids], rows, tuple(self.sizes["train"][i] for i in members)


class Executor(Protocol):
    """Runs a program once for each client; trees: [K, ...] in, trees: [K, ...] out, in the order of ids: [K]."""

    name: str

    def __call__(
        self,
        clients: Clients,
        model: Model,
        training: Training,
        round: int,
        ids: Tensor,
        program: Program,
        *trees: Tree,
    ) -> Tree: ...


class Loop:
    """Client by client, on as many one-thread workers as there are cores to use.

    With fewer clients than workers each worker gets more threads. Results are the same bits for any number of workers
    as long as each has one thread. An exception in a client's program ends all and is raised as one line.
    """

    name = "loop"

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __call__(
        self,
        clients: Clients,
        model: Model,
        training: Training,
        round: int,
        ids: Tensor,
        program: Program,
        *trees: Tree,
    ) -> Tree:
        members, found = ids.tolist(), Gathered(len(ids))
        tables, structure = tree_flatten(trees)

        def run(model: Model, place: int, halt: threading.Event) -> None:
            client = clients.one(members[place], round, model, training, halt)
            try:
                found.put(place, program(client, *tree_unflatten([table[place] for table in tables], structure)))
            except (UsageError, RunError, CancelledError):
                raise
            except Exception as problem:
                raise RunError(
                    f"round {round + 1}: client {clients.names[members[place]]}: {_line(problem)}"
                ) from problem

        # Those with most to do come first, so that no worker is left with a large client at the end.
        places = sorted(range(len(members)), key=lambda place: -clients.sizes["train"][members[place]])
        count = min(self.workers, len(places))
        _spread(count, self.workers // count, model, places, run)
        return found.tree()


class Batched:
    """`chunk` clients at a time as one program, with `torch.func.vmap`. On an accelerator that runs out of memory the
    chunk is halved until it fits.

    Given a model's fused form, local training takes it where it can (`kinfed.fused`), on as many threads as there are
    cores to use.
    """

    def __init__(self, chunk: int, name: str = "vmap", threads: int = 1, fused: Fused | None = None) -> None:
        self.chunk, self.name, self.threads, self.fused = chunk, name, threads, fused

    def __call__(
        self,
        clients: Clients,
        model: Model,
        training: Training,
        round: int,
        ids: Tensor,
        program: Program,
        *trees: Tree,
    ) -> Tree:
        found = Gathered(len(ids))

        def run(model: Model, places: Sequence[int], halt: threading.Event | None = None) -> None:
            todo = deque([places])
            while todo:
                part = todo.popleft()
                if len(part) > self.chunk or not fits(model, part):
                    chunk = self.chunk
                    todo.extendleft(part[i : i + chunk] for i in reversed(range(0, len(part), chunk)))

        def fits(model: Model, places: Sequence[int]) -> bool:
            at = index(places, ids.device)
            tag, rows, sizes = clients.several(ids[at])

            def together(tag: Tensor, rows: dict[str, Rows], *mine: Tree) -> Tree:
                client = Client(
                    tag,
                    round,
                    clients.seed,
                    model,
                    clients.task,
                    training,
                    clients.pool,
                    rows,
                    sizes,
                    True,
                    fused=self.fused,
                )
                return program(client, *mine)

            parts = [tree_map(lambda t: pick(t, at), tree) for tree in trees]
            try:
                found.put(at, vmap(together)(tag, rows, *parts))
            except torch.cuda.OutOfMemoryError as problem:
                if len(places) == 1:
                    raise RunError(
                        f"round {round + 1}: the device's memory does not hold the training of a single client, "
                        f"{clients.names[int(ids[places])]}; use a smaller batch or --device cpu"
                    ) from problem
                self.chunk = len(places) // 2
                return False  # tried again elsewhere: while the exception is held, so is the memory
            return True

        sizes = [clients.sizes["train"][i] for i in ids.tolist()]
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        if self.fused:
            # Forward, and gradients of weights and of inputs.
            step = 6 * model.layout.size * min(training.batch, max(sizes)) * len(ids)
            pairs = max(1, self.threads // PAIR)
            workers = max(1, min(pairs, step // GRAIN, len(ids)))
            count = min(-(-len(ids) // (self.chunk * workers)) * workers, len(ids))
            if sizes[order[0]] == sizes[order[-1]]:  # neighbours, whose rows are taken and put without a copy
                chunks = [order[i * len(ids) // count : (i + 1) * len(ids) // count] for i in range(count)]
            else:  # about as much work in every chunk
                chunks = [order[i::count] for i in range(count)]
            _spread(workers, self.threads // pairs, model, chunks, run)
        else:  # clients with equally many steps run together, so that few steps are spent on those who are done
            run(model, order)
        return found.tree()


Item = TypeVar("Item")


def _spread(
    count: int, each: int, model: Model, items: Sequence[Item], run: Callable[[Model, Item, threading.Event], None]
) -> None:
    """Run all items, in this order, on workers of so many threads each, who have a model of their own."""
    halt = threading.Event()
    with threads(each):
        if count == 1:
            for item in items:
                run(model, item, halt)
            return
        queue = deque(items)

        def work(model: Model) -> None:
            torch.set_num_threads(each)  # OpenMP counts for each thread
            while queue and not halt.is_set():
                try:
                    item = queue.popleft()
                except IndexError:  # another worker was faster
                    return
                run(model, item, halt)

        with ThreadPoolExecutor(count) as pool:
            try:
                done = [pool.submit(work, twin) for twin in model.twins(count)]
                wait(done, return_when=FIRST_EXCEPTION)
            finally:
                halt.set()  # on an exception in one of them, or Ctrl-C, the others end at their next batch
        problems = [problem for future in done if (problem := future.exception())]
        for problem in sorted(problems, key=lambda problem: isinstance(problem, CancelledError)):
            raise problem


class Gathered:
    """Gathers clients' trees as one tree [K, ...]."""

    def __init__(self, count: int) -> None:
        self._count, self._lock = count, threading.Lock()
        self._tables: list[Tensor] | None = None

    def put(self, place: int | slice | Tensor, tree: Tree) -> None:
        """Keep the tree of the client at `place`: int, or trees: [k, ...] of those at k places, see `index`."""
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
            return blank(self._count, leaf.unsqueeze(0))
        whole = len(leaf) == self._count and isinstance(place, slice)
        return leaf if whole and leaf.is_contiguous() else blank(self._count, leaf)

    def tree(self) -> Tree:
        """All of it."""
        assert self._tables is not None
        return tree_unflatten(self._tables, self._structure)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch uses this many threads within an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def index(places: Sequence[int], device: torch.device) -> slice | Tensor:
    """Places in a table as what finds them there: if they follow one another a slice, which copies nothing."""
    first, count = places[0], len(places)
    if list(places) == list(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(places, device=device)


def pick(table: Tensor, at: slice | Tensor) -> Tensor:
    """Rows of a table: [K, ...]; one row that is repeated stays so."""
    if table.stride(0) == 0 and isinstance(at, Tensor):
        return table[:1].expand(len(at), *table.shape[1:])
    return table[at]


def _line(problem: Exception) -> str:
    """An exception in one line."""
    said = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {said[0]}" if said else type(problem).__name__


def _pad(rows: list[Tensor]) -> Rows:
    """index: [N, n] filled up with each client's own rows, count: [N]."""
    width = max(len(r) for r in rows)
    count = torch.tensor([len(r) for r in rows])
    fill = torch.arange(width)
    index = torch.stack([r[(fill % max(len(r), 1)).to(r.device)] if len(r) else r.new_zeros(width) for r in rows])
    return Rows(index, count.to(index.device))
