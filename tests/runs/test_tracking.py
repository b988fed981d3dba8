"""Runs that are followed from outside while they go on."""

import json
import time

import numpy as np
import pytest
import torch
from matplotlib.image import imsave

from kinfed.cli import main
from kinfed.core.history import Spent
from kinfed.errors import UsageError
from kinfed.runs import tracker_feed, trackers
from kinfed.runs.config import experiment as config
from kinfed.runs.launch import launch, resume
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution

SMALL = ["federation.clients=4", "federation.partition.groups=2", "model=linear", "rounds=6"]
OWN = '''
import json, pathlib

class Mine:
    """Appends to a file of its own, which outlives the process, and is away while there is a file `away`."""

    def begin(self, run):
        self.here = run.folder
        if (self.here / "away").exists():
            raise ConnectionError("http://ada:pa55word@127.0.0.1:1: nobody answers")
        with (self.here / "mine.jsonl").open("a") as file:
            print(json.dumps({"begin": run.id, "name": run.name, "settings": run.settings}), file=file)
        return max((one["round"] for one in rounds(self.here)), default=0)

    def record(self, round, seconds, values, picture):
        if (self.here / "away").exists():
            (self.here / "missed").touch()
            raise ConnectionError("http://ada:pa55word@127.0.0.1:1: nobody answers")
        with (self.here / "mine.jsonl").open("a") as file:
            drawn = bool(picture) and picture.read_bytes()[1:4] == b"PNG"
            print(json.dumps({"round": round, "seconds": seconds, "values": values, "picture": drawn}), file=file)

    def end(self, outcome):
        with (self.here / "mine.jsonl").open("a") as file:
            print(json.dumps({"end": outcome}), file=file)

def rounds(folder):
    path = folder / "mine.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [line for line in lines if "round" in line]
'''


def dot(path):
    """A picture that takes no time to draw."""
    imsave(path, np.zeros((1, 1)))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setattr(tracker_feed, "PAUSES", (0.001, 0.002))
    monkeypatch.setattr(tracker_feed, "relation_heatmap", lambda relation, names, origin, path, layers: dot(path))
    return f"{tmp_path / 'mine.py'}:Mine"


def lines(folder, kind):
    return [one for one in map(json.loads, (folder / "mine.jsonl").read_text().splitlines()) if kind in one]


