"""Centralised references, by the name that the command line uses."""

from collections.abc import Callable

from .centralised import Reference
from .graph_wavenet import GraphWaveNet
from .stgcn import STGCN

REFERENCES: dict[str, Callable[..., Reference]] = {
    "stgcn": STGCN,
    "graph-wavenet": GraphWaveNet,
}

__all__ = ["REFERENCES", "STGCN", "GraphWaveNet"]
