"""Client: what one client has at hand when it runs its half of a method."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cache, cached_property
from numbers import Integral
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from ..errors import UsageError
from ..fused import Batches, Descent, Fused
from .model import Model
from .optimiser import SGD, Adam, Optimiser, shorten
from .seeding import fold, fold_numbers, key, normal, number
from .tasks import Classification, Task

Penalty = Callable[[Tensor], Tensor]  # theta [d] -> []


@dataclass(frozen=True)
class Training:
    """How every client trains locally, unless its method says otherwise.

    `class_weights` multiply the loss of each example of a class, wherever a client's loss or gradient is taken: a
    number for every class, or "balanced". Then the weight of a class is n / (k m) for a client with n training
    examples, m of them of this class, and k classes in all: each of its classes counts alike, and the mean weight is 1.
    """

    epochs: int = 2
    batch: int = 16
    optimiser: SGD | Adam | Optimiser = SGD()
    steps: int | None = None  # so many steps in place of the epochs, the same for clients with many and few examples
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "steps"):
            count = getattr(self, name)
            if count is not None and not (isinstance(count, Integral) and 1 <= int(count) < 2**31):
                raise UsageError(f"training: {name} must be a whole number, at least 1 and below 2**31; got {count!r}")
        weights = self.class_weights
        if weights is None or weights == "balanced":
            return
        try:
            good = not isinstance(weights, str) and all(0 < float(w) < math.inf for w in weights)
        except (TypeError, ValueError):
            good = False
        if not good:
            raise UsageError(
                "training: class_weights must be 'balanced', or a positive and finite number for every class; "
                f"got {weights!r:.80}"
            )
        object.__setattr__(self, "class_weights", tuple(map(float, weights)))

    def check(self, task: Task) -> None:
        """Raise UsageError unless the class weights fit the task."""
        weights = self.class_weights
        if weights is not None and not isinstance(task, Classification):
            raise UsageError("training: class_weights are for labels, but this data has none; leave them out")
        if isinstance(task, Classification) and isinstance(weights, tuple) and len(weights) != task.classes:
            raise UsageError(f"training: class_weights must be {task.classes} numbers, one a class; got {len(weights)}")

    def count_steps(self, sizes: Tensor, epochs: int | None = None) -> Tensor:
        """[...] int64: the local steps of clients with so many training examples, sizes: [...] int64."""
        if epochs is None and self.steps is not None:
            return torch.full_like(sizes, self.steps)
        return (self.epochs if epochs is None else epochs) * -(-sizes // self.batch)


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


class Plan(NamedTuple):
    """Which examples the steps of clients that run together take."""

    place: Tensor  # [T, B] int64 positions in the client's training rows
    weight: Tensor  # [T, B] 1 on real rows, 0 on those that only fill a batch up
    valid: Tensor  # [T] bool, False past the client's last step


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

    Where a part of the model stays with the client, `theta: [d]` is the part that travels, in every function here: see
    `kinfed.core.sharing`.
    """

    personal: frozenset[str] = frozenset()  # names of the tensors that stay with the client

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
        halt: threading.Event | None = None,
        fused: Fused | None = None,
    ) -> None:
        self.tag, self.round, self.model, self.task, self.training = tag, round, model, task, training
        self._seed, self._pool, self._rows, self._draws = seed, pool, rows, 0
        self._sizes = sizes  # training sizes of all clients this program is run for at once: known to Python
        self._together = together
        self._halt = halt  # set when the run ends early: the program ends with its next batch
        self._fused = fused  # how `descend` trains where it can

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

    @cached_property
    def class_weights(self) -> Tensor | None:
        """[C] what an example of each class counts in the loss, 0 if "balanced" without an example; None: alike."""
        asked, like = self.training.class_weights, self.model.theta
        if asked is None or not isinstance(self.task, Classification):
            return None
        if isinstance(asked, tuple):
            return torch.tensor(asked, dtype=like.dtype, device=like.device)
        at, size = self._rows["train"]
        real = (torch.arange(len(at), device=at.device) < size).to(like.dtype)
        count = real.new_zeros(self.task.classes).scatter_add(0, self._pool.y[at], real)
        return torch.where(count > 0, count.sum() / ((count > 0).sum() * count.clamp(min=1)), 0)

    def key(self, purpose: str, *ids: int) -> Tensor:
        """[] int64: a key of this client, round and purpose, for `kinfed.core.seeding`."""
        return fold(key(self._seed, purpose, self.round, *ids, device=self.tag.device), self.tag)

    def noise(self, like: Tensor, purpose: str = "noise") -> Tensor:
        """Standard normal numbers of the shape of `like`, the same in every fleet."""
        return normal(self.key(purpose), like)

    def count_steps(self, epochs: int | None = None) -> Tensor:
        """[] int64: how many steps `descend` takes on this client."""
        return self.training.count_steps(self.size, epochs)

    def batches(self, epochs: int | None = None, steps: int | None = None, batch: int | None = None) -> Iterator[Batch]:
        """Shuffled passes over the training examples; the last batch of a pass may be short, none is dropped.

        `epochs` passes (default: the training settings), or exactly `steps` steps. Each call shuffles anew.
        """
        yield from (self._batches_together if self._together else self._batches_alone)(
            *self._turns(epochs, steps), batch or self.training.batch
        )

    def _turns(self, epochs: int | None, steps: int | None) -> tuple[int, int, int | None]:
        """The number of this draw of batches, and how long they last."""
        draw, self._draws = self._draws, self._draws + 1
        if epochs is None and steps is None:
            steps = self.training.steps
        return draw, self.training.epochs if epochs is None else epochs, steps

    def _batches_alone(self, draw: int, epochs: int, steps: int | None, size: int) -> Iterator[Batch]:
        x, y = self._pool
        start = fold_numbers(number(self._seed, "batches", self.round, draw), int(self.tag))
        each = -(-self._sizes[0] // size)  # steps in one epoch
        total = epochs * each if steps is None else steps
        turns, keys = (
            torch.tensor([fold_numbers(start, i) for i in counters], dtype=torch.int64, device=x.device)
            for counters in (range(-(-total // each)), (~t for t in range(total)))
        )
        order = self._rows["train"].at[self._shuffled(turns)]
        parts = [part.unbind() for part in order.split(size, dim=1)]
        ordered = (at for epoch in zip(*parts, strict=True) for at in epoch)
        for at, mark in zip(ordered, keys.unbind(), strict=False):  # exactly `steps` may end within an epoch
            if self._halt is not None and self._halt.is_set():
                raise CancelledError
            yield Batch(x.index_select(0, at), y.index_select(0, at), None, None, mark)

    def _batches_together(self, draw: int, epochs: int, steps: int | None, size: int) -> Iterator[Batch]:
        start = self.key("batches", draw)
        plan = self._plan(start, epochs, steps, size)
        keys = fold(start, ~torch.arange(len(plan.valid), device=start.device))
        passes = [-(-n // size) for n in self._sizes]
        ends = [steps if steps is not None else epochs * p for p in passes]
        for t in range(len(plan.valid)):
            # How many real rows clients have in this step; Python knows, so nobody need ask a tensor.
            real = [
                min(size, n - t % p * size) if t < end else 0
                for n, p, end in zip(self._sizes, passes, ends, strict=True)
            ]
            most, least = max(real), min(real)
            now = self._rows["train"].at[plan.place[t, :most]]
            yield Batch(
                self._pool.x[now],
                self._pool.y[now],
                plan.weight[t, :most] if least < most else None,
                plan.valid[t] if least == 0 else None,
                keys[t],
            )

    def _plan(self, start: Tensor, epochs: int, steps: int | None, size: int) -> Plan:
        passes = [-(-n // size) for n in self._sizes]
        length = [steps if steps is not None else epochs * p for p in passes]
        turns = max(-(-total // p) for total, p in zip(length, passes, strict=True))
        count = self.size
        step = torch.arange(max(length), device=count.device)
        order = self._shuffled(fold(start, torch.arange(turns, device=start.device)))
        mine = -(-count // size)
        position = (step % mine * size)[:, None] + torch.arange(size, device=count.device)  # [T, B]
        turn = (step // mine).clamp(max=turns - 1)
        place = order.view(-1)[turn[:, None] * order.shape[1] + position % count]
        valid = step < (mine * epochs if steps is None else steps)
        weight = ((position < count) & valid[:, None]).to(self.model.theta.dtype)
        return Plan(place, weight, valid)

    def _shuffled(self, keys: Tensor) -> Tensor:
        """[turns, n] positions in the client's training rows, shuffled by keys: [turns]; the real ones come first."""
        rows, count = self._rows["train"]
        place = torch.arange(len(rows), device=rows.device)
        marks = fold(keys[:, None], place) & 0x3FFFFFFFFFFFFFFF
        if self._together:
            marks = torch.where(place < count, marks, 1 << 62)
        return marks.argsort(stable=True)

    @property
    def undivided(self) -> "Client":
        """The client to whom every theta: [d] is the whole model, for steps that a method takes by itself."""
        return self

    def whole(self, theta: Tensor) -> Tensor:
        """[d] the whole model that theta, the part that travels, makes with the client's own part as it is now."""
        return theta

    def part(self, theta: Tensor) -> Tensor:
        """The part of a whole model: [d] that travels; from now on the rest of it is the client's own part."""
        return theta

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
        steps: int | None = None,
        optimiser: Optimiser | None = None,
        clip: float = math.inf,
    ) -> Tensor:
        """Local training from theta: [d]; returns the trained [d].

        `penalty(theta)` is added to the loss of every step; `only` names the tensors that may move (buffers such as
        running statistics always do); `epochs` (or exactly so many `steps`) and `optimiser` replace the training
        settings; `clip` is the most that the norm of a step's gradient, the penalty's included, may be.
        """
        optimiser, entries = optimiser or self.training.optimiser, self.model.layout.entries
        readable = penalty is None or isinstance(penalty, Quadratic)
        if self._fused and readable and isinstance(optimiser, SGD) and not optimiser.momentum and clip == math.inf:
            draw, epochs, steps = self._turns(epochs, steps)
            plan = self._plan(self.key("batches", draw), epochs, steps, self.training.batch)
            batches = Batches(self._rows["train"].at, plan.place, plan.weight, plan.valid, self.class_weights)
            pull, slope = (penalty.pull, penalty.slope) if isinstance(penalty, Quadratic) else (0.0, None)
            descent = Descent(optimiser.lr, optimiser.weight_decay + pull, slope)
            return self._fused.descend_alone(theta, *self._pool, batches, descent, only)
        moving = [e.name for e in entries if e.trainable and (only is None or e.name in only)]
        descend = self._descend_together if self._together else self._descend_alone
        return descend(theta, moving, penalty, self.batches(epochs, steps), optimiser, clip)

    def _descend_alone(
        self,
        theta: Tensor,
        moving: list[str],
        penalty: Penalty | None,
        batches: Iterator[Batch],
        optimiser: Optimiser,
        clip: float,
    ) -> Tensor:
        """Tensors are views of theta, which is changed in place: so it stays flat at no cost."""
        theta = theta.detach().clone()
        # Views that share a version counter would make one's step in place look like a change of what others saved.
        tensors = {name: view.data for name, view in self.model.layout.tensors(theta).items()}
        values = [tensors[n] for n in moving]
        leaves = [v.data.requires_grad_() for v in values]
        memory = optimiser.init(values)
        with self.model.bound(tensors | dict(zip(moving, leaves, strict=True)), training=True):
            for batch in batches:
                outputs = self.model.forward(batch.x, batch.weight, batch.key)
                loss = self._each(outputs, batch.y)
                slopes = _differentiate(loss, leaves, _share(loss.shape, loss.dtype, loss.device))
                if penalty:
                    whole = theta.detach().requires_grad_()
                    slope = self.model.layout.tensors(_differentiate(penalty(whole), [whole])[0])
                    slopes = [s + slope[n] for s, n in zip(slopes, moving, strict=True)]
                slopes = shorten(slopes, clip) if clip < math.inf else slopes
                _, memory = optimiser.step(values, slopes, memory, inplace=True)
                del slopes  # the next ones take their memory, while it is in the cache
                self.model.settle(tensors)
        return theta

    def _descend_together(
        self,
        theta: Tensor,
        moving: list[str],
        penalty: Penalty | None,
        batches: Iterator[Batch],
        optimiser: Optimiser,
        clip: float,
    ) -> Tensor:
        """The same without a change in place, for vmap; a step past a client's last changes nothing."""
        tensors = self.model.layout.tensors(theta)
        memory = optimiser.init([tensors[n] for n in moving])
        for batch in batches:
            old = [tensors[n] for n in moving]
            slopes, buffers = self._slopes(tensors, moving, batch, penalty)
            slopes = shorten(slopes, clip) if clip < math.inf else slopes
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
        return self.model.layout.flatten(tensors)

    def _loss(self, tensors: dict[str, Tensor], batch: Batch | Examples) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(batch, Batch):
            outputs, buffers = self.model.run(tensors, batch.x, batch.weight, batch.key)
        else:
            outputs, buffers = self.model.predict(tensors, batch.x), {}
        return _mean(self._each(outputs, batch.y), batch.weight), buffers

    def _each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """[B] the loss of each example, weighted by its class if that is asked for."""
        loss, weights = self.task.loss(outputs, y), self.class_weights
        return loss if weights is None else loss * weights[y]

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
        return _differentiate(loss, leaves), buffers


def _mean(loss: Tensor, weight: Tensor | None) -> Tensor:
    return loss.mean() if weight is None else (loss * weight).sum() / weight.sum().clamp(min=1)


@cache
def _share(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient of a mean with respect to what it is taken of."""
    return torch.full(shape, 1 / shape.numel(), dtype=dtype, device=device)


def _differentiate(value: Tensor, leaves: list[Tensor], along: Tensor | None = None) -> list[Tensor]:
    """Gradients of a number, or of the inner product of value and `along`; zero for leaves that it does not touch."""
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    slopes = torch.autograd.grad(value, leaves, along, allow_unused=True)
    return [torch.zeros_like(leaf) if s is None else s for s, leaf in zip(slopes, leaves, strict=True)]


@dataclass(frozen=True)
class Quadratic:
    r"""The penalty $\frac{pull}{2}\|\theta\|^2 + slope \cdot \theta$, told so that fused training can take it in."""

    pull: float
    slope: Tensor  # [d]

    def __call__(self, theta: Tensor) -> Tensor:
        return (0.5 * self.pull * theta + self.slope) @ theta

    def __add__(self, other: "Quadratic") -> "Quadratic":
        return Quadratic(self.pull + other.pull, self.slope + other.slope)


def towards(anchor: Tensor, pull: float) -> Quadratic:
    r"""The penalty $\frac{pull}{2}\|\theta - anchor\|^2$, up to a constant; anchor: [d]."""
    return Quadratic(pull, -pull * anchor)
