import pytest
import torch
from torch import nn

from kinfed.core.method import Params
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import PFedHN
from kinfed.methods.parts.hypernetwork import Server
from kinfed.methods.pfedhn import Network

float64 = torch.float64


def plain(lr=0.1):
    """A server step that is the gradient and nothing else."""
    return PFedHN(optimiser=SGD(lr), clip=1e9)


def linear(method, embedding, weight):
    """A server whose network is theta_i = W I e_i."""
    weight = torch.tensor(weight, dtype=float64)
    eye = torch.eye(weight.shape[1], dtype=float64)
    biases = tuple(w.new_zeros(len(w)) for w in (eye, weight))
    network = Network(torch.tensor(embedding, dtype=float64), (eye, weight), biases)
    parts = [network.embedding, *network.weights, *network.biases]
    return Server(network, method.optimiser.init(parts))


def test_descends_by_hand(roster):
    # theta = phi e with phi = 0.5, e = 2; the client moves it from 1 to 1.3.
    method, known = plain(), roster(1)
    server = linear(method, [[2.0]], [[0.5]])
    assert float(method.send(known, server, known.everyone).theta) == 1
    after = method.aggregate(known, server, known.everyone, Params(torch.tensor([[1.3]], dtype=float64))).network
    assert float(after.weights[-1]) == pytest.approx(0.56, abs=1e-14)  # phi + 0.1 * 0.3 * e; ascent would be 0.44
    assert float(after.embedding) == pytest.approx(2.015, abs=1e-14)  # e + 0.1 * 0.3 * phi
    assert float(after.biases[-1]) == pytest.approx(0.03, abs=1e-14)


def test_a_network_too_large_is_refused_by_name(roster):
    known = roster(3, nn.Linear(1000, 1000).double())
    with pytest.raises(
        UsageError, match=r"pfedhn: a network of 101,1\d\d,\d00 numbers.* 2.26 GiB, more than memory=2;"
    ):
        PFedHN(memory=2.0).start(known)


def test_linear_network_has_the_outer_product_for_gradient(roster):
    method, known = plain(lr=1.0), roster(3, size=2)
    embedding = [[1.0, 2.0, -1.0], [0.5, 0.0, 1.0], [3.0, 1.0, 1.0]]
    weight = [[0.1, 0.2, 0.3], [-0.4, 0.5, 0.6]]
    server, cohort = linear(method, embedding, weight), torch.tensor([0, 2])
    goal = torch.tensor([[1.0, -1.0], [0.0, 2.0]], dtype=float64)
    after = method.aggregate(known, server, cohort, Params(goal)).network
    e, w = server.network.embedding, server.network.weights[-1]
    apart = e[cohort] @ w.T - goal  # theta - theta~
    slope = sum(torch.outer(apart[k], e[i]) for k, i in enumerate(cohort)) / 2
    torch.testing.assert_close(after.weights[-1], w - slope, rtol=0, atol=1e-14)
    torch.testing.assert_close(after.embedding[cohort], e[cohort] - apart @ w / 2, rtol=0, atol=1e-14)
    assert torch.equal(after.embedding[1], e[1])


def test_a_cohorts_step_is_the_mean_of_its_members_steps(roster):
    method, known = plain(), roster(3, size=4)
    server, cohort = method.start(known), torch.tensor([0, 2])
    goal = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=float64)

    def step(members, goal):
        after = method.aggregate(known, server, members, Params(goal)).network
        return [a - b for a, b in zip((*after.weights, *after.biases), start, strict=True)]

    start = (*server.network.weights, *server.network.biases)
    both = step(cohort, goal)
    alone = [step(cohort[k : k + 1], goal[k : k + 1]) for k in range(2)]
    for together, one, other in zip(both, *alone, strict=True):
        torch.testing.assert_close(together, (one + other) / 2, rtol=0, atol=1e-14)


def test_several_steps_against_autograd(roster):
    method = PFedHN(embedding=3, hidden=5, layers=2, optimiser=SGD(0.1, 0.9, 0.01), clip=0.5)
    known = roster(4, size=3)
    server, draw = method.start(known), torch.Generator().manual_seed(3)
    table = nn.Parameter(server.network.embedding.clone())
    network = nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3)
    ).double()  # the heads sit on a linear layer
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer, weight, bias in zip(linear, server.network.weights, server.network.biases, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    everything = [table, *network.parameters()]
    optimiser = torch.optim.SGD(everything, lr=0.1, momentum=0.9, weight_decay=0.01)
    clipped = []
    for cohort in (torch.tensor([0, 1, 2]), torch.tensor([1, 3]), torch.tensor([0, 1, 2, 3])):
        theta = network(table[cohort])
        torch.testing.assert_close(method.send(known, server, cohort).theta, theta, rtol=0, atol=1e-13)
        goal = torch.randn(theta.shape, generator=draw, dtype=float64)
        optimiser.zero_grad()
        ((theta - goal).square().sum() / 2 / len(cohort)).backward()  # its gradient in theta is (theta - goal) / K
        norm = float(torch.cat([p.grad.flatten() for p in everything]).norm())
        clipped.append(norm > 0.5)
        for p in everything:
            p.grad *= min(1, 0.5 / norm)
        optimiser.step()
        server = method.aggregate(known, server, cohort, Params(goal))
    assert any(clipped)
    for found, expected in zip(
        (server.network.embedding, *server.network.weights), (table, *(p.weight for p in linear)), strict=True
    ):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-13)


