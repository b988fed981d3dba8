"""Relation graphs that are known before training."""

import torch

from ...core.graph import Graph
from ...core.tasks import Classification
from ...errors import UsageError
from ..federation import Federation


def given_graph(federation: Federation, seed: int) -> Graph | None:
    """The data set's own relation, if it has one."""
    return federation.graph


def none(federation: Federation, seed: int) -> None:
    """No relation, though the data may have one: methods that learn a graph begin without it."""


def oracle(federation: Federation, seed: int) -> Graph:
    """Clients of one hidden group are linked: what a perfect graph would know."""
    groups = federation.groups
    if groups is None:
        raise UsageError(
            "federation.graph: these clients have no hidden groups for an oracle; choose a partition with groups, or "
            "another graph"
        )
    return Graph((groups[:, None] == groups[None, :]).float(), "oracle")


def label_overlap(
    federation: Federation,
    seed: int,
    *,
    most: int = 5,  # of the most frequent labels of a client, how many count
) -> Graph:
    """Clients that share one of their `most` frequent training labels are linked: an oracle, as labels are private."""
    if not isinstance(federation.task, Classification):
        raise UsageError("federation.graph: label_overlap needs class labels; this task has none")
    if most < 1:
        raise UsageError(f"federation.graph: most counts labels, so it must be at least 1; got {most}")
    counts = federation.class_counts(["train"])  # [N, C]
    first = counts.argsort(dim=1, descending=True, stable=True)[:, :most]
    frequent = (torch.zeros_like(counts).scatter(1, first, 1) * (counts > 0)).float()
    return Graph((frequent @ frequent.T > 0).float().cpu(), "oracle")
