"""A run and its trackers: what they are sent, when, and what happens while one of them is away.

A tracker works in a thread of its own, so that training does not wait for it. Everything is sent from what the run
itself keeps: a run that was resumed, wherever its last checkpoint was, is neither sent twice nor left with gaps.
"""

import csv
import json
import math
import re
import threading
import time
import tomllib
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.fleet import Key
from ..core.history import History, Spent
from ..errors import RunError, UsageError
from ..files import replacing
from ..plots.heatmaps import relation_heatmap
from ..simulation import distributed
from ..verdict.graph_quality import row_entropy
from .run_folder import RunFolder
from .trackers import Tracked, Tracker, check, make

FEW = 50  # clients, each of whose own scores and notes are sent, too
PICTURES = 10  # of its relation that are drawn in a run, at most
PATIENCE = 15.0  # seconds without progress after which a run that is over no longer waits for a tracker
ASKED = 60.0  # the same, where sending is all that was asked for
PAUSES = 1.0, 60.0  # seconds before a tracker that failed is tried again: at first, and at most

Draw = Callable[..., None]


class Moment(NamedTuple):
    """An evaluated round."""

    round: int  # from 1
    scores: Mapping[Key, Tensor]  # [N] each
    notes: Mapping[str, Tensor]  # [] or [N] each
    relation: Tensor | None  # [N, N] or [L, N, N]
    spent: Spent | None

    def values(self, names: Sequence[str], metric: str) -> dict[str, float]:
        """What is sent of it: numbers by name, without those that are not defined.

        Of a score or a note of clients: the mean, the lowest and the highest, and each of up to FEW clients', of scores
        in `metric`.
        """
        found: dict[str, float] = {}
        for (model, split, score), values in self.scores.items():
            found |= _over_clients(f"{split}/{score}/{model}", values, names if score == metric else ())
        for note, values in self.notes.items():
            name = f"note/{note}"
            found |= _over_clients(name, values, names) if values.ndim else {name: float(values)}
        if self.relation is not None and not (self.relation < 0).any():
            found["relation/entropy"] = float(row_entropy(self.relation).nanmean())
        if self.spent is not None:
            found |= {f"spent/{name}": value for name, value in self.spent._asdict().items() if value is not None}
            del found["spent/round"]
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _over_clients(name: str, values: Tensor, names: Sequence[str]) -> dict[str, float]:
    known = values[~values.isnan()].double()
    if not len(known):
        return {}
    found = {name: float(known.mean()), f"{name}/lowest": float(known.min()), f"{name}/highest": float(known.max())}
    if len(names) <= FEW:
        found |= {f"{name}/client {one}": value for one, value in zip(names, values.tolist(), strict=False)}
    return found


@contextmanager
def followed(
    names: Sequence[str],
    folder: RunFolder | None,
    rounds: int,
    origin: str,
    layers: Sequence[str] = (),
    again: str = "kinfed resume",
) -> Iterator[Callable[[History], None]]:
    """Have trackers follow a run; what is given is called with its history after every round.

    A run that is resumed is followed by the trackers that it began with, unless others are named. `again` is the
    command that sends what a tracker lacks.
    """
    if names and folder is None:
        raise UsageError(f"track={','.join(names)} needs the run's folder: fit(..., folder='runs/mine')")
    followers = _Followers(names, folder, again=again) if folder is not None and distributed.leads() else None
    outcome, last, done = "failed", [], 0

    def follow(history: History) -> None:
        nonlocal last, done
        last = [history]
        if followers:
            drawing = partial(relation_heatmap, names=history.names, origin=origin, layers=layers)
            followers.send(_of_history(history, done), history.names, history.task.metric, rounds, drawing)
            done = len(history.rounds)

    try:
        yield follow
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        if followers:
            for history in last:
                follow(history)  # with the scores that the last round was waiting for
            followers.end(outcome)


