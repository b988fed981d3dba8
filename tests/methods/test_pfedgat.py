import itertools
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from small import close, random
from torch import nn

from kinfed.core.optimiser import SGD, Adam
from kinfed.core.seeding import key
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedAvg, PFedGAT
from kinfed.methods.attention import Dynamic, Heads as DynamicHeads
from kinfed.methods.pfedgat import PATIENCE, Heads, Upload
from kinfed.ops.sketch import count_sketch
from kinfed_papers.pfedgat.channels import Delta, Sketch, Spsa
from kinfed_papers.pfedgat.graphs import Logits, Pairs, Projected

float64 = torch.float64
SMALL = {"heads": 2, "width": 3}


def attend(network, described, slope=0.2):
    kind = Dynamic if isinstance(network, DynamicHeads) else PFedGAT
    return kind(slope=slope).scores(network, F.layer_norm(described, described.shape[1:])).softmax(-1).mean(0)


def network(heads=2, width=3, size=5, seed=0):
    return Heads(
        random(heads, width, size, seed=seed), random(heads, width, seed=seed + 1), random(heads, width, seed=seed + 2)
    )


def attention_of(numbers, heads):
    """The worked example's network."""
    a = torch.stack([numbers[f"a_head{h + 1}"] for h in range(heads)])
    return Heads(torch.stack([numbers[f"W_head{h + 1}"] for h in range(heads)]), a[:, :2], a[:, 2:])


def slowly(attention, theta, slope=0.2):
    """R: [N, N], pair by pair and with the concatenation written out."""
    h = [(t - t.mean()) / (t.var(correction=0) + 1e-5).sqrt() for t in theta]
    heads = []
    for w, left, right in zip(*attention, strict=True):
        a = torch.cat([left, right])
        rows = [torch.stack([F.leaky_relu(a @ torch.cat([w @ i, w @ j]), slope) for j in h]) for i in h]
        heads.append(torch.stack([row.exp() / row.exp().sum() for row in rows]))
    return torch.stack(heads).mean(0)


def ready(method, known, attention, uploads):
    """A server that has just mixed these models of all its clients; uploads: [N, d]."""
    server = method.start(known)._replace(network=attention)
    return method.aggregate(known, server, known.everyone, Upload(uploads, torch.zeros_like(uploads)))


@pytest.mark.parametrize("heads", [1, 2])
def test_rounds_by_hand(bowls, worked, heads, executor):
    # One step of rate 1 on curvature 1 lands on the optima Theta from anywhere, so only the network moves between
    # rounds; the test losses, which here are the feedback, have their optima at c.
    numbers = worked["pfedgat"]
    expected, attention = numbers[f"K{heads}"], attention_of(numbers, heads)
    method = PFedGAT(heads=heads, width=2, feedback="test")
    trial = bowls(method, numbers["Theta"], held=numbers["targets_c"], lr=1.0, executor=executor)
    server = trial.run(2, begin=1, server=method.start(trial.roster)._replace(network=attention))
    for found, start in zip(server.network, attention, strict=True):
        assert torch.equal(found, start)  # no feedback yet
    close(trial.history.relations[0], expected["R"].float())
    close(trial.headline, expected["Theta_next"])
    close(trial.loss("mixed"), expected["L_i"])
    close(trial.loss("mixed").sum(), expected["L_total"])
    server = trial.run(3, begin=2, server=server)
    a = torch.cat([server.network.listen, server.network.speak], 1)
    close(a, expected["a_after_step_eta0.01"])
    before = torch.cat([attention.listen, attention.speak], 1)
    close((before - a) / 0.01, expected["dL_da"])
    close((attention.project - server.network.project) / 0.01, expected["dL_dW"])
    close(trial.history.relations[1], expected["R_after_step"].float())
    close(trial.loss("mixed").sum(), expected["L_total_after_step_same_Theta"])


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 10_000))
def test_graph_is_positive_rows_sum_to_one_for_any_number_of_clients(count, heads, seed):
    attention, theta = network(heads, seed=seed), random(count, 5, seed=seed + 5)
    graph = attend(attention, theta, 0.2)
    assert (graph > 0).all()
    close(graph.sum(1), torch.ones(count, dtype=float64), atol=1e-13)
    close(graph, slowly(attention, theta), atol=1e-12)


