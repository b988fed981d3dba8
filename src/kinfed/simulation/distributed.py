"""Distributed: one run in several processes, started by torchrun; each simulates its share of the clients.

Every process holds the examples and private states of its own clients alone, takes part in every round and keeps the
server's state, which is the same in all. The first one is the leader: it alone holds the clients' models, writes files
and prints.
"""

import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ..core import trees
from ..core.batches import Ragged
from ..core.fleet import Evaluation
from ..core.method import Roster
from ..core.private.private_sums import protects_clients
from ..core.rows import Part
from ..core.seeding import tags
from ..core.training import Training
from ..core.trees import Axis, Tree
from ..data.federation import Federation
from ..errors import RunError, UsageError, explain
from .devices import pick_device
from .execution import Execution
from .privacy_budget import BY_CLIENT
from .simulation import Simulation


@contextmanager
def group() -> Iterator[None]:
    """Join the process group if torchrun started several processes; leave it at the end."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2 or is_on():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo", timeout=timedelta(hours=6))  # one process may have much more work than another
    try:
        yield
    except (UsageError, RunError) as problem:
        if leads() or isinstance(problem, ProcessLost):  # the leader may be the one that is lost
            raise
        raise SystemExit(2 if isinstance(problem, UsageError) else 1) from None  # the leader reports it
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
    """Whether this is the leader, the process that writes and prints."""
    return not is_on() or dist.get_rank() == 0


def agree(value: Any) -> Any:
    """The leader's value, once every process has called this."""
    if not is_on():
        return value
    return share_objects(value)[0]


def share_objects(part: Any) -> list[Any]:
    """What each process gives, in their order."""
    parts: list[Any] = [None] * dist.get_world_size()
    with _detect_loss():
        dist.all_gather_object(parts, part)
    return parts


class ProcessLost(RunError):
    """Another process of the run is no longer there, so that nothing can be done together any more."""


@contextmanager
def _detect_loss() -> Iterator[None]:
    """A block that talks to the other processes; raises ProcessLost if one has ended."""
    try:
        yield
    except RuntimeError as problem:
        if "gloo" not in str(problem):
            raise
        raise ProcessLost(
            "another process of the run ended in the middle of it, as by a signal or for lack of memory; the last "
            "checkpoint is kept, and kinfed resume FOLDER goes on from it"
        ) from problem


def run_together(work: Callable[[], Any]) -> Any:
    """Do this process's share; if any process fails, all raise, so that none waits for it."""
    result, problem = None, None
    try:
        result = work()
    except Exception as raised:
        problem = raised
    reported = problem if isinstance(problem, RunError | UsageError) else problem and RunError(repr(problem))
    first = next((p for p in share_objects(reported) if p is not None), None)
    if first is not None:
        raise first from problem
    return result


def build_once(build: Callable[[], Federation]) -> Federation:
    """What `build` returns, of which a machine holds one copy: in a file that its processes map.

    The first process of each machine builds it and writes the file, which has no name any more once all have mapped it.
    Pages are in memory from when they are touched until the system needs the room, so a process has those of its own
    clients. Raises RunError in all processes if there is no room for the file, or what `build` raises.
    """
    if not is_on():
        return build()
    machine = platform.node(), os.environ.get("GROUP_RANK")  # of torchrun
    with tempfile.TemporaryDirectory(prefix="kinfed-") as folder:
        path = Path(folder) / "federation.pt"
        first = int(os.environ.get("LOCAL_RANK", 0)) == 0
        run_together(lambda: _write(build(), path) if first else None)
        paths = {where: written for where, written, leads in share_objects((machine, path, first)) if leads}
        return run_together(lambda: torch.load(paths[machine], mmap=True, weights_only=False))


