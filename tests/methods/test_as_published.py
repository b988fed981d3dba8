"""Every method that has a paper, made without any setting, against a second implementation of that paper.

Each function below is one paper: its equations in plain loops, its values as numbers. Nothing of kinfed computes an
expected number; examples, cohorts, initial numbers and random draws are taken from it. Six clients train a network with
one hidden layer for three rounds on batches of all their examples, so the order of these does not matter.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from kinfed import SGD, Execution, Federation, Training
from kinfed.core.engine import run
from kinfed.core.graph import Graph
from kinfed.core.history import History, Recorder
from kinfed.core.mixins import model_for
from kinfed.core.seeding import fold, key, normal, uniform
from kinfed.core.tasks import Classification
from kinfed.methods import FAMILIES, METHODS
from kinfed.simulation.simulation import Simulation

N, ROUNDS, EPOCHS, RATE = 6, 3, 2, 0.05
SIZES = (9, 12, 10, 14, 11, 9)  # of training examples
BASE, HEAD = slice(0, 16), slice(16, 31)  # of theta: W1 [4, 3], b1 [4]; W2 [3, 4], b2 [3]
LINKS = [[0, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0], [0] * 6]
PAPERS = {}  # name: the second implementation, and what it is given
PUBLISHED = [name for family in FAMILIES.values() for name in family if family[name].title]
float64 = torch.float64


def paper(name, **given):
    """Register what the models of each kind should be, by client, as a function of the `Ours`."""

    def known(expected):
        PAPERS[name] = expected, given
        return expected

    return known


class Ours:
    """A method at its defaults, run by kinfed, and what a second implementation may know of it."""

    def __init__(self, name, links=None):
        draw = torch.Generator().manual_seed(4)
        counts = [size + 4 + 5 for size in SIZES]
        x = torch.randn(sum(counts), 3, generator=draw, dtype=float64)
        groups = torch.arange(N) % 3
        turned = torch.cat([x[:, (0, 1, 2)].roll(int(g), 1)[a:b] for g, a, b in self._parts(groups, counts)])
        y = (turned + 0.3 * torch.randn(turned.shape, generator=draw, dtype=float64)).argmax(1)
        rows, at = {"train": [], "validation": [], "test": []}, 0
        for size in SIZES:
            for split, count in (("train", size), ("validation", 4), ("test", 5)):
                rows[split].append(torch.arange(at, at + count))
                at += count
        graph = links and Graph(torch.tensor(links, dtype=torch.float32), "given")
        data = Federation(x, y, rows, Classification(3), graph=graph)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        method = METHODS[name]()
        training = Training(EPOCHS, 99, SGD(RATE))
        self.fleet = Simulation(
            data, model_for(method, module), method, training, seed=6, execution=Execution("loop", workers=1)
        )
        self.method, self.roster = self.fleet.method, self.fleet.roster(data.graph)
        self.begin, self.history = self.method.start(self.roster), History(data.names, data.task)
        self.server = run(self.method, self.roster, self.fleet, Recorder(self.history), rounds=ROUNDS)
        last, everyone = replace(self.roster, round=ROUNDS - 1), self.roster.everyone
        found = self.fleet.evaluate(ROUNDS - 1, everyone, self.method.send(last, self.server, everyone))
        self.models = {model: one.theta.expand(N, -1) for model, one in found.models.items()}
        model = self.fleet.model
        self.theta = model.theta.detach().clone()  # [d] the first model, with what the method adds to it
        splits = self.fleet.clients.rows
        self.data = {split: [(x[r], y[r]) for r in splits[split]] for split in splits}
        self.train = self.data["train"]
        self.shares = torch.tensor([float(len(examples[1])) for examples in self.train], dtype=float64)
        self.shares /= self.shares.sum()

    @staticmethod
    def _parts(groups, counts):
        ends = list(itertools.accumulate(counts))
        return [(g, end - count, end) for g, count, end in zip(groups, counts, ends, strict=True)]

    def step_key(self, t, i, step):
        """The key of the random numbers of a client's step in round t."""
        return fold(fold(key(6, "batches", t, 0), self.roster.tags[i]), ~torch.tensor(step))

    def order(self, t, i, epoch):
        """In which order a client's examples are in the batch of an epoch in round t."""
        of_epoch = fold(fold(key(6, "batches", t, 0), self.roster.tags[i]), torch.tensor(epoch))
        return (fold(of_epoch, torch.arange(len(self.train[i][1]))) & 0x3FFFFFFFFFFFFFFF).argsort(stable=True)

    def copies(self):
        return [self.theta.clone() for _ in range(N)]

    def mean(self, thetas, shares=None):
        """The mean of models, by numbers of training examples unless shares are given."""
        return sum(a * b for a, b in zip(self.shares if shares is None else shares, thetas, strict=True))


EQUAL = [1 / N] * N


def features(theta, x):
    return torch.tanh(x @ theta[:12].view(4, 3).T + theta[12:16])


def outputs(theta, x):
    return features(theta, x) @ theta[16:28].view(3, 4).T + theta[28:31]


def mean_loss(theta, examples):
    return cross_entropy(outputs(theta, examples[0]), examples[1])


