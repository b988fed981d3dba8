"""Model: any nn.Module as a function of its flat vector theta: [d]."""

import copy
import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, peek_interpreter_stack
from torch.func import vjp
from torch.utils._pytree import tree_leaves

from ..errors import UsageError
from .copies import check_tensors, duplicate
from .layers import PASS, adapt
from .layout import Layout, head_of
from .seeding import seed_torch
from .trees import raw


class Moved(NamedTuple):
    """A training pass: the result of `read`, and the model's buffers (such as running statistics) after it."""

    outputs: Tensor
    buffers: dict[str, Tensor]


INTERNAL = {*vars(nn.Module()), "_flat_weights"}  # attributes that modules and recurrent layers have of their own
SMALL = 1 << 16  # bytes of a buffer of integers or truth values that each client may as well have for itself
Read = Callable[[Tensor], Tensor]  # applied to a pass's outputs while the tensors are bound


NO_HEAD = (
    "the model has no nn.Linear to serve as head, so it has no features; name the layer to use: "
    "kinfed.Model(module, head='NAME')"
)


class Features:
    """The inputs of a module's head in one pass: [B, f], when called.

    Raises UsageError if there is no such tensor, or if the head is not the last layer that the module applies.
    """

    def __init__(self, head: str | None, dtype: torch.dtype) -> None:
        self._head, self._dtype = head, dtype
        self._calls: list[tuple[tuple[Any, ...], Any]] = []
        self._outputs: Any = None

    def note(self, given: tuple[Any, ...], outputs: Any) -> None:
        """The head was called."""
        if self._outputs is None:
            self._calls.append((given, outputs))

    def end(self, outputs: Any) -> None:
        """The pass is over: later calls of the head are no part of it."""
        self._outputs = outputs

    def __call__(self) -> Tensor:
        if self._head is None:
            raise UsageError(NO_HEAD)
        if len(self._calls) != 1:
            raise UsageError(
                f"the model applies its head '{self._head}' {len(self._calls)} times in a pass, so its features are no "
                "single tensor; use a model that ends with its head, or name another layer: "
                "kinfed.Model(module, head='NAME')"
            )
        given, outputs = self._calls[0]
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise UsageError(
                f"the model's head '{self._head}' gets more than one tensor; name another layer: "
                "kinfed.Model(module, head='NAME')"
            )
        if outputs is not self._outputs:
            raise UsageError(
                f"the model's head '{self._head}' is not the last layer that its forward pass applies, so its outputs "
                "are not the head's; return the head's outputs, or name the last layer: "
                "kinfed.Model(module, head='NAME')"
            )
        return given[0].to(self._dtype)


