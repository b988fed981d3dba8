"""Trackers: what follows a run while it goes on: TensorBoard, MLflow, Weights & Biases, or a class of yours.

One that fails is left out from then on, with a warning. RUN/track.json says which round each has got last, so a run
that is resumed goes on there.
"""

import hashlib
import importlib.util
import json
import math
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from ..core.history import History
from ..errors import RunError, UsageError, nearest
from ..files import replacing
from ..plots.heatmaps import relation_heatmap
from ..simulation import distributed
from ..verdict.graph_quality import row_entropy
from .config import experiment, plugins
from .run_folder import RunFolder

NAME = 250  # bytes of a name, as much as MLflow and its folders allow
FEW = 50  # clients, each of whose own scores and notes are logged, too
PICTURES = 10  # of the relation in a run
CALL = 1000  # numbers in one call of MLflow, which takes no more; a hundred settings, of 500 characters


class Tracked(NamedTuple):
    """A run, as a tracker is told of it."""

    id: str  # of this run alone, and the same when it is resumed
    name: str  # its folder, as it was given
    folder: Path
    settings: dict[str, str]  # of its config, such as method.name


class Tracker(Protocol):
    """What follows a run: a class that is called with the run, `Tracked`, also when that is resumed."""

    def log(self, step: int, numbers: Mapping[str, float], picture: Path | None = None) -> None:
        """Log a round, from 1: numbers by names such as test/accuracy/own, and a PNG that is gone once this returns."""

    def end(self, outcome: str) -> None:
        """The run is over for now: finished, interrupted or failed."""


class TensorBoard:
    """Writes RUN/tensorboard, for `tensorboard --logdir runs`."""

    def __init__(self, run: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"))
        lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in run.settings.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *lines]), 0)

    def log(self, step: int, numbers: Mapping[str, float], picture: Path | None = None) -> None:
        """Write each number as a point of a curve."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if picture is not None:
            from matplotlib.image import imread

            self._writer.add_image("relation", imread(picture)[:, :, :3], step, dataformats="HWC")
        self._writer.flush()

    def end(self, outcome: str) -> None:
        self._writer.close()


class MLflow:
    """Sends to MLFLOW_TRACKING_URI in the background, as a run of MLFLOW_EXPERIMENT_NAME, or else of kinfed."""

    def __init__(self, run: Tracked) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # its own would add up to minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
        self._sending = list[Any]()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "kinfed")
        experiment = self._client.get_experiment_by_name(name)
        under = experiment.experiment_id if experiment else self._client.create_experiment(name)
        runs = self._client.search_runs([under], f"tags.`kinfed id` = '{run.id}'")
        made = runs[0] if runs else self._client.create_run(under, tags={"kinfed id": run.id}, run_name=run.name)
        self._id = made.info.run_id
        self._client.update_run(self._id, "RUNNING")
        params = [Param(_mlflow_name(key), value[: CALL // 2]) for key, value in run.settings.items()]
        for i in range(0, len(params), CALL // 10):
            self._client.log_batch(self._id, params=params[i : i + CALL // 10])

    def log(self, step: int, numbers: Mapping[str, float], picture: Path | None = None) -> None:
        """Send the picture, and have the numbers sent."""
        from mlflow.entities import Metric

        if picture is not None:
            self._client.log_artifact(self._id, str(picture), "relation")
        # A store in files has a file or a folder of a name, not both.
        named = {f"{name}/mean" if f"{name}/lowest" in numbers else name: value for name, value in numbers.items()}
        metrics = [Metric(_mlflow_name(name), value, int(1000 * time.time()), step) for name, value in named.items()]
        for i in range(0, len(metrics), CALL):
            self._sending.append(self._client.log_batch(self._id, metrics[i : i + CALL], synchronous=False))

    def end(self, outcome: str) -> None:
        """Wait until all is sent."""
        states = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        try:
            for request in self._sending:
                request.wait()
        finally:
            self._client.set_terminated(self._id, states[outcome])


class WandB:
    """Logs to Weights & Biases, in the project WANDB_PROJECT, or else kinfed."""

    def __init__(self, run: Tracked) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "kinfed")
        how = {"name": run.name, "id": run.id, "dir": str(run.folder), "config": run.settings, "resume": "allow"}
        self._image, self._run = wandb.Image, wandb.init(project=project, **how)

    def log(self, step: int, numbers: Mapping[str, float], picture: Path | None = None) -> None:
        """Log the numbers, and the picture as `relation`."""
        self._run.log({**numbers, **({"relation": self._image(str(picture))} if picture else {})}, step=step)

    def end(self, outcome: str) -> None:
        self._run.finish(exit_code=int(outcome != "finished"))


TRACKERS: dict[str, Callable[[Tracked], Any]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def find(name: str) -> Callable[[Tracked], Tracker]:
    """The class of a tracker's name, or a class of yours; raises UsageError if it cannot be used."""
    if plugins.is_path(name):
        kind = plugins.load(name, "track")
        if lacks := [function for function in ("log", "end") if not callable(getattr(kind, function, None))]:
            raise UsageError(f"track: '{name}' is not a tracker: it lacks {', '.join(lacks)}")
        return cast(Callable[[Tracked], Tracker], kind)
    if name not in TRACKERS:
        raise UsageError(f"there is no tracker '{name}'; {nearest(name, TRACKERS)} Yours: FILE.py:NAME")
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"track={name} needs a package that is not installed: pip install 'kinfed[{name}]'")
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise UsageError("track=mlflow needs the server's address: export MLFLOW_TRACKING_URI=http://127.0.0.1:5000")
    return TRACKERS[name]