def slope(theta, examples, loss=mean_loss):
    leaf = theta.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, examples), leaf)[0]


def descended(theta, examples, extra=None, epochs=EPOCHS, rate=RATE, only=None, loss=mean_loss):
    """Steps on all examples; `extra` is added to the gradient, and `only` a part moves."""
    for _ in range(epochs):
        way = slope(theta, examples, loss)
        if extra is not None:
            way = way + extra(theta)
        moved = theta - rate * way
        theta = moved if only is None else replaced(theta, only, moved[only])
    return theta


def replaced(theta, at, values):
    theta = theta.clone()
    theta[at] = values
    return theta


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.filterwarnings("ignore")
def test_its_defaults_are_the_paper(name):
    expected, given = PAPERS[name]
    ours = Ours(name, **given)
    wanted = expected(ours)
    assert set(wanted) == set(ours.models)
    for model, thetas in wanted.items():
        torch.testing.assert_close(ours.models[model], torch.stack(list(thetas)), rtol=0, atol=1e-9, msg=model)
        assert (ours.models[model] - ours.theta).abs().max() > 1e-3


# One model for all


@paper("fedavg")
def fedavg(ours):
    w = ours.theta
    for _ in range(ROUNDS):
        w = ours.mean([descended(w, examples) for examples in ours.train])
    return {"shared": [w] * N}


@paper("fedprox")
def fedprox(ours):
    w = ours.theta
    for _ in range(ROUNDS):
        w = ours.mean([descended(w, examples, lambda v, w=w: 0.01 * (v - w)) for examples in ours.train])
    return {"shared": [w] * N}


@paper("scaffold")
def scaffold(ours):
    w, c, own = ours.theta, torch.zeros(31, dtype=float64), [torch.zeros(31, dtype=float64)] * N
    for _ in range(ROUNDS):
        ends = [
            descended(w, examples, lambda _, drift=c - mine: drift)
            for examples, mine in zip(ours.train, own, strict=True)
        ]
        own = [mine - c + (w - end) / (EPOCHS * RATE) for mine, end in zip(own, ends, strict=True)]
        w, c = w + ours.mean([end - w for end in ends], EQUAL), ours.mean(own, EQUAL)
    return {"shared": [w] * N}


@paper("per-fedavg")
def per_fedavg(ours):
    w = ours.theta
    for _ in range(ROUNDS):
        ends = []
        for examples in ours.train:
            v = w
            for _ in range(EPOCHS):
                ahead = slope(v - 0.01 * slope(v, examples), examples)
                bend = (slope(v + 0.001 * ahead, examples) - slope(v - 0.001 * ahead, examples)) / (2 * 0.001)
                v = v - RATE * (ahead - 0.01 * bend)
            ends.append(v)
        w = ours.mean(ends, EQUAL)
    return {"shared": [w] * N, "adapted": [w - 0.01 * slope(w, examples) for examples in ours.train]}


@paper("fedatt")
def fedatt(ours):
    w, tensors = ours.theta, (slice(0, 12), slice(12, 16), slice(16, 28), slice(28, 31))
    for _ in range(ROUNDS):
        ends = [descended(w, examples) for examples in ours.train]
        for at in tensors:
            distances = torch.stack([(w[at] - end[at]).norm() for end in ends])
            way = sum(a * (w[at] - end[at]) for a, end in zip(distances.softmax(0), ends, strict=True))
            w = replaced(w, at, w[at] - 1.2 * way)
    return {"shared": [w] * N}


# A personal model beside the shared one


@paper("ditto")
def ditto(ours):
    w, own = ours.theta, ours.copies()
    for _ in range(ROUNDS):
        own = [
            descended(v, examples, lambda v, w=w: 1.0 * (v - w)) for v, examples in zip(own, ours.train, strict=True)
        ]
        w = ours.mean([descended(w, examples) for examples in ours.train])
    return {"own": own, "shared": [w] * N}


@paper("apfl")
def apfl(ours):
    w, own = ours.theta, ours.copies()
    for _ in range(ROUNDS):
        copies, after = [], []
        for v, examples in zip(own, ours.train, strict=True):
            mine = w
            for _ in range(EPOCHS):
                way = slope(0.5 * v + 0.5 * mine, examples)
                mine, v = mine - RATE * slope(mine, examples), v - RATE * 0.5 * way
            copies.append(mine)
            after.append(v)
        own, w = after, ours.mean(copies)
    return {"mixed": [0.5 * v + 0.5 * w for v in own], "shared": [w] * N}


@paper("pfedme")
def pfedme(ours):
    w = ours.theta
    for _ in range(ROUNDS):
        own, copies = [], []
        for examples in ours.train:
            theta = mine = w
            for _ in range(EPOCHS):
                for _ in range(5):
                    theta = theta - 0.09 * (slope(theta, examples) + 15 * (theta - mine))
                mine = mine - 0.005 * 15 * (mine - theta)
            own.append(theta)
            copies.append(mine)
        w = ours.mean(copies)
    return {"own": own, "shared": [w] * N}


