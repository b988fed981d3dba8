"""Which trackers follow a federation's run: asked for by `kinfed flower run`, made in the run's own process.

That process is a child of the SuperLink's, so it does not see the environment in which the run was asked for.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import RunError
from ...files import replacing
from ...runs import trackers
from ...runs.config import plugins

FILE = ".trackers"  # in a run's folder
PREFIXES = ("MLFLOW_", "WANDB_")  # of what trackers read of the environment


def ask(out: Path, names: Sequence[str]) -> None:
    """Have these trackers follow the run of a folder, also when it is resumed; raises UsageError if one cannot."""
    if not names:
        return
    trackers.check(names)
    words = {
        "names": [plugins.absolute({"name": name})["name"] if plugins.is_path(name) else name for name in names],
        "environment": {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)},
    }
    with replacing(out / FILE) as part:
        part.touch(mode=0o600)  # an address may hold a password
        part.write_text(json.dumps(words), encoding="utf-8")


def asked(out: Path) -> list[str]:
    """The trackers that were asked for, in whose environment this process is from now on."""
    try:
        words = json.loads((out / FILE).read_text(encoding="utf-8"))
        os.environ.update(words["environment"])
        return [str(name) for name in words["names"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise RunError(f"{out / FILE} cannot be read ({problem!s:.80}); delete it to go on without trackers") from None
