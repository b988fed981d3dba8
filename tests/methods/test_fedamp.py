import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed.core.client import Training
from kinfed.core.method import Params
from kinfed.core.optimiser import SGD, Adam
from kinfed.errors import RunError, UsageError
from kinfed.methods import FedAMP
from kinfed.methods.parts.model_attention import Cosine, Gaussian

float64 = torch.float64
THREE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=float64)
ATTENTION = torch.tensor(
    [[0.814534, 0.151633, 0.033834], [0.151633, 0.827846, 0.020521], [0.033834, 0.020521, 0.945645]], dtype=float64
)


def test_attention_by_hand(roster):
    method, known = FedAMP(Gaussian(alpha=0.5, sigma=2.0)), roster(3, size=2)
    graph = method.graph(known, Params(THREE), known.everyone)
    torch.testing.assert_close(graph, ATTENTION, rtol=0, atol=1e-6)
    sent = method.send(known, Params(THREE), known.everyone).theta
    torch.testing.assert_close(sent[0], torch.tensor([0.151633, 0.067668], dtype=float64), rtol=0, atol=1e-6)


def test_attention_of_trained_models(bowls, executor):
    # One step of rate 1 lands on the optima, where all start points and pulls are equal.
    trial = bowls(FedAMP(Gaussian(alpha=0.5, sigma=2.0, pull=0.0)), THREE, lr=1.0, executor=executor)
    trial.run(1)
    torch.testing.assert_close(trial.history.relations[0], ATTENTION.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(trial.headline, THREE, rtol=0, atol=1e-14)
    mixed = 0.5 * (ATTENTION @ THREE - THREE).square().sum(1)
    torch.testing.assert_close(trial.loss("mixed"), mixed, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:fedamp")
@settings(max_examples=50)
@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=2, max_size=2), min_size=2, max_size=6),
    st.floats(0.01, 5),
    st.floats(0.1, 5),
)
def test_attention_is_symmetric_and_rows_sum_to_one(roster, theta, alpha, sigma):
    theta, known = torch.tensor(theta, dtype=float64), roster(len(theta), size=2)
    graph = FedAMP(Gaussian(alpha=alpha, sigma=sigma)).graph(known, Params(theta), known.everyone)
    torch.testing.assert_close(graph, graph.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(graph.sum(1), torch.ones(len(theta), dtype=float64), rtol=0, atol=1e-11)
    off = graph - torch.diag(graph.diagonal())
    assert (off >= 0).all()
    assert (off <= alpha / sigma + 1e-12).all()


def test_identical_models_stay_and_distant_models_are_strangers(roster):
    known, method = roster(3, size=2), FedAMP(Gaussian(alpha=0.2, sigma=1.0))
    same = torch.tensor([[1.5, -2.0]] * 3, dtype=float64)
    torch.testing.assert_close(method.send(known, Params(same), known.everyone).theta, same, rtol=0, atol=1e-15)
    graph = method.graph(known, Params(100 * THREE), known.everyone)
    assert torch.equal(graph, torch.eye(3, dtype=float64))


def test_published_constants_keep_at_least_four_fifths(roster):
    known = roster(20, size=3)
    theta = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=float64)
    graph = FedAMP(Gaussian(alpha=100.0, sigma=1e4)).graph(known, Params(theta), known.everyone)
    off = graph - torch.diag(graph.diagonal())
    assert off.max() <= 0.01
    assert graph.diagonal().min() >= 0.81
    assert off.sum() == pytest.approx(3.8, rel=0.01)  # nearby models: almost the bound


def test_the_pull_has_a_live_gradient(bowls, executor):
    # Without a loss of its own a client moves by -lr pull / alpha (w - u) a step.
    method = FedAMP(Gaussian(alpha=0.5, sigma=2.0, pull=0.3))
    trial = bowls(method, [0.0, 0.0, 0.0], h=0.0, lr=0.1, epochs=2, executor=executor)
    theta = torch.tensor([[0.0], [1.0], [2.0]], dtype=float64)
    sent = method.send(trial.roster, Params(theta), trial.roster.everyone)
    trial.fleet.state = Params(theta)
    _, uploads = trial.fleet.train(0, trial.roster.everyone, sent)
    left = (1 - 0.1 * 0.3 / 0.5) ** 2
    torch.testing.assert_close(uploads.theta, sent.theta + left * (theta - sent.theta), rtol=0, atol=1e-14)


