"""The data sets, by the name that a config or the command line uses: each is called with the data directory."""

from collections.abc import Callable
from functools import partial

from ..federation import Dataset
from .digits import digits
from .domains import domains
from .images import FORMS, images
from .synthetic import synthetic

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "synthetic": synthetic,
    "dg15": partial(domains, "dg15"),
    "dg60": partial(domains, "dg60"),
    **{name: partial(images, name) for name in FORMS},
}

__all__ = ["DATASETS"]