@pytest.mark.parametrize("zero", ["a", "W"])
def test_without_a_or_w_it_is_uniform_fedavg(bowls, zero, executor):
    clients = {"b": [[0.0, 1.0], [4.0, 2.0], [-1.0, 5.0]], "h": [1.0, 2.0, 0.5], "epochs": 2, "executor": executor}
    method = PFedGAT(**SMALL, feedback="test")
    trial = bowls(method, copies=[1, 2, 3], **clients)
    attention = network(size=2)
    if zero == "a":
        attention = Heads(attention.project, *(torch.zeros_like(t) for t in attention[1:]))
    else:
        attention = attention._replace(project=torch.zeros_like(attention.project))
    server = trial.run(2, begin=1, server=method.start(trial.roster)._replace(network=attention))
    uniform = bowls(FedAvg(), **clients).run(1)
    close(trial.headline, uniform.theta.expand(3, 2), atol=1e-14)
    close(trial.history.relations[0], torch.full((3, 3), 1 / 3))
    after = trial.run(3, begin=2, server=server).network
    if zero == "a":  # what a multiplies is not zero, but what it lets through is
        assert (after.speak != 0).any()
        assert torch.equal(after.project, attention.project)
    else:
        assert (after.project != 0).any()
        assert torch.equal(after.speak, attention.speak)


def test_no_feedback_moves_nothing(roster):
    known, method = roster(4, size=5), PFedGAT(**SMALL)
    server = ready(method, known, network(), random(4, 5))
    after = method.aggregate(known, server, known.everyone, Upload(random(4, 5, seed=1), torch.zeros(4, 5).double()))
    for found, start in zip(after.network, network(), strict=True):
        assert torch.equal(found, start)


def test_network_size_and_start(roster):
    known = roster(3, size=100)
    attention = PFedGAT().start(known).network
    assert [tuple(t.shape) for t in attention] == [(8, 8, 100), (8, 8), (8, 8)]
    for tensor, fans in zip(attention, (8 + 100, 16 + 1, 16 + 1), strict=True):
        bound = (6 / fans) ** 0.5
        assert 0.8 * bound < float(tensor.abs().max()) <= bound


def test_the_network_sees_what_is_learned(roster, perceptron):
    known, method = roster(3, perceptron(norm=True)), PFedGAT(**SMALL)
    uploads, server = known.theta + random(3, known.layout.size), method.start(known)
    assert server.network.project.shape[2] == 9 + 6 + 4
    server = ready(method, known, server.network, uploads)
    seen = uploads[:, known.layout.trainable]
    close(method.relation(known, server, known.everyone), slowly(server.network, seen), atol=1e-12)


def dynamically(network, theta, slope=0.2):
    """R: [N, N] of the second kind of attention, pair by pair."""
    h = [(t - t.mean()) / (t.var(correction=0) + 1e-5).sqrt() for t in theta]
    heads = []
    for listen, speak, score in zip(*network, strict=True):
        rows = [torch.stack([score @ F.leaky_relu(listen @ i + speak @ j, slope) for j in h]) for i in h]
        heads.append(torch.stack([row.exp() / row.exp().sum() for row in rows]))
    return torch.stack(heads).mean(0)


def dynamic(heads=2, width=3, size=5, seed=0):
    shapes = [(heads, width, size), (heads, width, size), (heads, width)]
    return DynamicHeads(*(random(*shape, seed=seed + i) for i, shape in enumerate(shapes)))


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 10_000))
def test_dynamic_attention_pair_by_pair(count, heads, seed):
    theta, order = random(count, 5, seed=seed + 5), torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    graph = attend(dynamic(heads, seed=seed), theta, 0.2)
    assert (graph > 0).all()
    close(graph.sum(1), torch.ones(count, dtype=float64), atol=1e-13)
    close(graph, dynamically(dynamic(heads, seed=seed), theta), atol=1e-12)
    close(attend(dynamic(heads, seed=seed), theta[order], 0.2), graph[order][:, order], atol=1e-13)