def test_many_steps_reach_the_proximal_point(bowls):
    # argmin of h/2 (w - b)^2 + pull / (2 alpha) (w - u)^2 with pull / alpha = 2.
    method = FedAMP(Gaussian(alpha=0.5, sigma=2.0, pull=1.0))
    trial = bowls(method, [3.0, -1.0], h=[1.0, 2.0], lr=0.1, epochs=300)
    theta = torch.tensor([[0.0], [1.0]], dtype=float64)
    sent = method.send(trial.roster, Params(theta), trial.roster.everyone)
    trial.fleet.state = Params(theta)
    _, uploads = trial.fleet.train(0, trial.roster.everyone, sent)
    u = sent.theta.squeeze(1)
    expected = torch.stack([(3 + 2 * u[0]) / 3, (-2 + 2 * u[1]) / 4])
    torch.testing.assert_close(uploads.theta.squeeze(1), expected, rtol=0, atol=1e-12)


def test_only_the_cohort_is_mixed(roster):
    known, method, cohort = roster(3, size=2), FedAMP(Gaussian(alpha=0.5, sigma=2.0)), torch.tensor([0, 2])
    graph = method.graph(known, Params(THREE), cohort)
    w = 0.033834
    expected = torch.tensor([[1 - w, 0, w], [w, 0, 1 - w]], dtype=float64)
    torch.testing.assert_close(graph, expected, rtol=0, atol=1e-6)


def test_distances_ignore_running_statistics(roster, perceptron):
    known, method = roster(3, perceptron(norm=True)), FedAMP(Gaussian(alpha=0.2, sigma=1.0))
    theta = known.copies()
    theta[:, ~known.layout.trainable] = torch.arange(3, dtype=float64)[:, None]
    graph = method.graph(known, Params(theta), known.everyone)
    torch.testing.assert_close(graph, torch.full((3, 3), 0.2, dtype=float64) + 0.4 * torch.eye(3, dtype=float64))


def test_warns_of_negative_self_weights(roster):
    known, same = roster(3), Params(torch.zeros(3, 1, dtype=float64))
    with pytest.warns(UserWarning, match=r"own weight is -0.2; alpha up to sigma / \(N - 1\) = 0.5"):
        FedAMP(Gaussian(alpha=0.6, sigma=1.0)).graph(known, same, known.everyone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FedAMP(Gaussian(alpha=0.5, sigma=1.0)).graph(known, same, known.everyone)
        alone = Params(same.theta[:1])  # nobody to resemble
        FedAMP(Gaussian(alpha=2.0, sigma=1.0)).graph(roster(1), alone, torch.tensor([0]))


def test_negative_weights_leave_running_variances_positive(roster, perceptron):
    # Equal models: each gives 0.8 to both others, so its own weight is -0.6. On the simplex (-0.6, 0.8, 0.8) is nearest
    # to (0, 0.5, 0.5); a list of one neighbour gives 0.8 to it, and is a mean's as it is.
    known = roster(3, perceptron(norm=True))
    theta, running = known.copies(), ~known.layout.trainable
    theta[:, running] = torch.tensor([[1.0], [2.0], [5.0]], dtype=float64)
    method = FedAMP(Gaussian(alpha=0.8, sigma=1.0))
    with pytest.warns(UserWarning, match="own weight is -0.6"):
        sent = method.send(known, Params(theta), known.everyone).theta
    torch.testing.assert_close(sent[:, ~running], theta[:, ~running], rtol=0, atol=1e-14)
    halves = torch.tensor([3.5, 3.0, 1.5], dtype=float64)[:, None].expand(3, int(running.sum()))
    torch.testing.assert_close(sent[:, running], halves, rtol=0, atol=1e-14)
    near = FedAMP(Gaussian(alpha=0.8, sigma=1.0), neighbours=1)
    graph = near.graph(known, Params(theta), known.everyone)
    sent = near.send(known, Params(theta), known.everyone).theta
    torch.testing.assert_close(sent, graph @ theta, rtol=0, atol=1e-14)


@pytest.mark.filterwarnings("ignore:fedamp")
def test_batch_norm_trains_through_negative_weights(examples, noisy, perceptron, executor):
    # Five nearly equal models: own weights near -1, and clients whose activations have very different variances.
    x, y = noisy(5, 2)
    x = [part * 4.0**i for i, part in enumerate(x)]
    method = FedAMP(Gaussian(alpha=1.0, sigma=2.0, pull=0.1))
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
        trial = bowls(FedAMP(Gaussian(sigma=100.0, **settings)), [1.0, 2.0], optimiser=SGD(lr, momentum))
        return trial.method.start(trial.roster)

    with pytest.raises(UsageError, match=r"lr \* pull / alpha is 2, but from 2 on .*lower method.attention.pull"):
        start(0.2, alpha=0.1, pull=1.0)
    start(0.19, alpha=0.1, pull=1.0)
    start(0.37, 0.9, alpha=0.1, pull=1.0)
    with pytest.raises(UsageError, match=r"is 3.9, but from 3.8 on"):
        start(0.39, 0.9, alpha=0.1, pull=1.0)
    start(5.0, alpha=0.0, pull=1.0)  # no pull
    # Adam's steps do not grow with the pull, and cosine attention has none.
    for method, optimiser in ((FedAMP(Gaussian(alpha=0.1, pull=1.0)), Adam(0.5)), (FedAMP(), SGD(1e3))):
        trial = bowls(method, [1.0, 2.0], optimiser=optimiser)
        trial.method.start(trial.roster)
    start(1.0)  # the defaults of the Gaussian form, at a high rate


@pytest.mark.filterwarnings("ignore:fedamp")
def test_divergence_names_the_weights_too(bowls, executor):
    # Own weights of -8: what is sent is thrown ever further out.
    trial = bowls(FedAMP(Gaussian(alpha=900.0, sigma=100.0)), [1e3, 1001.0], lr=0.01, executor=executor)
    trial.fleet.state = Params(torch.tensor([[1e308], [torch.inf]], dtype=float64))
    sent = Params(torch.tensor([[1e308], [torch.inf]], dtype=float64))
    with pytest.raises(RunError, match=r"diverged .* at client 1; lower the learning rate or pull / alpha, and keep"):
        trial.fleet.train(0, trial.roster.everyone, sent)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (Gaussian, {"sigma": 0.0}),
        (Gaussian, {"alpha": -1.0}),
        (Gaussian, {"pull": -1.0}),
        (Cosine, {"tau": 0.0}),
        (Cosine, {"share": 1.1}),
        (FedAMP, {"neighbours": -1}),
    ],
)
def test_refuses(part, wrong):
    with pytest.raises(UsageError, match=rf"^{part.__name__}\.{next(iter(wrong))} must be "):
        part(**wrong)


