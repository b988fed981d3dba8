from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from small import close, random
from torch import nn
from torch.func import jacrev
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from kinfed.core.graph import Graph
from kinfed.core.method import Params
from kinfed.core.optimiser import SGD, Adam
from kinfed.core.sharing import Divided, Sharing
from kinfed.errors import UsageError
from kinfed.methods import Panacea, PFedHN
from kinfed.methods.panacea import Network, Server
from kinfed.methods.parts import graph_hypernetwork
from kinfed.methods.parts.graph_hypernetwork import GCN, MLP, draw_pairs, link_loss
from kinfed.methods.parts.heads import FullHeads, Heads
from kinfed.methods.parts.hypernetwork import Dense, perceptron
from kinfed_papers.panacea.chunks import ChunkedHeads
from kinfed_papers.panacea.printed import Printed

float64 = torch.float64
PATH = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]])
SMALL = {"embedding": 3, "encoder": GCN(hidden=5), "decoder": FullHeads(hidden=5)}
ALONE = {"encoder": MLP(hidden=5), "reconstruction": 0.0}  # without a graph


def links(count, pairs):
    graph = torch.zeros(count, count)
    for u, v in pairs:
        graph[u, v] = graph[v, u] = 1
    return graph


def path(count):
    return links(count, [(i, i + 1) for i in range(count - 1)])


@st.composite
def graphs(draw, least=2, most=7):
    n = draw(st.integers(least, most))
    upper = torch.tensor(draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))).view(n, n).triu(1)
    return (upper | upper.T).float()


@pytest.fixture(scope="session", name="known")
def _known(roster):
    """A roster whose clients are related; the same initial model every time."""

    def make(graph, module=None, size=3):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = module or nn.Linear(size, 1, bias=False).double()
        return replace(roster(len(graph), module), graph=Graph(graph, "given"))

    return make


def plain(kind=Panacea, steps=1, **settings):
    """Only the gradient on what is written, by one linear layer before and after."""
    kept = {"residual": False, "reconstruction": 0.0, "optimiser": SGD(0.1)} | settings
    return kind(encoder=GCN(layers=1), decoder=FullHeads(layers=1), steps=steps, **kept)


def layers(kind, weight, *more):
    return kind((weight,), (weight.new_zeros(len(weight)),), *more)


def server(method, embedding, encoder, decoder):
    network = Network(embedding, layers(Dense, encoder), layers(Heads, decoder, embedding[:0, :0]))
    return Server(network, method.optimiser.init([embedding]))


@pytest.fixture
def example(worked, known):
    """The path 0 - 1 - 2, of whom 0 and 2 take part."""
    n = worked["panacea"]
    uploads = Params((n["Theta"] + n["Delta"])[[0, 2]])

    def start(method):
        return known(PATH), server(method, n["H0"], n["W_e"], n["M"])

    return n, start, torch.tensor([0, 2]), uploads


def loss(method, known, at, cohort, uploads):
    """L_GH over the cohort."""
    return float((method.send(known, at, cohort).theta - uploads.theta).square().sum() / 2 / len(cohort))


def test_models_by_hand(example):
    n, start, _, _ = example
    method = plain()
    known, at = start(method)
    close(method.encoder.averaging(known.graph.weights.double()), n["P"])
    close(method.encode(known, at.network), n["Z"])
    close(method.send(known, at, known.everyone).theta, n["Theta"])


def test_step_by_hand(example):
    n, start, cohort, uploads = example
    method = plain()
    known, at = start(method)
    assert loss(method, known, at, cohort, uploads) == pytest.approx(0.0475, abs=1e-6)
    after = method.aggregate(known, at, cohort, uploads).network
    close((after.encoder.weights[0] - n["W_e"]).T / 0.1, n["JT_Delta_We"])  # the example writes H W, not H W^T
    close((after.decoder.weights[0] - n["M"]) / 0.1, n["JT_Delta_M"])
    close((after.embedding - n["H0"]) / 0.1, -n["grad_H0_LGH"])


@pytest.mark.parametrize(("sign", "expected"), [("descent", 0.031886), ("printed", 0.071188)])
def test_the_printed_sign_climbs(example, sign, expected):
    n, start, cohort, uploads = example
    method = plain(Printed, sign=sign)
    known, at = start(method)
    after = method.aggregate(known, at, cohort, uploads)
    assert loss(method, known, still(after, n), cohort, uploads) == pytest.approx(expected, abs=1e-6)


def still(at, n):
    """The example's embeddings stay as they are, and its layers have no biases."""
    encoder, decoder = (
        part._replace(biases=tuple(torch.zeros_like(b) for b in part.biases)) for part in at.network[1:]
    )
    return at._replace(network=Network(n["H0"], encoder, decoder))


