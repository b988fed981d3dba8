import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from kinfed.core.method import Params
from kinfed.core.optimiser import SGD, Adam
from kinfed.core.training import Training
from kinfed.errors import RunError, UsageError
from kinfed.methods import FedAMP
from kinfed.methods.parts import message_passing

float64 = torch.float64
THREE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=float64)
ATTENTION = torch.tensor(
    [[0.814534, 0.151633, 0.033834], [0.151633, 0.827846, 0.020521], [0.033834, 0.020521, 0.945645]], dtype=float64
)


def test_attention_by_hand(roster):
    method, known = FedAMP(alpha=0.5, sigma=2.0), roster(3, size=2)
    graph = method.graph(known, Params(THREE), known.everyone)
    torch.testing.assert_close(graph, ATTENTION, rtol=0, atol=1e-6)
    sent = method.send(known, Params(THREE), known.everyone).theta
    torch.testing.assert_close(sent[0], torch.tensor([0.151633, 0.067668], dtype=float64), rtol=0, atol=1e-6)


def test_attention_of_trained_models(bowls, executor):
    # One step of rate 1 lands on the optima, where all start points and pulls are equal.
    trial = bowls(FedAMP(alpha=0.5, sigma=2.0, pull=0.0), THREE, lr=1.0, executor=executor)
    trial.run(1)
    torch.testing.assert_close(trial.history.relations[0], ATTENTION.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(trial.headline, THREE, rtol=0, atol=1e-14)
    mixed = 0.5 * (ATTENTION @ THREE - THREE).square().sum(1)
    torch.testing.assert_close(trial.loss("mixed"), mixed, rtol=0, atol=1e-6)


def test_identical_models_stay_and_distant_models_are_strangers(roster):
    known, method = roster(3, size=2), FedAMP(alpha=0.2, sigma=1.0)
    same = torch.tensor([[1.5, -2.0]] * 3, dtype=float64)
    torch.testing.assert_close(method.send(known, Params(same), known.everyone).theta, same, rtol=0, atol=1e-15)
    graph = method.graph(known, Params(100 * THREE), known.everyone)
    assert torch.equal(graph, torch.eye(3, dtype=float64))


def test_the_pull_has_a_live_gradient(bowls, executor):
    # Without a loss of its own a client moves by -lr pull / alpha (w - u) a step.
    method = FedAMP(alpha=0.5, sigma=2.0, pull=0.3)
    trial = bowls(method, [0.0, 0.0, 0.0], h=0.0, lr=0.1, epochs=2, executor=executor)
    theta = torch.tensor([[0.0], [1.0], [2.0]], dtype=float64)
    sent = method.send(trial.roster, Params(theta), trial.roster.everyone)
    trial.fleet.state = Params(theta)
    _, uploads = trial.fleet.train(0, trial.roster.everyone, sent)
    left = (1 - 0.1 * 0.3 / 0.5) ** 2
    torch.testing.assert_close(uploads.theta, sent.theta + left * (theta - sent.theta), rtol=0, atol=1e-14)


def test_only_the_cohort_is_mixed(roster):
    known, method, cohort = roster(3, size=2), FedAMP(alpha=0.5, sigma=2.0), torch.tensor([0, 2])
    graph = method.graph(known, Params(THREE), cohort)
    w = 0.033834
    expected = torch.tensor([[1 - w, 0, w], [w, 0, 1 - w]], dtype=float64)
    torch.testing.assert_close(graph, expected, rtol=0, atol=1e-6)


def test_distances_ignore_running_statistics(roster, perceptron):
    known, method = roster(3, perceptron(norm=True)), FedAMP(alpha=0.2, sigma=1.0)
    theta = known.copies()
    theta[:, ~known.layout.trainable] = torch.arange(3, dtype=float64)[:, None]
    graph = method.graph(known, Params(theta), known.everyone)
    torch.testing.assert_close(graph, torch.full((3, 3), 0.2, dtype=float64) + 0.4 * torch.eye(3, dtype=float64))


def test_warns_of_negative_self_weights(roster):
    known, same = roster(3), Params(torch.zeros(3, 1, dtype=float64))
    with pytest.warns(UserWarning, match=r"own weight is negative; alpha up to sigma / \(N - 1\)"):
        FedAMP(alpha=0.6, sigma=1.0).graph(known, same, known.everyone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FedAMP(alpha=0.5, sigma=1.0).graph(known, same, known.everyone)
        alone = Params(same.theta[:1])  # nobody to resemble
        FedAMP(alpha=2.0, sigma=1.0).graph(roster(1), alone, torch.tensor([0]))


def test_negative_weights_leave_running_variances_positive(roster, perceptron):
    # Equal models: each gives 0.8 to both others, so its own weight is -0.6. On the simplex (-0.6, 0.8, 0.8) is nearest
    # to (0, 0.5, 0.5); a list of one neighbour gives 0.8 to it, and is a mean's as it is.
    known = roster(3, perceptron(norm=True))
    theta, running = known.copies(), ~known.layout.trainable
    theta[:, running] = torch.tensor([[1.0], [2.0], [5.0]], dtype=float64)
    method = FedAMP(alpha=0.8, sigma=1.0)
    with pytest.warns(UserWarning, match="own weight is negative"):
        sent = method.send(known, Params(theta), known.everyone).theta
    torch.testing.assert_close(sent[:, ~running], theta[:, ~running], rtol=0, atol=1e-14)
    halves = torch.tensor([3.5, 3.0, 1.5], dtype=float64)[:, None].expand(3, int(running.sum()))
    torch.testing.assert_close(sent[:, running], halves, rtol=0, atol=1e-14)
    near = FedAMP(alpha=0.8, sigma=1.0, neighbours=1)
    with pytest.warns(UserWarning, match="own weight is negative"):
        graph = near.graph(known, Params(theta), known.everyone)
    sent = near.send(known, Params(theta), known.everyone).theta
    torch.testing.assert_close(sent[:, ~running], (graph @ theta)[:, ~running], rtol=0, atol=1e-14)
    assert (sent[:, running] > 0).all()


@pytest.mark.filterwarnings("ignore:(fedamp|kernel)")
def test_batch_norm_trains_through_negative_weights(examples, noisy, perceptron, executor):
    # Five nearly equal models: own weights near -1, and clients whose activations have very different variances.
    x, y = noisy(5, 2)
    x = [part * 4.0**i for i, part in enumerate(x)]
    method = FedAMP(alpha=1.0, sigma=2.0, pull=0.1)
    training = Training(2, 4, SGD(0.01))
    trial = examples(perceptron(norm=True), x, y, method, training=training, executor=executor)
    server = trial.run(3)
    assert method.graph(trial.roster, server, trial.roster.everyone).diagonal().min() < -0.2
    variances = trial.roster.layout.index(frozenset({"1.running_var"}))
    assert (method.send(trial.roster, server, trial.roster.everyone).theta[:, variances] > 0).all()


def test_a_pull_that_overshoots_is_refused(bowls):
    # Without a loss a step multiplies the distance to the mixture by 1 - lr pull / alpha: by -1 at the limit of 2. With
    # momentum m the limit is 2 (1 + m).
    def start(lr, momentum=0.0, **settings):
        trial = bowls(FedAMP(**settings), [1.0, 2.0], optimiser=SGD(lr, momentum))
        return trial.method.start(trial.roster)

    with pytest.raises(UsageError, match=r"^fedamp: lr \* lambda / alpha is 2, but from 2 on .*lower method.pull or"):
        start(0.2, alpha=0.1)
    start(0.19, alpha=0.1)
    start(0.37, 0.9, alpha=0.1)
    with pytest.raises(UsageError, match=r"is 3.9, but from 3.8 on"):
        start(0.39, 0.9, alpha=0.1)
    start(5.0, alpha=0.0)  # no pull
    start(100.0)  # the defaults at a high rate
    trial = bowls(FedAMP(alpha=0.1), [1.0, 2.0], optimiser=Adam(0.5))  # whose steps do not grow with the pull
    trial.method.start(trial.roster)


@pytest.mark.filterwarnings("ignore:(fedamp|kernel)")
def test_divergence_names_the_weights_too(bowls, executor):
    # Own weights of -8: what is sent is thrown ever further out.
    trial = bowls(FedAMP(alpha=900.0, sigma=100.0), [1e3, 1001.0], lr=0.01, executor=executor)
    trial.fleet.state = Params(torch.tensor([[1e308], [torch.inf]], dtype=float64))
    sent = Params(torch.tensor([[1e308], [torch.inf]], dtype=float64))
    with pytest.raises(RunError, match=r"diverged .* at client 1; lower the learning rate or pull / alpha, and keep"):
        trial.fleet.train(0, trial.roster.everyone, sent)


@pytest.mark.filterwarnings("ignore:(fedamp|kernel)")
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10_000))
def test_few_neighbours_and_a_sample_of_the_rest_are_everyone(roster, count, neighbours, seed):
    known, method = roster(count, size=6), FedAMP(alpha=0.3, sigma=3.0, neighbours=neighbours)
    theta = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=float64)
    server, whole = Params(theta), FedAMP(alpha=0.3, sigma=3.0)
    for cohort in (known.everyone, torch.arange(0, count, 2)):
        graph, sent = method.graph(known, server, cohort), method.send(known, server, cohort).theta
        torch.testing.assert_close(graph.sum(1), torch.ones(len(cohort), dtype=float64), rtol=0, atol=1e-12)
        torch.testing.assert_close(sent, graph @ theta, rtol=0, atol=1e-12)
        torch.testing.assert_close(graph, whole.graph(known, server, cohort), rtol=0, atol=1e-12)


