"""Analyses by name: what the papers look at beyond accuracy, one file each."""

from kinfed.core.registry import Registry

ANALYSES = Registry(
    __name__,
    {
        "controls": "controls:controls",
        "weights": "weights:weights",
        "agreement": "agreement:agreement",
        "layers": "layers:layers",
        "curves": "curves:curves",
        "map": "map:map",
        "topologies": "topologies:topologies",
        "late": "late:late",
        "novel": "novel:novel",
        "attacks": "attacks:attacks",
        "defence": "defence:defence",
    },
    base="kinfed.search.study:Finding",
)
