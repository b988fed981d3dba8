"""Every graph method against a second implementation: plain loops over NumPy numbers, straight from the equations.

Three clients, two linear layers one above the other, mean squared error, full batches: gradients are written by hand.
Nothing of kinfed computes an expected number here; only initial numbers, examples and cohorts are taken from it.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from kinfed import Training
from kinfed.core.engine import run, sample
from kinfed.core.graph import Graph
from kinfed.core.history import History, Recorder
from kinfed.core.mixins import model_for
from kinfed.core.optimiser import SGD
from kinfed.core.tasks import Regression
from kinfed.data.federation import Federation
from kinfed.methods import SFL, FedAGHN, FedCedar, Panacea, PFedGAT
from kinfed.methods.parts.graph_hypernetwork import GCN, MLP
from kinfed.methods.parts.heads import FullHeads
from kinfed.methods.sfl import Similarity
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed_papers.fedaghn import ablations
from kinfed_papers.fedcedar.ablations import Mean, Nodes
from kinfed_papers.panacea.printed import Printed

N, RATE, EPOCHS = 3, 0.05, 2
LAYERS = (range(0, 6), range(6, 9))  # of theta: W1 [2, 2], b1 [2], W2 [1, 2], b2 [1]
LINKS = [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
ROUNDS = [(1.0, 2), (0.67, 2), (0.67, 5)]  # share of clients in a round, rounds: one client is never in, or late


class Ours:
    """A method run by kinfed, and what the naive implementation may know of it."""

    def __init__(self, method, share, rounds, links=LINKS, seed=12):
        draw = torch.Generator().manual_seed(9)
        x = torch.randn(33, 2, generator=draw, dtype=torch.float64)
        y = torch.randn(33, 1, generator=draw, dtype=torch.float64) + torch.tensor([[3.0], [0.0], [-3.0]]).repeat(11, 1)
        mine = [torch.arange(i, 33, 3) for i in range(N)]
        train, test = [m[: 5 + i] for i, m in enumerate(mine)], [m[8:] for m in mine]
        rows = {"train": train, "validation": [m[:0] for m in mine], "test": test}
        graph = links and Graph(torch.tensor(links, dtype=torch.float32), "given")
        data = Federation(x, y, rows, Regression(), graph=graph)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
        fleet = Simulation(
            data,
            model_for(method, module),
            method,
            Training(EPOCHS, 99, SGD(RATE)),
            seed=seed,
            execution=Execution("vmap"),
        )
        method, self.roster = fleet.method, fleet.roster(data.graph)
        self.begin = method.start(self.roster)
        self.server = run(
            method, self.roster, fleet, Recorder(History(data.names, data.task)), rounds=rounds, participation=share
        )
        everyone = self.roster.everyone
        roster = replace(self.roster, round=rounds - 1)
        found = fleet.evaluate(rounds - 1, everyone, method.send(roster, self.server, everyone))
        self.models = {name: model.theta.expand(N, -1).numpy() for name, model in found.models.items()}
        self.theta = self.roster.theta.numpy()
        self.train = [(x[r].numpy(), y[r].numpy()) for r in train]
        self.test = [(x[r].numpy(), y[r].numpy()) for r in test]
        self.cohorts = [sample(replace(self.roster, round=t), share).tolist() for t in range(rounds)]


def close(found, expected):
    found = found.numpy() if isinstance(found, torch.Tensor) else found
    np.testing.assert_allclose(found, np.array(expected), rtol=0, atol=1e-9)


def uphill(theta, examples):
    """The gradient of the mean squared error of W2 (W1 x + b1) + b2."""
    w1, b1, w2, b2 = theta[:4].reshape(2, 2), theta[4:6], theta[6:8], theta[8]
    total = np.zeros(9)
    for x, (y,) in zip(*examples, strict=True):
        hidden = w1 @ x + b1
        error = 2 * (w2 @ hidden + b2 - y)
        total += error * np.concatenate([np.outer(w2, x).ravel(), w2, hidden, [1.0]])
    return total / len(examples[0])


def descended(theta, examples, extra=lambda theta: 0.0):
    for _ in range(EPOCHS):
        theta = theta - RATE * (uphill(theta, examples) + extra(theta))
    return theta


def softmax(scores):
    powers = [math.exp(s - max(scores)) for s in scores]
    return np.array(powers) / sum(powers)


def dot(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def test_the_gradient_is_the_slope():
    ours = Ours(SFL(), 1.0, 1)

    def loss(theta):
        w1, b1, w2, b2 = theta[:4].reshape(2, 2), theta[4:6], theta[6:8], theta[8]
        return np.mean([(w2 @ (w1 @ x + b1) + b2 - y[0]) ** 2 for x, y in zip(*ours.train[0], strict=True)])

    nudge = 1e-5 * np.eye(9)
    slopes = [(loss(ours.theta + e) - loss(ours.theta - e)) / 2e-5 for e in nudge]
    np.testing.assert_allclose(uphill(ours.theta, ours.train[0]), slopes, atol=1e-7)


def test_cohorts_leave_somebody_out_and_take_them_in_again():
    cohorts = [set(c) for c in Ours(SFL(), *ROUNDS[2]).cohorts]
    assert all(len(c) == 2 for c in cohorts)
    assert any(i not in b and i in a and i in c for a, b, c in itertools.combinations(cohorts, 3) for i in range(N))
    assert any(i not in cohorts[0] | cohorts[1] for i in range(N))  # one comes late


SFLS = [
    {},
    {"steps": 3, "rho": 0.6, "begin": "shared"},
    {"begin": "own", "steps": 2},
    {"pull": 0.0},
    {"personal": ("1.*",)},
    {"structure": Similarity(neighbours=2, beta=0.4)},
]


@pytest.mark.parametrize(("share", "rounds"), ROUNDS)
@pytest.mark.parametrize(("settings", "known"), [*((settings, LINKS) for settings in SFLS), (SFLS[-1], None)], ids=str)
def test_sfl(settings, known, share, rounds):
    method = SFL(**{"pull": 0.2, **settings})
    ours = Ours(method, share, rounds, known)
    stays = set(LAYERS[1]) if method.personal else set()
    moves = [k for k in range(9) if k not in stays]
    own = [ours.theta.copy() for _ in range(N)]  # every client's v, with what stays at home
    u, w = [ours.theta.copy() for _ in range(N)], ours.theta.copy()
    links, seen = [[float(i == j or not known or known[i][j]) for j in range(N)] for i in range(N)], set()
    for t, cohort in enumerate(ours.cohorts):
        pull = 0.0 if t == 0 else method.pull
        for i in cohort:

            def received(theta, i=i):
                return np.array([own[i][k] if k in stays else theta[k] for k in range(9)])

            mixed, shared = received(u[i]), received(w)

            def towards(theta, anchors=(mixed, shared), pull=pull):
                total = sum(theta - anchor for anchor in anchors)
                return pull * np.array([0.0 if k in stays else total[k] for k in range(9)])

            begin = {"own": own[i], "mixed": mixed, "shared": shared}[method.begin]
            own[i] = descended(begin, ours.train[i], towards)
        first = {i for i in cohort if i not in seen and not known}  # nothing is worth keeping of the complete graph
        seen |= set(cohort)
        mixing = np.zeros((N, N))
        for i in range(N):
            near = [links[i][j] if j in seen else 0.0 for j in range(N)]
            if sum(near) == 0:
                near[i] = 1.0
            for j in range(N):
                mixing[i, j] = near[j] / sum(near)
        u = [v.copy() for v in own]
        for _ in range(method.steps):
            u = [sum(mixing[i, j] * u[j] for j in range(N)) for i in range(N)]
        u = [method.rho * a + (1 - method.rho) * b for a, b in zip(u, own, strict=True)]
        w = sum(u[i] for i in seen) / len(seen)
        if isinstance(method.structure, Similarity):
            # Rows of a graph that is moved are shares; those of the given one become so when they are first moved.
            apart = [[np.sum((own[i] - own[j]) ** 2) for j in range(N)] for i in range(N)]
            scale = sorted(apart[i][j] for i in seen for j in seen if i != j)
            scale = scale[(len(scale) - 1) // 2]
            for i in seen:
                near = [i, *sorted(seen - {i}, key=lambda j: apart[i][j])[: method.structure.neighbours - 1]]
                found = [math.exp(-apart[i][j] / (2 * scale)) if j in near else 0.0 for j in range(N)]
                old = [link / sum(links[i]) for link in links[i]]
                beta = 1.0 if i in first else method.structure.beta
                links[i] = [(1 - beta) * a + beta * b / sum(found) for a, b in zip(old, found, strict=True)]
    close(ours.server.theta, [v[moves] for v in own])
    close(ours.server.links, links)
    close(ours.models["own"], own)
    for name, sent in (("mixed", u), ("shared", [w] * N)):
        expected = [[own[i][k] if k in stays else sent[i][k] for k in range(9)] for i in range(N)]
        close(ours.models[name], expected)


def layer_norm(theta):
    mean = sum(theta) / len(theta)
    variance = sum((x - mean) ** 2 for x in theta) / len(theta)
    return np.array([(x - mean) / math.sqrt(variance + 1e-5) for x in theta])


def attention(project, listen, speak, thetas):
    """R, and per head what its gradient needs: z, e before the rectifier, alpha."""
    count, heads, kept = len(thetas), len(project), []
    h = [layer_norm(theta) for theta in thetas]
    mean = np.zeros((count, count))
    for k in range(heads):
        z = [project[k] @ x for x in h]
        raw = [[dot(listen[k], z[i]) + dot(speak[k], z[j]) for j in range(count)] for i in range(count)]
        alpha = [softmax([e if e > 0 else 0.2 * e for e in row]) for row in raw]
        mean += np.array(alpha) / heads
        kept.append((z, raw, alpha))
    return mean, h, kept


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 3), *ROUNDS])
@pytest.mark.parametrize("settings", [{"feedback": "test"}, {"feedback": "train"}], ids=str)
def test_pfedgat(settings, share, rounds):
    method = PFedGAT(heads=2, width=3, lr=0.3, **settings)
    ours = Ours(method, share, rounds)
    project, listen, speak = (t.numpy() for t in ours.begin.network)
    judged = ours.test if method.feedback == "test" else ours.train
    start, trained, own = [ours.theta.copy() for _ in range(N)], {}, [ours.theta.copy() for _ in range(N)]
    last, seen = [], []
    for cohort in ours.cohorts:
        begin = list(start)
        if seen:
            for i in set(range(N)) - set(seen):
                begin[i] = sum(start[j] for j in seen) / len(seen)
        uploads = {i: descended(begin[i], ours.train[i]) for i in cohort}
        judges = [i for i in cohort if i in last]
        if judges:
            # Equations 9 and 10 about the last mix: G_ij = <gradient of i, theta_j>, back through Equations 7 to 4.
            _, h, kept = attention(project, listen, speak, [trained[j] for j in last])
            steps = [np.zeros_like(project), np.zeros_like(listen), np.zeros_like(speak)]
            for k, (z, raw, alpha) in enumerate(kept):
                for i in judges:
                    a, slope = last.index(i), uphill(start[i], judged[i])
                    g = [dot(slope, trained[j]) / len(kept) for j in last]
                    mean = sum(p * x for p, x in zip(alpha[a], g, strict=True))
                    for b in range(len(last)):
                        by_score = alpha[a][b] * (g[b] - mean) * (1.0 if raw[a][b] > 0 else 0.2)
                        steps[1][k] += by_score * z[a]
                        steps[2][k] += by_score * z[b]
                        steps[0][k] += by_score * (np.outer(listen[k], h[a]) + np.outer(speak[k], h[b]))
            project, listen, speak = (v - 0.3 * s for v, s in zip((project, listen, speak), steps, strict=True))
        trained = uploads
        for i in cohort:
            own[i] = uploads[i]
        weights, _, _ = attention(project, listen, speak, [uploads[i] for i in cohort])
        for a, i in enumerate(cohort):
            start[i] = sum(weights[a, b] * uploads[j] for b, j in enumerate(cohort))
        last, seen = cohort, sorted({*seen, *cohort})
    for found, expected, before in zip(ours.server.network, (project, listen, speak), ours.begin.network, strict=True):
        close(found, expected)
        assert rounds == 1 or np.abs(expected - before.numpy()).max() > 1e-3
    close(ours.server.theta, start)
    if len(seen) < N:
        for i in set(range(N)) - set(seen):
            start[i] = sum(start[j] for j in seen) / len(seen)
    close(ours.models["mixed"], start)
    close(ours.models["own"], own)


AGHNS = [
    {"feedback": "test"},
    {},
    {"sign": "printed"},
    {"sign": "descent", "shared": True},
    {"sign": "descent", "without": "p", "feedback": "test"},
    {"sign": "descent", "without": "q"},
]


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 3), *ROUNDS])
@pytest.mark.parametrize("settings", AGHNS, ids=str)
def test_fedaghn(settings, share, rounds):
    kind = ablations.Printed if "sign" in settings else FedAGHN
    method = kind(home=0.3, sharpness=2.0, lr=0.5, **settings)
    ours = Ours(method, share, rounds)
    layers, without, shared = LAYERS, settings.get("without", ""), settings.get("shared", False)
    alone = without == "p"  # then a client is one of those in its own softmax
    own = [ours.theta.copy() for _ in range(N)]
    change, seen = [np.ones(9) for _ in range(N)], set()
    p = np.full((N, len(layers)), 0.0 if alone else 0.3)
    q = np.full((N, len(layers)), 1.0 if without == "q" else 2.0)

    def listen(i, r):
        """Of client i in layer r: cosines, s and alpha, by client; and how much of its own model is in the sum."""
        known = seen or set(range(N))
        others = [j for j in range(N) if j in known and (alone or j != i)]
        cos = {}
        for j in others:
            a, b = change[i][layers[r]], change[j][layers[r]]
            cos[j] = dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))
        sharp = q[i, r] if i in known else 0.0  # who never took part listens to all others alike
        keep = p[i, r] if i in known else 0.0
        s = dict(zip(others, softmax([sharp * cos[j] for j in others]), strict=True)) if others else {}
        if not others:
            keep = 1.0
        alpha = [((s.get(j, 0.0)) + keep * (j == i)) / (sum(s.values()) + keep) for j in range(N)]
        return cos, s, alpha, keep

    def mixed(i):
        sent = np.zeros(9)
        for r, at in enumerate(layers):
            alpha = listen(i, r)[2]
            for k in at:
                sent[k] = sum(alpha[j] * own[j][k] for j in range(N))
        return sent

    for cohort in ours.cohorts:
        known = seen or set(range(N))
        trained, moved, slopes = {}, {}, {}
        for i in cohort:
            sent = mixed(i)
            trained[i] = descended(sent, ours.train[i])
            moved[i] = trained[i] - sent
            # Equation 4 to 6 differentiated by hand, contracted with what the client told.
            direction = moved[i] if method.feedback == "train" else -uphill(sent, ours.test[i])
            by_p, by_q = np.zeros(len(layers)), np.zeros(len(layers))
            for r, at in enumerate(layers):
                cos, s, _, keep = listen(i, r)
                mean_cos = sum(s[j] * cos[j] for j in s)
                total = sum(s.values()) + keep
                m = sum(s[j] * own[j][at] for j in s)
                if i in known and s:
                    by_p[r] = dot(own[i][at] - m, direction[at]) / total**2
                    by_q[r] = dot(sum(s[j] * (cos[j] - mean_cos) * own[j][at] for j in s), direction[at]) / total
            if shared:
                by_p, by_q = np.full(2, by_p.sum()), np.full(2, by_q.sum())
            slopes[i] = by_p, by_q
        sign = -1.0 if settings.get("sign") == "printed" else 1.0
        for i in cohort:
            own[i], change[i] = trained[i], moved[i]
            if not alone:
                p[i] = np.maximum(0.0, p[i] + sign * 0.5 * slopes[i][0])
            if without != "q":
                q[i] = q[i] + sign * 0.5 * slopes[i][1]
        seen |= set(cohort)
    kept = slice(0, 1) if shared else slice(None)
    close(ours.server.theta, own)
    close(ours.server.home, p[:, kept])
    close(ours.server.sharpness, q[:, kept])
    if rounds > 2:  # with two clients nobody has a choice
        assert (np.abs(q - q.flat[0]).max() > 1e-3) == (without != "q")
    for i in seen:
        close(ours.server.change[i], change[i])
    close(ours.models["own"], own)
    close(ours.models["mixed"], [mixed(i) for i in range(N)])


def partitions(items, count):
    """All ways to put the items into `count` clusters, none empty."""
    for label in itertools.product(range(count), repeat=len(items)):
        if set(label) == set(range(count)) and all(label.index(c) < label.index(c + 1) for c in range(count - 1)):
            yield [[item for item, at in zip(items, label, strict=True) if at == c] for c in range(count)]


CEDARS = [FedCedar(clusters=2), FedCedar(clusters=2, steps=0), FedCedar(clusters=1), Nodes(), Mean(clusters=2, steps=1)]


@pytest.mark.parametrize(("share", "rounds"), ROUNDS)
@pytest.mark.parametrize("method", CEDARS, ids=str)
@pytest.mark.filterwarnings("ignore:fedcedar")
def test_fedcedar(method, share, rounds):
    ours = Ours(method, share, rounds)
    mixed, belongs = [ours.theta], {}  # of the last round: mixed centres, and whose is which client's
    start = lambda i: mixed[belongs[i]] if i in belongs else sum(mixed) / len(mixed)  # noqa: E731
    for cohort in ours.cohorts:
        sent = {i: start(i) for i in cohort}
        upload = {i: descended(sent[i], ours.train[i]) for i in cohort}

        def cost(clusters, upload=upload):
            total = 0.0
            for members in clusters:
                centre = sum(upload[i] for i in members) / len(members)
                total += sum(np.sum((upload[i] - centre) ** 2) for i in members)
            return total

        best = min(partitions(cohort, len(cohort) if isinstance(method, Nodes) else method.clusters), key=cost)
        centres = [sum(upload[i] for i in c) / len(c) for c in best]
        graph = []
        for a in centres:
            row = [max(0.0, dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))) for b in centres]
            graph.append([r / sum(row) for r in row])
        mixed = centres
        for _ in range(method.steps):
            mixed = [sum(graph[k][m] * mixed[m] for m in range(len(mixed))) for k in range(len(mixed))]
        belongs = {i: k for k, c in enumerate(best) for i in c}
        if isinstance(method, Mean):
            belongs = {}
    for found in ours.server.theta.numpy():  # clusters are numbered as they please
        assert min(np.abs(found - v).max() for v in mixed) < 1e-9
    assert len(ours.server.theta) == len(mixed)
    received = [start(i) for i in range(N)]
    close(ours.models["received"], received)
    close(ours.models["tuned"], [descended(v, ours.train[i]) for i, v in enumerate(received)])


PANACEAS = [
    {"steps": 1},
    {"encoder": GCN(layers=2, hidden=4), "steps": 2},
    {"mode": "frozen", "sign": "printed", "reconstruction": 0.0},
    {"encoder": MLP(layers=2, hidden=4), "reconstruction": 0.0, "residual": False},
]


@pytest.mark.parametrize(("share", "rounds"), ROUNDS)
@pytest.mark.parametrize("settings", PANACEAS, ids=str)
def test_panacea(settings, share, rounds):
    parts = {"encoder": GCN(layers=2, hidden=4), "decoder": FullHeads(layers=2, hidden=4), "optimiser": SGD(0.05)}
    settings = {"embedding": 3, "steps": 3, "reconstruction": 0.7, **parts, **settings}
    method = (Printed if "sign" in settings else Panacea)(**settings)
    printed = isinstance(method, Printed)  # the sign, and one change for all steps
    ours = Ours(method, share, rounds)
    begin = ours.begin.network
    embedding = begin.embedding.numpy().copy()
    we, be = [w.numpy().copy() for w in begin.encoder.weights], [b.numpy().copy() for b in begin.encoder.biases]
    wd, bd = [w.numpy().copy() for w in begin.decoder.weights], [b.numpy().copy() for b in begin.decoder.biases]
    base = ours.theta if method.residual else np.zeros(9)
    own = [ours.theta.copy() for _ in range(N)]

    def neighbours(i):
        return [j for j in range(N) if LINKS[i][j]]

    def gathered(x, i):
        """What client i's layer sees: a mean over its closed neighbourhood, or itself alone."""
        if not isinstance(method.encoder, GCN):
            return x[i]
        closed = [*neighbours(i), i]
        return sum(x[j] for j in closed) / len(closed)

    def scattered(slope, i, out):
        """The slopes by x of a slope by what client i's layer saw of it."""
        if not isinstance(method.encoder, GCN):
            out[i] += slope
        else:
            closed = [*neighbours(i), i]
            for j in closed:
                out[j] += slope / len(closed)

    def forward():
        x0 = list(embedding)
        saw0 = [gathered(x0, i) for i in range(N)]
        a0 = [we[0] @ s + be[0] for s in saw0]
        x1 = [np.maximum(a, 0) for a in a0]
        saw1 = [gathered(x1, i) for i in range(N)]
        z = [we[1] @ s + be[1] for s in saw1]
        a2 = [wd[0] @ v + bd[0] for v in z]
        x2 = [np.maximum(a, 0) for a in a2]
        return saw0, a0, saw1, z, a2, x2, [base + wd[1] @ v + bd[1] for v in x2]

    for cohort in ours.cohorts:
        models = forward()[-1]
        trained = {i: descended(models[i], ours.train[i]) for i in cohort}
        first = {i: trained[i] - models[i] for i in cohort}
        for i in cohort:
            own[i] = trained[i]
        for _ in range(method.steps):
            saw0, a0, saw1, z, a2, x2, models = forward()
            slope_e = np.zeros_like(embedding)
            slopes_e = [np.zeros_like(v) for v in (*we, *be)]  # W0, W1, b0, b1
            slopes_d = [np.zeros_like(v) for v in (*wd, *bd)]
            by_z = [np.zeros(4) for _ in range(N)]
            for i in cohort:  # of 1 / (2 K) sum |trained - model|^2
                away = first[i] if printed else trained[i] - models[i]
                by_model = -away / len(cohort) * (-1 if printed else 1)
                slopes_d[1] += np.outer(by_model, x2[i])
                slopes_d[3] += by_model
                by_a2 = (wd[1].T @ by_model) * (a2[i] > 0)
                slopes_d[0] += np.outer(by_a2, z[i])
                slopes_d[2] += by_a2
                by_z[i] += wd[0].T @ by_a2
            for u in range(N):  # of the mean over pairs u != v of the cross-entropy
                for v in range(N):
                    if u != v and method.reconstruction:
                        chance = 1 / (1 + math.exp(-dot(z[u], z[v])))
                        slope = method.reconstruction * (chance - LINKS[u][v]) / (N * (N - 1))
                        by_z[u] += slope * z[v]
                        by_z[v] += slope * z[u]
            by_x1 = [np.zeros(4) for _ in range(N)]
            for i in range(N):
                slopes_e[1] += np.outer(by_z[i], saw1[i])
                slopes_e[3] += by_z[i]
                scattered(we[1].T @ by_z[i], i, by_x1)
            for i in range(N):
                by_a0 = by_x1[i] * (a0[i] > 0)
                slopes_e[0] += np.outer(by_a0, saw0[i])
                slopes_e[2] += by_a0
                scattered(we[0].T @ by_a0, i, slope_e)
            length = math.sqrt(sum(np.sum(s**2) for s in (slope_e, *slopes_e, *slopes_d)))
            rate = 0.05 * min(1.0, method.clip / length)
            assert length < method.clip
            embedding -= rate * slope_e
            for value, slope in zip((*we, *be, *wd, *bd), (*slopes_e, *slopes_d), strict=True):
                value -= rate * slope
    network = ours.server.network
    close(network.embedding, embedding)
    for found, expected in zip(network.encoder, (we, be), strict=True):
        for a, b in zip(found, expected, strict=True):
            close(a, b)
    for found, expected in zip(network.decoder[:2], (wd, bd), strict=True):
        for a, b in zip(found, expected, strict=True):
            close(a, b)
    assert (network.encoder.weights[0] - begin.encoder.weights[0]).abs().max() > 1e-4
    close(ours.models["generated"], forward()[-1])
    close(ours.models["own"], own)
