"""Data sets of your own: which names mean your files, and what these are called."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TABLES = ("csv", "parquet", "sql")
# Your own data, by the model that they are for unless another is named.
YOURS = dict.fromkeys((*TABLES, "image_folder", "huggingface", "leaf"), "mlp") | {"leaf_text": "text"}


def usual_model(settings: Mapping[str, Any]) -> str:
    """The model for a configured data set of your own unless another is named, by its name and whether it has windows.

    An MLP answers wildly where a series has left the levels of its training, so that of changes is for series.
    """
    return "changes-mlp" if is_table(settings["name"]) and settings.get("past") else YOURS.get(settings["name"], "mlp")


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
