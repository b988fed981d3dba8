"""Verdicts by hand: differences, intervals, clients that gain and lose, and what each case says."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from kinfed import FedAvg, Federation, Forecasting, Local, Regression, UsageError, Verdict, fit
from kinfed.core.summary import Metric
from kinfed.runs.baselines import Baseline, floor, verdict
from kinfed.runs.results import save
from kinfed.runs.run import Run, make_baseline
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.tested_examples import Tested
from kinfed.verdict.dependence import Blocks, block_length
from kinfed.verdict.verdict import ScoredBaseline, interval_over_clients, interval_per_row, judge, plain

ACCURACY, ERROR = Metric(name="accuracy", higher_is_better=True, unit="%"), Metric(name="mae", higher_is_better=False)


def test_large_numbers_are_written_out():
    assert [plain(one) for one in (201_300.4, 999.96, 0.012346, -0.0)] == ["201,300", "1000", "0.01235", "0"]
    assert [plain(one, "+z", 3) for one in (9210.4, -4930.0, 3.4567)] == ["+9,210", "-4,930", "+3.46"]


def right(*counts, of=20):
    """The scores of clients that answer so many of their test examples correctly."""
    return [[np.repeat([1.0, 0.0], [count, of - count]) for count in counts]]


def of_accuracy(method, mine, local, fedavg=None, **more):
    names = [f"c{i}" for i in range(len(mine[0]))]
    pooled = None if fedavg is None else ScoredBaseline("FedAvg", fedavg)
    return judge(method, mine, ScoredBaseline("Local", local), pooled, names=names, metric=ACCURACY, **more)


def of_error(mine, alone, **more):
    names = [f"c{i}" for i in range(len(mine[0]))]
    return judge("sfl", mine, ScoredBaseline("a ridge", alone), names=names, metric=ERROR, **more)


def test_the_interval_by_hand():
    """Differences 0.1, 0.2, 0.3 and 0.4: mean 0.25, deviation sqrt(1/60), t(3) at 97.5 % is 3.182446."""
    found = of_accuracy("cfl", right(12, 14, 16, 18), right(10, 10, 10, 10))
    half = 3.182446305 * math.sqrt(1 / 60) / 2
    assert isinstance(found, Verdict)
    assert found.over["alone"].mean == pytest.approx(0.25)
    assert found.over["alone"].low == pytest.approx(0.25 - half)
    assert found.over["alone"].high == pytest.approx(0.25 + half)
    # A choice among five, made on other examples, leaves the interval as it is.
    chosen = of_accuracy("cfl", right(12, 14, 16, 18), right(10, 10, 10, 10), candidates=5, saved="cfl")
    assert chosen.over == found.over
    assert chosen.sentence == (
        "Learning from others helps: accuracy +25.0 points against the best baseline without others, Local (95 % "
        "interval 4.5 to 45.5). The cfl models are saved."
    )


def test_who_gains_and_loses_by_the_sign_test():
    """Of 20 examples 8 change for the better: p = 2 / 2**8; 4 for the worse: 2 / 2**4, which decides nothing.

    For three clients the smallest p-value must be below 0.05 / 3 and the second below 0.1 / 3.
    """
    found = of_accuracy("cfl", right(18, 6, 2), right(10, 10, 10))
    assert (found.gain, found.lose, found.undecided) == (["c0"], ["c2"], ["c1"])
    assert found.worse == 2
    assert found.notes == ["by their own test rows 1 client gains, 1 loses; of 1 there are too few test rows to say"]
    # 6 better: p = 1/32, above 0.05 / 2, so that false discovery control calls neither of two clients decided...
    assert of_accuracy("cfl", right(16, 10), right(10, 10)).undecided == ["c0", "c1"]
    # ... but both, if the other has as much.
    assert of_accuracy("cfl", right(16, 16), right(10, 10)).gain == ["c0", "c1"]


def test_errors_are_compared_by_ranks_and_in_per_cent():
    """Six positive differences: the exact two-sided p-value of signed ranks is 2 / 2**6; of five it is 2 / 2**5."""
    local = [[np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5]), np.array([1.0, 1.1, 1.2, 1.3, 1.4])]]
    mine = [[one - 0.1 * np.arange(1, len(one) + 1) for one in local[0]]]
    found = of_error(mine, local)
    assert (found.gain, found.undecided) == ([], ["c0", "c1"])  # 0.03125 is above 0.05 / 2
    assert of_error([mine[0][:1] * 2], [local[0][:1] * 2]).gain == ["c0", "c1"]
    # Mean errors 0.9 and 0.9 against 1.25 and 1.2: the geometric mean of 0.72 and 0.75.
    assert found.over["alone"].mean == pytest.approx(1 - math.sqrt(0.72 * 0.75))
    assert "mae 26.5 % lower than the best baseline without others, a ridge (no interval, as two" in found.sentence


def test_errors_have_intervals_of_their_logarithms_that_stay_below_a_hundred_per_cent():
    """Ratios 0.5, 0.4, 0.1 and 0.25: logarithms of mean -1.3249 and deviation 0.7036; t(3) at 97.5 % is 3.182446."""
    local, mine = (
        [[np.full(3, one) for one in (2.0, 5.0, 10.0, 4.0)]],
        [[np.full(3, one) for one in (1.0, 2.0, 1.0, 1.0)]],
    )
    found = of_error(mine, local).over["alone"]
    logs = np.log([0.5, 0.4, 0.1, 0.25])
    half = 3.182446305 * logs.std(ddof=1) / 2
    assert found.relative
    assert (found.mean, found.low, found.high) == pytest.approx(
        tuple(1 - math.exp(one) for one in (logs.mean(), logs.mean() + half, logs.mean() - half))
    )
    assert found.high < 1
    worse = of_error(local, mine)
    assert worse.sentence.startswith("Learning from others does not help here: mae 276.1 % higher than the best")
    # Where an error is zero, even with one of two seeds, no ratio is defined: differences are in the metric's unit.
    none = of_error([[np.zeros(3), *mine[0][1:]]], local)
    assert not none.over["alone"].relative
    assert none.over["alone"].mean == pytest.approx((2 + 3 + 9 + 3) / 4)
    lower = "mae 4.25 lower than the best baseline without others, a ridge (95 % interval -0.844 to 9.34)"
    assert lower in none.sentence
    twice = of_error([*mine, [np.zeros(3), *mine[0][1:]]], local * 2)
    assert twice.over["alone"].mean == pytest.approx((1.5 + 3 + 9 + 3) / 4)


@pytest.mark.parametrize(
    ("mine", "pooled", "begins", "second"),
    [
        ((18, 17, 18, 19), None, "Learning from others helps: accuracy +40.0 points against", ""),
        ((18, 17, 18, 19), (12, 12, 12, 12), "Learning from others helps", "It also beats the best pooled baseline"),
        ((18, 17, 18, 19), (17, 18, 18, 17), "Learning from others helps", "does as well|may do as well"),
        ((11, 9, 11, 11), None, "Cannot tell whether learning from others helps: accuracy +2.5 points", ""),
        ((4, 5, 4, 3), None, "Learning from others does not help here: accuracy -30.0 points", ""),
        ((4, 5, 4, 3), (18, 17, 18, 19), "Learning from others helps, but cfl is not shown to", "does better: against"),
        ((4, 5, 4, 3), (3, 4, 4, 3), "Learning from others does not help here", "may do as well: against it cfl has"),
        ((10, 10, 10, 10), None, "Cannot tell whether learning from others helps: accuracy +0.0 points", ""),
    ],
)
def test_the_sentence_of_each_case(mine, pooled, begins, second):
    found = of_accuracy("cfl", right(*mine), right(10, 10, 10, 10), pooled and right(*pooled))
    assert found.sentence.startswith(begins)
    assert any(words in found.sentence for words in second.split("|"))
    assert ("pooled" in found.over) == (pooled is not None)
    assert len(found.sentence.split(". ")) <= 2


def test_a_baseline_that_needs_all_rows_is_named_as_such():
    pooled = ScoredBaseline("a ridge of all rows", right(12, 12, 13, 12), needs_rows=True)
    found = judge(
        "cfl",
        right(18, 17, 18, 19),
        ScoredBaseline("Local", right(10, 10, 10, 10)),
        pooled,
        names=list("abcd"),
        metric=ACCURACY,
        saved="cfl",
    )
    assert "the best pooled baseline, a ridge of all rows in one place: +28." in found.sentence
    assert found.sentence.endswith("; the cfl models are saved.")
    assert found.baselines == {"alone": "Local", "pooled": "a ridge of all rows"}


def test_a_pooled_baseline_is_shown_to_help_by_a_bound_for_all_that_were_tried():
    """It gains 0.05, 0.1, 0.15 and 0.1: mean 0.1, deviation sqrt(1/600), an error of 0.0204124.

    t(3) is 3.182446 at 97.5 %, so a single test would have a lower bound of 0.0350. Of two, the method and one pooled
    baseline, it is 4.176535 at 98.75 %: 0.0147. Of four it is 5.391909 at 99.375 %: -0.0101.
    """
    mine, alone, pooled = right(10, 10, 10, 9), ScoredBaseline("Local", right(10, 10, 10, 10)), right(11, 12, 13, 12)
    sentences = {}
    for rivals in (1, 3):
        found = judge(
            "cfl",
            mine,
            alone,
            ScoredBaseline("FedAvg", pooled, rivals=rivals),
            names=list("abcd"),
            metric=ACCURACY,
        )
        sentences[rivals] = found.sentence.partition(":")[0], found.notes[-1]
    assert sentences[1] == (
        "Learning from others helps, but cfl is not shown to",
        "FedAvg has accuracy +10.0 points against the best baseline without others, Local (95 % interval 1.5 to 16.5)",
    )
    assert sentences[3] == (
        "Cannot tell whether learning from others helps",
        "with so few test rows, we cannot say which clients gain",
    )


def simulated(draw, gain, clients=8, examples=24):
    """Right answers of learning alone, and of a method that is better by `gain`, where a tenth of answers differ."""
    alone = [(draw.random(examples) < 0.8).astype(float) for _ in range(clients)]
    up = 0.05 + gain / 2
    flips = [draw.random(examples) for _ in alone]
    mine = [
        np.where(one == 0, flip < up / 0.2, flip >= (0.1 - up) / 0.8).astype(float)
        for one, flip in zip(alone, flips, strict=True)
    ]
    return [mine], [alone]


def answer(found):
    """What a sentence says: 1 that others help, -1 that they do not, 0 that it cannot tell."""
    begins = {
        "Learning from others helps: ": 1,
        "Cannot tell whether ": 0,
        "Learning from others does not help here: ": -1,
    }
    return next(value for words, value in begins.items() if found.sentence.startswith(words))


@pytest.mark.parametrize("gain", [-0.04, -0.02, 0.0, 0.02, 0.04])
def test_neither_side_is_claimed_against_the_interval(gain):
    """Helps, or does not, only where the interval excludes zero; so a wrong claim is as rare on either side."""
    draw = np.random.default_rng(0)
    said = []
    for _ in range(100):
        mine, local = simulated(draw, gain)
        found, mirrored = of_accuracy("cfl", mine, local), of_accuracy("cfl", local, mine)
        over = found.over["alone"]
        assert answer(found) == (1 if over.low > 0 else -1 if over.high < 0 else 0)
        assert answer(mirrored) == -answer(found)
        said.append(answer(found))
    wrong = sum(one * gain < 0 for one in said) if gain else max(said.count(1), said.count(-1))
    assert wrong <= 7  # of 100, where 2.5 are expected at most: the chance of more is 0.4 %


def test_of_fedavg_and_local_themselves():
    other = right(18, 17, 18, 19)
    assert of_accuracy("fedavg", other, right(10, 10, 10, 10)).sentence.startswith("One model for all helps: ")
    assert of_accuracy("fedavg", other, right(10, 10, 10, 10), other).over.keys() == {"alone"}
    chosen = of_accuracy("local", other, other, right(10, 10, 10, 10), candidates=3, saved="local").sentence
    assert chosen.startswith("No way of learning from others was clearly better than learning alone on validation")
    assert "It beats the best pooled baseline, FedAvg: +40.0 points (33.5 to 46.5); the local models are" in chosen
    assert of_accuracy("local", other, other, other).sentence.startswith("Only learning alone was trained, so nobody")


def test_of_a_standard_model_that_needs_nobody_else():
    """Each of four clients is right in 18 of 20, one model for all in 10; then Local is right in 19."""
    name, mine, pooled = "boosting for each client", right(18, 18, 18, 18), right(9, 10, 10, 11)
    names = [f"c{i}" for i in range(4)]
    more = {"names": names, "metric": ACCURACY, "candidates": 9, "saved": "standard"}
    same = judge(name, mine, ScoredBaseline(name, mine), ScoredBaseline("FedAvg", pooled), **more)
    begin = (
        f"Learning from others is not worth it here: no way was clearly better on validation rows than {name}, which "
    )
    assert same.sentence == (
        f"{begin}needs nobody else. It beats the best pooled baseline, FedAvg: +40.0 points (33.5 to 46.5); the "
        "standard models are saved."
    )
    assert same.notes == []
    other = judge(name, mine, ScoredBaseline("Local", right(19, 18, 19, 20)), ScoredBaseline("FedAvg", pooled), **more)
    assert other.sentence.startswith(
        f"{begin}needs nobody else. On test rows it has accuracy -5.0 points against the best baseline without others, "
        "Local (95 % interval -11.5 to 1.5). It beats the best pooled baseline, FedAvg: "
    )


def test_bad_input_says_what_cannot_be_said():
    """One client, two, clients that all differ by the same, or not at all, clients without test rows."""
    single = of_accuracy("cfl", right(18), right(10))
    assert single.sentence == (
        "There is one client, which has nobody to learn from. Keep the best baseline without others, Local."
    )
    over = single.to_dict()["over"]["alone"]
    assert (over["mean"], over["low"], over["high"]) == (pytest.approx(0.4), None, None)
    json.dumps(single.to_dict(), allow_nan=False)
    few = of_accuracy("cfl", right(1, 1, 1, of=1), right(0, 0, 0, of=1))
    assert "(no interval, as every client differs by as much)" in few.sentence
    assert few.sentence.startswith("Cannot tell")
    assert few.notes == ["with one score for each client, nobody can say which clients gain"]
    tied = of_accuracy("cfl", right(10, 10, 10), right(10, 10, 10))
    assert (tied.over["alone"].mean, tied.over["alone"].low, tied.over["alone"].high) == (0, 0, 0)
    assert tied.undecided == ["c0", "c1", "c2"]
    assert tied.notes == ["no test row is scored differently, so no client gains or loses"]
    assert (
        "accuracy +0.0 points against the best baseline without others, Local (every client scores the" in tied.sentence
    )
    two = of_accuracy("cfl", right(18, 17), right(10, 10))
    assert two.sentence.startswith("Two clients are too few to say whether learning from others helps: accuracy +37.5")
    mine, alone = right(18, 17, 19, 18), right(10, 10, 10, 10)
    mine[0][2] = alone[0][2] = np.empty(0)
    assert of_accuracy("cfl", mine, alone).notes[-1] == "1 client without test scores is left out"


def test_an_error_that_is_nearly_zero_is_compared_by_its_difference():
    """A baseline that is right but for rounding, where the target is the same in all rows of a client."""
    mine, exact = ([[np.full(4, error) for error in errors]] for errors in ((0.1, 0.2, 0.3), (1e-9, 2e-9, 1e-8)))
    found = of_error(mine, exact)
    assert not found.over["alone"].relative
    assert found.over["alone"].mean == pytest.approx(-0.2)
    higher = "mae 0.2 higher than the best baseline without others, a ridge (95 % interval -0.0484 to 0.448)"
    assert higher in found.sentence


def test_seeds_are_averaged_and_their_p_values_merged():
    """Test sets differ in size from seed to seed. Twice the mean of 1/2**9 and 1/2**3, doubled for two sides: 0.25."""
    mine, local = right(19, 14) + right(13, 14, of=15), right(10, 14) + right(10, 14, of=15)
    found = of_accuracy("cfl", mine, local)
    assert found.over["alone"].mean == pytest.approx((9 / 20 + 3 / 15) / 4)
    assert found.gain == []
    assert of_accuracy("cfl", mine[:1] * 2, local[:1] * 2).gain == ["c0"]  # 2 * 2 / 2**9 = 0.0078
    assert of_accuracy("cfl", mine[:1] + local[:1], local[:1] * 2).gain == []  # nothing in the second


def test_examples_and_clients_without_a_score_are_left_out():
    mine, local = right(18, 15, 3), right(10, 10, 10)
    mine[0][1], local[0][1] = np.empty(0), np.empty(0)  # such as an attacker
    local[0][0][[0, 19]] = np.nan
    found = of_accuracy("cfl", mine, local)
    assert found.over["alone"].mean == pytest.approx((17 / 18 - 9 / 18 - 7 / 20) / 2)
    assert found.gain + found.lose + found.undecided == ["c0", "c2"]
    with pytest.raises(UsageError, match="client c0: the runs were not tested on the same examples"):
        of_accuracy("cfl", right(1, 1, of=3), right(1, 1, of=4))
    with pytest.raises(UsageError, match="no client has a test score in both"):
        of_accuracy("cfl", [[np.full(3, np.nan)]], right(1, of=3))


@pytest.fixture(scope="module")
def federation():
    draw = torch.Generator().manual_seed(0)
    client = torch.arange(120) % 4
    x = torch.randn(120, 2, generator=draw)
    flipped = torch.where(client < 2, 1.0, -1.0)[:, None]
    return Federation.from_arrays(x, ((flipped * x).sum(1) > 0).long(), client)


def test_scores_of_examples_are_those_of_the_models_that_are_saved(federation, tmp_path):
    runs = {method: fit(method(), federation, nn.Linear(2, 2), rounds=3) for method in (Local, FedAvg)}
    for method, run in runs.items():
        tested = run.score_examples()
        for i, rows in enumerate(federation.rows["test"]):
            expected = (run.model(position=i)(federation.x[rows]).argmax(1) == federation.y[rows]).float()
            assert torch.equal(tested[i], expected)
        means = torch.stack([one.mean() for one in tested])
        torch.testing.assert_close(means, run.history.test(run.history.chosen))
        save(run, tmp_path / method.__name__)
        written = Tested.read(RunFolder(tmp_path / method.__name__))
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(written.examples.values(), tested, strict=True))
        blocks = zip(written.blocks.values(), federation.rows["test"], strict=True)
        assert all(np.array_equal(a, b) for a, b in blocks)
    found = runs[FedAvg].verdict(runs[Local])
    assert set(found.over) == {"alone", "pooled"}  # the pooled standard models
    known = [make_baseline(Run(RunFolder(tmp_path / "Local")), False)]
    mine, metric = [Tested.read(RunFolder(tmp_path / "FedAvg"))], runs[FedAvg].summary.metric
    assert known[0].validation == pytest.approx(make_baseline(runs[Local], False).validation, abs=1e-6)
    by_folder = verdict("fedavg", metric, mine, floor([known], True))
    standard, _ = runs[FedAvg].standard_baselines
    assert found == verdict("fedavg", metric, mine, floor([[*known, *standard]], True))
    other = replace(federation, rows={**federation.rows, "test": federation.rows["test"][::-1]})
    with pytest.raises(UsageError, match="was not tested on the examples of"):
        fit(FedAvg(), other, nn.Linear(2, 2), rounds=1).verdict(runs[Local])
    (tmp_path / "Local/tested.safetensors").unlink()
    means = verdict("fedavg", metric, mine, floor([[make_baseline(Run(RunFolder(tmp_path / "Local")), False)]], True))
    assert means.over["alone"].mean == pytest.approx(by_folder.over["alone"].mean)
    assert len(means.undecided) == 4


class Ordered(Regression):
    """Scored by how well outputs are ordered, which a single example cannot be."""

    metric = "spread"

    def score(self, outputs, y, weight):
        scores = super().score(outputs, y, weight)
        return scores | {"spread": scores["mse"] / (weight.sum() - 1)}


@pytest.mark.parametrize(
    ("task", "shape"), [(Regression(), []), (Regression(), [2]), (Forecasting(0.1, 2.0), [3]), (Ordered(), [])]
)
def test_scores_of_examples_average_to_the_clients(task, shape):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 2, generator=draw), torch.randn(90, *shape, generator=draw)
    federation = Federation.from_arrays(x, y, torch.arange(90) % 3, task=task)
    if isinstance(task, Forecasting):
        federation.y[federation.rows["test"][0][0]] = torch.nan  # nothing to score
    run = fit(Local(), federation, nn.Linear(2, math.prod(shape)), rounds=2)
    if isinstance(task, Ordered):
        assert run.score_examples() == []
        assert run.verdict(run).undecided == ["0", "1", "2"]
        return
    torch.testing.assert_close(torch.stack([one.nanmean() for one in run.score_examples()]), run.history.test("own"))
    assert [len(one) for one in run.score_examples()] == [len(rows) for rows in federation.rows["test"]]


def test_each_client_counts_once_and_per_row_it_counts_by_its_rows():
    values = np.array([0.1, 0.3, 0.2, 0.6])
    student = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert interval_over_clients(values) == pytest.approx((0.3, *student))
    assert interval_per_row(values, np.full(4, 7)) == pytest.approx((0.3, *student))
    mean, low, high = interval_per_row(values, np.array([1, 1, 1, 7]))
    weights = np.array([0.1, 0.1, 0.1, 0.7])
    assert mean == pytest.approx(weights @ values)
    assert np.isnan([low, high]).all()  # one client has nearly all rows, which is fewer than two clients
    assert np.isnan(interval_over_clients(values[:2])[1])
    unequal = of_accuracy("cfl", [[np.ones(4), np.zeros(2), np.zeros(2)]], [[np.zeros(4), np.zeros(2), np.zeros(2)]])
    assert unequal.over["alone"].mean == pytest.approx(1 / 3)
    assert unequal.over["alone"].per_row.mean == pytest.approx(1 / 2)


def test_rows_of_one_block_are_one_observation():
    """Thirty rows are better in three blocks of ten: three blocks decide nothing, thirty rows would."""
    mine, alone = right(30, 30, of=40), right(0, 0, of=40)
    ids = [[np.arange(40) // 10, 4 + np.arange(40) // 10]]
    assert of_accuracy("cfl", mine, alone, blocks=Blocks(ids, declared=True)).gain == []
    found = of_accuracy("cfl", mine, alone, blocks=Blocks([[np.arange(40)] * 2], declared=True))
    assert found.gain == ["c0", "c1"]
    # Neighbours that go together are found, in the order of their places, and count as one.
    shuffled = np.random.default_rng(0).permutation(40)
    mine = [[one[shuffled] for one in mine[0]]]
    found = of_accuracy("cfl", mine, alone, blocks=Blocks([[shuffled] * 2]))
    assert found.gain == []
    assert any("neighbouring test rows are not independent" in note for note in found.notes)
    spanning = of_accuracy("cfl", mine, alone, blocks=Blocks(ids, declared=True, spanning=2))
    assert any(note.startswith("2 groups have rows of several clients") for note in spanning.notes)


def test_neighbours_of_independent_rows_are_found_to_be_dependent_as_often_as_chance_has_it():
    draw = np.random.default_rng(0)
    lengths = [block_length([draw.normal(size=30) for _ in range(10)]) for _ in range(400)]
    assert 0 < np.mean([one > 1 for one in lengths]) < 0.08
    blocks = [block_length([np.repeat(draw.normal(size=6), 10) for _ in range(10)]) for _ in range(50)]
    assert min(blocks) >= 10


def test_the_floor_is_the_best_that_validation_does_not_rule_out():
    """Validation tells that c is worse, not which of a and b is better: the better on test rows is taken."""

    def baseline(name, validation, test, pools=False):
        values = {f"c{i}": value for i, value in enumerate(validation)}
        return Baseline(name, pools, pools, values, Tested({f"c{i}": test for i in range(len(validation))}, None))

    a = baseline("a", (0.9, 0.8, 0.7, 0.8), 0.7)
    b = baseline("b", (0.8, 0.9, 0.7, 0.7), 0.8)
    c = baseline("c", (0.5, 0.4, 0.3, 0.4), 0.9)
    d = baseline("d", (0.5, 0.4, 0.3, 0.4), 0.6, pools=True)
    found = floor([[a, b, c, d]], True)
    assert (found.alone.name, found.pooled.name, found.by_test) == ("b", "d", False)
    assert floor([[a, c, d]], True).alone.name == "a"
    blind = [replace(one, validation={}) for one in (a, b, c)]
    assert floor([blind], True)[:1] + floor([blind], True)[2:] == (floor([blind], True).alone, True)
    assert floor([blind], True).alone.name == "c"
    assert floor([[a, b], [a]], True).alone.name == "a"  # what lacks a seed is none
    assert floor([[]], True).alone is None


def test_ratios_that_contradict_mean_errors_are_no_percentages():
    """Two small errors fall by a fifth, and a large one rises: the mean error rises from 4 to 4.53."""
    mine, local = ([[np.full(4, error) for error in errors]] for errors in ((12.0, 0.8, 0.8), (10.0, 1.0, 1.0)))
    found = of_error(mine, local).over["alone"]
    assert not found.relative
    assert found.mean == pytest.approx(-1.6 / 3)
