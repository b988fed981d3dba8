"""pFedGAT's default graph: its numbers by hand, and that it depends on no scale."""

from dataclasses import replace

import pytest
import torch

from kinfed.core.client import Training
from kinfed.core.optimiser import SGD
from kinfed.methods import PFedGAT
from kinfed.methods.parts.agreement import agreed
from kinfed.methods.parts.feedback import Upload
from kinfed.methods.parts.hedge import LIMIT, Evidence, Hedge

float64 = torch.float64


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


def evidence(count, home=0.5, sharpness=2.0, lessons=4.0, seed=3):
    logs = torch.tensor([home, sharpness], dtype=float64).log()
    return Evidence(random(count, count, seed=seed), torch.full((count,), lessons, dtype=float64), *logs)


def taught(method, known, network, models, cohort=None, *, change, answer):
    """The network after a round in which the cohort judges mixtures of everybody's models: [N, d]."""
    everyone, still = known.everyone, torch.zeros_like(models)
    server = method.start(known)._replace(network=network)
    server = method.aggregate(known, server, everyone, Upload(models, still))
    cohort = everyone if cohort is None else cohort
    upload = Upload(server.theta[cohort] + change, answer)
    return method.aggregate(replace(known, round=1), server, cohort, upload).network


def test_weights_by_hand(roster):
    known, network = roster(3), evidence(3)
    network = network._replace(against=torch.tensor([[9, 0, 2], [1, 9, 0], [-1, 1, 9]], dtype=float64))
    weights = Hedge().weights(network, known, None, known.everyone)
    # q = 2 over the root of 4 lessons: exp of minus the numbers against, and p = 0.5 beside their softmax.
    e = torch.tensor(1.0, dtype=float64).exp()
    rows = [[0.5, e**2 / (1 + e**2), 1 / (1 + e**2)], [1 / (1 + e), 0.5, e / (1 + e)]]
    close(weights[:2], torch.tensor(rows, dtype=float64) / 1.5)
    close(weights.sum(1), torch.ones(3, dtype=float64))
    pair = Hedge().weights(network, known, None, torch.tensor([0, 2]))
    close(pair, torch.tensor([[1, 2], [2, 1]], dtype=float64) / 3)  # one other has all that is not p's
    close(Hedge().weights(network, known, None, torch.tensor([1])), torch.ones(1, 1, dtype=float64))


def test_it_begins_uniform_over_the_others(roster):
    known = roster(4)
    weights = Hedge(home=0.3).weights(Hedge().draw(known), known, None, known.everyone)
    expected = torch.full((4, 4), 1 / 3.9, dtype=float64).fill_diagonal_(0.3 / 1.3)
    close(weights, expected, atol=1e-7)


@pytest.mark.parametrize("cohort", [[0, 1, 2, 3], [1, 3]])
def test_a_lesson_by_hand(roster, cohort):
    known, method, cohort = roster(4, size=5), PFedGAT(lr=0.7), torch.tensor(cohort)
    network, models = evidence(4), random(4, 5)
    change, answer = random(len(cohort), 5, seed=1), random(len(cohort), 5, seed=2)
    after = taught(method, known, network, models, cohort, change=change, answer=answer)
    weights = Hedge().weights(network, known, None, known.everyone)
    harm, by_home, by_sharpness = torch.zeros(len(cohort), 4, dtype=float64), [], []
    for k, i in enumerate(cohort.tolist()):
        others = [j for j in range(4) if j != i]
        found = torch.stack([-change[k] @ models[j] for j in others])
        harm[k, others] = found - found.mean()
        s = weights[i, others] / weights[i, others].sum()
        g = torch.stack([answer[k] @ models[j] for j in others])
        z = -network.against[i, others] / 2
        by_home.append(answer[k] @ models[i] - s @ g)
        by_sharpness.append((s * (z - s @ z)) @ g)
    harm = harm / (harm.square().sum() / (3 * len(cohort))).sqrt()
    close(after.against, network.against.index_add(0, cohort, harm))
    close(after.lessons, network.lessons.index_add(0, cohort, torch.ones(len(cohort), dtype=float64)))
    close(after.home, network.home - 0.7 * agreed(torch.stack(by_home)))
    close(after.sharpness, network.sharpness - 0.7 * agreed(torch.stack(by_sharpness)))


