"""Round records: what a method reports beside its models, checked when a round ends, so that it can spoil no run."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import UsageError
from .graph import NeighbourLists, Relation
from .trees import Tree


@dataclass
class RoundRecords:
    """The relations and diagnostics of a run: what cannot be kept is left out, with a warning where it first comes."""

    method: str  # for warnings
    count: int  # N
    layers: int | None = None  # L of the first relation that has layers
    refused: set[str] = field(default_factory=set)

    def check_relation(self, round: int, relation: Any) -> Relation | None:
        """The relation of a round if it is finite and [N], [N, N] or [L, N, N], or lists; else None, from then on."""
        if relation is None or "relation" in self.refused:
            return None
        why = self._find_fault(relation)
        if not why:
            return relation
        self._refuse(round, "relation", f"relation(...) {why}")
        return None

    def _find_fault(self, relation: Any) -> str:
        """Why this is no relation; "" if it is one."""
        if isinstance(relation, NeighbourLists):
            shape = list(relation.shape)
            finite = all(bool(t.isfinite().all()) for t in relation.tensors.values())
        elif isinstance(relation, Tensor):
            shape, finite = list(relation.shape), bool(relation.isfinite().all())
        else:
            return f"is a {type(relation).__name__}, and must be a tensor"
        form = f"[{self.count}, {self.count}]"
        if shape[-2:] != [self.count] * len(shape[-2:]) or not 1 <= len(shape) <= 3:
            return f"is {shape}, and must be {form}, or [L, {self.count}, {self.count}] with a row for each layer"
        if len(shape) == 3:
            self.layers = self.layers or shape[0]
            if self.layers != shape[0]:
                return f"has {shape[0]} layers, and had {self.layers} before"
        if not finite:
            return "holds NaN or infinity"
        return ""

    def check_diagnostics(self, round: int, diagnostics: Any, count: int) -> dict[str, Tensor]:
        """The diagnostics of a round that are numbers, [] or [n] for the n = `count` clients that have joined."""
        if not isinstance(diagnostics, Mapping):
            self._refuse(round, "diagnostics", f"diagnostics(...) returns a {type(diagnostics).__name__}, not a dict")
            return {}
        kept = {}
        for name, value in diagnostics.items():
            number = torch.as_tensor(float(value)) if isinstance(value, Real) else value
            if isinstance(number, Tensor) and list(number.shape) in ([], [count]):
                kept[str(name)] = number
            else:
                what = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
                wanted = f"one number, or [{count}], one for each client"
                self._refuse(round, str(name), f"diagnostics(...) has '{name}': {what}, and must be {wanted}")
        return kept

    def _refuse(self, round: int, name: str, why: str) -> None:
        if name not in self.refused:
            self.refused.add(name)
            warnings.warn(f"round {round + 1}: {self.method}.{why}; it is not kept, and training goes on", stacklevel=4)


def check_state(method: str, round: int, server: Tree) -> None:
    """Raise UsageError unless a server's state is made of tensors, which alone can be kept and read again."""
    for leaf in tree_leaves(server):
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"round {round + 1}: the server's state of {method} holds a {type(leaf).__name__}; a state is made of "
                "tensors: torch.tensor(...) of a number, and the round's number is roster.round"
            )
