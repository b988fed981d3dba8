"""Trackers of a federation's run, made in the run's own process."""

import csv
import json
from statistics import fmean

import pytest

from kinfed.cli import main
from kinfed.errors import RunError
from kinfed.runs import trackers
from kinfed.runs.config import experiment
from kinfed.runs.run_folder import RunFolder
from kinfed_flower.server.server import serve
from kinfed_flower.wire.transport import GridTransport

OWN = '''
import json

class Mine:
    """Appends to a file of the run's folder; is away while there is a file `away`."""

    def __init__(self, run):
        self.path = run.folder / "mine.jsonl"

    def log(self, step, numbers, picture=None):
        if (self.path.parent / "away").exists():
            raise ConnectionError("nobody answers")
        with self.path.open("a") as file:
            print(json.dumps({"round": step, "values": numbers}), file=file)

    def end(self, outcome):
        with self.path.open("a") as file:
            print(json.dumps({"end": outcome}), file=file)
'''


@pytest.fixture
def out(tmp_path, monkeypatch):
    """The folder of a run that a tracker of one's own is to follow."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setattr(trackers, "PICTURES", 0)
    (folder := tmp_path / "followed").mkdir()
    return folder


def carry_out(trial, out, log=lambda text: None, track=()):
    experiment.write(trial.planned.table, out / "config.toml")
    return serve(trial.planned, GridTransport(trial.grid), out, log=log, poll=0.001, track=track)


def own(out):
    return [f"{out.parent / 'mine.py'}:Mine"]


def sent(out, kind):
    return [one for one in map(json.loads, (out / "mine.jsonl").read_text().splitlines()) if kind in one]


def test_a_federations_run_is_followed_and_a_resumed_one_goes_on(trial, out):
    trial = trial("fedaghn", rounds=4)

    def stop(text):
        if text.startswith("round 2 of 4"):
            raise RunError("the process ended")

    with pytest.raises(RunError, match="the process ended"):
        carry_out(trial, out, stop, own(out))
    carry_out(trial, out)  # resumed, it is followed as before
    assert [one["round"] for one in sent(out, "round")] == [1, 2, 3, 4]
    assert [one["end"] for one in sent(out, "end")] == ["failed", "finished"]
    with (out / "history.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["round"], r["split"], r["metric"]) == ("4", "test", "accuracy")]
    for model in {row["model"] for row in rows}:
        mean = fmean(float(row["value"]) for row in rows if row["model"] == model)
        assert sent(out, "round")[-1]["values"][f"test/accuracy/{model}"] == pytest.approx(mean, rel=1e-5)
    with (out / "cost.csv").open(newline="") as file:  # bytes of all messages, as they are counted in the end
        spent = [(float(row["bytes_down"]), float(row["bytes_up"])) for row in csv.DictReader(file)]
    told = [one["values"] for one in sent(out, "round")]
    assert [(one["spent/bytes_down"], one["spent/bytes_up"]) for one in told] == spent


def test_a_tracker_that_is_away_holds_up_nobody(trial, out, recwarn, capsys):
    (out / "away").touch()
    assert carry_out(trial("fedavg", rounds=2), out, track=own(out)).rounds == 2
    (said,) = [str(one.message) for one in recwarn if "Mine" in str(one.message)]
    assert said.endswith("fails, and the run goes on without: ConnectionError: nobody answers")
    (out / "config.toml").write_text("rounds = 2\n")
    assert main(["flower", "run", str(out), "--track", "tensorboard"]) == 2
    assert "this one has finished; leave --track out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_mlflow_server_has_every_round_of_a_federation(trial, tmp_path, mlflow_server, monkeypatch):
    from mlflow import MlflowClient

    address, start, _ = mlflow_server
    monkeypatch.setattr(trackers, "PICTURES", 0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sites")
    (out := tmp_path / "followed").mkdir()
    start()
    carry_out(trial("fedaghn", rounds=4), out, track=["mlflow"])
    client = MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("sites").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["method.name"] == "fedaghn"
    rounds, scores = RunFolder(out).read_scores("mixed", "accuracy")
    sent = client.get_metric_history(run.info.run_id, "test/accuracy/mixed/mean")
    assert [one.step for one in sent] == rounds.tolist() == [1, 2, 3, 4]
    assert [one.value for one in sent] == pytest.approx(scores.mean(1).tolist(), rel=1e-6)
