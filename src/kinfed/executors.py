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
from .errors import RunError, UsageError, is_out_of_memory
from .fused import Fused
from .graph import blank
from .model import Model
from .tasks import Task

GRAIN = 1 << 24  # operations of a training step that are worth a worker: in less, workers mostly wait for Python
FEW = 512  # examples that may be filled up to without regard
PAIR = 2  # threads of a fused worker: two share an operation, where two workers would wait for one Python

# PyTorch would warn of recurrent layers, which vmap takes apart; `auto` looks for that by itself (choosing.py).
torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]

Tree = Any
Program = Callable[..., Tree]  # a client and its row of every tree -> a tree of what it found


class Clients:
    """The clients of a simulation: their rows of the pool by split, and what else their programs need."""

    def __init__(
        self, names: Sequence[str], tags: Tensor, rows: dict[str, list[Tensor]], pool: Pool, task: Task, seed: int
    ) -> None:
        self.names, self.tags, self.pool, self.task, self.seed = names, tags, pool, task, seed
        self.sizes = {split: [len(r) for r in parts] for split, parts in rows.items()}
        self._ragged = {split: _Ragged(torch.cat(parts), self.sizes[split]) for split, parts in rows.items()}
        self.rows = {split: ragged.parts for split, ragged in self._ragged.items()}

    def __len__(self) -> int:
        return len(self.tags)

    def one(self, i: int, round: int, model: Model, training: Training, halt: threading.Event | None) -> Client:
        """Client i as its program sees itself."""
        rows = {split: ragged.one(i) for split, ragged in self._ragged.items()}
        sizes = (self.sizes["train"][i],)
        return Client(
            self.tags[i], round, self.seed, model, self.task, training, self.pool, rows, sizes, False, halt=halt
        )

    def several(self, ids: Tensor) -> tuple[Tensor, dict[str, Rows], tuple[int, ...]]:
        """Tags and rows of ids: [k], to be batched over, and their training sizes."""
        members = ids.tolist()
        rows = {split: ragged.several(ids, members) for split, ragged in self._ragged.items()}
        return self.tags[ids], rows, tuple(self.sizes["train"][i] for i in members)


class _Ragged:
    """Every client's rows, one client's after another's."""

    def __init__(self, flat: Tensor, sizes: list[int]) -> None:
        self.parts, self._flat, self._sizes = flat.split(sizes), flat, sizes
        self._counts = torch.tensor(sizes, device=flat.device)
        self._begins = self._counts.cumsum(0) - self._counts

    def one(self, i: int) -> Rows:
        return Rows(self.parts[i], self._counts[i])

    def several(self, ids: Tensor, members: list[int]) -> Rows:
        """at: [k, n] of the clients ids: [k], filled up with each client's own; members are the ids for Python."""
        fill, count = torch.arange(max(self._sizes[i] for i in members), device=ids.device), self._counts[ids]
        at = self._begins[ids, None] + fill % count[:, None].clamp(min=1)
        return Rows(self._flat[at.clamp(max=max(len(self._flat) - 1, 0))], count)  # who has none is given any


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

    With fewer clients than workers each worker gets more threads. On a CPU results are the same bits for any number of
    workers as long as each has one thread. An exception in a client's program ends all and is raised as one line.
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
                name = clients.names[members[place]]
                if is_out_of_memory(problem):
                    raise _too_large(round, name) from problem
                raise RunError(f"round {round + 1}: client {name}: {_line(problem)}") from problem

        # Those with most to do come first, so that no worker is left with a large client at the end.
        places = sorted(range(len(members)), key=lambda place: -clients.sizes["train"][members[place]])
        count = min(self.workers, len(places))
        _spread(count, self.workers // count, model, places, run)
        return found.tree()


class Batched:
    """`chunk` clients at a time as one program, with `torch.func.vmap`. On an accelerator that runs out of memory the
    chunk is halved until it fits.

    Given a model's fused form, local training takes it where it can (`kinfed.fused`), and `threads` are shared by as
    many workers as there is work for, two threads or more each.
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
            except RuntimeError as problem:
                if not is_out_of_memory(problem):
                    raise
                if len(places) == 1:
                    raise _too_large(round, clients.names[int(ids[places])]) from problem
                self.chunk = len(places) // 2
                return False  # tried again elsewhere: while the exception is held, so is the memory
            return True

        sizes = [clients.sizes["train"][i] for i in ids.tolist()]
        # Forward, and gradients of weights and of inputs.
        workers, each = self._crew(6 * model.layout.size * min(training.batch, max(sizes)) * len(ids), len(ids))
        chunks = []
        for group in alike(sizes, self.chunk * workers):
            if sizes[group[0]] == sizes[group[-1]]:  # neighbours, whose rows are taken and put without a copy
                chunks += [group[i * len(group) // workers : (i + 1) * len(group) // workers] for i in range(workers)]
            else:  # about as much work in every chunk
                chunks += [group[i::workers] for i in range(workers)]
        _spread(workers, each, model, [chunk for chunk in chunks if chunk], run)
        return found.tree()

    def _crew(self, step: int, clients: int) -> tuple[int, int]:
        """How many workers, and the threads of each, for so many clients and operations in a step of all of them."""
        pairs = max(1, self.threads // PAIR) if self.fused else 1
        allowed = max(1, min(pairs, step // GRAIN))
        workers = min(allowed, clients)
        return workers, self.threads // pairs * (allowed // workers)


def alike(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of clients with about as many examples, sizes: [K], in groups of `most` at most.

    Filled up to the size of its largest client, a group is at most twice what it was, or small.
    """
    group: list[int] = []
    total = 0
    for place in sorted(range(len(sizes)), key=sizes.__getitem__):
        filled = (len(group) + 1) * sizes[place]
        if group and (len(group) == most or filled > max(FEW, 2 * (total + sizes[place]))):
            yield group
            group, total = [], 0
        group.append(place)
        total += sizes[place]
    yield group


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
        if problems:
            try:
                raise min(problems, key=lambda problem: isinstance(problem, CancelledError))
            finally:  # this frame is in the traceback: what it still held would be a ring, and keep all examples alive
                del problems, problem, done


class Gathered:
    """Gathers clients' trees as one tree [K, ...], whose tables `room(K, like)` makes."""

    def __init__(self, count: int, room: Callable[[int, Tensor], Tensor] = blank) -> None:
        self._count, self._room, self._lock = count, room, threading.Lock()
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
            return self._room(self._count, leaf.unsqueeze(0))
        whole = len(leaf) == self._count and isinstance(place, slice)
        return leaf if whole and leaf.is_contiguous() else self._room(self._count, leaf)

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


def _too_large(round: int, name: str) -> RunError:
    return RunError(
        f"round {round + 1}: the device's memory does not hold the training of a single client, {name}; "
        "use a smaller batch or --device cpu"
    )


def _line(problem: Exception) -> str:
    """An exception in one line."""
    said = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {said[0]}" if said else type(problem).__name__