class Adam:
    """Kingma and Ba (2015), Algorithm 1."""

    def __init__(self, lr):
        self.lr, self.t, self.m, self.v = lr, 0, 0.0, 0.0

    def __call__(self, at, way):
        self.t += 1
        self.m, self.v = 0.9 * self.m + 0.1 * way, 0.999 * self.v + 0.001 * way**2
        return at - self.lr * (self.m / (1 - 0.9**self.t)) / ((self.v / (1 - 0.999**self.t)).sqrt() + 1e-8)


@paper("pfedbayes")
def pfedbayes(ours):
    # A layer has its means, then its rho: weight, bias, weight_rho, bias_rho.
    means, rhos = (
        torch.cat([torch.arange(16), torch.arange(32, 47)]),
        torch.cat([torch.arange(16, 32), torch.arange(47, 62)]),
    )
    assert torch.allclose(softplus(ours.theta[rhos]), torch.tensor(math.log1p(math.exp(-3)), dtype=float64), atol=1e-6)

    def apart(q, w):
        std, other = softplus(q[31:]), softplus(w[31:])
        return ((other / std).log() + (std**2 + (q[:31] - w[:31]) ** 2) / (2 * other**2) - 0.5).sum()

    def way(f, at):
        leaf = at.detach().clone().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    order = torch.cat([means, rhos])
    w = ours.theta[order]
    own = [w.clone() for _ in range(N)]
    for t in range(ROUNDS):
        copies = []
        for i, examples in enumerate(ours.train):
            q, common, adam, shared = own[i], w, Adam(0.001), Adam(0.001)
            for step in range(EPOCHS):
                for number in range(5):
                    off = normal(fold(ours.step_key(t, i, step), -3 - number), torch.zeros(31, dtype=float64))

                    def total(q, off=off, examples=examples, common=common):
                        sample = q[:31] + softplus(q[31:]) * off
                        return mean_loss(sample, examples) + 10 / len(examples[1]) * apart(q, common)

                    q = adam(q, way(total, q))
                common = shared(common, way(lambda c, q=q: apart(q, c), common))
            own[i] = q
            copies.append(common)
        w = ours.mean(copies)
    back = order.argsort()
    return {"own": [q[back] for q in own], "shared": [w[back]] * N}


# Parts of a model


@paper("fedper")
def fedper(ours):
    own = ours.copies()
    for _ in range(ROUNDS):
        ends = [descended(v, examples) for v, examples in zip(own, ours.train, strict=True)]
        own = [replaced(end, BASE, ours.mean(ends)[BASE]) for end in ends]
    return {"mixed": own}


@paper("lg-fedavg")
def lg_fedavg(ours):
    own = ours.copies()
    for _ in range(ROUNDS):
        ends = [descended(v, examples) for v, examples in zip(own, ours.train, strict=True)]
        own = [replaced(end, HEAD, ours.mean(ends, EQUAL)[HEAD]) for end in ends]
    return {"mixed": own}


@paper("fedrep")
def fedrep(ours):
    own = ours.copies()
    for _ in range(ROUNDS):
        heads = [descended(v, examples, epochs=10, only=HEAD) for v, examples in zip(own, ours.train, strict=True)]
        ends = [descended(v, examples, epochs=1, only=BASE) for v, examples in zip(heads, ours.train, strict=True)]
        own = [replaced(end, BASE, ours.mean(ends)[BASE]) for end in ends]
    return {"mixed": own}


@paper("fedrod")
def fedrod(ours):
    def both_losses(theta, examples):
        (x, y), generic = examples, theta[:31]
        counts = torch.bincount(y, minlength=3)
        balanced = cross_entropy(outputs(generic, x) + counts.log(), y)
        personal = torch.cat([generic[BASE].detach(), theta[31:]])
        return balanced + cross_entropy(outputs(generic, x).detach() + outputs(personal, x), y)

    own = ours.copies()
    assert torch.equal(own[0][HEAD], own[0][31:])  # the personal head begins as a copy of the generic one
    for _ in range(ROUNDS):
        ends = [descended(v, examples, loss=both_losses) for v, examples in zip(own, ours.train, strict=True)]
        own = [replaced(end, slice(0, 31), ours.mean(ends)[:31]) for end in ends]
    return {"both": own, "generic": [replaced(v, slice(31, 46), 0.0) for v in own]}


def learned(own, w, weight, examples, at):
    """One pass at rate 1 for the weights by which numbers of the own model and of the received one are mixed."""
    mixed = replaced(w, at, own[at] + weight * (w - own)[at])
    weight = (weight - 1.0 * (slope(mixed, examples) * (w - own))[at]).clamp(0, 1)
    return weight, replaced(w, at, own[at] + weight * (w - own)[at])


def mixing_heads(ours, train):
    """FedAH and FedALA: each trains, by train(start, examples), from the received model with its mixed head."""
    w, own, weights = ours.theta, ours.copies(), [torch.ones(15, dtype=float64) for _ in range(N)]
    for t in range(ROUNDS):
        ends = []
        for i, examples in enumerate(ours.train):
            start = w
            if t:
                weights[i], start = learned(own[i], w, weights[i], examples, HEAD)
            ends.append(train(start, examples))
        own, w = ends, ours.mean(ends)
    mixed = [learned(own[i], w, weights[i], examples, HEAD)[1] for i, examples in enumerate(ours.train)]
    return {"mixed": mixed, "own": own}


