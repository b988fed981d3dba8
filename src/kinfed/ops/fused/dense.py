"""Fused dense layers: flattening, activations and linear layers, and these where their inputs never change."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .step import Descent, Named, Part, Step

_aten = torch.ops.aten


class Flatten:
    """[k, m, ...] to [k, m, F]."""

    names: tuple[str, ...] = ()

    def forward(self, tensors: Named, x: Tensor, before: Any = None) -> tuple[Tensor, torch.Size]:
        return x.flatten(2), x.shape

    def backward(self, tensors: Named, saved: torch.Size, g: Tensor, step: Step, deep: bool) -> Tensor:
        return g.view(saved)


class Plain:
    """A function of an example's numbers alone, [k, m, ...] to [k, m, ...], without tensors of its own."""

    names: tuple[str, ...] = ()

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def forward(self, tensors: Named, x: Tensor, before: Any = None) -> tuple[Tensor, Tensor]:
        return self._function(x), x

    def backward(self, tensors: Named, saved: Tensor, g: Tensor, step: Step, deep: bool) -> Tensor:
        with torch.enable_grad():
            x = saved.detach().requires_grad_()
            return torch.autograd.grad(self._function(x), x, g)[0]


class Activation:
    """An activation that works in place, and whose gradient follows from its outputs."""

    names: tuple[str, ...] = ()

    def __init__(
        self, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        self._forward, self._backward = forward, backward

    def forward(self, tensors: Named, x: Tensor, before: Any = None) -> tuple[Tensor, Tensor]:
        y = self._forward(x)
        return y, y

    def backward(self, tensors: Named, saved: Tensor, g: Tensor, step: Step, deep: bool) -> Tensor:
        return self._backward(g, saved, g)


def relu_backward(g: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """The gradient at the inputs, written to out, from g at the outputs y."""
    return _aten.threshold_backward.grad_input(g, y, 0, grad_input=out)


def tanh_backward(g: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """See relu_backward."""
    return _aten.tanh_backward.grad_input(g, y, grad_input=out)


def sigmoid_backward(g: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """See relu_backward."""
    return _aten.sigmoid_backward.grad_input(g, y, grad_input=out)


class Linear:
    """nn.Linear: one batched product serves all clients of a block."""

    def __init__(self, module: nn.Linear, path: str) -> None:
        self.weight = f"{path}weight"
        self.bias = f"{path}bias" if module.bias is not None else ""
        self.names: tuple[str, ...] = (self.weight, self.bias) if self.bias else (self.weight,)

    def forward(self, tensors: Named, x: Tensor, before: Any = None) -> tuple[Tensor, Tensor]:
        weight, bias = tensors[self.weight], tensors[self.bias] if self.bias else None
        if weight.ndim == 2:  # one weight that all clients begin with: a large product instead of many small ones
            return nn.functional.linear(x, weight, bias), x
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT), x

    def backward(self, tensors: Named, saved: Tensor, g: Tensor, step: Step, deep: bool) -> Tensor:
        below = torch.bmm(g, tensors[self.weight]) if deep else g
        step.descend_product(self.weight, g, saved)
        if self.bias:
            step.descend_sum(self.bias, g)
        return below


class FromLast:
    """Layers of windows [k, m, past, F] whose readings, the first feature, are less the last one, which is added again.

    See models/changes.py.
    """

    def __init__(self, layers: Sequence[Part]) -> None:
        self._layers = tuple(layers)
        self.names = tuple(name for layer in layers for name in layer.names)

    def forward(self, tensors: Named, x: Tensor, before: Any = None) -> tuple[Tensor, list[Any]]:
        last, saved = x[:, :, -1, :1], list[Any]()  # [k, m, 1]
        z = torch.cat([x[..., 0] - last, x[..., 1:].flatten(2)], 2)
        for layer in self._layers:
            z, kept = layer.forward(tensors, z, None)
            saved.append(kept)
        return z + last, saved

    def backward(self, tensors: Named, saved: list[Any], g: Tensor, step: Step, deep: bool) -> Tensor:
        for i in reversed(range(len(self._layers))):
            g = self._layers[i].backward(tensors, saved[i], g, step, deep=i > 0)
        return g


class Span:
    r"""A linear layer on inputs X: [k, n, in] that never change, trained without touching its weight.

    Its steps move it only in the span of X. With $\beta = 1 - lr \cdot pull$ its weight after t steps is
    $\beta^t W - s_t \, slope - D^T X$, where D: [k, n, out] collects the gradients at its outputs,
    $D \leftarrow \beta D + lr \, g$, and $s_t = \beta s_{t-1} + lr$. So its outputs are
    $\beta^t X W^T - s_t X slope^T - X X^T D$, and W is read once and written once, however many steps there are.
    A bias is the weight of an input that is always 1.
    """

    def __init__(
        self, linear: Linear, x: Tensor, begin: Named, tensors: Named, descent: Descent, slopes: Named
    ) -> None:
        """`tensors` are [k, ...]; `begin` holds the same, or [...] where all begin with the same."""
        self._linear, self._x, self._tensors, self._slopes = linear, x, tensors, slopes
        self._lr, self._keep = descent.lr, 1 - descent.lr * descent.pull
        self._base = linear.forward(begin, x)[0]  # [k, n, out]
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
