"""Checkpoints: everything that a run needs to go on as if it had never stopped, in one file."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import wire
from .errors import RunError
from .files import replacing
from .record import History

Tree = Any


class Progress(NamedTuple):
    """Where a run stands between two rounds."""

    done: int  # rounds
    server: Tree
    state: Tree  # the clients' private states, [N, ...]
    seconds: float
    how: dict[str, Any] | None = None  # the fleet's settings that decide about rounding


def save(path: Path, progress: Progress, history: History) -> None:
    """Write the checkpoint in place of the one before, or leave that one as it is."""
    arrays, text = history.pack()
    arrays |= wire.pack(progress.server, "server.") | wire.pack(progress.state, "state.")
    words = {"history": text, "done": progress.done, "seconds": progress.seconds, "how": json.dumps(progress.how)}
    write(arrays, path, {name: str(word) for name, word in words.items()})


def load(path: Path, server: Tree, state: Tree, history: History) -> Progress:
    """Read a checkpoint; `server` and `state` have the structure of what was saved. Fills `history`."""
    try:
        with safe_open(path, "pt") as file:
            text = file.metadata()
            # Copies: in the file a tensor may lie at an address for which products are rounded differently.
            arrays = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        history.restore(arrays, text["history"])
        return Progress(
            int(text["done"]),
            wire.unpack(arrays, server, "server."),
            wire.unpack(arrays, state, "state."),
            float(text["seconds"]),
            json.loads(text["how"]),
        )
    except (SafetensorError, KeyError, ValueError) as problem:
        raise RunError(f"{path} is not a checkpoint of this run ({problem}); delete it to start over") from None


def how(path: Path) -> dict[str, Any]:
    """The settings of the fleet that wrote a checkpoint."""
    try:
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["how"]) or {}
    except (SafetensorError, KeyError, TypeError, ValueError) as problem:
        raise RunError(f"{path} is not a checkpoint of this run ({problem}); delete it to start over") from None


def write(arrays: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write named arrays as safetensors, in place of what was there."""
    with replacing(path) as part:
        try:
            save_file({name: t.detach().cpu().contiguous().clone() for name, t in arrays.items()}, part, metadata)
        except SafetensorError as problem:
            raise OSError(str(problem)) from None