@pytest.mark.parametrize("mode", ["target", "frozen"])
def test_ten_steps_by_hand(example, mode):
    n, start, cohort, uploads = example
    method = plain(Printed, sign="descent", mode=mode)
    known, at = start(method)
    change = uploads.theta - method.send(known, at, cohort).theta
    found = []
    for _ in range(50):
        sent = method.send(known, at, cohort).theta
        # One step at a time, so that biases can be taken out again; a frozen change is one from where the model is now.
        goal = uploads.theta if mode == "target" else sent + change
        at = still(method.aggregate(known, at, cohort, Params(goal)), n)
        found.append(loss(method, known, at, cohort, uploads))
    close(torch.tensor(found[:10], dtype=float64), n[f"Ks10_{mode}_L_GH"])
    assert found[-1] == pytest.approx(float(n[f"Ks50_{mode}_last"]), abs=1e-5)


def flat(at):
    return tree_leaves(at.network)


def test_reconstruction_by_hand(example):
    n, start, cohort, _ = example
    method = plain(reconstruction=1.0)
    known, at = start(method)
    graph = known.graph.weights.double()
    found = link_loss(n["Z"], graph, None)
    assert float(found) == pytest.approx(0.621501, abs=1e-6)
    # Nobody's model changed, so that L_d alone moves the encoder, and psi_m stays.
    same = Params(method.send(known, at, cohort).theta)
    after = method.aggregate(known, at, cohort, same).network
    close((after.encoder.weights[0] - n["W_e"]).T / -0.1, n["grad_We_Ld"])
    assert torch.equal(after.decoder.weights[0], n["M"])
    kept = plain().aggregate(known, at, cohort, same)
    assert all(torch.equal(a, b) for a, b in zip(flat(kept), flat(at), strict=True))


@given(graphs())
def test_reconstruction_without_an_opinion_is_ln_2(graph):
    count = len(graph)
    zero = link_loss(torch.zeros(count, 5, dtype=float64), graph, None)
    assert float(zero) == pytest.approx(0.6931471805599453, abs=1e-14)
    z = random(count, 5)
    found = link_loss(z, graph, None)
    assert float(found) == pytest.approx(float(link_loss(z, graph.T, None)), abs=1e-14)
    assert torch.equal(link_loss(z, 7 * graph, None), found)  # weights beyond 0 and 1 are links all the same


@pytest.fixture
def few_pairs(monkeypatch):
    """From six clients on, pairs are drawn."""
    monkeypatch.setattr(graph_hypernetwork, "ALL_PAIRS", 5)


def test_sampled_pairs(known, few_pairs, monkeypatch):
    monkeypatch.setattr(graph_hypernetwork, "PAIRS", 6000)
    graph = path(6)
    clients = known(graph)
    u, v = draw_pairs(clients, clients.generator("pairs"))
    counts = torch.zeros(6, 6).index_put((u, v), torch.tensor(1.0), accumulate=True)
    assert (counts.diagonal() == 0).all()
    others = counts[~torch.eye(6, dtype=torch.bool)]  # 200 expected in each of 30; 5.5 deviations
    assert ((others - 200).abs() < 76).all()
    z = random(6, 4)
    by_hand = F.binary_cross_entropy(torch.sigmoid((z[u] * z[v]).sum(1)), graph[u, v].double())
    assert float(link_loss(z, graph.double(), (u, v))) == pytest.approx(float(by_hand), abs=1e-12)
    # Whom a pair names does not hang on the order of the clients.
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    moved = replace(clients, tags=clients.tags[order])
    assert torch.equal(order[draw_pairs(moved, moved.generator("pairs"))], torch.stack((u, v)))
    monkeypatch.setattr(graph_hypernetwork, "ALL_PAIRS", 6)
    assert draw_pairs(clients, clients.generator("pairs")) is None


def test_sampled_pairs_change_with_step_and_round(known, few_pairs, monkeypatch):
    monkeypatch.setattr(graph_hypernetwork, "PAIRS", 20)
    clients = known(path(6))
    method = Panacea(**SMALL, reconstruction=1.0, steps=2)
    draw = clients.generator("panacea.pairs")
    assert not torch.equal(draw_pairs(clients, draw), draw_pairs(clients, draw))
    cohort, at = torch.arange(6), method.start(clients)
    sent = method.send(clients, at, cohort)
    rounds = [method.aggregate(replace(clients, round=r), at, cohort, sent).network.embedding for r in (0, 0, 1)]
    assert torch.equal(rounds[0], rounds[1])
    assert not torch.equal(rounds[0], rounds[2])


