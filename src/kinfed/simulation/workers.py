"""Threads that share the clients of a round."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..core.model import Model


def group_by_size(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
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


FEW = 512  # examples that may be filled up to without regard

Item = TypeVar("Item")


def spread(
    count: int,
    per_worker: int,
    model: Model,
    items: Sequence[Item],
    run: Callable[[Model, Item, threading.Event], None],
) -> None:
    """Run all items, in this order, on workers of so many threads each, who have a model of their own."""
    halt = threading.Event()
    with threads(per_worker):
        if count == 1:
            for item in items:
                run(model, item, halt)
            return
        queue = deque(items)

        def work(model: Model) -> None:
            torch.set_num_threads(per_worker)  # OpenMP counts for each thread
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


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch uses this many threads within an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
