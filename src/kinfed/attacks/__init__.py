"""The attacks, by the name that a config or the command line uses."""

from .attack import Attack
from .backdoor import Backdoor
from .label_flip import LabelFlip
from .noise import Noise
from .poison import Poison

ATTACKS: dict[str, type[Attack]] = {
    "poison": Poison,
    "noise": Noise,
    "label_flip": LabelFlip,
    "backdoor": Backdoor,
}

__all__ = ["ATTACKS", *sorted(cls.__name__ for cls in ATTACKS.values())]
