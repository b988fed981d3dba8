"""Verdicts by hand: differences, intervals, clients that gain and lose, and the sentence of each case."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from kinfed import FedAvg, Federation, Forecasting, Local, Regression, UsageError, Verdict, fit
from kinfed.runs import test_scores as by_folder
from kinfed.runs.results import save
from kinfed.runs.run_folder import RunFolder
from kinfed.verdict.verdict import judge, plain, weighted_interval


def test_large_numbers_are_written_out():
    assert [plain(one) for one in (201_300.4, 999.96, 0.012346, -0.0)] == ["201,300", "1000", "0.01235", "0"]
    assert [plain(one, "+z", 3) for one in (9210.4, -4930.0, 3.4567)] == ["+9,210", "-4,930", "+3.46"]


def right(*counts, of=20):
    """The scores of clients that answer so many of their test examples correctly."""
    return [[np.repeat([1.0, 0.0], [count, of - count]) for count in counts]]


def of_accuracy(method, mine, local, fedavg=None, **more):
    names = [f"c{i}" for i in range(len(mine[0]))]
    return judge(method, mine, local, fedavg, names=names, metric="accuracy", higher_is_better=True, **more)


def test_the_interval_by_hand():
    """Differences 0.1, 0.2, 0.3 and 0.4: mean 0.25, deviation sqrt(1/60), t(3) at 97.5 % is 3.182446."""
    found = of_accuracy("cfl", right(12, 14, 16, 18), right(10, 10, 10, 10))
    half = 3.182446305 * math.sqrt(1 / 60) / 2
    assert isinstance(found, Verdict)
    assert found.over["local"].mean == pytest.approx(0.25)
    assert found.over["local"].low == pytest.approx(0.25 - half)
    assert found.over["local"].high == pytest.approx(0.25 + half)
    # A choice among five, made on other examples, leaves the interval as it is.
    chosen = of_accuracy("cfl", right(12, 14, 16, 18), right(10, 10, 10, 10), candidates=5)
    assert chosen.over == found.over
    assert chosen.sentence.startswith("learning from others helps (cfl, chosen among 5 candidates): +25.0 points")
    assert "(95 % interval 4.5 to 45.5)" in chosen.sentence


def test_who_gains_and_loses_by_the_sign_test():
    """Of 20 examples 8 change for the better: p = 2 / 2**8; 4 for the worse: 2 / 2**4, which decides nothing.

    For three clients the smallest p-value must be below 0.05 / 3 and the second below 0.1 / 3.
    """
    found = of_accuracy("cfl", right(18, 6, 2), right(10, 10, 10))
    assert (found.gain, found.lose, found.undecided) == (["c0"], ["c2"], ["c1"])
    assert found.worse == 2
    assert found.sentence.endswith("; 1 of 3 clients gains, 1 loses, 1 undecided")
    # 6 better: p = 1/32, above 0.05 / 2, so that false discovery control calls neither of two clients decided...
    assert of_accuracy("cfl", right(16, 10), right(10, 10)).undecided == ["c0", "c1"]
    # ... but both, if the other has as much.
    assert of_accuracy("cfl", right(16, 16), right(10, 10)).gain == ["c0", "c1"]


def test_errors_are_compared_by_ranks_and_in_per_cent():
    """Six positive differences: the exact two-sided p-value of signed ranks is 2 / 2**6; of five it is 2 / 2**5."""
    local = [[np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5]), np.array([1.0, 1.1, 1.2, 1.3, 1.4])]]
    mine = [[one - 0.1 * np.arange(1, len(one) + 1) for one in local[0]]]
    found = judge("sfl", mine, local, names=["a", "b"], metric="mae", higher_is_better=False)
    assert (found.gain, found.undecided) == ([], ["a", "b"])  # 0.03125 is above 0.05 / 2
    alone = judge("sfl", [mine[0][:1] * 2], [local[0][:1] * 2], names=["a", "b"], metric="mae", higher_is_better=False)
    assert alone.gain == ["a", "b"]
    # Mean errors 0.9 and 0.9 against 1.25 and 1.2: the geometric mean of 0.72 and 0.75.
    assert found.over["local"].mean == pytest.approx(1 - math.sqrt(0.72 * 0.75))
    assert "mae 26.5 % lower on average than when learning alone (no interval, from 2 clients)" in found.sentence


def test_errors_have_intervals_of_their_logarithms_that_stay_below_a_hundred_per_cent():
    """Ratios 0.5, 0.4, 0.1 and 0.25: logarithms of mean -1.3249 and deviation 0.7036; t(3) at 97.5 % is 3.182446."""
    local, mine = (
        [[np.full(3, one) for one in (2.0, 5.0, 10.0, 4.0)]],
        [[np.full(3, one) for one in (1.0, 2.0, 1.0, 1.0)]],
    )
    how = {"names": ["a", "b", "c", "d"], "metric": "mae", "higher_is_better": False}
    found = judge("sfl", mine, local, **how).over["local"]
    logs = np.log([0.5, 0.4, 0.1, 0.25])
    half = 3.182446305 * logs.std(ddof=1) / 2
    assert found.relative
    assert (found.mean, found.low, found.high) == pytest.approx(
        tuple(1 - math.exp(one) for one in (logs.mean(), logs.mean() + half, logs.mean() - half))
    )
    assert found.high < 1
    worse = judge("sfl", local, mine, **how)
    assert "keep your own models (method=local); sfl: mae 276.1 % higher on average than when" in worse.sentence
    # Where an error is zero, even with one of two seeds, no ratio is defined: differences are in the metric's unit.
    none = judge("sfl", [[np.zeros(3), *mine[0][1:]]], local, **how)
    assert not none.over["local"].relative
    assert none.over["local"].mean == pytest.approx((2 + 3 + 9 + 3) / 4)
    assert "-4.25 mae on average over learning alone (95 % interval -9.34 to 0.844)" in none.sentence
    twice = judge("sfl", [*mine, [np.zeros(3), *mine[0][1:]]], local * 2, **how)
    assert twice.over["local"].mean == pytest.approx((1.5 + 3 + 9 + 3) / 4)


def test_what_is_not_clear_over_one_model_for_all_is_said_to_be_unclear():
    found = of_accuracy("cfl", right(18, 17, 18, 19), right(10, 10, 10, 10), right(17, 18, 18, 17))
    assert "; it is unclear whether that beats one model for all: +2.5 over" in found.sentence


@pytest.mark.parametrize(
    ("mine", "fedavg", "words"),
    [
        (
            (18, 17, 18, 19),
            None,
            "learning from others helps: +40.0 points on average over learning alone (95 % interval 33.5 to 46.5)",
        ),
        ((18, 17, 18, 19), (12, 12, 12, 12), "), and +30.0 over one model for all (23.5 to 36.5); "),
        ((11, 9, 11, 11), None, "cannot tell from 80 test examples of 4 clients: +2.5 points on average over "),
        (
            (9, 10, 9, 10),
            None,
            "cannot tell from 80 test examples of 4 clients: -2.5 points on average over learning alone (95 %",
        ),
        (
            (4, 5, 4, 3),
            None,
            "does not help here: keep your own models (method=local); cfl: -30.0 points",
        ),
        ((4, 5, 4, 3), (18, 17, 18, 19), "; cfl: -70.0 over one model for all ("),
        ((15, 14, 16, 15), (15, 15, 15, 15), "one model for all does as well here: method=fedavg, +25.0 points"),
        ((4, 5, 4, 3), (18, 17, 18, 19), "one model for all does better here: method=fedavg, +40.0 points on average"),
        ((4, 5, 4, 3), (3, 4, 4, 3), "learning from others does not help here: keep your own models"),
        (
            (10, 10, 10, 10),
            None,
            "cannot tell from 80 test examples of 4 clients: +0.0 points on average over learning",
        ),
    ],
)
def test_the_sentence_of_each_case(mine, fedavg, words):
    found = of_accuracy("cfl", right(*mine), right(10, 10, 10, 10), fedavg and right(*fedavg))
    assert words in found.sentence
    assert ("fedavg" in found.over) == (fedavg is not None)


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
        "learning from others helps: ": 1,
        "cannot tell from ": 0,
        "learning from others does not help here: ": -1,
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
        over = found.over["local"]
        assert answer(found) == (1 if over.low > 0 else -1 if over.high < 0 else 0)
        assert answer(mirrored) == -answer(found)
        said.append(answer(found))
    wrong = sum(one * gain < 0 for one in said) if gain else max(said.count(1), said.count(-1))
    assert wrong <= 7  # of 100, where 2.5 are expected at most: the chance of more is 0.4 %


def test_of_fedavg_and_local_themselves():
    other = right(18, 17, 18, 19)
    assert of_accuracy("fedavg", other, right(10, 10, 10, 10)).sentence.startswith("one model for all helps: +40.0")
    assert of_accuracy("fedavg", other, right(10, 10, 10, 10), other).over.keys() == {"local"}
    own = of_accuracy("local", other, other, right(10, 10, 10, 10), candidates=3)
    assert own.sentence == (
        "one model for all does not help here, and no candidate was clearly better than learning alone on validation "
        "examples: keep your own models (method=local, chosen among 3 candidates); on test examples +40.0 points on "
        "average over one model for all (95 % interval 33.5 to 46.5)"
    )


@pytest.mark.parametrize(
    ("fedavg", "alone", "chosen"),
    [
        (None, "cannot tell whether learning from others helps: only learning alone was trained", None),
        (
            (10, 10, 10, 10),
            "one model for all does not help here: keep your own models (method=local); local: +40.0",
            "one model for all does not help here, and no ",
        ),
        (
            (18, 18, 18, 17),
            "cannot tell from 80 test examples of 4 clients: +1.2",
            "cannot tell whether learning from ",
        ),
        ((20, 20, 20, 20), "one model for all does better here: method=fedavg; local: -10.0", "cannot tell whether "),
    ],
)
def test_of_learning_alone_beside_one_model_for_all(fedavg, alone, chosen):
    """Local and FedAvg are compared; of other candidates a choice only knows that none was clearly better."""
    own = right(18, 17, 18, 19)
    shared = fedavg and right(*fedavg)
    assert of_accuracy("local", own, own, shared).sentence.startswith(alone)
    if chosen is not None:
        sentence = of_accuracy("local", own, own, shared, candidates=3).sentence
        assert sentence.startswith(chosen)
        assert "no candidate was clearly better than learning alone on validation examples" in sentence


def test_without_an_estimate_of_the_noise_nothing_is_claimed():
    """One client, or clients that all differ by the same, such as one test example each."""
    one = of_accuracy("cfl", right(18), right(10))
    assert one.sentence == "there is one client, which has nobody to learn from: keep its own model (method=local)"
    assert one.to_dict()["over"]["local"] == {
        "mean": pytest.approx(0.4),
        "low": None,
        "high": None,
        "relative": False,
    }
    json.dumps(one.to_dict(), allow_nan=False)
    few = of_accuracy("cfl", right(1, 1, 1, of=1), right(0, 0, 0, of=1))
    assert few.sentence == (
        "cannot tell from 3 clients with one score each: +100.0 points on average over learning alone "
        "(no interval, as every client differs by as much); one score each does not tell which clients gain"
    )
    tied = of_accuracy("cfl", right(10, 10, 10), right(10, 10, 10))
    assert tied.over["local"] == replace(tied.over["local"], mean=0.0, low=0.0, high=0.0)
    assert tied.undecided == ["c0", "c1", "c2"]
    two = of_accuracy("cfl", right(18, 17), right(10, 10))
    assert two.sentence.startswith("two clients do not tell what others would gain: +37.5 points on average over")
    assert "(no interval, from 2 clients)" in two.sentence


def test_seeds_are_averaged_and_their_p_values_merged():
    """Test sets differ in size from seed to seed. Twice the mean of 1/2**9 and 1/2**3, doubled for two sides: 0.25."""
    mine, local = right(19, 14) + right(13, 14, of=15), right(10, 14) + right(10, 14, of=15)
    found = of_accuracy("cfl", mine, local)
    assert found.over["local"].mean == pytest.approx((9 / 20 + 3 / 15) / 4)
    assert found.gain == []
    assert of_accuracy("cfl", mine[:1] * 2, local[:1] * 2).gain == ["c0"]  # 2 * 2 / 2**9 = 0.0078
    assert of_accuracy("cfl", mine[:1] + local[:1], local[:1] * 2).gain == []  # nothing in the second


def test_examples_and_clients_without_a_score_are_left_out():
    mine, local = right(18, 15, 3), right(10, 10, 10)
    mine[0][1], local[0][1] = np.empty(0), np.empty(0)  # such as an attacker
    local[0][0][[0, 19]] = np.nan
    found = of_accuracy("cfl", mine, local, leaking=True)
    assert found.over["local"].mean == pytest.approx((17 / 18 - 9 / 18 - 7 / 20) / 2)
    assert found.gain + found.lose + found.undecided == ["c0", "c2"]
    assert found.sentence.endswith("; leaking: these scores are not a fair estimate")
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
        tested = run.tested()
        for i, rows in enumerate(federation.rows["test"]):
            expected = (run.model(position=i)(federation.x[rows]).argmax(1) == federation.y[rows]).float()
            assert torch.equal(tested[i], expected)
        means = torch.stack([one.mean() for one in tested])
        torch.testing.assert_close(means, run.history.test(run.history.chosen))
        save(run, tmp_path / method.__name__)
        written = RunFolder(tmp_path / method.__name__).read_tested()
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(written, tested, strict=True))
    found = runs[FedAvg].verdict(runs[Local])
    folders = [[by_folder.Tested.of(RunFolder(tmp_path / name))] for name in ("FedAvg", "Local")]
    assert found == by_folder.verdict("fedavg", runs[FedAvg].summary.metric, *folders)
    assert found.over["local"].mean < 0
    assert answer(found) == -1 if found.over["local"].high < 0 else answer(found) == 0
    other = replace(federation, rows={**federation.rows, "test": federation.rows["test"][::-1]})
    with pytest.raises(UsageError, match="was not tested on the examples of"):
        fit(FedAvg(), other, nn.Linear(2, 2), rounds=1).verdict(runs[Local])
    (tmp_path / "Local/tested.safetensors").unlink()
    folders[1] = [by_folder.Tested.of(RunFolder(tmp_path / "Local"))]
    means = by_folder.verdict("fedavg", runs[FedAvg].summary.metric, *folders)
    assert means.over["local"].mean == pytest.approx(found.over["local"].mean)
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
        assert run.tested() == []
        assert run.verdict(run).undecided == ["0", "1", "2"]
        return
    torch.testing.assert_close(torch.stack([one.nanmean() for one in run.tested()]), run.history.test("own"))
    assert [len(one) for one in run.tested()] == [len(rows) for rows in federation.rows["test"]]


def test_a_client_counts_as_far_as_its_examples_tell():
    values = np.array([0.1, 0.3, 0.2, 0.6])
    student = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    for noise in (0.0, 0.01):  # the same for all
        mean, *bounds = weighted_interval(values, np.full(4, noise))
        assert (mean, *bounds) == pytest.approx((0.3, *student), abs=1e-5)
    noise = np.array([1.0, 1.0, 2.0, 4.0])  # which explains all differences: weights are its inverses
    mean, _, high = weighted_interval(values, noise)
    assert mean == pytest.approx((0.1 + 0.3 + 0.2 / 2 + 0.6 / 4) / 2.75, abs=1e-6)
    squares = ((values - mean) ** 2 / noise).sum()
    assert high - mean == pytest.approx(stats.t.ppf(0.975, 3) * np.sqrt(squares / 3 / 2.75), abs=1e-6)
    apart, noise = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.01, 0.02, 0.01, 1.0])
    between = min(np.linspace(0.5, 3, 2501), key=lambda one: abs(_squares(apart, noise, one) - 3))
    weights = 1 / (between + noise)
    assert weighted_interval(apart, noise)[0] == pytest.approx(np.average(apart, weights=weights), abs=1e-3)
    assert np.isnan(weighted_interval(values[:2], noise[:2])[1])


def _squares(values, noise, between):
    weights = 1 / (between + noise)
    return (weights * (values - np.average(values, weights=weights)) ** 2).sum()
