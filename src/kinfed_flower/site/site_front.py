"""The page of a site's folder: what the site takes part in, and which model it keeps."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kinfed.errors import UsageError
from kinfed.report.page.overview import Front
from kinfed.report.tables.text_table import Grid
from kinfed.runs.openers import SITE


def front(path: Path) -> Front:
    """The folder of an experiment at a site: what it joined, and which model it keeps; the scores are at the server."""
    try:
        with safe_open(path / SITE, "np") as file:
            joined = json.loads((file.metadata() or {})["words"])
        table = joined["table"]
        rows = [["client", path.parent.name], ["method", str(table["method"]["name"])]]
        rows += [["rounds", str(table["rounds"])], ["an input", " x ".join(map(str, joined["shape"]))]]
        rows += [["outputs", str(joined["outputs"])], ["task", str(joined["task"]["name"])]]
        if (path / "model.json").is_file():
            kept = json.loads((path / "model.json").read_text(encoding="utf-8"))
            rows += [["model kept", str(kept["model"])], ["of round", str(kept["round"])]]
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as problem:
        raise UsageError(f"{path} is not what a site wrote: {problem!r:.120}") from None
    has_model = (path / "model.safetensors").is_file()
    lead = "This folder is private to the site. Scores, the graph and the verdict are in the run's folder at the server"
    return Front(
        f"{path.parent.name}, a site of a federation",
        "A model of this site's own is ready" if has_model else "No model has been selected here yet",
        f"{lead}: kinfed report there.{' To use the model: kinfed predict with this folder.' if has_model else ''}",
        [Grid("site", "What this site takes part in", ("what", "value"), [rows], text_columns=2)],
    )
