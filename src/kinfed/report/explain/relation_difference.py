"""Difference: what changed between the relations of two runs of the same clients, edge by edge."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UsageError, nearest
from ...runs.relations_file import Relations
from ...runs.run_folder import RunFolder
from ...verdict import graph_quality
from ..tables.text_table import Grid, facts, number

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


class Figures(NamedTuple):
    """How a relation is in one layer. NaN where weights are negative, so that rows are no distributions."""

    edges: int
    own_weight: float  # mean, of a client for itself
    consensus: float
    isolation: float


class Layer(NamedTuple):
    """What changed in one layer. NaN where a number is not defined, as with negative weights."""

    layer: str
    gained: int  # edges
    lost: int
    overlap: float  # mean over clients of `kinfed.verdict.graph_quality.row_overlap`
    correlation: float  # mean over clients of `kinfed.verdict.graph_quality.row_correlation`
    before: Figures
    after: Figures

    def to_dict(self) -> dict[str, Any]:
        """For JSON; None where a number is not defined."""
        figures = {"before": self.before._asdict(), "after": self.after._asdict()}
        plain = {f"{key}_{when}": value for when, measures in figures.items() for key, value in measures.items()}
        return facts({key: value for key, value in self._asdict().items() if key not in figures} | plain)


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
        change = np.abs(after - before)[tuple(places.T)]
        edges = []
        for layer, i, j in places[np.argsort(-change, kind="stable")].tolist():
            a, b = float(before[layer, i, j]), float(after[layer, i, j])
            if a < self.edge:
                what = "gained"
            elif b < self.edge:
                what = "lost"
            else:
                what = "stronger" if b > a else "weaker"
            edges.append(Edge(self.clients[i], self.clients[j], self.layers[layer + several], a, b, what))
        return edges

    def by_layer(self) -> list[Layer]:
        """What changed in each layer; all together first."""
        return [self._layer(*layer) for layer in zip(self.layers, self.before, self.after, strict=True)]

    def by_client(self) -> list[Client]:
        """What changed for each client, those of which least is left first."""
        before, after = self.before[0], self.after[0]
        a, b = self._edges(before), self._edges(after)
        counts = (b & ~a).sum(1), (a & ~b).sum(1)
        columns = *counts, *_compare_rows(before, after), before.diagonal(), after.diagonal()
        cells = [column.tolist() for column in columns]
        clients = [Client(*row) for row in zip(self.clients, *cells, strict=True)]
        return sorted(clients, key=lambda client: client.correlation if math.isnan(client.overlap) else client.overlap)

    def to_dict(self, top: int = 0) -> dict[str, Any]:
        """For JSON, with so many edges, those that changed most; 0: all."""
        about: dict[str, Any] = {"runs": self.runs, "methods": self.methods, "rounds": self.rounds, "edge": self.edge}
        layers = [layer.to_dict() for layer in self.by_layer()]
        clients, edges = ([facts(row._asdict()) for row in rows] for rows in (self.by_client(), self.edges()))
        return about | {"layers": layers, "clients": clients, "edges": edges[: top or None], "notes": self.notes}

    def _edges(self, weights: Array) -> Array:
        """[N, N] bool which of the weights are edges."""
        return (weights >= self.edge) & ~np.eye(len(weights), dtype=bool)

    def _layer(self, name: str, before: Array, after: Array) -> Layer:
        a, b = self._edges(before), self._edges(after)
        overlap, correlation = (
            float(np.nanmean(measure)) if not np.isnan(measure).all() else math.nan
            for measure in _compare_rows(before, after)
        )
        return Layer(
            layer=name,
            gained=int((b & ~a).sum()),
            lost=int((a & ~b).sum()),
            overlap=overlap,
            correlation=correlation,
            before=_figures(before, int(a.sum())),
            after=_figures(after, int(b.sum())),
        )


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
    names, other = (folder.read_summary().clients.names for folder in folders)
    _check_clients(folders, names, other)
    if edge is not None and not 0 < edge <= 1:
        raise UsageError(f"an edge is a weight in (0, 1]; got {edge:g}")
    relations = [relations_of(folder) for folder in folders]
    places = [
        _place(folder, relation, number) for folder, relation, number in zip(folders, relations, rounds, strict=True)
    ]
    chosen = [relation.weights[at].astype(np.float64) for relation, at in zip(relations, places, strict=True)]
    weights = [values if values.ndim == 3 else values[None] for values in chosen]  # [L, N, N] of each
    order = [other.index(name) for name in names]
    weights[1] = weights[1][:, order][:, :, order]
    means = [values.mean(0, keepdims=True) for values in weights]
    layers, notes = [WHOLE], []
    if relations[0].layers == relations[1].layers and len(weights[0]) == len(weights[1]) > 1:
        layers = [MEAN, *relations[0].layers]
        weights = [np.concatenate(pair) for pair in zip(means, weights, strict=True)]
    else:
        if max(map(len, weights)) > 1:
            notes.append("their relations are of other layers, so means over layers are compared")
        weights = means
    if any((values < 0).any() for values in weights):
        notes.append("some weights are negative, so rows are no distributions: no overlap, consensus or isolation")
    return Difference(
        runs=(str(before), str(after)),
        methods=(folders[0].read_summary().method, folders[1].read_summary().method),
        rounds=(int(relations[0].rounds[places[0]]), int(relations[1].rounds[places[1]])),
        clients=names,
        layers=layers,
        before=weights[0],
        after=weights[1],
        edge=1 / (2 * len(names)) if edge is None else edge,
        notes=notes,
    )


def relations_of(folder: RunFolder) -> Relations:
    """The relations of a finished run; an error that there is none names the folder."""
    try:
        return folder.read_relations()
    except UsageError as problem:
        where = "" if str(folder) in str(problem) else f"{folder}: "
        raise UsageError(f"{where}{problem}") from None


def grids(difference: Difference, top: int = TOP) -> list[Grid]:
    """A difference as tables: by layer, by client, by edge; of the last two so many rows."""
    layers, clients, edges = difference.by_layer(), difference.by_client(), difference.edges()
    a, b = (f"{run} (round {round})" for run, round in zip(difference.runs, difference.rounds, strict=True))

    def table(
        name: str, title: str, headings: str, rows: list[list[str]], notes: Sequence[str] = (), text_columns: int = 1
    ) -> Grid:
        return Grid(name, title, headings.split(","), [rows], notes, text_columns=text_columns)

    def most(title: str, count: int) -> str:
        return f"{title}, {top} of {count:,}" if top and count > top else title

    return [
        table(
            "layers",
            f"from {a} to {b}",
            ",edges,gained,lost,overlap,correlation",
            [
                [layer.layer, f"{layer.before.edges:,} -> {layer.after.edges:,}", *_tell_change(layer)]
                for layer in layers
            ],
            [f"an edge is a weight of {difference.edge:.3g} or more for another client", *difference.notes],
        ),
        table(
            "collapse",
            "how far the graph collapsed",
            ",own weight,consensus,isolation",
            [[layer.layer, *map(_arrow, layer.before[1:], layer.after[1:])] for layer in layers],
        ),
        table(
            "clients",
            most("clients whose rows changed most", len(clients)),
            "client,gained,lost,overlap,correlation,own weight",
            [
                [client.client, *_tell_change(client), _arrow(client.own_before, client.own_after)]
                for client in clients[: top or None]
            ],
        ),
        table(
            "edges",
            most("edges that changed most", len(edges)),
            "client,learns from,layer,before,after,",
            [[*link[:3], f"{link.before:.3f}", f"{link.after:.3f}", link.what] for link in edges[: top or None]],
            [] if edges else ["no edge changed"],
            text_columns=3,
        ),
    ]


def _tell_change(change: Layer | Client) -> list[str]:
    return [f"{change.gained:,}", f"{change.lost:,}", number(change.overlap), number(change.correlation)]


def _arrow(before: float, after: float) -> str:
    if math.isnan(before) and math.isnan(after):
        return ""
    return f"{before:.3f} -> {after:.3f}"


def _compare_rows(before: Array, after: Array) -> tuple[Array, Array]:
    """[N] the overlap and the correlation of rows."""
    pair = torch.from_numpy(before), torch.from_numpy(after)
    positive = bool((before >= 0).all() and (after >= 0).all())
    overlap = graph_quality.row_overlap(*pair).numpy() if positive else np.full(len(before), math.nan)
    return overlap, graph_quality.row_correlation(*pair).numpy()


def _figures(weights: Array, edges: int) -> Figures:
    relation, positive = torch.from_numpy(weights), bool((weights >= 0).all())
    collapse = (
        (graph_quality.consensus(relation), graph_quality.isolation(relation)) if positive else (math.nan, math.nan)
    )
    return Figures(edges, float(weights.diagonal().mean()), *collapse)


def _check_clients(folders: tuple[RunFolder, RunFolder], names: list[str], other: list[str]) -> None:
    """Raise UsageError if one of two runs has a client that the other has not."""
    for (here, mine), (there, theirs) in itertools.permutations(zip(folders, (names, other), strict=True)):
        if missing := [name for name in mine if name not in set(theirs)]:
            raise UsageError(
                f"client '{missing[0]}' of {here} is not in {there} ({nearest(missing[0], theirs)}): relations can be "
                "compared of runs of the same clients only"
            )


def _place(folder: RunFolder, relations: Relations, number: int | None) -> int:
    if number is None:
        return relations.selected
    at = np.flatnonzero(relations.rounds == number)
    if not len(at):
        rounds = (
            f"{relations.rounds[0]} to {relations.rounds[-1]}"
            if len(relations.rounds) > 1
            else f"{relations.rounds[0]} alone"
        )
        raise UsageError(f"{folder} keeps no relation of round {number}; those it was scored in are {rounds}")
    return int(at[0])
