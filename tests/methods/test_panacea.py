from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import jacrev
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from kinfed.core.client import Training
from kinfed.core.graph import Graph
from kinfed.core.method import Params
from kinfed.core.optimiser import SGD
from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.experiments.fit import fit
from kinfed.methods import Panacea, PFedHN
from kinfed.methods.panacea import Network, Server
from kinfed.methods.parts.hypernetwork import Dense, perceptron
from kinfed.methods.pfedhn import Network as MLP
from kinfed.methods.pfedhn import Server as MLPServer
from kinfed.simulation.execution import Execution

float64 = torch.float64
PATH = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]])
SMALL = {"embedding": 3, "hidden": 5}


def close(found, expected, atol=1e-6):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


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


def plain(**settings):
    """Only the gradient on what is written, by one linear layer before and after."""
    kept = {"encoder_layers": 1, "decoder_layers": 1, "residual": False, "clip": 1e9, "reconstruction": 0.0, "lr": 0.1}
    return Panacea(**(kept | settings))


def layers(*weights):
    return Dense(tuple(weights), tuple(w.new_zeros(len(w)) for w in weights))


def server(method, embedding, encoder, decoder):
    network = Network(embedding, layers(encoder), layers(decoder), Dense((), ()), embedding[:0, :0])
    return Server(network, method._optimiser.init([embedding]))


@pytest.fixture
def example(worked, known):
    """The path 0 - 1 - 2, of whom 0 and 2 take part; embeddings stay as they are."""
    n = worked["panacea"]
    uploads = Params((n["Theta"] + n["Delta"])[[0, 2]])

    def start(method):
        return known(PATH), server(method, n["H0"], n["W_e"], n["M"])

    return n, start, torch.tensor([0, 2]), uploads


def fixed(**settings):
    return plain(initial="random", steps=1, **settings)


def loss(method, known, at, cohort, uploads):
    """L_GH over the cohort."""
    return float((method.send(known, at, cohort).theta - uploads.theta).square().sum() / 2 / len(cohort))


def test_models_by_hand(example):
    n, start, _, _ = example
    method = fixed()
    known, at = start(method)
    close(method._aggregate(known.graph.weights.double())(torch.eye(3, dtype=float64)), n["P"])
    close(method._encode(at.network, method._aggregate(known.graph.weights.double())), n["Z"])
    close(method.send(known, at, known.everyone).theta, n["Theta"])


def test_step_by_hand(example):
    n, start, cohort, uploads = example
    method = fixed()
    known, at = start(method)
    assert loss(method, known, at, cohort, uploads) == pytest.approx(0.0475, abs=1e-6)
    after = method.aggregate(known, at, cohort, uploads).network
    close((after.encoder.weights[0] - n["W_e"]).T / 0.1, n["JT_Delta_We"])  # the example writes H W, not H W^T
    close((after.decoder.weights[0] - n["M"]) / 0.1, n["JT_Delta_M"])
    assert torch.equal(after.embedding, n["H0"])
    after = replace(method, initial="learned").aggregate(known, at, cohort, uploads).network
    close((after.embedding - n["H0"]) / 0.1, -n["grad_H0_LGH"])


@pytest.mark.parametrize(("sign", "expected"), [("descent", 0.031886), ("printed", 0.071188)])
def test_the_printed_sign_climbs(example, sign, expected):
    _, start, cohort, uploads = example
    method = fixed(sign=sign)
    known, at = start(method)
    after = method.aggregate(known, at, cohort, uploads)
    assert loss(method, known, without_biases(after), cohort, uploads) == pytest.approx(expected, abs=1e-6)


def without_biases(at):
    """The example's layers have none, and they would learn."""
    zero = [Dense(d.weights, tuple(torch.zeros_like(b) for b in d.biases)) for d in at.network[1:4]]
    return at._replace(network=Network(at.network.embedding, *zero, at.network.chunks))


@pytest.mark.parametrize("mode", ["target", "frozen"])
def test_ten_steps_by_hand(example, mode):
    n, start, cohort, uploads = example
    method = replace(fixed(mode=mode), steps=1)
    known, at = start(method)
    change = uploads.theta - method.send(known, at, cohort).theta
    found = []
    for _ in range(50):
        sent = method.send(known, at, cohort).theta
        # One step at a time, so that biases can be taken out; a frozen change is one from where the model is now.
        goal = uploads.theta if mode == "target" else sent + change
        at = without_biases(method.aggregate(known, at, cohort, Params(goal)))
        found.append(loss(method, known, at, cohort, uploads))
    close(torch.tensor(found[:10], dtype=float64), n[f"Ks10_{mode}_L_GH"])
    assert found[-1] == pytest.approx(float(n[f"Ks50_{mode}_last"]), abs=1e-5)


@pytest.mark.parametrize("sign", ["descent", "printed"])
@pytest.mark.parametrize("mode", ["target", "frozen"])
def test_steps_within_a_round(known, mode, sign):
    clients = known(path(5), nn.Linear(2, 1).double())
    method = Panacea(**SMALL, lr=0.05, mode=mode, sign=sign, reconstruction=0.3, steps=3)
    at, cohort = method.start(clients), torch.tensor([1, 4])
    uploads = Params(random(2, 3))
    found = method.aggregate(clients, at, cohort, uploads)
    step, change = replace(method, steps=1), uploads.theta - method.send(clients, at, cohort).theta
    for _ in range(3):
        goal = uploads.theta if mode == "target" else step.send(clients, at, cohort).theta + change
        at = step.aggregate(clients, at, cohort, Params(goal))
    for a, b in zip(flat(found), flat(at), strict=True):
        close(a, b, atol=1e-14)


