"""A run that leaks says so wherever its scores go."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from kinfed import Federation, Training, fit
from kinfed.cli import main
from kinfed.core import engine
from kinfed.core.history import History
from kinfed.core.round_selection import select_model
from kinfed.core.tasks import Classification
from kinfed.methods import FedAvg
from kinfed.report.tables.compare import compare
from kinfed.runs.relations_file import read_relations, write_relations
from kinfed.simulation.execution import Execution

SMALL = [
    "rounds=2",
    "federation.clients=4",
    "federation.partition.groups=2",
    "method.heads=2",
    "method.width=2",
]


@pytest.fixture
def words(monkeypatch):
    """What is written in each picture, by file name."""
    found, savefig = {}, Figure.savefig

    def watch(figure, path, *rest, **how):
        texts = [t.get_text() for axes in figure.axes for t in (axes.title, axes.yaxis.label, axes._left_title)]
        found[str(path).rpartition("/")[2]] = " ".join(texts)
        return savefig(figure, path, *rest, **how)

    monkeypatch.setattr(Figure, "savefig", watch)
    return found


@pytest.mark.pictures
@pytest.mark.parametrize(("feedback", "leaks"), [("test", True), ("train", False)])
def test_results_that_saw_test_examples_are_marked_everywhere(feedback, leaks, tmp_path, capsys, words):
    out = tmp_path / "a"
    asked = ["run", "pfedgat", f"method.feedback={feedback}", *SMALL, "--out", str(out)]
    assert main([*asked, "--json"]) == 0
    said = capsys.readouterr()
    assert ("LEAKING: the method used test examples as feedback" in said.err) == leaks
    for summary in (json.loads(said.out), json.loads((out / "summary.json").read_text())):
        assert summary["selection"]["caution"] == "the method used test examples as feedback" * leaks
    table = pd.read_csv(out / "history.csv")
    assert list(table.columns)[:6] == ["round", "client", "model", "split", "metric", "value"]
    if leaks:
        assert (table.caution == "the method used test examples as feedback").all()
    else:
        assert len(table.columns) == 6
    pictures = [text for name, text in words.items() if "classes" not in name]
    assert len(pictures) == 3
    assert all(("LEAKING" in text) == leaks for text in pictures), words
    assert compare([out]).to_dict()["runs"][0]["leaking"] == leaks
    assert main(["compare", str(out)]) == 0
    assert ("* leaking" in capsys.readouterr().out) == leaks


def test_where_nobody_has_a_validation_score_the_last_round_is_taken():
    none = torch.full((2,), torch.nan)
    keys = ("own", "validation", "accuracy"), ("own", "test", "accuracy")
    history = History(("a", "b"), Classification(2), rounds=[0, 1, 2], scores=[dict.fromkeys(keys, none)] * 3)
    assert history.select("own") == 2
    history.scores[1] = dict.fromkeys(keys, torch.tensor([torch.nan, 0.5]))
    assert history.select("own") == 1


@pytest.mark.parametrize("higher", [True, False])
def test_a_model_without_a_score_is_never_preferred(higher):
    scores = {"tuned": {"validation": math.nan}, "shared": {"validation": 0.5}, "own": {"validation": math.nan}}
    assert select_model(scores, higher) == "shared"


def test_large_relations_are_rounded_but_for_the_selected_round(tmp_path, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    history = History(("a", "b", "c"), Classification(2), rounds=[0, 1, 2], chosen="own")
    history.origin = "learned"
    history.kept_relations = [torch.rand(3, 3, generator=draw) / 3 for _ in range(3)]
    monkeypatch.setattr(History, "select", lambda history, model: 1)
    path = tmp_path / "relations.npz"
    exact = torch.stack(history.relations).numpy()
    write_relations(history, path, [])
    assert (read_relations(path, 2).kept == exact).all()
    monkeypatch.setattr("kinfed.runs.relations_file.EXACT", 100)
    write_relations(history, path, [])
    relations = read_relations(path, 2)
    assert (relations.rounds.tolist(), relations.layers, relations.origin) == ([1, 2, 3], [], "learned")
    weights = relations.kept
    assert (weights[1] == exact[1]).all()
    np.testing.assert_allclose(weights, exact, rtol=2**-11)
    assert (weights[0] != exact[0]).any()
    assert np.load(path)["relation"].dtype == np.float16
    history.kept_relations[0][0, 0] = 1e6  # more than float16 holds
    write_relations(history, path, [])
    assert read_relations(path, 2).kept[0, 0, 0] == 1e6


def test_relations_take_no_more_room_than_they_need(tmp_path, monkeypatch):
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    federation = Federation.from_arrays(x, (x.sum(1) > 0).long(), torch.arange(6).repeat_interleave(10))

    def run():
        how = {"training": Training(epochs=1, batch=4), "execution": Execution("loop")}
        return fit(FedAvg(), federation, torch.nn.Linear(5, 2), rounds=3, **how)

    history = run().history
    assert [list(relation.shape) for relation in history.kept_relations] == [[6]] * 3  # one row, seen by everybody
    assert [list(relation.shape) for relation in history.relations] == [[6, 6]] * 3
    write_relations(history, tmp_path / "all.npz", [])
    monkeypatch.setattr("kinfed.runs.relations_file.WRITTEN", 3 * 4 * 36 - 1)
    write_relations(history, tmp_path / "one.npz", [])
    whole, part = (np.load(tmp_path / f"{name}.npz") for name in ("all", "one"))
    assert whole["relation"].shape == (3, 6, 6)
    assert part["round"].tolist() == [history.select(history.chosen) + 1]
    assert (part["relation"][0] == whole["relation"][part["round"][0] - 1]).all()
    monkeypatch.undo()
    monkeypatch.setattr(engine, "RELATED", 5)
    few = run()
    assert few.history.relations == []
    assert few.relation is None
    assert few.history.scores[-1].keys() == history.scores[-1].keys()