def test_heads_see_negative_features(roster):
    # e = 2; the first layer gives (2, -4), ReLU (2, 0), the second (2 - 5, 2 + 1) = (-3, 3), the head -3 + 10 * 3 + 1.
    known, method = roster(1), PFedHN(embedding=1, hidden=2, layers=1)
    parts = [[[1.0], [-2.0]], [[1.0, 7.0], [1.0, 7.0]], [[1.0, 10.0]]], [[0.0, 0.0], [-5.0, 1.0], [1.0]]
    weights, biases = (tuple(torch.tensor(t, dtype=float64) for t in part) for part in parts)
    network = Network(torch.tensor([[2.0]], dtype=float64), weights, biases)
    server = method.start(known)
    assert [w.shape for w in server.network.weights] == [w.shape for w in weights]
    assert float(method.send(known, server._replace(network=network), known.everyone).theta) == 28


def test_a_client_shortens_its_gradient(bowls, executor):
    # Gradients w - b of length 100 and 5 at w = 0; a step of rate 0.1 is cut to 0.1 * 50 in the first client alone.
    for clip, far in ((50.0, 5.0), (float("inf"), 10.0)):
        method = PFedHN(client_clip=clip)
        trial = bowls(method, [[60.0, 80.0], [3.0, 4.0]], lr=0.1, executor=executor)
        sent = Params(torch.zeros(2, 2, dtype=float64))
        _, uploads = trial.fleet.train(0, trial.roster.everyone, sent)
        expected = torch.tensor([[0.6 * far, 0.8 * far], [0.3, 0.4]], dtype=float64)
        torch.testing.assert_close(uploads.theta, expected, rtol=0, atol=1e-14)
    assert PFedHN().client_clip == 50  # as published


def test_a_frozen_network_sends_the_same_models(bowls, executor):
    # A step clipped to nothing; models differ between clients but never change, whatever they are trained to.
    method = PFedHN(clip=1e-300, optimiser=SGD(momentum=0.9))
    trial = bowls(method, [[1.0, 2.0], [3.0, 4.0]], executor=executor)
    start = method.send(trial.roster, method.start(trial.roster), trial.roster.everyone).theta
    trial.run(3)
    assert torch.equal(trial.headline, start)
    assert not torch.equal(start[0], start[1])
    assert torch.equal(trial.history.scores[0]["generated", "test", "mse"], trial.loss("generated"))


def test_size_of_the_published_network(roster):
    module = nn.Sequential(
        nn.Conv2d(3, 16, 5), nn.Conv2d(16, 32, 5), nn.Linear(800, 120), nn.Linear(120, 84), nn.Linear(84, 10)
    )
    known = roster(50, module)
    network = PFedHN().start(known).network
    assert known.layout.parameters == 121_182
    assert network.embedding.shape == (50, 13)
    sizes = [network.embedding.numel(), *(t.numel() for t in network.weights), *(t.numel() for t in network.biases)]
    assert sum(sizes) == 12_271_732


def test_running_statistics_stay_with_the_client(examples, noisy, perceptron, executor):
    x, y = noisy(2, 2)
    trial = examples(
        perceptron(norm=True), x, y, PFedHN(hidden=4), training=Training(1, 4, SGD(0.1)), executor=executor
    )
    server = trial.run(2)
    layout = trial.roster.layout
    sent = trial.method.send(trial.roster, server, trial.roster.everyone).theta
    assert sent.shape == (2, layout.parameters)
    assert torch.equal(trial.headline[:, layout.trainable], sent)
    statistics = trial.headline[:, ~layout.trainable]
    assert torch.equal(statistics, trial.own[:, ~layout.trainable])
    assert not torch.equal(statistics[0], statistics[1])
    assert trial.history.cost.bytes_up == trial.history.cost.bytes_down == 2 * 2 * layout.parameters * 8


def test_a_newcomer_has_the_mean_embedding_and_an_optimiser_that_knows_nothing_of_it(roster):
    known, everyone = roster(7, size=2), roster(9, size=2)
    method = PFedHN(hidden=5)
    uploads = Params(torch.randn(7, 2, generator=torch.Generator().manual_seed(1), dtype=float64))
    server = method.aggregate(known, method.start(known), known.everyone, uploads)
    joined = method.add_clients(everyone, server, torch.tensor([0, 4]))
    others = [1, 2, 3, 5, 6, 7, 8]
    for table, old, row in (
        (joined.network.embedding, server.network.embedding, server.network.embedding.mean(0)),
        (joined.opt_state.first[0], server.opt_state.first[0], torch.zeros(2, dtype=float64)),
    ):
        assert torch.equal(table[others], old)
        torch.testing.assert_close(table[[0, 4]], row.expand(2, -1), rtol=0, atol=1e-15)
    assert all(
        map(torch.equal, joined.network.weights, server.network.weights)
    )  # it keeps its width, though 1 + 9 / 4 is wider
    cohort = torch.tensor([0, 8])
    method.aggregate(everyone, joined, cohort, method.send(everyone, joined, cohort))