def test_dynamic_step_is_the_gradient_too(roster):
    known, method, uploads = roster(4, size=5), Dynamic(**SMALL, lr=0.1), random(4, 5, seed=21)
    assert [tuple(t.shape) for t in method.start(known).network] == [(2, 3, 5), (2, 3, 5), (2, 3)]
    server, uphill = ready(method, known, dynamic(), uploads), random(4, 5, seed=22)
    after = method.aggregate(known, server, known.everyone, Upload(uploads, uphill)).network
    leaves = DynamicHeads(*(t.clone().requires_grad_() for t in dynamic()))
    slopes = torch.autograd.grad((dynamically(leaves, uploads) @ uploads * uphill).sum(), leaves)
    for found, start, slope in zip(after, dynamic(), slopes, strict=True):
        close(found, start - 0.1 * slope, atol=1e-12)


# Without attention, by hand: after one step of 0.01 from thirds along [[1, 1, 0], [1, -2, 6], [7, 7, -6]] / 3.
BY_HAND = {
    Projected: [[0.332222, 0.332222, 0.335556], [0.335556, 0.345556, 0.318889], [0.318889, 0.318889, 0.362222]],
    Logits: [[0.33321, 0.33321, 0.33358], [0.333578, 0.334692, 0.33173], [0.331725, 0.331725, 0.336551]],
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_without_attention_by_hand(bowls, worked, kind, executor):
    numbers, method = worked["pfedgat"], kind(feedback="test")
    trial = bowls(method, numbers["Theta"], held=numbers["targets_c"], lr=1.0, executor=executor)
    server = trial.run(1)
    close(trial.history.relations[0], torch.full((3, 3), 1 / 3), atol=1e-7)
    close(trial.loss("mixed").sum(), torch.tensor(3.833333, dtype=float64))
    server = trial.run(2, begin=1, server=server)
    close(trial.history.relations[1], torch.tensor(BY_HAND[kind]))
    close(server.theta, torch.tensor(BY_HAND[kind], dtype=float64) @ numbers["Theta"], atol=3e-6)
    if kind is Projected:
        close(trial.loss("mixed").sum(), torch.tensor(3.673781, dtype=float64), atol=1e-5)


@pytest.mark.parametrize("kind", BY_HAND)
def test_without_attention_a_cohort_listens_to_itself(roster, kind):
    known, cohort = roster(4, size=5), torch.tensor([0, 2, 3])
    method = kind(lr=0.1)
    weights = torch.tensor([[1, 2, 3, 4], [0, 10, 0, 0], [0, 6, 1, 3], [0, 10, 0, 0]], dtype=float64) / 10
    server, uploads = method.start(known)._replace(network=Pairs(weights)), random(4, 5)
    server = method.aggregate(known, server, cohort, Upload(uploads[cohort], torch.zeros(3, 5)))
    part = weights[cohort][:, cohort]
    expected = {
        Logits: part.exp() / part.exp().sum(1, keepdim=True),
        Projected: torch.tensor([[1 / 8, 3 / 8, 4 / 8], [0, 1 / 4, 3 / 4], [0, 0, 1]], dtype=float64),  # 3 is alone
    }[kind]
    close(server.theta[cohort], expected @ uploads[cohort], atol=1e-13)
    after = method.aggregate(known, server, cohort, Upload(uploads[cohort], random(3, 5, seed=1))).network.weights
    assert torch.equal(after[1], weights[1])
    assert (after[cohort] != weights[cohort]).any()
    if kind is Projected:
        close(after.sum(1), torch.ones(4, dtype=float64), atol=1e-13)
        assert (after >= 0).all()


@pytest.mark.parametrize(
    ("channel", "settings"), [(Delta, {}), (Sketch, {"size": 10**5}), (Spsa, {"probes": 6, "radius": 0.1})]
)
def test_channels_that_lead_where_the_exact_one_leads(bowls, monkeypatch, channel, settings, executor):
    # delta: local training is one step on all examples. sketch: so wide that no two of 2 entries share a place.
    # spsa: all sign vectors, on quadratic losses; the constant a row that it cannot see changes no graph.
    signs = torch.tensor(list(itertools.permutations((1, 0, -1))))
    tried = lambda draw, a, b: signs[:, None, : len(b)].expand(-1, len(a), -1)  # noqa: E731
    monkeypatch.setattr("kinfed_papers.pfedgat.channels.draw_signs", tried)
    clients = {"b": [[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]], "held": [[1.5, 2.0], [0.0, 0.0], [2.0, 1.0]]}
    found, feedback = [], "train" if channel is Delta else "test"
    for kind, more in ((PFedGAT, {}), (channel, settings)):
        method = kind(**SMALL, lr=0.5, feedback=feedback, **more)
        trial = bowls(method, **clients, h=[1.0, 2.0, 0.5], lr=0.2, executor=executor)
        found.append(trial.run(4))
    for one, other in zip(found[0].network, found[1].network, strict=True):
        close(other, one, atol=1e-10)
    close(found[1].theta, found[0].theta, atol=1e-10)
    start = method.start(trial.roster).network
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(start, found[0].network, strict=True))


