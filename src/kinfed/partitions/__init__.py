"""The partitions, by the name that a config or the command line uses."""

from collections.abc import Callable

from ..data.dataset import Partition
from .dirichlet import Dirichlet
from .iid import IID
from .label_groups import LabelGroups
from .label_permutations import LabelPermutations
from .natural import Natural
from .pathological import Pathological
from .rotations import Rotations
from .shards import Shards
from .topologies import Topologies

PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": IID,
    "dirichlet": Dirichlet,
    "pathological": Pathological,
    "shards": Shards,
    "rotations": Rotations,
    "label_permutations": LabelPermutations,
    "label_groups": LabelGroups,
    "topologies": Topologies,
    "natural": Natural,
}

__all__ = [
    "IID",
    "PARTITIONS",
    "Dirichlet",
    "LabelGroups",
    "LabelPermutations",
    "Natural",
    "Pathological",
    "Rotations",
    "Shards",
    "Topologies",
]
