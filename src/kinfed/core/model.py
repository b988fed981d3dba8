"""Model: any nn.Module as a function of its flat vector theta: [d]."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp

from .layers import PASS, adapt
from .layout import Layout


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
        self.named_head = head
        self.original = copy.deepcopy(module).cpu()  # wherever it was
        self.module = adapt(self.original)
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
        PASS.weight, PASS.key = weight, key
        try:
            if not self.bf16:
                return self.module(x)  # type: ignore[no-any-return]
            with torch.autocast(x.device.type, torch.bfloat16):
                return self.module(x).to(x.dtype)  # type: ignore[no-any-return]
        finally:
            PASS.weight = PASS.key = None

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