@pytest.mark.filterwarnings("ignore:fedamp")
@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10_000))
def test_few_neighbours_are_still_a_mean_and_all_are_everyone(roster, count, neighbours, seed):
    known, method = roster(count, size=6), FedAMP(Gaussian(alpha=0.3, sigma=3.0), neighbours=neighbours)
    theta = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=float64)
    server, whole = Params(theta), FedAMP(Gaussian(alpha=0.3, sigma=3.0))
    for cohort in (known.everyone, torch.arange(0, count, 2)):
        graph, sent = method.graph(known, server, cohort), method.send(known, server, cohort).theta
        torch.testing.assert_close(graph.sum(1), torch.ones(len(cohort), dtype=float64), rtol=0, atol=1e-12)
        torch.testing.assert_close(sent, graph @ theta, rtol=0, atol=1e-12)
        others = graph.scatter(1, cohort[:, None], 0.0)
        assert ((others > 0).sum(1) <= neighbours).all()
        dense = whole.graph(known, server, cohort).scatter(1, cohort[:, None], 0.0)
        torch.testing.assert_close(others, dense * (others > 0), rtol=0, atol=1e-12)  # a pair's attention is its own
        if neighbours >= len(cohort) - 1:
            torch.testing.assert_close(graph, whole.graph(known, server, cohort), rtol=0, atol=1e-12)


def test_neighbours_are_the_nearest(roster):
    # Pairs of models a step of 0.1 apart, the pairs far from each other.
    known, method = roster(8, size=300), FedAMP(Gaussian(alpha=0.1, sigma=1.0), neighbours=1)
    places = torch.randn(4, 300, generator=torch.Generator().manual_seed(0), dtype=float64)
    theta = places.repeat(2, 1)
    theta[4:, 0] += 0.1
    graph = method.graph(known, Params(theta), known.everyone)
    assert (graph > 0).nonzero()[:, 1].view(8, 2).tolist() == [[i, i + 4] for i in range(4)] * 2
    assert graph[0, 4] == pytest.approx(0.1 * math.exp(-0.01))


