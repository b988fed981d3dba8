"""Fused local training: plain SGD on many clients' dense or recurrent models at once, without autograd.

The clients of a block lie side by side: a layer's weights are [k, out, in], and one batched product serves them all.
The backward pass is written by hand, so that a step of SGD is folded into the product that gives the gradient, and no
gradient is ever stored: `weight -= lr g^T x` is one `baddbmm_`. Batches, short ones among them, clients with fewer
steps, frozen layers and quadratic penalties are those of `Client.descend`, and the result agrees with it to rounding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh

from ...core.layers import is_plain
from ...core.layout import Layout
from ...core.rows import blank
from ...core.tasks import Classification, Counts, Forecasting, Quantiles, Regression, Task
from .dense import Activation, Flatten, FromLast, Linear, Plain, Span, relu_backward, sigmoid_backward, tanh_backward
from .recurrent import Forecaster, LastState
from .step import Batches, Descent, Named, Part, Step, Unfused

CACHE = 1 << 22  # bytes of parameters in a block of clients, which should stay in the cache from step to step
MOST = 32  # clients in a block
FIRST = LastState | Forecaster | FromLast  # what reads windows of series
SAVED = 2 / 3  # a layer is trained in the span of its inputs for at most this share of the usual multiplications


def _cross_entropy(task: Classification, outputs: Tensor, y: Tensor) -> Tensor:
    chances = outputs.mT.softmax(1).mT  # along short rows in memory softmax takes ten times as long
    return chances.scatter_add_(-1, y.unsqueeze(-1), outputs.new_full((), -1).expand(*y.shape, 1))


def _squared_error(task: Regression, outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - task.standardise(y).view_as(outputs)).mul_(2 / outputs.shape[2:].numel())


def _counts(task: Counts, outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.clamp(max=task.highest).exp() * task.mean - y.view_as(outputs)) / max(1.0, task.mean)


def _forecast(task: Forecasting, outputs: Tensor, y: Tensor) -> Tensor:
    present = ~y.isnan()
    error = (outputs - (torch.where(present, y, task.mean) - task.mean) / task.deviation) * present
    return (error.sign() if task.error == "absolute" else 2 * error) / y.shape[-1]


def _quantiles(task: Quantiles, outputs: Tensor, y: Tensor) -> Tensor:
    present = ~y.isnan()
    truth = (torch.where(present, y, task.mean) - task.mean) / task.deviation
    level = torch.tensor(task.quantiles, dtype=outputs.dtype, device=outputs.device)
    says = outputs.unflatten(-1, (y.shape[-1], -1))
    slope = torch.where(truth.unsqueeze(-1) > says, -level, 1 - level) * present.unsqueeze(-1)
    return slope.flatten(-2) / outputs.shape[-1]


# The gradient of each example's loss at the outputs: [k, m, ...], y: [k, m, ...].
LOSSES: dict[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    Classification: _cross_entropy,
    Regression: _squared_error,
    Counts: _counts,
    Forecasting: _forecast,
    Quantiles: _quantiles,
}


def _flatten(module: nn.Flatten, path: str) -> list[Part]:
    if (module.start_dim, module.end_dim) != (1, -1):
        raise Unfused("Flatten has a fused form only if it leaves one axis")
    return [Flatten()]


# The parts of each kind of module: exactly this kind, because a subclass may compute something else.
FORMS: dict[type, Callable[[Any, str], list[Part]]] = {
    nn.Sequential: lambda module, path: [p for name, m in module._modules.items() for p in parts(m, f"{path}{name}.")],
    nn.Linear: lambda module, path: [Linear(module, path)],
    nn.Flatten: _flatten,
    nn.Hardtanh: lambda module, path: [Plain(partial(hardtanh, min_val=module.min_val, max_val=module.max_val))],
    nn.ReLU: lambda module, path: [Activation(Tensor.relu_, relu_backward)],
    nn.Tanh: lambda module, path: [Activation(Tensor.tanh_, tanh_backward)],
    nn.Sigmoid: lambda module, path: [Activation(Tensor.sigmoid_, sigmoid_backward)],
}


def parts(module: nn.Module, path: str = "") -> list[Part]:
    """The fused form of a module whose tensors' names begin with `path`; raises Unfused if there is none."""
    if type(module) not in FORMS:
        raise Unfused(f"{type(module).__name__.lstrip('_')} has no fused form")
    return FORMS[type(module)](module, path)


