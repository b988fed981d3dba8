"""Layers as kinfed runs them: batched over clients, with counter-based random numbers, ignoring filled-up rows.

A layer is replaced only if it is of exactly one of PyTorch's classes, whose forward pass is known: what a subclass
computes is its own. It stays the same object, with its name, settings and hooks; only its class, and with it its
forward pass, is another.
"""

import threading
from collections import Counter, OrderedDict
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy

from ..errors import UsageError
from .copies import duplicate
from .seeding import fold, uniform


class _Pass(threading.local):
    """What the layers below need to know about the current forward pass."""

    weight: Tensor | None = None  # [B] 1 on real rows, 0 on rows that only fill the batch up; None: all real
    key: Tensor | None = None  # [] int64, of this pass's random numbers

    def __init__(self) -> None:
        self.calls = Counter[int]()  # of each dropout layer in this pass

    def begin(self, weight: Tensor | None, key: Tensor | None) -> None:
        """A pass begins; with None and None, one is over."""
        self.weight, self.key = weight, key
        self.calls.clear()


PASS = _Pass()


def is_plain(part: nn.Module) -> bool:
    """Whether a call of this module is its class's forward pass and nothing else: no hooks, no forward of its own."""
    state = vars(part)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not (any(state[name] for name in hooks) or "forward" in state or _has_any_global_hook())


class Norm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm that normalises with only the real rows of a batch, and works under vmap.

    A batch with a single real row cannot be normalised: it is treated as in evaluation and updates no statistics.
    """

    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def extra_repr(self) -> str:
        """Nothing: digests of models are made of what is shown."""
        return ""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if not self.training:
            return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        x = x.to(mean.dtype)  # sums over a batch need more digits than bfloat16 has
        weight = PASS.weight
        if weight is None:
            if len(x) == 1:
                return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
            return F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        weight = weight.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
        rows = weight.sum()
        total = (rows * (x.numel() // (x.shape[0] * x.shape[1]))).clamp(min=1)
        batch_mean = (x * weight).sum(dims) / total
        batch_var = ((x - batch_mean.view(shape)).square() * weight).sum(dims) / total
        usable = rows > 1
        rate = usable.to(x.dtype) * self.momentum
        unbiased = batch_var.detach() * total / (total - 1).clamp(min=1)
        self.running_mean = torch.lerp(mean, batch_mean.detach(), rate)
        self.running_var = torch.lerp(var, unbiased, rate)
        batch_mean = torch.where(usable, batch_mean, mean)
        batch_var = torch.where(usable, batch_var, var)
        y = (x - batch_mean.view(shape)) * (batch_var + self.eps).rsqrt().view(shape)
        return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


class _Dropout(nn.modules.dropout._DropoutNd):
    """Dropout whose mask is a hash of (seed, round, client, step, position): the same in every executor."""

    ordinal: int  # among the layers that were replaced
    channels = 0  # axes of the mask, those after them have its values in common; 0: all
    lone = -1  # axes of an input that PyTorch takes for a single example without an axis of its own

    def extra_repr(self) -> str:
        """Nothing: digests of models are made of what is shown."""
        return ""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if torch._C._current_graph_task_id() >= 0:
            raise UsageError(
                "the model's forward pass is repeated within the backward pass, as torch.utils.checkpoint does, where "
                "the mask of nn.Dropout would be another; leave one of the two out"
            )
        axes = x.ndim
        if self.channels:  # a single example lacks the axis of the batch
            axes = min(self.channels - 1 if x.ndim == self.lone else self.channels, axes)
        like = x[(slice(None),) * axes + (slice(1),) * (x.ndim - axes)]
        key = PASS.key if PASS.key is not None else torch.zeros((), dtype=torch.int64, device=x.device)
        key = fold(key, self.ordinal)
        if PASS.key is not None:
            if again := PASS.calls[self.ordinal]:  # a layer that is applied several times in a pass
                key = fold(key, again)
            PASS.calls[self.ordinal] += 1
        kept = uniform(key, like) >= self.p
        scale = (kept / (1 - self.p) if self.p < 1 else kept).to(x.dtype)
        return x.mul_(scale) if self.inplace else x * scale


class _Pooling(nn.Sequential):
    """nn.Sequential that pools before a ReLU instead of after it: the same bits, on fewer numbers.

    Nobody can see a difference: only a call of the whole is another, and a slice, an item or a loop over its layers
    gives what it always did. Layers with hooks, which would see other numbers, keep their order.
    """

    at: tuple[int, ...] = ()  # the places of such ReLUs

    def __repr__(self) -> str:
        """The layers as they are computed: digests of models are made of what is shown."""
        return repr(nn.Sequential(OrderedDict(zip(self._modules, self._in_order(), strict=True))))

    def forward(self, x: Tensor) -> Tensor:
        for part in self._in_order():
            x = part(x)
        return x

    def _in_order(self) -> list[nn.Module]:
        """The layers in the order in which they are computed."""
        parts: list[Any] = [*self._modules.values()]
        for i in self.at:
            if _commute(*parts[i : i + 2]):
                parts[i : i + 2] = parts[i + 1], parts[i]
        return parts


def _commute(first: nn.Module, second: nn.Module | None = None) -> bool:
    """Whether these are a ReLU and a pooling whose order does not matter. A ReLU in place may be seen by others."""
    return (
        type(first) is nn.ReLU
        and type(second) is nn.MaxPool2d
        and not (first.inplace or second.return_indices)
        and is_plain(first)
        and is_plain(second)
    )


def _without_cudnn(layer: nn.RNNBase) -> None:
    """Have PyTorch's own kernels compute a recurrent layer on a GPU.

    cuDNN would copy the bound weights into a buffer of its own, out of the optimiser's reach; and it has no `vmap`, no
    gradient in evaluation mode and no second derivative. On a CPU nothing changes.
    """
    kind = type(layer)

    def forward(self: nn.RNNBase, *given: Any, **named: Any) -> Any:
        if self.weight_ih_l0.device.type == "cpu":  # where workers would disturb each other's settings
            return kind.forward(self, *given, **named)
        before = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False
        try:
            return kind.forward(self, *given, **named)
        finally:
            torch.backends.cudnn.enabled = before

    layer.__class__ = type(kind.__name__, (kind,), {"forward": forward, "flatten_parameters": lambda self: None})


def _in_place_of(ours: type, kind: type, **settings: int) -> type:
    """Our layer as a subclass of PyTorch's, as modules may ask what a layer is."""
    return type(ours.__name__, (ours, kind), settings)


KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = {kind: _in_place_of(Norm, kind) for kind in KINDS}
DROPOUTS = {
    nn.Dropout: _in_place_of(_Dropout, nn.Dropout),
    nn.Dropout1d: _in_place_of(_Dropout, nn.Dropout1d, channels=2, lone=2),
    nn.Dropout2d: _in_place_of(_Dropout, nn.Dropout2d, channels=2),
    nn.Dropout3d: _in_place_of(_Dropout, nn.Dropout3d, channels=2, lone=4),
}


def adapt(module: nn.Module) -> nn.Module:
    """A copy of the module in which layers that couple rows or draw random numbers are replaced by kinfed's."""
    module = duplicate(module)
    if any(map(is_lazy, module.parameters())):
        raise UsageError("the model has lazy layers, whose shapes are not known yet; run a batch through it first")
    replaced = 0
    for path, part in module.named_modules():
        kind: type = type(part)
        if "forward" in vars(part):
            continue
        if kind is nn.Sequential:
            if at := tuple(i for i, pair in enumerate(pairwise(part)) if _commute(*pair)):
                part.__class__ = _Pooling
                part.at = at
        elif isinstance(part, nn.RNNBase):
            _without_cudnn(part)
        elif kind in NORMS:
            _check_norm(part, path)
            part.__class__ = NORMS[kind]
            del part.num_batches_tracked  # which a momentum makes superfluous
            replaced += 1
        elif kind in DROPOUTS:
            part.__class__ = DROPOUTS[kind]
            part.ordinal = replaced
            replaced += 1
    return module


def _check_norm(part: Any, path: str) -> None:
    """Raise UsageError for a BatchNorm whose predictions are not of one example."""
    if not part.track_running_stats or part.momentum is None:
        raise UsageError(
            f"layer '{path}': BatchNorm needs running statistics and a momentum such as 0.1; without them a "
            "prediction would depend on the other examples of its batch, or on every batch ever seen"
        )
