"""Model: any nn.Module as a function of its flat vector theta: [d]."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vjp
from torch.nn.parameter import is_lazy

from .errors import UsageError
from .layout import Layout
from .seeding import fold, uniform


class _Pass(threading.local):
    """What the layers below need to know about the forward pass that is under way."""

    weight: Tensor | None = None  # [B] 1 on real rows, 0 on rows that only fill the batch up; None: all real
    key: Tensor | None = None  # [] int64, of this pass's dropout


_PASS = _Pass()


class _Norm(nn.Module):
    """BatchNorm that normalises with the real rows of a batch only, and works under vmap.

    A batch with a single real row cannot be normalised: it is treated as in evaluation and moves no statistics.
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
        weight = _PASS.weight
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
        key = _PASS.key if _PASS.key is not None else torch.zeros((), dtype=torch.int64, device=x.device)
        kept = uniform(fold(key, self.ordinal), like) >= self.p
        return x * (kept / (1 - self.p)).to(x.dtype)


def _without_cudnn(layer: nn.RNNBase) -> None:
    """Have PyTorch's own kernels compute a recurrent layer on a GPU.

    cuDNN would move the weights that are bound into a buffer of its own, where no step of an optimiser reaches them;
    and it has no `vmap`, no gradient in evaluation mode and no second derivative. On a CPU nothing changes.
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


def _adapt(module: nn.Module) -> nn.Module:
    """A copy of the module in which layers that couple rows or draw numbers are replaced by ours."""
    module = copy.deepcopy(module)
    if any(map(is_lazy, module.parameters())):
        raise UsageError("the model has lazy layers, whose shapes are not known yet; run one batch through it first")
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
            new = made.setdefault(id(part), _Norm(part))
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


class Moved(NamedTuple):
    """A training pass: what the model said, and its buffers (such as running statistics) after it."""

    outputs: Tensor
    buffers: dict[str, Tensor]


class Model:
    """A module's architecture; its numbers are always given from outside.

    `layout` says where each tensor lies in theta and `theta: [d]` is the module's own initial vector.
    """

    bf16 = False  # products of a training pass in bfloat16, with `torch.autocast`

    def __init__(self, module: nn.Module, head: str | None = None, dtype: torch.dtype | None = None) -> None:
        """`head` names the classifier layer (default: the last nn.Linear); numbers become `dtype` if that is given."""
        self.original = copy.deepcopy(module).cpu()  # wherever it was
        self.module = _adapt(self.original)
        self.layout = Layout.of(self.module, head)
        self.module.to(dtype)
        self.original.to(dtype)
        self._twins: list[Model] = []
        self._recurrent = any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in self.module.modules())
        self._bind()
        self.theta = self.layout.flatten({n: slots[k].detach() for n, slots, k in self._slots})

    def twin(self) -> "Model":
        """The same model around a copy of the module. Every thread needs its own: tensors are bound into the module."""
        other = copy.copy(self)
        other.module, other._twins = copy.deepcopy(self.module), []
        other._bind()
        return other

    def twins(self, count: int) -> list["Model"]:
        """As many twins, always the same: to copy a module takes as long as to train a small one."""
        while len(self._twins) < count:
            self._twins.append(self.twin())
        return self._twins[:count]

    def _bind(self) -> None:
        """Find where in the modules' own tables each tensor of the layout stands; a shared one stands in several."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        names = {id(t): n for n, t in named if n in self.layout.names}
        tables: list[dict[str, Any]] = [t for part in self.module.modules() for t in (part._parameters, part._buffers)]
        self._slots = [(names[id(t)], table, key) for table in tables for key, t in table.items() if id(t) in names]
        buffers = {name for name, _ in self.module.named_buffers()}
        self._moved = [slot for slot in self._slots if slot[0] in buffers]

    def to(self, device: torch.device) -> "Model":
        """The same model with its initial vector and integer buffers on a device."""
        self.module.to(device)
        self.theta = self.theta.to(device)
        return self

    @contextmanager
    def bound(self, tensors: dict[str, Tensor], training: bool) -> Iterator[None]:
        """While this lasts the module computes with these tensors."""
        # Writing into the modules' own tables is what torch.func.functional_call does, without its cost per call.
        before = [slots[key] for _, slots, key in self._slots]
        mode = self.module.training
        if mode is not training:
            self.module.train(training)
        try:
            for name, slots, key in self._slots:
                slots[key] = tensors[name]
            yield
        finally:
            for (_, slots, key), value in zip(self._slots, before, strict=True):
                slots[key] = value
            if mode is not training:
                self.module.train(mode)

    def forward(self, x: Tensor, weight: Tensor | None, key: Tensor) -> Tensor:
        """Outputs of a training pass with the tensors that are bound, whose buffers it moves on in place or anew."""
        _PASS.weight, _PASS.key = weight, key
        try:
            if not self.bf16:
                return self.module(x)  # type: ignore[no-any-return]
            with torch.autocast(x.device.type, torch.bfloat16):
                return self.module(x).to(x.dtype)  # type: ignore[no-any-return]
        finally:
            _PASS.weight = _PASS.key = None

    def settle(self, tensors: dict[str, Tensor]) -> None:
        """Copy buffers that a pass made anew into the tensors that were bound, and bind these again."""
        for name, slots, key in self._moved:
            if slots[key] is not tensors[name]:
                tensors[name].copy_(slots[key])
                slots[key] = tensors[name]

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs for x: [B, ...] in evaluation mode."""
        return self.predict(self.layout.tensors(theta), x)

    def predict(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """Outputs in evaluation mode, from named tensors."""
        with self.bound(tensors, training=False):
            if self._recurrent:  # vmap has no rule for these layers: it takes them apart where they are differentiated
                return vjp(lambda _: self.module(x), x.new_zeros(()))[0]  # type: ignore[no-any-return]
            return self.module(x)  # type: ignore[no-any-return]

    def run(self, tensors: dict[str, Tensor], x: Tensor, weight: Tensor | None, key: Tensor) -> Moved:
        """One training pass over x: [B, ...], of which only rows of weight 1 count."""
        if self._moved:
            tensors = tensors | {name: tensors[name].detach().clone() for name, _, _ in self._moved}
        with self.bound(tensors, training=True):
            outputs = self.forward(x, weight, key)
            return Moved(outputs, {n: slots[k] for n, slots, k in self._moved})

    def export(self, theta: Tensor) -> nn.Module:
        """The plain module with these numbers in it, in evaluation mode: yours to keep."""
        module = copy.deepcopy(self.original).eval()
        module.load_state_dict(self.layout.tensors(theta), strict=False)
        return module