@dataclass(frozen=True)
class Fused:
    """A model with its task in fused form."""

    parts: tuple[Part, ...]
    layout: Layout
    task: Task
    frozen: Named = field(default_factory=dict, compare=False)  # [...] the tensors that the layout leaves out

    @staticmethod
    def build(
        module: nn.Module, layout: Layout, task: Task, example: torch.Size, frozen: Named | None = None
    ) -> "Fused":
        """The fused form of a module on examples of this shape; raises Unfused if there is none."""
        for part in module.modules():
            if not is_plain(part):
                raise Unfused(f"this {type(part).__name__} has hooks or its own forward, which would be passed over")
        layers = parts(module)
        if type(task) not in LOSSES:
            raise Unfused(f"the loss of {type(task).__name__} has no fused form")
        if len(example) > 1 and not isinstance(layers[0], Flatten | FIRST):
            raise Unfused("only examples with one axis, or flattened at once, have a fused form")
        if any(isinstance(part, FIRST) for part in layers[1:]):
            raise Unfused("a layer of windows has a fused form only where it comes first")
        used = [name for part in layers for name in part.names]
        if added := sorted(layout.names.difference(used)):
            raise Unfused(f"'{added[0]}', a tensor that its layer does not have by itself, has no fused form")
        if sorted(used) != sorted(layout.whole.names):
            raise Unfused("layers that share tensors have no fused form")
        return Fused(tuple(layers), layout, task, frozen or {})

    def descend(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        batches: Batches,
        descent: Descent,
        only: frozenset[str] | None = None,
    ) -> Tensor:
        """Local training of K clients from theta on the pool x, y; returns the trained [K, d].

        theta is [K, d], or [d] where all begin with the same.
        `only` names the tensors that may move; None: all that are trainable.
        """
        trainable = self.layout.trainable_names
        moving = trainable if only is None else trainable & only
        lowest = self._find_lowest(moving)
        if lowest == len(self.parts):
            return theta.expand(len(batches.rows), -1).clone()
        order = batches.valid.sum(1).argsort(stable=True)  # so that those who still train are the last ones of a block
        if sort := not torch.equal(order, torch.arange(len(order), device=order.device)):
            theta, batches = theta if theta.ndim == 1 else theta[order], batches.select(order)
            descent = descent if descent.slope is None else descent._replace(slope=descent.slope[order])
        result = blank(len(order), theta.expand(len(order), -1))
        with torch.no_grad():
            for at, span in self._blocks(batches, moving, lowest, theta, descent):
                slope = None if descent.slope is None else descent.slope[at]
                begin = theta if theta.ndim == 1 else theta[at]
                block = _Block(self, begin, batches.select(at), descent._replace(slope=slope))
                block.train(x, y, moving, lowest, span, result[at])
        return result[order.argsort()] if sort else result

    def descend_alone(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        batches: Batches,
        descent: Descent,
        only: frozenset[str] | None = None,
    ) -> Tensor:
        """`descend` for one client, no axis counting clients; under `torch.func.vmap` all are trained at once."""

        def run(theta: Tensor, slope: Tensor | None, *stacked: Tensor) -> Tensor:
            return self.descend(theta, x, y, Batches(*stacked), descent._replace(slope=slope), only)

        return _ForOneClient.apply(run, 2 + len(batches), theta, descent.slope, *batches)

    def gradient(self, theta: Tensor, x: Tensor, y: Tensor, share: Tensor, classes: Tensor | None) -> Tensor:
        """[K, d] the gradient at theta: [K, d], or [d], of the losses of x, y: [K, n, ...], summed by share: [K, n].

        classes: [K, C] weigh each class in the loss.
        """
        k, layout = len(x), self.layout
        result = theta.new_zeros(k, layout.size)
        moving = layout.trainable_names
        lowest = self._find_lowest(moving)
        tensors = _split(theta.expand(k, -1), layout) | {n: t.expand(k, *t.shape) for n, t in self.frozen.items()}
        # A step of rate -1 from zero is the gradient.
        step, saved = Step(_split(result, layout), moving, Descent(-1.0), {}), list[Any]()
        with torch.no_grad():
            value = x.clone()  # because parts may overwrite it
            for part in self.parts:
                value, kept = part.forward(tensors, value, None)
                saved.append(kept)
            g = LOSSES[type(self.task)](self.task, value, y).mul_(share.unsqueeze(-1))
            if classes is not None:
                g.mul_(classes.gather(1, y).unsqueeze(-1))
            for i in reversed(range(lowest, len(self.parts))):
                g = self.parts[i].backward(tensors, saved[i], g, step, deep=i > lowest)
        return result

    def gradient_alone(self, theta: Tensor, x: Tensor, y: Tensor, share: Tensor, classes: Tensor | None) -> Tensor:
        """`gradient` for one client, no axis counting clients, to be used under `torch.func.vmap` too."""
        return _ForOneClient.apply(self.gradient, 5, theta, x, y, share, classes)

    def _find_lowest(self, moving: frozenset[str]) -> int:
        """The place of the first part that moves; past the last one if none does."""
        return next((i for i, part in enumerate(self.parts) if not moving.isdisjoint(part.names)), len(self.parts))

    @property
    def repeats(self) -> bool:
        """Whether a layer of it is applied several times in a pass."""
        return any(isinstance(part, LastState | Forecaster) for part in self.parts)

    def _blocks(
        self, batches: Batches, moving: frozenset[str], lowest: int, theta: Tensor, descent: Descent
    ) -> Iterator[tuple[slice, bool]]:
        """Clients that are trained at once, and whether the lowest layer moves in the span of its inputs."""
        shapes = {e.name: e.shape for e in self.layout.whole.entries}
        part = self.parts[lowest]
        # With a clip, or an aligned slope, a step waits for all of the gradient, or of the model.
        waits = descent.clip < math.inf or descent.aligned
        spannable = isinstance(part, Linear) and moving.issuperset(part.names) and not waits
        examples = (batches.place.amax((1, 2)) + 1).tolist()  # [K] n
        seen = batches.weight.sum((1, 2)).tolist()  # [K] the same with repetition

        def is_spanned(i: int) -> bool:
            """Whether that saves client i enough multiplications to be faster."""
            if not spannable:
                return False
            out, width = shapes[cast(Linear, part).weight]
            n = examples[i]
            return bool(n * width * (2 * out + n) + seen[i] * n * out < SAVED * 2 * seen[i] * width * out)

        start = 0
        while start < len(examples):
            names = (name for part in self.parts[lowest + is_spanned(start) :] for name in part.names)
            size = CACHE // max(1, theta.element_size() * sum(shapes[name].numel() for name in names))
            # A GPU has no such cache, and is faster with larger blocks.
            stop = min(start + max(1, min(size, MOST)), len(examples)) if theta.device.type == "cpu" else len(examples)
            yield slice(start, stop), is_spanned(stop - 1)
            start = stop


