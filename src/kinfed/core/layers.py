"""Layers as kinfed runs them: batched over clients, with counter-based random numbers, ignoring filled-up rows."""

import copy
import threading
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError
from .seeding import fold, uniform


class _Pass(threading.local):
    """What the layers below need to know about the current forward pass."""

    weight: Tensor | None = None  # [B] 1 on real rows, 0 on rows that only fill the batch up; None: all real
    key: Tensor | None = None  # [] int64, of this pass's dropout


PASS = _Pass()


class Norm(nn.Module):
    """BatchNorm that normalises with only the real rows of a batch, and works under vmap.

    A batch with a single real row cannot be normalised: it is treated as in evaluation and updates no statistics.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.running_mean: Tensor
        self.running_var: Tensor
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.eps, self.momentum = norm.eps, norm.momentum or 0.0

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


class _Dropout(nn.Module):
    """Dropout whose mask is a hash of (seed, round, client, step, position): the same in every executor."""

    def __init__(self, p: float, ordinal: int, channelwise: bool) -> None:
        super().__init__()
        self.p, self.ordinal, self.channelwise = p, ordinal, channelwise

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        like = x[:, :, *[slice(1)] * (x.ndim - 2)] if self.channelwise else x
        key = PASS.key if PASS.key is not None else torch.zeros((), dtype=torch.int64, device=x.device)
        kept = uniform(fold(key, self.ordinal), like) >= self.p
        return x * (kept / (1 - self.p)).to(x.dtype)


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


def adapt(module: nn.Module) -> nn.Module:
    """A copy of the module in which layers that couple rows or draw random numbers are replaced by ours."""
    module = copy.deepcopy(module)
    if any(map(is_lazy, module.parameters())):
        raise UsageError("the model has lazy layers, whose shapes are not known yet; run a batch through it first")
    for part in module.modules():
        if isinstance(part, nn.Sequential):
            _pool_first(part._modules)
        elif isinstance(part, nn.RNNBase):
            _without_cudnn(part)
    made: dict[int, nn.Module] = {}
    for path, part in list(module.named_modules(remove_duplicate=False)):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            if not part.track_running_stats or part.momentum is None:
                raise UsageError(
                    f"layer '{path}': BatchNorm needs running statistics and a momentum such as 0.1; without them a "
                    "prediction would depend on the other examples of its batch, or on every batch ever seen"
                )
            new = made.setdefault(id(part), Norm(part))
        elif isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            new = made.setdefault(id(part), _Dropout(part.p, len(made), not isinstance(part, nn.Dropout)))
        else:
            continue
        if not path:
            return new
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, new)
    return module


def _pool_first(modules: dict[str, Any]) -> None:
    """Swap each ReLU with the pooling that follows it: values and gradients are the same bits, on fewer numbers."""
    for one, two in pairwise(modules):
        if type(modules[one]) is nn.ReLU and type(modules[two]) is nn.MaxPool2d and not modules[two].return_indices:
            modules[one], modules[two] = modules[two], modules[one]
