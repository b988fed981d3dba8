"""Centralised references, and methods that solve a model in place of training it, by the name that configs use."""

from ..core.shelf import Shelf
from ..methods import METHODS

REFERENCES = Shelf(
    __name__,
    {"stgcn": "stgcn:STGCN", "graph-wavenet": "graph_wavenet:GraphWaveNet"},
    base="kinfed.baselines.centralised:Reference",
)

SOLVED = Shelf(
    __name__, {"partial-pooling": "partial_pooling:PartialPooling"}, base="kinfed.core.method:Method", by_file=True
)
KNOWN = METHODS | SOLVED  # all that a config may name as its method

__getattr__ = REFERENCES.attribute