@paper("fedah")
def fedah(ours):
    def train(start, examples):
        return descended(descended(start, examples, epochs=1, only=HEAD), examples, only=BASE)

    return mixing_heads(ours, train)


@paper("fedala")
def fedala(ours):
    return mixing_heads(ours, descended)


@paper("fedpac")
def fedpac(ours):
    w, heads, centroids, own = ours.theta, None, {}, []
    for t in range(ROUNDS):
        ends, moments, variances, means = [], [], [], []
        for i, (x, y) in enumerate(ours.train):
            start = w if heads is None else replaced(w, HEAD, heads[i])
            z = features(start, x)
            pi = [(y == c).double().mean() for c in range(3)]
            mean = [z[y == c].mean(0) if (y == c).any() else torch.zeros(4, dtype=float64) for c in range(3)]
            square = [z[y == c].square().sum(1).mean() if (y == c).any() else 0.0 for c in range(3)]
            moments.append(torch.stack([p * m for p, m in zip(pi, mean, strict=True)]))
            total = sum(p * s - p**2 * m @ m for p, s, m in zip(pi, square, mean, strict=True))
            variances.append(float(total) / len(y))
            goal = torch.stack([centroids.get(c, mean[c]) for c in range(3)])

            def near(theta, examples, goal=goal, pull=1.0 if t else 0.0):
                x, y = examples
                return mean_loss(theta, examples) + pull * (features(theta, x) - goal[y]).square().mean(1).mean()

            theta = descended(start, (x, y), epochs=1, rate=0.1, only=HEAD)
            ends.append(descended(theta, (x, y), only=BASE, loss=near))
            z = features(ends[-1], x)
            means.append({c: (int((y == c).sum()), z[y == c].mean(0)) for c in range(3) if (y == c).any()})
        own, w = ends, ours.mean(ends)
        for c in range(3):
            parts = [one[c] for one in means if c in one]
            centroids[c] = sum(n * m for n, m in parts) / sum(n for n, _ in parts)
        heads = []
        for i in range(N):
            apart = torch.stack([(moments[i] - other).flatten() for other in moments])
            alpha = smallest(apart @ apart.T + torch.diag(torch.tensor(variances, dtype=float64)))
            heads.append(sum(a * end[HEAD] for a, end in zip(alpha, ends, strict=True)))
    return {"combined": [replaced(w, HEAD, head) for head in heads], "own": own}


def smallest(q):
    """The weights of a mean at which a' q a is smallest, by trying every set of clients; below 0.001 they are zero."""
    best, found = math.inf, None
    for size in range(1, N + 1):
        for chosen in itertools.combinations(range(N), size):
            part = torch.linalg.solve(q[list(chosen)][:, list(chosen)], torch.ones(size, dtype=float64))
            alpha = torch.zeros(N, dtype=float64)
            alpha[list(chosen)] = part / part.sum()
            if (alpha >= 0).all() and float(alpha @ q @ alpha) < best:
                best, found = float(alpha @ q @ alpha), alpha
    found = torch.where(found < 0.001, 0.0, found)
    return found / found.sum()


@paper("fedcp")
def fedcp(ours):
    # Behind the base: context v (4), shared head g and personal head h (15 each), policy (8 x 4, then three of 8).
    context, generic, personal = slice(16, 20), slice(20, 35), slice(35, 50)

    def split(theta, x, gumbel=0.0):
        z, (bias, scale, shift) = features(theta, x), theta[82:106].view(3, 8)
        scores = (z * theta[context]) @ theta[50:82].view(8, 4).T + bias
        scores = nn.functional.layer_norm(scores, (8,), scale, shift).relu().view(len(x), 2, 4)
        r, s = (scores + gumbel).softmax(1).unbind(1)
        return sum(
            part @ theta[head][:12].view(3, 4).T + theta[head][12:]
            for part, head in ((r * z, personal), (s * z, generic))
        )

    def received(theta):
        v = theta[personal][:12].view(3, 4).sum(0)
        return replaced(theta, context, v / v.norm())

    moves = torch.tensor([*range(16), *range(35, 106)])  # neither the context nor the shared head
    own = ours.copies()
    for t in range(ROUNDS):
        ends = []
        for i, (x, y) in enumerate(ours.train):
            theta = received(own[i])
            for step in range(EPOCHS):
                luck = uniform(fold(ours.step_key(t, i, step), -2), torch.zeros(len(x), 2, 4, dtype=float64)) + 2**-24
                gumbel, at = -(-luck.log()).log(), ours.order(t, i, step)

                def loss(theta, examples, gumbel=gumbel, at=at):
                    return cross_entropy(split(theta, examples[0][at], gumbel), examples[1][at])

                theta = descended(theta, (x, y), epochs=1, only=moves, loss=loss)
            ends.append(replaced(theta, generic, (theta[generic] + theta[personal]) / 2))
        mean = ours.mean(ends)
        own = [replaced(mean, personal, end[personal]) for end in ends]
    return {"split": [received(v) for v in own]}


