import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed.attention import Attention, attend
from kinfed.errors import UsageError
from kinfed.methods import FedAvg, PFedGAT
from kinfed.methods.pfedgat import Upload

float64 = torch.float64


def close(found, expected, atol=1e-6):
    """Equal to the printed digits."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


def network(heads=2, width=3, size=5, seed=0):
    return Attention(
        random(heads, width, size, seed=seed), random(heads, width, seed=seed + 1), random(heads, width, seed=seed + 2)
    )


def attention_of(numbers, heads):
    """The worked example's network."""
    a = torch.stack([numbers[f"a_head{h + 1}"] for h in range(heads)])
    return Attention(torch.stack([numbers[f"W_head{h + 1}"] for h in range(heads)]), a[:, :2], a[:, 2:])


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
    method = PFedGAT(heads=heads, width=2, lr=0.01, feedback="test")
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


@pytest.mark.parametrize("heads", [1, 2])
def test_gradient_of_the_graph_by_hand(worked, heads):
    numbers = worked["pfedgat"]
    expected, theta = numbers[f"K{heads}"], numbers["Theta"]
    graph = attend(attention_of(numbers, heads), theta, 0.2)
    uphill = graph @ theta - numbers["targets_c"]
    slope = uphill @ theta.T
    close(slope, expected["dL_dR"])
    close((slope * graph).sum(1), (uphill * (graph @ theta)).sum(1), atol=1e-14)


def test_scores_by_hand(worked):
    numbers = worked["pfedgat"]
    h = F.layer_norm(numbers["Theta"], (4,))
    close(h, numbers["h"])
    for heads in (1, 2):
        attention = attention_of(numbers, heads)
        z = torch.einsum("hfm,nm->hnf", attention.project, h)
        left, right = (torch.einsum("hnf,hf->hn", z, a) for a in attention[1:])
        close(F.leaky_relu(left[:, :, None] + right[:, None], 0.2), numbers[f"K{heads}"]["e"])
        close(slowly(attention, numbers["Theta"]), numbers[f"K{heads}"]["R"])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 10_000))
def test_graph_is_positive_rows_sum_to_one_for_any_number_of_clients(count, heads, seed):
    attention, theta = network(heads, seed=seed), random(count, 5, seed=seed + 5)
    graph = attend(attention, theta, 0.2)
    assert (graph > 0).all()
    close(graph.sum(1), torch.ones(count, dtype=float64), atol=1e-13)
    close(graph, slowly(attention, theta), atol=1e-12)


def test_renaming_clients_renames_the_graph():
    theta, order = random(4, 5), torch.tensor([2, 0, 3, 1])
    graph = attend(network(), theta, 0.2)
    close(attend(network(), theta[order], 0.2), graph[order][:, order], atol=1e-14)


def test_equal_models_are_equal_in_the_graph(roster):
    known, method, theta = roster(4, size=5), PFedGAT(heads=2, width=3), random(4, 5)
    theta[2] = theta[1]
    graph = attend(network(), theta, 0.2)
    close(graph[2], graph[1], atol=1e-15)
    close(graph[:, 2], graph[:, 1], atol=1e-15)
    same = theta[:1].expand(4, 5).clone()
    server = ready(method, known, network(), same)
    close(method.relation(known, server, known.everyone), torch.full((4, 4), 0.25, dtype=float64), atol=1e-15)
    close(server.theta, same, atol=1e-15)


def test_scale_and_shift_of_a_model_do_not_matter():
    theta = 1e3 * random(4, 5)  # large beside the constant that guards the normalisation
    scale = torch.tensor([1.0, 7.0, 0.5, 100.0], dtype=float64)[:, None]
    shift = torch.tensor([0.0, -3e3, 5e2, 9e3], dtype=float64)[:, None]
    close(attend(network(), theta * scale + shift, 0.2), attend(network(), theta, 0.2), atol=1e-9)


@pytest.mark.parametrize("zero", ["a", "W"])
def test_without_a_or_w_it_is_uniform_fedavg(bowls, zero, executor):
    clients = {"b": [[0.0, 1.0], [4.0, 2.0], [-1.0, 5.0]], "h": [1.0, 2.0, 0.5], "epochs": 2, "executor": executor}
    method = PFedGAT(heads=2, width=3, feedback="test")
    trial = bowls(method, copies=[1, 2, 3], **clients)
    attention = network(size=2)
    if zero == "a":
        attention = Attention(attention.project, *(torch.zeros_like(t) for t in attention[1:]))
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


def test_one_head_orders_speakers_alike_for_all_listeners():
    for seed in range(5):
        graph = attend(network(heads=1, seed=seed), random(6, 5, seed=seed + 9), 0.2)
        assert len(set(map(tuple, graph.argsort(1).tolist()))) == 1
    # More heads can do more.
    graphs = [attend(network(heads=4, seed=s), random(6, 5, seed=s + 9), 0.2) for s in range(5)]
    assert any(len(set(map(tuple, graph.argsort(1).tolist()))) > 1 for graph in graphs)