def catch_up(folder: RunFolder, names: Sequence[str]) -> None:
    """Send the rounds of a finished run to these trackers, or to those that followed it and have not got all."""
    if not distributed.leads():
        return
    for one in folder.repeats():
        summary = one.read_summary()
        again = "kinfed flower run --resume" if summary.executor == "flower" else "kinfed resume"
        followers = _Followers(names, one, behind=True, again=again)
        if not followers.each:
            continue
        drawing: Draw = partial(relation_heatmap, names=summary.client_names)
        if summary.relation is not None:
            relations = one.read_relations()
            drawing = partial(drawing, origin=relations.origin, layers=relations.layers)
        followers.send(_of_folder(one), summary.client_names, summary.metric, summary.rounds, drawing)
        followers.end("finished", ASKED)


def _of_history(history: History, after: int) -> Iterator[Moment]:
    """The evaluated rounds whose scores are there, without the first ones; attackers do not count."""
    spent = {one.round: one for one in history.spent}
    for t in range(after, len(history.rounds)):
        scores = history.scores[t]
        if history.honest is not None:
            scores = {key: values.masked_fill(~history.honest, torch.nan) for key, values in scores.items()}
        relation = history.relations[t] if t < len(history.kept_relations) else None
        round = history.rounds[t]
        yield Moment(round + 1, scores, history.diagnostics[t], relation, spent.get(round))


def _of_folder(folder: RunFolder) -> Iterator[Moment]:
    """The same of a finished run, from its files."""
    summary = folder.read_summary()
    names, nothing = summary.client_names, torch.full((len(summary.client_names),), torch.nan, dtype=torch.float64)
    place = {name: i for i, name in enumerate(names)}
    scores: dict[int, dict[Key, Tensor]] = defaultdict(dict)
    notes: dict[int, dict[str, Tensor]] = defaultdict(dict)
    try:
        for row in _rows(folder.history):
            if row["client"] not in summary.attackers:
                key = row["model"], row["split"], row["metric"]
                scores[int(row["round"])].setdefault(key, nothing.clone())[place[row["client"]]] = float(row["value"])
        for row in _rows(folder.diagnostics):
            round, note, value = int(row["round"]), row["note"], float(row["value"])
            if row["client"]:
                notes[round].setdefault(note, nothing.clone())[place[row["client"]]] = value
            else:
                notes[round][note] = torch.tensor(value, dtype=torch.float64)
    except (OSError, KeyError, ValueError):
        raise folder.not_whole() from None
    relations = {}
    if summary.relation is not None:
        kept = folder.read_relations()
        relations = {int(r): torch.from_numpy(w) for r, w in zip(kept.rounds, kept.weights, strict=True)}
    spent = folder.read_cost() or {}
    for round in sorted(scores):
        yield Moment(round, scores[round], notes[round], relations.get(round), spent.get(round))


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class _Followers:
    """All trackers of a run, and the file that says which these are and how far each has got."""

    def __init__(
        self, names: Sequence[str], folder: RunFolder, behind: bool = False, again: str = "kinfed resume"
    ) -> None:
        self._path = folder.path / "track.json"
        known = self._read()
        self._drawn = 0
        self._last, before = known.get("last", 0), known.get("trackers", {})
        if not names:
            names = [name for name, sent in before.items() if not behind or sent < self._last]
        check(names)
        self.each: list[_Follower] = []
        if not names:
            return
        began = known.get("began", time.time())
        run = Tracked(known.get("id", uuid.uuid4().hex), str(folder), folder.path, began, _settings(folder))
        self._known = {
            "id": run.id,
            "began": began,
            "last": self._last,
            "trackers": {**dict.fromkeys(names, 0), **before},
        }
        self._write()
        self.each = [_Follower(name, make(name), run, again) for name in names]

    def __bool__(self) -> bool:
        return bool(self.each)

    def send(self, moments: Iterable[Moment], names: Sequence[str], metric: str, rounds: int, drawing: Draw) -> None:
        """Have rounds sent, with a picture of each tenth of the run."""
        for moment in moments:
            tenth, relation = PICTURES * moment.round // max(rounds, 1), moment.relation
            draw = partial(drawing, relation.numpy()) if relation is not None and tenth > self._drawn else None
            self._last, self._drawn = max(self._last, moment.round), tenth
            values = moment.values(names, metric)
            seconds = moment.spent.seconds if moment.spent is not None else None
            for follower in self.each:
                follower.send(moment.round, seconds or 0.0, values, draw)

    def end(self, outcome: str, patience: float | None = None) -> None:
        """Have sent what is left, and note how far each tracker has got."""
        for follower in self.each:
            follower.end(outcome, PATIENCE if patience is None else patience)
            self._known["trackers"][follower.name] = follower.sent
        self._known["last"] = self._last
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as problem:
            raise RunError(
                f"{self._path} cannot be read ({problem}); delete it to track the run as a new one"
            ) from None

    def _write(self) -> None:
        with replacing(self._path) as part:
            part.write_text(json.dumps(self._known, indent=1) + "\n", encoding="utf-8")