# Clusters


def inside(ours, clusters, own, before):
    """The plain mean of each cluster's members, or what it was before without any."""
    return [sum(own[i] for i in c) / len(c) if c else old for c, old in zip(clusters, before, strict=True)]


@paper("ifca")
def ifca(ours):
    models = list(ours.begin.theta)
    assert len(models) == 4
    for _ in range(ROUNDS):
        chosen = [min(range(4), key=lambda c: float(mean_loss(models[c], examples))) for examples in ours.train]
        own = [descended(models[c], examples) for c, examples in zip(chosen, ours.train, strict=True)]
        models = inside(ours, [[i for i in range(N) if chosen[i] == c] for c in range(4)], own, models)
    chosen = [min(range(4), key=lambda c: float(mean_loss(models[c], examples))) for examples in ours.train]
    return {"cluster": [models[c] for c in chosen], "own": own}


def partitions(count):
    """All ways to put the clients into so many clusters, none empty."""
    for label in itertools.product(range(count), repeat=N):
        if set(label) == set(range(count)) and all(label.index(c) < label.index(c + 1) for c in range(count - 1)):
            yield [[i for i in range(N) if label[i] == c] for c in range(count)]


def k_means(thetas, count):
    """The clusters with the least squared distances to their means, of all."""

    def cost(clusters):
        centres = [sum(thetas[i] for i in c) / len(c) for c in clusters]
        return sum(float((thetas[i] - m).square().sum()) for c, m in zip(clusters, centres, strict=True) for i in c)

    return min(partitions(count), key=cost)


def losses(theta, examples):
    return cross_entropy(outputs(theta, examples[0]), examples[1], reduction="none")


@paper("fedem")
def fedem(ours):
    models = [ours.begin.theta, *ours.begin.others]
    shares = [torch.full((3,), 1 / 3, dtype=float64)] * N
    for _ in range(ROUNDS):
        ends, after = [], []
        for share, examples in zip(shares, ours.train, strict=True):
            odds = torch.stack([p * (-losses(theta, examples)).exp() for p, theta in zip(share, models, strict=True)])
            q = odds / odds.sum(0)
            weighted = [lambda v, e, row=row: (row * losses(v, e)).mean() for row in q]
            ends.append([descended(theta, examples, loss=loss) for theta, loss in zip(models, weighted, strict=True)])
            after.append(q.mean(1))
        shares, models = after, [ours.mean([end[m] for end in ends]) for m in range(3)]
    return {"mixture": [models[0]] * N}


@paper("fedsem")
def fedsem(ours):
    own = [descended(ours.theta, examples) for examples in ours.train]
    clusters = k_means(own, 5)
    centres = inside(ours, clusters, own, [None] * 5)
    for _ in range(ROUNDS - 1):
        of = {i: c for c, members in enumerate(clusters) for i in members}
        own = [descended(centres[of[i]], examples) for i, examples in enumerate(ours.train)]
        nearest = [min(range(5), key=lambda c: float((v - centres[c]).square().sum())) for v in own]
        clusters = [[i for i in range(N) if nearest[i] == c] for c in range(5)]
        centres = inside(ours, clusters, own, centres)
    of = {i: c for c, members in enumerate(clusters) for i in members}
    return {"cluster": [centres[of[i]] for i in range(N)], "own": own}


@paper("cfl")
def cfl(ours):
    clusters, models = [list(range(N))], [ours.theta]
    for _ in range(ROUNDS):
        of = {i: c for c, members in enumerate(clusters) for i in members}
        own = [descended(models[of[i]], examples) for i, examples in enumerate(ours.train)]
        moved = [own[i] - models[of[i]] for i in range(N)]
        parts, parents = [], []
        for c, members in enumerate(clusters):
            mean = sum(moved[i] for i in members) / len(members)
            longest = max(float(moved[i].norm()) for i in members)
            assert not (float(mean.norm()) < 0.4 and longest > 1.6)  # of updates so short nobody is split
            parts.append(members)
            parents.append(models[c])
        models = [
            old + sum(moved[i] for i in members) / len(members) for old, members in zip(parents, parts, strict=True)
        ]
        clusters = parts
    return {"cluster": [models[0]] * N, "own": own}


# Graphs


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


@paper("sfl", links=LINKS)
def sfl(ours):
    own, u, w = ours.copies(), ours.copies(), ours.theta
    for t in range(ROUNDS):
        pull = 0.3 if t else 0.0
        own = [
            descended(own[i], examples, lambda v, u=u[i], w=w, pull=pull: pull * (v - w + v - u))
            for i, examples in enumerate(ours.train)
        ]
        u = []
        for i in range(N):
            near = [i, *(j for j in range(N) if LINKS[i][j])]
            u.append(sum(own[j] for j in near) / len(near))
        w = sum(u) / N
    return {"mixed": u, "own": own, "shared": [w] * N}


