"""Centralised references: published networks that are trained on all clients' series together."""

from kinfed.core.registry import Registry

REFERENCES = Registry(
    __name__,
    {"stgcn": "stgcn:STGCN", "graph-wavenet": "graph_wavenet:GraphWaveNet"},
    base="kinfed_papers.references.centralised:Reference",
)

__getattr__ = REFERENCES.attribute