def check(names: Sequence[str]) -> None:
    """Raise UsageError unless all of these can be used."""
    for name in names:
        find(name)


def numbers_of(history: History, t: int) -> dict[str, float]:
    """What is logged of the evaluated round `t`: numbers by name, without those that are not defined.

    Of a score or a note of clients: the mean, the lowest and the highest, and each of up to FEW clients', of scores in
    the task's metric. Attackers do not count.
    """
    numbers: dict[str, float] = {}
    for (model, split, metric), values in history.scores[t].items():
        named = history.names if metric == history.task.metric else ()
        numbers |= _over_clients(f"{split}/{metric}/{model}", history.selector.mask(values), named)
    for note, values in history.diagnostics[t].items():
        name = f"note/{note}"
        numbers |= _over_clients(name, values, history.names) if values.ndim else {name: float(values)}
    relation = _relation(history, t)
    if relation is not None and not (relation < 0).any():
        numbers["relation/entropy"] = float(row_entropy(relation).nanmean())
    for spent in (cost for cost in history.cost.spent if cost.round == history.rounds[t]):
        amounts = {key: value for key, value in spent._asdict().items() if value is not None and key != "round"}
        numbers |= {f"spent/{key}": value for key, value in amounts.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _over_clients(name: str, values: Tensor, names: Sequence[str]) -> dict[str, float]:
    present = values[~values.isnan()].double()
    if not len(present):
        return {}
    summary = {
        name: float(present.mean()),
        f"{name}/lowest": float(present.min()),
        f"{name}/highest": float(present.max()),
    }
    if len(names) <= FEW:
        summary |= {f"{name}/client {client}": value for client, value in zip(names, values.tolist(), strict=False)}
    return summary


def _relation(history: History, t: int) -> Tensor | None:
    """[N, N] or [L, N, N] who learned from whom in an evaluated round."""
    relation = history.relations[t] if t < len(history.kept_relations) else None
    return relation if isinstance(relation, Tensor) else None


@contextmanager
def track_run(
    names: Sequence[str], folder: RunFolder | None, rounds: int, layers: Sequence[str] = ()
) -> Iterator[Callable[[History], None]]:
    """Have trackers follow a run; what is given is called with its history after every round.

    A run that is resumed is followed by the trackers that it began with, unless others are named.
    """
    if names and folder is None:
        raise UsageError(f"track={','.join(names)} needs the run's folder: fit(..., folder='runs/mine')")
    if folder is None or not distributed.leads():
        yield lambda history: None
        return
    feed, outcome = _Feed(names, folder, rounds, layers), "failed"
    try:
        yield feed.send
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        feed.end(outcome)


class _Feed:
    """The trackers of a run, and the last round that each has got."""

    def __init__(self, names: Sequence[str], folder: RunFolder, rounds: int, layers: Sequence[str]) -> None:
        self._path, self._rounds, self._layers = folder.path / "track.json", rounds, layers
        record = self._read()
        names = names or [*record["trackers"]]
        check(names)
        self._id = record["id"]
        self._sent = {**dict.fromkeys(names, 0), **record["trackers"]}
        self._drawn, self._done = 0, 0
        self._history: History | None = None  # as it was last sent
        run = Tracked(self._id, str(folder), folder.path, _settings(folder) if names else {})
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            if (made := self._attempt(name, find(name), run)) is not None:
                self._trackers[name] = made
        if names:
            self._write()

    def send(self, history: History) -> None:
        """Log the evaluated rounds that are new, with a picture of each tenth of the run."""
        self._history = history
        for t in range(self._done, len(history.rounds) if self._trackers else 0):
            step = history.rounds[t] + 1
            tenth, relation = PICTURES * step // max(self._rounds, 1), _relation(history, t)
            names = [name for name in self._trackers if self._sent[name] < step]
            numbers = numbers_of(history, t) if names else {}
            with TemporaryDirectory() as folder:
                picture = Path(folder) / f"round-{step:05d}.png"
                if names and relation is not None and tenth > self._drawn:
                    draw = partial(relation_heatmap, layers=self._layers)
                    self._attempt("a picture", draw, relation.numpy(), history.names, history.origin, picture)
                for name in names:
                    self._attempt(name, self._trackers[name].log, step, numbers, picture if picture.exists() else None)
                    self._sent[name] = step if name in self._trackers else self._sent[name]
            self._drawn, self._done = tenth, t + 1
            if names:
                self._write()

    def end(self, outcome: str) -> None:
        """Have the trackers end, with the scores that the last round was waiting for."""
        if self._history is not None:
            self.send(self._history)
        for name in [*self._trackers]:
            self._attempt(name, self._trackers[name].end, outcome)

    def _attempt(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns; if it fails, nothing is asked of this tracker any more."""
        try:
            return function(*arguments)
        except Exception as problem:
            self._trackers.pop(name, None)
            problem_text = re.sub(
                r"://[^/\s]*@", "://", f"{type(problem).__name__}: {problem}"
            )  # which may be a password
            why = " ".join(problem_text.split())[:160]
            warnings.warn(f"{name} fails, and the run goes on without: {why}", stacklevel=2)

    def _read(self) -> dict[str, Any]:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            return {"id": str(record["id"]), "trackers": {name: int(last) for name, last in record["trackers"].items()}}
        except FileNotFoundError:
            return {"id": uuid.uuid4().hex, "trackers": {}}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
            why = f"{self._path} cannot be read ({problem!s:.80}); delete it to track the run as a new one"
            raise RunError(why) from None

    def _write(self) -> None:
        with replacing(self._path) as part:
            part.write_text(json.dumps({"id": self._id, "trackers": self._sent}) + "\n", encoding="utf-8")


def _settings(folder: RunFolder) -> dict[str, str]:

    def flat(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
        settings: dict[str, str] = {}
        for key, value in table.items():
            settings |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": str(value)}
        return settings

    return flat(experiment.read(str(folder.config), [])) if folder.is_begun else {}


def _mlflow_name(name: str) -> str:
    """A name with what MLflow allows: a client's may have any characters and any length.

    Characters that MLflow refuses become their numbers. A name that is too long ends with a digest.
    """
    where, mark, client = name.partition("/client ")
    allowed = where + mark + re.sub(r"[^\w.\- ]", lambda c: f":{ord(c[0]):x}:", client)
    if len(allowed.encode()) > NAME:
        digest = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()[:10]
        allowed = f"{allowed.encode()[: NAME - 11].decode(errors='ignore')}-{digest}"
    return allowed
