"""Training that ends when validation stops improving: the round by hand, interruptions, and what refuses it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import kinfed
from kinfed.cli import main
from kinfed.core.engine import Rounds
from kinfed.core.fleet import Evaluation
from kinfed.core.history import History, Recorder
from kinfed.core.tasks import Classification
from kinfed.errors import UsageError
from kinfed.runs.config import experiment as config
from kinfed.runs.further_rounds import further
from kinfed.runs.run_folder import RunFolder
from kinfed.search.study import scores_by_round
from kinfed_flower import plan

DIGITS = ["federation.dataset=digits", "federation.clients=4", "federation.split.examples=20"]


def read(*overrides):
    return config.read("fedavg", [*DIGITS, *overrides])


@pytest.mark.parametrize(
    ("best", "size", "share", "every", "ended"),
    [
        (9, 1000, 1.0, 1, 15),  # 15 - 10 rounds are more than 4, and than a quarter of 15
        (39, 1000, 1.0, 1, 54),  # 54 - 40 are more than 13.5
        (9, 20, 1.0, 1, 50),  # two steps a round: a hundred take 50
        (9, 20, 0.5, 1, 100),  # of rounds in which half of the clients take part, twice as many
        (9, 1000, 1.0, 4, 20),  # scored after 4, 8, 12, ... rounds: the best after 12, and 17 is no such round
        (199, 1000, 1.0, 1, 200),  # it never stops improving
    ],
)
def test_where_training_ends_by_hand(best, size, share, every, ended):
    training = kinfed.Training(epochs=1, batch=10)
    roster = SimpleNamespace(training=training, sizes=torch.tensor([size, 5000]))
    recorder, done = Recorder(History(("a", "b"), Classification(2))), 0
    rounds = Rounds(200, every, patience=0.25)
    for round in rounds.go_on(0, recorder, roster, share):
        score = torch.full((2,), min(round, best) / 200)
        scored = Evaluation({("own", split, "accuracy"): score for split in ("validation", "test")}, {"own": ()})
        recorder.add(round, 0, 0, scored if rounds.is_due(round) else None)
        done = round + 1
    assert done == ended


def fit(rounds="auto", **how):
    return kinfed.fit(kinfed.FedAvg(), config.resolve(read()).federation(None, 0), rounds=rounds, **how)


def test_an_interrupted_run_ends_in_the_same_round_with_the_same_bits(tmp_path):
    whole = fit()
    done = whole.history.cost.done
    assert 25 <= done < 200  # two batches, twice: four steps in a round
    assert done - 1 - whole.history.select(whole.history.chosen) > done / 4
    for round in (done // 2, done - 1, done):

        def stop(history, most, round=round):
            if history.cost.done == round:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            fit(folder=tmp_path / str(round), execution=kinfed.Execution(progress=stop))
        again = fit(folder=tmp_path / str(round))
        assert again.history.rounds == whole.history.rounds
        assert all(torch.equal(again.history.models[name], t) for name, t in whole.history.models.items())
    same = fit(Rounds(done))
    assert torch.equal(same.history.test("shared"), whole.history.test("shared"))


def test_seeds_stop_by_themselves_and_a_run_that_stopped_goes_on_for_as_long_as_asked(tmp_path):
    table = config.resolve(read("rounds=auto")).table
    assert (table["rounds"], table["patience"]) == (200, 0.25)
    assert config.resolve(read("rounds=30", "patience=0.5")).rounds == Rounds(30, patience=0.5)
    out = ["--out", str(tmp_path / "run"), "--beside", "none", "--quiet"]
    assert main(["run", "fedavg", *DIGITS, "rounds=auto", "seeds=2", *out]) == 0
    folder = RunFolder(tmp_path / "run")
    counts = [one.read_summary().rounds for one in folder.repeats()]
    assert counts[0] != counts[1]
    rounds, scores = scores_by_round(folder, "shared")
    assert (len(rounds), *scores.shape) == (min(counts), 2, min(counts), 4)
    more, _ = further(tmp_path / "run", ["rounds=7"])
    assert more.rounds == Rounds(folder.read_summary().rounds + 7)
    with pytest.raises(UsageError, match="whole number, at least 1"):
        further(tmp_path / "run", ["rounds=auto"])


def test_a_race_counts_the_rounds_that_were_trained():
    data = config.resolve(read()).federation(None, 0)
    choice = kinfed.choose(data, rounds=Rounds(60, patience=0.1), methods=["kin"], budget=400)
    rows = choice.ranking()
    assert not choice.winner.candidate.is_solved  # so none is compared on more draws for validation
    assert sum(row["rounds"] for row in rows) == choice.trained
    assert max(row["rounds"] for row in rows) < 60
    assert [row["rounds"] for row in rows if row.get("chosen")] == [choice.run.history.cost.done]


def test_what_refuses_it():
    x, who = torch.randn(40, 2), torch.arange(40) % 4
    unvalidated = kinfed.Federation.from_arrays(x, x[:, 0], who, split=kinfed.Split(validation=0.0))
    with pytest.raises(UsageError, match=r"needs validation examples to stop by.*federation\.split\.validation"):
        kinfed.fit(kinfed.Local(), unvalidated, rounds="auto")
    with pytest.raises(UsageError, match="sites agree to a number of rounds"):
        plan.resolve({"method": "fedavg", "model": "mlp", "rounds": "auto"})
    for patience in (1, -0.1, True, "long"):
        with pytest.raises(UsageError, match="patience, a share of the rounds, must be"):
            Rounds(20, patience=patience)
