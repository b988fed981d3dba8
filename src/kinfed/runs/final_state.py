"""FinalState: what server and clients remember at the end of a run, with which it goes on and newcomers join."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..core import checkpoint, trees
from ..core.checkpoint import FOREIGN, Progress
from ..core.graph import Graph
from ..core.history import History
from ..core.layout import Layout
from ..core.method import Roster
from ..core.rows import Part, Table
from ..core.seeding import tags
from ..core.training import Training
from ..core.trees import Axis, Role, Tree
from ..errors import UsageError, some
from .models_file import ALL, ModelsFile
from .run_folder import RunFolder

MODELS = "model.", "place."  # arrays of a history that models.safetensors holds


class FinalState(NamedTuple):
    """The end of a run: what its server and its clients remember."""

    progress: Progress
    roster: Roster  # of the clients that the server knows
    names: tuple[str, ...]  # theirs

    def write(self, history: History, path: Path, identity: str = "") -> None:
        """Write state.safetensors: all that a checkpoint has but the models, which are beside it, and the roster.

        `identity` is that of the run's summary.
        """
        progress, roster = self.progress, self.roster
        arrays, text = history.pack()
        arrays = {name: values for name, values in arrays.items() if not name.startswith(MODELS)}
        arrays |= trees.pack(progress.server, "server.") | trees.pack(progress.state, "state.")
        arrays |= {"roster.theta": roster.theta, "roster.sizes": roster.sizes}
        arrays |= {} if roster.example_weights is None else {"roster.weights": roster.example_weights}
        arrays |= trees.pack(roster.client_statistics, "statistics.")
        if roster.graph is not None:
            arrays["roster.graph"] = roster.graph.weights
        arrays, counts = checkpoint.drop_zeros(arrays)
        arrays, twins = _drop_repeats(arrays)
        metadata = {
            **counts,
            "twins": json.dumps(twins),
            "history": text,
            "parts": json.dumps(list(history.kept.arrays)),
            "names": json.dumps(self.names),
            "all": json.dumps(history.names),
            "origin": "" if roster.graph is None else roster.graph.origin,
            "done": str(progress.done),
            "seconds": str(progress.seconds),
            "how": json.dumps(progress.how),
            "identity": identity,
        }
        checkpoint.write(arrays, path, metadata)


def _drop_repeats(arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays without those that equal an earlier one, and whom these equal: servers know private states."""
    form = {name: (t.dtype, t.shape) for name, t in arrays.items() if isinstance(t, Tensor) and t.ndim}
    common = Counter(form.values())
    first: dict[Any, str] = {}  # by type, shape and a hash of the numbers: time grows with the number of arrays
    twins: dict[str, str] = {}
    for name, shown in form.items():
        if common[shown] > 1:
            twin = first.setdefault((*shown, hashlib.sha256(trees.raw(arrays[name])).digest()), name)
            twins |= {name: twin} if twin != name else {}
    return {name: t for name, t in arrays.items() if name not in twins}, twins


def holds_members(server: Tree) -> bool:
    """Whether a server's state tells single clients' models: numbers of each client, or a cluster of one alone.

    A cluster is of all who have its label, or of as many as a field that is declared `ClusterSizes` says.
    """
    arrays = trees.pack(server)
    tables = [t for name in trees.names(server, Axis.PER_CLIENT) if (t := arrays[name]).numel()]
    labels = [t for t in tables if t.ndim == 1 and t.dtype == torch.int64]
    sizes = [t[t >= 0].unique(return_counts=True)[1] for t in labels]
    sizes += [arrays[name] for name in trees.names(server, Role.SIZES)]
    return any((t == 1).any() for t in sizes) or any(t.ndim > 1 and t.is_floating_point() for t in tables)


