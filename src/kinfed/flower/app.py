"""The app that the SuperLink runs, once a run."""

import json
import warnings
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..errors import RunError, UsageError
from ..experiments import config
from . import keys, plan
from .flower_logs import DONE, FAILED, KINFED
from .grid import GridTransport
from .messages import plain
from .server import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out the run that `kinfed flower run` requested."""

    def log(text: str) -> None:
        print(f"{KINFED}{text}", flush=True)

    # Where the run's user sees it: Flower's log is not read by anyone.
    warnings.showwarning = lambda message, *rest, **more: log(f"warning: {plain(str(message))}")
    settings = context.run_config
    try:
        out, folder = Path(str(settings["out"])), str(settings["keys"])
        planned = plan.resolve(config.read(str(out / "config.toml"), []))
        members = (lambda: keys.members(Path(folder))) if folder else None
        summary = serve(planned, GridTransport(grid), out, log, members=members)
    except Exception as problem:
        known = isinstance(problem, UsageError | RunError | OSError)
        why = problem if known else f"unexpected {type(problem).__name__}: {problem}; please report it"
        log(f"{FAILED}{plain(why)}")
        raise  # so that Flower sends the log and marks the run as failed; at an exit it would do neither
    log(f"{DONE}{json.dumps(summary.to_dict())}")
