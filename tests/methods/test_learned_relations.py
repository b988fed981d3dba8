"""FedAtt, HeurFedAMP, pFedGraph and FedFomo: numbers by hand, special cases, and rounds by the equations alone."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from kinfed.core.engine import sample
from kinfed.core.method import Params, SharedParams
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedAtt, FedAvg, FedFomo, HeurFedAMP, PFedGraph
from kinfed.methods.fedfomo import Sent, Server as Fomo, State, Upload
from kinfed.ops.sparsify import nearest_mixtures, project_simplex

float64 = torch.float64
SIZES = (7, 5, 9)


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=atol)


def cohorts(trial, share, rounds):
    return [sample(replace(trial.roster, round=t), share).tolist() for t in range(rounds)]


class Naive:
    """Clients of a small net as NumPy vectors; local training is kinfed's own FedAvg step of one client, from theta."""

    def __init__(self, examples, noisy, module, norm):
        self.x, self.y = noisy(3, 2, sizes=list(SIZES))
        self.examples, self.module = examples, module
        self.trial = self.make(FedAvg())
        self.entries, self.theta = self.trial.roster.layout.entries, self.trial.roster.theta.numpy()
        self.learned = self.trial.roster.layout.trainable.numpy()

    def make(self, method, executor="loop"):
        training = Training(2, 20, SGD(0.1))
        return self.examples(self.module, self.x, self.y, method, training=training, executor=executor)

    def trained(self, i, theta, method=None):
        """[d] by a run of one round of client i alone."""
        alone = self.trial.fleet
        sent = type(FedAvg().send(self.trial.roster, FedAvg().start(self.trial.roster), torch.tensor([i])))
        _, uploads = alone.train(0, torch.tensor([i]), sent(torch.from_numpy(theta)))
        return uploads.theta[0].numpy()


@pytest.fixture(params=[False, True], ids=["plain", "norm"])
def naive(request, examples, noisy, perceptron):
    return Naive(examples, noisy, perceptron(request.param), request.param)


@pytest.fixture(params=[1.0, 0.67])
def share(request):
    return request.param


def softmax(v):
    v = np.exp(np.asarray(v) - max(v))
    return v / v.sum()


# FedAtt


def test_attention_by_hand(roster):
    """w = (0, 0), models (3, 4) and (0, 1): distances 5 and 1, and 1.2 of the way."""
    method, two = FedAtt(), roster(2, size=2)
    two = replace(two, theta=torch.zeros(2, dtype=float64))
    uploads = (
        FedAvg()
        .send(two, FedAvg().start(two), two.everyone)
        ._replace(theta=torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=float64))
    )
    server = method.aggregate(two, method.start(two), two.everyone, uploads)
    close(server.attention[:, 0], [0.982014, 0.017986], 1e-6)
    close(server.theta, [3.53525, 4.73525], 1e-5)
    close(FedAtt(norm=1).attend(uploads.theta), softmax([7.0, 1.0]))
    relative = FedAtt(relative=True)
    close(relative.attend(uploads.theta), softmax([5 / 3, 1 / 3]))
    close(relative.attend(1000 * uploads.theta), relative.attend(uploads.theta))