def test_step_is_the_gradient_of_the_summed_losses(roster):
    known, method, goal = roster(4, size=5), PFedGAT(heads=2, width=3, lr=0.1), random(4, 5, seed=20)
    uploads = random(4, 5, seed=21)
    server = ready(method, known, network(), uploads)
    leaves = Attention(*(t.clone().requires_grad_() for t in network()))

    def loss(attention):
        return sum((mixed - c).square().sum() / 2 + mixed.sin().sum() for mixed, c in zip(
            slowly(attention, uploads) @ uploads, goal, strict=True
        ))  # fmt: skip

    slopes = torch.autograd.grad(loss(leaves), leaves)
    uphill = server.theta - goal + server.theta.cos()
    after = method.aggregate(known, server, known.everyone, Upload(random(4, 5, seed=22), uphill)).network
    for found, start, slope in zip(after, network(), slopes, strict=True):
        close(found, start - 0.1 * slope, atol=1e-12)
    # A small step lowers the loss by its squared length.
    gain = float(loss(network()) - loss([a - 1e-5 * s for a, s in zip(network(), slopes, strict=True)]))
    assert gain == pytest.approx(1e-5 * sum(float(s.square().sum()) for s in slopes), rel=0.02)


def test_no_feedback_moves_nothing(roster):
    known, method = roster(4, size=5), PFedGAT(heads=2, width=3)
    server = ready(method, known, network(), random(4, 5))
    after = method.aggregate(known, server, known.everyone, Upload(random(4, 5, seed=1), torch.zeros(4, 5).double()))
    for found, start in zip(after.network, network(), strict=True):
        assert torch.equal(found, start)


def test_only_the_cohort_is_mixed_and_only_its_mix_is_judged(roster):
    known, method = roster(4, size=5), PFedGAT(heads=2, width=3, lr=0.1)
    first, second = torch.tensor([0, 1, 3]), torch.tensor([1, 2, 3])
    uploads, uphill = random(4, 5, seed=30), random(4, 5, seed=31)
    server = method.start(known)._replace(network=network())
    server = method.aggregate(known, server, first, Upload(uploads[first], uphill[first]))
    graph = slowly(network(), uploads[first])
    close(server.theta[first], graph @ uploads[first], atol=1e-13)
    assert torch.equal(server.theta[2], known.theta)
    relation = method.relation(known, server, first)
    expected = torch.zeros(4, 4, dtype=float64)
    expected[first[:, None], first] = graph
    expected[2, first] = 1 / 3  # whoever is new starts from the mean of the others
    close(relation, expected, atol=1e-13)
    close(method.send(known, server, torch.tensor([2])).theta[0], server.theta[first].mean(0), atol=1e-13)
    kept = PFedGAT(heads=2, width=3, newcomer="initial")
    assert torch.equal(kept.send(known, server, torch.tensor([2])).theta[0], known.theta)
    expected[2] = torch.eye(4)[2]
    close(kept.relation(known, server, first), expected, atol=1e-13)
    # Client 2 received no mix and client 0 says nothing: only 1 and 3 judge, and over the three who were mixed.
    after = method.aggregate(known, server, second, Upload(random(3, 5, seed=32), uphill[second])).network
    leaves = Attention(*(t.clone().requires_grad_() for t in network()))
    mixed = slowly(leaves, uploads[first]) @ uploads[first]
    slopes = torch.autograd.grad((mixed[1:] * uphill[[1, 3]]).sum(), leaves)
    for found, start, slope in zip(after, network(), slopes, strict=True):
        close(found, start - 0.1 * slope, atol=1e-12)


def test_network_size_and_start(roster):
    known = roster(3, size=100)
    attention = PFedGAT().start(known).network
    assert [tuple(t.shape) for t in attention] == [(8, 8, 100), (8, 8), (8, 8)]
    for tensor, fans in zip(attention, (8 + 100, 16 + 1, 16 + 1), strict=True):
        bound = (6 / fans) ** 0.5
        assert 0.8 * bound < float(tensor.abs().max()) <= bound


def test_what_the_network_sees(roster, perceptron):
    known, uploads = roster(3, perceptron(norm=True)), None
    layout, sizes = known.layout, {"full": 9 + 6 + 4, "head": 4, "delta": 9 + 6 + 4}
    uploads = known.theta + random(3, layout.size)
    for features, size in sizes.items():
        method = PFedGAT(heads=2, width=3, features=features)
        server = method.start(known)
        assert server.network.project.shape[2] == size
        server = ready(method, known, server.network, uploads)
        entries = layout.index(layout.head) if features == "head" else layout.trainable
        seen = (uploads - known.theta if features == "delta" else uploads)[:, entries]
        close(method.relation(known, server, known.everyone), slowly(server.network, seen), atol=1e-12)


def test_feedback_doubles_the_upload(bowls):
    trial = bowls(PFedGAT(heads=1, width=2), [[1.0, 0.0], [0.0, 1.0]], copies=2)
    trial.run(3)
    assert (trial.history.bytes_up, trial.history.bytes_down) == (2 * 3 * 2 * 2 * 8, 3 * 2 * 2 * 8)


@pytest.mark.parametrize("wrong", [{"heads": 0}, {"width": 0}, {"lr": 0.0}, {"features": "all"}, {"feedback": "none"}])
def test_refuses(wrong):
    with pytest.raises(UsageError, match="pfedgat"):
        PFedGAT(**wrong)