def test_neighbours_are_the_nearest(roster):
    # Pairs of models a step of 0.1 apart, the pairs far from each other.
    known, method = roster(8, size=300), FedAMP(alpha=0.1, sigma=1.0, neighbours=1)
    places = torch.randn(4, 300, generator=torch.Generator().manual_seed(0), dtype=float64)
    theta = places.repeat(2, 1)
    theta[4:, 0] += 0.1
    graph = method.graph(known, Params(theta), known.everyone)
    assert (graph > 1e-9).nonzero()[:, 1].view(8, 2).tolist() == [[i, i + 4] for i in range(4)] * 2
    assert graph[0, 4] == pytest.approx(0.1 * math.exp(-0.01))


@pytest.mark.parametrize(
    ("apart", "said"), [(1.0, "all others weigh alike, as "), (1e6, "no other has weight, as "), (1e4, None)]
)
def test_weights_that_tell_nobody_apart_are_told_once_with_what_helps(roster, apart, said):
    known, method = roster(5, size=40), FedAMP()
    theta = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=float64) * (apart / 80) ** 0.5
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for round in range(3):
            method.aggregate(replace(known, round=round), method.start(known), known.everyone, Params(theta))
    assert len(heard) == (said is not None)
    if said:
        assert str(heard[0].message).startswith(f"fedamp: {said}models' squared distances, of median ")


def test_a_round_computes_distances_once(roster, monkeypatch):
    known, method, made = roster(3, size=2), FedAMP(alpha=0.5, sigma=2.0), []
    real = message_passing.relate
    monkeypatch.setattr(message_passing, "relate", lambda *what: made.append(1) or real(*what))
    server = Params(THREE)
    for _ in range(2):
        method.send(known, server, known.everyone)
        method.relation(known, server, known.everyone)
    assert len(made) == 1
    method.send(known, server, torch.tensor([0, 2]))
    method.send(known, Params(THREE.clone()), torch.tensor([0, 2]))
    assert len(made) == 3