def test_sketched_features_are_the_same_sketch_in_every_round(roster, perceptron):
    known, method = roster(3, perceptron(norm=True)), PFedGAT(**SMALL, sketch=7)
    assert method.start(known).network.project.shape == (2, 3, 7)
    uploads, graphs = known.theta + random(3, known.layout.size), []
    server = ready(method, known, network(size=7), uploads)
    for round in (0, 5):
        graphs.append(method.relation(replace(known, round=round), server, known.everyone))
    assert torch.equal(*graphs)
    sketch = count_sketch(uploads[:, known.layout.trainable], key(known.seed, "pfedgat.features"), 7)
    close(graphs[0], slowly(network(size=7), sketch), atol=1e-12)
    other = method.relation(replace(known, seed=1), server, known.everyone)
    assert (other - graphs[0]).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        (PFedGAT(**SMALL, feedback="test"), 2 * 8, 0),
        (Delta(**SMALL), 0, 0),
        (Sketch(**SMALL, feedback="test", size=5), 5 * 8, 8),
        (Spsa(**SMALL, feedback="test"), 2 * 4 * 8, 4 * 2 * 8),
    ],
    ids=str,
)
def test_bytes_of_a_channel(bowls, method, up, down, executor):
    # Three clients and rounds, models of two doubles.
    trial = bowls(method, [[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], executor=executor)
    trial.run(3)
    assert trial.history.cost.bytes_up == 3 * 3 * (16 + up)
    assert trial.history.cost.bytes_down == 3 * 3 * (16 + down)


VARIANTS = [  # of papers; of PFedGAT itself they are in test_variants
    Delta(**SMALL),
    Sketch(**SMALL, size=4),
    Spsa(**SMALL, probes=2, radius=0.1),
    Dynamic(**SMALL),
    Projected(),
    Logits(),
]


@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_executors_agree_on_every_variant(examples, noisy, perceptron, method):
    x, y = noisy(4, 2, sizes=[7, 2, 9, 4])
    found, method = [], replace(method, lr=0.5)
    for executor in ("loop", "vmap"):
        trial = examples(perceptron(norm=True), x, y, method, training=Training(2, 3, SGD(0.1)), executor=executor)
        found.append((trial.run(4, participation=0.75), trial.headline, trial.history))
    start = method.start(trial.roster).network
    assert any(not torch.equal(a, b) for a, b in zip(start, found[0][0].network, strict=True))
    for one, other in zip(found[0][0].network, found[1][0].network, strict=True):
        close(other, one, atol=1e-9)
    close(found[0][1], found[1][1], atol=1e-9)
    assert torch.isfinite(found[0][1]).all()
    for relation in found[0][2].relations:
        close(relation.sum(1), torch.ones(4))


@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_renaming_clients_renames_everything(roster, method):
    method = replace(method, lr=1e-3)
    known, order, cohort = (
        roster(4, nn.Sequential(nn.Linear(4, 1)).double()),
        torch.tensor([2, 0, 3, 1]),
        torch.tensor([0, 1, 3]),
    )
    renamed = replace(known, tags=known.tags[order])
    place = order.argsort()  # where a client has gone to
    shape = {Delta: (0,), Sketch: (4,), Spsa: (2, 2)}.get(type(method), (5,))
    one, other = method.start(known), method.start(renamed)
    for round in range(3):
        uploads = random(3, 5, seed=50 + round)
        answers = random(3, *shape, seed=60 + round)
        moved, back = place[cohort].sort()
        one = method.aggregate(replace(known, round=round), one, cohort, Upload(uploads, answers))
        other = method.aggregate(replace(renamed, round=round), other, moved, Upload(uploads[back], answers[back]))
        close(other.theta, one.theta[order], atol=1e-11)
        before, after = (method.send(k, s, k.everyone).theta for k, s in ((known, one), (renamed, other)))
        close(after, before[order], atol=1e-11)
    relations = method.relation(known, one, cohort), method.relation(renamed, other, moved)
    close(relations[1], relations[0][order][:, order], atol=1e-11)
    assert (one.theta[cohort] - uploads.mean(0)).abs().max() > 1e-5  # there is something to rename


def test_a_network_too_large_is_refused_by_name(roster):
    wide, method = nn.Linear(3000, 700).double(), PFedGAT()  # 8 x 8 x 2,100,700 doubles are 1.002 GiB
    with pytest.raises(UsageError, match=r"8 heads of width 8 over 2,100,700 .* than 1; set method\.sketch=4096"):
        method.start(roster(2, wide))
    assert PFedGAT(sketch=4096).start(roster(2, wide)).network.project.shape == (8, 8, 4096)
    half = nn.Linear(3000, 350).double()
    method.start(roster(2, half))
    with pytest.raises(UsageError, match="pfedgat: a network"):  # with two projections a head
        Dynamic().start(roster(2, half))


def test_delta_counts_each_clients_own_steps(roster):
    # Two epochs in batches of 8 at rate 0.1: 2 steps for 5 examples, 10 for 40.
    known, uploads = roster(2, size=3, sizes=[5, 40]), random(2, 3)
    method = Delta(**SMALL)
    server, again = ready(method, known, network(size=3), uploads), random(2, 3, seed=1)
    found = method.slopes(known, server, known.everyone, known.everyone, Upload(again, again[:, :0]))
    steps = torch.tensor([2.0, 10.0], dtype=float64)[:, None]
    close(found, -(again - server.theta) @ uploads.T / (0.1 * steps), atol=1e-10)


@pytest.mark.parametrize("optimiser", [SGD(0.1, momentum=0.9), SGD(0.1, weight_decay=0.1), Adam()])
def test_delta_needs_plain_sgd(bowls, optimiser):
    delta = Delta(**SMALL)
    with pytest.raises(UsageError, match=r"pfedgat: channel 'delta' .* plain SGD; .* without momentum or weight decay"):
        bowls(delta, [1.0, 2.0], optimiser=optimiser).run(1)
    bowls(PFedGAT(**SMALL, feedback="train"), [1.0, 2.0], optimiser=optimiser).run(1)  # who asks for gradients may


@pytest.mark.parametrize("kind", [Projected, Logits])
def test_without_attention_a_newcomer_and_the_others_share_evenly(roster, kind):
    known, everyone, method = roster(3, size=2), roster(5, size=2), kind()
    learned = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=float64)
    server = method.start(known)._replace(network=Pairs(learned.log() if kind is Logits else learned))
    joined = method.add_clients(everyone, server, torch.tensor([0, 3])).network.weights
    others = torch.tensor([1, 2, 4])
    if kind is Logits:
        close(joined[others[:, None], others], learned.log(), atol=0)
        assert (joined[[0, 3]] == 0).all()
        assert (joined[:, [0, 3]] == 0).all()
        return
    close(joined[others[:, None], others], 0.6 * learned, atol=1e-15)
    close(joined[:, [0, 3]], torch.full((5, 2), 0.2, dtype=float64), atol=1e-15)
    close(joined.sum(1), torch.ones(5, dtype=float64), atol=1e-15)


@pytest.mark.parametrize(("scale", "warned"), [(1e-3, 1), (1.0, 0)])
def test_attention_that_is_the_same_for_all_is_said_once(roster, scale, warned):
    known, method, uploads = roster(4, size=5), PFedGAT(heads=4, width=3), random(4, 5)
    server = method.start(known)._replace(network=Heads(*(scale * t for t in network(heads=4))))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for round in range(PATIENCE + 3):
            upload = Upload(uploads, torch.zeros_like(uploads))
            server = method.aggregate(replace(known, round=round), server, known.everyone, upload)
    rows = method.relation(known, server, known.everyone)
    assert ((rows - rows.mean(0)).abs().sum(1).max() / 2 < 0.05) == warned
    assert ["method kin" in str(one.message) for one in said] == [True] * warned
