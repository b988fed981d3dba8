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
from .dense import Activation, Flatten, Linear, Plain, Span, relu_backward, sigmoid_backward, tanh_backward
from .recurrent import Forecaster, LastState
from .step import Batches, Descent, Named, Part, Step, Unfused

CACHE = 1 << 22  # bytes of parameters in a block of clients, which should stay in the cache from step to step
MOST = 32  # clients in a block
SAVED = 2 / 3  # a layer is trained in the span of its inputs for at most this share of the usual multiplications


def _cross_entropy(task: Classification, outputs: Tensor, y: Tensor) -> Tensor:
    chances = outputs.mT.softmax(1).mT  # along short rows in memory softmax takes ten times as long
    return chances.scatter_add_(-1, y.unsqueeze(-1), outputs.new_full((), -1).expand(*y.shape, 1))


def _squared_error(task: Regression, outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - task.standardise(y).view_as(outputs)).mul_(2 / outputs.shape[2:].numel())


def _counts(task: Counts, outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.exp() * task.mean - y.view_as(outputs)) / max(1.0, task.mean)


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
        if len(example) > 1 and not isinstance(layers[0], Flatten | LastState | Forecaster):
            raise Unfused("only examples with one axis, or flattened at once, have a fused form")
        if any(isinstance(part, LastState | Forecaster) for part in layers[1:]):
            raise Unfused("a recurrent layer has a fused form only where it comes first")
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
        moving = frozenset(e.name for e in self.layout.entries if e.trainable and (only is None or e.name in only))
        lowest = next((i for i, part in enumerate(self.parts) if not moving.isdisjoint(part.names)), None)
        if lowest is None:
            return theta.expand(len(batches.rows), -1).clone()
        order = batches.valid.sum(1).argsort(stable=True)  # so that those who still train are the last ones of a block
        if sort := not torch.equal(order, torch.arange(len(order), device=order.device)):
            theta, batches = theta if theta.ndim == 1 else theta[order], batches.select(order)
            descent = descent if descent.slope is None else descent._replace(slope=descent.slope[order])
        result = blank(len(order), theta.expand(len(order), -1))
        with torch.no_grad():
            for at, span in self._blocks(batches, moving, lowest, theta, descent.clip):
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
        how = descent.lr, descent.pull, descent.clip
        result: Tensor = _ForOneClient.apply(self, theta, *batches, descent.slope, x, y, how, only)
        return result

    @property
    def repeats(self) -> bool:
        """Whether a layer of it is applied several times in a pass."""
        return any(isinstance(part, LastState | Forecaster) for part in self.parts)

    def _blocks(
        self, batches: Batches, moving: frozenset[str], lowest: int, theta: Tensor, clip: float
    ) -> Iterator[tuple[slice, bool]]:
        """Clients that are trained at once, and whether the lowest layer moves in the span of its inputs."""
        shapes, part = {e.name: e.shape for e in self.layout.whole.entries}, self.parts[lowest]
        examples = (batches.place.amax((1, 2)) + 1).tolist()  # [K] n
        seen = batches.weight.sum((1, 2)).tolist()  # [K] the same with repetition

        def spans(i: int) -> bool:
            """Whether that saves enough multiplications to be faster."""
            if not isinstance(part, Linear) or not moving.issuperset(part.names) or clip < math.inf:
                return False
            (out, width), n = shapes[part.weight], examples[i]
            return bool(n * width * (2 * out + n) + seen[i] * n * out < SAVED * 2 * seen[i] * width * out)

        start = 0
        while start < len(examples):
            names = (name for part in self.parts[lowest + spans(start) :] for name in part.names)
            size = CACHE // max(1, theta.element_size() * sum(shapes[name].numel() for name in names))
            # A GPU has no such cache, and is faster with larger blocks.
            stop = min(start + max(1, min(size, MOST)), len(examples)) if theta.device.type == "cpu" else len(examples)
            yield slice(start, stop), spans(stop - 1)
            start = stop


class _Block:
    """Clients that are trained at once, those with the fewest steps first."""

    def __init__(self, fused: Fused, theta: Tensor, batches: Batches, descent: Descent) -> None:
        self._fused, self._batches, self._descent = fused, batches, descent
        still, k = fused.frozen, len(batches.rows)
        wide = {name: t.expand(k, *t.shape) for name, t in still.items()}
        self._begin = self._split(theta) | (still if theta.ndim == 1 else wide)  # [k, ...], or [...] if all begin alike
        self._tensors = self._split(theta.expand(k, -1)) | wide
        self._slopes = {} if descent.slope is None else self._split(descent.slope)

    def _split(self, theta: Tensor) -> Named:
        """theta: [k, d] as views [k, ...], or [d] as views [...]."""
        return {e.name: theta[..., e.at].unflatten(-1, e.shape) for e in self._fused.layout.entries}

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
        new = self._split(out)
        if spanned:
            spanned.settle(steps.tolist(), new)
        for name in new.keys() - (parts[lowest].names if span else ()):
            new[name].copy_(moved.get(name, self._tensors[name]))


TENSORS = 2 + len(Batches._fields)  # of a model, its batches and a slope, which differ between clients


class _ForOneClient(torch.autograd.Function):
    """Defines training under vmap as training of many clients at once."""

    @staticmethod
    def forward(form: Fused, *given: Any) -> Tensor:
        tensors = [t if t is None else t.unsqueeze(0) for t in given[:TENSORS]]
        return _descend(form, tensors, *given[TENSORS:]).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, form: Fused, *given: Any) -> tuple[Tensor, int]:
        tensors = [
            t if t is None else _batch(t, dim, info.batch_size)
            for t, dim in zip(given[:TENSORS], in_dims[1:], strict=False)
        ]
        if in_dims[1] is None:
            tensors[0] = given[0]  # a model that all begin with
        return _descend(form, tensors, *given[TENSORS:]), 0


def _batch(tensor: Tensor, axis: int | None, clients: int) -> Tensor:
    """The tensor with the axis of clients first; one without it is the same for all of them."""
    return tensor.expand(clients, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


def _descend(form: Fused, tensors: list[Any], x: Tensor, y: Tensor, how: tuple[float, ...], only: Any) -> Tensor:
    lr, pull, clip = how
    theta, *batches, slope = tensors
    return form.descend(theta, x, y, Batches(*batches), Descent(lr, pull, slope, clip), only)
