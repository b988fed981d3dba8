"""kinfed's app for Flower: the server's half, once a run."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..core.summary import Summary
from ..experiments import config
from . import keys, plan
from .grid import GridTransport
from .messages import plain
from .server import serve

app = ServerApp()


def bundle(settings: dict[str, Any]) -> dict[str, Any]:
    """The pyproject.toml of the app, without code of its own: whoever runs it runs the kinfed that is installed."""
    components = {"serverapp": "kinfed.flower.app:app", "clientapp": "kinfed.flower.client:app"}
    table = {"publisher": "kinfed", "components": components, "config": settings}
    project = {"name": "kinfed-federation", "version": "0.1.0", "license": "Apache-2.0", "dependencies": []}
    return {"project": project, "tool": {"flwr": {"app": table}}}


def carry_out(grid: Grid, out: Path, folder: str, log: Callable[[str], None]) -> Summary:
    """Carry out the run of the folder `out` among the members whose keys are in `folder`, or whoever is connected."""
    # Where the run's user sees it.
    warnings.showwarning = lambda message, *rest, **more: log(f"warning: {plain(str(message))}")
    planned = plan.resolve(config.read(str(out / "config.toml"), []))
    members = (lambda: keys.members(Path(folder))) if folder else None
    return serve(planned, GridTransport(grid), out, log, members=members)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out the run whose folder the app's settings name."""

    def log(text: str) -> None:
        print(f"kinfed: {text}", flush=True)

    summary = carry_out(grid, Path(str(context.run_config["out"])), "", log)
    log(json.dumps(summary.to_dict()))
