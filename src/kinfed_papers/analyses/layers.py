"""Layers: the weights between clients in each layer, and how they change over rounds (FedAGHN, Table 4, Figure 5)."""

import numpy as np
import torch
from torch import Tensor

from kinfed.errors import UsageError
from kinfed.plots.drawing import Array
from kinfed.search.study import Finding, Row, Study
from kinfed.verdict.graph_quality import group_weights

from ..plots.relations import relation_grid, weights_by_round
from .weights import blocks, look, over_seeds, similar


def layers(study: Study, overlap: float = 0.5, rounds: int = 10) -> Finding:
    """Mean weight of a client for itself, similar clients and others, layer by layer and round by round.

    Layers are listed from shallow to deep, at about `rounds` of the evaluated rounds and at the one that validation
    selects. Similar clients are found by hidden groups or by `overlap` of labels, as in `weights`. A method with one
    graph for all layers has a single row a round.
    """
    if rounds < 2:
        raise UsageError(f"analysis.rounds is how many rounds the table shows, at least 2; got {rounds}")
    what, pairs = similar(study.federations(), overlap)
    relations = [folder.read_relations() for folder in study.run(study.method).repeats()]
    at, graphs = (
        relations[0].rounds,
        [torch.from_numpy(relation.weights) for relation in relations],
    )  # [T, L, N, N] per seed
    names = relations[0].layers if graphs[0].ndim == 4 else ["all"]
    graphs = [graph if graph.ndim == 4 else graph[:, None] for graph in graphs]
    count = len(names)

    def row(layer: int, label: str, moments: list[int]) -> Row:
        """One layer, each seed at its own moment."""
        looks = (look(graph[t, layer], kin) for graph, kin, t in zip(graphs, pairs, moments, strict=True))
        return {"layer": names[layer], "round": label, **over_seeds(looks)}

    some = np.unique(np.linspace(0, len(at) - 1, rounds).round().astype(int)).tolist()
    moments = [relation.selected for relation in relations]
    label = "selected: " + ", ".join(str(at[t]) for t in moments)
    rows = []
    for layer in range(count):
        rows += [row(layer, str(at[t]), [t] * len(relations)) for t in some] + [row(layer, label, moments)]

    heatmaps, lines = study.out / "layers.png", study.out / "layers-by-round.png"
    parts = {"shallow": slice(count // 2), "deep": slice((count + 1) // 2, count)} if count > 1 else {"": slice(1)}
    panels = {
        (f"{name}\n{' '.join(names[part])}".strip(), f"round {at[t]}"): graphs[0][t, part].mean(0).numpy()
        for name, part in parts.items()
        for t in (0, (len(at) - 1) // 2, len(at) - 1)
    }
    order = blocks(pairs[0])
    relation_grid(panels, heatmaps, {column: order for _, column in panels})
    kinds = np.mean([_by_kind(graph, kin) for graph, kin in zip(graphs, pairs, strict=True)], axis=0)
    titles = ("weight of oneself", "of a similar client", "of any other client")
    weights_by_round(at, {name: kinds[..., i] for i, name in enumerate(titles)}, names, lines)
    notes = [f"similar are clients {what}"]
    return Finding(f"weights between clients of {study.method}, layer by layer", rows, [heatmaps, lines], notes)


def _by_kind(graph: Tensor, pairs: Tensor) -> Array:
    """[T, L, 3] mean weights for oneself, similar clients and others, of graph: [T, L, N, N]."""
    return np.array([[group_weights(layer, pairs) for layer in moment] for moment in graph])