def flat(at):
    return [at.network.embedding, *(t for part in at.network[1:4] for side in part for t in side)]


def test_modes_part_at_the_second_step(known):
    clients, cohort, uploads = known(path(4)), torch.tensor([0, 3]), Params(random(2, 3))
    for steps, same in ((1, True), (2, False)):
        ends = []
        for mode in ("target", "frozen"):
            method = Panacea(**SMALL, mode=mode, steps=steps)
            ends.append(method.aggregate(clients, method.start(clients), cohort, uploads).network.embedding)
        assert torch.equal(*ends) == same


def reference(method, graph, table, encoder, decoder, reference_model, generator):
    """Panacea's models [N, d] and L_d, written anew from dense algebra for modules of torch."""
    a = graph.double()
    eye = torch.eye(len(a), dtype=float64)
    degree = (a + eye).sum(1)
    p = {
        "row": (a + eye) / degree[:, None],
        "sym": torch.diag(degree**-0.5) @ (a + eye) @ torch.diag(degree**-0.5),
        "sage": torch.diag(1 / a.sum(1).clamp(min=1)) @ a,
        "none": eye,
    }[method.aggregation]
    z = table
    for i, layer in enumerate(encoder):
        z = layer(torch.hstack((z, p @ z)) if method.aggregation == "sage" else p @ z)
        z = z.relu() if i < len(encoder) - 1 else z
    theta = decoder(z) + (reference_model if method.residual else 0)
    seen = generator(z)
    terms = []
    for u in range(len(a)):
        for v in range(len(a)):
            if u != v:
                chance = torch.sigmoid(seen[u] @ seen[v])
                edges = float((a > 0).sum())
                weight = (len(a) * (len(a) - 1) - edges) / edges if method.balance else 1.0
                terms.append(-weight * chance.log() if a[u, v] else -(1 - chance).log())
    return theta, torch.stack(terms).mean()


VARIANTS = [
    {},
    {"aggregation": "sym"},
    {"aggregation": "sage"},
    {"aggregation": "none"},
    {"residual": False},
    {"project": True},
    {"balance": True},
    {"initial": "random"},
    {"initial": "spectral"},
    {"initial": "features", "features": ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0), (-1.0, 0.0), (2.0, 1.0))},
    {"optimiser": "adam", "lr": 0.01},
    {"clip": 0.05},
    {"reconstruction": 0.0},
    {"encoder_layers": 1, "decoder_layers": 2},
    {"encoder_layers": 2, "decoder_layers": 1},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_two_rounds_against_modules_and_autograd(known, variant):
    graph = links(5, [(0, 1), (1, 2), (0, 2), (2, 3)])  # the last client is alone
    clients = known(graph, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double())
    method = Panacea(**({**SMALL, "lr": 0.05, "steps": 3, "reconstruction": 0.7} | variant))
    at = method.start(clients)
    net = at.network
    table = nn.Parameter(net.embedding.clone(), requires_grad=method.initial == "learned")

    def modules(part):
        made = []
        for weight, bias in zip(*part, strict=True):
            layer = nn.Linear(*reversed(weight.shape)).double()
            layer.load_state_dict({"weight": weight, "bias": bias})
            made.append(layer)
        return made

    def mlp(made):
        between = [m for layer in made for m in (layer, nn.ReLU())]
        return nn.Sequential(*between[:-1])

    encoder, decoder, generator = (modules(part) for part in net[1:4])
    everything = [p for part in (encoder, decoder, generator) for layer in part for p in layer.parameters()]
    everything += [table] if table.requires_grad else []
    kind = torch.optim.Adam if method.optimiser == "adam" else torch.optim.SGD
    optimiser = kind(everything, lr=method.lr)
    for round, cohort in enumerate((torch.tensor([0, 2, 4]), torch.tensor([1, 3]))):
        goal = random(len(cohort), clients.layout.size, seed=round)
        for step in range(method.steps):
            theta, apart = reference(method, graph, table, encoder, mlp(decoder), clients.theta, mlp(generator))
            if step == 0:
                close(method.send(clients, at, clients.everyone).theta, theta.detach(), atol=1e-13)
            optimiser.zero_grad()
            (((theta[cohort] - goal) ** 2).sum() / 2 / len(cohort) + method.reconstruction * apart).backward()
            norm = torch.cat([p.grad.flatten() for p in everything if p.grad is not None]).norm()
            for p in everything:
                if p.grad is not None:
                    p.grad *= (method.clip / norm).clamp(max=1)
            assert (norm > method.clip) == ("clip" in variant)
            optimiser.step()
        at = method.aggregate(clients, at, cohort, Params(goal))
    for part, made in zip(at.network[1:4], (encoder, decoder, generator), strict=True):
        for weight, bias, layer in zip(*part, made, strict=True):
            close(weight, layer.weight.detach(), atol=1e-12)
            close(bias, layer.bias.detach(), atol=1e-12)
    close(at.network.embedding, table.detach(), atol=1e-12)


