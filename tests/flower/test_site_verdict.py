"""At the end each site is told what learning from others was worth to it, and the server what its mean scores say."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kinfed
from kinfed import UsageError
from kinfed.core.tasks import Classification
from kinfed.data.federation import Federation
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution
from kinfed.verdict.dependence import Blocks
from kinfed.verdict.one_client import judge_one
from kinfed_flower import plan
from kinfed_flower.server import site_references
from kinfed_flower.server.site_references import read_baselines


def told(folder, name):
    """What a site keeps of its verdict on the run of this folder."""
    experiment = json.loads((folder / "out" / "summary.json").read_text())["sites"]["experiment"]
    return json.loads((folder / "sites" / name / name / experiment / "verdict.json").read_text())


def whole(examples):
    """The federation of all sites' examples."""
    rows, x, y, at = {"train": [], "validation": [], "test": []}, [], [], 0
    for arrays in examples.values():
        for split, parts in rows.items():
            x.append(torch.from_numpy(arrays[f"x_{split}"]))
            y.append(torch.from_numpy(arrays[f"y_{split}"]))
            parts.append(torch.arange(at, at + len(x[-1])))
            at += len(x[-1])
    return Federation(torch.cat(x), torch.cat(y), rows, Classification(3), tuple(examples))


def test_each_site_compares_with_learning_alone_and_with_one_model_for_all(trial, tmp_path, examples, capsys):
    """The scores are those of the run, of FedAvg by the same sites, and of Local in a simulation."""
    made = trial("fedamp", rounds=2, beside=["local", "fedavg"])
    made.planned = plan.resolve({**made.planned.table, "evaluate_every": 2})
    summary = made.serve()
    learning = made.planned.learning
    alone = kinfed.fit(
        kinfed.Local(),
        whole(examples),
        made.planned.model((6,), 3).export(made.planned.model((6,), 3).theta),
        rounds=learning.rounds,
        training=learning.training,
        seed=learning.seed,
        execution=Execution("loop"),
    )
    shared = RunFolder(tmp_path / "out").reference("fedavg").read_summary()
    screen = capsys.readouterr().err
    for i, name in enumerate(summary.clients.names):
        known = told(tmp_path, name)
        assert known["scores"]["fedamp"] == pytest.approx(summary.clients.scores[summary.selection.chosen][i])
        lines = {one["name"]: one["mean"] for one in known["baselines"]}
        assert lines["Local"] == pytest.approx(float(alone.history.test("own")[i]))
        assert known["scores"]["alone"] == pytest.approx(lines[known["baseline"]])
        assert known["scores"]["fedavg"] == pytest.approx(shared.clients.scores[shared.selection.chosen][i])
        assert f"kinfed: {known['sentence']}" in screen
        assert {*lines} == {"Local", "the client's commonest label", "a logistic regression for each client"}
        assert f"{known['baseline']}" in known["sentence"]
        assert not known["problems"]
    mine = torch.tensor(summary.clients.scores[summary.selection.chosen])
    over = summary.verdict["over"]
    each = [{one["name"]: one["mean"] for one in told(tmp_path, name)["baselines"]} for name in summary.clients.names]
    baseline = torch.tensor([one[summary.verdict["baselines"]["alone"]] for one in each])
    assert over["alone"]["mean"] == pytest.approx(float((mine - baseline).mean()), abs=1e-6)
    assert over["pooled"]["mean"] == pytest.approx(
        float((mine - torch.tensor(shared.clients.scores[shared.selection.chosen])).mean()), abs=1e-6
    )
    # The site has two experiments, of which one was to compare with.
    state = kinfed.load_model(tmp_path / "sites" / "a" / "a").state_dict()
    assert (
        state.keys()
        == made.planned.model((6,), 3).layout.tensors(torch.zeros(made.planned.model((6,), 3).layout.size)).keys()
    )
    replies = [message for _, kind, message in made.grid.sent if kind == "verdict"]
    assert len(replies) == 6
    assert all({*message.fields} == {"experiment", "fedavg"} and not message.arrays for message in replies)


