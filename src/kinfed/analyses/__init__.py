"""Analyses by name: what the papers look at beyond accuracy, one file each."""

from collections.abc import Callable

from ..experiments.study import Finding
from .controls import controls
from .curves import curves
from .defence import defence
from .late import late
from .layers import layers
from .map import map
from .novel import novel
from .topologies import topologies
from .weights import weights

ANALYSES: dict[str, Callable[..., Finding]] = {
    "controls": controls,
    "weights": weights,
    "layers": layers,
    "curves": curves,
    "map": map,
    "topologies": topologies,
    "late": late,
    "novel": novel,
    "defence": defence,
}