def test_reconstruction_by_hand(example):
    n, start, cohort, _ = example
    method = fixed(reconstruction=1.0)
    known, at = start(method)
    graph = known.graph.weights.double()
    found = method._reconstruct(at.network, n["Z"], graph, None)
    assert float(found) == pytest.approx(0.621501, abs=1e-6)
    # Nobody's model changed, so that L_d alone moves the encoder, and psi_m stays.
    same = Params(method.send(known, at, cohort).theta)
    after = method.aggregate(known, at, cohort, same).network
    close((after.encoder.weights[0] - n["W_e"]).T / -0.1, n["grad_We_Ld"])
    assert torch.equal(after.decoder.weights[0], n["M"])
    still = fixed().aggregate(known, at, cohort, same)
    assert all(torch.equal(a, b) for a, b in zip(flat(still), flat(at), strict=True))


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_reconstruction_without_an_opinion_is_ln_2(graph):
    method, count = Panacea(**SMALL), len(graph)
    nothing = Network(*([None] * 5))
    zero = method._reconstruct(nothing, torch.zeros(count, 5, dtype=float64), graph, None)
    assert float(zero) == pytest.approx(0.6931471805599453, abs=1e-14)
    z = random(count, 5)
    assert float(method._reconstruct(nothing, z, graph, None)) == pytest.approx(
        float(method._reconstruct(nothing, z, graph.T, None)), abs=1e-14
    )
    # Weights beyond 0 and 1 are links all the same.
    heavy = method._reconstruct(nothing, z, 7 * graph, None)
    assert torch.equal(heavy, method._reconstruct(nothing, z, graph, None))


def test_reconstruction_learns_the_graph(known):
    graph = torch.block_diag(1 - torch.eye(3), 1 - torch.eye(3))
    clients, cohort = known(graph), torch.arange(6)
    method = Panacea(**SMALL, lr=0.5, reconstruction=1.0, steps=200)
    at = method.start(clients)

    def measure(at):
        z = method._encode(at.network, method._aggregate(graph.double()))
        return float(method._reconstruct(at.network, z, graph, None))

    after = method.aggregate(clients, at, cohort, method.send(clients, at, cohort))
    assert measure(after) < 0.3 < 0.5 < measure(at)


def test_sampled_pairs(known):
    graph = path(6)
    clients = known(graph)
    method = Panacea(**SMALL, all_pairs=5, pairs=6000)
    u, v = method._pairs(clients, clients.generator("pairs"))
    counts = torch.zeros(6, 6).index_put((u, v), torch.tensor(1.0), accumulate=True)
    assert (counts.diagonal() == 0).all()
    others = counts[~torch.eye(6, dtype=torch.bool)]  # 200 expected in each of 30; 5.5 deviations
    assert ((others - 200).abs() < 76).all()
    z = random(6, 4)
    found = method._reconstruct(Network(*([None] * 5)), z, graph.double(), (u, v))
    by_hand = F.binary_cross_entropy(torch.sigmoid((z[u] * z[v]).sum(1)), graph[u, v].double())
    assert float(found) == pytest.approx(float(by_hand), abs=1e-12)
    assert Panacea(**SMALL, all_pairs=6)._pairs(clients, clients.generator("pairs")) is None
    # Whom a pair names does not hang on the order of the clients.
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    moved = replace(clients, tags=clients.tags[order])
    assert torch.equal(order[method._pairs(moved, moved.generator("pairs"))], torch.stack((u, v)))


def test_sampled_pairs_change_with_step_and_round(known):
    clients = known(path(6))
    method = Panacea(**SMALL, all_pairs=2, pairs=20, reconstruction=1.0, steps=2)
    draw = clients.generator("panacea.pairs")
    first, second = method._pairs(clients, draw), method._pairs(clients, draw)
    assert not torch.equal(first, second)
    cohort, at = torch.arange(6), method.start(clients)
    sent = method.send(clients, at, cohort)
    rounds = [method.aggregate(replace(clients, round=r), at, cohort, sent).network.embedding for r in (0, 0, 1)]
    assert torch.equal(rounds[0], rounds[1])
    assert not torch.equal(rounds[0], rounds[2])


def test_the_empty_graph_is_pfedhn(known):
    # One encoding layer that changes nothing leaves the MLP; embeddings, layers and steps are then those of pFedHN with
    # another layer that changes nothing below its heads, where it has no ReLU.
    clients = known(torch.zeros(4, 4))
    method = Panacea(
        embedding=5, hidden=5, encoder_layers=1, decoder_layers=2, residual=False, steps=1, reconstruction=0.0, lr=0.1
    )
    at = method.start(clients)
    eye = Dense((torch.eye(5, dtype=float64),), (torch.zeros(5, dtype=float64),))
    at = at._replace(network=at.network._replace(encoder=eye))
    other = PFedHN(embedding=5, hidden=5, layers=2, lr=0.1, momentum=0.0, weight_decay=0.0)
    (first, head), (shift, last) = at.network.decoder
    net = MLP(at.network.embedding, (first, *eye.weights, head), (shift, *eye.biases, last))
    theirs = MLPServer(net, other.optimiser.init([]))
    cohort, goal = torch.tensor([0, 3]), Params(random(2, 3))
    close(
        method.send(clients, at, clients.everyone).theta, other.send(clients, theirs, clients.everyone).theta, atol=0.0
    )
    mine, theirs = (m.aggregate(clients, s, cohort, goal).network for m, s in ((method, at), (other, theirs)))
    close(mine.embedding, theirs.embedding, atol=1e-14)
    for a, b in zip(
        (*mine.decoder.weights, *mine.decoder.biases), (*theirs.weights[::2], *theirs.biases[::2]), strict=True
    ):
        close(a, b, atol=1e-14)


