"""RunFolder: the files of a run's folder."""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.history import History
from ..core.summary import Summary, list_attackers, parse_summary
from ..core.tasks import Classification
from ..data.federation import Federation
from ..data.split import SPLITS
from ..errors import RunError, UsageError
from ..files import lock_folder, make_folder, read_json, readable, replacing, sweep_up, to_json, write_json
from ..simulation import distributed
from ..verdict import graph_quality
from . import round_tables
from .relations_file import Relations, read_relations, write_relations

if TYPE_CHECKING:
    from polars import DataFrame

Array = NDArray[Any]
BESIDE = "beside"  # the folder of runs that a run is compared with
CANDIDATES = "candidates"  # the folder of what a choice trains
SAME = ".same"  # ends the name of a file in place of a seed's folder, which names the folder of an equal run


def follow_pointer(folder: Path) -> Path:
    """The folder of a seed's run: its own if that is begun, or the one that its file names, while that is there."""
    pointer = folder.with_name(folder.name + SAME)
    if RunFolder(folder).is_begun or not pointer.is_file():
        return folder
    named = folder.parent / pointer.read_text(encoding="utf-8").strip()
    return Path(os.path.normpath(named)) if RunFolder(named).is_begun else folder


class RunFolder:
    """The folder of a run: the paths of its files, and how they are read and written.

    A run begins with its `config`, and resumes from its `checkpoint` with the executor, precision, workers and device
    in `how`. A finished one has a `summary`, a `history`, what it took in `cost`, `models`, pictures, the scores of
    single test examples in `tested`, how far off answers were in `errors` if they are numbers, the scores of standard
    models in `baselines`, which classes are taken for which in `confusion`, what each client has in `clients`,
    `diagnostics` and `relations` if its method has them, and the `state` with which it can go on. A run that goes on
    from another says from which in `origin`. A run repeated with several seeds has a folder for each, and a summary of
    all.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.how = self.path / "how.json"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.history = self.path / "history.csv"
        self.cost = self.path / "cost.csv"
        self.diagnostics = self.path / "diagnostics.csv"
        self.relations = self.path / "relations.npz"
        self.models = self.path / "models.safetensors"
        self.state = self.path / "state.safetensors"
        self.origin = self.path / "from.json"
        self.tested = self.path / "tested.safetensors"
        self.errors = self.path / "errors.safetensors"
        self.baselines = self.path / "baselines.safetensors"
        self.confusion = self.path / "confusion.csv"
        self.clients = self.path / "clients.json"
        self.summary = self.path / "summary.json"
        self.choice = self.path / "choice.json"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def is_begun(self) -> bool:
        """Whether a run with a config has begun here."""
        return self.config.exists()

    @property
    def is_finished(self) -> bool:
        """Whether a run has finished here: its summary comes last."""
        return self.summary.exists()

    def create(self) -> None:
        """Make the folder if it does not exist; raises RunError."""
        make_folder(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """A block in which no other program works in the folder, see `files.lock_folder`; the leader asks for all."""
        problem = None
        with ExitStack() as stack:
            try:
                if distributed.leads():
                    stack.enter_context(lock_folder(self.path))
            except (UsageError, RunError) as raised:
                problem = raised
            if (problem := distributed.agree(problem)) is not None:
                raise problem
            yield

    def reference(self, method: str) -> "RunFolder":
        """The folder of the run of Local, or of FedAvg, beside this one."""
        return RunFolder(self.path / BESIDE / method)

    def of_seed(self, seed: int) -> "RunFolder":
        """The folder of one seed of several."""
        return RunFolder(self.path / f"seed-{seed}")

    def seeds(self) -> list["RunFolder"]:
        """The folders of seeds in it, or of equal runs elsewhere; none of a run with one seed.

        Finished or not, while the run goes on; once it has ended those that have, as a seed that failed has not.
        """
        names = sorted({path.name.removesuffix(SAME) for path in self.path.glob("seed-*")})
        every = [RunFolder(path) for name in names if (path := follow_pointer(self.path / name)).is_dir()]
        return [folder for folder in every if folder.is_finished] if self.is_finished else every

    def repeats(self, summary: Summary | None = None) -> list["RunFolder"]:
        """The folders of a finished run's seeds; this one if it has one seed. Its summary may not be written yet."""
        summary = summary or self.read_summary()
        return [self.of_seed(seed) for seed in summary.seeds] if summary.by_client is None else [self]

    def tidy(self) -> None:
        """Remove from a finished run's folder the files for resuming it, and files left half-written by a kill."""
        sweep_up(self.path)
        for path in (self.checkpoint, self.how):
            path.unlink(missing_ok=True)

    def write_how(self, settings: Mapping[str, Any]) -> None:
        """Write a fleet's settings, or some of them, to resume with if there is no checkpoint yet."""
        if self.how.exists() and self.read_how() == settings:
            return
        write_json(self.how, settings)

    def read_how(self) -> dict[str, Any]:
        """The settings last written by `write_how`; empty if there are none."""
        return read_json(self.how, "delete it to resume with the defaults")

    def read_origin(self) -> dict[str, Any] | None:
        """From which run this one goes on: its folder as `run`, its `rounds`, the names of its `clients`; or None."""
        return read_json(self.origin, f"delete the folder {self} to start again") or None

    def read_config(self) -> dict[str, Any]:
        """The config of a run that has begun, as it is in the file; raises UsageError if it cannot be read."""
        try:
            return tomllib.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise UsageError(f"{self.config} cannot be read: {problem}") from None

    def write_summary(self, summary: Summary) -> None:
        """Write the summary, which marks the run as finished."""
        with replacing(self.summary) as part:
            part.write_text(to_json(summary.to_dict(), indent=1) + "\n", encoding="utf-8")

    def read_summary(self) -> Summary:
        """The summary of a finished run; raises UsageError if there is none."""
        try:
            text = self.summary.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            lacks = f"{self} is not the folder of a finished run: it has no summary.json"
            if not self.path.exists():
                raise UsageError(f"there is no folder {self} (in {Path.cwd()}); name that of a finished run") from None
            hint = f", as it has not ended: kinfed resume {self}" if self.checkpoint.exists() else ""
            raise UsageError(lacks + hint) from None
        except (OSError, ValueError) as problem:
            raise UsageError(f"{self.summary} cannot be read: {problem}") from None
        return parse_summary(text, self.summary)

    def write_clients(self, federation: Federation) -> None:
        """Write what each client has: its examples in each split, and its group, classes and place where there are any.

        `counts: [N][C]` are its examples of each class, `places: [N][2]` its latitude and longitude.
        """
        facts: dict[str, Any] = {"names": list(federation.names)}
        facts |= {split: [len(rows) for rows in federation.rows[split]] for split in SPLITS}
        if federation.groups is not None:
            facts["groups"] = federation.groups.tolist()
        if isinstance(federation.task, Classification):
            facts |= {"classes": federation.class_names, "counts": federation.class_counts().tolist()}
        if federation.places is not None:
            facts["places"] = federation.places.tolist()
        with replacing(self.clients) as part:
            part.write_text(json.dumps(facts) + "\n", encoding="utf-8")

    def read_clients(self) -> dict[str, Any]:
        """What `write_clients` has written; empty for a run that has not, such as one of real sites."""
        return read_json(self.clients, "delete it to do without")

    def write_history(self, history: History, layers: list[str], caution: str = "") -> None:
        """Write scores, diagnostics and relations; `caution` says why the scores are not a fair estimate."""
        round_tables.write_scores(history, self.history, caution)
        if history.cost.examples:
            round_tables.write_cost(history, self.cost)
        if any(history.diagnostics):
            round_tables.write_diagnostics(history, self.diagnostics)
        if history.kept_relations:
            write_relations(history, self.relations, layers)

    def read_scores(
        self, model: str, metric: str, split: str = "test", missing: bool = False, rows: "DataFrame | None" = None
    ) -> tuple[Array, Array]:
        """The evaluated rounds [T] (from 1), and a score of a model's clients: [T, N]; NaN for attackers.

        Raises UsageError if the run does not have it, unless it may be `missing`: then there are no scores, [0]. `rows`
        are those of `read_rows`, if they have been read.
        """
        summary = self.read_summary()
        rows = (self.read_rows() if rows is None else rows).filter(model=model, split=split)
        rounds, clients = (rows[column].unique(maintain_order=True) for column in ("round", "client"))
        if len(clients) and summary.by_client is not None and clients.to_list() != summary.by_client.names:
            raise self.of_another(self.history)
        values = rows.filter(metric=metric)["value"].to_numpy(writable=True)
        if not len(values) and missing:
            return rounds.to_numpy(), values
        if not len(values) or len(values) != len(rounds) * len(clients):
            raise self.not_whole()
        values = values.reshape(len(rounds), len(clients))
        if attackers := list_attackers(summary):
            values[:, np.isin(summary.clients.names, attackers)] = np.nan
        return rounds.to_numpy(), values

    def read_rows(self) -> "DataFrame":
        """All scores of a run with one seed, see `score_rows.read_rows`; raises UsageError if some are not there."""
        try:
            return round_tables.read_rows(self.history)
        except PermissionError:  # nothing is wrong with the file
            raise
        except (OSError, ValueError):
            raise self.not_whole() from None

    def not_whole(self) -> UsageError:
        """The error for a finished run with incomplete scores."""
        return UsageError(f"{self.history} is incomplete; delete the folder {self} and run again")

    def of_another(self, path: Path) -> UsageError:
        """The error for a file of another run."""
        return UsageError(
            f"{self}: its files do not belong together: {path.name} is of another run than {self.summary.name}; copy "
            "the whole folder again, or run again"
        )

    def read_relations(self) -> Relations:
        """The relations of a finished run with one seed; raises UsageError if its method mixes no models."""
        summary = self.read_summary()
        names = summary.clients.names
        if summary.relation is None and (summary.provenance.former or {}).get("joined") == names:
            raise UsageError(f"{self} holds models of newcomers alone, whose weights were not kept")
        if summary.relation is None:
            raise UsageError(f"{summary.method} mixes no models, so it has no weights between clients")
        at = summary.chosen_scores["round"]
        if not self.relations.exists():
            raise UsageError(f"{self} has no {self.relations.name}; with so many clients none is kept")
        with readable(self.relations):
            relations = read_relations(self.relations, int(at))
        if relations.clients != names or relations.selected < 0:
            raise self.of_another(self.relations)
        return relations

    def read_clusters(self) -> Tensor:
        """[T, N] int64 the clusters of a finished run with one seed, by evaluated round; -1 where a client was absent.

        From the method's diagnostics, or else from its relation; raises UsageError if there is neither.
        """
        noted = round_tables.read_notes(self.diagnostics, "cluster") if self.diagnostics.exists() else []
        if not noted:
            return torch.stack(
                [graph_quality.clusters(torch.from_numpy(weights)) for weights in self.read_relations().weights]
            )
        names = self.read_summary().clients.names
        return torch.tensor([[int(label.get(name, -1)) for name in names] for label in noted])