def _split(theta: Tensor, layout: Layout) -> Named:
    """theta: [k, d] as views [k, ...], or [d] as views [...]."""
    return {e.name: theta[..., e.at].unflatten(-1, e.shape) for e in layout.entries}


class _Block:
    """Clients that are trained at once, those with the fewest steps first."""

    def __init__(self, fused: Fused, theta: Tensor, batches: Batches, descent: Descent) -> None:
        self._fused, self._batches, self._descent = fused, batches, descent
        still, k = fused.frozen, len(batches.rows)
        wide = {name: t.expand(k, *t.shape) for name, t in still.items()}
        layout = fused.layout
        self._begin = _split(theta, layout) | (still if theta.ndim == 1 else wide)  # [k, ...], or [...] if all the same
        self._tensors = _split(theta.expand(k, -1), layout) | wide
        self._slopes = {} if descent.slope is None else _split(descent.slope, layout)

    def train(self, x: Tensor, y: Tensor, moving: frozenset[str], lowest: int, span: bool, out: Tensor) -> None:
        """Write the trained vectors to out: [k, d]."""
        parts, still, (rows, place, weight, valid, classes, _) = self._fused.parts, self._fused.frozen, self._batches
        k, width = len(rows), int(place.max()) + 1
        rows = rows[:, :width]
        pooled = rows.gather(1, place.flatten(1)).view_as(place).transpose(0, 1).contiguous()  # [T, k, B] of the pool
        inputs, at, spanned = x, pooled, None
        if fixed := span or any(part.names for part in parts[:lowest]):  # what the lowest layer reads, once for all
            inputs = x.index_select(0, rows.flatten()).unflatten(0, (k, width))
            for part in parts[:lowest]:
                tensors = self._begin if isinstance(part, Linear) else self._tensors
                inputs = part.forward(tensors, inputs, None)[0]
            if span:
                layer = cast(Linear, parts[lowest])
                spanned = Span(layer, inputs, self._begin, self._tensors, self._descent, self._slopes)
            inputs = inputs.flatten(0, 1)
            at = (place + width * torch.arange(k, device=place.device)[:, None, None]).transpose(0, 1).contiguous()
        climbed = parts[lowest + span if fixed else 0 :]
        deepest = 0 if fixed else lowest  # of those, the lowest that moves
        # Copies, for theta stays as it is; and products are faster where matrices lie side by side.
        moved = {n: self._tensors[n] if n in still else self._tensors[n].clone() for p in climbed for n in p.names}
        steps, real = valid.sum(1), weight.sum(2)
        done = (steps[:, None] <= torch.arange(len(at), device=steps.device)).sum(0).tolist()  # clients, by step
        most, least = real.amax(0).long().tolist(), torch.where(valid, real, torch.inf).amin(0).tolist()
        shares = self._batches.shares(real)
        now, step, first = moved, Step(moved, moving, self._descent, self._slopes), 0
        saved: list[Any] = [None] * len(climbed)
        for t in range(int(steps[-1])):
            if done[t] > first:
                first = done[t]
                now, slopes = ({name: tensor[first:] for name, tensor in ts.items()} for ts in (moved, self._slopes))
                step = Step(now, moving, self._descent, slopes)
            m = most[t]
            here = at[t, first:, :m].flatten()
            truth = y.index_select(0, pooled[t, first:, :m].flatten()).unflatten(0, (-1, m))
            value = spanned.forward(first, here, m) if spanned else inputs.index_select(0, here).unflatten(0, (-1, m))
            for i, part in enumerate(climbed):
                value, saved[i] = part.forward(now, value, saved[i])
            g = LOSSES[type(self._fused.task)](self._fused.task, value, truth)
            g.mul_(1 / m if least[t] == m and self._batches.importance is None else shares[t, first:, :m])
            if classes is not None:
                g.mul_(classes[first:].gather(1, truth).unsqueeze(-1))
            for i in reversed(range(deepest, len(climbed))):
                g = climbed[i].backward(now, saved[i], g, step, deep=span or i > deepest)
            step.finish()
            if spanned:
                spanned.backward(first, here, g)
        new = _split(out, self._fused.layout)
        if spanned:
            spanned.settle(steps.tolist(), new)
        for name in new.keys() - (parts[lowest].names if span else ()):
            new[name].copy_(moved.get(name, self._tensors[name]))


class _ForOneClient(torch.autograd.Function):
    """Defines a function of one client under vmap as that of many clients at once, `run(*tensors, *shared)`.

    Of what is given the first `count` are tensors of the client, [...], which `run` takes stacked, [K, ...]. The first
    of them is a model, which stays [d] where all clients have the same.
    """

    @staticmethod
    def forward(run: Callable[..., Tensor], count: int, *given: Any) -> Tensor:
        return run(*(t if t is None else t.unsqueeze(0) for t in given[:count]), *given[count:]).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Callable[..., Tensor], count: int, *given: Any) -> tuple[Tensor, int]:
        axes = in_dims[2 : 2 + count]
        theta = given[0] if axes[0] is None else given[0].movedim(axes[0], 0)
        rest = (
            t if t is None else _batch(t, axis, info.batch_size)
            for t, axis in zip(given[1:count], axes[1:], strict=True)
        )
        return run(theta, *rest, *given[count:]), 0


def _batch(tensor: Tensor, axis: int | None, clients: int) -> Tensor:
    """The tensor with the axis of clients first; one without it is the same for all of them."""
    return tensor.expand(clients, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