class Model:
    """A module's architecture; its parameters are always passed in.

    `layout` says where each tensor lies in theta, and `theta: [d]` holds the module's initial parameters. What is
    frozen is no part of theta: the module itself has it, once for all clients.
    """

    bf16 = False  # products of a training pass in bfloat16, with `torch.autocast`
    draws = False  # whether a training pass draws PyTorch's random numbers, which then begin at the step's key
    writes = False  # whether a pass changes its inputs, or in evaluation its tensors: it then gets copies of them

    def __init__(self, module: nn.Module, head: str | None = None, dtype: torch.dtype | None = None) -> None:
        """`head` names the classifier layer (default: the last nn.Linear); tensors become `dtype` if it is given."""
        check_tensors(module)
        self.named_head = head
        self.original = duplicate(module).cpu()  # whatever device it was on
        module = adapt(self.original)
        self.head_name = head_of(module) if head is None else head  # None: it has none
        self.layout = Layout.from_module(module, self.head_name)
        self.original.to(dtype)
        self._run_with(module.to(dtype))
        self.theta = self.layout.flatten({n: slots[k].detach() for n, slots, k in self._slots})

    def _run_with(self, module: nn.Module) -> None:
        """Compute with this adapted copy of the original module."""
        self.module, self._twins = module.train(), list[Model]()  # modules may override how training begins
        self._recurrent = any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in module.modules())
        self.fed: Features | None = None  # while features are captured
        self._bind()

    def __copy__(self) -> "Model":
        other = object.__new__(Model)
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Without the adapted module, some of whose layers are of classes made on the spot: it is made again."""
        kept = ("named_head", "original", "head_name", "layout", "theta", "bf16", "draws", "writes")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        module = adapt(self.original).to(self.theta.device)
        still = {name: slots[key].detach() for name, slots, key in _slots(self.original, self.layout.frozen)}
        _replace(module, {name: t.to(self.theta.device) for name, t in still.items()})
        self._run_with(module)

    def digest(self) -> str:
        """SHA-1 of the architecture, of what is trained and of the initial parameters, to detect another model."""
        plain = re.sub(r" at 0x[0-9a-f]+", "", repr((self.module, self.layout.entries, self.head_name)))
        digest = hashlib.sha1(plain.encode(), usedforsecurity=False)
        digest.update(raw(self.theta))
        digest.update(repr(digest_plain_tensors(self.original)).encode())
        return digest.hexdigest()

    def twin(self) -> "Model":
        """The same model around a copy of the module. Every thread needs its own: tensors are bound into the module."""
        other = copy.copy(self)
        other.module, other._twins = duplicate(self.module, self.frozen.values()), []
        other._bind()
        return other

    def convert(self, dtype: torch.dtype) -> "Model":
        """The same model with all floating-point numbers of another type, frozen ones among them."""
        other = copy.copy(self)
        other.original, other.theta = duplicate(self.original).to(dtype), self.theta.to(dtype)
        other._run_with(duplicate(self.module).to(dtype))
        return other

    def freeze(self, layout: Layout) -> "Model":
        """The same model, around the same module, with a layout that leaves more out: that keeps its present values."""
        if layout.names == self.layout.names:
            return self
        values = self.layout.tensors(self.theta)
        still = {name: values[name].clone() for name in self.layout.names - layout.names}  # theta can be forgotten
        _replace(self.module, still)
        _replace(self.original, {name: t.cpu() for name, t in still.items()}, learned=True)
        other = copy.copy(self)
        other.layout, other.theta = layout, self.theta[self.layout.index(layout.names, self.theta.device)]
        other._twins = []
        other._bind()
        return other

    def carry(self, names: Collection[str]) -> "Model":
        """The same model, around the same module, whose theta holds the named buffers of integers or truth values."""
        counters = find_counters(self.module).intersection(names)
        if not counters:
            return self
        other = copy.copy(self)
        other.layout = Layout.from_module(self.module, self.head_name, counters).freeze(self.layout.frozen)
        other._twins = []
        other._bind()
        now = {n: slots[k].detach() for n, slots, k in other._slots}
        other.theta = other.layout.flatten(now | self.layout.tensors(self.theta))
        return other

    def watch(self, x: Tensor) -> "Model":
        """The same model, whose theta holds those of its counters that training moves; x: [B, ...] are examples.

        These are the ones that a training pass on x changes, such as a count of steps; then all others that are small
        belong to each client, too, as a count may decide when these change. Constants, such as a mask, do not.
        """
        counters = find_counters(self.module)
        every = self.carry(counters)
        if every is self:
            return self
        before = every.layout.tensors(every.theta)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                after = every.run(before, x.to(self.theta.device), None, torch.zeros((), dtype=torch.int64)).buffers
            except Exception as problem:
                raise failed_in_training(problem, len(x)) from problem
        odd = [name for name, t in after.items() if t.shape != before[name].shape or t.dtype != before[name].dtype]
        if odd:
            raise UsageError(
                f"buffer '{odd[0]}' of the model changes its shape or type in training, from "
                f"{_form(before[odd[0]])} to {_form(after[odd[0]])}; register it as what it becomes"
            )
        moved = {name for name, t in after.items() if not torch.equal(t, before[name])}
        small = {name for name in counters if before[name].nbytes <= SMALL}
        return self.carry(counters & (moved | small) if moved else ())

    def twins(self, count: int) -> list["Model"]:
        """`count` twins, always the same ones: copying a module takes as long as training a small one."""
        while len(self._twins) < count:
            self._twins.append(self.twin())
        return self._twins[:count]

    def _bind(self) -> None:
        """Find where in the modules' own tables each tensor is that a pass computes with or may change."""
        layout = self.layout
        buffers = {name for name, _ in self.module.named_buffers()}
        self.frozen = {name: slots[key] for name, slots, key in _slots(self.module, layout.frozen)}
        self._frozen_buffers = {name: t for name, t in self.frozen.items() if name in buffers}
        self._slots = _slots(self.module, layout.names | self._frozen_buffers.keys())
        self._buffer_slots = [slot for slot in self._slots if slot[0] in buffers]
        self._loose_buffers = [name for name, _, _ in self._buffer_slots if name not in layout.norms]
        constant = find_counters(self.module) - layout.whole.names
        self._constant_slots: list[tuple[str, dict[str, Any], str]] = _slots(self.module, constant)
        self._constants = {name: (slots[key], slots[key]._version) for name, slots, key in self._constant_slots}

    def to(self, device: torch.device) -> "Model":
        """The same model with its initial vector, and what is in the module alone, on a device."""
        self.module.to(device)
        self.theta = self.theta.to(device)
        self._bind()
        return self

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """What a pass computes with: named views into theta: [d], and copies of frozen buffers, which it may move."""
        # Under vmap a copy for each client, if theta is one: what all share cannot change in place.
        return self.layout.tensors(theta) | {
            name: torch.where(theta[0] > 0, t, t) for name, t in self._frozen_buffers.items()
        }

    def all_tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """All tensors of a model: [d] by name, frozen ones among them."""
        return self.layout.tensors(theta) | self.frozen

    @contextmanager
    def bound(self, tensors: dict[str, Tensor], training: bool) -> Iterator[None]:
        """Within this context the module computes with these tensors."""
        # Writing into the modules' own tables is what torch.func.functional_call does, without its cost per call.
        before = [slots[key] for _, slots, key in self._slots]
        mode = self.module.training
        if mode is not training:
            self.module.train(training)
        try:
            for name, slots, key in self._slots:
                slots[key] = tensors[name]
            yield
            self._check_constants(training)
        finally:
            for (_, slots, key), value in zip(self._slots, before, strict=True):
                slots[key] = value
            if mode is not training:
                self.module.train(mode)

    def _check_constants(self, training: bool) -> None:
        """Undo what a pass did to integer buffers that are no part of theta; raise UsageError if that was training."""
        for name, slots, key in self._constant_slots:
            now, (former, version) = slots[key], self._constants[name]
            if now is former and now._version == version:
                continue
            first = self.original.get_buffer(name)
            same = not is_batchedtensor(now) and now.shape == first.shape and torch.equal(now.cpu(), first)
            slots[key] = first.to(former.device, copy=True)
            self._constants[name] = slots[key], slots[key]._version
            if training and not same:
                raise UsageError(
                    f"buffer '{name}' of the model ({_form(first)}) changes in training, but not in a first pass, so "
                    "it was taken for a constant; register it as a tensor of floats, which each client has for itself"
                )

    @contextmanager
    def capturing(self, wanted: bool = True) -> Iterator[None]:
        """Within this context, if wanted, `fed` holds the features of the latest pass."""
        if not wanted or self.fed is not None:
            yield
            return
        self.fed = Features(self.head_name, self.theta.dtype)
        hooks = []
        if self.head_name is not None:
            head = self.module.get_submodule(self.head_name)
            hooks = [head.register_forward_hook(lambda _, given, outputs: self.fed.note(given, outputs))]
        try:
            yield
        finally:
            self.fed = None
            for hook in hooks:
                hook.remove()

    def _apply(self, x: Tensor) -> Tensor:
        """The module's outputs with the tensors that are bound."""
        x = x.clone() if self.writes else x
        if self.fed is None:
            return self.module(x)
        self.fed = fed = Features(self.head_name, self.theta.dtype)  # an objective may run another pass in between
        outputs = self.module(x)
        fed.end(outputs)
        return outputs

    def forward(self, x: Tensor, weight: Tensor | None, key: Tensor) -> Tensor:
        """Outputs of a training pass with the bound tensors; it updates buffers, in place or as new tensors."""
        PASS.begin(weight, key)
        try:
            with seed_torch(key) if self.draws else nullcontext():
                if not self.bf16:
                    return self._apply(x)
                with torch.autocast(x.device.type, torch.bfloat16):
                    return self._apply(x).to(x.dtype)
        finally:
            PASS.begin(None, None)

    def settle(self, tensors: dict[str, Tensor]) -> None:
        """Copy buffers that a pass replaced into the tensors that were bound, and bind these again."""
        for name, slots, key in self._buffer_slots:
            if slots[key] is not tensors[name]:
                tensors[name].copy_(slots[key])
                slots[key] = tensors[name]

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs for x: [B, ...] in evaluation mode."""
        return self.predict(self.tensors(theta), x)

    def predict(self, tensors: dict[str, Tensor], x: Tensor, read: Read = lambda outputs: outputs) -> Tensor:
        """`read` of the outputs in evaluation mode, from named tensors."""
        if self.writes:
            tensors = {name: t.clone() for name, t in tensors.items()}
        if self._recurrent and is_batchedtensor(x):  # vmap adds to a state in place, which must be of every client
            condition = x.sum() > 0
            tensors = {name: t if is_batchedtensor(t) else torch.where(condition, t, t) for name, t in tensors.items()}
        return self._evaluate(tensors, lambda: read(self._apply(x)))

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """[B, f] the inputs of the module's head for x: [B, ...], in evaluation mode.

        Then `head(theta, features(theta, x))` is `self(theta, x)`. The head is the layer that was named, or the last
        nn.Linear. Raises UsageError if there is none, or if it is not the last layer that the module applies.
        """
        with self.capturing():
            return self.predict(self.tensors(theta), x, lambda _: self.fed())  # type: ignore[misc]

    def head(self, theta: Tensor, z: Tensor) -> Tensor:
        """[B, ...] outputs for features z: [B, f], in evaluation mode; raises UsageError if there is no head."""
        if self.head_name is None:
            raise UsageError(NO_HEAD)
        return self.layer(self.head_name, theta, z)

    def layer(self, name: str, theta: Tensor, z: Tensor) -> Tensor:
        """Outputs of the named layer for z with its part of theta: [d], in evaluation mode."""
        return self._evaluate(self.tensors(theta), lambda: self.module.get_submodule(name)(z))

    def _evaluate(self, tensors: dict[str, Tensor], outputs: Callable[[], Tensor]) -> Tensor:
        if self._loose_buffers:  # buffers that a module's own code may change in evaluation, too
            tensors = tensors | {name: tensors[name].clone() for name in self._loose_buffers}
        with self.bound(tensors, training=False):
            # vmap has no rule for these layers: it decomposes them where they are differentiated, which sequences that
            # are packed cannot be.
            if self._recurrent and peek_interpreter_stack() is not None:
                return vjp(lambda _: outputs(), self.theta.new_zeros(()))[0]
            return outputs()

    def run(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        weight: Tensor | None,
        key: Tensor,
        read: Read = lambda outputs: outputs,
    ) -> Moved:
        """One training pass over x: [B, ...], of which only rows of weight 1 count; `read` gets its outputs."""
        if self._buffer_slots:
            tensors = tensors | {name: tensors[name].detach().clone() for name, _, _ in self._buffer_slots}
        with self.bound(tensors, training=True):
            outputs = read(self.forward(x, weight, key))
            return Moved(outputs, {n: slots[k] for n, slots, k in self._buffer_slots})

    def export(self, theta: Tensor) -> nn.Module:
        """The plain module with these parameters, in evaluation mode; all share what is frozen."""
        still = _slots(self.original, self.layout.frozen)
        module = duplicate(self.original, [slots[key] for _, slots, key in still]).eval()
        tensors = self.layout.tensors(theta)  # not by load_state_dict, which modules and their hooks may have changed
        for name, slots, key in _slots(module, tensors.keys()):
            slots[key].data.copy_(tensors[name])
        return module


def failed_in_training(problem: Exception, count: int) -> UsageError:
    """What a training pass of a module over so many examples raised, as an error of the request."""
    if isinstance(problem, UsageError):
        return problem
    return UsageError(f"the model fails on {count} examples in training mode: {type(problem).__name__}: {problem}")


def digest_plain_tensors(module: nn.Module) -> dict[str, str]:
    """By name a SHA-1 of every tensor that a module holds as a plain attribute, neither parameter nor buffer.

    A run doesn't hold these, so a module that draws one when it is made predicts otherwise after another start.
    """
    held = {id(t) for t in (*module.parameters(), *module.buffers())}
    digests = {}
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            # What PyTorch's modules hold, and what a layer computes from its parameters before each pass.
            if key in INTERNAL or any(name.startswith(f"{key}_") for name in part._parameters):
                continue
            for i, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, Tensor) and leaf.grad_fn is None and id(leaf) not in held:
                    name = ".".join((*path.split("."), key)).strip(".") + (f"[{i}]" if i else "")
                    digests[name] = hashlib.sha1(raw(leaf), usedforsecurity=False).hexdigest()
    return digests


def find_counters(module: nn.Module) -> frozenset[str]:
    """The buffers of integers and truth values."""
    return frozenset(name for name, t in module.named_buffers() if not t.is_floating_point())


def _slots(module: nn.Module, names: Collection[str]) -> list[tuple[str, dict[str, Any], str]]:
    """Where in its parts' own tables each of a module's named tensors is; a shared one is in several."""
    names_by_id = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers()) if n in names}
    tables: list[dict[str, Any]] = [t for part in module.modules() for t in (part._parameters, part._buffers)]
    return [(names_by_id[id(t)], table, key) for table in tables for key, t in table.items() if id(t) in names_by_id]


def _replace(module: nn.Module, values: dict[str, Tensor], learned: bool = False) -> None:
    """Have a module hold these tensors themselves; parameters ask for no gradient, unless they may as before."""
    made: dict[str, Tensor] = {}
    for name, slots, key in _slots(module, values.keys()):
        value = values[name]
        if isinstance(slots[key], nn.Parameter):
            value = nn.Parameter(value, requires_grad=learned and slots[key].requires_grad)
        slots[key] = made.setdefault(name, value)


def _form(t: Tensor) -> str:
    return f"{t.dtype} {list(t.shape)}".removeprefix("torch.")
