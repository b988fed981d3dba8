"""kinfed's app for Flower: its description, and the server's half, once a run, at any SuperLink."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from kinfed.core.summary import Summary
from kinfed.files import make_folder, replacing, to_json
from kinfed.runs.config import experiment, plugins

from .. import plan
from ..server.server import serve
from ..site.site_reading import Reading
from ..wire import keys
from ..wire.messages import plain
from ..wire.run_grid import RunGrid
from ..wire.transport import GridTransport

app = ServerApp()


def bundle(settings: dict[str, Any]) -> dict[str, Any]:
    """The pyproject.toml of the app, without code of its own: whoever runs it runs the kinfed that is installed."""
    programs = "kinfed_flower.programs"
    components = {"serverapp": f"{programs}.server_app:app", "clientapp": f"{programs}.site_app:app"}
    table = {"publisher": "kinfed", "components": components, "config": settings}
    project = {"name": "kinfed-federation", "version": "0.1.0", "license": "Apache-2.0", "dependencies": []}
    project["description"] = "a federation of kinfed's"
    return {"project": project, "tool": {"flwr": {"app": table}}}


def carry_out(
    grid: "Grid | RunGrid", out: Path, folder: str, log: Callable[[str], None], track: Sequence[str] = ()
) -> Summary:
    """Carry out the run of the folder `out` among the members whose keys are in `folder`, or whoever is connected."""
    # Where the run's user sees it.
    warnings.showwarning = lambda message, *rest, **more: log(f"warning: {plain(str(message))}")
    planned = plan.resolve(experiment.read(str(out / "config.toml"), []))
    members = (lambda: keys.members(Path(folder))) if folder else None
    return serve(planned, GridTransport(grid), out, log, members=members, track=track)


def write(folder: Path, raw: dict[str, Any], reading: Reading) -> None:
    """Write the app of a plan, which `flwr run` starts at any SuperLink; raises UsageError for a plan that is none."""
    planned = plan.resolve(raw)
    settings = {"plan": json.dumps(plugins.for_sites(planned.table)), "reading": json.dumps(asdict(reading))}
    make_folder(folder)
    with replacing(folder / "pyproject.toml") as part:
        part.write_text(tomli_w.dumps(bundle({**settings, "out": "", "data": ""})))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out the plan that the app's settings hold; `out` is its folder at the server, by default a new one."""

    def log(text: str) -> None:
        print(f"kinfed: {text}", flush=True)

    out = Path(str(context.run_config["out"]) or Path("kinfed-runs") / str(context.run_id)).resolve()
    if not (out / "config.toml").exists():
        make_folder(out)
        experiment.write(json.loads(str(context.run_config["plan"])), out / "config.toml")
    summary = carry_out(grid, out, "", log)
    log(f"the results are in {out} of the server")
    context.state["summary"] = ConfigRecord({"json": to_json(summary.to_dict())})
