"""Copies of modules, and what must not be in a module of which there are copies."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError

OWN = (dict, list, set, deque)  # what functions around a module may keep its numbers in


def duplicate(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A deep copy of a module that holds the tensors `shared` themselves; raises UsageError for what cannot be copied.

    A tensor that a layer has computed from its parameters, such as the weight of `torch.nn.utils.weight_norm`, is
    copied without the way in which it was computed: it is computed again in the next pass. Functions in the module, as
    hooks are, are copied with the variables around them: what refers to the module refers to the copy, and a dict, list
    or set in which they keep something is copied too.
    """
    memo: dict[int, Any] = {id(t): t for t in shared}
    cells: list[tuple[CellType, CellType]] = []
    for part in module.modules():
        for value in _values(vars(part)):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
            elif isinstance(value, FunctionType) and value.__closure__:
                new = tuple(CellType() for _ in value.__closure__)
                memo[id(value)] = made = FunctionType(
                    value.__code__, value.__globals__, value.__name__, value.__defaults__, new
                )
                made.__kwdefaults__ = value.__kwdefaults__
                cells += zip(value.__closure__, new, strict=True)
    try:
        duplicated = copy.deepcopy(module, memo)
        for before, after in cells:
            with suppress(ValueError):  # a variable that is not set
                value = before.cell_contents
                after.cell_contents = (
                    copy.deepcopy(value, memo) if isinstance(value, OWN) else memo.get(id(value), value)
                )
    except Exception as problem:
        raise UsageError(
            f"the model cannot be copied, and every client has a copy of its own: {_why_not(module, problem)}; create "
            "it outside of the module, or in its forward pass"
        ) from problem
    return duplicated


def check_tensors(module: nn.Module) -> None:
    """Raise UsageError for parameters that copies would not have: with hooks, or in the memory of another tensor."""
    parameters = dict(module.named_parameters())
    for name, t in parameters.items():
        if t._backward_hooks or t._post_accumulate_grad_hooks:
            raise UsageError(
                f"the parameter '{name}' has a hook on its gradient, which would not run, as clients train copies of "
                "it; change the gradient in the forward pass, by a torch.autograd.Function, or in an optimiser"
            )
    held = {**parameters, **dict(module.named_buffers())}
    held = {
        name: t for name, t in held.items() if not is_lazy(t) and t.numel() and t.data_ptr()
    }  # some have no address
    spans = sorted((*_span(t), name) for name, t in held.items())
    last = -1, ""  # where the memory of all tensors so far ends, and whose that is
    for begin, end, name in spans:
        pair = sorted((last[1], name), key=[*held, ""].index)
        if (
            begin < last[0]
            and any(held[name].requires_grad for name in pair)
            and _overlap(*(held[name] for name in pair))
        ):
            raise UsageError(
                f"'{pair[0]}' and '{pair[1]}' of the model are two tensors in one place of memory, which a copy would "
                "separate; let both be the same parameter, such as second.weight = first.weight, or clone one of them"
            )
        last = max(last, (end, name))


def _values(held: Any, depth: int = 4) -> Iterator[Any]:
    """All that is in these attributes, and in lists, tuples and dicts of them."""
    if isinstance(held, dict | list | tuple) and depth:
        for value in held.values() if isinstance(held, dict) else held:
            yield from _values(value, depth - 1)
    else:
        yield held


def _why_not(module: nn.Module, problem: Exception) -> str:
    """What it is that cannot be copied, in words."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(value)
            except Exception as cause:
                return f"'{f'{path}.{name}'.lstrip('.')}' is a {type(value).__name__} ({str(cause)[:120]})"
    return f"{type(problem).__name__}: {str(problem)[:160]}"


def _span(t: Tensor) -> tuple[int, int]:
    """Where a tensor's numbers begin and end in memory."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors whose spans overlap have numbers in common, and do not just alternate."""
    begin = min(_span(first)[0], _span(second)[0])
    end = max(_span(first)[1], _span(second)[1])
    width = first.element_size()
    if width != second.element_size() or (first.data_ptr() - second.data_ptr()) % width:
        return True
    numbers = torch.arange((end - begin) // width)
    first_numbers, second_numbers = (
        numbers.as_strided(t.shape, t.stride(), (t.data_ptr() - begin) // width).flatten() for t in (first, second)
    )
    return bool(torch.isin(first_numbers, second_numbers).any())