def test_no_aggregation_is_the_empty_graph(known):
    cohort, goal = torch.tensor([0, 2]), Params(random(2, 3))
    alone = Panacea(**SMALL, aggregation="none", reconstruction=0.0)
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


@settings(max_examples=25, deadline=None)
@given(graphs(3, 7), st.integers(1, 3))
def test_a_model_depends_on_its_ball_alone(known, graph, depth):
    clients, method = known(graph), Panacea(embedding=3, hidden=40, encoder_layers=depth, decoder_layers=2)
    at = method.start(clients)

    def models(table):
        return method.send(clients, at._replace(network=at.network._replace(embedding=table)), clients.everyone).theta

    slopes = jacrev(models)(at.network.embedding).abs().amax((1, 3))  # [N, N] model by embedding
    reach = torch.linalg.matrix_power(graph.double() + torch.eye(len(graph), dtype=float64), depth) > 0
    assert (slopes[~reach] == 0).all()
    assert (slopes.diagonal() > 0).all()


def test_clients_of_one_closed_neighbourhood_share_a_model_after_one_layer(known):
    clients = known(links(4, [(0, 1), (0, 2), (1, 2), (2, 3)]))
    method = Panacea(**SMALL, encoder_layers=1)
    theta = method.send(clients, method.start(clients), clients.everyone).theta
    close(theta[0], theta[1], atol=1e-14)
    assert (theta[0] - theta[3]).abs().max() > 1e-4
    clique = known(1 - torch.eye(4))
    theta = method.send(clique, method.start(clique), clique.everyone).theta
    close(theta, theta[:1].expand_as(theta), atol=1e-14)


@settings(max_examples=25, deadline=None)
@given(graphs(3, 6), st.integers(0, 1000), st.sampled_from(["row", "sym", "sage"]), st.booleans())
def test_permutations(known, graph, seed, aggregation, sampled):
    count = len(graph)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    clients = known(graph)
    moved = replace(known(graph[order][:, order]), tags=clients.tags[order])
    method = Panacea(**SMALL, aggregation=aggregation, all_pairs=2 if sampled else 512, pairs=30, steps=2)
    cohort, goal = torch.tensor([0, 2]), random(2, 3)
    place = order.argsort()[cohort]
    ends = [
        method.send(c, method.aggregate(c, method.start(c), who, Params(goal)), c.everyone).theta
        for c, who in ((clients, cohort), (moved, place))
    ]
    close(ends[0][order], ends[1], atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(graphs(2, 6), st.integers(0, 1000), st.data())
def test_a_small_step_lowers_the_loss_and_a_printed_one_raises_it(known, graph, seed, data):
    clients = known(graph)
    size = data.draw(st.integers(1, len(graph)))
    cohort, goal = torch.arange(size), Params(random(size, 3, seed=seed))
    for sign, way in (("descent", 1), ("printed", -1)):
        method = Panacea(**SMALL, lr=1e-4, steps=1, sign=sign, reconstruction=0.0)
        at = method.start(clients)
        before, after = (
            loss(method, clients, s, cohort, goal) for s in (at, method.aggregate(clients, at, cohort, goal))
        )
        assert way * (before - after) > 0


def test_initial_models_are_a_tenth_of_the_common_one_apart(known):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 10)).double()
    clients = known(path(6), module)
    for layers in (1, 3):
        method = Panacea(decoder_layers=layers)
        at = method.start(clients)
        written = method.send(clients, at, clients.everyone).theta
        added = written - clients.theta[clients.layout.trainable]
        place = 0
        for entry in clients.layout.entries:
            if entry.trainable:
                size = entry.shape.numel()
                wanted = 0.1 * clients.theta[entry.at].std(correction=0)  # a norm's constant scale stays as it is
                close(added[:, place : place + size].std(correction=0), wanted, atol=1e-9)
                place += size


def test_embeddings(known):
    graph = links(5, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2)])
    clients = known(graph)
    features = ((1.0,), (2.0,), (3.0,), (4.0,), (5.0,))
    given = Panacea(initial="features", features=features).start(clients).network.embedding
    close(given, torch.tensor(features, dtype=float64))
    drawn = [Panacea(embedding=4, initial=name).start(clients).network.embedding for name in ("learned", "random")]
    assert torch.equal(*drawn)
    u = Panacea(embedding=4, initial="spectral").start(clients).network.embedding
    p = (graph + torch.eye(5)).double()
    p = p / p.sum(1, keepdim=True)
    values = torch.linalg.eigvals(p).real.sort(descending=True).values[:4]
    close(p @ u, u * values, atol=1e-12)  # eigenvectors, the leading first
    close(u.square().mean(0), torch.ones(4, dtype=float64), atol=1e-12)
    assert Panacea(initial="spectral").start(clients).network.embedding.shape == (5, 5)  # there are no more
    order = torch.tensor([3, 0, 4, 2, 1])
    moved = replace(known(graph[order][:, order]), tags=clients.tags[order])
    close(Panacea(embedding=4, initial="spectral").start(moved).network.embedding, u[order], atol=1e-10)


