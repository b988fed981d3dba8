"""The data sets, by the name that a config or the command line uses: each is called with the data directory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..data.dataset import Dataset
from .cars import compcars
from .digits import digits
from .domains import domains
from .images import FORMS, images
from .synthetic import synthetic
from .table import table
from .tpt48 import tpt48
from .traffic import SENSORS, traffic

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "synthetic": synthetic,
    "csv": table,
    "parquet": table,
    "dg15": domains("dg15"),
    "dg60": domains("dg60"),
    **{name: images(name) for name in FORMS},
    **{name: traffic(name) for name in SENSORS},
    "tpt48": tpt48,
    "compcars": compcars,
}

OWNED = frozenset(DATASETS) - {"digits", *FORMS}  # whose examples come with their owners


def is_table(name: str) -> bool:
    """Whether a data set is your own file of rows."""
    return DATASETS.get(name) is table


def called(settings: Mapping[str, Any]) -> str:
    """What people know a configured data set by: its name, or that of the file if it is a table."""
    return Path(settings["path"]).stem if is_table(settings["name"]) else settings["name"]


__all__ = ["DATASETS", "OWNED", "called", "is_table"]
