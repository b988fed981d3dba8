"""The app that the SuperLink runs, once a run."""

import json
import sys
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..errors import RunError, UsageError
from . import plan
from .grid import Post
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
        summary = serve(planned, Post(grid), Path(str(asked["out"])), log)
    except (UsageError, RunError, OSError) as problem:
        log(f"failed: {problem}")
        sys.exit(1)
    except Exception as problem:
        traceback.print_exc()
        log(f"failed: unexpected {type(problem).__name__}: {problem}; please report it")
        sys.exit(1)
    log(f"done: {json.dumps(summary)}")