@pytest.mark.parametrize("initial", ["random", "spectral"])
def test_given_embeddings_stay(known, initial):
    clients, cohort = known(path(4)), torch.tensor([0, 1])
    method = Panacea(**SMALL, initial=initial)
    at = method.start(clients)
    after = method.aggregate(clients, at, cohort, Params(random(2, 3)))
    assert torch.equal(after.network.embedding, at.network.embedding)
    assert not torch.equal(after.network.encoder.weights[0], at.network.encoder.weights[0])


def test_weights_and_loops_of_a_graph(known):
    # Loops say nothing; weights other than 0 and 1 aggregate by weight.
    method = Panacea(**SMALL)
    table = random(3, 2)
    graph = torch.tensor([[5.0, 3.0, 0.0], [3.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    found = method._aggregate(method._links(known(graph)).double())(table)
    close(found[0], (table[0] + 3 * table[1]) / 4, atol=1e-12)
    close(found[2], (table[1] + table[2]) / 2, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants_run_alike_under_both_executors(examples, noisy, perceptron, variant):
    x, y = noisy(5, 2)
    ends = []
    for executor in ("loop", "vmap"):
        method = Panacea(**({**SMALL, "lr": 0.05, "steps": 2} | variant))
        trial = examples(
            perceptron(norm=True),
            x,
            y,
            replace(method, aggregation="none", reconstruction=0.0, initial="learned", features=None),
            training=Training(1, 4, SGD(0.1)),
            executor=executor,
        )
        trial.method = method
        trial.roster = replace(trial.roster, graph=Graph(path(5), "given"))
        trial.run(3, participation=0.6)
        ends.append(trial.headline)
    close(*ends, atol=1e-10)
    assert torch.isfinite(ends[0]).all()


def test_running_statistics_stay_with_the_client(examples, noisy, perceptron, executor):
    x, y = noisy(2, 2)
    method = Panacea(**SMALL, aggregation="none", reconstruction=0.0)
    trial = examples(perceptron(norm=True), x, y, method, training=Training(1, 4, SGD(0.1)), executor=executor)
    after = trial.run(2)
    layout = trial.roster.layout
    sent = method.send(trial.roster, after, trial.roster.everyone).theta
    assert torch.equal(trial.headline[:, layout.trainable], sent)
    statistics = trial.headline[:, ~layout.trainable]
    assert torch.equal(statistics, trial.fleet.state.theta[:, ~layout.trainable])
    assert not torch.equal(statistics[0], statistics[1])
    assert trial.history.bytes_up == trial.history.bytes_down == 2 * 2 * layout.parameters * 8
    assert trial.history.relations == []


def test_learns_what_its_clients_want(bowls, executor):
    wanted = torch.tensor([[1.0, 2.0], [1.5, 2.0], [3.0, -4.0], [3.5, -4.0]], dtype=float64)
    method = Panacea(embedding=8, hidden=20, optimiser="adam", lr=0.01, reconstruction=0.0, aggregation="none")
    trial = bowls(method, wanted, lr=1.0, every=60, executor=executor)
    trial.method = replace(method, aggregation="sage", reconstruction=0.01)
    trial.roster = replace(trial.roster, graph=Graph(links(4, [(0, 1), (2, 3)]), "given"))
    trial.run(60)
    close(trial.headline, wanted, atol=0.05)


def test_linked_clients_help_one_that_never_takes_part(known):
    # Clients 0 and 2 want opposite things and 1, linked to 0, never says anything.
    clients = known(links(3, [(0, 1)]))
    method = Panacea(**SMALL, optimiser="adam", lr=0.01, reconstruction=0.0, steps=300)
    cohort, goal = torch.tensor([0, 2]), torch.stack((torch.ones(3), -torch.ones(3))).double()
    after = method.aggregate(clients, method.start(clients), cohort, Params(goal))
    theta = method.send(clients, after, clients.everyone).theta
    close(theta[1], goal[0], atol=0.05)  # with one closed neighbourhood, the two share a model


def trained(weights, known, newcomers, **settings):
    """Everybody's roster and, of all but the newcomers, the roster, the method and the server after a round."""
    everyone = known(weights)
    clients, method = everyone.part(everyone.others(newcomers)), Panacea(**SMALL, **settings)
    uploads = Params(random(len(clients), 3))
    return everyone, clients, method, method.aggregate(clients, method.start(clients), clients.everyone, uploads)


def test_newcomers(known):
    weights = links(6, [(0, 1), (1, 2), (1, 4), (2, 4), (4, 5)])  # 0 and 5 come later, and so does 3, who is alone
    newcomers, others = torch.tensor([0, 3, 5]), torch.tensor([1, 2, 4])
    everyone, clients, method, at = trained(weights, known, newcomers, optimiser="adam")
    before = method.send(clients, at, clients.everyone).theta
    joined = method.add_clients(everyone, at, newcomers)
    table, found = at.network.embedding, joined.network.embedding
    close(found[others], table, atol=0)
    close(found[newcomers], torch.stack((table[0], table.mean(0), table[2])), atol=1e-15)
    for now, old in ((joined.memory.first, at.memory.first), (joined.memory.second, at.memory.second)):
        close(now[0][others], old[0], atol=0)
        assert (now[0][newcomers] == 0).all()
        assert all(a is b for a, b in zip(now[1:], old[1:], strict=True))
    # The model of 3, who has no links, is written from its embedding alone.
    network = joined.network
    alone = perceptron(table.mean(0, keepdim=True), *network.encoder)
    close(method.send(everyone, joined, newcomers).theta[1], method._decode(everyone, network, alone)[0], atol=1e-13)
    assert torch.equal(method.send(clients, at, clients.everyone).theta, before)


def test_without_a_graph_newcomers_share_a_model(known):
    everyone, _, method, at = trained(path(4), known, torch.tensor([0, 3]), aggregation="none", reconstruction=0.0)
    joined = method.add_clients(everyone, at, torch.tensor([0, 3]))
    close(joined.network.embedding[[0, 3]], at.network.embedding.mean(0).expand(2, -1), atol=1e-15)
    theta = method.send(everyone, joined, everyone.everyone).theta
    assert torch.equal(theta[0], theta[3])
    assert not torch.equal(theta[0], theta[1])


def test_newcomers_bring_their_features(known):
    features = ((0.0, 1.0), (2.0, 3.0), (4.0, 5.0))
    few, everyone = known(path(2)), known(path(3))
    method = Panacea(hidden=5, initial="features", features=features[:2])
    at = method.aggregate(few, method.start(few), few.everyone, Params(random(2, 3)))
    joined = replace(method, features=features).add_clients(everyone, at, torch.tensor([2]))
    close(joined.network.embedding, torch.tensor(features, dtype=float64), atol=0)
    with pytest.raises(UsageError, match="2 clients need as many features; got 3 rows"):
        replace(method, features=features).start(few)


def test_a_newcomer_with_its_twins_neighbourhood_gets_its_twins_model(known):
    # Client 3 joins the clique of 0, 1, 2 and one layer of means sees the same mean embedding as before.
    everyone, clients, method, at = trained(1 - torch.eye(4), known, torch.tensor([3]), encoder_layers=1)
    joined = method.add_clients(everyone, at, torch.tensor([3]))
    before = method.send(clients, at, clients.everyone).theta
    close(method.send(everyone, joined, everyone.everyone).theta, before[:1].expand(4, -1), atol=1e-13)


@settings(max_examples=20, deadline=None)
@given(graphs(3, 7), st.integers(1, 2))
def test_a_newcomer_is_felt_within_its_ball_alone(known, weights, depth):
    count = len(weights) - 1
    everyone, clients, method, at = trained(weights, known, torch.tensor([count]), encoder_layers=depth)
    after = method.send(everyone, method.add_clients(everyone, at, torch.tensor([count])), clients.everyone).theta
    reach = torch.linalg.matrix_power(weights.double() + torch.eye(count + 1, dtype=float64), depth) > 0
    far = ~reach[count, :count]
    close(after[far], method.send(clients, at, clients.everyone).theta[far], atol=1e-13)


def test_a_spectral_newcomer_with_its_twins_links_gets_its_twins_embedding(known):
    weights = links(7, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 3), (5, 1), (5, 0), (5, 2), (5, 3)])  # 5 is like 1
    everyone, _, method, at = trained(weights, known, torch.tensor([5, 6]), initial="spectral")
    joined = method.add_clients(everyone, at, torch.tensor([5, 6])).network.embedding
    p = weights[:5, :5].double() + torch.eye(5, dtype=float64)
    values = torch.linalg.eigvals(p / p.sum(1, keepdim=True)).real.sort(descending=True).values[:3]
    assert (values.abs() >= 0.1).all()
    close(joined[5], joined[1], atol=1e-12)
    close(joined[:5], at.network.embedding, atol=0)
    close(joined[6], at.network.embedding.mean(0), atol=1e-15)  # without a link there is nothing to extend
    halfway = weights.clone()
    halfway[5, 0] = halfway[0, 5] = 0
    other = replace(everyone, graph=Graph(halfway, "given"))
    found = method.add_clients(other, at, torch.tensor([5, 6])).network.embedding[5]
    close(found, at.network.embedding[[1, 2, 3]].mean(0) / values, atol=1e-12)


def test_eigenvalues_near_zero_are_not_divided_by(known):
    # A star's P has an eigenvalue of 0.5 for every leaf but one, and a clique's is 0 but for the first.
    everyone, _, method, at = trained(1 - torch.eye(5), known, torch.tensor([4]), initial="spectral")
    joined = method.add_clients(everyone, at, torch.tensor([4])).network.embedding
    close(joined[4], at.network.embedding.mean(0), atol=1e-12)


def test_neighbours_are_drawn_so_that_the_mean_is_right_on_average(known):
    graph = links(7, [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (5, 0)])
    clients, method = known(graph), Panacea(**SMALL, fan_out=2)
    weights = method._links(clients).double()
    drawn = [method._sample(clients, weights, step) for step in range(4000)]
    assert all(((a > 0).sum(1) == weights.sum(1).clamp(max=2)).all() for a in drawn)
    p = weights + torch.eye(7, dtype=float64)
    p = p / p.sum(1, keepdim=True)
    table, total = random(7, 2, seed=3), 0
    for a in drawn:
        total = total + method._aggregate(a)(table)
    close(total / len(drawn), p @ table, atol=0.05)  # deviation 0.02
    assert any(not torch.equal(a, drawn[0]) for a in drawn)
    cohort, goal = torch.tensor([0, 3]), Params(random(2, 3))
    ends = []
    for fan_out in (0, 5, 1):
        method = Panacea(**SMALL, fan_out=fan_out)
        ends.append(flat(method.aggregate(clients, method.start(clients), cohort, goal)))
    assert all(torch.equal(a, b) for a, b in zip(*ends[:2], strict=True))  # nobody has more than five
    assert any(not torch.equal(a, b) for a, b in zip(ends[0], ends[2], strict=True))


LAYERED = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()  # d = 35 + 18


def test_chunks_are_written_one_by_one_by_one_network(known):
    clients = known(path(3), LAYERED)
    method = Panacea(embedding=3, hidden=20, heads="chunked", chunk=9, reconstruction=0.0)
    net = method.start(clients).network
    assert net.chunks.shape == (6, 3)  # 53 numbers in chunks of 9
    assert [tuple(w.shape) for w in net.decoder.weights] == [(20, 23), (20, 20), (9, 20)]
    z = method._encode(net, method._aggregate(method._links(clients)))
    for i, theta in enumerate(method.send(clients, method.start(clients), clients.everyone).theta):
        parts = [perceptron(torch.cat((z[i], tell))[None], *net.decoder)[0] for tell in net.chunks]
        close(theta, clients.theta + torch.cat(parts)[:53], atol=1e-13)
    apart = method.send(clients, method.start(clients), clients.everyone).theta - clients.theta
    stds = [0.1 * clients.theta[e.at].std(correction=0) for e in clients.layout.entries]
    wanted = sum(e.shape.numel() * std**2 for e, std in zip(clients.layout.entries, stds, strict=True)) / 53
    assert 0.5 < float(apart.var() / wanted) < 2  # the last chunk is cut, and the spread is that of all chunks


def test_adapters_are_products_of_low_rank(known):
    clients = known(path(4), nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 3)).double())
    method = Panacea(**SMALL, heads="adapters", rank=2, reconstruction=0.0)
    at = method.start(clients)
    # 50 x 60 is said as 2 (50 + 60), 3 x 50 as 2 (3 + 50), the biases as they are.
    assert at.network.decoder.weights[-1].shape == (220 + 50 + 106 + 3, 5)
    theta = method.send(clients, at, clients.everyone).theta
    z = method._encode(at.network, method._aggregate(method._links(clients)))
    said = perceptron(z, *at.network.decoder)
    for mine, words in zip(theta, said, strict=True):
        change = clients.layout.tensors(mine - clients.theta)
        close(change["0.weight"], words[:100].view(50, 2) @ words[100:220].view(2, 60), atol=1e-13)
        close(change["0.bias"], words[220:270], atol=1e-13)
        close(change["2.weight"], words[270:276].view(3, 2) @ words[276:376].view(2, 50), atol=1e-13)
        close(change["2.bias"], words[376:], atol=1e-13)
    added = torch.stack([clients.layout.tensors(mine - clients.theta)["0.weight"] for mine in theta])
    assert 0.05 < float(added.std() / clients.layout.tensors(clients.theta)["0.weight"].std()) < 0.2


