"""The app that the SuperLink runs, once a run."""

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..errors import RunError, UsageError
from . import keys, plan
from .grid import Post
from .messages import plain
from .server import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what `kinfed flower run` asked for. Its own lines begin with "kinfed: "."""

    def log(text: str) -> None:
        print(f"kinfed: {text}", flush=True)

    asked = context.run_config
    try:
        planned = plan.resolve(json.loads(str(asked["config"])))
        folder = str(asked["keys"])
        members = (lambda: keys.members(Path(folder))) if folder else None
        summary = serve(planned, Post(grid), Path(str(asked["out"])), log, members=members)
    except Exception as problem:
        known = isinstance(problem, UsageError | RunError | OSError)
        why = problem if known else f"unexpected {type(problem).__name__}: {problem}; please report it"
        log(f"failed: {plain(why)}")
        raise  # Flower then sends the log off and marks the run as failed; at an exit it would do neither
    log(f"done: {json.dumps(summary.to_dict())}")