def test_no_aggregation_is_the_empty_graph(known):
    cohort, goal = torch.tensor([0, 2]), Params(random(2, 3))
    alone = Panacea(**SMALL | ALONE)
    empty = Panacea(**SMALL, reconstruction=0.0)
    ends = [
        method.aggregate(clients, method.start(clients), cohort, goal)
        for method, clients in (
            (alone, replace(known(path(4)), graph=None)),
            (empty, known(torch.zeros(4, 4))),
            (alone, known(path(4))),
        )
    ]
    for end in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(flat(ends[0]), flat(end), strict=True))


@given(graphs(3, 7), st.integers(1, 3))
def test_a_model_depends_on_its_ball_alone(known, graph, depth):
    clients = known(graph)
    method = Panacea(embedding=3, encoder=GCN(depth, 40), decoder=FullHeads(2, 40))
    at = method.start(clients)

    def models(table):
        return method.send(clients, at._replace(network=at.network._replace(embedding=table)), clients.everyone).theta

    slopes = jacrev(models)(at.network.embedding).abs().amax((1, 3))  # [N, N] model by embedding
    reach = torch.linalg.matrix_power(graph.double() + torch.eye(len(graph), dtype=float64), depth) > 0
    assert (slopes[~reach] == 0).all()
    assert (slopes.diagonal() > 0).all()


def test_initial_models_are_a_tenth_of_the_common_one_apart(known):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 10)).double()
    clients = known(path(6), module)
    for layers in (1, 3):
        method = Panacea(decoder=FullHeads(layers=layers))
        sharing = Sharing.from_method(method, clients.layout)
        method = Divided(method, sharing)
        theta = method.send(clients, method.start(clients), clients.everyone).theta
        added = theta - sharing.cut(clients.theta)
        for entry in sharing.shared_layout.entries:
            wanted = 0.1 * sharing.cut(clients.theta)[entry.at].std(
                correction=0
            )  # a constant, as a norm's scale, stays as it is
            close(added[:, entry.at].std(correction=0), wanted, atol=1e-9)


