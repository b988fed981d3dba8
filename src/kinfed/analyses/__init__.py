"""Analyses by name: what the papers look at beyond accuracy, one file each."""

from collections.abc import Callable

from ..study import Finding
from .controls import controls

ANALYSES: dict[str, Callable[..., Finding]] = {
    "controls": controls,
}
