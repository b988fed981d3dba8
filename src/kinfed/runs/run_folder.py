"""RunFolder: the files of a run's folder."""

import csv
import json
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core import checkpoint
from ..core.history import History, Spent
from ..core.model import Model
from ..core.summary import Summary
from ..core.tasks import Classification
from ..data.federation import Federation
from ..data.split import SPLITS
from ..errors import RunError, UsageError
from ..files import lock_folder, make_folder, read_json, replacing, sweep_up, write_json
from ..simulation import distributed
from ..verdict import graph_quality
from . import round_tables
from .relations_file import Relations, read_relations, write_relations

if TYPE_CHECKING:
    from polars import DataFrame

Array = NDArray[Any]
STAR = "*"  # the owner, in a key, of a tensor that all share
ALL = ""  # the same among owners, of whom one may be called *
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


@contextmanager
def _readable(path: Path, fix: str = "run again") -> Iterator[None]:
    """In this block a file is read: raises UsageError with this fix for what is wrong in it."""
    try:
        yield
    except PermissionError:  # nothing is wrong in it
        raise
    except (OSError, LookupError, ValueError, TypeError, BadZipFile, SafetensorError) as problem:
        raise UsageError(f"{path} cannot be read ({problem!s:.200}); {fix}") from None


def _quote(name: str) -> str:
    """An owner as in a key."""
    if name == ALL:
        return STAR
    return "%2A" if name == STAR else name.replace("%", "%25").replace("/", "%2F")


