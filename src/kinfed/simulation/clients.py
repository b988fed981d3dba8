"""The clients of a simulation: their rows of the pool."""

import copy
import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core.batches import Member, Pool, Ragged, Rows
from ..core.client import OPEN, Client, Trainers
from ..core.model import Model
from ..core.tasks import Task
from ..core.training import Training


class Clients:
    """The clients of a simulation: their rows of the pool by split, and what else their programs need."""

    def __init__(
        self,
        names: Sequence[str],
        tags: Tensor,
        rows: Mapping[str, Sequence[Tensor]],
        pool: Pool,
        task: Task,
        seed: int,
    ) -> None:
        self.names, self.tags, self.pool, self.task, self.seed = names, tags, pool, task, seed
        self.rows = {split: Ragged.join(parts) for split, parts in rows.items()}
        self.sizes = {split: parts.sizes.tolist() for split, parts in self.rows.items()}
        self._ragged = {split: _Padded(parts, self.sizes[split]) for split, parts in self.rows.items()}
        self.noise = torch.zeros(len(tags), device=tags.device)  # [N] of noised steps over the clip

    def __len__(self) -> int:
        return len(self.tags)

    def restrict(self) -> "Clients":
        """The same clients without the examples that are only for evaluation."""
        other = copy.copy(self)
        other._ragged = {split: ragged for split, ragged in self._ragged.items() if split in OPEN}
        return other

    def get_client(
        self, i: int, round: int, model: Model, training: Training, trainers: Trainers, halt: threading.Event | None
    ) -> Client:
        """Client i as its program sees itself."""
        rows = {split: ragged.get_rows(i) for split, ragged in self._ragged.items()}
        member = Member(self.tags[i], rows, self.noise[i], (self.sizes["train"][i],), self.tags[i : i + 1])
        return self.make_client(member, round, model, training, trainers, halt)

    def make_client(
        self,
        member: Member,
        round: int,
        model: Model,
        training: Training,
        trainers: Trainers,
        halt: threading.Event | None = None,
    ) -> Client:
        """A client as its program sees itself."""
        return Client(
            member,
            round,
            seed=self.seed,
            model=model,
            task=self.task,
            training=training,
            pool=self.pool,
            trainers=trainers,
            halt=halt,
        )

    def several(self, ids: Tensor) -> Member:
        """The clients ids: [k] at once: tags, rows and noise are tables, [k, ...], to be batched over."""
        members = ids.tolist()
        rows = {split: ragged.several(ids, members) for split, ragged in self._ragged.items()}
        return Member(
            self.tags[ids], rows, self.noise[ids], tuple(self.sizes["train"][i] for i in members), self.tags[ids]
        )


class _Padded:
    """Every client's rows, of several clients at once filled up to one length."""

    def __init__(self, parts: Ragged, sizes: list[int]) -> None:
        self.parts, self._flat, self._sizes = parts, parts.flat, sizes
        self._counts = parts.sizes.to(self._flat.device)
        self._begins = self._counts.cumsum(0) - self._counts

    def get_rows(self, i: int) -> Rows:
        return Rows(self.parts[i], self._counts[i])

    def several(self, ids: Tensor, members: list[int]) -> Rows:
        """at: [k, n] of the clients ids: [k], padded with the client's own rows; members are the ids as integers."""
        fill = torch.arange(max(self._sizes[i] for i in members), device=ids.device)
        count = self._counts[ids]
        at = self._begins[ids, None] + fill % count[:, None].clamp(min=1)
        return Rows(
            self._flat[at.clamp(max=max(len(self._flat) - 1, 0))], count
        )  # a client without rows gets arbitrary ones
