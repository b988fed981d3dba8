"""A site's personalised models: those that may still be selected, and the selected one."""

import json
from pathlib import Path

from kinfed.core import checkpoint, trees
from kinfed.core.model import Model
from kinfed.core.trees import Tree
from kinfed.errors import UsageError
from kinfed.files import make_folder, write_json

from ..wire import messages
from ..wire.messages import Fields
from .site_files import ERRORS, expecting_own, hash_owner, read_tensors


class ModelStore:
    """The personalised models of one client in an experiment's folder; the selected one is model.safetensors.

    Only the server sees all clients' scores, so it says which kind of model and which round are best; the models stay.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self._folder, self._model = folder, model
        self._candidates = folder / "models"

    def save(self, round: int, named: dict[str, Tree]) -> None:
        """Save a round's models until it is known which are best."""
        make_folder(self._candidates)
        arrays = {f"{name}/{leaf}": t for name, tree in named.items() for leaf, t in trees.pack(tree).items()}
        checkpoint.write(arrays, self._candidates / f"{round}.safetensors", {"names": json.dumps(list(named))})

    def select(self, fields: Fields) -> None:
        """Write the model that the server's fields select, and delete those that can no longer be selected.

        Raises UsageError for fields that select nothing, or a kind of model that is not here.
        """
        judged, selected, chosen = messages.selection_of(fields)
        paths = self._candidates.glob("*.safetensors")
        rounds = sorted(int(path.stem) for path in paths if path.stem.isdecimal())
        if not rounds:
            return
        best = selected.get(chosen)
        self._write(best if best in rounds else rounds[-1], chosen)  # a client that was away has its latest
        for round in rounds[:-1]:
            if round <= judged and round not in selected.values():
                (self._candidates / f"{round}.safetensors").unlink(missing_ok=True)

    def _write(self, round: int, chosen: str) -> None:
        candidates = self._candidates / f"{round}.safetensors"
        arrays, text = read_tensors(candidates)
        with expecting_own(candidates):
            names = [str(name) for name in json.loads(text["names"])]
            name = chosen or names[0]
        if name not in names:
            raise UsageError(f"the server chooses the model {name!r:.40}, and this site has {', '.join(names)}")
        origin = {"round": round + 1, "model": name}
        about = {"origin": json.dumps(origin), "owner": hash_owner(self._folder)}
        path = self._folder / "model.safetensors"
        # In the file itself, as two files are not replaced at once.
        if path.exists() and read_tensors(path)[1] == about:
            return
        model = {leaf.removeprefix(f"{name}/"): t for leaf, t in arrays.items() if leaf.startswith(f"{name}/")}
        theta = model.pop("theta", None)
        if theta is not None:
            is_complete = theta.numel() == self._model.layout.size
            model |= self._model.all_tensors(theta) if is_complete else {"theta": theta}
        (self._folder / ERRORS).unlink(missing_ok=True)  # of the model that was selected before
        checkpoint.write(model, path, about)
        write_json(self._folder / "model.json", origin)