@pytest.mark.parametrize("heads", [{"heads": "chunked", "chunk": 9}, {"heads": "adapters", "rank": 1}])
def test_steps_with_other_heads_are_the_gradient(known, heads):
    clients, cohort = known(path(3), LAYERED), torch.tensor([0, 2])
    method = Panacea(embedding=3, hidden=20, **heads, steps=1, lr=0.1, clip=1e9, reconstruction=0.0)
    at, goal = method.start(clients), random(2, 53)
    leaves, structure = tree_flatten(at.network)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    network = tree_unflatten(leaves, structure)
    z = method._encode(network, method._aggregate(method._links(clients)))
    slopes = torch.autograd.grad(
        (method._decode(clients, network, z[cohort]) - goal).square().sum() / 4, leaves, allow_unused=True
    )
    after = tree_leaves(method.aggregate(clients, at, cohort, Params(goal)).network)
    for found, leaf, slope in zip(after, leaves, slopes, strict=True):
        close(found, (leaf - 0.1 * slope).detach() if slope is not None else leaf.detach(), atol=1e-12)
    assert any(slope is not None and slope.abs().max() > 1e-4 for slope in slopes)


@pytest.mark.parametrize(
    "heads", [{"heads": "chunked", "chunk": 2, "embedding": 8}, {"heads": "adapters", "rank": 1}], ids=str
)
def test_other_heads_learn_what_clients_want(bowls, heads, executor):
    wanted = torch.tensor([[1.0, 2.0, 0.0], [1.5, 2.0, 1.0], [3.0, -4.0, 0.0]], dtype=float64)
    settings = {"embedding": 8, "hidden": 20, "optimiser": "adam", "lr": 0.01, "reconstruction": 0.0} | heads
    trial = bowls(Panacea(**settings, aggregation="none"), wanted, start=0.1, lr=1.0, every=60, executor=executor)
    trial.run(60)
    close(trial.headline, wanted, atol=0.1)


