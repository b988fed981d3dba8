"""Batches: which examples each of a client's steps uses, for one client and for many that run as one program."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from functools import cached_property
from typing import NamedTuple, overload

import torch
from torch import Tensor

from .metrics import weighted_mean
from .seeding import fold, fold_numbers, key, number


class Ragged(Sequence[Tensor]):
    """The rows of N clients, one client's after another's; the view of each is made when it is asked for."""

    def __init__(self, flat: Tensor, sizes: Tensor) -> None:
        """flat: [n, ...] holds those of sizes: [N] int64, which sum to n."""
        self.flat, self.sizes = flat, sizes
        self._ends = sizes.cumsum(0)

    @classmethod
    def join(cls, parts: Sequence[Tensor]) -> "Ragged":
        """The same numbers as these parts: [n_i, ...], whose views are not kept."""
        return parts if isinstance(parts, cls) else cls(torch.cat(list(parts)), torch.tensor([len(p) for p in parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> list[Tensor]: ...
    def __getitem__(self, at: int | slice) -> Tensor | list[Tensor]:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        end = int(self._ends[at])
        return self.flat[end - int(self.sizes[at]) : end]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.sizes.tolist()))

    def to(self, device: torch.device) -> "Ragged":
        """The same on a device; where the rows begin stays on the CPU."""
        return self if self.flat.device == device else Ragged(self.flat.to(device), self.sizes)


class Examples(NamedTuple):
    """A client's examples of one split; rows past its own count are copies with weight 0."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n, ...]
    weight: Tensor  # [n] as how many rows each counts: its example weight, 1 without any

    def mean(self, values: Tensor) -> Tensor:
        """[] mean of values: [n] by weight."""
        return weighted_mean(values, self.weight)


class Batch(NamedTuple):
    """One step's examples."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B, ...]
    weight: Tensor | None  # [B] 1 on real rows; None when all are
    valid: Tensor | None  # [] bool, False past the client's last step; None when always True
    key: Tensor  # [] int64, for the model's own randomness in this step
    importance: Tensor | None = None  # [B] example weights over the mean of the client's; None: all count alike

    def keep(self, old: Tensor, new: Tensor) -> Tensor:
        """`new`, or `old` if this step is past the client's last."""
        return new if self.valid is None else torch.where(self.valid, new, old)

    def mean(self, values: Tensor) -> Tensor:
        """[] mean over the real rows of values: [B] times their importance.

        Over batches that are drawn at random its expectation is the mean by weight of all the client's examples. A
        mean by weight within each batch would not be: of one row it would be that row's value, whatever its weight.
        """
        values = values if self.importance is None else values * self.importance
        return values.mean() if self.weight is None else weighted_mean(values, self.weight)


class Plan(NamedTuple):
    """Which examples the steps use, for clients that run together."""

    place: Tensor  # [T, B] int64 positions in the client's training rows
    weight: Tensor  # [T, B] 1 on real rows, 0 on those that only fill a batch up
    valid: Tensor  # [T] bool, False past the client's last step


class Rows(NamedTuple):
    """A client's rows of the pool for one split, filled up to a common length with its own."""

    at: Tensor  # [n] int64
    size: Tensor  # [] int64, how many are real


def is_real(rows: Rows) -> Tensor:
    """[..., n] bool: which of the rows do not only fill up."""
    return torch.arange(rows.at.shape[-1], device=rows.at.device) < rows.size[..., None]


class Member(NamedTuple):
    """Who a client is among those that a program runs for at once."""

    tag: Tensor  # [] int64, see `kinfed.core.seeding`
    rows: dict[str, Rows]
    noise: Tensor  # [] of this client's steps over the clip, see `kinfed.core.private.privacy`
    sizes: tuple[int, ...]  # the training sizes of all of them
    tags: Tensor  # [K] int64 of all of them


