import numpy as np
import pytest
import torch

from kinfed.errors import RunError, UsageError
from kinfed.runs.config import experiment as config
from kinfed.search import study
from kinfed.search.study import Study
from kinfed.simulation.execution import Execution
from kinfed_papers.analyses.curves import curves

SMALL = ["rounds=3", "federation.clients=4", "federation.partition.groups=2", "model=linear"]


@pytest.fixture
def ask(tmp_path):
    """A study of a method on few clients, and what it has said."""

    def make(method, *overrides):
        said = []
        return Study(config.read(method, [*SMALL, *overrides]), Execution(), tmp_path, said.append), said

    return make


def test_a_run_with_seeds_is_read_back(ask, tmp_path):
    asked, said = ask("fedaghn", "seeds=2", "seed=9")
    folder = asked.run("a")
    assert folder.path == tmp_path / "runs" / "a"
    assert said == ["a"]
    in_order = [folder.path / "seed-9", folder.path / "seed-10"]  # of seeds, not of letters
    assert [one.path for one in folder.repeats()] == in_order
    summary, each = folder.read_summary(), [one.read_summary() for one in folder.repeats()]
    found, model = study.score(folder), summary.selection.chosen
    assert (found.model, found.metric, found.higher_is_better) == (model, "accuracy", True)
    assert found.test == pytest.approx([one.scores[model]["mean"] for one in each])
    assert found.validation == pytest.approx(np.mean([one.scores[model]["validation"] for one in each]))
    assert found.row() == {
        "model": model,
        "validation accuracy (%)": pytest.approx(100 * found.validation),
        "test accuracy (%)": pytest.approx(100 * summary.scores[model]["mean"]),
        "over clients": pytest.approx(100 * summary.scores[model]["std"]),
        "over seeds": pytest.approx(100 * summary.scores[model]["std_seeds"]),
    }
    rounds, tests = study.scores_by_round(folder, model)
    assert rounds.tolist() == [1, 2, 3]
    assert tests.shape == (2, 3, 4)
    for one, scores in zip(each, tests, strict=True):
        at = one.scores[model]["round"]
        assert scores[at - 1] == pytest.approx(one.clients.scores[model], abs=1e-6)
    each[0].scores[each[0].selection.chosen]["round"] = 2
    folder.of_seed(9).write_summary(each[0])
    first = folder.of_seed(9).read_relations()
    assert first.rounds[first.selected] == 2
    assert first.weights.shape == (3, 1, 4, 4)
    assert (first.layers, first.origin) == (["head"], "learned")


def test_a_run_that_fails_ends_none_of_the_others(ask, tmp_path):
    asked, said = ask("fedavg")
    names = {"a": ["training.optimiser.lr=1e38"], "b": ["rounds=1"]}
    with pytest.raises(RunError, match="round 1: training diverged"):
        asked.runs(names)
    assert said == ["a", "b"]
    assert (tmp_path / "runs/b/summary.json").exists()
    failed = []
    assert list(asked.runs(names, failed=failed)) == ["b"]
    assert len(failed) == 1
    assert failed[0].startswith("a failed: round 1: training diverged")
    with pytest.raises(RunError, match="round 1: training diverged"):
        asked.runs({"a": names["a"]}, failed=[])


def test_attackers_do_not_count(ask, tmp_path):
    asked, _ = ask("fedavg", "attack.name=label_flip", "attack.share=0.5", "seeds=2")
    folder = asked.run("a")
    found = study.score(folder)
    each = [one.read_summary().attack for one in folder.repeats()]
    assert found.test == pytest.approx([one["scores"][found.model]["mean"] for one in each])
    assert found.over_clients == pytest.approx(np.mean([one["scores"][found.model]["std"] for one in each]))
    _, tests = study.scores_by_round(folder, found.model)
    names = folder.of_seed(0).read_summary().clients.names
    assert [[names[i] for i in np.flatnonzero(np.isnan(one[0]))] for one in tests] == [a["attackers"] for a in each]
    row = curves(asked, ["fedavg"]).rows[0]
    assert row["last"] == pytest.approx(100 * np.nanmean(tests[:, -1]))


def test_federations_are_those_of_the_seeds(ask):
    asked, _ = ask("local", "seeds=2", "seed=5")
    first, second = asked.federations()
    again = asked.experiment().federation(None, 6)
    assert all(torch.equal(a, b) for a, b in zip(second.rows["train"], again.rows["train"], strict=True))
    assert any(
        len(a) != len(b) or (a != b).any() for a, b in zip(first.rows["train"], second.rows["train"], strict=True)
    )
    assert len(asked.federations(["federation.clients=6", "seeds=1"])[0]) == 6


def test_the_config_of_every_run_is_checked_before_the_first(ask, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("kinfed.runs.launch.run_job", lambda job, *_: begun.append(job.folder))
    asked, said = ask("local")
    with pytest.raises(UsageError, match="unknown key 'roundz'"):
        asked.runs({"a": [], "b": ["roundz=3"]})
    with pytest.raises(UsageError, match="nothing to run"):
        asked.runs({})
    assert (begun, said) == ([], [])
    asked.runs({"a": [], "b": ["rounds=1"]})
    assert begun == [tmp_path / "runs" / "a", tmp_path / "runs" / "b"]
    assert said == ["a", "b"]


def test_a_run_with_one_seed_has_no_spread_over_seeds_and_perhaps_no_relations(ask):
    folder = ask("pfedhn")[0].run("a")
    assert [one.path for one in folder.repeats()] == [folder.path]
    assert study.score(folder).row()["over seeds"] is None
    with pytest.raises(UsageError, match="pfedhn mixes no models, so it has no weights between clients"):
        folder.read_relations()


@pytest.mark.parametrize("value", [3, 0.1, True, "a b", 'say "x"', "naïve/é", ["a", "b"], 1e-5])
def test_a_setting_comes_back_as_it_was(value):
    assert config.override({}, [study.setting("a.b", value)]) == {"a": {"b": value}}