def test_cosine_attention_by_hand(roster):
    # Moves (3, 4), (4, 3) and (-4, 3) have cosines 0.96, 0 and -0.28.
    known = roster(3, size=2)
    theta = known.theta + torch.tensor([[3.0, 4.0], [4.0, 3.0], [-4.0, 3.0]], dtype=float64)
    cosines = [[1, 0.96, 0], [0.96, 1, -0.28], [0, -0.28, 1]]
    expected = torch.tensor([[math.exp(c / 0.5) for c in row] for row in cosines], dtype=float64)
    expected /= expected.sum(1, keepdim=True)
    method = FedAMP(Cosine(tau=0.5))
    graph = method.graph(known, Params(theta), known.everyone)
    torch.testing.assert_close(graph, expected, rtol=0, atol=1e-12)
    sent = method.send(known, Params(theta), known.everyone).theta
    torch.testing.assert_close(sent, expected @ theta, rtol=0, atol=1e-12)
    pair = torch.tensor([0, 2])  # of a cohort, only its clients
    expected = torch.tensor([math.e**2, 1], dtype=float64) / (math.e**2 + 1)
    graph = method.graph(known, Params(theta), pair)
    torch.testing.assert_close(graph[:, pair], torch.stack([expected, expected.flip(0)]), rtol=0, atol=1e-12)
    assert not graph[:, 1].any()


@settings(max_examples=30)
@given(st.lists(st.floats(1e-6, 1e6), min_size=5, max_size=5), st.integers(0, 4), st.integers(0, 1000))
def test_cosine_attention_does_not_depend_on_how_far_models_moved(roster, scales, neighbours, seed):
    known, method = roster(5, size=6), FedAMP(neighbours=neighbours)
    moved = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed), dtype=float64)
    near, far = (
        method.graph(known, Params(known.theta + scale * moved), known.everyone)
        for scale in (1.0, torch.tensor(scales, dtype=float64)[:, None])
    )
    torch.testing.assert_close(near, far, rtol=0, atol=1e-7)
    torch.testing.assert_close(near.sum(1), torch.ones(5, dtype=float64), rtol=0, atol=1e-12)
    assert torch.equal(near.argmax(1), known.everyone)  # each its own model most
    if neighbours:
        assert ((near > 0).sum(1) == neighbours + 1).all()
    if neighbours == 4:
        whole = FedAMP().graph(known, Params(known.theta + moved), known.everyone)
        torch.testing.assert_close(near, whole, rtol=0, atol=1e-12)


def test_models_that_have_not_moved_are_alike_and_no_kin_of_others(roster, perceptron):
    known = roster(4, perceptron())
    theta = known.copies()
    graph = FedAMP().graph(known, Params(theta), known.everyone)
    torch.testing.assert_close(graph, torch.full((4, 4), 0.25, dtype=float64))
    step = torch.randn(len(known.theta), generator=torch.Generator().manual_seed(0), dtype=float64)
    theta[3] += step - step @ known.theta / known.theta.square().sum() * known.theta  # at a right angle to the initial
    expected = torch.tensor([1, 1, 1, math.exp(-10)], dtype=float64)
    for method in (FedAMP(), FedAMP(neighbours=3)):
        graph = method.graph(known, Params(theta), known.everyone)
        torch.testing.assert_close(graph[0], expected / expected.sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lr", [0.01, 10.0])
def test_training_starts_at_a_share_of_the_way_to_the_mixture(bowls, executor, lr):
    # Without a loss of its own a client stays where it starts, whatever the learning rate.
    trial = bowls(FedAMP(Cosine(share=0.75)), [0.0, 0.0], h=0.0, lr=lr, epochs=3, executor=executor)
    trial.fleet.state = Params(torch.tensor([[0.0], [1.0]], dtype=float64))
    sent = Params(torch.tensor([[4.0], [-1.0]], dtype=float64))
    _, uploads = trial.fleet.train(0, trial.roster.everyone, sent)
    torch.testing.assert_close(uploads.theta, torch.tensor([[3.0], [-0.5]], dtype=float64), rtol=0, atol=1e-14)
    # With one, a step of rate lr and h = 1 goes from there towards its optimum.
    trial = bowls(FedAMP(Cosine(share=0.75)), [2.0, 2.0], lr=0.5, executor=executor)
    trial.fleet.state = Params(torch.tensor([[0.0], [1.0]], dtype=float64))
    _, uploads = trial.fleet.train(0, trial.roster.everyone, sent)
    torch.testing.assert_close(uploads.theta, torch.tensor([[2.5], [0.75]], dtype=float64), rtol=0, atol=1e-14)
