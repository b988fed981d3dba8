"""Client: what one client has at hand when it runs its half of a method."""

import copy
import math
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, maybe_current_level

from ..errors import UsageError
from .batches import Batch, Draw, Examples, Member, Pool, Shuffler, is_real
from .metrics import positive
from .model import Features, Model
from .optimiser import Optimiser
from .seeding import fold, key, normal
from .tasks import Classification, Task
from .training import Training

Penalty = Callable[[Tensor], Tensor]  # theta [d] -> []
# Outputs [B, ...], the batch they are for, and what calculates the features [B, f] when called -> [B] or [] loss.
Objective = Callable[[Tensor, Batch | Examples, Features], Tensor]
OPEN = ("train", "validation", "held_out")  # splits that a method's code may read


@dataclass(frozen=True)
class Request:
    """A request for local training, see `Client.descend`."""

    theta: Tensor  # [d] where it starts
    moving: tuple[str, ...]  # names of the parameters that are trained, in the layout's order
    draw: Draw
    optimiser: Optimiser
    penalty: Penalty | None = None
    objective: Objective | None = None
    clip: float = math.inf


class Trainer(Protocol):
    """A way to carry out local training."""

    def refuses(self, request: Request) -> str:
        """Why it cannot carry out a request; empty if it can."""

    def train(self, client: "Client", request: Request) -> Tensor:
        """The trained theta: [d]."""


class PreferredTrainer(Trainer, Protocol):
    """A trainer for the requests that it does not refuse, and for gradients of the task's own loss."""

    def gradient(self, client: "Client", theta: Tensor, batch: Batch | Examples) -> Tensor: ...


class GeneralTrainer(Trainer, Protocol):
    """A trainer that refuses nothing, and that provides batches and gradients to methods that take their own steps."""

    def batches(self, client: "Client", draw: Draw) -> Iterator[Batch]: ...

    def gradient(
        self, client: "Client", theta: Tensor, batch: Batch | Examples, objective: Objective | None
    ) -> Tensor: ...


class Trainers:
    """The trainers of an executor. The first that does not refuse a request carries it out.

    `refusals` collects the reasons that the others gave.
    """

    def __init__(self, *preferred: PreferredTrainer, general: GeneralTrainer) -> None:
        self._preferred, self.general = preferred, general
        self.refusals: set[str] = set()

    def train(self, client: "Client", request: Request) -> Tensor:
        """The trained theta: [d]."""
        for trainer in self._preferred:
            if not (refusal := trainer.refuses(request)):
                return trainer.train(client, request)
            self.refusals.add(refusal)
        return self.general.train(client, request)

    def gradient(self, client: "Client", theta: Tensor, batch: Batch | Examples, objective: Objective | None) -> Tensor:
        """[d] the gradient of the mean loss at theta: [d]."""
        within = (maybe_current_level() or 0) > 1  # in a transform of the method's own, which only autograd can be in
        if self._preferred and objective is None and not within:
            return self._preferred[0].gradient(client, theta, batch)
        return self.general.gradient(client, theta, batch, objective)


