"""Fused local training: plain SGD on many clients' dense or recurrent models at once, without autograd."""

from .dense import FromLast, Linear, Plain
from .descent import FORMS, LOSSES, Fused, parts
from .recurrent import forecaster, last_state
from .step import Batches, Descent, Unfused

__all__ = [
    "FORMS",
    "LOSSES",
    "Batches",
    "Descent",
    "FromLast",
    "Fused",
    "Linear",
    "Plain",
    "Unfused",
    "forecaster",
    "last_state",
    "parts",
]