def wait_for(condition, seconds=60):
    """On a busy machine another thread's turn may be late."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def rounds_sent(folder):
    return (folder / "mine.jsonl").exists() and lines(folder, "round")


def experiment(*changes, method="fedaghn"):
    return config.resolve(config.read(method, [*SMALL, *changes]))


def without_seconds(rounds):
    """Seconds differ between runs."""
    return [{name: one["values"][name] for name in sorted(one["values"]) if "seconds" not in name} for one in rounds]


def test_what_is_sent_of_a_round():
    scores = {("own", "test", "accuracy"): torch.tensor([0.5, 1.0]), ("own", "test", "loss"): torch.tensor([1.0, 3.0])}
    notes = {"step": torch.tensor(7.0), "cluster": torch.tensor([1.0, torch.nan])}
    relation = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    values = tracker_feed.Moment(3, scores, notes, relation, Spent(2, 10, 20, 30, 1.5)).values(["a", "b"], "accuracy")
    accuracy = {"": 0.75, "/lowest": 0.5, "/highest": 1.0, "/client a": 0.5, "/client b": 1.0}
    loss = {"": 2.0, "/lowest": 1.0, "/highest": 3.0}
    assert values == {
        **{f"test/accuracy/own{key}": value for key, value in accuracy.items()},
        **{f"test/loss/own{key}": value for key, value in loss.items()},
        "note/step": 7.0,
        **{f"note/cluster{key}": 1.0 for key in ("", "/lowest", "/highest", "/client a")},
        "relation/entropy": pytest.approx(np.log(2) / 2),
        **{"spent/bytes_down": 10, "spent/bytes_up": 20, "spent/examples": 30, "spent/seconds": 1.5},
    }


def test_a_run_is_followed_and_told_what_it_is(tmp_path, mine):
    out = tmp_path / "a"
    launch(experiment(), out, Execution(track=(mine,)))
    (begun,), sent = lines(out, "begin"), lines(out, "round")
    assert begun["name"] == str(out)
    assert begun["settings"]["method.name"] == "fedaghn"
    assert [one["round"] for one in sent] == [1, 2, 3, 4, 5, 6]
    assert all(one["picture"] for one in sent)
    assert lines(out, "end") == [{"end": "finished"}]
    _, scores = RunFolder(out).read_scores("mixed", "accuracy")
    assert [one["values"]["test/accuracy/mixed"] for one in sent] == pytest.approx(scores.mean(1).tolist(), rel=1e-6)
    assert [one["seconds"] for one in sent] == [one["values"]["spent/seconds"] for one in sent]


def test_a_long_run_has_ten_pictures(tmp_path, mine):
    launch(experiment("rounds=25"), tmp_path / "a", Execution(track=(mine,)))
    drawn = [one["round"] for one in lines(tmp_path / "a", "round") if one["picture"]]
    assert drawn == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]


@pytest.mark.parametrize("seconds", [0, 1e9], ids=["a checkpoint each round", "none before the end"])
def test_a_run_that_is_resumed_has_neither_doubles_nor_gaps(tmp_path, mine, seconds):
    whole, out = tmp_path / "whole", tmp_path / "a"
    launch(experiment(), whole, Execution(track=(mine,)))

    def stop(history, rounds):
        if history.done == 4:
            raise KeyboardInterrupt

    def die(history, rounds):
        if history.done == 4:
            raise SystemExit  # no checkpoint is written: as if the process were killed

    with pytest.raises(KeyboardInterrupt if seconds == 0 else SystemExit):
        launch(
            experiment(), out, Execution(track=(mine,), checkpoint_seconds=seconds, progress=die if seconds else stop)
        )
    assert not seconds or not RunFolder(out).checkpoint.exists()
    resume(out)  # by the trackers that it began with
    assert len({one["begin"] for one in lines(out, "begin")}) == 1
    assert len(lines(out, "begin")) == 2
    assert [one["round"] for one in lines(out, "round")] == [1, 2, 3, 4, 5, 6]
    assert without_seconds(lines(out, "round")) == without_seconds(lines(whole, "round"))
    assert [one["end"] for one in lines(out, "end")] == ["failed" if seconds else "interrupted", "finished"]
    resume(out)
    assert len(lines(out, "begin")) == 2  # it has everything


def test_a_tracker_that_is_away_for_a_while_catches_up(tmp_path, mine, recwarn):
    out = tmp_path / "a"

    def leave(history, rounds):  # the tracker works in a thread of its own
        if history.done == 2:
            wait_for(lambda: rounds_sent(out))
            (out / "away").touch()
        if history.done == 5:
            wait_for((out / "missed").exists)
            (out / "away").unlink()

    launch(experiment(), out, Execution(track=(mine,), progress=leave))
    assert [one["round"] for one in lines(out, "round")] == [1, 2, 3, 4, 5, 6]
    (said,) = [str(one.message) for one in recwarn if "Mine" in str(one.message)]
    assert said.endswith("fails, and the run goes on without: ConnectionError: http://127.0.0.1:1: nobody answers")


@pytest.mark.parametrize("method", ["fedaghn", "cfl", "local"])
def test_what_a_finished_run_could_not_send_is_sent_from_its_files(tmp_path, mine, method, recwarn):
    whole, out = tmp_path / "whole", tmp_path / "a"
    launch(experiment(method=method), whole, Execution(track=(mine,)))
    out.mkdir()
    (out / "away").touch()
    summary = launch(experiment(method=method), out, Execution(track=(mine,)))
    said = [str(one.message) for one in recwarn if "Mine" in str(one.message)]
    assert len(said) == 2
    assert said[1].endswith(f"lacks rounds 1 to 6; to send them: kinfed resume {out}")
    (out / "away").unlink()
    assert resume(out).scores == summary.scores
    assert [one["round"] for one in lines(out, "round")] == [1, 2, 3, 4, 5, 6]
    for late, live in zip(*(without_seconds(lines(folder, "round")) for folder in (out, whole)), strict=True):
        assert late == pytest.approx(live, rel=1e-5, abs=1e-6)
    assert [one["picture"] for one in lines(out, "round")] == [one["picture"] for one in lines(whole, "round")]


def test_a_finished_run_is_sent_to_another_tracker_when_asked(tmp_path, mine):
    launch(experiment("seeds=2", method="fedavg"), tmp_path / "a", Execution())
    assert not (tmp_path / "a" / "seed-0" / "track.json").exists()
    assert main(["resume", str(tmp_path / "a"), "--track", mine, "--quiet"]) == 0
    for seed in ("seed-0", "seed-1"):
        assert [one["round"] for one in lines(tmp_path / "a" / seed, "round")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tensorbord", "did you mean 'tensorboard'?"),
        ("mlflow", "export MLFLOW_TRACKING_URI="),
        ("nowhere.py:Mine", "cannot read nowhere.py"),
        ("half.py:Half", "track: 'half.py:Half' is not a tracker: it lacks record, end"),
        ("half.py:Broken", "track: 'half.py:Broken' cannot be made: ValueError: no"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_in_one_line(tmp_path, monkeypatch, capsys, name, problem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    half = (
        "class Half:\n    def begin(self, run): pass\n\nclass Broken:\n    def __init__(self): raise ValueError('no')\n"
    )
    (tmp_path / "half.py").write_text(half)
    assert main(["run", "local", "--track", name]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_what_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'kinfed\[mlflow\]'"):
        trackers.check(["mlflow"])


def test_a_run_without_a_folder_cannot_be_followed(mine):
    with pytest.raises(UsageError, match="needs the run's folder"), tracker_feed.followed([mine], None, 1, "learned"):
        pass


def curves(folder):
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def test_tensorboard_reads_the_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_feed, "PATIENCE", 300)  # where TensorFlow is installed, TensorBoard imports it

    def stop(history, rounds):
        if history.done == 4:
            raise KeyboardInterrupt

    out = tmp_path / "a"
    with pytest.raises(KeyboardInterrupt):
        launch(experiment(), out, Execution(track=("tensorboard",), progress=stop))
    assert [one.step for one in curves(out).Scalars("relation/entropy")] == [1, 2, 3, 4]
    resume(out)
    events = curves(out)
    rounds, scores = RunFolder(out).read_scores("mixed", "accuracy")
    for i, name in enumerate(RunFolder(out).read_summary().client_names):
        curve = events.Scalars(f"test/accuracy/mixed/client {name}")
        assert [one.step for one in curve] == rounds.tolist()
        assert [one.value for one in curve] == pytest.approx(scores[:, i].tolist(), rel=1e-6)
    assert [one.step for one in events.Images("relation")] == [1, 2, 3, 4, 5, 6]
    seconds = events.Scalars("spent/seconds")
    assert [b.wall_time - seconds[0].wall_time for b in seconds] == pytest.approx(
        [b.value - seconds[0].value for b in seconds], abs=1e-3
    )
    assert b"method.name" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.slow
def test_a_real_mlflow_server_has_every_round_once_although_it_was_away(tmp_path, mlflow_server, monkeypatch):
    from mlflow import MlflowClient

    address, start, stop = mlflow_server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setattr(tracker_feed, "PAUSES", (0.1, 0.2))
    out = tmp_path / "a"
    start()

    def away(history, rounds):
        if history.done == 2:
            time.sleep(3)  # so that the first round has been sent
            stop()
        if history.done == 4:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="mlflow fails"), pytest.raises(KeyboardInterrupt):
        launch(experiment(), out, Execution(track=("mlflow",), progress=away))
    start()
    resume(out)
    client = MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("kinfed").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", str(out))
    assert run.data.params["method.name"] == "fedaghn"
    rounds, scores = RunFolder(out).read_scores("mixed", "accuracy")
    for name in ("spent/seconds", "relation/entropy", "test/accuracy/mixed"):
        assert [one.step for one in client.get_metric_history(run.info.run_id, name)] == rounds.tolist()
    sent = [one.value for one in client.get_metric_history(run.info.run_id, "test/accuracy/mixed")]
    assert sent == pytest.approx(scores.mean(1).tolist(), rel=1e-6)
    pictures = [one.path for one in client.list_artifacts(run.info.run_id, "relation")]
    assert pictures == [f"relation/round-{round:05d}.png" for round in rounds]