def _write(federation: Federation, path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(federation, file)
    except (OSError, RuntimeError) as problem:  # PyTorch's, in the place of the file's
        problem = problem.__context__ if isinstance(problem.__context__, OSError) else problem
        size = sum(t.untyped_storage().nbytes() for t in (federation.x, federation.y)) / 1e9
        raise RunError(
            f"no room for the {size:.3g} GB of examples, which processes share in a file of {path.parent.parent}: "
            f"{getattr(problem, 'strerror', problem)}; free some, or set TMPDIR to a folder on a larger disk"
        ) from None


def take_examples(
    rows: dict[str, Ragged], pool: dict[str, Tensor | None]
) -> tuple[dict[str, Ragged], dict[str, Tensor | None]]:
    """Rows of clients by split, and tables: [n, ...] of a pool of which nothing is left but these rows.

    Windows, which overlap in memory, stay where they are, as copies would take more room than all readings.
    """
    if any(t is not None and t.numel() * t.element_size() > t.untyped_storage().nbytes() for t in pool.values()):
        return rows, pool
    taken, place = torch.cat([part.flat for part in rows.values()]).unique(return_inverse=True)
    places = place.split([len(part.flat) for part in rows.values()])
    moved = {split: Ragged(at, part.sizes) for (split, part), at in zip(rows.items(), places, strict=True)}
    return moved, {name: None if t is None else t[taken] for name, t in pool.items()}


class Distributed:
    """A fleet around a Simulation of this process's share of the clients; takes the same arguments."""

    def __init__(
        self, federation: Federation, *arguments: Any, execution: Execution = Execution(), **settings: Any
    ) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.names = federation.names
        for training in (part for part in arguments if isinstance(part, Training) and protects_clients(part)):
            assert training.noise is not None
            training.noise.check_count(len(federation))
        if len(federation) < self._world:
            raise UsageError(
                f"{self._world} processes are too many for {len(federation)} clients; start at most one per client"
            )
        self._everyone = torch.arange(len(federation))
        self._own_ids = self._everyone[self._everyone % self._world == self._rank]
        share = self._share(federation, pick_device(execution.device))
        local: Simulation = run_together(lambda: Simulation(share, *arguments, execution=execution, **settings))
        # With other clients, another process may have chosen another executor.
        leader = agree(local.how)
        adopted = replace(execution, executor=leader["executor"], chunk=leader["chunk"])
        same = all(local.how[name] == leader[name] for name in ("executor", "chunk"))
        self._local = run_together(
            lambda: local if same else Simulation(share, *arguments, execution=adopted, **settings)
        )
        self.device, self.how, self.executor = self._local.device, self._local.how, self._local.executor
        self.states = _States(self)

    @property
    def reason(self) -> str:
        """Why this executor was chosen."""
        return f"{self._local.reason}; clients are divided among {self._world} processes"

    @reason.setter
    def reason(self, why: str) -> None:
        self._local.reason = why

    def describe_privacy(self, rounds: Sequence[int]) -> dict[str, Any] | None:
        """What uploads may reveal and have cost after so many rounds of each client, as of a single process."""
        local, ids = self._local, self._own_ids.tolist()
        if local.budget:  # without a client of its own in any round a process does not know what a round takes
            plans = share_objects(local.budget.draws)
            local.budget.draws = next((draws for draws in plans if draws is not None), None)
        if local.client_budget:
            local.client_budget.uploads = all(share_objects(local.client_budget.uploads))
        parts = share_objects(local.describe_privacy([rounds[i] for i in ids]))
        if parts[0] is None:
            return None
        joined: dict[str, Any] = dict(parts[0])
        for name in BY_CLIENT:
            joined[name] = [parts[i % self._world][name][i // self._world] for i in range(len(self.names))]
        return joined

    def roster(self, graph: Any = None) -> Roster:
        """What the server knows before round 1."""
        local = run_together(lambda: self._local.roster())
        weights = () if local.example_weights is None else local.example_weights
        gathered = self._gather(self._everyone, (local.sizes, local.client_statistics, weights), everywhere=True)
        sizes, statistics, weights = gathered
        return Roster(
            theta=local.theta,
            layout=local.layout,
            sizes=sizes,
            training=local.training,
            seed=local.seed,
            tags=tags(self.names).to(self.device),
            graph=graph,
            client_statistics=statistics,
            task=local.task,
            example_weights=None if local.example_weights is None else weights,
            columns=local.columns,
        )

    def train(self, round: int, cohort: Tensor, sent: Tree) -> tuple[Tensor, Tree]:
        """Local training of the cohort: [K], each client in the process that holds it."""
        place, ids = self._part(cohort)

        def work() -> Tree:
            return self._local.train(round, ids, trees.pick(sent, place))[1] if len(ids) else None

        return cohort, self._gather(cohort, run_together(work), everywhere=True)

    def evaluate(self, round: int, cohort: Tensor, sent: Tree) -> Evaluation:
        """Scores of the cohort's models; only the leader receives the models themselves."""
        place, ids = self._part(cohort)

        def work() -> Any:
            return self._local.evaluate(round, ids, trees.pick(sent, place)) if len(ids) else None

        result = run_together(work)
        scores = self._gather(cohort, result and result.scores, everywhere=True)
        own_models = run_together(lambda: result and _read(result.models))
        models = self._gather(cohort, own_models, everywhere=False, axes=trees.axes)
        local = result and (() if result.shares is None else (result.shares,))
        shares = self._gather(cohort, local, everywhere=True)
        return Evaluation(scores, models or {}, *shares)

    @property
    def own_ids(self) -> Tensor:
        """[M] the clients that this process simulates."""
        return self._own_ids

    def answers(self, ids: Tensor, states: dict[str, Tensor], common: dict[str, Tensor], count: int) -> Tree:
        """What the models of some of these make of test examples, as `Simulation.answers`."""
        return self._local.answers((ids // self._world).to(self.device), states, common, count)

    def _share(self, federation: Federation, device: torch.device) -> Federation:
        """This process's clients. The whole federation has been checked; a part of it need not pass the checks.

        To another device than the CPU, where all examples are, go those of its own clients alone.
        """
        ids = self._own_ids.tolist()
        rows = {split: Ragged.join([parts[i] for i in ids]) for split, parts in federation.rows.items()}
        pool = {"x": federation.x, "y": federation.y, "weights": federation.weights}
        if device.type != "cpu":
            rows, pool = take_examples(rows, pool)
        names = [self.names[i] for i in ids]
        return federation.replace_unchecked(rows=rows, names=names, graph=None, **pool)

    def _part(self, cohort: Tensor) -> tuple[Tensor, Tensor]:
        """Where in the cohort: [K] this process's clients are, and their ids in its own simulation."""
        place = (cohort % self._world == self._rank).nonzero().squeeze(1)
        return place, cohort[place] // self._world

    def _gather(
        self,
        cohort: Tensor,
        rows: Tree,
        everywhere: bool,
        axes: Callable[[Tree], Tree] = lambda tree: tree_map(lambda _: Axis.PER_CLIENT, tree),
    ) -> Tree:
        """[K, ...] in the order of the cohort, from each process's rows; None for followers unless `everywhere`."""
        cohort = cohort.cpu()  # rows are sent between CPUs
        shapes = rows is not None and tree_map(lambda t: torch.empty_like(t, device="meta"), rows)
        parts: dict[int, Tree] = {}
        for rank, form in enumerate(share_objects(shapes)):
            if form is False:
                continue
            at = ((cohort % self._world) == rank).nonzero().squeeze(1)

            def receive(like: Tensor, rank: int = rank) -> Tensor:
                table = torch.empty(like.shape, dtype=like.dtype)
                dist.broadcast(_sendable_view(table), rank) if everywhere else dist.recv(_sendable_view(table), rank)
                return table

            def give(t: Tensor) -> Tensor:
                t = t.detach().cpu().contiguous()
                if everywhere:
                    dist.broadcast(_sendable_view(t), self._rank)
                elif self._rank:
                    dist.send(_sendable_view(t), 0)
                return t

            with _detect_loss():
                if rank == self._rank:
                    parts[rank] = at, tree_map(give, rows)
                elif everywhere or self._rank == 0:
                    parts[rank] = at, tree_map(receive, form)
        if not everywhere and self._rank:
            return None
        order = torch.cat([at for at, _ in parts.values()]).argsort()

        def join(axis: Axis, *pieces: Tensor) -> Tensor:
            return (pieces[0] if axis is Axis.SHARED else torch.cat(pieces)[order]).to(self.device)

        every = [tree for _, tree in parts.values()]
        return tree_map(join, axes(every[0]), *every)


class _States:
    """The private states of the clients of all processes, with the interface of one process's store."""

    def __init__(self, fleet: Distributed) -> None:
        self._fleet, self._own = fleet, fleet._local.states
        self.settle, self.undo = self._own.settle, self._own.undo

    def keep(self) -> tuple[Tensor, Tree]:
        """Ids and states of all clients that have one, for the leader; for the others, those of their own clients."""
        fleet = self._fleet
        local, states = self._own.keep()
        ids = fleet._own_ids[local.cpu()]
        everyone = torch.cat(share_objects(ids)).sort().values
        if not len(everyone):
            return everyone, states
        states = tree_map(lambda table: table[:], states)
        gathered = fleet._gather(everyone, states if len(ids) else None, everywhere=False)
        return (everyone, gathered) if fleet._rank == 0 else (ids, states)

    def restore(self, kept: tuple[Tensor, Tree]) -> None:
        """Restore the states that `keep` gave to the leader."""
        ids, states = kept[0], tree_map(lambda t: t[:], kept[1])
        place, local = self._fleet._part(ids.cpu())
        self._own.restore((local.to(self._fleet.device), tree_map(lambda t: t[place.to(t.device)], states)))


def _read(models: Mapping[str, Tree]) -> dict[str, Tree]:
    """Models by name, of which those that were too large to keep are computed now."""
    return {name: tree_map(lambda t: t[:] if isinstance(t, Part) else t, model) for name, model in models.items()}


def _sendable_view(t: Tensor) -> Tensor:
    """The same memory as a type that can be sent: booleans cannot."""
    return t.view(torch.uint8) if t.dtype == torch.bool else t
