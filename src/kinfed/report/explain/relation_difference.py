"""Difference: what changed between the relations of two runs of the same clients, edge by edge."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UsageError, nearest
from ...runs.run_folder import Relations, RunFolder
from ...verdict import graph_quality
from ..tables.text_table import Grid, defined, number

Array = NDArray[Any]

WHOLE, MEAN = "whole model", "mean of layers"
TOP = 10  # clients and edges that are listed


class Edge(NamedTuple):
    """How much of one client's model is in another's, before and after."""

    client: str
    learns_from: str
    layer: str
    before: float
    after: float
    what: str  # gained, lost, stronger or weaker


class Layer(NamedTuple):
    """What changed in one layer. NaN where a number is not defined, as with negative weights."""

    layer: str
    edges_before: int
    edges_after: int
    gained: int
    lost: int
    overlap: float  # mean over clients of `kinfed.verdict.graph_quality.row_overlap`
    correlation: float  # mean over clients of `kinfed.verdict.graph_quality.row_correlation`
    own_before: float  # mean weight of a client for itself
    own_after: float
    consensus_before: float
    consensus_after: float
    isolation_before: float
    isolation_after: float


class Client(NamedTuple):
    """What changed for one client, by the mean of its weights over layers."""

    client: str
    gained: int
    lost: int
    overlap: float
    correlation: float
    own_before: float
    own_after: float


@dataclass(frozen=True)
class Difference:
    """The relations of two runs of the same clients; `diff` makes one. Weights are [L, N, N], the first of them of all
    layers together.
    """

    runs: tuple[str, str]
    methods: tuple[str, str]
    rounds: tuple[int, int]  # from 1
    clients: list[str]  # [N] in the order of the first run
    layers: list[str]  # [L]
    before: Array  # [L, N, N]
    after: Array
    edge: float  # a weight of another client from which it counts as an edge
    notes: list[str]

    def edges(self) -> list[Edge]:
        """The edges of either run, in every layer or of a whole model, those that changed most first."""
        several = len(self.layers) > 1
        before, after = self.before[several:], self.after[several:]
        there = (np.maximum(before, after) >= self.edge) & ~np.eye(len(self.clients), dtype=bool)
        places = np.argwhere(there & (before != after))
        apart = np.abs(after - before)[tuple(places.T)]
        found = []
        for layer, i, j in places[np.argsort(-apart, kind="stable")].tolist():
            a, b = float(before[layer, i, j]), float(after[layer, i, j])
            what = "stronger" if b > a else "weaker"
            what = "gained" if a < self.edge else "lost" if b < self.edge else what
            found.append(Edge(self.clients[i], self.clients[j], self.layers[layer + several], a, b, what))
        return found

    def by_layer(self) -> list[Layer]:
        """What changed in each layer; all together first."""
        return [self._layer(i) for i in range(len(self.layers))]

    def by_client(self) -> list[Client]:
        """What changed for each client, those of which least is left first."""
        before, after = torch.from_numpy(self.before[0]), torch.from_numpy(self.after[0])
        gained, lost = self._moved(0)
        overlap, correlation = _alike(before, after)
        rows = zip(
            self.clients,
            gained.sum(1).tolist(),
            lost.sum(1).tolist(),
            overlap,
            correlation,
            before.diagonal().tolist(),
            after.diagonal().tolist(),
            strict=True,
        )
        found = [Client(*row) for row in rows]
        return sorted(found, key=lambda one: one.correlation if math.isnan(one.overlap) else one.overlap)

    def to_dict(self, top: int = 0) -> dict[str, Any]:
        """For JSON, with so many edges, those that changed most; 0: all."""
        edges = self.edges()
        facts: dict[str, Any] = {"runs": self.runs, "methods": self.methods, "rounds": self.rounds, "edge": self.edge}
        tables: dict[str, Sequence[Any]] = {
            "layers": self.by_layer(),
            "clients": self.by_client(),
            "edges": edges[:top] if top else edges,
        }
        plain = {name: [_plain(one._asdict()) for one in rows] for name, rows in tables.items()}
        return facts | plain | {"notes": self.notes}

    def _moved(self, layer: int) -> tuple[Array, Array]:
        """[N, N] bool which edges of a layer were gained, and which lost."""
        others = ~np.eye(len(self.clients), dtype=bool)
        before, after = (each[layer] >= self.edge for each in (self.before, self.after))
        return after & ~before & others, before & ~after & others

    def _layer(self, layer: int) -> Layer:
        pair = torch.from_numpy(self.before[layer]), torch.from_numpy(self.after[layer])
        others = ~np.eye(len(self.clients), dtype=bool)
        edges, edges_after = (int(((each[layer] >= self.edge) & others).sum()) for each in (self.before, self.after))
        gained, lost = (int(each.sum()) for each in self._moved(layer))
        overlap, correlation = (float(np.nanmean(each)) if _any(each) else math.nan for each in _alike(*pair))
        own, own_after = (float(each.diagonal().mean()) for each in pair)
        consensus, isolation = (
            [_figure(each, one) for one in pair] for each in (graph_quality.consensus, graph_quality.isolation)
        )
        moved = self.layers[layer], edges, edges_after, gained, lost, overlap, correlation
        return Layer(*moved, own, own_after, consensus[0], consensus[1], isolation[0], isolation[1])


def diff(
    before: str | Path, after: str | Path, rounds: Sequence[int | None] = (None, None), edge: float | None = None
) -> Difference:
    """What changed from the relation of one finished run to that of another of the same clients.

    Args:
        before, after: folders of the runs; the same one twice compares two of its rounds.
        rounds: one of each run, from 1; None: the one that validation selects.
        edge: the least weight, in (0, 1], of another client that counts as an edge; by default half of an even share,
            1 / 2N.

    Returns:
        The difference, with `edges()`, `by_client()` and `by_layer()`. Relations of other layers are compared by their
        means over layers.

    Raises:
        UsageError: the runs are of other clients, or have no relation.
    """
    folders = RunFolder(before), RunFolder(after)
    names, other = (folder.read_summary().client_names for folder in folders)
    _check_clients(folders, names, other)
    if edge is not None and not 0 < edge <= 1:
        raise UsageError(f"an edge is a weight in (0, 1]; got {edge:g}")
    found = [relations_of(folder) for folder in folders]
    places = [_place(folder, one, asked) for folder, one, asked in zip(folders, found, rounds, strict=True)]
    weights = [one.weights[at].astype(np.float64) for one, at in zip(found, places, strict=True)]
    order = [other.index(name) for name in names]
    weights[1] = weights[1][..., order, :][..., order]
    layers, notes = [WHOLE], []
    if all(each.ndim == 3 for each in weights) and found[0].layers == found[1].layers and len(found[0].layers) > 1:
        layers = [MEAN, *found[0].layers]
        weights = [np.concatenate([each.mean(0)[None], each]) for each in weights]
    else:
        if any(each.ndim == 3 and len(each) > 1 for each in weights):
            notes.append("their relations are of other layers, so means over layers are compared")
        weights = [(each.mean(0) if each.ndim == 3 else each)[None] for each in weights]
    if any((each < 0).any() for each in weights):
        notes.append("some weights are negative, so rows are no distributions: no overlap, consensus or isolation")
    return Difference(
        (str(before), str(after)),
        (folders[0].read_summary().method, folders[1].read_summary().method),
        (int(found[0].rounds[places[0]]), int(found[1].rounds[places[1]])),
        names,
        layers,
        weights[0],
        weights[1],
        1 / (2 * len(names)) if edge is None else edge,
        notes,
    )


def relations_of(folder: RunFolder) -> Relations:
    """The relations of a finished run; an error that there is none names the folder."""
    try:
        return folder.read_relations()
    except UsageError as problem:
        where = "" if str(folder) in str(problem) else f"{folder}: "
        raise UsageError(f"{where}{problem}") from None


def grids(found: Difference, top: int = TOP) -> list[Grid]:
    """A difference as tables: by layer, by client, by edge; of the last two so many rows."""
    clients, edges = found.by_client(), found.edges()
    layers = found.by_layer()
    a, b = (f"{run} (round {round})" for run, round in zip(found.runs, found.rounds, strict=True))
    rest = [f"an edge is a weight of {found.edge:.3g} or more for another client", *found.notes]
    return [
        Grid(
            "layers",
            f"from {a} to {b}",
            ["", "edges", "gained", "lost", "overlap", "correlation"],
            [[_layer_cells(one) for one in layers]],
            rest,
            [_plain(one._asdict()) for one in layers],
        ),
        Grid(
            "collapse",
            "how far the graph collapsed",
            ["", "own weight", "consensus", "isolation"],
            [[_collapse_cells(one) for one in layers]],
        ),
        Grid(
            "clients",
            f"clients whose rows changed most{_of(top, len(clients))}",
            ["client", "gained", "lost", "overlap", "correlation", "own weight"],
            [[_client_cells(one) for one in clients[: top or None]]],
            [],
            [_plain(one._asdict()) for one in clients],
        ),
        Grid(
            "edges",
            f"edges that changed most{_of(top, len(edges))}",
            ["client", "learns from", "layer", "before", "after", ""],
            [[[*one[:3], f"{one.before:.3f}", f"{one.after:.3f}", one.what] for one in edges[: top or None]]],
            [] if edges else ["no edge changed"],
            [_plain(one._asdict()) for one in edges],
            words=3,
        ),
    ]


def _of(top: int, count: int) -> str:
    return f", {top} of {count:,}" if top and count > top else ""


def _layer_cells(one: Layer) -> list[str]:
    counts = [f"{one.edges_before:,} -> {one.edges_after:,}", f"{one.gained:,}", f"{one.lost:,}"]
    return [one.layer, *counts, number(one.overlap), number(one.correlation)]


def _collapse_cells(one: Layer) -> list[str]:
    pairs = [(one.own_before, one.own_after), (one.consensus_before, one.consensus_after)]
    pairs.append((one.isolation_before, one.isolation_after))
    return [one.layer, *(_arrow(*pair) for pair in pairs)]


def _client_cells(one: Client) -> list[str]:
    counts = [f"{one.gained:,}", f"{one.lost:,}"]
    own = _arrow(one.own_before, one.own_after)
    return [one.client, *counts, number(one.overlap), number(one.correlation), own]


def _arrow(before: float, after: float) -> str:
    if math.isnan(before) and math.isnan(after):
        return ""
    return f"{before:.3f} -> {after:.3f}"


def _alike(before: torch.Tensor, after: torch.Tensor) -> tuple[list[float], list[float]]:
    """[N] the overlap and the correlation of rows."""
    positive = bool((before >= 0).all() and (after >= 0).all())
    overlap = graph_quality.row_overlap(before, after).tolist() if positive else [math.nan] * len(before)
    return overlap, graph_quality.row_correlation(before, after).tolist()


def _figure(what: Callable[[torch.Tensor], float], relation: torch.Tensor) -> float:
    """A figure of a relation whose rows are distributions; else NaN."""
    return what(relation) if bool((relation >= 0).all()) else math.nan


def _any(values: Sequence[float]) -> bool:
    return any(not math.isnan(value) for value in values)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: defined(one) for key, one in row.items()}


def _check_clients(folders: tuple[RunFolder, RunFolder], names: list[str], other: list[str]) -> None:
    """Raise UsageError unless two runs have the same clients."""
    for name, here, there, known in (
        *((name, *folders, other) for name in names if name not in set(other)),
        *((name, *folders[::-1], names) for name in other if name not in set(names)),
    ):
        raise UsageError(
            f"client '{name}' of {here} is not in {there} ({nearest(name, known)}): relations can be compared of runs "
            "of the same clients only"
        )


def _place(folder: RunFolder, found: Relations, asked: int | None) -> int:
    """The index of the round that is asked for."""
    if asked is None:
        return found.selected
    at = np.flatnonzero(found.rounds == asked)
    if not len(at):
        known = f"{found.rounds[0]} to {found.rounds[-1]}" if len(found.rounds) > 1 else f"{found.rounds[0]} alone"
        raise UsageError(f"{folder} keeps no relation of round {asked}; those it was scored in are {known}")
    return int(at[0])
