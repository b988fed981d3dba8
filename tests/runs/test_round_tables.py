"""The tables of a run by round."""

import pytest
import torch
from polars.testing import assert_series_equal
from torch import nn

import kinfed
from kinfed import SGD, Training, UsageError

NAMES = ["Köln, Süd", 'the "old" one', "line\nbreak", "", "NA"]


@pytest.fixture
def run():
    """Local training of five clients, whose names a careless table would not bring back."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=draw)
    client = [NAMES[i % 5] for i in range(200)]
    federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    training = Training(epochs=1, optimiser=SGD(0.1))
    return kinfed.fit(kinfed.Local(), federation, nn.Linear(3, 2), rounds=3, training=training, seed=4)


def test_rows_hold_every_score_once_and_those_of_the_selected_round_give_the_run_s_own(run):
    rows = run.scores
    assert rows.columns == ["seed", "round", "client", "model", "split", "metric", "value"]
    assert rows["seed"].unique().to_list() == [4]
    assert rows.select("round", "client", "model", "split", "metric").is_duplicated().any() is False
    at = run.history.select(run.history.chosen) + 1
    tests = rows.filter(round=at, model=run.history.chosen, split="test", metric="accuracy")
    assert tests["client"].to_list() == run.names
    assert tests["value"].mean() == pytest.approx(run.score())
    assert dict(zip(tests["client"], tests["value"], strict=True)) == {name: run.score(name) for name in run.names}


def test_the_rows_of_an_opened_run_are_those_of_the_run_that_was_trained(run, tmp_path):
    kinfed.save(run, tmp_path / "run")
    opened = kinfed.Run.open(tmp_path / "run", nn.Linear(3, 2)).scores
    assert opened.schema == run.scores.schema
    texts = [name for name in opened.columns if name != "value"]
    assert opened.select(texts).equals(run.scores.select(texts))
    assert_series_equal(opened["value"], run.scores["value"], rel_tol=1e-6)


def test_half_a_file_is_refused_and_so_are_scores_of_other_clients(run, tmp_path):
    kinfed.save(run, tmp_path / "run")
    opened, path = kinfed.Run.open(tmp_path / "run", nn.Linear(3, 2)), tmp_path / "run" / "history.csv"
    text = path.read_text()
    for half in (
        "",
        text[: len(text) // 2].rpartition(",")[0],
        text.replace("value", "worth", 1),
        text + "4,x,y,z,w,v",
    ):
        path.write_text(half)
        with pytest.raises(UsageError, match="incomplete; delete the folder"):
            _ = opened.scores
    path.write_text(text.replace("NA,", "NB,"))
    with pytest.raises(UsageError, match="do not belong together"):
        opened.folder.read_scores(opened.summary.selection.chosen, "accuracy")
    path.write_text(text.rstrip("\n").rpartition("\n")[0] + "\n")  # without its last row
    with pytest.raises(UsageError, match="incomplete; delete the folder"):
        opened.folder.read_scores(opened.summary.selection.chosen, text.rstrip("\n").rpartition("\n")[2].split(",")[4])