def test_by_home_and_by_sharpness_are_derivatives_of_the_mixture(roster):
    # The signs in which all numbers are learned, against autograd of sum_i <answer_i, mixture_i>.
    known, network, models, answer = roster(4, size=5), evidence(4), random(4, 5), random(4, 5, seed=2)
    logs = [network.home.clone().requires_grad_(), network.sharpness.clone().requires_grad_()]
    now = network._replace(home=logs[0], sharpness=logs[1])
    weights = Hedge().weights(now, known, None, known.everyone)
    own = torch.autograd.functional.jacobian(
        lambda p, q: ((Hedge().weights(now._replace(home=p, sharpness=q), known, None, known.everyone) @ models)
                      * answer).sum(1), (logs[0].detach(), logs[1].detach())
    )  # fmt: skip
    assert weights.shape == (4, 4)
    after = taught(PFedGAT(lr=1.0), known, network, models, change=random(4, 5, seed=1), answer=answer)
    close(after.home, network.home - agreed(own[0]))
    close(after.sharpness, network.sharpness - agreed(own[1]))


def test_it_depends_on_no_scale(roster):
    known, network, models = roster(6, size=5), evidence(6), random(6, 5)
    change, answer = random(6, 5, seed=1), random(6, 5, seed=2)
    one = taught(PFedGAT(), known, network, models, change=change, answer=answer)
    for a, b, shift in ((1e-6, 1.0, 0.0), (1.0, 1e6, 0.0), (1.0, 1.0, 3.0)):
        other = taught(PFedGAT(), known, network, models + shift, change=a * change, answer=b * answer)
        for found, expected in zip(other, one, strict=True):
            close(found, expected, atol=1e-9)


def test_what_helps_gets_more_weight_and_numbers_stay_bounded(bowls, executor):
    # Two groups with opposite optima: after a few rounds nearly all weight is inside one's own.
    goals = [[3.0, 0.0], [-3.0, 0.0], [3.0, 0.5], [-3.0, 0.5], [3.0, -0.5], [-3.0, -0.5]]
    trial = bowls(PFedGAT(feedback="train"), goals, copies=2, executor=executor)
    server = trial.run(12)
    weights = trial.history.relations[-1]
    group = torch.arange(6) % 2
    between = weights[group[:, None] != group].view(6, 3).sum(1)
    assert (between < 0.05).all()
    assert server.network.home.abs() <= LIMIT
    assert server.network.sharpness.abs() <= LIMIT


def test_one_client_keeps_its_model(bowls, executor):
    trial = bowls(PFedGAT(feedback="train"), [[1.0, 2.0]], copies=2, executor=executor)
    server = trial.run(3)
    assert torch.equal(server.theta, server.uploads)
    assert server.network.lessons == 0


def test_newcomers_begin_without_evidence(roster):
    known, method = roster(5, size=5), PFedGAT()
    before = method.start(known.part(torch.arange(4)))._replace(network=evidence(4))
    wide = method.add_clients(known, before, torch.tensor([4]))
    close(wide.network.against[:4, :4], evidence(4).against)
    assert (wide.network.against[4] == 0).all()
    assert (wide.network.against[:, 4] == 0).all()
    assert wide.network.lessons.tolist() == [4, 4, 4, 4, 0]
    assert torch.equal(wide.network.home, evidence(4).home)


def test_training_does_not_count_running_statistics(examples, noisy, perceptron):
    x, y = noisy(4, 2)
    trial = examples(
        perceptron(norm=True), x, y, PFedGAT(feedback="train"), training=Training(1, 4, SGD(0.1)), executor="loop"
    )
    server = trial.run(1)
    known, everyone = trial.roster, trial.roster.everyone
    change, statistics = random(4, server.theta.shape[1], seed=5), ~known.layout.trainable
    noise = change.clone()
    noise[:, statistics] = 100.0 * random(4, int(statistics.sum()), seed=6)
    one, other = (
        trial.method.aggregate(known, server, everyone, Upload(server.theta + c, change * ~statistics)).network
        for c in (change, noise)
    )
    close(other.against, one.against)


def test_equal_models_teach_nothing(roster):
    known, network, same = roster(5, size=50), evidence(5), random(1, 50).expand(5, 50).clone()
    after = taught(PFedGAT(), known, network, same, change=random(5, 50, seed=1), answer=random(5, 50, seed=2))
    for name in ("against", "home", "sharpness"):
        assert torch.equal(getattr(after, name), getattr(network, name))
