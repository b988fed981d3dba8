"""Client: what one client has at hand when it runs its half of a method."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from .errors import UsageError
from .model import Model
from .optimiser import SGD, Optimiser
from .seeding import fold, key, normal
from .tasks import Task

Penalty = Callable[[Tensor], Tensor]  # theta [d] -> []


@dataclass(frozen=True)
class Training:
    """How every client trains locally, unless its method says otherwise."""

    epochs: int = 2
    batch: int = 16
    optimiser: Optimiser = SGD()

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"training: {name} must be at least 1; got {getattr(self, name)}")


class Examples(NamedTuple):
    """A client's examples for one purpose; rows past its own count are copies at weight 0."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n, ...]
    weight: Tensor  # [n] 1 on real rows


class Batch(NamedTuple):
    """One step's examples."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B, ...]
    weight: Tensor | None  # [B] 1 on real rows; None when all are
    valid: Tensor | None  # [] bool, False past the client's last step; None when surely True
    key: Tensor  # [] int64, for the model's own randomness in this step

    def keep(self, old: Tensor, new: Tensor) -> Tensor:
        """`new`, or `old` where this client has no such step."""
        return new if self.valid is None else torch.where(self.valid, new, old)


class Rows(NamedTuple):
    """A client's rows of the pool for one purpose, filled up to a common length with its own."""

    at: Tensor  # [n] int64
    size: Tensor  # [] int64, how many are real


class Pool(NamedTuple):
    """The examples that all rows point into."""

    x: Tensor
    y: Tensor


