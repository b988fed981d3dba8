"""FedCedar without clusters (AS-1) and without personalised distribution (AS-3), Table 2; AS-2 is `steps=0`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.core.method import Roster
from kinfed.methods.fedcedar import FedCedar, Server
from kinfed.ops.clustering import Clusters
from kinfed.ops.similarity import cosine, gram


@dataclass(frozen=True)
class Nodes(FedCedar):
    """AS-1: every client of the cohort is a node of the graph, however alike two of them are."""

    def cluster(self, roster: Roster, cohort: Tensor, theta: Tensor) -> tuple[Clusters, Tensor]:
        vectors = gram((theta[:, layer.trainable] for layer in roster.layout.layers), torch.float64)
        alone = torch.eye(len(cohort), dtype=torch.float64, device=cohort.device)
        return Clusters(alone.argmax(1), alone, torch.zeros_like(alone[0])), cosine(vectors.inner)


@dataclass(frozen=True)
class Mean(FedCedar):
    """AS-3: all clients are sent the mean of the mixed centres."""

    def start(self, roster: Roster) -> Server:
        server: Server = super().start(roster)
        return server._replace(warned=~server.warned)  # the mean is what is asked for

    def deal(self, server: Server, nodes: Tensor, cohort: Tensor) -> Tensor:
        return super().deal(server._replace(label=torch.full_like(server.label, -1)), nodes, cohort)
