"""Distributed: one run in several processes, started by torchrun; each simulates its share of the clients.

Every process holds the private states of its own clients alone, takes part in every round and keeps the server's state,
which is the same in all. The first one leads: it alone holds the clients' models, writes files and speaks.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ..core import trees
from ..core.fleet import Evaluation
from ..core.method import Roster
from ..core.seeding import tags
from ..core.trees import Axis, Tree
from ..data.federation import Federation
from ..errors import RunError, UsageError, explain
from .execution import Execution
from .simulation import Simulation


@contextmanager
def group() -> Iterator[None]:
    """Meet the other processes that torchrun started, if it did; part from them at the end."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo", timeout=timedelta(hours=6))  # a process may have much more to do than another
    try:
        yield
    except (UsageError, RunError) as problem:
        if leads():
            raise
        raise SystemExit(2 if isinstance(problem, UsageError) else 1) from None  # the leader says what it was
    except KeyboardInterrupt as stop:
        if leads():
            raise
        raise SystemExit(explain(stop)[0]) from None
    finally:
        dist.destroy_process_group()


def is_on() -> bool:
    """Whether there are other processes."""
    return dist.is_available() and dist.is_initialized()


def leads() -> bool:
    """Whether this is the process that writes and speaks."""
    return not is_on() or dist.get_rank() == 0


def agree(value: Any) -> Any:
    """The leader's value, once every process is here."""
    if not is_on():
        return value
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values[0]