class TestedExamples(NamedTuple):
    """The test examples of a run with one seed, by client."""

    scores: list[Array]  # [n] by the client's chosen model
    blocks: list[Array]  # [n] int64 the block of each, or if none is declared its place in the pool
    declared: bool = False
    totals: Array | None = None  # [N] as how many rows they count, if they have weights


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

    def kept_beside(self, client: str) -> "RunFolder | None":
        """The run beside a choice whose model the client keeps; None if it is this one's."""
        if not self.choice.exists():
            return None
        choice = json.loads(self.choice.read_text(encoding="utf-8"))
        for name, key in (("local", "keep_own_model"), ("fedavg", "keep_fedavg_model")):
            if client in choice[key]:
                return self.reference(name)
        return None

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

    @property
    def is_reference(self) -> bool:
        """Whether it is `beside` another run, which is compared with it, or one seed of such a run."""
        return BESIDE in (self.path.parent.name, self.path.parent.parent.name)

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

    def repeats(self) -> list["RunFolder"]:
        """The folders of a finished run's seeds; this one if it has one seed."""
        return self.repeats_of(self.read_summary())

    def repeats_of(self, summary: Summary) -> list["RunFolder"]:
        """The same, by a summary that may not have been written yet."""
        return [self.of_seed(seed) for seed in summary.several] or [self]

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

    def write_origin(self, former: Mapping[str, Any]) -> None:
        """Write from which run this one goes on: its folder as `run`, its `rounds`, and the names of its `clients`."""
        write_json(self.origin, dict(former))

    def read_origin(self) -> dict[str, Any] | None:
        """What `write_origin` has written; None for a run that began by itself."""
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
            part.write_text(summary.to_json(), encoding="utf-8")

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
        return Summary.from_json(text, self.summary)

    def write_models(self, history: History, model: Model, method: str = "", identity: str = "") -> None:
        """Write the clients' models as CLIENT/TENSOR; tensors that all share once, as */TENSOR, and what is frozen.

        A name has %2F for a slash and %25 for a percent sign, and *, if that is all of it, is %2A. `method` is the name
        of a method that exports models in its own way; `identity` is that of the run's summary.
        """
        layout, owned = model.layout, defaultdict[str, dict[str, Tensor]](dict)
        if history.kept.arrays:
            owned[ALL] |= model.frozen
        for part, values in history.kept.arrays.items():
            shared = part in history.kept.shared
            for name, values_of in zip([ALL] if shared else history.names, [values] if shared else values, strict=True):
                owned[name] |= (
                    layout.tensors(values_of)
                    if part == "theta" and values_of.numel() == layout.size
                    else {part: values_of}
                )
        self.write_tensors(owned, method, identity, model.plain_tensors())

    def write_tensors(
        self,
        owned: Mapping[str, Mapping[str, Tensor]],
        method: str = "",
        identity: str = "",
        plain: Mapping[str, str] | None = None,
    ) -> None:
        """Write tensors by owner, a client or `ALL`, and name, see `write_models`.

        `plain` are the digests of the tensors that a module holds beside these, by which a reader knows the module.
        """
        arrays = {f"{_quote(name)}/{key}": tensor for name, tensors in owned.items() for key, tensor in tensors.items()}
        about = {"method": method, "identity": identity, "plain": json.dumps(plain) if plain else ""}
        about[checkpoint.CHECKSUMS] = checkpoint.checksums(arrays)
        checkpoint.write(arrays, self.models, {key: text for key, text in about.items() if text})

    def model_keys(self) -> tuple[dict[str, dict[str, str]], str]:
        """The keys in the file of models, by owner and tensor, and the method that alone exports them, or "".

        Raises what safetensors does for a file that cannot be read.
        """
        owned: dict[str, dict[str, str]] = defaultdict(dict)
        with safe_open(self.models, "pt") as file:
            about, keys = file.metadata() or {}, list(file.keys())
        for key in keys:
            owner, _, tensor = key.partition("/")
            owned[ALL if owner == STAR else unquote(owner)][tensor] = key
        return dict(owned), about.get("method", "")

    def write_tested(self, tested: TestedExamples) -> None:
        """Write the score of every test example, all clients' after one another, and how many each client has."""
        arrays = {
            "scores": torch.from_numpy(np.concatenate(tested.scores)),
            "sizes": torch.tensor([len(scores) for scores in tested.scores]),
            "blocks" if tested.declared else "places": torch.from_numpy(np.concatenate(tested.blocks)),
        }
        arrays |= {} if tested.totals is None else {"totals": torch.from_numpy(tested.totals)}
        checkpoint.write(arrays, self.tested)

    def write_errors(self, errors: Sequence[Tensor]) -> None:
        """Write how far each test example's answers were off, [n, C] of each client."""
        sizes = torch.tensor([len(table) for table in errors])
        checkpoint.write({"errors": torch.cat(list(errors)), "sizes": sizes}, self.errors)

    def write_confusion(self, counts: Tensor, clients: Sequence[str], classes: Sequence[str]) -> None:
        """Write how many test examples of each class are taken for each, [N, C, C] as of `Run.confusion`."""
        with replacing(self.confusion) as part, part.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["client", "truth", "predicted", "examples"])
            for (i, truth, predicted), examples in zip(
                counts.indices().T.tolist(), counts.values().tolist(), strict=True
            ):
                table.writerow([clients[i], classes[truth], classes[predicted], examples])

    def read_confusion(self) -> list[tuple[str, str, str, int]]:
        """Client, class, predicted class and number of test examples; raises UsageError if that was not written."""
        if not self.confusion.exists():
            why = "it was deleted; run again"
            if "classes" not in self.read_clients():
                why = "the target has no classes, or test examples stayed at their sites"
            raise UsageError(f"{self} has no {self.confusion.name}: {why}")
        with _readable(self.confusion), self.confusion.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            return [(row["client"], row["truth"], row["predicted"], int(row["examples"])) for row in rows]

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

    def read_tested(self) -> TestedExamples | None:
        """What `write_tested` has written; None if nothing was. Older runs do not say where examples stand."""
        if not self.tested.exists():
            return None
        with _readable(self.tested, f"delete the folder {self} and run again"), safe_open(self.tested, "np") as file:
            scores, cuts, keys = file.get_tensor("scores"), np.cumsum(file.get_tensor("sizes"))[:-1], set(file.keys())
            declared = "blocks" in keys
            key = "blocks" if declared else "places"
            blocks = file.get_tensor(key) if key in keys else np.arange(len(scores))
            totals = file.get_tensor("totals") if "totals" in keys else None
            return TestedExamples(np.split(scores, cuts), np.split(blocks, cuts), declared, totals)

    def read_errors(self) -> list[Array] | None:
        """What `write_errors` has written; None if nothing was, as of classes or by an older version."""
        if not self.errors.exists():
            return None
        with _readable(self.errors, "delete it to do without intervals"), safe_open(self.errors, "np") as file:
            return np.split(file.get_tensor("errors"), np.cumsum(file.get_tensor("sizes"))[:-1])

    def read_baselines(self) -> tuple[list[dict[str, Any]], dict[str, Array]]:
        """The standard models beside a run, and the scores of their test examples; nothing if none were written."""
        if not self.baselines.exists():
            return [], {}
        with _readable(self.baselines, "delete it to do without"), safe_open(self.baselines, "np") as file:
            keys = list(file.keys())
            return json.loads(file.metadata()["baselines"]), {key: file.get_tensor(key) for key in keys}

    def write_history(self, history: History, origin: str, layers: list[str], caution: str = "") -> None:
        """Write scores, diagnostics and relations; `caution` says why the scores are not a fair estimate."""
        round_tables.write_scores(history, self.history, caution)
        if history.cost.examples:
            round_tables.write_cost(history, self.cost)
        if any(history.diagnostics):
            round_tables.write_diagnostics(history, self.diagnostics)
        if history.kept_relations:
            write_relations(history, self.relations, origin, layers)

    def read_scores(self, model: str, metric: str, split: str = "test", missing: bool = False) -> tuple[Array, Array]:
        """The evaluated rounds [T] (from 1), and a score of a model's clients: [T, N]; NaN for attackers.

        Raises UsageError if the run does not have it, unless it may be `missing`: then there are no rounds, [0].
        """
        rounds, values = self.read_tests(model, [metric], split)
        if metric not in values and not missing:
            raise self.not_whole()
        return rounds, values.get(metric, np.zeros(0))

    def read_validation(self) -> dict[str, float]:
        """By client the validation score that selected the chosen model's round; empty without validation rows."""
        summary = self.read_summary()
        if "validation" not in summary.chosen_scores or not self.history.exists():
            return {}
        rounds, values = self.read_scores(summary.chosen_model, summary.selection.by, "validation", missing=True)
        at = rounds.tolist().index(int(summary.chosen_scores["round"])) if len(values) else 0
        return dict(zip(summary.clients.names, values[at].tolist(), strict=True)) if len(values) else {}

    def read_tests(self, model: str, metrics: Sequence[str], split: str = "test") -> tuple[Array, dict[str, Array]]:
        """The same of several scores, of those that the run has."""
        summary = self.read_summary()
        rows = self.read_rows().filter(model=model, split=split)
        rounds, clients = (rows[column].unique(maintain_order=True) for column in ("round", "client"))
        tables = {}
        for metric in metrics:
            if len(values := rows.filter(metric=metric)["value"]):
                if len(values) != len(rounds) * len(clients):
                    raise self.not_whole()
                tables[metric] = values.to_numpy(writable=True).reshape(len(rounds), len(clients))
        if len(clients) and summary.by_client is not None and clients.to_list() != summary.by_client.names:
            raise self.of_another(self.history)
        for scores in tables.values() if summary.attackers else ():
            scores[:, np.isin(summary.clients.names, summary.attackers)] = np.nan
        return rounds.to_numpy(), tables

    def read_rows(self) -> "DataFrame":
        """All scores of a run with one seed, see `score_rows.read_rows`; raises UsageError if some are not there."""
        try:
            return round_tables.read_rows(self.history)
        except PermissionError:  # nothing is wrong with the file
            raise
        except (OSError, ValueError):
            raise self.not_whole() from None

    def read_cost(self) -> dict[int, Spent] | None:
        """What a finished run had taken after each evaluated round (from 1); None if that was not written."""
        if not self.cost.exists():
            return None
        with _readable(self.cost, f"delete the folder {self} and run again"):
            return round_tables.read_cost(self.cost)

    def not_whole(self) -> UsageError:
        """The error for a finished run with incomplete scores."""
        return UsageError(f"{self.history} is incomplete; delete the folder {self} and run again")

    def check_models(self) -> None:
        """Raise UsageError for saved models of another run, and as safetensors does for what cannot be read."""
        with safe_open(self.models, "pt") as file:
            identity = (file.metadata() or {}).get("identity")
        if identity != self.read_summary().provenance.identity:
            raise self.of_another(self.models)

    def check_module(self, model: Model) -> None:
        """Raise UsageError if the module holds other plain tensors than the one that was trained."""
        with safe_open(self.models, "pt") as file:
            digests = json.loads((file.metadata() or {}).get("plain", "{}"))
        now = model.plain_tensors()
        if changed := [name for name, digest in digests.items() if now.get(name) != digest]:
            raise UsageError(
                f"{self}: the module's tensor '{changed[0]}' differs from that of training, and no run holds a plain "
                "attribute; train again with it registered as a buffer (self.register_buffer)"
            )

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
        with _readable(self.relations):
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
