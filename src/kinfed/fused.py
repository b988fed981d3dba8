"""Fused local training: plain SGD on many clients' dense or recurrent models at once, without autograd.

The clients of a block lie side by side: a layer's weights are [k, out, in], and one batched product serves them all.
The backward pass is written by hand, so that a step of SGD is folded into the product that gives the gradient, and no
gradient is ever stored: `weight -= lr g^T x` is one `baddbmm_`. Batches, short ones among them, clients with fewer
steps, frozen layers and quadratic penalties are those of `Client.descend`, and the result agrees with it to rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from .graph import blank
from .layout import Layout
from .tasks import Classification, Forecasting, Regression, Task

CACHE = 1 << 22  # bytes of parameters in a block of clients: what should stay near the processor from step to step
MOST = 32  # clients in a block
LONG = 128  # rows of a product up to which the step is taken within it
SAVED = 2 / 3  # a layer is trained in the span of its inputs for at most this share of the usual multiplications

Named = dict[str, Tensor]
_aten = torch.ops.aten


class Unfused(Exception):
    """There is no fused form; the message says why."""


class Batches(NamedTuple):
    """Which examples every client's steps take; a client's own pool rows are `rows`."""

    rows: Tensor  # [K, n] int64
    place: Tensor  # [K, T, B] int64 positions in `rows`; those that count come first in every batch
    weight: Tensor  # [K, T, B] 1 on rows that count, 0 on those that only fill a batch up
    valid: Tensor  # [K, T] bool, False past the client's last step


class Descent(NamedTuple):
    r"""SGD on the loss $+ \frac{pull}{2}\|\theta\|^2 + slope \cdot \theta$; weight decay is a part of `pull`."""

    lr: float
    pull: float = 0.0
    slope: Tensor | None = None  # [K, d]


class _Step:
    """A step of SGD on stacked tensors, each moved as soon as the factors of its gradient are known."""

    def __init__(self, tensors: Named, moving: frozenset[str], descent: Descent, slopes: Named) -> None:
        self.moving, self._tensors, self._slopes = moving, tensors, slopes
        self._lr, self._keep = descent.lr, 1 - descent.lr * descent.pull

    def product(self, name: str, g: Tensor, x: Tensor, rows: slice = slice(None)) -> None:
        """The gradient of the tensor [k, out, in], or of these rows of it, is g^T x; g: [k, m, out], x: [k, m, in]."""
        if name in self.moving:
            tensor = self._tensors[name][:, rows]
            if 8 * x.shape[2] < x.shape[1]:  # a long and narrow x is served badly on this side of a product
                self._shrink(tensor).sub_(torch.bmm(x.mT, g).mT, alpha=self._lr)
            elif x.shape[1] > LONG:  # parts of so long a sum would be rounded one by one to what the weight can hold
                self._shrink(tensor).sub_(torch.bmm(g.mT, x), alpha=self._lr)
            else:
                tensor.baddbmm_(g.mT, x, beta=self._keep, alpha=-self._lr)
            self._drift(name, rows)

    def sum(self, name: str, g: Tensor, rows: slice = slice(None)) -> None:
        """The gradient of the tensor [k, out], or of these rows of it, is the sum over m of g: [k, m, out]."""
        if name in self.moving:
            self._shrink(self._tensors[name][:, rows]).sub_(g.sum(1), alpha=self._lr)
            self._drift(name, rows)

    def _shrink(self, tensor: Tensor) -> Tensor:
        return tensor if self._keep == 1 else tensor.mul_(self._keep)

    def _drift(self, name: str, rows: slice) -> None:
        if self._slopes:
            self._tensors[name][:, rows].sub_(self._slopes[name][:, rows], alpha=self._lr)


class Part(Protocol):
    """A piece of a model on stacked batches [k, m, ...]. What it is given, it may overwrite."""

    names: tuple[str, ...]  # of its tensors

    def forward(self, tensors: Named, x: Tensor, before: Any) -> tuple[Tensor, Any]:
        """Outputs, and what the backward pass needs; `before` is what it needed at the last step: free room."""

    def backward(self, tensors: Named, saved: Any, g: Tensor, step: _Step, deep: bool) -> Tensor:
        """Move the part's tensors, g being the loss's gradient at its outputs; if `deep`, return that at its inputs."""


class _Flatten:
    names: tuple[str, ...] = ()

    def forward(self, tensors: Named, x: Tensor, before: Any = None) -> tuple[Tensor, torch.Size]:
        return x.flatten(2), x.shape

    def backward(self, tensors: Named, saved: torch.Size, g: Tensor, step: _Step, deep: bool) -> Tensor:
        return g.view(saved)


class _Activation:
    names: tuple[str, ...] = ()

    def __init__(
        self, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        self._forward, self._backward = forward, backward

    def forward(self, tensors: Named, x: Tensor, before: Any = None) -> tuple[Tensor, Tensor]:
        y = self._forward(x)
        return y, y

    def backward(self, tensors: Named, saved: Tensor, g: Tensor, step: _Step, deep: bool) -> Tensor:
        return self._backward(g, saved, g)


def _relu_backward(g: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return _aten.threshold_backward.grad_input(g, y, 0, grad_input=out)  # type: ignore[no-any-return]


def _tanh_backward(g: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return _aten.tanh_backward.grad_input(g, y, grad_input=out)  # type: ignore[no-any-return]


def _sigmoid_backward(g: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return _aten.sigmoid_backward.grad_input(g, y, grad_input=out)  # type: ignore[no-any-return]


class _Linear:
    def __init__(self, module: nn.Linear, path: str) -> None:
        self.weight, self.bias = f"{path}weight", f"{path}bias" if module.bias is not None else ""
        self.names: tuple[str, ...] = (self.weight, self.bias) if self.bias else (self.weight,)

    def forward(self, tensors: Named, x: Tensor, before: Any = None) -> tuple[Tensor, Tensor]:
        weight, bias = tensors[self.weight], tensors[self.bias] if self.bias else None
        if weight.stride(0) == 0:  # one weight that all clients begin with: a large product instead of many small ones
            return nn.functional.linear(x, weight[0], None if bias is None else bias[0]), x
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT), x

    def backward(self, tensors: Named, saved: Tensor, g: Tensor, step: _Step, deep: bool) -> Tensor:
        below = torch.bmm(g, tensors[self.weight]) if deep else g
        step.product(self.weight, g, saved)
        if self.bias:
            step.sum(self.bias, g)
        return below


class _Span:
    r"""A linear layer on inputs X: [k, n, in] that never change, trained without touching its weight.

    Its steps move it only in the span of X. With $\beta = 1 - lr \cdot pull$ its weight after t steps is
    $\beta^t W - s_t \, slope - D^T X$, where D: [k, n, out] collects the gradients at its outputs,
    $D \leftarrow \beta D + lr \, g$, and $s_t = \beta s_{t-1} + lr$. So its outputs are
    $\beta^t X W^T - s_t X slope^T - X X^T D$, and W is read once and written once, however many steps there are.
    A bias is the weight of an input that is always 1.
    """

    def __init__(self, linear: _Linear, x: Tensor, tensors: Named, descent: Descent, slopes: Named) -> None:
        self._linear, self._x, self._tensors, self._slopes = linear, x, tensors, slopes
        self._lr, self._keep = descent.lr, 1 - descent.lr * descent.pull
        self._base = linear.forward(tensors, x)[0]  # [k, n, out]
        self._drift = linear.forward(slopes, x)[0] if slopes else None  # [k, n, out]
        self._gram = torch.bmm(x, x.mT)  # [k, n, n]
        if linear.bias:
            self._gram += 1
        self._learned = torch.zeros_like(self._base)
        self._shares = [(1.0, 0.0)]  # beta^t and s_t after t steps

    def forward(self, first: int, at: Tensor, m: int) -> Tensor:
        """Outputs [k - first, m, out] of the clients from `first` on; at: [(k - first) m] rows of [k n]."""
        beta, s = self._shares[-1]
        base, gram = (t.flatten(0, 1).index_select(0, at).unflatten(0, (-1, m)) for t in (self._base, self._gram))
        y: Tensor = base.baddbmm_(gram, self._learned[first:], beta=beta, alpha=-1)
        if self._drift is not None:
            y.sub_(self._drift.flatten(0, 1).index_select(0, at).view_as(y), alpha=s)
        return y

    def backward(self, first: int, at: Tensor, g: Tensor) -> None:
        """Take a step; g: [k - first, m, out] is the loss's gradient at the outputs."""
        if self._keep != 1:
            self._learned[first:].mul_(self._keep)
        self._learned.view(-1, g.shape[-1]).index_add_(0, at, g.flatten(0, 1), alpha=self._lr)
        beta, s = self._shares[-1]
        self._shares.append((beta * self._keep, s * self._keep + self._lr))

    def settle(self, steps: list[int], out: Named) -> None:
        """Write weight and bias as they are after so many steps of each client."""
        for name in self._linear.names:
            for i, t in enumerate(steps):  # one by one, for a large weight that is written stays in the cache so long
                (beta, s), new, old, learned = self._shares[t], out[name][i], self._tensors[name][i], self._learned[i]
                if name == self._linear.bias:
                    torch.sub(old * beta, learned.sum(0), out=new)
                else:
                    torch.addmm(old, learned.T, self._x[i], beta=beta, alpha=-1, out=new)
                if self._slopes:
                    new.sub_(self._slopes[name][i], alpha=s)