class Distributed:
    """A fleet around a Simulation of this process's share of the clients; takes the same arguments."""

    def __init__(
        self, federation: Federation, *arguments: Any, execution: Execution = Execution(), **settings: Any
    ) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.names = federation.names
        if len(federation) < self._world:
            raise UsageError(f"{self._world} processes are too many for {len(federation)} clients")
        self._everyone = torch.arange(len(federation))
        self._mine = self._everyone[self._everyone % self._world == self._rank]
        share = self._share(federation)
        mine: Simulation = self._together(lambda: Simulation(share, *arguments, execution=execution, **settings))
        # Its share of the clients may have led another process to another executor.
        leader = agree(mine.how)
        alike = replace(execution, executor=leader["executor"], chunk=leader["chunk"])
        same = all(mine.how[name] == leader[name] for name in ("executor", "chunk"))
        self._local = self._together(
            lambda: mine if same else Simulation(share, *arguments, execution=alike, **settings)
        )
        self.device, self.how, self.executor = self._local.device, self._local.how, self._local.executor
        self.states = _States(self)

    @property
    def reason(self) -> str:
        """Why this executor."""
        return f"{self._local.reason}; clients are shared by {self._world} processes"

    @reason.setter
    def reason(self, why: str) -> None:
        self._local.reason = why

    def roster(self, graph: Any = None) -> Roster:
        """What the server knows before round 1."""
        mine = self._together(lambda: self._local.roster())
        sizes, said = self._gather(self._everyone, (mine.sizes, mine.client_statistics), everywhere=True)
        return Roster(
            mine.theta,
            mine.layout,
            sizes,
            mine.training,
            mine.seed,
            tags(self.names).to(self.device),
            graph,
            said,
        )

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Local training of the cohort: [K], each client in the process that holds it."""
        place, ids = self._part(cohort)

        def work() -> Tree:
            return self._local.train(round, ids, trees.pick(sent, place))[1] if len(ids) else None

        return cohort, self._gather(cohort, self._together(work), everywhere=True)

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation:
        """Scores of the cohort's models; the models themselves for the leader alone."""
        place, ids = self._part(cohort)

        def work() -> Any:
            return self._local.evaluate(round, ids, trees.pick(sent, place)) if len(ids) else None

        found = self._together(work)
        scores = self._gather(cohort, found and found.scores, everywhere=True)
        made = self._together(lambda: found and dict(found.models))  # again, where they were too large to be kept
        models = self._gather(cohort, made, everywhere=False, axes=trees.axes)
        return Evaluation(scores, models or {})

    def _share(self, federation: Federation) -> Federation:
        """This process's clients. The whole federation has been checked; a part of it need not pass by itself."""
        part = copy.copy(federation)
        rows = {split: [parts[i] for i in self._mine.tolist()] for split, parts in federation.rows.items()}
        for name, value in (("rows", rows), ("names", [self.names[i] for i in self._mine.tolist()]), ("graph", None)):
            object.__setattr__(part, name, value)
        return part

    def _part(self, cohort: Tensor) -> tuple[Tensor, Tensor]:
        """Where in the cohort: [K] this process's clients are, and their ids in its own simulation."""
        place = (cohort % self._world == self._rank).nonzero().squeeze(1)
        return place, cohort[place] // self._world

    def _together(self, work: Callable[[], Any]) -> Any:
        """Do one's own share; if any process fails, all raise, lest the others wait for it."""
        result, problem = None, None
        try:
            result = work()
        except Exception as raised:
            problem = raised
        problems: list[Any] = [None] * self._world
        told = problem if isinstance(problem, RunError | UsageError) else problem and RunError(repr(problem))
        dist.all_gather_object(problems, told)
        first = next((p for p in problems if p is not None), None)
        if first is not None:
            raise first from problem
        return result

    def _gather(
        self,
        cohort: Tensor,
        mine: Tree,
        everywhere: bool,
        axes: Callable[[Tree], Tree] = lambda tree: tree_map(lambda _: Axis.PER_CLIENT, tree),
    ) -> Tree:
        """[K, ...] in the order of the cohort, from each process's rows; None for followers unless `everywhere`."""
        cohort = cohort.cpu()  # as the rows are that travel
        forms: list[Any] = [None] * self._world
        dist.all_gather_object(forms, mine is not None and tree_map(lambda t: torch.empty_like(t, device="meta"), mine))
        parts: dict[int, Tree] = {}
        for rank, form in enumerate(forms):
            if form is False:
                continue
            at = ((cohort % self._world) == rank).nonzero().squeeze(1)

            def receive(like: Tensor, rank: int = rank) -> Tensor:
                table = torch.empty(like.shape, dtype=like.dtype)
                dist.broadcast(_plain(table), rank) if everywhere else dist.recv(_plain(table), rank)
                return table

            def give(t: Tensor) -> Tensor:
                t = t.detach().cpu().contiguous()
                if everywhere:
                    dist.broadcast(_plain(t), self._rank)
                elif self._rank:
                    dist.send(_plain(t), 0)
                return t

            if rank == self._rank:
                parts[rank] = at, tree_map(give, mine)
            elif everywhere or self._rank == 0:
                parts[rank] = at, tree_map(receive, form)
        if not everywhere and self._rank:
            return None
        order = torch.cat([at for at, _ in parts.values()]).argsort()

        def join(axis: Axis, *rows: Tensor) -> Tensor:
            return (rows[0] if axis is Axis.SHARED else torch.cat(rows)[order]).to(self.device)

        every = [rows for _, rows in parts.values()]
        return tree_map(join, axes(every[0]), *every)


class _States:
    """The private states of all processes' clients, as one process would keep them."""

    def __init__(self, fleet: Distributed) -> None:
        self._fleet, self._own = fleet, fleet._local.states
        self.settle, self.undo = self._own.settle, self._own.undo

    def keep(self) -> tuple[Tensor, Tree]:
        """Ids and states of all clients that have one, for the leader; for the others, those of their own."""
        fleet = self._fleet
        local, states = self._own.keep()
        ids = fleet._mine[local.cpu()]
        known: list[Any] = [None] * fleet._world
        dist.all_gather_object(known, ids)
        everyone = torch.cat(known).sort().values
        if not len(everyone):
            return everyone, states
        states = tree_map(lambda table: table[:], states)
        whole = fleet._gather(everyone, states if len(ids) else None, everywhere=False)
        return (everyone, whole) if fleet._rank == 0 else (ids, states)

    def restore(self, kept: tuple[Tensor, Tree]) -> None:
        """Become the states that `keep` gave to the leader."""
        ids, states = kept[0], tree_map(lambda t: t[:], kept[1])
        place, local = self._fleet._part(ids.cpu())
        self._own.restore((local.to(self._fleet.device), tree_map(lambda t: t[place.to(t.device)], states)))


def _plain(t: Tensor) -> Tensor:
    """The same memory as a type that travels: booleans do not."""
    return t.view(torch.uint8) if t.dtype == torch.bool else t
