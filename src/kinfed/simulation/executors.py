"""Executors: one client's program run for many clients, one by one on workers or as one batched program."""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from ..core import trees
from ..core.batches import Rows
from ..core.client import Trainers
from ..core.model import Model
from ..core.rows import index
from ..core.trainers import EagerTrainer, FunctionalTrainer
from ..core.training import Training
from ..core.trees import Axis, Tree
from ..errors import RunError, UsageError, is_out_of_memory, lacks_gpu_memory
from ..ops.fused import Fused
from ..ops.fused.trainer import FusedTrainer
from .client_tables import Gathered
from .clients import Clients
from .workers import group_by_size, spread

GRAIN = 1 << 24  # operations of a training step that are worth a worker: in less, workers mostly wait for Python
PAIR = 2  # threads of a fused worker: two share an operation, where two workers would wait for one Python
# PyTorch would warn of recurrent layers, which vmap takes apart; `auto` looks for that by itself (choosing.py).
torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
Program = Callable[..., Tree]  # a client, its private state and what it received -> a tree of results


class Executor(Protocol):
    """Runs a program once for each client; results are [K, ...], in the order of ids: [K].

    `states` are tables [K, ...]; `sent` is a message to the cohort, see `kinfed.core.trees`. What is shared in it is
    the same tensor in every client's program.
    """

    name: str
    trainers: Trainers  # how `Client.descend` trains, the first choice first

    def __call__(
        self,
        clients: Clients,
        model: Model,
        training: Training,
        round: int,
        ids: Tensor,
        program: Program,
        states: Tree = (),
        sent: Tree = (),
    ) -> Tree: ...


