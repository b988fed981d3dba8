"""Methods that solve a model in place of training it, by the name that configs use."""

from ...core.registry import Registry
from .. import METHODS

SOLVED = Registry(
    __name__,
    {
        "partial-pooling": "partial_pooling:PartialPooling",
        "mixed-model": "mixed_model:MixedModel",
        "private-pooling": "private_pooling:PrivatePooling",
        "private-kin": "private_kin:PrivateKin",
        "personal-boosting": "personal_boosting:PersonalBoosting",
        "standard": "standard:Standard",
    },
    base="kinfed.core.method:Method",
    by_file=True,
)
KNOWN = METHODS | SOLVED  # all that a config may name as its method
SUITED = dict.fromkeys(SOLVED, "linear") | {"personal-boosting": "trees"}  # usual models for tables