@paper("fedu", links=LINKS)
def fedu(ours):
    own = ours.copies()
    for _ in range(ROUNDS):
        ends = [descended(v, examples) for v, examples in zip(own, ours.train, strict=True)]
        pulls = [
            sum(a * (end - other) for a, other in zip(row, ends, strict=True))
            for row, end in zip(LINKS, ends, strict=True)
        ]
        own = [end - RATE * EPOCHS * 0.01 * pull for end, pull in zip(ends, pulls, strict=True)]
    return {"mixed": own, "own": ends}


@paper("fedcedar")
def fedcedar(ours):
    start = ours.copies()
    for _ in range(ROUNDS):
        own = [descended(v, examples) for v, examples in zip(start, ours.train, strict=True)]
        clusters = k_means(own, 5)
        centres = [sum(own[i] for i in c) / len(c) for c in clusters]
        graph = torch.tensor([[max(0.0, cosine(a, b)) for b in centres] for a in centres], dtype=float64)
        graph /= graph.sum(1, keepdim=True)
        mixed = graph @ graph @ torch.stack(centres)
        for members, centre in zip(clusters, mixed, strict=True):
            for i in members:
                start[i] = centre
    tuned = [descended(v, examples) for v, examples in zip(start, ours.train, strict=True)]
    return {"received": start, "tuned": tuned}


@paper("fedamp")
def fedamp(ours):
    alpha, sigma, pull = 100, 10_000, 1

    def mixtures(own):
        for i in range(N):
            given = {j: alpha * math.exp(-float((own[i] - own[j]).square().sum()) / sigma) / sigma for j in range(N)}
            kept = 1 - sum(weight for j, weight in given.items() if j != i)
            yield kept * own[i] + sum(weight * own[j] for j, weight in given.items() if j != i)

    own = ours.copies()
    for _ in range(ROUNDS):
        own = [
            descended(v, examples, lambda v, u=u: pull / alpha * (v - u))
            for v, u, examples in zip(own, list(mixtures(own)), ours.train, strict=True)
        ]
    return {"own": own, "mixed": list(mixtures(own))}


@paper("heurfedamp")
def heurfedamp(ours):
    def mixtures(own):
        for i in range(N):
            others = [j for j in range(N) if j != i]
            weights = torch.tensor([100 * cosine(own[i], own[j]) for j in others], dtype=float64).softmax(0)
            yield 0.05 * own[i] + 0.95 * sum(a * own[j] for a, j in zip(weights, others, strict=True))

    own = ours.copies()
    for _ in range(ROUNDS):
        own = [
            descended(v, examples, lambda v, u=u: 1.0 * (v - u))
            for v, u, examples in zip(own, list(mixtures(own)), ours.train, strict=True)
        ]
    return {"own": own, "mixed": list(mixtures(own))}


@paper("pfedgraph")
def pfedgraph(ours):
    def collaboration(own, i):
        """The weights of a mean, x, at which 0.8 |x - p|^2 - <s, x> is smallest, by bisection of their offset."""
        cosines = torch.tensor([cosine(own[i] - ours.theta, v - ours.theta) for v in own], dtype=float64)
        point = ours.shares + cosines / (2 * 0.8)
        low, high = point.min() - 1, point.max()
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if (point - middle).clamp(min=0).sum() > 1 else (low, middle)
        return (point - low).clamp(min=0)

    own, graph = ours.copies(), None
    for t in range(ROUNDS):
        ends = []
        for i, examples in enumerate(ours.train):
            weights = ours.shares if graph is None else graph[i]

            def loss(theta, examples, weights=weights, own=own, pull=0.01 if t else 0.0):
                alike = sum(a * (theta @ v) / (theta.norm() * v.norm()) for a, v in zip(weights, own, strict=True))
                return mean_loss(theta, examples) - pull * alike

            ends.append(descended(ours.mean(own, weights), examples, loss=loss))
        own = ends
        graph = [collaboration(own, i) for i in range(N)]
    return {"own": own, "mixed": [ours.mean(own, row) for row in graph]}


def gains(theta, old, held):
    """What a model does to a client's loss, for the way to it."""
    far = float((theta - old).norm())
    return float(mean_loss(old, held) - mean_loss(theta, held)) / far if far else 0.0


@paper("fedfomo")
def fedfomo(ours):
    own, old, held = ours.copies(), ours.copies(), ours.data["held_out"]

    def mixed(i, others):
        """Of its own model and the five others, all of which it is sent."""
        gain = {j: max(0.0, gains(own[j], old[i], held[i])) for j in [i, *others]}
        total = sum(gain.values())
        return sum(g * own[j] for j, g in gain.items()) / total if total else own[i]

    for t in range(ROUNDS):
        starts = [mixed(i, [j for j in range(N) if t and j != i]) for i in range(N)]
        own, old = [descended(v, examples) for v, examples in zip(starts, ours.train, strict=True)], starts
    return {"mixed": [mixed(i, [j for j in range(N) if j != i]) for i in range(N)], "own": own}


