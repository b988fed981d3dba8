"""Memo: what a server has computed last, shared by the functions of a method that need it again."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class Memo:
    """The last result of each computation, by name, and what it was made of.

    `send`, `relation` and `aggregate` of one round need the same weights and mixtures; what is sent for evaluation is
    often what is sent in the next round. It only saves time: copies, and what is saved of it, are empty.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def once(self, name: str, made_of: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """The result of make(), or the last one of this name if that was made of the same.

        `made_of` lists all that the result depends on and that may differ between two calls: the method, tensors of
        the server's state, the cohort, the round if random numbers are drawn. Tensors are the same if they are one
        object, since a state's never change; clients' ids also if they are equal, and anything else if it is equal.
        Nobody may write into the result.
        """
        former = self._last.pop(name, None)  # so that its memory is free for the next
        if former is None or len(former[0]) != len(made_of) or not all(map(_is_same, former[0], made_of)):
            former = made_of, make()
        self._last[name] = former
        result: _T = former[1]
        return result

    def clear(self) -> None:
        """Forget all results, which may be large."""
        self._last.clear()

    def __reduce__(self) -> tuple[type["Memo"], tuple[()]]:
        return Memo, ()


def _is_same(former: Any, now: Any) -> bool:
    """Whether what is made of one is what is made of the other."""
    if former is now:
        return True
    if not isinstance(former, Tensor):
        return not isinstance(now, Tensor) and bool(former == now)
    if not isinstance(now, Tensor) or not former.dtype == now.dtype == torch.int64:
        return False
    return former.device == now.device and torch.equal(former, now)
