"""The attacks, by the name that a config or the command line uses."""

from ...core.registry import Registry

ATTACKS = Registry(
    __name__,
    {
        "poison": "poison:Poison",
        "noise": "noise:Noise",
        "label_flip": "label_flip:LabelFlip",
        "backdoor": "backdoor:Backdoor",
    },
    base="kinfed.simulation.attacks.attack:Attack",
)

__getattr__ = ATTACKS.attribute
