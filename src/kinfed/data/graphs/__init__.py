"""Relations that are known, and controls, by the name that a config uses."""

from ...core.registry import Registry

GRAPHS = Registry(
    __name__,
    {
        "given": "known:given_graph",
        "none": "known:none",
        "oracle": "known:oracle",
        "label_overlap": "known:label_overlap",
        "shuffled": "controls:shuffled_graph",
        "random": "controls:random",
        "identity": "controls:identity",
        "complete": "controls:complete",
    },
    base="kinfed.core.graph:Graph",
)

__getattr__ = GRAPHS.attribute
