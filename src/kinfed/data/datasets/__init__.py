"""The data sets, by the name that a config or the command line uses: each is called with the data directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.registry import Made, Registry
from .files import IMAGES, TRAFFIC

DATASETS = Registry(
    __name__,
    {
        "digits": "digits:digits",
        "synthetic": "synthetic:synthetic",
        "csv": "table:Table",
        "parquet": "table:Table",
        "sql": "table:Table",
        "image_folder": "image_folder:ImageFolder",
        "huggingface": "huggingface:HuggingFace",
        "leaf": "leaf:Leaf",
        "leaf_text": "leaf:LeafText",
        "dg15": Made("domains:domains", "Points [n, 2] of two classes in domains that are linked, from dg15.npz."),
        "dg60": Made("domains:domains", "Points [n, 2] of two classes in domains that are linked, from dg60.npz."),
        **{name: Made("images:images", form.summary(name)) for name, form in IMAGES.items()},
        **{name: Made("traffic:traffic", form.summary(name)) for name, form in TRAFFIC.items()},
        "tpt48": "tpt48:tpt48",
        "compcars": "cars:compcars",
    },
    base="kinfed.data.dataset:Dataset",
)

TABLES = ("csv", "parquet", "sql")
# Your own data, by the model that they are for unless another is named.
YOURS = dict.fromkeys((*TABLES, "image_folder", "huggingface", "leaf"), "mlp") | {"leaf_text": "text"}
OWNED = frozenset(DATASETS) - {"digits", *IMAGES}  # whose examples come with their owners


def is_table(name: str) -> bool:
    """Whether a data set is your own table of rows."""
    return name in TABLES


def display_name(settings: Mapping[str, Any]) -> str:
    """The display name of a configured data set: its name, or that of your own file or folder, or of your function.

    A database's is that of the file with the query, if there is one.
    """
    name: str = settings["name"]
    if name not in YOURS:
        return name.rpartition(":")[2]
    query = settings.get("query", "")
    return Path(query if query.endswith(".sql") else settings["path"].partition("?")[0]).stem