def test_a_model_learnt_alone_is_kept_and_fedavg_is_compared_with_it_alone(trial, tmp_path):
    made = trial("fedavg", rounds=1, beside=["local", "fedavg"])
    summary = made.serve()
    assert not (tmp_path / "out" / "beside").exists()
    assert {*told(tmp_path, "a")["scores"]} == {"fedavg", "alone"}
    assert (tmp_path / "sites" / "a" / "a" / summary.sites.experiment / "alone.safetensors").exists()
    assert summary.verdict["over"].keys() == {"alone"}


def test_local_is_compared_with_nothing(trial, tmp_path):
    assert trial("local", rounds=1, beside=["local", "fedavg"]).serve().verdict is None


def test_a_run_without_fedavg_to_compare_with_goes_on(trial, tmp_path, monkeypatch):
    """As where the sites are gone when it begins: the rest is compared."""

    def fails(*_):
        raise kinfed.RunError("only 0 of 6 clients gave a usable reply")

    made = trial("fedamp", rounds=1, beside=["local", "fedavg"])
    monkeypatch.setattr(site_references, "config", SimpleNamespace(write=fails))
    assert made.serve().verdict["over"].keys() == {"alone"}
    assert any("fedavg beside it failed" in line for line in made.lines)


def test_what_a_run_can_be_compared_with(trial):
    with pytest.raises(UsageError, match=r"flower\.beside must be"):
        trial("fedamp", beside=["fedavg"])


def scores(*values):
    return np.array(values, np.float64)


def test_the_sentence_says_what_the_test_examples_say():
    """By hand: 8 of 8 better is p = 2 / 2**8; 1 of 1 is no evidence."""
    mine, alone = scores(1, 1, 1, 1, 1, 1, 1, 1, 0), scores(0, 0, 0, 0, 0, 0, 0, 0, 0)

    def judged(mine, local, fedavg=None):
        return judge_one("sfl", mine, ("Local", local), fedavg, metric="accuracy", higher_is_better=True, unit="%")

    found = judged(mine, alone)
    assert found.sentence == (
        "Learning from others helps here: accuracy 88.9 % with sfl, 0.0 % with the best baseline without others, "
        "Local. It is better on 8 and worse on 0 of 9 test examples (p = 0.0078)."
    )
    assert found.over["alone"].p == pytest.approx(2 / 2**8)
    not_enough = "Cannot tell whether learning from others helps here"
    assert judged(scores(1, 0), scores(0, 0)).sentence.startswith(not_enough)
    assert judged(scores(0, 0), scores(1, 0)).sentence.startswith(not_enough)  # as little evidence against
    assert judged(alone, alone).sentence.startswith(not_enough)
    assert judged(alone, mine).sentence.startswith("Learning from others does not help here: keep the baseline")
    assert judged(alone, alone, mine).sentence.startswith("One model for all does better here")
    assert judged(mine, alone, mine).sentence.startswith("One model for all does as well here")
    assert judged(mine, alone, alone).sentence.startswith("Learning from others helps here")
    errors = judge_one("sfl", scores(*[1.0] * 9), ("a ridge", scores(*[2.0] * 9)), metric="mae", higher_is_better=False)
    assert errors.sentence.startswith("Learning from others helps here: mae 1 with sfl, 2 with the best baseline")
    groups = Blocks([[np.arange(9) // 3]], declared=True)  # three groups of three decide nothing
    few = judge_one("sfl", mine, ("Local", alone), metric="accuracy", higher_is_better=True, blocks=groups)
    assert few.sentence.startswith(not_enough)
    assert few.sentence.endswith("Test examples of one group count as one observation.")
    whole = judge_one("sfl", scores(0.9), ("Local", scores(0.5)), metric="auc", higher_is_better=True)
    assert whole.sentence == (
        "Cannot tell whether learning from others helps here: auc 0.9 with sfl, 0.5 with the best baseline without "
        "others, Local."
    )


@pytest.mark.parametrize(
    "words",
    [None, {}, {"a": [0, 1]}, {"Local": 3}, {"Local": [1, "x"]}, {"Local": [0.5, 2.0]}, {"Local": [0.1, 1e400]}],
)
def test_a_site_cannot_make_up_scores_that_are_none(words):
    with pytest.raises((TypeError, ValueError)):
        read_baselines(words, Classification(2))
    assert read_baselines({"Local": [None, 0.5]}, Classification(2))["Local"].test == 0.5