class Client:
    """One client, seen from its own program: no axis counts clients.

    The same program runs for one client at a time, for a whole cohort under `torch.func.vmap`, or at the client's own
    site. Under vmap tensors such as `size` differ between clients, so a program must not branch on them.
    """

    def __init__(
        self,
        tag: Tensor,
        round: int,
        seed: int,
        model: Model,
        task: Task,
        training: Training,
        pool: Pool,
        rows: dict[str, Rows],
        sizes: tuple[int, ...],
        together: bool,
    ) -> None:
        self.tag, self.round, self.model, self.task, self.training = tag, round, model, task, training
        self._seed, self._pool, self._rows, self._draws = seed, pool, rows, 0
        self._sizes = sizes  # training sizes of all clients this program is run for at once: known to Python
        self._together = together

    @property
    def size(self) -> Tensor:
        """[] int64: how many training examples this client has."""
        return self._rows["train"].size

    @property
    def data(self) -> Examples:
        """The client's training examples."""
        return self.examples("train")

    @property
    def held_out(self) -> Examples:
        """Examples for the method's own feedback, as its `feedback` asks for; never trained on if set aside."""
        if "held_out" not in self._rows:
            raise UsageError("the method uses client.held_out, so it must set feedback to 'train', 'val' or 'test'")
        return self.examples("held_out")

    def examples(self, split: str) -> Examples:
        """All examples of one split."""
        index, count = self._rows[split]
        real = torch.arange(len(index), device=index.device) < count
        return Examples(self._pool.x[index], self._pool.y[index], real.to(self.model.theta.dtype))

    def key(self, purpose: str, *ids: int) -> Tensor:
        """[] int64: a key of this client, round and purpose, for `kinfed.seeding`."""
        return fold(key(self._seed, purpose, self.round, *ids, device=self.tag.device), self.tag)

    def noise(self, like: Tensor, purpose: str = "noise") -> Tensor:
        """Standard normal numbers of the shape of `like`, the same in every fleet."""
        return normal(self.key(purpose), like)

    def count_steps(self, epochs: int | None = None) -> Tensor:
        """[] int64: how many steps `descend` takes on this client."""
        return (epochs or self.training.epochs) * -(-self.size // self.training.batch)

    def batches(self, epochs: int | None = None, steps: int | None = None, batch: int | None = None) -> Iterator[Batch]:
        """Shuffled passes over the training examples; the last batch of a pass may be short, none is dropped.

        `epochs` passes (default: the training settings), or exactly `steps` steps. Each call shuffles anew.
        """
        size = batch or self.training.batch
        passes = [-(-n // size) for n in self._sizes]  # steps in one epoch
        epochs = self.training.epochs if epochs is None else epochs
        length = [steps if steps is not None else epochs * p for p in passes]
        turns = max(-(-total // p) for total, p in zip(length, passes, strict=True))
        rows, count = self._rows["train"]
        draw = self.key("batches", self._draws)
        self._draws += 1
        place = torch.arange(len(rows), device=rows.device)
        turn = torch.arange(turns, device=rows.device)
        step = torch.arange(max(length), device=rows.device)
        marks = fold(fold(draw, turn)[:, None], place) & 0x3FFFFFFFFFFFFFFF
        order = torch.where(place < count, marks, 1 << 62).argsort(stable=True)  # [turns, n], the real rows first
        mine = -(-count // size)
        position = (step % mine * size)[:, None] + torch.arange(size, device=rows.device)  # [T, B]
        start = (step // mine).clamp(max=turns - 1) * len(rows)
        at = rows[order.view(-1)[start[:, None] + position % count]]  # [T, B]
        valid = step < (mine * epochs if steps is None else steps)  # [T]
        weight = ((position < count) & valid[:, None]).to(self.model.theta.dtype)  # [T, B]
        keys = fold(draw, ~step)
        for t in range(max(length)):
            real = [
                min(size, n - t % p * size) if t < total else 0
                for n, p, total in zip(self._sizes, passes, length, strict=True)
            ]
            most, least = max(real), min(real)
            rows_now = at[t, :most]
            yield Batch(
                self._pool.x[rows_now],
                self._pool.y[rows_now],
                weight[t, :most] if least < most else None,
                valid[t] if least == 0 else None,
                keys[t],
            )

    def loss(self, theta: Tensor, batch: Batch | Examples) -> Tensor:
        """[] mean loss at theta: [d]: in training mode on a batch, in evaluation mode on examples."""
        return self._loss(self.model.layout.tensors(theta), batch)[0]

    def gradient(self, theta: Tensor, batch: Batch | Examples) -> Tensor:
        """[d] gradient of `loss`; zero on buffers."""
        tensors = self.model.layout.tensors(theta)
        moving = [e.name for e in self.model.layout.entries if e.trainable]
        slopes, _ = self._slopes(tensors, moving, batch, None)
        zero = {n: torch.zeros_like(t) for n, t in tensors.items() if n not in moving}
        return self.model.layout.flatten(zero | dict(zip(moving, slopes, strict=True)))

    def descend(
        self,
        theta: Tensor,
        *,
        penalty: Penalty | None = None,
        only: frozenset[str] | None = None,
        epochs: int | None = None,
        optimiser: Optimiser | None = None,
    ) -> Tensor:
        """Local training from theta: [d]; returns the trained [d].

        `penalty(theta)` is added to the loss of every step; `only` names the tensors that may move (buffers such as
        running statistics always do); `epochs` and `optimiser` replace the training settings.
        """
        layout = self.model.layout
        optimiser = optimiser or self.training.optimiser
        tensors = layout.tensors(theta)
        moving = [e.name for e in layout.entries if e.trainable and (only is None or e.name in only)]
        memory = optimiser.init([tensors[n] for n in moving])
        for batch in self.batches(epochs):
            old = [tensors[n] for n in moving]
            slopes, buffers = self._slopes(tensors, moving, batch, penalty)
            new, memory_after = optimiser.step(old, slopes, memory)
            if batch.valid is not None:
                new = [batch.keep(a, b) for a, b in zip(old, new, strict=True)]
                kept = [
                    tuple(batch.keep(a, b) for a, b in zip(before, after, strict=True))
                    for before, after in zip(memory[1:], memory_after[1:], strict=True)
                ]
                memory_after = type(memory)(batch.keep(memory.step, memory_after.step), *kept)
                buffers = {n: batch.keep(tensors[n], b) for n, b in buffers.items()}
            memory = memory_after
            tensors = tensors | buffers | dict(zip(moving, new, strict=True))
        return layout.flatten(tensors)

    def _loss(self, tensors: dict[str, Tensor], batch: Batch | Examples) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(batch, Batch):
            outputs, buffers = self.model.run(tensors, batch.x, batch.weight, batch.key)
        else:
            outputs, buffers = self.model.predict(tensors, batch.x), {}
        loss = self.task.loss(outputs, batch.y)
        if batch.weight is None:
            return loss.mean(), buffers
        return (loss * batch.weight).sum() / batch.weight.sum().clamp(min=1), buffers

    def _slopes(
        self, tensors: dict[str, Tensor], moving: list[str], batch: Batch | Examples, penalty: Penalty | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Gradients of the loss (and penalty) for the moving tensors, and the buffers after the pass."""

        def objective(values: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            now = tensors | dict(zip(moving, values, strict=True))
            loss, buffers = self._loss(now, batch)
            return loss if penalty is None else loss + penalty(self.model.layout.flatten(now)), buffers

        values = [tensors[n] for n in moving]
        if self._together:
            return grad(objective, has_aux=True)(values)  # type: ignore[no-any-return]
        leaves = [v.detach().requires_grad_() for v in values]
        loss, buffers = objective(leaves)
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return list(slopes), buffers


def towards(anchor: Tensor, pull: float) -> Penalty:
    r"""The penalty $\frac{pull}{2}\|\theta - anchor\|^2$; anchor: [d]. Entries that cannot move add a constant."""
    return lambda theta: 0.5 * pull * (theta - anchor).square().sum()