class Pool(NamedTuple):
    """All examples, into which rows point."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None  # [n] as how many rows each counts; None: all as one


class Draw(NamedTuple):
    """A request for shuffled batches."""

    number: int  # among the client's requests of this round: each is shuffled anew
    epochs: int
    steps: int | None  # exactly this many, in place of the epochs
    size: int  # examples in a batch


class Shuffler:
    """A client's training rows in the order in which its steps use them.

    `draw_alone` and `draw_together` give the same batches: the first for a single client, whose tag and size Python may
    read, the second for clients that run as one program, with `sizes` the number of training examples of each.
    """

    def __init__(
        self,
        pool: Pool,
        rows: Rows,
        sizes: tuple[int, ...],
        tag: Tensor,
        round: int,
        seed: int,
        dtype: torch.dtype,
        halt: threading.Event | None,
    ) -> None:
        self.pool, self.rows, self.sizes = pool, rows, sizes
        self._tag, self._round, self._seed, self._dtype = tag, round, seed, dtype
        self.halt = halt  # set when the run ends early: `draw_alone` then stops at its next batch

    def draw_alone(self, draw: Draw) -> Iterator[Batch]:
        """The batches of a single client."""
        x, y, _ = self.pool
        start = fold_numbers(number(self._seed, "batches", self._round, draw.number), int(self._tag))
        steps = -(-self.sizes[0] // draw.size)  # steps in one epoch
        total = draw.epochs * steps if draw.steps is None else draw.steps
        epochs = -(-total // steps)
        counters = [*range(epochs), *range(-1, -1 - total, -1)]  # of epochs, then of steps
        drawn = torch.tensor([fold_numbers(start, i) for i in counters], dtype=torch.int64, device=x.device)
        epoch_keys, keys = drawn[:epochs], drawn[epochs:]
        order = self.rows.at[_random_keys(epoch_keys, len(self.rows.at)).argsort(stable=True)]
        parts = [part.unbind() for part in order.split(draw.size, dim=1)]
        ordered = (at for epoch in zip(*parts, strict=True) for at in epoch)
        for at, step_key in zip(ordered, keys.unbind(), strict=False):  # exactly `steps` may end within an epoch
            if self.halt is not None and self.halt.is_set():
                raise CancelledError
            yield Batch(x.index_select(0, at), y.index_select(0, at), None, None, step_key, self.importance(at))

    def draw_together(self, draw: Draw) -> Iterator[Batch]:
        """One client's batches under vmap, with as many steps and rows as the longest of all `sizes` has."""
        plan = self.plan(draw)
        keys = fold(self._start(draw), ~torch.arange(len(plan.valid), device=self._tag.device))
        epoch_steps, totals = self._lengths(draw)
        for t in range(len(plan.valid)):
            # How many real rows clients have in this step; known to Python, without reading a tensor.
            real = [
                min(draw.size, n - (t % steps) * draw.size) if t < total else 0
                for n, steps, total in zip(self.sizes, epoch_steps, totals, strict=True)
            ]
            most, least = max(real), min(real)
            now = self.rows.at[plan.place[t, :most]]
            yield Batch(
                self.pool.x[now],
                self.pool.y[now],
                plan.weight[t, :most] if least < most else None,
                plan.valid[t] if least == 0 else None,
                keys[t],
                self.importance(now),
            )

    def plan(self, draw: Draw) -> Plan:
        """All steps of `draw_together` at once."""
        epoch_steps, totals = self._lengths(draw)
        epoch_count = max(-(-total // steps) for total, steps in zip(totals, epoch_steps, strict=True))
        (at, count), size = self.rows, draw.size
        step = torch.arange(max(totals), device=count.device)
        random_keys = _random_keys(fold(self._start(draw), torch.arange(epoch_count, device=count.device)), len(at))
        real = is_real(self.rows)
        order = torch.where(real, random_keys, 1 << 62).argsort(stable=True)  # the real ones come first
        steps_per_epoch = -(-count // size)
        position = (step % steps_per_epoch * size)[:, None] + torch.arange(size, device=count.device)  # [T, B]
        epoch = (step // steps_per_epoch).clamp(max=epoch_count - 1)
        place = order.view(-1)[epoch[:, None] * order.shape[1] + position % count]
        valid = step < (steps_per_epoch * draw.epochs if draw.steps is None else draw.steps)
        return Plan(place, ((position < count) & valid[:, None]).to(self._dtype), valid)

    def importance(self, at: Tensor) -> Tensor | None:
        """The weights of the pool's rows at: [...] over their mean in the client's own; None without weights."""
        return None if self.pool.weight is None else self.pool.weight[at] / self._mean_weight

    @cached_property
    def _mean_weight(self) -> Tensor:
        """[] of the client's own training rows."""
        assert self.pool.weight is not None
        weights, real = self.pool.weight[self.rows.at], is_real(self.rows)
        return (weights * real).sum() / self.rows.size.clamp(min=1)

    def _start(self, draw: Draw) -> Tensor:
        """[] int64: the key of a draw's random numbers."""
        return fold(key(self._seed, "batches", self._round, draw.number, device=self._tag.device), self._tag)

    def _lengths(self, draw: Draw) -> tuple[list[int], list[int]]:
        """For every client, the steps of an epoch and those of the draw."""
        epoch_steps = [-(-n // draw.size) for n in self.sizes]
        return epoch_steps, [draw.epochs * steps if draw.steps is None else draw.steps for steps in epoch_steps]


def _random_keys(keys: Tensor, count: int) -> Tensor:
    """[epochs, count] random numbers, whose order is that of the rows in each epoch, from keys: [epochs]."""
    return fold(keys[:, None], torch.arange(count, device=keys.device)) & 0x3FFFFFFFFFFFFFFF
