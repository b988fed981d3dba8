"""A pretend accelerator: tensors that say they are on a device of its own, and compute on the CPU.

To import this sets up PyTorch's PrivateUse1 backend, for good: so only in a process of its own, see `test_device.py`.
Where a tensor on the device meets one with axes on the CPU it raises, as CUDA does, and it counts what would be kernel
launches, and waits for the device. What no pretend device can show: CUDA's own branches (cuDNN, autocast, memory).
"""

from collections import Counter

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from kinfed.runs import checkpoints
from kinfed.simulation import devices, distributed, simulation

_setup_privateuseone_for_python_backend("pretend")
# Gradients on the thread that asks for them: the engine's own thread for such a device may abort the process.
torch.autograd.grad_mode.set_multithreading_enabled(False)

DEVICE = torch.device("pretend", 0)


def pick_device(name, *more):
    return DEVICE if name.startswith("pretend") else devices.pick_device(name, *more)


checkpoints.pick_device = simulation.pick_device = distributed.pick_device = pick_device
LAUNCHES: Counter[str] = Counter()  # by operation
WAITS: Counter[str] = Counter()  # by operation, or the way of a copy

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
ANSWERS = {  # whose value or shape Python waits for
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
    aten.bincount.default, aten.repeat_interleave.Tensor, aten._unique2.default, aten.is_nonzero.default,
    aten._linalg_eigh.default,
}  # fmt: skip
VIEWS = {  # and other operations without a kernel
    "view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "transpose", "t", "permute", "detach",
    "alias", "as_strided", "split", "split_with_sizes", "unbind", "_reshape_alias", "diagonal", "unfold", "lift_fresh",
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
}  # fmt: skip


class Pretend(torch.Tensor):
    """A tensor on the device; `raw` on the CPU has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw, requires_grad=False):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    def __repr__(self):
        return f"Pretend({self.raw})"

    def __deepcopy__(self, memo):
        made = Pretend(self.raw.clone(), self.requires_grad)
        return torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [t for t in tensors if isinstance(t, Pretend)]
        arrives = bool(ours) if kwargs.get("device") is None else torch.device(kwargs["device"]) == DEVICE
        _check(func, args, tensors)
        _count(func, args, arrives)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        result = EMULATED.get(func, func)(*_raw(args), **_raw(kwargs))
        if torch.Tag.inplace_view in func.tags:  # changes the wrapper's shape, not only what it wraps
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
            return args[0]
        if func is aten.copy_.default:
            return args[0]
        if func._schema.is_mutable:  # gives back what it was given
            before = {id(t.raw): t for t in ours}
            return tree_map(lambda x: before.get(id(x), x) if isinstance(x, torch.Tensor) else x, result)
        return tree_map(lambda x: Pretend(x) if arrives and isinstance(x, torch.Tensor) else x, result)


def _gru_cell(inputs, hidden, hx, input_bias=None, hidden_bias=None):
    """hy: [B, H] and what the way back needs, [B, 5 H]: PyTorch has this kernel for accelerators alone."""
    if input_bias is not None:
        inputs, hidden = inputs + input_bias, hidden + hidden_bias
    (reset, keep, new), (hidden_reset, hidden_keep, hidden_new) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    reset, keep = (reset + hidden_reset).sigmoid(), (keep + hidden_keep).sigmoid()
    new = (new + reset * hidden_new).tanh()
    return new + keep * (hx - new), torch.cat([reset, keep, new, hx, hidden_new], 1)


def _gru_cell_backward(slope, saved, has_bias):
    if slope is None:
        return (None,) * 5
    reset, keep, new, hx, hidden_new = saved.chunk(5, 1)
    to_new = slope * (1 - keep) * (1 - new * new)
    to_keep = slope * (hx - new) * keep * (1 - keep)
    to_reset = to_new * hidden_new * reset * (1 - reset)
    inputs = torch.cat([to_reset, to_keep, to_new], 1)
    hidden = torch.cat([to_reset, to_keep, to_new * reset], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, slope * keep, *biases


EMULATED = {
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}


def _raw(tree):
    return tree_map(lambda x: x.raw if isinstance(x, Pretend) else x, tree)


def _check(func, args, tensors):
    """Raise where devices meet that must not: numbers without axes may, and CPU indices into a tensor on the device."""
    inside = [t for t in tensors if isinstance(t, Pretend)]
    outside = [t for t in tensors if not isinstance(t, Pretend) and t.ndim]
    if func in INDEXING and isinstance(args[0], Pretend):
        indices = {id(index) for index in args[1]}
        outside = [t for t in outside if id(t) not in indices]
    if inside and outside and func not in COPIES:
        given = ", ".join(f"{t.device} {list(t.shape)}" for t in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} was given {given}")


def _count(func, args, arrives):
    name = func.overloadpacket.__name__
    if name not in VIEWS:
        LAUNCHES[name] += 1
    moves = func in COPIES and isinstance(args[0], Pretend) != (
        isinstance(args[1], Pretend) if func is aten.copy_.default else arrives
    )
    masked = func in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
    copied = func in INDEXING and any(i is not None and not isinstance(i, Pretend) for i in args[1])
    if moves or masked or copied or func in ANSWERS:
        WAITS[name] += 1


def _factory(overload):
    def made(*args, device=None, pin_memory=None, **kwargs):
        name = overload.overloadpacket.__name__
        if name not in VIEWS:
            LAUNCHES[name] += 1
        return Pretend(overload(*args, **kwargs, device="cpu"))

    return made


def _copy_from(source, target, non_blocking=False):  # where Python's key is left out, as within torch.tensor
    if isinstance(source, Pretend) != isinstance(target, Pretend):
        WAITS["copy_"] += 1
    _raw(target).copy_(_raw(source))
    return target


_KERNELS = torch.library.Library("aten", "IMPL")
_KERNELS.impl("_copy_from", _copy_from, "PrivateUse1")
for _name in (
    "empty.memory_format", "empty_strided", "zeros", "ones", "full", "arange", "arange.start", "arange.start_step",
    "eye", "eye.m", "rand", "randn", "randint", "linspace", "scalar_tensor",
):  # fmt: skip
    _packet, _, _overload = _name.partition(".")
    _KERNELS.impl(_name, _factory(getattr(getattr(aten, _packet), _overload or "default")), "PrivateUse1")
