"""Agreement: a relation that a method learns beside the graph that the data come with (SFL, Figure 4)."""

import math

import numpy as np
import torch
from torch import Tensor

from kinfed.core.graph import Graph
from kinfed.errors import UsageError, several
from kinfed.search.study import Finding, Row, Study, setting
from kinfed.verdict.graph_quality import edge_auroc, hops, rank_correlation

from ..plots.relations import relation_grid
from .weights import over_seeds

FAR = 3  # hops, from which pairs are counted together


def agreement(study: Study, rounds: int = 5) -> Finding:
    """Does a method learn the graph that is given? At about `rounds` of the evaluated rounds, and at the selected one.

    Spearman's correlation of a pair's weights in both, the AUROC with which the learned weight tells linked pairs from
    others, and the mean learned weight of a client for itself and for clients one hop away, two, and three or more. The
    experiment needs a graph, federation.graph; the method is run without it.
    """
    if rounds < 2:
        raise UsageError(f"analysis.rounds is how many rounds the table shows, at least 2; got {rounds}")
    given = [_read_given_graph(federation.graph) for federation in study.federations()]
    relations = [
        folder.read_relations() for folder in study.run(study.method, [setting("federation.graph", "none")]).repeats()
    ]
    at = relations[0].rounds
    graphs = [torch.from_numpy(relation.weights) for relation in relations]  # [T, N, N], or [T, L, N, N] per seed
    graphs = [graph.mean(1) if graph.ndim == 4 else graph for graph in graphs]

    def row(label: str, moments: list[int]) -> Row:
        looks = (_look(graph[t], links) for graph, links, t in zip(graphs, given, moments, strict=True))
        return {"round": label, **over_seeds(looks)}

    some = np.unique(np.linspace(0, len(at) - 1, rounds).round().astype(int)).tolist()
    rows = [row(str(at[t]), [t] * len(relations)) for t in some]
    moments = [relation.selected for relation in relations]
    rows.append(row("selected: " + ", ".join(str(at[t]) for t in moments), moments))
    picture = study.out / "agreement.png"
    panels = {("given", ""): given[0].numpy(), (study.method, ""): graphs[0][moments[0]].numpy()}
    relation_grid(panels, picture, {"": np.arange(len(given[0]))})
    notes = ["hops are links of the given graph, whatever their weight and direction"]
    level = [str(cells["round"]) for cells in rows if cells["rank"] is None]
    notes += [f"no rank correlation where all weights are equal: {', '.join(level)}"] if level else []
    return Finding(f"relation of {study.method} beside the given graph", rows, [picture], notes)


def _read_given_graph(graph: Graph | None) -> Tensor:
    """[N, N] the weights of the graph that the data come with; raises UsageError if there is none."""
    if graph is None:
        raise UsageError(
            "agreement compares a learned relation with a given graph, and these clients have none; name data with "
            "one, or set federation.graph, as federation.graph=oracle where there are hidden groups"
        )
    weights: Tensor = graph.weights.double()
    return weights.mean(0) if weights.ndim == 3 else weights


def _look(relation: Tensor, given: Tensor) -> dict[str, float]:
    """The numbers of one relation: [N, N] beside the given graph: [N, N]."""
    away = hops(given)  # [N, N]
    links = away == 1

    def mean(pairs: Tensor) -> float:
        return float(relation[pairs].mean()) if bool(pairs.any()) else math.nan

    return {
        "rank": rank_correlation(relation, given),
        "AUROC": edge_auroc(relation, links),
        "self": mean(away == 0),
        **{several(count, "hop"): mean(away == count) for count in range(1, FAR)},
        f"{FAR}+ hops": mean(away >= FAR),
    }
