"""Relations that are known, and controls, by the name that a config uses."""

from ..core.shelf import Shelf

GRAPHS = Shelf(
    __name__,
    {
        "given": "known:given",
        "oracle": "known:oracle",
        "label_overlap": "known:label_overlap",
        "shuffled": "known:shuffled",
        "random": "known:random",
        "identity": "known:identity",
        "complete": "known:complete",
    },
    base="kinfed.core.graph:Graph",
)
