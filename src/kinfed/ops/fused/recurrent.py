"""Fused recurrent layers: RNN and GRU, step by step, and the encoder-decoder of models/gru.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .dense import Linear, relu_backward, sigmoid_backward, tanh_backward
from .step import Named, Part, Step, Unfused


class _Run(NamedTuple):
    """A recurrent layer's pass over L steps."""

    x: Tensor  # [k, L, m, F]
    states: Tensor  # [k, L + 1, m, H], the one it began with first
    gates: list[Tensor]  # [k, L, m, ...] each; on the way back overwritten by the gradients at their inputs
    steps: list[tuple[Tensor, ...]]  # states before and after each step, and its gates: [k, m, ...] each


def _begin_pass(x: Tensor, before: _Run | None, room: Callable[[], tuple[Tensor, list[Tensor], list[Tensor]]]) -> _Run:
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

        run = _begin_pass(x, before, room)
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
        return torch.bmm((tanh_backward if self._tanh else relu_backward)(g, after, gate), tensors[self.names[1]])

    def move(self, run: _Run, step: Step) -> None:
        """Move the layer's tensors, after `backward` of all steps."""
        read, recall, b, c = self.names
        g = run.gates[0].flatten(1, 2)
        step.descend_product(read, g, run.x.flatten(1, 2))
        step.descend_product(recall, g, run.states[:, :-1].flatten(1, 2))
        total = g.sum(1, keepdim=True)
        step.descend_sum(b, total)
        step.descend_sum(c, total)


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

        run = _begin_pass(x, before, room)
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
        sigmoid_backward((before - n).mul_(g), z, z)
        tanh_backward(g.sub_(below), n, n)
        slope = n * q
        torch.mul(n, r, out=q)
        sigmoid_backward(slope, r, r)
        return below.baddbmm_(rzq, tensors[self.names[1]])

    def move(self, run: _Run, step: Step) -> None:
        """Move the layer's tensors, after `backward` of all steps."""
        read, recall, b, c = self.names
        h = self._width
        x = run.x.flatten(1, 2)
        (rzq, n) = (gate.flatten(1, 2) for gate in run.gates)
        total = rzq.sum(1, keepdim=True)
        for rows, g, sum in ((slice(2 * h), rzq[..., : 2 * h], total[..., : 2 * h]), (slice(2 * h, None), n, n)):
            step.descend_product(read, g, x, rows)
            step.descend_sum(b, sum, rows)
        step.descend_product(recall, rzq, run.states[:, :-1].flatten(1, 2))
        step.descend_sum(c, total)


class LastState:
    """A recurrent layer over a window [k, m, L, F], of which only the last state is wanted: [k, m, H]."""

    def __init__(self, cell: _RNN | _GRU) -> None:
        self._cell, self.names = cell, cell.names

    def forward(self, tensors: Named, x: Tensor, before: _Run | None) -> tuple[Tensor, _Run]:
        run = self._cell.begin(tensors, x.transpose(1, 2).contiguous(), before)
        for t in range(x.shape[2]):
            state = self._cell.forward(tensors, run, t)
        return state, run

    def backward(self, tensors: Named, saved: _Run, g: Tensor, step: Step, deep: bool) -> Tensor:
        for t in reversed(range(saved.x.shape[1])):
            g = self._cell.backward(tensors, saved, t, g)
        self._cell.move(saved, step)
        return g


class Forecaster:
    """The model `gru`: an encoder, and a decoder whose input is its last output; see models/gru.py."""

    def __init__(self, encoder: _GRU, decoder: _GRU, head: Linear, outputs: int) -> None:
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
        decoder = self._decoder.begin(tensors, ahead, second, state)
        column = self._decoder.column(tensors)
        value, forecasts = x[:, :, -1, :1], []
        for t in range(self._outputs):
            self._decoder.feed(column, decoder, t, value)
            value = self._head.forward(tensors, self._decoder.forward(tensors, decoder, t))[0]
            forecasts.append(value)
        return torch.cat(forecasts, 2), (encoder, decoder, column)

    def backward(self, tensors: Named, saved: tuple[_Run, _Run, Tensor], g: Tensor, step: Step, deep: bool) -> Tensor:
        encoder, decoder, column = saved
        grads = g.mT.unsqueeze(-1).contiguous()  # [k, O, m, 1]
        fed = below = g.new_zeros(())
        for t in reversed(range(self._outputs)):
            grads[:, t] += fed  # an output is the next step's input too
            state = torch.bmm(grads[:, t], tensors[self._head.weight]).add_(below)
            below = self._decoder.backward(tensors, decoder, t, state)
            fed = self._decoder.starve(column, decoder, t)
        if not step.moving.isdisjoint(self._encoder.names):
            for t in reversed(range(encoder.x.shape[1])):
                below = self._encoder.backward(tensors, encoder, t, below)
            self._encoder.move(encoder, step)
        self._decoder.move(decoder, step)
        self._head.backward(tensors, decoder.states[:, 1:].flatten(1, 2), grads.flatten(1, 2), step, False)
        return g


def last_state(module: nn.Module, path: str) -> Part:
    """The last state of a recurrent layer that reads windows [B, L, F]; raises Unfused for layers other than these."""
    if isinstance(module, nn.RNN):
        return LastState(_RNN(_simple(module, nn.RNN), path))
    return LastState(_GRU(_simple(module, nn.GRU), path, "_l0"))


def forecaster(encoder: nn.GRU, decoder: nn.GRUCell, head: nn.Linear, outputs: int, path: str) -> Part:
    """The model of models/gru.py, whose names these are: a decoder whose head's output is its next input."""
    return Forecaster(
        _GRU(_simple(encoder, nn.GRU), f"{path}encoder.", "_l0"),
        _GRU(_simple(decoder, nn.GRUCell), f"{path}decoder.", ""),
        Linear(_simple(head, nn.Linear), f"{path}head."),
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