def test_only_what_is_generated_moves_and_travels(examples, noisy, perceptron, executor):
    x, y = noisy(3, 2)
    method = Panacea(**SMALL, generated=["2.*"], aggregation="none", reconstruction=0.0)
    trial = examples(perceptron(), x, y, method, training=Training(1, 4, SGD(0.1)), executor=executor)
    after = trial.run(2)
    at = trial.roster.layout.index(trial.roster.layout.head)
    rest = trial.roster.layout.index(trial.roster.layout.base)
    for models in (trial.headline, trial.fleet.state.theta):
        assert torch.equal(models[:, rest], trial.roster.theta[rest].expand(3, -1))
    assert torch.equal(trial.headline[:, at], method.send(trial.roster, after, trial.roster.everyone).theta)
    assert (trial.fleet.state.theta[:, at] != trial.headline[:, at]).any(1).all()
    assert trial.history.bytes_up == trial.history.bytes_down == 2 * 3 * len(at) * 8


def test_heads_too_large_are_refused_by_name(known):
    wide = known(path(2), nn.Linear(4000, 1000).double())
    with pytest.raises(
        UsageError, match=r"panacea: a network of 404,1\d\d,\d+ numbers.* 6.0\d GiB.*'chunked' or 'adapters'"
    ):
        Panacea().start(wide)
    with pytest.raises(UsageError, match=r" 12 GiB"):
        Panacea(optimiser="adam", memory=10.0).start(wide)
    for heads in ("chunked", "adapters"):
        Panacea(heads=heads, memory=0.1).start(wide)


