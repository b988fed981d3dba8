"""Topologies: does a method that clusters its clients find the nodes that they belong to?"""

from collections.abc import Sequence

import numpy as np
import torch

from kinfed.data.partitions.topologies import NODES
from kinfed.errors import UsageError
from kinfed.plots.drawing import Array
from kinfed.search.study import Finding, Row, Study, setting
from kinfed.verdict.graph_quality import rand_by_round

from ..plots import rand


def topologies(
    study: Study, nodes: Sequence[int] = (4, 5), per_node: int = 20, share: float = 0.3, every: int = 5
) -> Finding:
    """The Rand index of a run's clusters against the nodes of each topology, by round (FedCedar, Figure 3).

    Every node has `per_node` clients. A round has `share` of all clients, every `every`-th round that share of each
    node. FedCedar gets the number of nodes as a setting. The table shows some of those rounds, and the last quarter.
    """
    unknown = [count for count in nodes if count not in NODES]
    if unknown or not nodes:
        raise UsageError(f"analysis.nodes must be some of {', '.join(map(str, NODES))}; got {list(nodes)}")
    if per_node < 1 or every < 1:
        raise UsageError(f"analysis.per_node and analysis.every must be at least 1; got {per_node} and {every}")
    notes = list[str]()
    folders = study.runs(
        {
            f"{count}-nodes": [
                setting("federation.partition.name", "topologies"),
                setting("federation.partition.nodes", count),
                setting("federation.clients", count * per_node),
                f"participation={{share={share}, by_group={every}}}",
                *([setting("method.clusters", count)] if study.method == "fedcedar" else []),
            ]
            for count in nodes
        },
        failed=notes,
    )
    panels: dict[str, Array] = {}
    rows: list[Row] = []
    for name, folder in folders.items():
        count = int(name.removesuffix("-nodes"))
        rounds = folder.repeats()[0].read_relations().rounds
        truth = torch.arange(count * per_node) // per_node
        index = np.stack([rand_by_round(run.read_clusters(), truth).numpy() for run in folder.repeats()])  # [S, T, 2]
        panels[f"{count} nodes"] = index
        rows += _rows(count, rounds, index, every)
        mean = index[..., 0].mean(0)
        notes.append(
            f"{count} nodes: the least Rand index is {mean.min():.2f}, in round {rounds[mean.argmin()]}; "
            f"{(mean == 1).sum()} of {len(rounds)} rounds have 1"
        )
    picture = study.out / "rand-by-round.png"
    rand.rand_by_round(rounds, panels, every, picture)
    return Finding(f"clusters of {study.method} against the nodes of a topology", rows, [picture], notes)


def _rows(count: int, rounds: Array, index: Array, every: int) -> list[Row]:
    """A row for some of the rounds: [T] in which every node takes part, and one for the last quarter of all."""
    drawn = np.flatnonzero(rounds % every == 0)
    drawn = drawn if len(drawn) else np.arange(len(rounds))
    some = drawn[np.unique(np.geomspace(1, len(drawn), 8).round().astype(int)) - 1]
    most = rounds[-1] * 3 // 4
    last = np.flatnonzero(rounds > most)
    picked = {str(rounds[i]): np.array([i]) for i in some} | {f"{most + 1} to {rounds[-1]}": last}
    rows: list[Row] = []
    for label, at in picked.items():
        plain, adjusted = index[:, at].mean(1).T  # [S] each
        spread = float(plain.std(ddof=1)) if len(plain) > 1 else None
        rows.append(
            {
                "nodes": count,
                "round": label,
                "Rand index": float(plain.mean()),
                "adjusted": float(adjusted.mean()),
                "over seeds": spread,
            }
        )
    return rows
