"""Who stays in a race, who wins it, and what a client's validation score is there."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kinfed import Classification, FedAvg, Local, Regression, Rounds, Training
from kinfed.core.history import History
from kinfed.core.round_selection import Selection, select_round
from kinfed.methods import FedAGHN
from kinfed.methods.solved.partial_pooling import PartialPooling
from kinfed.search.successive_halving import (
    Candidate,
    Entry,
    Rung,
    Standing,
    base_of,
    cost,
    plan_rounds,
    read_validation,
    run,
    rungs,
    trim_mean,
    winner,
)

KINDS = {"local": Local(), "fedavg": FedAvg(), "partial-pooling": PartialPooling()}


def candidate(name):
    base = name.partition(",")[0]
    return Candidate(name, base, KINDS.get(base, FedAGHN()), Training())


def standing(name, *values, rounds=20):
    return Standing(candidate(name), rounds, np.array(values, float))


def test_a_race_costs_what_its_budget_allows():
    plan = rungs(20, 1, 30, 1, 200)
    assert plan == [Rung(5, 24), Rung(10, 8), Rung(20, 4)]
    assert cost(plan, 1) == 24 * 5 + 8 * 5 + 4 * 10 == 200
    assert cost(rungs(20, 1, 30, 2, 400), 2) == 400
    assert rungs(20, 1, 30, 1, 60) == [Rung(5, 3), Rung(10, 3), Rung(20, 3)]  # the least
    assert rungs(20, 8, 9, 1, 1000) == [Rung(8, 9), Rung(20, 4)]  # candidates are compared where they are scored
    assert rungs(1, 1, 5, 1, 1000) == [Rung(1, 5)]
    assert plan_rounds(Rounds(20, evaluate_every=20)) == Rounds(20, evaluate_every=5)
    assert plan_rounds(Rounds(3, evaluate_every=2)) == Rounds(3, evaluate_every=1)
    assert plan_rounds(Rounds(20, evaluate_every=4)) == Rounds(20, evaluate_every=4)


def test_the_worst_leave_and_the_best_of_each_base_stays():
    quality = {"local,a": 0.2, "local,b": 0.3, "fedavg,a": 0.1, "x": 0.9, "y": 0.8, "z": 0.7, "w": 0.6}
    trained = []

    def advance(entries, until):
        trained.append(([one.name for one, _ in entries], until))
        return {entry: "diverged" for entry in entries if entry.candidate.name == "x" and until == 10}

    plan = [Rung(5, 7), Rung(10, 4), Rung(20, 3)]
    found = run(
        [candidate(name) for name in quality],
        plan,
        1,
        advance,
        lambda entry, until: np.full(3, quality[entry.candidate.name]),
    )
    assert trained == [
        (list(quality), 5),
        (["x", "y", "local,b", "fedavg,a"], 10),
        (["y", "local,b", "fedavg,a"], 20),
    ]
    assert [(one.candidate.name, one.rounds) for one in found] == [
        ("y", 20), ("local,b", 20), ("fedavg,a", 20), ("z", 5), ("w", 5), ("local,a", 5), ("x", 5),
    ]  # fmt: skip
    assert found[-1].problem == "diverged"


def test_what_the_budget_left_out_takes_the_place_of_what_ends_at_once():
    trained = []

    def advance(entries, until):
        trained.append([one.name for one, _ in entries])
        return {entry: "diverged" for entry in entries if entry.candidate.name in ("x", "z")}

    names = ["local", "fedavg", "x", "y", "z", "v", "w"]
    found = run([candidate(name) for name in names], [Rung(5, 4)], 1, advance, lambda entry, until: np.zeros(2))
    assert trained == [["local", "fedavg", "x", "y"], ["z"], ["v"]]
    assert [one.candidate.name for one in found if one.rounds] == ["local", "fedavg", "y", "v"]


def test_local_at_a_rate_that_left_earlier_stands_in_for_one_that_ended():
    late, early = standing("local,a", [0.9, 0.9]), standing("local,b", [0.5, 0.6], rounds=10)
    late.problem = "diverged"
    fedavg = standing("fedavg", [0.1, 0.1])
    assert base_of([late, early, fedavg], "local") is early
    assert base_of([late], "local") is None
    assert winner([late, early, fedavg]) is fedavg


def test_every_fold_of_a_candidate_is_trained():
    asked = []
    found = run(
        [candidate("local"), candidate("fedavg")],
        [Rung(2, 2)],
        2,
        lambda entries, until: asked.extend(entries) or {},
        lambda entry, until: np.array([0.5, 0.7]) + entry.fold,
    )
    assert asked == [Entry(one, fold) for one in (candidate("local"), candidate("fedavg")) for fold in (0, 1)]
    assert found[0].values.tolist() == [[0.5, 0.7], [1.5, 1.7]]
    assert found[0].mean == pytest.approx(1.1)


def test_local_is_replaced_only_by_what_is_better_by_more_than_a_standard_error():
    local, fedavg = standing("local", [0.5, 0.5, 0.75, 0.75]), standing("fedavg", [0.4, 0.4, 0.4, 0.4])
    # Gains of 1/8, -1/8, 1/8 and 1/8: mean 1/16, standard deviation 1/8, standard error 1/16.
    close = standing("x", [0.625, 0.375, 0.875, 0.875])
    assert close.gain_over(local)[:2] == (1 / 16, 1 / 16)
    assert winner([close, local, fedavg]) is local
    clear = standing("x", [0.625, 0.4, 0.875, 0.875])
    assert winner([clear, local, fedavg]) is clear
    early = standing("y", [1, 1, 1, 1], rounds=10)
    assert winner([early, local, fedavg]) is local
    rounding = standing("z", [0.50000001, 0.50000001, 0.75000001, 0.75000001])
    assert winner([rounding, local, fedavg]) is local


def test_what_is_trained_must_beat_a_solved_model_by_more_than_a_standard_error():
    """It learns how far to pool, with learning alone and one model for all at its ends; and it stays in the race."""

    def linear(*values):
        one = standing("partial-pooling,linear", *values)
        return replace(one, candidate=replace(one.candidate, model="linear"))

    local, solved = standing("local", [0.5, 0.5, 0.5, 0.5]), linear([0.7, 0.4, 0.7, 0.4])
    assert solved.candidate.stays == "linear"
    assert winner([solved, local]) is solved  # by 0.05, with a standard error of 0.087
    worse = linear([0.5, 0.4, 0.5, 0.5])  # than learning alone by 0.025, with the same standard error
    assert winner([worse, local]) is worse
    assert winner([linear([0.4, 0.4, 0.5, 0.4]), local]) is local  # by 0.075
    assert winner([linear([0.4, 0.4, 0.5, 0.4]), local, standing("x", [0.6, 0.4, 0.6, 0.5])]) is local
    close, clear = standing("fedaghn", [0.7, 0.5, 0.7, 0.4]), standing("fedaghn", [0.8, 0.6, 0.7, 0.5])
    assert close.gain_over(solved)[:2] == (pytest.approx(0.025), pytest.approx(0.025))
    assert winner([close, solved, local]) is solved
    assert winner([clear, solved, local]) is clear
    other = replace(linear([0.6, 0.4, 0.6, 0.4]), preferred=True)
    assert winner([solved, other, local]) is other  # on more draws of validation examples
    assert winner([solved, other, local, standing("x", [0.8, 0.4, 0.7, 0.35])]) is other  # clear of it, not of the best
    entries = [*(candidate(f"c{i}") for i in range(6)), local.candidate, solved.candidate]  # it is the worst, and stays
    scores = {one.name: 10.0 - i for i, one in enumerate(entries)}
    end = run(
        entries, [Rung(1, 8), Rung(2, 3)], 1, lambda *_: {}, lambda one, _: np.full(4, scores[one.candidate.name])
    )
    assert {one.candidate.name for one in end if one.rounds == 2} == {"c0", "local", "partial-pooling,linear"}


def test_gains_are_paired_by_client_and_averaged_over_folds():
    one, other = standing("x", [1.0, 0.0], [0.5, np.nan]), standing("local", [0.5, 0.0], [0.0, np.nan])
    mean, error, half = one.gain_over(other)
    assert (mean, error) == (pytest.approx(0.25), pytest.approx(0.25))  # of 0.5 and 0
    assert half == pytest.approx(0.25 * 12.7062, rel=1e-4)  # Student's with one degree of freedom
    assert standing("x", [1.0]).gain_over(standing("local", [0.5]))[1] == np.inf


def history(curves, task):
    made = History(("a", "b"), task)
    for t, values in enumerate(zip(*curves.values(), strict=True)):
        made.rounds.append(t)
        made.scores.append(
            {
                (name, split, task.metric): torch.tensor(value)
                for name, value in zip(curves, values, strict=True)
                for split in ("validation", "test")
            }
        )
    return made


def test_a_validation_score_is_that_of_the_preferred_model_in_its_best_round():
    own = [[0.0, 0.0], [0.1, 0.1], [0.2, 0.4], [0.9, 0.5], [0.4, 0.2], [0.3, 0.3], [0.0, 0.0], [1.0, 1.0]]
    scores = history({"own": own, "shared": [[0.6, 0.6]] * 8}, Classification(2))
    assert read_validation(scores, until=7).tolist() == pytest.approx([0.9, 0.5])
    assert read_validation(scores, until=2).tolist() == pytest.approx([0.6, 0.6])
    errors = history({"own": own}, Regression())
    assert read_validation(errors, until=8).tolist() == pytest.approx([0.0, 0.0])
    scores.selector.selection = Selection("loss")
    assert np.isnan(read_validation(scores, until=8)).all()  # there are no such scores


def test_of_rounds_with_equal_accuracy_the_one_with_the_lowest_loss_is_selected():
    assert select_round([0, 1, 2, 3], [0.5, 0.7, 0.7, 0.6], True, [0.9, 0.8, 0.4, 0.1]) == 2
    assert select_round([0, 1, 2], [0.7, 0.7, 0.7], True) == 0
    assert select_round([0, 1, 2], [2.0, 1.0, 1.0], False, [math.nan] * 3) == 1


def test_an_outlier_at_one_client_does_not_keep_the_simplest():
    """By hand: of ten gains the mean's error is that of the outlier; without the ends all gain the same."""
    gains = np.array([0.1, 0.12, 0.11, 0.1, 0.13, 0.12, 0.09, 0.11, 0.1, 9.0])
    mean, error = trim_mean(gains)
    assert mean == pytest.approx(np.sort(gains)[1:-1].mean())
    winsorised = np.clip(gains, 0.1, 0.13).var(ddof=1) * 9
    assert error == pytest.approx((winsorised / (8 * 7)) ** 0.5)
    worse, better = standing("solved", np.zeros(10)), standing("local", gains)
    assert better.is_clearly_above(worse)
    assert not standing("local", -gains).is_clearly_above(worse)
    assert not standing("local", np.where(gains > 1, 9.0, -0.1)).is_clearly_above(worse)


def test_a_race_with_solvers_takes_no_more_than_its_budget():
    plan = rungs(20, 1, 10, 1, 120, [0, 0, 20, 20, 20, 0, 0, 0, 0, 0])
    assert plan[0].enter == 4
    assert 5 * 2 + 2 * 20 + 5 * 4 + 10 * 4 <= 120


def test_what_is_shown_to_lose_little_is_close():
    """Gains of -1 and -3 at scores near -100, in 100 clients each: a mean of -2 with a standard error of 0.071."""
    base = standing("fedavg", [-100.0] * 200)
    other = standing("local", [-101.0, -103.0] * 100)
    gain, error, half = other.gain_over(base)
    assert (gain, error) == (-2.0, pytest.approx(1.0025 / math.sqrt(200), rel=1e-3))
    assert half == pytest.approx(1.972 * error, rel=1e-3)
    assert other.is_close_to(base, 0.0215)  # 2.15 is more than 2 and 1.97 x 0.0709
    assert not other.is_close_to(base, 0.021)
    assert not standing("local", [-1.0]).is_close_to(standing("fedavg", [-1.0]), 0.02)  # one client has no interval
