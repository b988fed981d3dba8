"""Runs that are followed from outside while they go on."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from matplotlib.image import imsave

from kinfed.cli import main
from kinfed.core.history import Cost, History, Spent
from kinfed.core.tasks import Classification
from kinfed.errors import UsageError
from kinfed.runs import trackers
from kinfed.runs.config import experiment as config
from kinfed.runs.launch import launch, resume
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution

SMALL = ["federation.clients=4", "federation.partition.groups=2", "model=linear", "rounds=6"]
OWN = '''
import json

class Mine:
    """Appends to a file of its own, which outlives the process, and is away while there is a file `away`."""

    def __init__(self, run):
        self.here = run.folder
        self.write(begin=run.id, name=run.name, settings=run.settings)

    def write(self, **line):
        if (self.here / "away").exists():
            raise ConnectionError("http://ada:pa55word@127.0.0.1:1: nobody answers")
        with (self.here / "mine.jsonl").open("a") as file:
            print(json.dumps(line), file=file)

    def log(self, step, numbers, picture=None):
        drawn = bool(picture) and picture.read_bytes()[1:4] == b"PNG"
        self.write(round=step, values=numbers, picture=drawn)

    def end(self, outcome):
        self.write(end=outcome)
'''


def dot(path):
    """A picture that takes no time to draw."""
    imsave(path, np.zeros((1, 1)))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setattr(trackers, "relation_heatmap", lambda relation, names, origin, path, layers: dot(path))
    return f"{tmp_path / 'mine.py'}:Mine"


def lines(folder, kind):
    return [one for one in map(json.loads, (folder / "mine.jsonl").read_text().splitlines()) if kind in one]


def experiment(*changes, method="fedaghn"):
    return config.resolve(config.read(method, [*SMALL, *changes]))


def without_seconds(rounds):
    """Seconds differ between runs."""
    return [{name: one["values"][name] for name in sorted(one["values"]) if "seconds" not in name} for one in rounds]


def test_what_is_logged_of_a_round():
    scores = {("own", "test", "accuracy"): torch.tensor([0.5, 1.0]), ("own", "test", "loss"): torch.tensor([1.0, 3.0])}
    notes = {"step": torch.tensor(7.0), "cluster": torch.tensor([1.0, torch.nan])}
    relation = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    cost = Cost(spent=[Spent(2, 10, 20, 30, 1.5)])
    history = History(("a", "b"), Classification(2), [2], [scores], [relation], [notes], cost=cost)
    values = trackers.numbers_of(history, 0)
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


def test_a_long_run_has_ten_pictures(tmp_path, mine):
    launch(experiment("rounds=25"), tmp_path / "a", Execution(track=(mine,)))
    drawn = [one["round"] for one in lines(tmp_path / "a", "round") if one["picture"]]
    assert drawn == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]


@pytest.mark.parametrize("seconds", [0, 1e9], ids=["a checkpoint each round", "none before the end"])
def test_a_run_that_is_resumed_has_neither_doubles_nor_gaps(tmp_path, mine, seconds):
    whole, out = tmp_path / "whole", tmp_path / "a"
    launch(experiment(), whole, Execution(track=(mine,)))

    def stop(history, rounds):
        if history.cost.done == 4:
            raise KeyboardInterrupt

    def die(history, rounds):
        if history.cost.done == 4:
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


def test_a_tracker_that_fails_is_left_out_and_the_run_ends_as_without(tmp_path, mine, recwarn):
    out = tmp_path / "a"

    def leave(history, rounds):
        if history.cost.done == 3:
            (out / "away").touch()
        if history.cost.done == 5:
            (out / "away").unlink()

    summary = launch(experiment(), out, Execution(track=(mine,), progress=leave))
    assert [one["round"] for one in lines(out, "round")] == [1, 2]
    assert summary.scores == launch(experiment(), tmp_path / "b", Execution()).scores
    (said,) = [str(one.message) for one in recwarn if "Mine" in str(one.message)]
    assert said.endswith("fails, and the run goes on without: ConnectionError: http://127.0.0.1:1: nobody answers")


def test_an_interrupted_run_is_sent_whole_to_another_tracker_and_a_finished_one_is_not(tmp_path, mine, capsys):
    def stop(history, rounds):
        if history.cost.done == 4:
            raise KeyboardInterrupt

    out = tmp_path / "a"
    with pytest.raises(KeyboardInterrupt):
        launch(experiment(), out, Execution(progress=stop))
    assert main(["resume", str(out), "--track", mine, "--quiet"]) == 0
    assert [one["round"] for one in lines(out, "round")] == [1, 2, 3, 4, 5, 6]
    assert main(["resume", str(out), "--track", mine, "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("a has finished: trackers follow a run while it goes on; leave --track out")


def test_weights_and_biases_is_given_the_run_and_each_round(tmp_path, monkeypatch):
    """By a module in its place, which notes what it is asked."""
    asked = []

    class Run:
        def log(self, numbers, step):
            asked.append((step, {*numbers} >= {"test/accuracy/mixed", "relation"}))

        def finish(self, exit_code):
            asked.append(exit_code)

    stub = ModuleType("wandb")
    stub.__spec__ = ModuleSpec("wandb", None)
    stub.Image = Path
    stub.init = lambda **how: asked.append((how["project"], how["name"], how["config"]["rounds"])) or Run()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    launch(experiment("rounds=2"), tmp_path / "a", Execution(track=("wandb",)))
    assert asked == [("kinfed", str(tmp_path / "a"), "2"), (1, True), (2, True), 0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tensorbord", "did you mean 'tensorboard'?"),
        ("mlflow", "export MLFLOW_TRACKING_URI="),
        ("nowhere.py:Mine", "cannot read nowhere.py"),
        ("half.py:Half", "track: 'half.py:Half' is not a tracker: it lacks log, end"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_in_one_line(tmp_path, monkeypatch, capsys, name, problem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "half.py").write_text("class Half:\n    def begin(self, run): pass\n")
    assert main(["run", "local", "--track", name]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_what_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'kinfed\[mlflow\]'"):
        trackers.check(["mlflow"])


def test_a_run_without_a_folder_cannot_be_followed(mine):
    with pytest.raises(UsageError, match="needs the run's folder"), trackers.track_run([mine], None, 1):
        pass


def curves(folder):
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def test_tensorboard_reads_the_whole_run(tmp_path):
    def stop(history, rounds):
        if history.cost.done == 4:
            raise KeyboardInterrupt

    out = tmp_path / "a"
    with pytest.raises(KeyboardInterrupt):
        launch(experiment(), out, Execution(track=("tensorboard",), progress=stop))
    assert [one.step for one in curves(out).Scalars("relation/entropy")] == [1, 2, 3, 4]
    resume(out)
    events = curves(out)
    rounds, scores = RunFolder(out).read_scores("mixed", "accuracy")
    for i, name in enumerate(RunFolder(out).read_summary().clients.names):
        curve = events.Scalars(f"test/accuracy/mixed/client {name}")
        assert [one.step for one in curve] == rounds.tolist()
        assert [one.value for one in curve] == pytest.approx(scores[:, i].tolist(), rel=1e-6)
    assert [one.step for one in events.Images("relation")] == [1, 2, 3, 4, 5, 6]
    assert b"method.name" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.slow
def test_a_real_mlflow_server_has_every_round_once(tmp_path, mlflow_server, monkeypatch):
    from mlflow import MlflowClient

    address, start, _ = mlflow_server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    out = tmp_path / "a"
    start()

    def interrupt(history, rounds):
        if history.cost.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(experiment(), out, Execution(track=("mlflow",), progress=interrupt))
    resume(out)
    client = MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("kinfed").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", str(out))
    assert run.data.params["method.name"] == "fedaghn"
    rounds, scores = RunFolder(out).read_scores("mixed", "accuracy")
    for name in ("spent/seconds", "relation/entropy", "test/accuracy/mixed/mean"):
        assert [one.step for one in client.get_metric_history(run.info.run_id, name)] == rounds.tolist()
    sent = [one.value for one in client.get_metric_history(run.info.run_id, "test/accuracy/mixed/mean")]
    assert sent == pytest.approx(scores.mean(1).tolist(), rel=1e-6)
    pictures = [one.path for one in client.list_artifacts(run.info.run_id, "relation")]
    assert pictures == [f"relation/round-{round:05d}.png" for round in rounds]


def test_a_long_name_is_cut_to_what_mlflow_takes_and_stays_another_one():
    first, second = (trackers._mlflow_name(f"test/client {'Krankenhaus ' * 30}{i}") for i in range(2))
    assert first != second
    assert max(len(first.encode()), len(trackers._mlflow_name("val/client " + "ä" * 200).encode())) <= 250
    assert trackers._mlflow_name("val/client a:b") == "val/client a:3a:b"


def test_a_store_of_files_keeps_the_metrics_of_clients_with_long_names(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    tracker = trackers.MLflow(trackers.Tracked("1", "a run", tmp_path, {}))
    name, client = "test/accuracy/own", "Krankenhaus " * 30
    tracker.log(1, {name: 0.5, f"{name}/lowest": 0.25, f"{name}/client {client}": 0.25})
    tracker.end("finished")
    store = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    [run] = store.search_runs([store.get_experiment_by_name("kinfed").experiment_id])
    assert run.info.status == "FINISHED"
    assert sorted(run.data.metrics.values()) == [0.25, 0.25, 0.5]
    assert run.data.metrics[f"{name}/mean"] == 0.5