class Client:
    """One client, seen from its own program: no axis indexes clients.

    The same program runs for one client at a time, for a whole cohort under `torch.func.vmap`, or at the client's own
    site. Under vmap tensors such as `size` differ between clients, so a program must not branch on them.

    If a part of the model stays with the client, `theta: [d]` is the part that travels, in every function here: see
    `kinfed.core.sharing`.
    """

    personal: frozenset[str] = frozenset()  # names of the tensors that stay with the client

    def __init__(
        self,
        member: Member,
        round: int,
        seed: int,
        model: Model,
        task: Task,
        training: Training,
        pool: Pool,
        trainers: Trainers,
        halt: threading.Event | None = None,
    ) -> None:
        tag, rows, _, sizes, _ = self.member = member
        self.tag, self.round, self.model, self.task, self.training = tag, round, model, task, training
        self.seed, self._pool, self._rows, self._trainers, self._draws = seed, pool, rows, trainers, 0
        self.shuffler = Shuffler(
            pool, rows=rows["train"], sizes=sizes, tag=tag, round=round, seed=seed, dtype=model.theta.dtype, halt=halt
        )

    @property
    def size(self) -> Tensor:
        """[] int64: how many training examples this client has."""
        return self._rows["train"].size

    @property
    def weight(self) -> Tensor:
        """[]: as how many rows its training examples count, the sum of their weights; `size` without any."""
        return self.size if self._pool.weight is None else self._weights("train").sum()

    @property
    def data(self) -> Examples:
        """The client's training examples."""
        return self.examples("train")

    @property
    def held_out(self) -> Examples:
        """Examples for the method's own feedback, which its `feedback` selects; never trained on if set aside."""
        if "held_out" not in self._rows:
            raise UsageError(
                "the method uses client.held_out, so it must set feedback: train, validation, held-out or test"
            )
        return self.examples("held_out")

    def examples(self, split: str) -> Examples:
        """All examples of one split: "train", "validation" or "held_out".

        Raises UsageError for any other. Test examples are for evaluation: a method that must learn from them sets
        feedback = "test", which marks its results, and reads `held_out`.
        """
        if split not in self._rows:
            raise UsageError(
                f"client.examples: a method can read {', '.join(name for name in OPEN if name in self._rows)}; got "
                f"{split!r:.80}. Test examples are for evaluation only, unless the method sets feedback = 'test' and "
                "reads client.held_out"
            )
        at = self._rows[split].at
        return Examples(self._pool.x[at], self._pool.y[at], self._weights(split))

    def _weights(self, split: str) -> Tensor:
        """[n] as how many rows each example of a split counts, 0 of those that only fill up."""
        rows, weights = self._rows[split], self._pool.weight
        real = is_real(rows).to(self.model.theta.dtype)
        return real if weights is None else real * weights[rows.at]

    def restrict(self, splits: Collection[str] = OPEN) -> "Client":
        """The same client with the examples of these splits only: what a method's code sees."""
        other = copy.copy(self)
        other._rows = {split: rows for split, rows in self._rows.items() if split in splits}
        return other

    @cached_property
    def class_weights(self) -> Tensor | None:
        """[C] the weight of each class in the loss, 0 if "balanced" and without examples; None: all the same."""
        weights, like = self.training.class_weights, self.model.theta
        if weights is None or not isinstance(self.task, Classification):
            return None
        if isinstance(weights, tuple):
            return torch.tensor(weights, dtype=like.dtype, device=like.device)
        weight = self._weights("train")
        count = weight.new_zeros(self.task.classes).scatter_add(0, self._pool.y[self._rows["train"].at], weight)
        return torch.where(count > 0, count.sum() / ((count > 0).sum() * positive(count)), 0)

    def key(self, purpose: str, *ids: int) -> Tensor:
        """[] int64: a key of this client, round and purpose, for `kinfed.core.seeding`."""
        return fold(key(self.seed, purpose, self.round, *ids, device=self.tag.device), self.tag)

    def noise(self, like: Tensor, purpose: str = "noise") -> Tensor:
        """Standard normal numbers of the shape of `like`, the same in every fleet and executor."""
        return normal(self.key(purpose), like)

    def count_steps(self, epochs: int | None = None) -> Tensor:
        """[] int64: how many steps `descend` takes on this client."""
        return self.training.count_steps(self.size, epochs)

    def batches(self, epochs: int | None = None, steps: int | None = None, batch: int | None = None) -> Iterator[Batch]:
        """Shuffled passes over the training examples; the last batch of a pass may be short, none is dropped.

        `epochs` passes (default: the training settings), or exactly `steps` steps. Each call shuffles anew. A method
        that takes its own steps undoes those past this client's last by `batch.keep(old, new)`.
        """
        yield from self._trainers.general.batches(self, self._draw(epochs, steps, batch))

    def _draw(self, epochs: int | None, steps: int | None, batch: int | None = None, again: bool = False) -> Draw:
        number = self._draws - 1 if again else self._draws
        self._draws = number + 1
        if epochs is None and steps is None:
            steps = self.training.steps
        epochs = self.training.epochs if epochs is None else epochs
        return Draw(number, epochs, steps, batch or self.training.batch)

    def loss(self, theta: Tensor, batch: Batch | Examples, objective: Objective | None = None) -> Tensor:
        """[] mean loss at theta: [d]: in training mode on a batch, in evaluation mode on examples.

        An `objective` replaces the task's loss, as in `descend`.
        """
        return self.loss_and_buffers(self.model.tensors(self.own(theta)), batch, objective)[0]

    @property
    def for_whole_model(self) -> "Client":
        """This client, for which every theta: [d] is the whole model, for methods that take their own steps."""
        return self

    def whole(self, theta: Tensor) -> Tensor:
        """[d] the whole model: theta, the part that travels, with the client's current personal part."""
        return theta

    def part(self, theta: Tensor) -> Tensor:
        """The part of a whole model: [d] that travels; the rest of it becomes the client's personal part."""
        return theta

    def gradient(self, theta: Tensor, batch: Batch | Examples, objective: Objective | None = None) -> Tensor:
        """[d] gradient of `loss`; zero on buffers."""
        return self._trainers.gradient(self, theta, batch, objective)

    def descend(
        self,
        theta: Tensor,
        *,
        penalty: Penalty | None = None,
        objective: Objective | None = None,
        only: frozenset[str] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        optimiser: Optimiser | None = None,
        clip: float = math.inf,
        again: bool = False,
    ) -> Tensor:
        """Local training from theta: [d]; returns the trained [d].

        `penalty(theta)` is added to the loss of every step; `only` names the tensors to train (buffers such as
        running statistics always move); `epochs` (or exactly `steps` steps) and `optimiser` replace the training
        settings; `clip` bounds the norm of a step's gradient, the penalty's included, as the settings may do too; with
        `again` the examples are shuffled as in the call before, so that two models are trained on the same batches.

        `objective(outputs, batch, features)` replaces the task's loss, class weights included. It returns a loss for
        each example, [B], which is averaged over the batch's real rows, or one for all, [] (`batch.mean` ignores rows
        that only fill the batch up). `features()` are the inputs of the module's head, [B, f]; raises UsageError if
        they are not defined, see `Model.features`. While an objective runs, `client.model.module` computes with the
        tensors that are being trained: layers that `Extends.extend` added are called there.
        """
        names = tuple(e.name for e in self.model.layout.entries if e.trainable and (only is None or e.name in only))
        if not names:
            fixed = sorted(e.name for e in self.model.layout.whole.entries if only and e.name in only and not e.buffer)
            why = (
                f"is frozen as a whole: {', '.join(fixed[:4])}{', ...' if len(fixed) > 4 else ''}; leave some of it "
                "out of method.frozen, or use a method that trains all layers together, such as 'fedavg'"
                if fixed
                else "has no tensors; if that is its head, name it: kinfed.Model(module, head='NAME')"
            )
            raise UsageError(f"the method trains a part of the model that {why}")
        draw = self._draw(epochs, steps, again=again)
        optimiser = optimiser or self.training.optimiser
        clip = min(clip, self.training.clip)
        return self._trainers.train(
            self,
            Request(
                theta, moving=names, draw=draw, optimiser=optimiser, penalty=penalty, objective=objective, clip=clip
            ),
        )

    def pass_over(self, theta: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The running statistics after a training pass over a batch at theta: [d]; none if the model has none."""
        layout = self.model.layout
        if layout.parameters == layout.size:
            return {}
        return self.model.run(self.model.tensors(self.own(theta)), batch.x, batch.weight, batch.key).buffers

    def own(self, theta: Tensor) -> Tensor:
        """[d] the same numbers, under vmap a copy for each client: a shared tensor cannot change in place."""
        if is_batchedtensor(theta) or not is_batchedtensor(self.size):
            return theta
        return torch.where(self.size > 0, theta, theta)

    def loss_and_buffers(
        self, tensors: dict[str, Tensor], batch: Batch | Examples, objective: Objective | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[] mean loss with named tensors as in `loss`, and the buffers after the pass."""
        model = self.model

        def read(outputs: Tensor) -> Tensor:
            loss = self.losses(outputs, batch, objective)
            return batch.mean(loss) if loss.ndim else loss

        with model.capturing(objective is not None):
            if isinstance(batch, Batch):
                return model.run(tensors, batch.x, batch.weight, batch.key, read)
            return model.predict(tensors, batch.x, read), {}

    def losses(self, outputs: Tensor, batch: Batch | Examples, objective: Objective | None) -> Tensor:
        """[B] the loss of each example, with class weights if there are any; or the result of an objective."""
        if objective is None:
            loss, weights = self.task.loss(outputs, batch.y), self.class_weights
            return loss if weights is None else loss * weights[batch.y]
        assert self.model.fed is not None
        loss = objective(outputs, batch, self.model.fed)
        if not isinstance(loss, Tensor) or loss.shape not in ((), (len(batch.y),)):
            got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
            raise UsageError(f"an objective returns a loss [], or one per example, [{len(batch.y)}]; got {got}")
        return loss


@dataclass(frozen=True)
class Quadratic:
    r"""The penalty $\frac{pull}{2}\|\theta\|^2 + slope \cdot \theta$, in a form that fused training supports."""

    pull: float
    slope: Tensor  # [d]

    def __call__(self, theta: Tensor) -> Tensor:
        return (0.5 * self.pull * theta + self.slope) @ theta

    def __add__(self, other: "Quadratic") -> "Quadratic":
        return Quadratic(self.pull + other.pull, self.slope + other.slope)


@dataclass(frozen=True)
class Alignment:
    r"""The penalty $-pull \, goal \cdot \theta / \|\theta\|$ in a form that fused training supports."""

    pull: float
    goal: Tensor  # [d] 0 where nothing is trained
    trainable: Tensor  # [d] which numbers are, whose length alone counts

    def __call__(self, theta: Tensor) -> Tensor:
        length: Tensor = (self.trainable * theta).norm()
        return -self.pull * (self.goal @ theta) / length


def towards(anchor: Tensor, pull: float) -> Quadratic:
    r"""The penalty $\frac{pull}{2}\|\theta - anchor\|^2$, up to a constant; anchor: [d]."""
    return Quadratic(pull, -pull * anchor)
