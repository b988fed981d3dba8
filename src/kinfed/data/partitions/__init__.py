"""The partitions, by the name that a config or the command line uses."""

from ...core.registry import Registry

PARTITIONS = Registry(
    __name__,
    {
        "iid": "iid:IID",
        "dirichlet": "dirichlet:Dirichlet",
        "pathological": "pathological:Pathological",
        "shards": "shards:Shards",
        "rotations": "rotations:Rotations",
        "label_permutations": "label_permutations:LabelPermutations",
        "label_groups": "label_groups:LabelGroups",
        "topologies": "topologies:Topologies",
        "natural": "natural:Natural",
    },
    base="kinfed.data.dataset:Partition",
)

__getattr__ = PARTITIONS.attribute
