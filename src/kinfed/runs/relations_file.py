"""The relations of a run by round, and the file that holds them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.graph import NeighbourLists
from ..core.history import History
from ..errors import UsageError
from ..files import replacing

Array = NDArray[Any]
EXACT, WRITTEN = 1 << 23, 1 << 30  # limits in bytes: relations written exactly, and relations of all rounds written


@dataclass(frozen=True)
class Relations:
    """The relations of a run with one seed."""

    rounds: Array  # [T] evaluated, from 1
    kept: Array | list[NeighbourLists]  # [T, N, N], or [T, L, N, N] with one graph per layer; or lists by round
    layers: list[str]  # [L]
    origin: str
    selected: int  # index in the first axis of the round that validation selects; -1 if it is of no such round
    clients: list[str]  # [N]

    @property
    def lists(self) -> list[NeighbourLists]:
        """By round, of very many clients of whom each learns from a few; none where there are tables."""
        return self.kept if isinstance(self.kept, list) else []

    @property
    def weights(self) -> Array:
        """[T, N, N] or [T, L, N, N]; raises UsageError where there are lists."""
        if isinstance(self.kept, list):
            raise UsageError(
                f"each of {len(self.kept[0]):,} clients lists from whom it learns, and there is no table of all pairs; "
                "ask for one client at a time: kinfed explain"
            )
        return self.kept

    @property
    def by_layer(self) -> Any:
        """[T][L] tables [N, N], or lists; L is 1 if there is one for the whole model."""
        if not isinstance(self.kept, list):
            return self.kept if self.kept.ndim == 4 else self.kept[:, None]
        return [[o.layer(i) for i in range(len(o.weights))] if o.weights.ndim == 3 else [o] for o in self.kept]

    def mean(self, at: int) -> Any:
        """The mean over layers of one round: [N, N], or lists."""
        if not isinstance(self.kept, list):
            return self.by_layer[at].mean(0)
        lists = self.kept[at]
        if lists.weights.ndim == 2:
            return lists
        return replace(lists, weights=lists.weights.mean(0), rest=lists.rest.mean(0))

    def row(self, client: int) -> Array:
        """[T, N] or [T, L, N] the weights of one client."""
        if isinstance(self.kept, list):
            return np.stack([lists.row(client).numpy() for lists in self.kept])
        return self.kept[..., client, :]


def write_relations(history: History, path: Path, layers: list[str]) -> None:
    """Write `round: [T]` (from 1), `relation: [T, N, N]` or [T, L, N, N], `origin`, `clients: [N]`, `layers: [L]`.

    Of lists `relation` is [T, N, M] or [T, L, N, M], of the clients `near: [T, N, M]`; see `NeighbourLists` for
    `rest` and `mass`. If the relations take more than `EXACT` bytes, those of all rounds but the selected one are
    rounded to float16, and `selected: [N, N]` or [L, N, N] is the exact relation of that round. If they take more than
    `WRITTEN` bytes, only the selected round's relation is written.
    """
    rounds, at = history.rounds, history.place()
    labels = {"origin": np.array(history.origin), "clients": np.array(history.names)}
    if lists := [relation for relation in history.relations if isinstance(relation, NeighbourLists)]:
        _write_lists(path, lists, rounds, at, labels, layers)
        return
    relations = [relation for relation in history.relations if isinstance(relation, Tensor)]
    size = sum(4 * relation.numel() for relation in relations)
    if size > WRITTEN:
        rounds, relations = [rounds[at]], [relations[at]]
    stack = torch.stack(relations)
    arrays = {
        "round": np.array(rounds, np.int64) + 1,
        "relation": stack.numpy(),
        "layers": np.array(layers if stack.ndim == 4 else [], dtype=str),
    }
    constant = all(r.shape[:-1] == () for r in history.kept_relations)  # these compress to almost nothing
    small = constant or len(rounds) == 1 or size <= EXACT
    if not small and (rounded := stack.half()).isfinite().all():
        arrays |= {"relation": rounded.numpy(), "selected": relations[at].numpy()}
    _write_arrays(path, arrays | labels, small)


def _write_lists(
    path: Path,
    lists: list[NeighbourLists],
    rounds: list[int],
    at: int,
    labels: dict[str, Array],
    layers: list[str],
) -> None:
    """The same of lists, all of them exact; of the selected round alone if they are too large."""
    size = sum(t.nbytes for relation in lists for t in relation.tensors.values())
    if size > WRITTEN:
        rounds, lists = [rounds[at]], [lists[at]]
    tables = {name: torch.stack([relation.tensors[name] for relation in lists]).numpy() for name in lists[0].tensors}
    arrays = {
        "round": np.array(rounds, np.int64) + 1,
        "relation": tables.pop("weights"),
        "layers": np.array(layers if lists[0].weights.ndim == 3 else [], dtype=str),
    }
    _write_arrays(path, arrays | tables | labels, size <= EXACT)


def _write_arrays(path: Path, arrays: dict[str, Array], small: bool) -> None:
    """Write arrays; compressed if they are small, because it takes seconds to compress large ones."""
    save: Callable[..., None] = np.savez_compressed if small else np.savez
    with replacing(path) as part, part.open("wb") as file:
        save(file, **arrays)


def read_relations(path: Path, selected: int) -> Relations:
    """What `write_relations` has written, in float32; `selected` is the round, from 1, whose weights are exact."""
    with np.load(path) as file:
        rounds, kept = file["round"], file["relation"]
        if "near" in file:
            tables = [torch.from_numpy(file[name]) for name in ("relation", "near", "rest", "mass")]
            kept = [NeighbourLists(*parts) for parts in zip(*tables, strict=True)]
        else:
            kept = kept.astype(np.float32)
            if "selected" in file:
                kept[rounds == selected] = file["selected"]
        at = int(next(iter(np.flatnonzero(rounds == selected)), -1))
        return Relations(
            rounds,
            kept,
            layers=file["layers"].tolist(),
            origin=str(file["origin"]),
            selected=at,
            clients=file["clients"].tolist(),
        )