class _Run(NamedTuple):
    """A recurrent layer's pass over L steps."""

    x: Tensor  # [k, L, m, F]
    states: Tensor  # [k, L + 1, m, H], the one it began with first
    gates: list[Tensor]  # [k, L, m, ...] each; on the way back overwritten by the gradients at their inputs
    steps: list[tuple[Tensor, ...]]  # states before and after each step, and its gates: [k, m, ...] each


def _begun(x: Tensor, before: _Run | None, room: Callable[[], tuple[Tensor, list[Tensor], list[Tensor]]]) -> _Run:
    """A pass over x in the room of the last step's; `room` makes states, gates, and the parts used of these."""
    if before is not None and before.x.shape == x.shape:
        return before._replace(x=x)  # memory asked for anew in every step would cost a tenth of the time
    states, gates, parts = room()
    views = (view.unbind(1) for view in (states[:, :-1], states[:, 1:], *parts))
    return _Run(x, states, gates, list(zip(*views, strict=True)))


def _names(path: str, suffix: str) -> tuple[str, ...]:
    return tuple(f"{path}{kind}{suffix}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))


def _tanh(x: Tensor) -> Tensor:
    """In place, through the logistic function: PyTorch's tanh takes six times as long on a CPU."""
    return x.mul_(2).sigmoid_().mul_(2).sub_(1)


class _RNN:
    """nn.RNN, step by step: h <- tanh(W x + b + V h + c), or ReLU of it."""

    def __init__(self, module: nn.RNN, path: str) -> None:
        self.names, self._tanh = _names(path, "_l0"), module.nonlinearity == "tanh"

    def begin(self, tensors: Named, x: Tensor, before: _Run | None) -> _Run:
        """What the inputs x: [k, L, m, F] alone give, for all steps."""
        read, recall, b, c = (tensors[n] for n in self.names)

        def room() -> tuple[Tensor, list[Tensor], list[Tensor]]:
            states = x.new_zeros(len(x), x.shape[1] + 1, x.shape[2], recall.shape[2])
            gates = [torch.empty_like(states[:, 1:])]
            return states, gates, gates

        run = _begun(x, before, room)
        torch.baddbmm((b + c).unsqueeze(1), x.flatten(1, 2), read.mT, out=run.states[:, 1:].flatten(1, 2))
        return run

    def forward(self, tensors: Named, run: _Run, t: int) -> Tensor:
        """[k, m, H] the state after step t."""
        before, after, _ = run.steps[t]
        after.baddbmm_(before, tensors[self.names[1]].mT)
        return _tanh(after) if self._tanh else after.relu_()

    def backward(self, tensors: Named, run: _Run, t: int, g: Tensor) -> Tensor:
        """The loss's gradient at the state before step t, given the one at the state after it."""
        _, after, gate = run.steps[t]
        return torch.bmm((_tanh_backward if self._tanh else _relu_backward)(g, after, gate), tensors[self.names[1]])

    def move(self, run: _Run, step: _Step) -> None:
        """Move the layer's tensors, after `backward` of all steps."""
        read, recall, b, c = self.names
        g = run.gates[0].flatten(1, 2)
        step.product(read, g, run.x.flatten(1, 2))
        step.product(recall, g, run.states[:, :-1].flatten(1, 2))
        total = g.sum(1, keepdim=True)
        step.sum(b, total)
        step.sum(c, total)


class _GRU:
    """nn.GRU or nn.GRUCell, step by step: h <- (1 - z) n + z h with n = tanh(W x + b + r q), where q = V h + c.

    One gate holds r, z and q, in the order of V's rows, r and z being logistic; the other one holds n.
    """

    def __init__(self, module: nn.GRU | nn.GRUCell, path: str, suffix: str) -> None:
        self.names, self._width = _names(path, suffix), module.hidden_size

    def begin(self, tensors: Named, x: Tensor, before: _Run | None, state: Tensor | float = 0.0) -> _Run:
        """What the inputs x: [k, L, m, F] alone give, for all steps; state: [k, m, H] is the first."""
        read, _, b, c = (tensors[n] for n in self.names)
        h, flat = self._width, x.flatten(1, 2)

        def room() -> tuple[Tensor, list[Tensor], list[Tensor]]:
            k, length, m, _ = x.shape
            sizes = (length + 1, m, h), (length, m, 3 * h), (length, m, h)
            states, rzq, n = (x.new_empty(k, *size) for size in sizes)
            return states, [rzq, n], [rzq, rzq[..., : 2 * h], *rzq.split(h, -1), n]

        run = _begun(x, before, room)
        run.states[:, 0] = state
        rzq, n = (gate.flatten(1, 2) for gate in run.gates)
        torch.baddbmm((b + c)[:, None, : 2 * h], flat, read[:, : 2 * h].mT, out=rzq[..., : 2 * h])
        rzq[..., 2 * h :] = c[:, None, 2 * h :]
        torch.baddbmm(b[:, None, 2 * h :], flat, read[:, 2 * h :].mT, out=n)
        return run

    def column(self, tensors: Named) -> Tensor:
        """[k, 1, 3 H] the weights of the first feature; side by side in memory they are read several times faster."""
        return tensors[self.names[0]][:, :, :1].mT.contiguous()

    def feed(self, column: Tensor, run: _Run, t: int, value: Tensor) -> None:
        """Set the first feature of step t, which was 0, to value: [k, m, 1]."""
        run.x[:, t, :, :1] = value
        _, _, _, rz, _, _, _, n = run.steps[t]
        rz.addcmul_(value, column[..., : 2 * self._width])
        n.addcmul_(value, column[..., 2 * self._width :])

    def starve(self, column: Tensor, run: _Run, t: int) -> Tensor:
        """[k, m, 1] the loss's gradient at what step t was fed, after `backward` of this step."""
        _, _, _, rz, _, _, _, n = run.steps[t]
        fed = torch.bmm(column[..., 2 * self._width :], n.mT)
        return fed.baddbmm_(column[..., : 2 * self._width], rz.mT).mT

    def forward(self, tensors: Named, run: _Run, t: int) -> Tensor:
        """[k, m, H] the state after step t."""
        before, after, rzq, rz, r, z, q, n = run.steps[t]
        rzq.baddbmm_(before, tensors[self.names[1]].mT)
        rz.sigmoid_()
        return torch.lerp(_tanh(n.addcmul_(r, q)), before, z, out=after)

    def backward(self, tensors: Named, run: _Run, t: int, g: Tensor) -> Tensor:
        """The loss's gradient at the state before step t; g, the one at the state after it, is overwritten."""
        before, _, rzq, _, r, z, q, n = run.steps[t]
        below = g * z
        _sigmoid_backward((before - n).mul_(g), z, z)
        _tanh_backward(g.sub_(below), n, n)
        slope = n * q
        torch.mul(n, r, out=q)
        _sigmoid_backward(slope, r, r)
        return below.baddbmm_(rzq, tensors[self.names[1]])

    def move(self, run: _Run, step: _Step) -> None:
        """Move the layer's tensors, after `backward` of all steps."""
        read, recall, b, c = self.names
        h, x, (rzq, n) = self._width, run.x.flatten(1, 2), (gate.flatten(1, 2) for gate in run.gates)
        total = rzq.sum(1, keepdim=True)
        for rows, g, sum in ((slice(2 * h), rzq[..., : 2 * h], total[..., : 2 * h]), (slice(2 * h, None), n, n)):
            step.product(read, g, x, rows)
            step.sum(b, sum, rows)
        step.product(recall, rzq, run.states[:, :-1].flatten(1, 2))
        step.sum(c, total)


class _LastState:
    """A recurrent layer over a window [k, m, L, F], of which only the last state is wanted: [k, m, H]."""

    def __init__(self, cell: _RNN | _GRU) -> None:
        self._cell, self.names = cell, cell.names

    def forward(self, tensors: Named, x: Tensor, before: _Run | None) -> tuple[Tensor, _Run]:
        run = self._cell.begin(tensors, x.transpose(1, 2).contiguous(), before)
        for t in range(x.shape[2]):
            state = self._cell.forward(tensors, run, t)
        return state, run

    def backward(self, tensors: Named, saved: _Run, g: Tensor, step: _Step, deep: bool) -> Tensor:
        for t in reversed(range(saved.x.shape[1])):
            g = self._cell.backward(tensors, saved, t, g)
        self._cell.move(saved, step)
        return g


class _Forecaster:
    """The model `gru`: an encoder, and a decoder that is fed with what it said last; see models/gru.py."""

    def __init__(self, encoder: _GRU, decoder: _GRU, head: _Linear, outputs: int) -> None:
        self._encoder, self._decoder, self._head, self._outputs = encoder, decoder, head, outputs
        self.names = encoder.names + decoder.names + head.names

    def forward(
        self, tensors: Named, x: Tensor, before: tuple[_Run, _Run, Tensor] | None
    ) -> tuple[Tensor, tuple[_Run, _Run, Tensor]]:
        first, second, _ = before or (None, None, None)
        encoder = self._encoder.begin(tensors, x.transpose(1, 2).contiguous(), first)
        for t in range(x.shape[2]):
            state = self._encoder.forward(tensors, encoder, t)
        ahead = x.new_zeros(len(x), self._outputs, *x.shape[1::2])  # [k, O, m, F]
        clock, tick = x[:, :, -1, 1:], x[:, :, -1, 1:] - x[:, :, -2, 1:]
        for t in range(self._outputs):
            ahead[:, t, :, 1:] = clock
            clock = (clock + tick) % 1
        decoder, column = self._decoder.begin(tensors, ahead, second, state), self._decoder.column(tensors)
        value, said = x[:, :, -1, :1], []
        for t in range(self._outputs):
            self._decoder.feed(column, decoder, t, value)
            value = self._head.forward(tensors, self._decoder.forward(tensors, decoder, t))[0]
            said.append(value)
        return torch.cat(said, 2), (encoder, decoder, column)

    def backward(self, tensors: Named, saved: tuple[_Run, _Run, Tensor], g: Tensor, step: _Step, deep: bool) -> Tensor:
        encoder, decoder, column = saved
        said = g.mT.unsqueeze(-1).contiguous()  # [k, O, m, 1]
        fed = below = g.new_zeros(())
        for t in reversed(range(self._outputs)):
            said[:, t] += fed  # an output is the next step's input too
            state = torch.bmm(said[:, t], tensors[self._head.weight]).add_(below)
            below = self._decoder.backward(tensors, decoder, t, state)
            fed = self._decoder.starve(column, decoder, t)
        if not step.moving.isdisjoint(self._encoder.names):
            for t in reversed(range(encoder.x.shape[1])):
                below = self._encoder.backward(tensors, encoder, t, below)
            self._encoder.move(encoder, step)
        self._decoder.move(decoder, step)
        self._head.backward(tensors, decoder.states[:, 1:].flatten(1, 2), said.flatten(1, 2), step, False)
        return g


def _cross_entropy(task: Classification, outputs: Tensor, y: Tensor) -> Tensor:
    chances = outputs.mT.softmax(1).mT  # along short rows in memory softmax takes ten times as long
    return chances.scatter_add_(-1, y.unsqueeze(-1), outputs.new_full((), -1).expand(*y.shape, 1))


def _squared(task: Regression, outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y.view_as(outputs)).mul_(2 / outputs.shape[2:].numel())


def _forecast(task: Forecasting, outputs: Tensor, y: Tensor) -> Tensor:
    known = ~y.isnan()
    error = (outputs - (torch.where(known, y, task.mean) - task.mean) / task.deviation) * known
    return (error.sign() if task.error == "absolute" else 2 * error) / y.shape[-1]


# The gradient of each example's loss at the outputs: [k, m, ...], y: [k, m, ...].
LOSSES: dict[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    Classification: _cross_entropy,
    Regression: _squared,
    Forecasting: _forecast,
}


def last_state(module: nn.Module, path: str) -> Part:
    """The last state of a recurrent layer that reads windows [B, L, F]; raises Unfused for layers other than these."""
    if isinstance(module, nn.RNN):
        return _LastState(_RNN(_simple(module, nn.RNN), path))
    return _LastState(_GRU(_simple(module, nn.GRU), path, "_l0"))


def forecaster(encoder: nn.GRU, decoder: nn.GRUCell, head: nn.Linear, outputs: int, path: str) -> Part:
    """The model of models/gru.py, whose names these are: a decoder whose head's output is its next input."""
    return _Forecaster(
        _GRU(_simple(encoder, nn.GRU), f"{path}encoder.", "_l0"),
        _GRU(_simple(decoder, nn.GRUCell), f"{path}decoder.", ""),
        _Linear(_simple(head, nn.Linear), f"{path}head."),
        outputs,
    )


def _simple(module: nn.Module, kind: type) -> Any:
    """The module, if it is of exactly this kind with the usual settings."""
    if type(module) is not kind:
        raise Unfused(f"{type(module).__name__} has no fused form")
    usual = {"num_layers": 1, "bidirectional": False, "batch_first": True, "bias": True, "proj_size": 0}
    for name, value in usual.items():
        if isinstance(module, nn.RNNBase) and getattr(module, name) != value:
            raise Unfused(f"a recurrent layer with {name}={getattr(module, name)} has no fused form")
    return module


def _flatten(module: nn.Flatten, path: str) -> list[Part]:
    if (module.start_dim, module.end_dim) != (1, -1):
        raise Unfused("Flatten has a fused form only if it leaves one axis")
    return [_Flatten()]


# The parts of each kind of module: exactly this kind, for a subclass may compute something else.
FORMS: dict[type, Callable[[Any, str], list[Part]]] = {
    nn.Sequential: lambda module, path: [p for name, m in module._modules.items() for p in parts(m, f"{path}{name}.")],
    nn.Linear: lambda module, path: [_Linear(module, path)],
    nn.Flatten: _flatten,
    nn.ReLU: lambda module, path: [_Activation(Tensor.relu_, _relu_backward)],
    nn.Tanh: lambda module, path: [_Activation(Tensor.tanh_, _tanh_backward)],
    nn.Sigmoid: lambda module, path: [_Activation(Tensor.sigmoid_, _sigmoid_backward)],
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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

    @staticmethod
    def of(module: nn.Module, layout: Layout, task: Task, example: torch.Size) -> "Fused":
        """The fused form of a module on examples of this shape; raises Unfused if there is none."""
        for part in module.modules():
            if "forward" in vars(part) or any(getattr(part, hooks) for hooks in HOOKS):
                raise Unfused(f"this {type(part).__name__} has hooks or its own forward, which would be passed over")
        found = parts(module)
        if type(task) not in LOSSES:
            raise Unfused(f"the loss of {type(task).__name__} has no fused form")
        if len(example) > 1 and not isinstance(found[0], _Flatten | _LastState | _Forecaster):
            raise Unfused("only examples with one axis, or flattened at once, have a fused form")
        if any(isinstance(part, _LastState | _Forecaster) for part in found[1:]):
            raise Unfused("a recurrent layer has a fused form only where it comes first")
        used = [name for part in found for name in part.names]
        if sorted(used) != sorted(e.name for e in layout.entries):
            raise Unfused("layers that share tensors have no fused form")
        return Fused(tuple(found), layout, task)

    def descend(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        batches: Batches,
        descent: Descent,
        only: frozenset[str] | None = None,
    ) -> Tensor:
        """Local training of K clients from theta: [K, d] on the pool x, y; returns the trained [K, d].

        `only` names the tensors that may move; None: all that are trainable.
        """
        moving = frozenset(e.name for e in self.layout.entries if e.trainable and (only is None or e.name in only))
        lowest = next((i for i, part in enumerate(self.parts) if not moving.isdisjoint(part.names)), None)
        if lowest is None:
            return theta.clone()
        order = batches.valid.sum(1).argsort(stable=True)  # so that those who still train are the last ones of a block
        if sort := not torch.equal(order, torch.arange(len(order), device=order.device)):
            theta, batches = theta[order], Batches(*(t[order] for t in batches))
            descent = descent if descent.slope is None else descent._replace(slope=descent.slope[order])
        found = blank(len(theta), theta)
        with torch.no_grad():
            for at, span in self._blocks(batches, moving, lowest, theta):
                slope = None if descent.slope is None else descent.slope[at]
                block = _Block(self, theta[at], Batches(*(t[at] for t in batches)), descent._replace(slope=slope))
                block.train(x, y, moving, lowest, span, found[at])
        return found[order.argsort()] if sort else found

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
        found: Tensor = _Alone.apply(self, theta, *batches, descent.slope, x, y, descent.lr, descent.pull, only)
        return found

    def _blocks(
        self, batches: Batches, moving: frozenset[str], lowest: int, theta: Tensor
    ) -> Iterator[tuple[slice, bool]]:
        """Clients that are trained at once, and whether the lowest layer moves in the span of its inputs."""
        shapes, part = {e.name: e.shape for e in self.layout.entries}, self.parts[lowest]
        examples = (batches.place.amax((1, 2)) + 1).tolist()  # [K] n
        seen = batches.weight.sum((1, 2)).tolist()  # [K] the same with repetition

        def spans(i: int) -> bool:
            """Whether that saves enough multiplications of larger matrices to be quicker."""
            if not isinstance(part, _Linear) or not moving.issuperset(part.names):
                return False
            (out, width), n = shapes[part.weight], examples[i]
            return bool(n * width * (2 * out + n) + seen[i] * n * out < SAVED * 2 * seen[i] * width * out)

        start = 0
        while start < len(examples):
            names = (name for part in self.parts[lowest + spans(start) :] for name in part.names)
            size = CACHE // max(1, theta.element_size() * sum(shapes[name].numel() for name in names))
            # A GPU has no such cache, and is the faster the more it is given.
            stop = min(start + max(1, min(size, MOST)), len(examples)) if theta.device.type == "cpu" else len(examples)
            yield slice(start, stop), spans(stop - 1)
            start = stop


class _Block:
    """Clients that are trained at once, those with the fewest steps first."""

    def __init__(self, fused: Fused, theta: Tensor, batches: Batches, descent: Descent) -> None:
        self._fused, self._batches, self._descent = fused, batches, descent
        self._tensors = self._split(theta)
        self._slopes = {} if descent.slope is None else self._split(descent.slope)

    def _split(self, theta: Tensor) -> Named:
        """theta: [k, d] as views [k, ...]."""
        return {e.name: theta[:, e.at].unflatten(1, e.shape) for e in self._fused.layout.entries}

    def train(self, x: Tensor, y: Tensor, moving: frozenset[str], lowest: int, span: bool, out: Tensor) -> None:
        """Write the trained vectors to out: [k, d]."""
        parts, (rows, place, weight, valid) = self._fused.parts, self._batches
        k, width = len(rows), int(place.max()) + 1
        rows = rows[:, :width]
        pooled = rows.gather(1, place.flatten(1)).view_as(place).transpose(0, 1).contiguous()  # [T, k, B] of the pool
        inputs, at, spanned = x, pooled, None
        if fixed := span or any(part.names for part in parts[:lowest]):  # what the lowest layer reads, once for all
            inputs = x.index_select(0, rows.flatten()).unflatten(0, (k, width))
            for part in parts[:lowest]:
                inputs = part.forward(self._tensors, inputs, None)[0]
            if span:
                spanned = _Span(cast(_Linear, parts[lowest]), inputs, self._tensors, self._descent, self._slopes)
            inputs = inputs.flatten(0, 1)
            at = (place + width * torch.arange(k, device=place.device)[:, None, None]).transpose(0, 1).contiguous()
        climbed = parts[lowest + span if fixed else 0 :]
        deepest = 0 if fixed else lowest  # of those, the lowest that moves
        # Copies, for theta stays as it is; and products are faster where matrices lie side by side.
        moved = {name: self._tensors[name].clone() for part in climbed for name in part.names}
        steps, real = valid.sum(1), weight.sum(2)
        done = (steps[:, None] <= torch.arange(len(at), device=steps.device)).sum(0).tolist()  # clients, by step
        most = real.amax(0).long().tolist()
        least = torch.where(valid, real, torch.inf).amin(0).tolist()
        share = (weight / real.clamp(min=1).unsqueeze(-1)).transpose(0, 1).unsqueeze(-1)  # [T, k, B, 1]
        now, step, first = moved, _Step(moved, moving, self._descent, self._slopes), 0
        saved: list[Any] = [None] * len(climbed)
        for t in range(int(steps[-1])):
            if done[t] > first:
                first = done[t]
                now, slopes = ({name: tensor[first:] for name, tensor in ts.items()} for ts in (moved, self._slopes))
                step = _Step(now, moving, self._descent, slopes)
            m = most[t]
            here = at[t, first:, :m].flatten()
            truth = y.index_select(0, pooled[t, first:, :m].flatten()).unflatten(0, (-1, m))
            value = spanned.forward(first, here, m) if spanned else inputs.index_select(0, here).unflatten(0, (-1, m))
            for i, part in enumerate(climbed):
                value, saved[i] = part.forward(now, value, saved[i])
            g = LOSSES[type(self._fused.task)](self._fused.task, value, truth)
            g.mul_(1 / m if least[t] == m else share[t, first:, :m])
            for i in reversed(range(deepest, len(climbed))):
                g = climbed[i].backward(now, saved[i], g, step, deep=span or i > deepest)
            if spanned:
                spanned.backward(first, here, g)
        new = self._split(out)
        if spanned:
            spanned.settle(steps.tolist(), new)
        for name in new.keys() - (parts[lowest].names if span else ()):
            new[name].copy_(moved.get(name, self._tensors[name]))


class _Alone(torch.autograd.Function):
    """Tells vmap what training many clients means."""

    @staticmethod
    def forward(form: Fused, *given: Any) -> Tensor:
        return _descend(form, [t if t is None else t.unsqueeze(0) for t in given[:6]], *given[6:]).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, form: Fused, *given: Any) -> tuple[Tensor, int]:
        tensors = [
            t if t is None else t.movedim(dim, 0) if dim is not None else t.expand(info.batch_size, *t.shape)
            for t, dim in zip(given[:6], in_dims[1:], strict=False)
        ]
        return _descend(form, tensors, *given[6:]), 0


def _descend(form: Fused, tensors: list[Any], x: Tensor, y: Tensor, lr: float, pull: float, only: Any) -> Tensor:
    theta, *batches, slope = tensors
    return form.descend(theta, x, y, Batches(*batches), Descent(lr, pull, slope), only)
