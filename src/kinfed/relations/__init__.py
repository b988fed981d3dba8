"""Who learns from whom, in three parts: what is compared, how weights follow, and among whom."""

from .comparisons import Comparison as Comparison, Cosine as Cosine, Distance as Distance
from .neighbourhoods import Everyone as Everyone, Linked as Linked, Nearest as Nearest
from .weighings import Kernel as Kernel, Simplex as Simplex, Softmax as Softmax, Weighing as Weighing
