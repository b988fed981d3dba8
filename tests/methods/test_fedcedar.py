import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from small import close, random
from torch import nn

from kinfed.core.method import Params
from kinfed.core.seeding import tags
from kinfed.methods import FedAvg, FedCedar
from kinfed.methods.fedcedar import Server
from kinfed_papers.fedcedar.ablations import Mean, Nodes

pytestmark = pytest.mark.filterwarnings("ignore:fedcedar. round")

float64 = torch.float64
VARIANTS = [FedCedar(), Nodes(steps=1), FedCedar(clusters=2, steps=0), Mean(clusters=2)]  # with AS-1 to AS-3


def two_layers(norm=False):
    middle = [nn.BatchNorm1d(3)] if norm else []
    return nn.Sequential(nn.Linear(2, 3), *middle, nn.Tanh(), nn.Linear(3, 2)).double()


def after(method, known, uploads, cohort=None, server=None, round=0):
    """The server's state after the cohort (default: everyone) sent these models: [K, d]."""
    server = method.start(known) if server is None else server
    cohort = known.everyone if cohort is None else torch.as_tensor(cohort)
    return method.aggregate(replace(known, round=round), server, cohort, Params(uploads))


def sent(method, known, server):
    """[N, d] what every client would be sent now."""
    return method.send(known, server, known.everyone).theta


@pytest.fixture
def example(worked, roster):
    """The worked numbers, six clients with two weights, and who stands for clusters 0, 1 and 2."""
    return worked["fedcedar"], roster(6, size=2), torch.tensor([0, 2, 4])


def test_clusters_by_hand(example):
    numbers, known, leaders = example
    server = after(FedCedar(clusters=3, steps=0), known, numbers["client_models"])
    order = server.label[leaders]
    assert torch.equal(order[numbers["labels"].long()], server.label)
    close(server.theta[order], numbers["centers"], atol=1e-12)
    close(server.objective, numbers["J_eq1_unsquared"])
    close(server.share, torch.full((6,), 0.5, dtype=float64), atol=1e-15)
    close(server.spread, torch.tensor(1.0, dtype=float64), atol=1e-12)


def test_graph_and_mixing_by_hand(example):
    numbers, known, leaders = example
    server = after(FedCedar(clusters=3, steps=1), known, numbers["client_models"])
    order = server.label[leaders]
    close(server.cosines[order][:, order], numbers["cos"])
    close(server.graph[order][:, order], numbers["R_relu"])
    close(server.theta[order], numbers["what_P1_relu"])
    server = after(FedCedar(clusters=3), known, numbers["client_models"])
    close(server.theta[server.label[leaders]], numbers["what_P2_relu"])
    close(server.theta.mean(0), numbers["mean_P2_relu"])


def test_the_next_round_by_hand(example):
    numbers, known, _ = example
    known = replace(known, sizes=torch.ones(7, dtype=torch.int64), tags=tags([str(i) for i in range(7)]))
    method = FedCedar(clusters=3)
    server = after(method, known, numbers["client_models"], cohort=range(6))
    received = sent(method, known, server)
    close(received[:6], numbers["what_P2_relu"][numbers["labels"].long()])
    close(received[6], numbers["mean_P2_relu"])


def near_parallel(cosine, count):
    """[count, count] unit vectors with equal cosines."""
    gram = torch.full((count, count), cosine, dtype=float64).fill_diagonal_(1)
    return torch.linalg.cholesky(gram)


def test_models_that_resemble_each_other_are_averaged(worked, roster):
    numbers = worked["fedcedar"]["near_parallel"]
    count, cosine = int(numbers["K"]), float(numbers["c"])
    known = roster(count, size=count)
    method = FedCedar(clusters=count)
    with pytest.warns(UserWarning, match=r"round 1: mixing leaves 1.7e-05 of the distance .*, or use kin"):
        server = after(method, known, near_parallel(cosine, count))
    close(server.spread, numbers["lambda2_P2"], atol=1e-11)
    assert bool(server.warned)
    one = after(replace(method, steps=1), known, near_parallel(cosine, count))
    close(one.graph.diagonal(), numbers["R_diag"].expand(count))
    close(one.spread, numbers["lambda2"])
    lam = (1 - cosine) / (1 + (count - 1) * cosine)
    expected = lam * torch.eye(count, dtype=float64) + (1 - lam) / count
    close(one.graph, expected, atol=1e-9)


