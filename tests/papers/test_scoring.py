"""Which model of which round is a client's score, against the history read another way."""

import csv
import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from kinfed.errors import UsageError
from kinfed.runs.config import experiment
from kinfed.runs.launch import Job, run_job
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution
from kinfed_papers import published_table
from kinfed_papers.scoring import Scoring

RUN = {
    "method": "pfedgat",
    "rounds": 4,
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"epochs": 1, "optimiser": {"name": "sgd", "lr": 0.3}},
    "federation": {"dataset": "digits", "clients": 6, "partition": {"name": "pathological", "classes_per_client": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    run_job(Job("a run", experiment.resolve(RUN), path), Execution("loop"), None)
    return RunFolder(path)


@pytest.fixture(scope="module")
def scores(folder):
    """By split, model, round and client."""
    with folder.history.open() as file:
        return {
            (line["split"], line["model"], int(line["round"]), line["client"]): float(line["value"])
            for line in csv.DictReader(file)
            if line["metric"] == "accuracy"
        }


def test_each_client_at_its_own_best_point_over_rounds_and_kinds(folder, scores):
    for models in (("own", "mixed"), ("mixed", "own"), ("mixed",), ("own",)):
        expected = []
        for client in folder.read_summary().clients.names:
            best, test = -1.0, None
            for at in (1, 2, 3, 4):
                for model in models:
                    if scores["validation", model, at, str(client)] > best:  # the first of equals stays
                        best, test = (scores[split, model, at, str(client)] for split in ("validation", "test"))
            expected.append(test)
        assert Scoring(models, "own").read(folder, "accuracy") == pytest.approx(expected)


def test_one_round_for_all_clients(folder, scores):
    names, summary = folder.read_summary().clients.names, folder.read_summary()
    at = int(summary.scores["own"]["round"])
    assert Scoring(("own",), "mean").read(folder, "accuracy") == pytest.approx(
        [scores["test", "own", at, str(name)] for name in names]
    )
    assert Scoring(("mixed",), "last").read(folder, "accuracy") == pytest.approx(
        [scores["test", "mixed", 4, str(name)] for name in names]
    )
    means = {
        (r, m): np.mean([scores["validation", m, r, str(n)] for n in names])
        for r in (1, 2, 3, 4)
        for m in ("own", "mixed")
    }
    best = max(means, key=means.get)  # the first of equals
    mean = Scoring(("own", "mixed"), "mean").read(folder, "accuracy")
    assert mean == pytest.approx([scores["test", best[1], best[0], str(n)] for n in names])


def test_the_best_by_test_examples_is_never_below_and_is_said_to_read_them(folder):
    by_test, by_validation = (Scoring(("own", "mixed"), at) for at in ("test", "own"))
    assert (by_test.read(folder, "accuracy") >= by_validation.read(folder, "accuracy")).all()
    assert (by_test.reads_test, by_validation.reads_test) == (True, False)


def test_bad_protocols_are_refused_in_one_line(folder, tmp_path):
    with pytest.raises(UsageError, match=r"has no model 'tuned'; it has mixed, own"):
        Scoring(("tuned",), "own").read(folder, "accuracy")
    with pytest.raises(UsageError, match="round must be one of mean, own, last, test"):
        Scoring(("own",), "best")
    without = experiment.resolve(RUN | {"rounds": 1, "federation": {**RUN["federation"], "split": {"validation": 0}}})
    run_job(Job("a run", without, tmp_path), Execution("loop"), None)
    with pytest.raises(UsageError, match="no client has validation examples"):
        Scoring(("own",), "own").read(RunFolder(tmp_path), "accuracy")
    assert len(Scoring(("own",), "last").read(RunFolder(tmp_path), "accuracy")) == 6
    (tmp_path / "history.csv").unlink()
    with pytest.raises(UsageError, match="incomplete; delete the folder"):
        Scoring(("own",), "last").read(RunFolder(tmp_path), "accuracy")


def test_a_client_without_validation_examples_has_no_round_of_its_own():
    blind = np.array([[0.5, np.nan], [0.6, np.nan]])
    from kinfed_papers.scoring import _own

    with pytest.raises(UsageError, match="client b has no validation examples"):
        _own(blind, np.ones((2, 2)), 1, SimpleNamespace(), ["a", "b"])
    assert _own(blind, np.array([[1.0, np.nan], [2.0, np.nan]]), 1, SimpleNamespace(), ["a", "b"])[0] == 2.0


@pytest.mark.parametrize("name", published_table.tables())
def test_every_row_of_a_table_says_what_it_scores_and_why(name):
    table = published_table.load(name)
    for row in table.rows.values():
        if not row.kind and not row.missing:
            assert row.scoring.models
            assert row.scoring.why
            assert not row.scoring.reads_test


def test_the_page_on_protocols_is_what_its_file_of_scores_gives(monkeypatch, tmp_path):
    evidence = published_table.PAPERS.parents[1] / "evidence"
    if not evidence.is_dir():
        pytest.skip("the page is in a checkout, not in an installed kinfed")
    monkeypatch.syspath_prepend(str(evidence))
    page = importlib.import_module("protocols")
    text = page.PAGE.read_text()
    monkeypatch.setattr(page, "PAGE", tmp_path / "protocols.md")
    page.write(page.read(evidence.parent / "docs" / "papers" / "protocols.csv"))
    assert page.PAGE.read_text().partition("<!--")[2] in text