class StateFile:
    """The final state of the finished run in a folder, of which each part is read when it is asked for."""

    def __init__(self, folder: RunFolder) -> None:
        """Raises UsageError if the folder has no finished run, or one that kept no state."""
        self.folder, self.summary = folder, folder.read_summary()
        if not folder.state.exists() and self.summary.sites is not None:
            beside = folder.reference("fedavg")
            other = f"{beside}, or " if beside.state.exists() else ""
            raise UsageError(
                f"{folder} has no {folder.state.name}: a federation hands none on where it would hold single sites' "
                f"models, as with {self.summary.method}; name {other}a federation of FedAvg, or take part in the next"
            )
        if not folder.state.exists():
            why = "; run it again: kinfed run keeps it, sweeps and analyses do not"
            if self.summary.by_client is None:
                why = f"; it has a run for each seed: name one, such as {folder.of_seed(self.summary.seeds[0])}"
            raise UsageError(f"{folder} has no {folder.state.name}, with which a finished run goes on{why}")
        try:
            with safe_open(folder.state, "pt") as file:
                metadata = dict(file.metadata())
                self._twins: dict[str, str] = json.loads(metadata["twins"])
                self._keys = [*file.keys(), *self._twins]
            self.how: dict[str, Any] = dict(json.loads(metadata["how"]))
            self.names: list[str] = list(json.loads(metadata["names"]))  # of the clients that its server knows
            self.every_name: list[str] = list(json.loads(metadata["all"]))
            self.done = int(metadata["done"])
            self.seconds = float(metadata["seconds"])
            self._origin = metadata["origin"]
            self._text = metadata["history"]
            self._parts = list(json.loads(metadata["parts"]))
            identity = metadata["identity"]
        except FOREIGN as problem:
            raise self._foreign(problem) from None
        if identity != (self.summary.provenance.identity or ""):
            raise folder.of_another(folder.state)

    def __str__(self) -> str:
        return str(self.folder)

    def check_clients(self, names: Sequence[str]) -> None:
        """Raise UsageError unless all of its clients are among these."""
        names_here = set(names)
        missing = [name for name in self.every_name if name not in names_here]
        if missing:
            raise UsageError(
                f"{some(len(missing), len(self.every_name), 'client')} left the data that {self} was trained on: "
                f"{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}; a run goes on with all of its clients"
            )
        if len(self.names) < len(self.every_name):
            raise UsageError(
                f"{self} ended before its late clients joined, so it goes on with the same data only; "
                "got other examples or clients"
            )

    def _foreign(self, problem: Exception) -> UsageError:
        return UsageError(
            f"{self.folder.state} is not the state of this run and this version of kinfed ({problem!s:.300}); "
            f"delete the folder {self.folder} and run again"
        )

    def _read(self, *prefixes: str) -> dict[str, Tensor]:
        """The arrays whose names begin so. Copies: in the file a tensor may lie where products round differently."""
        with safe_open(self.folder.state, "pt") as file:
            wanted = {name: self._twins.get(name, name) for name in self._keys if name.startswith(prefixes)}
            arrays = {name: file.get_tensor(held).clone() for name, held in wanted.items()}
            return checkpoint.fill_zeros(arrays, file.metadata())

    def roster(self, layout: Layout, training: Training, seed: int) -> Roster:
        """What the server knew of its clients at the end."""
        arrays = self._read("roster.", "statistics.")
        try:
            graph = Graph(arrays["roster.graph"], self._origin) if self._origin else None
            reported = {
                name.removeprefix("statistics."): t for name, t in arrays.items() if name.startswith("statistics.")
            }
            theta = layout.without_frozen(arrays["roster.theta"])
            facts = theta, layout, arrays["roster.sizes"], training, seed, tags(self.names)
        except FOREIGN as problem:
            raise self._foreign(problem) from None
        statistics = trees.nest(reported) if reported else ()
        weights = arrays.get("roster.weights")
        return Roster(*facts, graph, statistics, round=self.done, rounds=self.done, example_weights=weights)

    def server(self, like: Tree) -> Tree:
        """The server's last state; `like` has its structure."""
        return self._unpack("server.", like)

    def states(self, like: Tree) -> Tree:
        """Ids and private states of the clients that have one, as `States.keep` gives them."""
        return self._unpack("state.", like)

    def _unpack(self, prefix: str, like: Tree) -> Tree:
        wanted, arrays = trees.pack(like, prefix).keys(), trees.adopt(self._read(prefix), like, prefix)
        keys = arrays.keys()
        if keys != wanted:
            first = sorted(keys ^ wanted)[0]
            lacks = "has no" if first in keys else "needs"
            raise UsageError(
                f"{self} was trained by another method, with other settings or by an earlier kinfed: the one that is "
                f"to go on {lacks} '{first.removeprefix(prefix)}'; go on with the same"
            )
        return trees.unpack(arrays, like, prefix)

    def restore(self, history: History, layout: Layout) -> None:
        """Fill a history with the run's, models included."""
        try:
            history.restore(self._read("score.", "note.", "relation."), self._text)
            history.kept = history.kept._replace(arrays=self._models(layout, history.kept.shared))
        except FOREIGN as problem:
            raise self._foreign(problem) from None

    def _models(self, layout: Layout, shared: Sequence[str]) -> dict[str, Table]:
        """What `write_models` has written: of each part of a model [N, ...], or [...] where all share it."""
        file = ModelsFile(self.folder.models)

        def read(owner: str, part: str) -> Tensor:
            tensor_keys = file.keys[owner]
            if part == "theta" and part not in tensor_keys:
                return layout.flatten({e.name: file.read(tensor_keys[e.name]) for e in layout.entries})
            return file.read(tensor_keys[part])

        owners: dict[int, str] = {}  # by mapping, the first with that model
        for name in self.every_name:
            owners.setdefault(id(file.keys[name]), name)
        place = {mapping: i for i, mapping in enumerate(owners)}
        places = torch.tensor([place[id(file.keys[name])] for name in self.every_name])

        def gather(part: str) -> Table:
            rows = torch.stack([read(name, part) for name in owners.values()])
            return Part(rows, places) if len(rows) < len(places) else rows

        return {part: read(ALL, part) if part in shared else gather(part) for part in self._parts}