def test_the_warning_comes_once_a_run(bowls):
    settings = {"start": 100.0, "every": 2}
    trial = bowls(FedCedar(clusters=2), [[0.0, 1.0], [1.0, 0.0], [2.0, 5.0]], **settings)
    with pytest.warns(UserWarning, match="fedcedar: round 1: mixing") as said:
        server = trial.run(4)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial.run(6, begin=4, server=server)  # the state remembers that it was said
        # Nothing collapses without mixing, and whoever asks for the mean is not told that it is the mean.
        for other in (FedCedar(clusters=2, steps=0), Mean(clusters=2), FedCedar(clusters=1)):
            bowls(other, [[0.0, 1.0], [1.0, 0.0], [2.0, 5.0]], **settings).run(3)


@given(st.sampled_from(VARIANTS), st.integers(0, 10_000))
def test_the_relation_says_what_is_sent(roster, method, seed):
    # For every variant, and clients that are absent in turn.
    known = roster(7, two_layers())
    server = None
    for round, cohort in enumerate(([0, 2, 3, 6], [0, 1, 3, 4, 5], [2, 3, 4, 5, 6])):
        uploads = random(len(cohort), known.layout.size, seed=seed + round) + 3
        server = after(method, known, uploads, cohort, server, round)
        relation = method.relation(known, server, torch.tensor(cohort))
        everyone = torch.zeros(7, known.layout.size, dtype=float64).index_copy(0, torch.tensor(cohort), uploads)
        close(relation @ everyone, sent(method, known, server), atol=1e-9)
        close(relation.sum(1), torch.ones(7, dtype=float64), atol=1e-9)


def test_every_client_a_node(roster):
    # AS-1: the graph of the models themselves, by a loop over pairs.
    known = roster(4, two_layers())
    uploads = random(4, known.layout.size) + 0.3
    weights = torch.tensor([[max(0.0, float(torch.cosine_similarity(a, b, dim=0))) for b in uploads] for a in uploads])
    weights = (weights / weights.sum(1, keepdim=True)).double()
    for method in (Nodes(steps=1), FedCedar(clusters=4, steps=1), FedCedar(clusters=9, steps=1)):
        close(sent(method, known, after(method, known, uploads)), weights @ uploads, atol=1e-6)
    alike = uploads[[0, 0, 1, 1]]  # two of a kind are two nodes, but they would be one cluster
    assert len(after(Nodes(), known, alike).theta) == 4
    assert len(after(FedCedar(clusters=4), known, alike).theta) == 2


def test_running_statistics_are_averaged_and_not_compared(roster):
    known = roster(4, two_layers(norm=True))
    uploads = random(4, known.layout.size)
    buffers = ~known.layout.trainable
    assert buffers.any()
    loud = uploads.clone()
    loud[:, buffers] *= 1000
    quiet, server = (after(FedCedar(clusters=3), known, models) for models in (uploads, loud))
    assert torch.equal(quiet.label, server.label)
    close(server.graph, quiet.graph, atol=1e-12)
    close(server.spread, quiet.spread, atol=1e-12)
    torch.testing.assert_close(server.theta, quiet.theta * torch.where(buffers, 1000.0, 1.0), rtol=1e-9, atol=1e-12)


def test_one_cluster_is_unweighted_fedavg(bowls, executor):
    clients = {"h": [1.0, 2.0, 1.5], "epochs": 2, "executor": executor}
    equal = bowls(FedAvg(), [0.0, 4.0, 9.0], **clients)
    expected = equal.run(3).theta
    trial = bowls(FedCedar(clusters=1), [0.0, 4.0, 9.0], copies=[1, 2, 3], **clients)
    server = trial.run(3)
    close(server.theta[0], expected, atol=1e-13)
    close(trial.loss("received"), equal.loss("shared"), atol=1e-12)
    # Who took part and who did not are sent the same.
    known = trial.roster
    partly = after(FedCedar(clusters=1), known, random(2, 1), cohort=[0, 2])
    received = sent(FedCedar(clusters=1), known, partly)
    close(received, received[:1].expand(3, 1), atol=1e-15)


