"""Trackers: what follows a run from outside while it goes on, such as TensorBoard or an MLflow server."""

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from ..errors import UsageError, nearest
from .config import plugins


class Tracked(NamedTuple):
    """A run, as a tracker is told of it."""

    id: str  # of this run alone, and the same when it is resumed
    name: str  # its folder, as it was given
    folder: Path
    began: float  # seconds since 1970
    settings: dict[str, str]  # of its config, such as method.name


class Tracker(Protocol):
    """What follows a run: a class without arguments, of which one object is made for each run.

    Its functions are called in a thread of their own, one after another. Each may take long, and may raise: it is then
    called again, with the same arguments, until it does not. So it must do no harm to call one twice.
    """

    def begin(self, run: Tracked) -> int:
        """Begin a run, or take it up again; returns the last round that is there already, counted from 1, or 0."""

    def record(self, round: int, seconds: float, values: Mapping[str, float], picture: Path | None) -> None:
        """Record a round, from 1, that was over `seconds` after the run began.

        `values` are numbers by names such as test/accuracy/own, and `picture` is a PNG of the relation, if there is
        one, that is gone once this returns. Rounds come in order, each once.
        """

    def end(self, outcome: str) -> None:
        """The run is over for now: finished, interrupted or failed."""


class TensorBoard:
    """Writes RUN/tensorboard, for `tensorboard --logdir runs`: the whole run anew whenever it is begun or resumed."""

    def __init__(self) -> None:
        _need("tensorboard", "tensorboard")

    def begin(self, run: Tracked) -> int:
        """Begin anew: what is there may lack rounds that a killed process had not written yet."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._began, self._writer = run.began, SummaryWriter(str(folder), purge_step=0)
        lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in run.settings.items()]
        text = "\n".join(["| setting | value |", "| --- | --- |", *lines])
        self._writer.add_text("settings", text, 0, run.began)
        return 0

    def record(self, round: int, seconds: float, values: Mapping[str, float], picture: Path | None) -> None:
        """Write a round's numbers, each as a curve, and its picture."""
        at = self._began + seconds
        for name, value in values.items():
            self._writer.add_scalar(name, value, round, at)
        if picture is not None:
            from matplotlib.image import imread

            pixels = imread(picture)[:, :, :3]
            self._writer.add_image("relation", pixels, round, at, "HWC")
        self._writer.flush()

    def end(self, outcome: str) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """Sends to the server at MLFLOW_TRACKING_URI, as a run of the experiment MLFLOW_EXPERIMENT_NAME, or else kinfed."""

    LAST = "spent/seconds"  # sent last of a round: a round that has it is whole
    MOST_METRICS, MOST_SETTINGS, LONGEST = 1000, 100, 500  # in one call, and of a setting's value

    def __init__(self) -> None:
        _need("mlflow", "mlflow")
        self._uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not self._uri:
            raise UsageError(
                "track=mlflow needs the server's address: export MLFLOW_TRACKING_URI=http://127.0.0.1:5000, say"
            )
        # Its own waiting would add up to minutes, in which nobody is told that the server is away.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

    def begin(self, run: Tracked) -> int:
        """Find the run by its id, or make one, and ask which rounds it has."""
        from mlflow import MlflowClient

        self._client, self._began = MlflowClient(self._uri), run.began
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "kinfed")
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        found = self._client.search_runs([experiment], f"tags.`kinfed id` = '{run.id}'")
        if not found:
            tags = {"kinfed id": run.id, "kinfed folder": str(run.folder.resolve())}
            made = self._client.create_run(experiment, int(1000 * run.began), tags, run.name)
            self._id = made.info.run_id
            self._write_settings(run.settings)
            return 0
        self._id = found[0].info.run_id
        self._client.update_run(self._id, "RUNNING")
        self._write_settings(run.settings)
        return max((one.step for one in self._client.get_metric_history(self._id, self.LAST)), default=0)

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(_plain(name), value[: self.LONGEST]) for name, value in settings.items()]
        for i in range(0, len(params), self.MOST_SETTINGS):
            self._client.log_batch(self._id, params=params[i : i + self.MOST_SETTINGS])

    def record(self, round: int, seconds: float, values: Mapping[str, float], picture: Path | None) -> None:
        """Send a round's picture and then its numbers."""
        from mlflow.entities import Metric

        if picture is not None:
            numbered = picture.rename(picture.with_name(f"round-{round:05d}.png"))
            try:
                self._client.log_artifact(self._id, str(numbered), "relation")
            finally:
                numbered.rename(picture)
        at = int(1000 * (self._began + seconds))
        named = {_plain(name): value for name, value in values.items()}
        named[self.LAST] = named.pop(self.LAST, seconds)
        metrics = [Metric(name, value, at, round) for name, value in named.items()]
        for i in range(0, len(metrics), self.MOST_METRICS):
            self._client.log_batch(self._id, metrics[i : i + self.MOST_METRICS])

    def end(self, outcome: str) -> None:
        """Set the run's state."""
        states = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, states[outcome])


TRACKERS: dict[str, type[Any]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def make(name: str) -> Tracker:
    """The tracker of a name, or of a class of yours; raises UsageError if it cannot be used."""
    if not plugins.is_path(name):
        if name not in TRACKERS:
            raise UsageError(f"there is no tracker '{name}'; {nearest(name, TRACKERS)} Yours: FILE.py:NAME")
        return cast(Tracker, TRACKERS[name]())
    kind = plugins.load(name, "track")
    try:
        tracker = kind()
    except UsageError:
        raise
    except Exception as problem:
        raise UsageError(f"track: '{name}' cannot be made: {type(problem).__name__}: {problem}") from problem
    if lacks := [one for one in ("begin", "record", "end") if not callable(getattr(tracker, one, None))]:
        raise UsageError(f"track: '{name}' is not a tracker: it lacks {', '.join(lacks)}")
    return cast(Tracker, tracker)


def check(names: Sequence[str]) -> None:
    """Raise UsageError unless all of these can be used."""
    for name in names:
        make(name)


def _need(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"track={extra} needs a package that is not installed: pip install 'kinfed[{extra}]'")


def _plain(name: str) -> str:
    """A name with what MLflow allows: a client's may have any characters, and others become their numbers."""
    where, mark, client = name.partition("/client ")
    return where + mark + re.sub(r"[^\w.\- ]", lambda c: f":{ord(c[0]):x}:", client)