def _settings(folder: RunFolder) -> dict[str, str]:
    """The config of a run's folder, flat."""
    if not folder.is_begun:
        return {}

    def flat(table: Mapping[str, Any], before: str = "") -> dict[str, str]:
        found: dict[str, str] = {}
        for key, value in table.items():
            found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": str(value)}
        return found

    return flat(tomllib.loads(folder.config.read_text(encoding="utf-8")))


class _GivenUp(Exception):
    """The run is over, and its tracker still away."""


class _Follower:
    """One tracker of one run, at work in a thread of its own."""

    def __init__(self, name: str, tracker: Tracker, run: Tracked, again: str) -> None:
        self.name, self.sent, self._again = name, 0, again
        self._tracker, self._run, self._last = tracker, run, 0
        self._todo: Queue[tuple[int, float, dict[str, float], Draw | None] | str] = Queue()
        self._over, self._problem, self._said = threading.Event(), "", False
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def send(self, round: int, seconds: float, values: dict[str, float], draw: Draw | None) -> None:
        """Have a round sent when its turn comes."""
        self._last = round
        self._todo.put((round, seconds, values, draw))
        self._complain()

    def end(self, outcome: str, patience: float) -> None:
        """Wait until all is sent, unless the tracker is away or makes no progress for `patience` seconds."""
        self._todo.put(outcome)
        self._over.set()
        before = -1
        while self._thread.is_alive() and before < self.sent:
            before = self.sent
            self._thread.join(patience)
        self._complain()
        if self.sent < self._last:
            warnings.warn(
                f"{self.name} lacks rounds {self.sent + 1} to {self._last}; to send them: "
                f"{self._again} {self._run.folder}",
                stacklevel=2,
            )

    def _complain(self) -> None:
        if self._problem and not self._said:
            self._said = True
            warnings.warn(f"{self.name} fails, and the run goes on without: {self._problem}", stacklevel=2)

    def _work(self) -> None:
        try:
            self.sent = self._until_it_works(self._tracker.begin, self._run)
            while not isinstance(job := self._todo.get(), str):
                round, seconds, values, draw = job
                if round > self.sent:
                    with TemporaryDirectory() as folder:
                        picture = Path(folder) / "relation.png" if draw else None
                        if draw:
                            draw(path=picture)
                        self._until_it_works(self._tracker.record, round, seconds, values, picture)
                    self.sent = round
            self._until_it_works(self._tracker.end, job)
        except _GivenUp:
            pass
        except Exception as problem:  # in drawing
            self._note(problem)

    def _note(self, problem: Exception) -> None:
        said = re.sub(r"://[^/\s]*@", "://", f"{type(problem).__name__}: {problem}")  # addresses may hold a password
        self._problem = " ".join(said.split())[:160]

    def _until_it_works(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function until it works; when the run is over, once more."""
        pause, longest = PAUSES
        while True:
            over = self._over.is_set()
            try:
                return function(*arguments)
            except Exception as problem:
                self._note(problem)
                if over:
                    raise _GivenUp from None
            self._over.wait(pause)
            pause = min(2 * pause, longest)
