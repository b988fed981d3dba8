"""Layers: the weights between clients in each layer, and how they change over rounds (FedAGHN, Table 4, Figure 5)."""

import numpy as np
import torch
from torch import Tensor

from kinfed.errors import UsageError
from kinfed.methods import METHODS
from kinfed.plots.drawing import Array
from kinfed.runs.config import parts
from kinfed.search.study import Finding, Row, Study
from kinfed.verdict.graph_quality import group_weights

from ..plots.relations import relation_grid, weights_by_round
from .weights import blocks, look, over_seeds, similar


def layers(study: Study, overlap: float = 0.5, rounds: int = 10) -> Finding:
    """Mean weight of a client for itself, similar clients and others, layer by layer and round by round.

    Layers are listed from shallow to deep, at about `rounds` of the evaluated rounds and at the one that validation
    selects. Similar clients are found by hidden groups or by `overlap` of labels, as in `weights`. The method needs a
    graph for each layer.
    """
    if rounds < 2:
        raise UsageError(f"analysis.rounds is how many rounds the table shows, at least 2; got {rounds}")
    _refuse_one_graph(study)
    what, pairs = similar(study.federations(), overlap)
    relations = [folder.read_relations() for folder in study.run(study.method).repeats()]
    at, names, count = relations[0].rounds, relations[0].layers, len(relations[0].layers)
    if count < 2:
        raise UsageError("layers compares layers, and this model has one; choose a deeper model")
    graphs = [torch.from_numpy(one.weights) for one in relations]  # [T, L, N, N] per seed

    def row(layer: int, label: str, moments: list[int]) -> Row:
        """One layer, each seed at its own moment."""
        each = (look(graph[t, layer], kin) for graph, kin, t in zip(graphs, pairs, moments, strict=True))
        return {"layer": names[layer], "round": label, **over_seeds(each)}

    some = np.unique(np.linspace(0, len(at) - 1, rounds).round().astype(int)).tolist()
    moments = [one.selected for one in relations]
    label = "selected: " + ", ".join(str(at[t]) for t in moments)
    rows = []
    for layer in range(count):
        rows += [row(layer, str(at[t]), [t] * len(relations)) for t in some] + [row(layer, label, moments)]

    heatmaps, lines = study.out / "layers.png", study.out / "layers-by-round.png"
    halves = {"shallow": slice(count // 2), "deep": slice((count + 1) // 2, count)}
    panels = {
        (f"{half}\n{' '.join(names[part])}", f"round {at[t]}"): graphs[0][t, part].mean(0).numpy()
        for half, part in halves.items()
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


def _refuse_one_graph(study: Study) -> None:
    """Raise UsageError, before anything is run, if the method has one graph for all layers.

    Methods that have several say so by `by_layer`, which is a setting of those that have several only if asked.
    """
    if not getattr(study.experiment().method, "by_layer", False):
        able = [
            f"{name} with method.by_layer=true" if "by_layer" in parts.settings(method) else name
            for name, method in METHODS.items()
            if hasattr(method, "by_layer")
        ]
        raise UsageError(
            f"layers needs a graph for each layer, and {study.method} has one for all of them; choose "
            f"{' or '.join(able)}"
        )