def test_the_mean_of_equal_and_symmetric_clusters_is_fedavg(roster):
    known = roster(4, size=2)
    uploads = torch.tensor([[1.0, 0.1], [1.1, 0], [0.1, 1.0], [0.1, 1.3]], dtype=float64)
    method = Mean(clusters=2)  # a 2 x 2 graph of cosines is symmetric
    received = sent(method, known, after(method, known, uploads))
    close(received, uploads.mean(0).expand(4, 2), atol=1e-12)
    for cohort in ([0, 1, 2], [0, 2, 3]):
        received = sent(method, known, after(method, known, uploads[cohort], cohort))
        assert (received - uploads[cohort].mean(0)).abs().max() > 0.05  # clusters of two and one weigh the same
        close(received[3], received[0], atol=1e-15)


def test_identical_models_are_one_cluster(roster):
    known = roster(5, two_layers())
    model = random(1, known.layout.size)
    method = FedCedar()
    for same in (model[0], known.theta, torch.zeros_like(known.theta)):  # also where nobody moved
        server = after(method, known, same.expand(5, -1))
        assert server.theta.shape == model.shape
        close(sent(method, known, server), same.expand(5, -1), atol=1e-12)
        assert float(server.spread) == 1
    parallel = FedCedar(clusters=4, steps=3)  # all cosines 1: the plain mean of the centres, whatever their length
    uploads = torch.tensor([[1.0], [2], [4], [9]], dtype=float64) * model
    close(sent(parallel, known, after(parallel, known, uploads, range(4)))[0], 4 * model[0], atol=1e-9)


def test_who_is_sent_what(roster):
    known = roster(5, size=2)
    method = FedCedar(clusters=2, steps=1)
    server = method.start(known)
    assert torch.equal(sent(method, known, server), known.theta.expand(5, -1))
    pair = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=float64)
    server = after(method, known, pair, [1, 3], server)
    # Orthogonal, so nothing is mixed: each its own, and the mean for whoever was absent.
    half = torch.tensor([0.5, 0.5], dtype=float64)
    close(sent(method, known, server), torch.stack([half, pair[0], half, pair[1], half]), atol=1e-15)
    server = after(method, known, 2 * pair, [0, 3], server, 1)
    # Client 1 took part two rounds ago, clients 2 and 4 never.
    close(sent(method, known, server), torch.stack([2 * pair[0], 2 * half, 2 * half, 2 * pair[1], 2 * half]), 1e-15)
    assert server.label.tolist().count(-1) == 3
    close(server.share, torch.tensor([1.0, 0, 0, 1, 0], dtype=float64), atol=1e-15)


def test_scored_after_and_before_local_training(bowls, executor):
    # Half a step towards the optimum: E epochs from what a client would be sent next.
    trial = bowls(FedCedar(clusters=2, steps=0), [-1.0, 3.0], lr=0.5, executor=executor)
    server = trial.run(1)
    received = sent(trial.method, trial.roster, server)
    close(received.squeeze(1), torch.tensor([-0.5, 1.5], dtype=float64), atol=1e-12)
    assert trial.history.headline == "tuned"
    close(trial.headline.squeeze(1), torch.tensor([-0.75, 2.25], dtype=float64), atol=1e-12)
    close(trial.loss("received"), torch.tensor([0.125, 1.125], dtype=float64), atol=1e-12)
    close(trial.loss("tuned"), torch.tensor([0.03125, 0.28125], dtype=float64), atol=1e-12)


def test_the_server_keeps_clusters_and_not_clients(roster):
    known = roster(50, two_layers())
    d = known.layout.size
    server = after(FedCedar(clusters=3), known, random(20, d), range(20))
    assert isinstance(server, Server)
    assert [tuple(t.shape) for t in server] == [(3, d), (3, 3), (3, 3), (50,), (50,), (), (), ()]


def test_a_newcomer_is_sent_the_centre_nearest_to_its_first_model(roster):
    known, everyone, newcomer = roster(4, size=2), roster(5, size=2), torch.tensor([4])
    method = FedCedar(clusters=2)
    uploads = torch.tensor([[3.0, 0.1], [3.1, 0.0], [0.0, 2.0], [0.1, 2.1]], dtype=float64)
    joined = method.add_clients(everyone, after(method, known, uploads), newcomer)
    for like in (0, 2):
        found = method.join(everyone, joined, newcomer, Params(uploads[like : like + 1]))
        assert int(found.label[4]) == int(joined.label[like])
        assert torch.equal(found.theta, joined.theta)