@paper("dpfl")
def dpfl(ours):
    own, held = ours.copies(), ours.data["held_out"]

    def grown(i, others):
        chosen = [i]
        score = lambda members: float(mean_loss(sum(own[j] for j in members) / len(members), held[i]))  # noqa: E731
        while len(chosen) <= 5 and (left := [j for j in others if j not in chosen]):
            best = min(left, key=lambda j: score([*chosen, j]))
            if score([*chosen, best]) >= score(chosen):
                break
            chosen.append(best)
        return sum(own[j] for j in chosen) / len(chosen)

    for t in range(ROUNDS):
        starts = [grown(i, [j for j in range(N) if t and j != i]) for i in range(N)]
        own = [descended(v, examples) for v, examples in zip(starts, ours.train, strict=True)]
    return {"mixed": [grown(i, [j for j in range(N) if j != i]) for i in range(N)], "own": own}


@paper("fedaghn")
def fedaghn(ours):
    layers = (BASE, HEAD)
    own, change = ours.copies(), [torch.ones(31, dtype=float64) for _ in range(N)]
    p, q = torch.full((N, 2), 0.03, dtype=float64), torch.full((N, 2), 0.5, dtype=float64)

    def mixed(p, q, i):
        """Equations 4 to 6 for client i, of which p: [2] and q: [2] are."""
        sent = []
        for r, at in enumerate(layers):
            others = [j for j in range(N) if j != i]
            s = (q[r] * torch.tensor([cosine(change[i][at], change[j][at]) for j in others], dtype=float64)).softmax(0)
            total = p[r] * own[i][at] + sum(a * own[j][at] for a, j in zip(s, others, strict=True))
            sent.append(total / (1 + p[r]))
        return torch.cat(sent)

    for _ in range(ROUNDS):
        sent = [mixed(p[i], q[i], i) for i in range(N)]
        ends = [descended(v, examples) for v, examples in zip(sent, ours.train, strict=True)]
        moved = [end - begin for end, begin in zip(ends, sent, strict=True)]
        for i in range(N):  # down the loss, along the derivatives of the mixture contracted with the update
            leaves = [values[i].clone().requires_grad_() for values in (p, q)]
            by_p, by_q = torch.autograd.grad(mixed(*leaves, i) @ moved[i], leaves)
            p[i], q[i] = (p[i] + 0.005 * by_p).clamp(min=0), q[i] + 0.005 * by_q
        own, change = ends, moved
    return {"own": own, "mixed": [mixed(p[i], q[i], i) for i in range(N)]}