def test_no_step_changes_nothing_and_equal_distances_are_the_plain_mean(bowls):
    assert float(bowls(FedAtt(step=0.0), [3.0, -1.0], start=1.0).run(3).theta) == 1.0
    trial = bowls(FedAtt(step=1.0), [3.0, -3.0], copies=[1, 3])  # as far from 0, whatever their numbers of examples
    assert float(trial.run(1).theta) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(
    ("scale", "said"),
    [(100.0, "1 of 1 tensors follow one client alone, .* much more than 1"), (1e-3, "all clients weigh")],
)
def test_distances_of_another_scale_are_told(roster, scale, said):
    known, method = roster(3, size=2), FedAtt()
    uploads = SharedParams(known.theta + scale * torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]], dtype=float64))
    with pytest.warns(UserWarning, match=f"^fedatt: {said}.*; set method.relative=true"):
        method.aggregate(known, method.start(known), known.everyone, uploads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.aggregate(replace(known, round=1), method.start(known), known.everyone, uploads)
        replace(method, relative=True).aggregate(known, method.start(known), known.everyone, uploads)


@pytest.mark.filterwarnings("ignore:fedatt")
@pytest.mark.parametrize("method", [FedAtt(), FedAtt(step=1.0, norm=1, relative=True)], ids=["default", "relative"])
def test_fedatt(method, naive, share, executor):
    trial = naive.make(method, executor)
    server = trial.run(3, participation=share)
    w = naive.theta.copy()
    for cohort in cohorts(trial, share, 3):
        ends = {i: naive.trained(i, w) for i in cohort}
        total = sum(SIZES[i] for i in cohort)
        after = sum(SIZES[i] / total * v for i, v in ends.items())
        for e in naive.entries:
            if e.trainable:
                far = [np.linalg.norm(w[e.at] - v[e.at], method.norm) for v in ends.values()]
                far = np.array(far) / (np.mean(far) if method.relative else 1)
                pulls = sum(a * (w[e.at] - v[e.at]) for a, v in zip(softmax(far), ends.values(), strict=True))
                after[e.at] = w[e.at] - method.step * pulls
        w = after
    close(server.theta, w, 1e-10)


# HeurFedAMP


def test_weights_by_hand(roster):
    theta = torch.tensor([[1.0, 0], [1, 1], [0, 1]], dtype=float64)
    known, method = roster(3, size=2), HeurFedAMP(sharpness=10.0, home=0.3)

    def graph(method):
        return method.graph(known, Params(theta), known.everyone)

    close(graph(method), [[0.3, 0.699406, 0.000594], [0.35, 0.3, 0.35], [0.000594, 0.699406, 0.3]], 1e-6)
    close(graph(replace(method, sharpness=0.0)), 0.35 - 0.05 * torch.eye(3, dtype=float64))
    assert torch.isfinite(graph(replace(method, sharpness=1e30))).all()
    close(method.graph(known, Params(theta), torch.tensor([1]))[:, 1], [1.0])


def test_models_of_nearly_one_direction_weigh_alike_and_this_is_told(roster):
    known, method = roster(4, size=30), HeurFedAMP()
    step = torch.randn(4, 30, generator=torch.Generator().manual_seed(0), dtype=float64)
    with pytest.warns(
        UserWarning, match=r"^heurfedamp: all others weigh alike, as cosines of models differ by .*; raise"
    ):
        method.aggregate(known, method.start(known), known.everyone, Params(100 + step))


@pytest.mark.filterwarnings("ignore:heurfedamp")
@pytest.mark.parametrize("method", [HeurFedAMP(), HeurFedAMP(sharpness=10.0, home=0.1)], ids=["default", "others"])
def test_heurfedamp(method, naive, share, executor):
    trial = naive.make(method, executor)
    server = trial.run(3, participation=share)
    own = [naive.theta.copy() for _ in SIZES]
    for cohort in cohorts(trial, share, 3):
        way = {i: own[i] * naive.learned for i in cohort}
        new = {}
        for i in cohort:
            others = [j for j in cohort if j != i]
            cos = [way[i] @ way[j] / np.linalg.norm(way[i]) / np.linalg.norm(way[j]) for j in others]
            rest = zip(softmax([method.sharpness * c for c in cos]), others, strict=True)
            mixed = method.home * own[i] + (1 - method.home) * sum(a * own[j] for a, j in rest)
            new[i] = pulled(naive, i, own[i], mixed, method.pull)
        for i, v in new.items():
            own[i] = v
    close(server.theta, np.stack(own), 1e-10)


def pulled(naive, i, theta, anchor, pull):
    """[d] two full-batch steps with a pull: each is a step of one epoch without it, and its own step of the pull."""
    one = naive.examples(naive.module, [naive.x[i]], [naive.y[i]], FedAvg(), training=Training(1, 20, SGD(0.1)))
    for _ in range(2):
        sent = type(FedAvg().start(one.roster))(torch.from_numpy(theta))
        _, uploads = one.fleet.train(0, torch.tensor([0]), sent)
        theta = uploads.theta[0].numpy() - 0.1 * pull * naive.learned * (theta - anchor)
    return theta


def test_a_pull_that_overshoots_is_refused(bowls):
    with pytest.raises(
        UsageError, match=r"heurfedamp: lr \* lambda / alpha is 3, .* from the mixture; lower method.pull"
    ):
        bowls(HeurFedAMP(pull=30.0), [1.0, 2.0]).run(1)


# pFedGraph


def test_the_graph_by_hand():
    p, s = torch.tensor([0.5, 0.3, 0.2], dtype=float64), torch.tensor([1.0, 0.2, -0.4], dtype=float64)
    close(project_simplex(p + s / 1.6), [0.85, 0.15, 0.0])
    p, s = torch.full((3,), 1 / 3, dtype=float64), torch.tensor([1.0, 0.9, 0.8], dtype=float64)
    close(project_simplex(p + s / 1.6), [0.395833, 0.333333, 0.270833], 1e-6)


def test_the_projection_solves_the_quadratic_programme():
    """min a |x|^2 - (s + 2 a p) x over weights of a mean, by Nesterov's steps on |x - p - s / 2a|^2."""
    draw = torch.Generator().manual_seed(0)
    goal = torch.rand(4, 4, generator=draw, dtype=float64) + torch.randn(4, 4, generator=draw, dtype=float64)
    everyone = torch.ones(4, 4, dtype=torch.bool)
    close(project_simplex(goal), nearest_mixtures(torch.zeros(4, 4, dtype=float64), goal, everyone, 1.0), 1e-9)


def graph(theta, origin, learned, seen, alpha):
    """[N, N] rows by bisection on what is taken from all."""
    way = [(v - origin) * learned for v in theta]
    rows, total = np.zeros((3, 3)), sum(SIZES[j] for j in seen)
    for i in range(3):
        goal = {}
        for j in seen:
            length = np.linalg.norm(way[i]) * np.linalg.norm(way[j])
            goal[j] = SIZES[j] / total + (way[i] @ way[j] / length if i in seen else 0.0) / (2 * alpha)
        low, high = min(goal.values()) - 1, max(goal.values())
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(max(0, g - middle) for g in goal.values()) > 1 else (low, middle)
        for j, g in goal.items():
            rows[i, j] = max(0, g - high)
    return rows


def test_pfedgraph(naive, share, executor):
    trial = naive.make(PFedGraph(pull=0.0), executor)
    server = trial.run(3, participation=share)
    own, seen = [naive.theta.copy() for _ in SIZES], set()
    for cohort in cohorts(trial, share, 3):
        rows = graph(own, naive.theta, naive.learned, seen or range(3), 0.8) if seen else np.full((3, 3), 1 / 3)
        new = {i: naive.trained(i, rows[i] @ np.stack(own)) for i in cohort}
        for i, v in new.items():
            own[i] = v
        seen |= set(cohort)
    close(server.theta, np.stack(own), 1e-9)
    rows = graph(own, naive.theta, naive.learned, seen, 0.8)
    close(trial.method.relation(trial.roster, server, trial.roster.everyone), rows, 1e-9)
    assert len(seen) == 3 or rows[:, list({0, 1, 2} - seen)].sum() == 0


def test_the_pull_is_towards_the_directions_of_the_mixed_models(bowls, executor):
    """Two steps on |theta - b|^2 / 2 - 0.5 sum_j w_j cos(theta, theta_j) by its gradient, in the second round."""
    b = torch.tensor([[3.0, 4.0], [-1.0, 2.0]], dtype=float64)
    trial = bowls(PFedGraph(pull=0.5), b, start=[1.0, 0.5], epochs=2, executor=executor)
    models = trial.run(1).theta
    first = torch.tensor([1.0, 0.5], dtype=float64)
    for _ in range(2):
        first = first + 0.1 * (b - first)
    close(models, first)  # nobody has a model in the first round, so there is no pull
    rows = trial.method.graph(
        trial.roster, trial.method.start(trial.roster)._replace(theta=models), trial.roster.everyone
    )
    server = trial.run(2)
    moved = first - torch.tensor([1.0, 0.5], dtype=float64)
    cosine = moved[0] @ moved[1] / moved.norm(dim=1).prod()
    rows = project_simplex(0.5 + torch.tensor([[1.0, cosine], [cosine, 1.0]], dtype=float64) / 1.6)
    for i in range(2):
        theta = rows[i] @ first
        for _ in range(2):
            length, pull = theta.norm(), 0
            for w, other in zip(rows[i], first, strict=True):
                unit = other / other.norm()
                pull = pull + w * (unit / length - (unit @ theta) * theta / length**3)
            theta = theta + 0.1 * (b[i] - theta) + 0.1 * 0.5 * pull
        close(server.theta[i], theta)


# FedFomo


def test_fomos_weights_by_hand(bowls, executor):
    """Loss (x - 3)^2 / 2 from old 0; own 1, others 2, -1 and an absent one: gains 2.5 / 1, 4 / 2, -3.5 / 1."""
    trial = bowls(FedFomo(models=3, feedback="train"), [3.0], executor=executor)
    one = torch.ones(1, 1, dtype=float64)
    trial.fleet.state = State(one, 0 * one)
    models = torch.tensor([[[2.0], [-1.0], [3.0]]], dtype=float64)
    _, uploads = trial.fleet.train(0, torch.tensor([0]), Sent(models, torch.tensor([[True, True, False]])))
    close(uploads.weight[0], [2 / 4.5, -3.5 / 4.5, 0.0])
    start = (2.5 * 1 + 2 * 2) / 4.5
    close(uploads.theta[0], [start + 0.1 * (3 - start)])
    close(trial.fleet.state.old[0], [start])


def test_who_gains_nothing_stays_with_its_own(bowls):
    trial = bowls(FedFomo(models=1, feedback="train"), [3.0])
    trial.fleet.state = State(*(torch.full((1, 1), v, dtype=float64) for v in (2.0, 3.0)))
    models = torch.tensor([[[9.0]]], dtype=float64)
    _, uploads = trial.fleet.train(0, torch.tensor([0]), Sent(models, torch.tensor([[True]])))
    close(uploads.weight[0], [-6 / 7])  # of slopes of -3 and, for its own model, -1/2
    close(trial.fleet.state.old[0], [2.0])


def test_models_that_would_have_raised_the_loss_are_asked_for_after_those_never_tried(roster):
    """As in the authors' program, whose affinities are sums of weights of either sign."""
    six = roster(6)
    method, cohort = FedFomo(models=2, explore=0.0), torch.tensor([0])
    server = method.start(six)._replace(seen=torch.ones(6, dtype=torch.bool))
    asked = []
    for _ in range(2):
        chosen = method.choose_models(six, server, cohort)
        asked.append(set(chosen[0].tolist()))
        upload = Upload(torch.zeros(1, 1, dtype=float64), torch.tensor([[-0.5, -0.2]], dtype=float64))
        server = method.aggregate(six, server, cohort, upload)
    assert not asked[0] & asked[1]
    assert server.weight.min() == 0
    close(server.liking[0].sort().values, [-0.5, -0.5, -0.2, -0.2, 0.0, 0.0])


def test_who_is_sent_what(roster):
    ten = roster(10)
    method = FedFomo(models=4, explore=0.5)
    server = method.start(ten)
    liking = torch.zeros(10, 10, dtype=float64)
    liking[0, 7], liking[0, 3], liking[0, 0] = 2.0, 1.0, 9.0
    seen = torch.arange(10) != 5
    server = Fomo(server.theta, seen, liking, server.weight)
    first, drawn = 0, set()
    for t in range(400):
        chosen = method.choose_models(replace(ten, round=t), server, torch.tensor([0, 5]))
        assert chosen.shape == (2, 4)
        mine = chosen[0].tolist()
        assert len(set(mine)) == 4
        assert not {0, 5} & set(mine)  # nor itself, nor who has no model yet
        first += mine[0] == 7
        drawn |= set(mine)
    assert drawn == {1, 2, 3, 4, 6, 7, 8, 9}
    assert abs(first / 400 - (0.5 + 0.5 / 8)) < 0.1  # four standard deviations: greedily, or by chance among eight
    assert FedFomo(models=4, explore=0.0).choose_models(ten, server, torch.tensor([0]))[0, :2].tolist() == [7, 3]
    few = method.choose_models(ten.part(torch.arange(3)), method.start(ten.part(torch.arange(3))), torch.arange(3))
    assert few.tolist() == [[i] * 4 for i in range(3)]


def test_fedfomo(naive, share, executor):
    method = FedFomo(models=2, explore=0.0, feedback="train")
    trial = naive.make(method, executor)
    server = trial.run(3, participation=share)
    own, old = ([naive.theta.copy() for _ in SIZES] for _ in range(2))
    weight, liking, seen = np.zeros((3, 3)), np.zeros((3, 3)), set()

    def loss(i, theta):
        outputs = trial.fleet.model(torch.from_numpy(theta), naive.x[i])
        return float((outputs - naive.y[i]).square().mean())

    for cohort in cohorts(trial, share, 3):
        new = {}
        for i in cohort:
            gains = {}
            for j in seen | {i}:
                far = np.linalg.norm((own[j] - old[i]) * naive.learned)
                gains[j] = (loss(i, old[i]) - loss(i, own[j])) / far if far else 0.0
            total = sum(max(0.0, g) for g in gains.values())
            scale = total or sum(map(abs, gains.values())) or 1.0
            share_of = {j: g / total for j, g in gains.items() if g > 0} if total else {i: 1.0}
            new[i] = sum(a * own[j] for j, a in share_of.items())
            weight[i] = 0
            for j, g in gains.items():
                if j != i:
                    weight[i, j] = share_of.get(j, 0.0)
                    liking[i, j] += max(-1.0, g / scale)
        for i, start in new.items():
            old[i], own[i] = start, naive.trained(i, start)
        seen |= set(cohort)
    close(server.theta, np.stack(own), 1e-9)
    close(server.liking, liking, 1e-9)
    close(trial.method.relation(trial.roster, server, None), weight + np.diag(1 - weight.sum(1)), 1e-9)
    assert weight.any()