class Loop:
    """Client by client, on one-thread workers, by default one per core.

    With fewer clients than workers each worker gets more threads. On a CPU results are the same bits for any number of
    workers as long as each has one thread. An exception in a client's program ends all and is raised as one line.
    """

    name = "loop"

    def __init__(self, workers: int) -> None:
        self.workers, self.trainers = workers, Trainers(general=EagerTrainer())

    def __call__(
        self,
        clients: Clients,
        model: Model,
        training: Training,
        round: int,
        ids: Tensor,
        program: Program,
        states: Tree = (),
        sent: Tree = (),
    ) -> Tree:
        members, results = ids.tolist(), Gathered(len(ids))

        def run(model: Model, place: int, halt: threading.Event) -> None:
            client = clients.get_client(members[place], round, model, training, self.trainers, halt)
            try:
                state = tree_map(lambda table: table[place], states)
                results.put(place, program(client, state, trees.pick(sent, place)))
            except (UsageError, RunError, CancelledError, Warning):
                raise
            except Exception as problem:
                name = clients.names[members[place]]
                if is_out_of_memory(problem):
                    raise _too_large(round, [name], problem) from problem
                raise RunError(f"round {round + 1}: client {name}: {_line(problem)}") from problem

        # The largest clients come first, so that no worker is left with a large one at the end.
        places = sorted(range(len(members)), key=lambda place: -clients.sizes["train"][members[place]])
        count = min(self.workers, len(places))
        spread(count, self.workers // count, model, places, run)
        return results.tree()


class Batched:
    """`chunk` clients at a time as one program, with `torch.func.vmap`. On an accelerator that runs out of memory the
    chunk is halved until it fits.

    Given a model's fused form, local training uses it where possible (`kinfed.ops.fused`), and `threads` are divided
    among as many workers as there is work for, with two threads or more each.
    """

    def __init__(self, chunk: int, name: str = "vmap", threads: int = 1, fused: Fused | None = None) -> None:
        self.chunk, self.name, self.threads, self.fused = chunk, name, threads, fused
        preferred = () if fused is None else (FusedTrainer(fused),)
        self.trainers = Trainers(*preferred, general=FunctionalTrainer())

    def __call__(
        self,
        clients: Clients,
        model: Model,
        training: Training,
        round: int,
        ids: Tensor,
        program: Program,
        states: Tree = (),
        sent: Tree = (),
    ) -> Tree:
        results = Gathered(len(ids))
        dims = (0, 0, 0, 0, tree_map(lambda axis: None if axis is Axis.SHARED else 0, trees.axes(sent)))

        def run(model: Model, places: Sequence[int], halt: threading.Event | None = None) -> None:
            todo = deque([places])
            while todo:
                part = todo.popleft()
                if len(part) > self.chunk or not fits(model, part):
                    chunk = self.chunk
                    todo.extendleft(part[i : i + chunk] for i in reversed(range(0, len(part), chunk)))

        def fits(model: Model, places: Sequence[int]) -> bool:
            at = index(places, ids.device)
            batch = clients.several(ids[at])

            def together(tag: Tensor, rows: dict[str, Rows], noise: Tensor, state: Tree, received: Tree) -> Tree:
                member = batch._replace(tag=tag, rows=rows, noise=noise)
                return program(clients.make_client(member, round, model, training, self.trainers), state, received)

            own_states = tree_map(lambda table: table[at], states)
            try:
                results.put(at, vmap(together, in_dims=dims)(*batch[:3], own_states, trees.pick(sent, at)))
            except (UsageError, RunError, CancelledError):
                raise
            except Exception as problem:
                if str(problem).startswith("vmap: "):
                    raise _not_batchable(problem) from problem
                if not is_out_of_memory(problem):
                    raise RunError(
                        f"round {round + 1}: {_line(problem)}; executor 'loop' trains client by client, and names one"
                    ) from problem
                if len(places) == 1 or not lacks_gpu_memory(problem):  # on a CPU another chunk would change the bits
                    raise _too_large(round, [clients.names[i] for i in ids[at].tolist()], problem) from problem
                self.chunk = len(places) // 2
                return False  # retried by the caller: the exception still holds the memory here
            return True

        sizes = [clients.sizes["train"][i] for i in ids.tolist()]
        # Forward, and gradients of weights and of inputs.
        workers, per_worker = self._crew(
            6 * model.layout.whole.size * min(training.batch, max(sizes)) * len(ids), len(ids)
        )
        chunks = []
        for group in group_by_size(sizes, self.chunk * workers):
            if sizes[group[0]] == sizes[group[-1]]:  # neighbours, whose rows are taken and put without a copy
                chunks += [group[i * len(group) // workers : (i + 1) * len(group) // workers] for i in range(workers)]
            else:  # about as much work in every chunk
                chunks += [group[i::workers] for i in range(workers)]
        spread(workers, per_worker, model, [chunk for chunk in chunks if chunk], run)
        return results.tree()

    def _crew(self, step: int, clients: int) -> tuple[int, int]:
        """How many workers, and the threads of each, for so many clients and operations in a step of all of them."""
        pairs = max(1, self.threads // PAIR) if self.fused else 1
        allowed = max(1, min(pairs, step // GRAIN))
        workers = min(allowed, clients)
        return workers, self.threads // pairs * (allowed // workers)


def _too_large(round: int, names: list[str], problem: BaseException) -> RunError:
    whom = f"a single client, {names[0]}" if len(names) == 1 else f"{len(names)} clients at once"
    instead = "how.executor=loop" if len(names) > 1 else "a smaller model"
    if lacks_gpu_memory(problem):
        instead = "--device cpu"
    return RunError(
        f"round {round + 1}: the device's memory is too small to train {whom}; use a smaller batch or {instead}"
    )


def _not_batchable(problem: Exception) -> UsageError:
    """The line of client code that PyTorch cannot batch over clients."""
    library = str(Path(torch.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if not frame.filename.startswith(library)]
    return UsageError(
        f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: this cannot be batched over clients "
        f"({str(problem).removeprefix('vmap: ').partition('. ')[0]}); use torch.where for an `if`, .item() or a "
        "boolean index, client.noise for random numbers, or the executor 'loop'"
    )


def _line(problem: Exception) -> str:
    """An exception in one line."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
