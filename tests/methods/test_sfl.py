from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from scipy.optimize import minimize
from torch import nn
from torch.utils._pytree import tree_map

from kinfed.core.graph import Graph
from kinfed.core.method import Params
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.methods import SFL, FedAvg, FedProx, Local
from kinfed.methods.sfl import QP, Known, Sent, Similarity
from kinfed.ops.mixing import SPARSE
from kinfed_papers.sfl.released import Released

float64 = torch.float64
LEARNED = (Similarity, QP, Released)


def close(found, expected, atol=1e-6):
    """Equal to the printed digits."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


def links(count, seed=0, share=0.4):
    """A random symmetric 0/1 graph without self-links."""
    upper = torch.rand(count, count, generator=torch.Generator().manual_seed(seed), dtype=float64).triu(1) > 1 - share
    return (upper | upper.T).to(float64)


def ring(count):
    return torch.eye(count, dtype=float64).roll(1, 0) + torch.eye(count, dtype=float64).roll(-1, 0)


def linked(known, weights, origin="given"):
    """A roster, or a trial, whose clients are related."""
    if hasattr(known, "roster"):
        known.roster = linked(known.roster, weights, origin)
        return known
    return replace(known, graph=Graph(torch.as_tensor(weights), origin))


def aggregated(method, known, uploads, cohort=None):
    """The server after all clients, or a cohort, sent their first models."""
    cohort = known.everyone if cohort is None else torch.tensor(cohort)
    return method.aggregate(known, method.start(known), cohort, Params(uploads))


def mixed(method, known, server):
    return method.send(known, server, known.everyone).mixed


@pytest.fixture
def path(worked, roster):
    """Three clients in a row, and what they upload."""
    numbers = worked["sfl"]
    return numbers, linked(roster(3, size=2), numbers["A"]), numbers["V"]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_propagation_by_hand(path, steps):
    numbers, known, theta = path
    method = SFL(steps=steps)
    server = aggregated(method, known, theta)
    close(mixed(method, known, server), numbers[f"U_m{steps}"] if steps else theta)
    close(method.send(known, server, known.everyone).shared, numbers[f"w_m{steps}"])
    if steps == 1:
        close(method.relation(known, server, known.everyone), numbers["P_row"])


def test_share_of_the_propagated_model_by_hand(path):
    numbers, known, theta = path
    half = SFL(rho=0.5)
    close(mixed(half, known, aggregated(half, known, theta)), numbers["U_mix_alpha0.5_m1"])


def test_many_steps_forget_where_they_began(path):
    numbers, known, theta = path
    server = aggregated(SFL(steps=200), known, theta)
    close(server.mixing, numbers["stationary"].expand(3, 3))
    close(mixed(SFL(), known, server), numbers["U_inf_each_row"].expand(3, 2))


def test_complete_graph_by_hand(path):
    numbers, known, theta = path
    for steps in (1, 3):
        method = SFL(steps=steps)
        server = aggregated(method, linked(known, torch.ones(3, 3)), theta)
        close(mixed(method, known, server), numbers["complete_graph_U"])
        close(method.read_out(server) @ theta, theta.mean(0), atol=1e-12)


def still(examples, method, theta, executor):
    """A trial whose losses are flat: only penalties move the models theta: [N, 2]."""
    x, y = [torch.zeros(1, 2, dtype=float64)] * len(theta), [torch.zeros(1, 1, dtype=float64)] * len(theta)
    module = nn.Linear(2, 1, bias=False).double()
    trial = examples(module, x, y, method, training=Training(1, 1, SGD(0.1)), executor=executor)
    trial.fleet.state = Params(theta.clone())
    return trial


def test_local_step_by_hand(examples, path, executor):
    numbers, known, theta = path
    trial = still(examples, SFL(pull=0.3), theta, executor)
    sent = Sent(numbers["U_m1"], numbers["w_m1"])
    _, uploads = trial.fleet.train(1, known.everyone, sent)
    close(uploads.theta[0], numbers["local_step"]["v_next"])
    assert torch.equal(trial.fleet.state.theta, uploads.theta)
    trial.fleet.state = Params(theta.clone())
    _, uploads = trial.fleet.train(0, known.everyone, sent)  # what is sent in the first round says nothing yet
    assert torch.equal(uploads.theta, theta)


def test_learned_graph_by_hand(path):
    numbers, known, theta = path
    star = numbers["star"]
    method = SFL(structure=Similarity(neighbours=2, beta=0.5))
    server = aggregated(method, known, theta)
    close(server.links, star["A_blend_beta0.5"])
    close(server.mixing, numbers["P_row"])  # it is used from the next round on
    after = method.aggregate(replace(known, round=1), server, known.everyone, Params(theta))
    close(after.mixing, star["A_blend_beta0.5"])
    alone = replace(known, graph=None)
    server = aggregated(method, alone, theta)
    close(server.mixing, torch.full((3, 3), 1 / 3, dtype=float64))
    close(server.links, star["A_topK2_row"])  # nothing is worth keeping of the complete graph
    after = method.aggregate(
        replace(alone, round=1), server._replace(links=numbers["P_row"]), known.everyone, Params(theta)
    )
    close(after.links, star["A_blend_beta0.5"])
    whole = SFL(structure=Similarity(neighbours=3, beta=1.0))
    close(aggregated(whole, known, theta).links, star["S"] / star["S"].sum(1, keepdim=True))


@given(st.sampled_from((Known, *LEARNED)), st.integers(0, 1000))
def test_renaming_clients_renames_everything(roster, structure, seed):
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    method = SFL(steps=2, structure=structure() if structure is Known else structure(neighbours=4, beta=0.5))
    known = linked(roster(6, size=3), links(6, seed))
    renamed = linked(replace(known, tags=known.tags[order]), known.graph.weights[order][:, order])
    servers = method.start(known), method.start(renamed)
    for round in range(2):
        theta = normal(6, 3, seed=seed + round)
        here = order.argsort()[torch.tensor([0, 2, 3, 5])]  # the same clients, under their new ids
        servers = (
            method.aggregate(replace(known, round=round), servers[0], torch.tensor([0, 2, 3, 5]), Params(theta[:4])),
            method.aggregate(replace(renamed, round=round), servers[1], here, Params(theta[:4])),
        )
    one, other = servers
    # The released code takes roots of squared distances: where two models are equal, half of the digits are lost.
    atol = 1e-7 if structure is Released else 1e-9
    close(other.links, one.links[order][:, order], atol)
    close(other.mixing, one.mixing[order][:, order], atol)
    close(method.read_out(other) @ other.theta, method.read_out(one) @ one.theta, atol)


def test_sparse_and_dense_propagation_agree(roster):
    count, method = 4 * SPARSE, SFL(steps=3, rho=0.7)
    graph = linked(roster(count), ring(count) + links(count, share=0.01)).graph.weights
    with_itself, seen = graph + torch.eye(count), torch.ones(count, dtype=torch.bool)
    assert SPARSE * with_itself.count_nonzero() < count**2
    step = with_itself / with_itself.sum(1, keepdim=True)
    found = method.propagate(with_itself, seen)
    close(found, 0.7 * torch.linalg.matrix_power(step, 3) + 0.3 * torch.eye(count, dtype=float64), atol=1e-14)


def test_weights_of_a_given_graph_are_used_and_self_links_not_doubled(roster):
    known = roster(2, size=1)
    for weights, row in (
        ([[0, 3], [1, 0]], [0.25, 0.75]),
        ([[1, 3], [1, 1]], [0.25, 0.75]),
        ([[2, 3], [1, 0]], [0.4, 0.6]),
    ):
        server = aggregated(SFL(), linked(known, torch.tensor(weights, dtype=float64)), normal(2, 1))
        close(server.mixing[0], torch.tensor(row, dtype=float64), atol=1e-15)
        close(server.mixing[1], torch.tensor([0.5, 0.5], dtype=float64), atol=1e-15)


CLIENTS = {"b": [0.0, 4.0, 9.0, -2.0], "h": [1.0, 2.0, 0.5, 1.5], "epochs": 3}


def test_complete_graph_without_pull_is_fedavg(bowls, executor):
    method = SFL(pull=0.0, begin="shared", steps=2)
    trial = linked(bowls(method, executor=executor, **CLIENTS), torch.ones(4, 4))
    server = trial.run(4)
    shared = bowls(FedAvg(), executor=executor, **CLIENTS).run(4)
    close(method.read_out(server) @ server.theta, shared.theta, atol=1e-13)


def test_complete_graph_with_pull_is_fedprox_with_twice_the_pull(bowls, executor):
    trial = linked(bowls(SFL(pull=0.2, begin="shared"), executor=executor, **CLIENTS), torch.ones(4, 4))
    server = trial.run(4)
    first = bowls(FedAvg(), executor=executor, **CLIENTS).run(1)  # no pull in the first round
    prox = bowls(FedProx(mu=0.4), executor=executor, **CLIENTS).run(4, begin=1, server=first)
    close(trial.method.read_out(server) @ server.theta, prox.theta, atol=1e-13)


def test_no_link_and_no_pull_is_local(examples, noisy, perceptron, executor):
    x, y = noisy(3, 2, sizes=[7, 5, 9])
    training = Training(epochs=2, batch=3, optimiser=SGD(0.1))
    one, other = (
        linked(examples(perceptron(), x, y, m, training=training, executor=executor), torch.zeros(3, 3))
        for m in (SFL(pull=0.0), Local())
    )
    one.run(3)
    other.run(3)
    close(one.headline, other.headline, atol=1e-14)
    close(one.loss("mixed"), one.loss("own"), atol=1e-14)


def test_released_loop_is_fedavg_weighted_by_columns(bowls, executor):
    optima = torch.tensor([0.0, 9.0, 4.0], dtype=float64)
    weights = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=float64)
    trial = linked(bowls(SFL(steps=3, begin="shared", pull=0.0), optima, executor=executor), weights)
    server = trial.run(4)
    p = (weights + torch.eye(3)) / (weights + torch.eye(3)).sum(1, keepdim=True)
    share, w = (p @ p @ p).mean(0), torch.tensor(0.0, dtype=float64)
    for _ in range(4):
        w = share @ (w - 0.1 * (w - optima))
    close(trial.method.read_out(server) @ server.theta, w[None], atol=1e-13)
    close(trial.headline, p @ p @ p @ server.theta, atol=1e-13)
    assert abs(float(w) - 13 / 3 * (1 - 0.9**4)) > 0.1  # not the plain average


@given(st.integers(2, 7), st.integers(1, 8), st.sampled_from(LEARNED), st.booleans(), st.integers(0, 10_000))
def test_learned_rows_sum_to_one_and_are_sparse(roster, count, most, structure, known_graph, seed):
    known = roster(count, size=3)
    if known_graph:
        known = linked(known, links(count, seed))
    method = SFL(structure=structure(neighbours=most, beta=1.0))
    server = aggregated(method, known, normal(count, 3, seed=seed))
    assert (server.links >= 0).all()
    assert ((server.links > 0).sum(1) <= most).all()
    if structure is Released:
        total = server.links.sum(1)
        assert (((total - 1).abs() < 1e-12) | (total == 0)).all()
        assert (server.links.diagonal() == 0).all()
        assert (server.links * server.links.T == 0).all()  # never both directions
    else:
        close(server.links.sum(1), torch.ones(count, dtype=float64), atol=1e-12)
        assert (server.links.diagonal() > 0).all()
    after = method.aggregate(replace(known, round=1), server, known.everyone, Params(normal(count, 3, seed=seed + 1)))
    close(after.mixing.sum(1), torch.ones(count, dtype=float64), atol=1e-12)  # whatever was learned


def test_of_equally_near_models_the_first_are_linked(roster):
    method = SFL(structure=Similarity(neighbours=4))
    graph = aggregated(method, roster(300, size=1), torch.ones(300, 1).double()).links
    for i, row in enumerate(graph):
        others = [j for j in range(4) if j != i][:3]
        assert sorted(row.nonzero().flatten().tolist()) == sorted([i, *others])


@pytest.mark.parametrize(
    ("pull", "gamma"),
    [(0.3, 1.0), (2.0, 0.2), (0.0, 1.0), (5.0, 0.001)],
)
@pytest.mark.parametrize("most", [3, 6])
def test_quadratic_programme(roster, pull, gamma, most):
    known, theta = linked(roster(6, size=4), ring(6)), normal(6, 4, seed=5)
    learned = {"neighbours": most, "beta": 1.0}
    methods = [SFL(pull=pull, structure=s) for s in (QP(**learned, gamma=gamma), Similarity(**learned))]
    began = methods[0].start(known)._replace(theta=normal(6, 4, seed=6))
    graph, target = (m.aggregate(known, began, known.everyone, Params(theta)).links.numpy() for m in methods)
    v = theta.numpy()
    scale = np.median(torch.pdist(theta).square().numpy())
    for i in range(6):
        on = np.flatnonzero(target[i])

        def cost(a, i=i, on=on):
            return pull * ((v[i] - a @ v[on]) ** 2).sum() / scale + gamma * ((a - target[i, on]) ** 2).sum()

        found = minimize(
            cost,
            target[i, on],
            bounds=[(0, 1)] * len(on),
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            options={"ftol": 1e-15, "maxiter": 1000},
        )
        np.testing.assert_allclose(graph[i, on], found.x, atol=1e-6)
        assert cost(graph[i, on]) <= found.fun + 1e-12
        assert (np.delete(graph[i], on) == 0).all()


@pytest.mark.parametrize("structure", LEARNED)
def test_a_graph_learned_in_single_precision_is_that_in_double(roster, structure):
    found = []
    for double in (True, False):
        known, theta = roster(6, nn.Linear(4, 1, bias=False).to(float64 if double else torch.float32)), normal(6, 4)
        method = SFL(structure=structure(beta=0.5, neighbours=4))
        found.append(aggregated(method, known, theta.to(known.theta)))
    assert found[1].links.dtype == torch.float32
    close(found[1].links.double(), found[0].links, atol=1e-4)


def test_an_even_number_of_pairs_has_the_mean_of_two_for_median(roster):
    # Places 0, 1, 3, 7 lie 1, 4, 9, 16, 36 and 49 apart, squared: the median is (9 + 16) / 2.
    places = torch.tensor([[0.0], [1.0], [3.0], [7.0]], dtype=float64)
    graph = aggregated(SFL(structure=Similarity(beta=1.0)), roster(4, size=1), places).links
    alike = torch.exp(-(places - places.T).square() / 25)
    close(graph, alike / alike.sum(1, keepdim=True), atol=1e-14)


def test_released_structure_by_autograd(roster):
    known, theta = roster(5, size=3), normal(5, 3)
    method = SFL(structure=Released(neighbours=2, beta=0.3))
    known = replace(linked(known, links(5, 2)), round=4)
    draw = known.generator("sfl")
    values = [known.normal(f"sfl.{side}.4", 40) for side in ("left", "right")]
    values += [(2 * torch.rand(41, 40, generator=draw) - 1) / 40**0.5 for _ in range(2)]
    values = [v.to(float64).requires_grad_() for v in values]
    optimiser = torch.optim.SGD(values, lr=0.01, weight_decay=1e-4)

    def adjacent():
        m1, m2 = (torch.tanh(3 * F.linear(e, m[1:].T, m[0])) for e, m in zip(values[:2], values[2:], strict=True))
        return F.relu(torch.tanh(3 * (m1 @ m2.T - m2 @ m1.T)))

    for _ in range(10):
        optimiser.zero_grad()
        F.mse_loss(F.normalize(adjacent()), F.normalize(torch.cdist(theta, theta))).backward()
        optimiser.step()
    expected = adjacent().detach()
    for row in expected:
        row[row < row.sort(descending=True).values[1]] = 0
    total = expected.sum(1, keepdim=True)
    expected = torch.where(total > 0, expected / total, expected)
    start = known.graph.weights + torch.eye(5)
    expected = 0.7 * start / start.sum(1, keepdim=True) + 0.3 * expected
    close(aggregated(method, known, theta).links, expected, atol=1e-9)


def test_released_structure_does_not_link_to_the_unseen(roster):
    method = SFL(structure=Released(beta=1.0))
    graph = aggregated(method, roster(12, size=3), normal(6, 3), [0, 2, 4, 6, 8, 10]).links
    assert (graph[::2, ::2] > 0).sum() == 15  # one way of every pair
    assert (graph[::2, 1::2] == 0).all()


def test_absent_models_are_passed_on_and_unknown_ones_are_not(roster):
    # The path 0-1-2-3. Clients 0 and 2 take part, then 2 alone; 1 and 3 never did.
    weights = torch.diag(torch.ones(3, dtype=float64), 1)
    known = linked(roster(4, size=1), weights + weights.T)
    first, then = torch.tensor([[2.0], [4.0]], dtype=float64), torch.tensor([[10.0]], dtype=float64)
    method = SFL()
    server = aggregated(method, known, first, [0, 2])
    close(server.mixing, torch.tensor([[1, 0, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 1, 0], [0, 0, 1, 0]], dtype=float64))
    close(method.read_out(server), torch.tensor([0.5, 0, 0.5, 0], dtype=float64))
    server = method.aggregate(known, server, torch.tensor([2]), Params(then))
    close(mixed(method, known, server)[:, 0], torch.tensor([2.0, 6.0, 10.0, 10.0], dtype=float64), atol=1e-12)
    close(method.read_out(server) @ server.theta, torch.tensor([6.0], dtype=float64), atol=1e-12)


def test_a_client_that_nobody_knows_keeps_the_initial_model(roster):
    known = linked(roster(3, size=2), torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 0]]))
    server = aggregated(SFL(steps=2), known, normal(1, 2), [0])
    close(mixed(SFL(), known, server)[2], known.theta, atol=1e-15)
    close(mixed(SFL(), known, server)[1], server.theta[0], atol=1e-15)


def test_newcomers_learn_their_row_at_once_and_the_unseen_are_left_alone(roster):
    known, theta = roster(4, size=2), normal(4, 2)
    method = SFL(structure=Similarity(beta=0.1))
    server = aggregated(method, known, theta[:2], [0, 1])
    assert torch.equal(server.links[2:], torch.ones(2, 4, dtype=float64))
    assert (server.links[:2, 2:] == 0).all()
    after = method.aggregate(replace(known, round=1), server, torch.tensor([2]), Params(theta[2:3]))
    whole = aggregated(method, known, theta[:3], [0, 1, 2]).links
    close(after.links[2], whole[2], atol=1e-14)
    close(after.links[:2], 0.9 * server.links[:2] + 0.1 * whole[:2], atol=1e-14)
    assert torch.equal(after.links[3], torch.ones(4, dtype=float64))


def test_a_newcomer_is_sent_what_its_links_bring_and_sends_nothing(roster):
    known, everyone = roster(3, size=2), roster(4, size=2)
    weights = torch.tensor([[0.0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])  # the newcomer is 1
    newcomer, others, theta = torch.tensor([1]), torch.tensor([0, 2, 3]), normal(3, 2)
    everyone = linked(everyone, weights)
    known, method = linked(known, everyone.part(others).graph.weights), SFL()
    server = aggregated(method, known, theta)
    joined = method.add_clients(everyone, server, newcomer)
    sent = method.send(everyone, joined, everyone.everyone)
    close(sent.mixed[1], (theta[0] + theta[2]) / 2, atol=1e-14)  # it is linked to 0 and 3
    close(sent.mixed[others], mixed(method, known, server), atol=0)
    close(sent.shared, method.read_out(server) @ theta, atol=1e-15)
    assert torch.equal(joined.links, weights + torch.eye(4))


@pytest.mark.parametrize("known_graph", [True, False])
def test_of_a_learned_graph_the_rows_make_room_for_a_newcomer(roster, known_graph):
    everyone, others = roster(4, size=2), torch.tensor([0, 2, 3])
    weights = torch.tensor([[0.0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
    everyone = linked(everyone, weights) if known_graph else everyone
    known, method = everyone.part(others), SFL(structure=Similarity(beta=0.5))
    server = aggregated(method, known, normal(3, 2))
    joined = method.add_clients(everyone, server, torch.tensor([1]))
    # Client 0 is linked to itself, 1 and 2, client 2 to itself and 0, client 3 to itself and 1.
    share = torch.tensor([1 / 3, 0.0, 1 / 2], dtype=float64) if known_graph else torch.zeros(3, dtype=float64)
    close(joined.links[others, 1], share, atol=1e-15)
    close(joined.links[others[:, None], others], (1 - share[:, None]) * server.links, atol=1e-15)
    assert torch.equal(joined.links[1], (weights[1] if known_graph else torch.ones(4)) + torch.eye(4)[1] * known_graph)
    # It has not taken part, so it hears its neighbours, or all alike, and nobody hears it.
    heard = torch.tensor([1.0, 0, 0, 1] if known_graph else [1.0, 0, 1, 1], dtype=float64)
    close(joined.mixing[1], heard / heard.sum(), atol=1e-15)
    assert (joined.mixing[others, 1] == 0).all()


@pytest.mark.parametrize("bn", ["averaged", "local"])
def test_running_statistics(examples, noisy, perceptron, executor, bn):
    x, y = noisy(3, 2)
    method = SFL(bn=bn, begin="mixed")
    trial = examples(perceptron(norm=True), x, y, method, training=Training(1, 4, SGD(0.1)), executor=executor)
    linked(trial, torch.ones(3, 3)).run(2)
    statistics, own = ~trial.roster.layout.trainable, trial.own
    assert (own[0, statistics] != own[1, statistics]).all()
    mean = own[:, statistics].mean(0).expand(3, -1)
    close(trial.headline[:, statistics], own[:, statistics] if bn == "local" else mean, atol=1e-13)
    close(trial.headline[:, ~statistics], own[:, ~statistics].mean(0).expand(3, -1), atol=1e-13)


@pytest.mark.parametrize("structure", [Similarity, QP])
def test_running_statistics_make_nobody_alike(roster, perceptron, structure):
    known = linked(roster(4, perceptron(norm=True)), ring(4))
    theta, statistics = normal(4, known.layout.size), ~known.layout.trainable
    method = SFL(structure=structure(beta=1.0))
    graph = aggregated(method, known, theta).links
    moved = theta.clone()
    moved[:, statistics] += 100 * normal(4, int(statistics.sum()), seed=7)
    close(aggregated(method, known, moved).links, graph, atol=1e-12)
    moved[:, ~statistics] += normal(4, int((~statistics).sum()), seed=7)
    assert (aggregated(method, known, moved).links - graph).abs().max() > 1e-3


def test_running_statistics_do_not_pull(examples, noisy, perceptron, executor):
    x, y = noisy(2, 2)
    trial = examples(perceptron(norm=True), x, y, SFL(), training=Training(1, 4, SGD(0.1)), executor=executor)
    state, statistics = tree_map(torch.clone, trial.fleet.state), ~trial.roster.layout.trainable
    sent, found = normal(2, trial.roster.layout.size), []
    for shift in (0, 1, torch.where(statistics, 5.0, 0.0)):
        trial.fleet.state = state
        found.append(trial.fleet.train(1, torch.tensor([0, 1]), Sent(sent + shift, sent[0]))[1].theta)
    assert torch.equal(found[2], found[0])
    assert (found[1] != found[0])[:, ~statistics].all()


def test_scores_u_v_and_w(bowls, executor):
    trial = linked(bowls(SFL(), [0.0, 4.0, 9.0], executor=executor), torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 0]]))
    server = trial.run(1)
    close(server.theta, torch.tensor([[0.0], [0.4], [0.9]], dtype=float64), atol=1e-13)
    assert trial.history.named_models == ["mixed", "own", "shared"]
    u, w = torch.tensor([0.2, 0.2, 0.9], dtype=float64), 1.3 / 3
    close(trial.loss("mixed"), (u - torch.tensor([0.0, 4.0, 9.0])).square() / 2, atol=1e-12)
    close(trial.loss("own"), (server.theta[:, 0] - torch.tensor([0.0, 4.0, 9.0])).square() / 2, atol=1e-12)
    close(trial.loss("shared"), (w - torch.tensor([0.0, 4.0, 9.0], dtype=float64)).square() / 2, atol=1e-12)
    close(trial.history.relations[0], server.mixing.float())
    assert (trial.history.cost.bytes_up, trial.history.cost.bytes_down) == (3 * 8, 2 * 3 * 8)


def test_origin(roster):
    known = roster(2)
    for graph, structure, origin in [
        ("given", Known(), "given"),
        ("oracle", Known(), "oracle"),
        ("given", Similarity(), "learned"),
        ("oracle", Similarity(), "oracle"),  # most of it is still the oracle's
        (None, QP(), "learned"),
    ]:
        related = known if graph is None else linked(known, torch.eye(2), graph)
        assert SFL(structure=structure).origin_of(related) == origin


def test_without_a_known_graph_it_learns_one_and_says_so(roster):
    known, theta = roster(4, size=3), normal(4, 3)
    with pytest.warns(UserWarning, match="sfl: this data set has no graph of the clients, so one is learned"):
        server = aggregated(SFL(), known, theta)
    learned = SFL(structure=Similarity())
    close(server.links, aggregated(learned, known, theta).links, atol=0)
    assert (SFL().origin_of(known), learned.origin_of(known)) == ("learned", "learned")
    later, uploads = replace(known, round=1), Params(normal(4, 3, seed=1))
    found = [m.aggregate(later, server, known.everyone, uploads).links for m in (SFL(), learned)]
    close(*found, atol=0)