def test_weights_and_loops_of_a_graph(known):
    # Loops say nothing; weights other than 0 and 1 aggregate by weight.
    method = Panacea(**SMALL)
    table = random(3, 2)
    graph = torch.tensor([[5.0, 3.0, 0.0], [3.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    found = method.encoder.averaging(method.links(known(graph))) @ table
    close(found[0], (table[0] + 3 * table[1]) / 4, atol=1e-12)
    close(found[2], (table[1] + table[2]) / 2, atol=1e-12)


def trained(weights, known, newcomers, **settings):
    """Everybody's roster and, of all but the newcomers, the roster, the method and the server after a round."""
    everyone = known(weights)
    clients, method = everyone.part(everyone.others(newcomers)), Panacea(**SMALL | settings)
    uploads = Params(random(len(clients), 3))
    return everyone, clients, method, method.aggregate(clients, method.start(clients), clients.everyone, uploads)


def test_newcomers(known):
    weights = links(6, [(0, 1), (1, 2), (1, 4), (2, 4), (4, 5)])  # 0 and 5 come later, and so does 3, who is alone
    newcomers, others = torch.tensor([0, 3, 5]), torch.tensor([1, 2, 4])
    everyone, clients, method, at = trained(weights, known, newcomers, optimiser=Adam())
    before = method.send(clients, at, clients.everyone).theta
    joined = method.add_clients(everyone, at, newcomers)
    table, found = at.network.embedding, joined.network.embedding
    close(found[others], table, atol=0)
    close(found[newcomers], torch.stack((table[0], table.mean(0), table[2])), atol=1e-15)
    for now, old in zip(joined.opt_state[1:], at.opt_state[1:], strict=True):
        close(now[0][others], old[0], atol=0)
        assert (now[0][newcomers] == 0).all()
        assert all(a is b for a, b in zip(now[1:], old[1:], strict=True))
    # The model of 3, who has no links, is written from its embedding alone.
    network = joined.network
    alone = perceptron(table.mean(0, keepdim=True), *network.encoder)
    close(method.send(everyone, joined, newcomers).theta[1], method.write(everyone, network, alone)[0], atol=1e-13)
    assert torch.equal(method.send(clients, at, clients.everyone).theta, before)


def test_without_a_graph_newcomers_share_a_model(known):
    everyone, _, method, at = trained(path(4), known, torch.tensor([0, 3]), optimiser=SGD(0.1), **ALONE)
    joined = method.add_clients(everyone, at, torch.tensor([0, 3]))
    close(joined.network.embedding[[0, 3]], at.network.embedding.mean(0).expand(2, -1), atol=1e-15)
    theta = method.send(everyone, joined, everyone.everyone).theta
    assert torch.equal(theta[0], theta[3])
    assert not torch.equal(theta[0], theta[1])


LAYERED = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()  # d = 35 + 18


def test_chunks_are_written_one_by_one_by_one_network(known):
    clients = known(path(3), LAYERED)
    decoder = ChunkedHeads(hidden=20, chunk=9, code=3)
    method = Panacea(embedding=3, encoder=GCN(hidden=20), decoder=decoder, reconstruction=0.0)
    net = method.start(clients).network
    heads = net.decoder
    assert heads.chunks.shape == (6, 3)  # 53 numbers in chunks of 9
    assert [tuple(w.shape) for w in heads.weights] == [(20, 23), (20, 20), (9, 20)]
    z = method.encode(clients, net)
    for i, theta in enumerate(method.send(clients, method.start(clients), clients.everyone).theta):
        parts = [perceptron(torch.cat((z[i], tell))[None], *heads[:2])[0] for tell in heads.chunks]
        close(theta, clients.theta + torch.cat(parts)[:53], atol=1e-13)
    apart = method.send(clients, method.start(clients), clients.everyone).theta - clients.theta
    stds = [0.1 * clients.theta[e.at].std(correction=0) for e in clients.layout.entries]
    wanted = sum(e.shape.numel() * std**2 for e, std in zip(clients.layout.entries, stds, strict=True)) / 53
    assert 0.5 < float(apart.var() / wanted) < 2  # the last chunk is cut, and the spread is that of all chunks


def test_steps_with_chunks_are_the_gradient(known):
    clients, cohort = known(path(3), LAYERED), torch.tensor([0, 2])
    decoder = ChunkedHeads(hidden=20, chunk=9, code=3)
    settings = {"steps": 1, "optimiser": SGD(0.1), "reconstruction": 0.0}
    method = Panacea(embedding=3, encoder=GCN(hidden=20), decoder=decoder, **settings)
    at, goal = method.start(clients), random(2, 53)
    leaves, structure = tree_flatten(at.network)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    network = tree_unflatten(leaves, structure)
    theta = method.write(clients, network, method.encode(clients, network)[cohort])
    slopes = torch.autograd.grad((theta - goal).square().sum() / 4, leaves)
    after = tree_leaves(method.aggregate(clients, at, cohort, Params(goal)).network)
    for found, leaf, slope in zip(after, leaves, slopes, strict=True):
        close(found, (leaf - 0.1 * slope).detach(), atol=1e-12)
    assert all(slope.abs().max() > 1e-6 for slope in slopes)


@pytest.mark.parametrize("method", [Panacea(bn="averaged"), PFedHN(bn="averaged")])
def test_running_statistics_cannot_be_written(known, perceptron, method):
    with pytest.raises(UsageError, match="bn='local'"):
        method.start(known(path(3), perceptron(norm=True)))


def test_heads_too_large_are_refused_by_name(known):
    wide = known(path(2), nn.Linear(4000, 1000).double())
    with pytest.raises(
        UsageError, match=r"panacea: a network of 404,1\d\d,\d+ numbers.* 6\.0\d GiB.*decoder=kinfed.*:ChunkedHeads"
    ):
        Panacea().start(wide)
    with pytest.raises(UsageError, match=r" 12 GiB"):
        Panacea(optimiser=Adam(), decoder=FullHeads(memory=10.0)).start(wide)
    Panacea(decoder=ChunkedHeads(memory=0.1)).start(wide)


def test_a_graph_need_not_be_symmetric(known):
    one_way = known(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    averaging = GCN().averaging(Panacea().links(one_way))
    close(averaging, torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=float64))
    Panacea(**SMALL).start(one_way)


def test_a_long_gradient_is_clipped(known):
    class Clipped(Panacea):
        clip = 0.05

    clients, cohort, goal = known(path(3)), torch.tensor([0, 2]), Params(random(2, 3))
    whole, cut = (kind(**SMALL, steps=1) for kind in (Panacea, Clipped))
    at = whole.start(clients)
    way, short = (
        torch.cat(
            [(b - a).flatten() for a, b in zip(flat(at), flat(m.aggregate(clients, at, cohort, goal)), strict=True)]
        )
        for m in (whole, cut)
    )
    assert way.norm() > 0.03 * 0.05
    close(short, way * 0.03 * 0.05 / way.norm(), atol=1e-12)


def test_without_a_graph_it_says_what_else_there_is(roster, perceptron):
    known = roster(4, perceptron())
    with pytest.raises(UsageError, match=r"no graph.*federation\.graph.*encoder=mlp.*method kin") as told:
        Panacea(**SMALL).start(known)
    assert "\n" not in str(told.value)
    Panacea(**SMALL | {"encoder": MLP(hidden=5)}).start(known)
