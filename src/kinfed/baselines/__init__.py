"""Centralised references, by the name that the command line uses."""

from ..core.shelf import Shelf

REFERENCES = Shelf(
    __name__,
    {"stgcn": "stgcn:STGCN", "graph-wavenet": "graph_wavenet:GraphWaveNet"},
    base="kinfed.baselines.centralised:Reference",
)

__getattr__ = REFERENCES.attribute