def test_generated_must_be_learned(known, perceptron):
    clients = known(path(3), perceptron(norm=True))
    with pytest.raises(UsageError, match=r"no tensor of the model matches 'head.*'"):
        Panacea(generated=["head.*"]).start(clients)
    with pytest.raises(UsageError, match="nothing to write"):
        Panacea(generated=["1.running*"]).start(clients)


def test_messages_along_edges_are_the_dense_product(known):
    pytest.importorskip("torch_geometric")
    clients = known(links(5, [(0, 1), (1, 2), (0, 2), (2, 3)]))
    cohort, goal = torch.tensor([0, 3]), Params(random(2, 3))
    for aggregation in ("row", "sym", "sage"):
        ends = []
        for encoder in ("dense", "sparse"):
            method = Panacea(**SMALL, encoder=encoder, aggregation=aggregation)
            at = method.aggregate(clients, method.start(clients), cohort, goal)
            ends.append([*flat(at), method.send(clients, at, clients.everyone).theta])
        for a, b in zip(*ends, strict=True):
            close(a, b, atol=1e-12)


def test_sparse_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("kinfed.methods.panacea.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"kinfed\[sparse\]"):
        Panacea(encoder="sparse")


def test_refuses_to_go_without_a_graph(roster):
    for method in (Panacea(), Panacea(aggregation="none"), Panacea(reconstruction=0.0)):
        with pytest.raises(UsageError, match=r"federation\.graph"):
            method.start(roster(3))
    Panacea(aggregation="none", reconstruction=0.0).start(roster(3))


def test_refuses_graphs_and_features_that_do_not_fit(known, roster):
    lopsided = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    for wrong in ({"aggregation": "sym"}, {"initial": "spectral"}):
        with pytest.raises(UsageError, match="symmetric"):
            Panacea(**wrong).start(known(lopsided))
    Panacea().start(known(lopsided))
    layered = replace(roster(2), graph=Graph(torch.zeros(3, 2, 2), "given"))
    with pytest.raises(UsageError, match=r"\[2, 2\]"):
        Panacea().start(layered)
    with pytest.raises(UsageError, match="3 rows"):
        Panacea(initial="features", features=((1.0,), (2.0,), (3.0,))).start(known(path(2)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"embedding": 0},
        {"hidden": 0},
        {"encoder_layers": 0},
        {"decoder_layers": 0},
        {"steps": 0},
        {"pairs": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"clip": 0.0},
        {"reconstruction": -1.0},
        {"reconstruction": float("inf")},
        {"aggregation": "mean"},
        {"encoder": "pyg"},
        {"initial": "ones"},
        {"mode": "both"},
        {"sign": "paper"},
        {"optimiser": "rmsprop"},
        {"initial": "features"},
        {"features": ((1.0,),)},
        {"initial": "features", "features": ((1.0,), (1.0, 2.0))},
        {"initial": "features", "features": ((), ())},
        {"generated": "2.*"},
        {"heads": "lora"},
        {"chunk": 0},
        {"rank": 0},
        {"memory": 0.0},
        {"fan_out": -1},
        {"heads": "adapters", "residual": False},
        {"heads": "chunked", "decoder_layers": 1},
    ],
    ids=str,
)
def test_refuses(wrong):
    with pytest.raises(UsageError, match="panacea"):
        Panacea(**wrong)


@pytest.mark.parametrize("all_pairs", [0, 512])
def test_a_client_alone_has_no_pairs_to_sample(all_pairs):
    alone = Federation.from_arrays(torch.randn(20, 2), torch.arange(20) % 2, torch.zeros(20), graph=torch.ones(1, 1))
    found = fit(Panacea(all_pairs=all_pairs, hidden=3), alone, nn.Linear(2, 2), rounds=1, execution=Execution("loop"))
    assert found.theta(0).isfinite().all()