@paper("pfedgat")
def pfedgat(ours):
    network = [part.clone().requires_grad_() for part in ours.begin.network]  # W [8, f, 31], and a's halves [8, f]
    assert len(network[0]) == 8

    def graph(network, thetas):
        """Equations 3 to 8: the mean over heads of softmaxes of LeakyReLU(a . [W h_i || W h_j])."""
        project, listen, speak = network
        h = torch.stack([(v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt() for v in thetas])
        z = torch.einsum("hfm,im->hif", project, h)
        raw = (z @ listen[:, :, None]) + (z @ speak[:, :, None]).transpose(1, 2)
        return torch.where(raw > 0, raw, 0.2 * raw).softmax(2).mean(0)

    start, last = ours.copies(), None
    for _ in range(ROUNDS):
        own = [descended(v, examples) for v, examples in zip(start, ours.train, strict=True)]
        if last is not None:  # Equations 9 and 10, by what each model that was mixed does to each client's loss
            told = torch.stack([slope(v, held) for v, held in zip(start, ours.data["held_out"], strict=True)])
            grads = torch.autograd.grad((graph(network, last) * (told @ torch.stack(last).T)).sum(), network)
            network = [(part - 0.01 * g).detach().requires_grad_() for part, g in zip(network, grads, strict=True)]
        start, last = list(graph(network, own).detach() @ torch.stack(own)), own
    return {"mixed": start, "own": own}


# Hypernetworks


@paper("pfedhn")
def pfedhn(ours):
    """By the values of its authors' program for the server: SGD of rate 0.01, momentum 0.9 and decay 0.001."""
    embedding, weights, biases = ours.begin.network
    parts = [embedding.clone(), *(w.clone() for w in weights), *(b.clone() for b in biases)]
    assert [len(w) for w in weights] == [100, 100, 100, 100, 31]
    moments = [torch.zeros_like(part) for part in parts]

    def written(parts):
        x, count = parts[0], len(weights)
        for number, (w, b) in enumerate(zip(parts[1 : 1 + count], parts[1 + count :], strict=True)):
            x = x @ w.T + b
            x = x.relu() if number < count - 2 else x  # linear heads on features that are not cut off
        return x

    for _ in range(ROUNDS):
        sent = written(parts)
        own = torch.stack([descended(v, examples) for v, examples in zip(sent, ours.train, strict=True)])
        leaves = [part.clone().requires_grad_() for part in parts]
        grads = torch.autograd.grad((written(leaves) * (sent - own)).sum() / N, leaves)
        length = torch.stack([g.norm() for g in grads]).norm()
        assert length < 50  # where it would be clipped
        for k, g in enumerate(grads):
            moments[k] = 0.9 * moments[k] + g + 0.001 * parts[k]
            parts[k] = parts[k] - 0.01 * moments[k]
    return {"generated": written(parts), "own": own}


@paper("panacea", links=LINKS)
def panacea(ours):
    """Equations 3 to 5 with K_s = 10 steps of rate 0.03 and lambda_d = 0.1, three layers and 100 numbers throughout."""
    embedding, encoder, decoder = ours.begin.network
    parts = [embedding, *encoder.weights, *encoder.biases, *decoder.weights, *decoder.biases]
    assert [len(w) for w in (*encoder.weights, *decoder.weights)] == [100] * 5 + [31]
    links = torch.tensor(LINKS, dtype=float64)
    near = [[i] + [j for j in range(N) if links[i, j]] for i in range(N)]

    def embedded(parts):
        x = parts[0]
        for layer in range(3):
            x = torch.stack([sum(x[j] for j in those) / len(those) for those in near]) @ parts[1 + layer].T
            x = x + parts[4 + layer]
            x = x.relu() if layer < 2 else x
        return x

    def written(parts, z):
        x = (z @ parts[7].T + parts[10]).relu()
        x = (x @ parts[8].T + parts[11]).relu()
        return ours.theta + x @ parts[9].T + parts[12]

    def loss(parts, own):
        z = embedded(parts)
        pairs = [(u, v) for u in range(N) for v in range(N) if u != v]
        linked = sum(
            softplus(-(z[u] @ z[v])) if links[u, v] else softplus(z[u] @ z[v]) for u, v in pairs
        )  # -log sigmoid of a link's product, -log (1 - sigmoid) where there is none
        return (written(parts, z) - own).square().sum() / (2 * N) + 0.1 * linked / len(pairs)

    for _ in range(ROUNDS):
        sent = written(parts, embedded(parts))
        own = torch.stack([descended(v, examples) for v, examples in zip(sent, ours.train, strict=True)])
        for _ in range(10):
            leaves = [part.clone().requires_grad_() for part in parts]
            grads = torch.autograd.grad(loss(leaves, own), leaves)
            assert torch.stack([g.norm() for g in grads]).norm() < 50  # where it would be clipped
            parts = [part - 0.03 * g for part, g in zip(parts, grads, strict=True)]
    return {"generated": written(parts, embedded(parts)), "own": own}


@paper("pfedla")
def pfedla(ours):
    """FedAGHN's values: networks of 100 numbers a layer, by SGD of rate 0.005."""
    layers = (BASE, HEAD) if len(ours.begin.network.offset) == 2 else ()
    embedding, weights, biases, last, offset = ours.begin.network
    assert [w.shape[1:] for w in weights] == [(100, 100)] * 3

    def weighed(i, parts):
        x = parts[0]
        for w, b in zip(parts[1:4], parts[4:7], strict=True):
            x = (w @ x + b).relu()
        return [(score.T @ x + shift).softmax(0) for score, shift in zip(parts[7], parts[8], strict=True)]

    def mixed(i, parts, own):
        alpha = weighed(i, parts)
        return torch.cat([sum(a * v[at] for a, v in zip(alpha[r], own, strict=True)) for r, at in enumerate(layers)])

    networks = [
        [embedding[i], *(w[i] for w in weights), *(b[i] for b in biases), last[:, :, i], offset[:, i]] for i in range(N)
    ]
    own = ours.copies()
    for _ in range(ROUNDS):
        sent = [mixed(i, networks[i], own) for i in range(N)]
        ends = [descended(v, examples) for v, examples in zip(sent, ours.train, strict=True)]
        for i in range(N):
            leaves = [part.clone().requires_grad_() for part in networks[i]]
            grads = torch.autograd.grad(mixed(i, leaves, own) @ (sent[i] - ends[i]), leaves)
            networks[i] = [part - 0.005 * g for part, g in zip(networks[i], grads, strict=True)]
        own = ends
    return {"own": own, "mixed": [mixed(i, networks[i], own) for i in range(N)]}


# A memory at the client


@paper("knn-per")
def knn_per(ours):
    w = fedavg(ours)["shared"][0]

    def mixed(i, x, lam):
        z, (own, y) = features(w, x), ours.train[i]
        apart = (z[:, None] - features(w, own)).square().sum(2)
        shares = torch.zeros(len(x), 3, dtype=float64)
        for row, distances in zip(shares, apart, strict=True):
            for m in distances.argsort()[:10]:
                row[y[m]] += torch.exp(-distances[m] / 4)
        return lam * shares / shares.sum(1, keepdim=True) + (1 - lam) * outputs(w, x).softmax(1)

    scores = ours.history.scores[-1]
    for i in range(N):
        x, y = ours.data["validation"][i]
        right = {k: int((mixed(i, x, k / 10).argmax(1) == y).sum()) for k in range(11)}
        lam = max(right, key=right.get) / 10  # the least of equals
        x, y = ours.data["test"][i]
        loss = -mixed(i, x, lam)[torch.arange(len(y)), y].log().mean()
        torch.testing.assert_close(scores["mixed", "test", "loss"][i].double(), loss, rtol=0, atol=1e-6)
    return {"mixed": [w] * N, "shared": [w] * N}
