"""Who learns from whom, in three parts: what is compared, how weights follow, and among whom."""

from .comparisons import Comparison as Comparison, Cosine as Cosine, Distance as Distance
from .neighbourhoods import (
    Drawn as Drawn,
    Everyone as Everyone,
    Linked as Linked,
    Nearest as Nearest,
    Sketches as Sketches,
    list_alike as list_alike,
    renew as renew,
    renew_directions as renew_directions,
    start_sketches as start_sketches,
)
from .relation import Relation as Relation, Weights as Weights, relate as relate
from .weighings import Kernel as Kernel, Simplex as Simplex, Softmax as Softmax, Weighing as Weighing
