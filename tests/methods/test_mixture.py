"""Mixture: parts that compose to the methods of papers, to kinfed's own, and to a user's."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import kinfed
from kinfed import Execution, Federation, UsageError, fit
from kinfed.cli import main
from kinfed.core.method import Params
from kinfed.methods import FedAMP, HeurFedAMP, Local, Mixture, PFedGraph
from kinfed.relations.comparisons import Cosine, Distance
from kinfed.relations.neighbourhoods import Everyone, Linked, Nearest
from kinfed.relations.weighings import Kernel, Simplex, Softmax

KEYS = "own weight", "clients mixed"
TRAINING = kinfed.Training(epochs=1, batch=8, optimiser=kinfed.SGD(lr=0.1))


@pytest.fixture(scope="module")
def federation():
    """Twelve clients with equally many examples, in two groups that label the opposite way."""
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(480, 6, generator=draw), torch.arange(480) % 12
    return Federation.from_arrays(x, (x.sum(1) * (-1) ** client > 0).long(), client)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def train(method, federation, rounds=4, **how):
    return fit(method, federation, network(), rounds=rounds, training=TRAINING, **how)


@pytest.mark.parametrize(
    ("composed", "paper"),
    [
        (
            Mixture(Distance(), Kernel(0.02, 0.05), vectors="models", start_from="own", pull=5.0),
            FedAMP(alpha=0.02, sigma=0.05, pull=0.1),
        ),
        (
            Mixture(Cosine(), Softmax(1 / 20, self_weight=0.2), vectors="models", start_from="own", pull=0.3),
            HeurFedAMP(sharpness=20.0, home=0.2, pull=0.3),
        ),
        (Mixture(weigh=Simplex(0.8)), PFedGraph(alpha=0.8, pull=0.0)),
    ],
)
def test_parts_compose_to_a_papers_method(composed, paper, federation):
    """Of equal sizes, as these papers' weights do not count examples; all clients take part."""
    runs = [train(method, federation) for method in (composed, paper)]
    torch.testing.assert_close(runs[0].relation, runs[1].relation, rtol=1e-4, atol=1e-5)
    for model in ("own", "mixed"):
        scores = [run.history.curve(model, "test", "loss") for run in runs]
        torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_weights_by_hand():
    similarity, mass = torch.tensor([[[1.0, 0.5, 0.0, 0.9]]]), torch.tensor([[2.0, 2.0, 4.0, 0.0]])
    itself, ones = torch.tensor([[True, False, False, False]]), torch.ones(1, 4)
    powers = torch.tensor([2.0, 1.0, 1.0, 0.0])  # 2 e^(ln 4), 2 e^(ln 2) and 4 e^0, over 4
    plain = Softmax(0.5 / torch.tensor(2.0).log().item()).weigh(similarity, mass, itself, ones)
    torch.testing.assert_close(plain[0, 0], powers / powers.sum())
    fixed = Softmax(0.5 / torch.tensor(2.0).log().item(), self_weight=0.6).weigh(similarity, mass, itself, ones)
    torch.testing.assert_close(fixed[0, 0], torch.tensor([0.6, 0.2, 0.2, 0.0]))
    nearest = Simplex(1.0).weigh(similarity, mass, itself, ones)  # of 0.25 + 0.5, 0.25 + 0.25 and 0.5, each less 0.25
    torch.testing.assert_close(nearest[0, 0], torch.tensor([0.5, 0.25, 0.25, 0.0]))
    kernel = Kernel(0.5, 1.0).weigh(-similarity, mass, itself, ones)
    e = torch.exp(torch.tensor([-0.5, 0.0])) / 2
    torch.testing.assert_close(kernel[0, 0], torch.tensor([1 - float(e.sum()), *e, 0.0]))


def test_distances_are_those_of_pairs_with_lists_and_without():
    layout, draw = kinfed.Model(network()).layout, torch.Generator()
    table = torch.randn(7, layout.size, generator=draw.manual_seed(2)) + 1000
    rows, near = table[:3], torch.tensor([[0, 4, 6], [1, 2, 3], [2, 0, 5]])
    expected = -(rows[:, None].double() - table.double()).square().sum(-1)
    dense, listed = (Distance().compare(rows, table, lists, layout)[0].double() for lists in (None, near))
    torch.testing.assert_close(dense, expected, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(listed, expected.gather(1, near), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("vectors", ["movements", "models", "updates"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_executors_and_participation(vectors, share, federation):
    method = Mixture(Cosine(by_layer=True), vectors=vectors)
    runs = [
        train(method, federation, participation=share, execution=Execution(executor=executor, workers=1))
        for executor in ("loop", "vmap")
    ]
    torch.testing.assert_close(runs[0].relation, runs[1].relation, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runs[0].relation.sum(-1), torch.ones(2, 12), rtol=0, atol=1e-5)


def test_a_client_that_never_took_part_is_sent_the_mean_of_those_that_did(federation):
    run = train(Mixture(among=Nearest(3)), federation, rounds=1, participation=0.5)
    relation = run.relation
    seen = relation.sum(0) > 0
    assert seen.sum() == 6
    new = relation[~seen]
    torch.testing.assert_close(new, (seen / seen.sum()).float().expand(6, -1), rtol=0, atol=1e-6)


def test_among_whom(federation):
    everyone, many = (train(method, federation) for method in (Mixture(), Mixture(among=Nearest(11))))
    assert torch.equal(everyone.relation, many.relation)
    graph = torch.zeros(12, 12)
    graph[range(11), range(1, 12)] = graph[range(1, 12), range(11)] = 1.0
    known = Federation(
        federation.x, federation.y, federation.rows, federation.task, federation.names, kinfed.Graph(graph, "given")
    )
    linked = train(Mixture(among=Linked()), known).relation
    assert not linked[(graph + torch.eye(12)) == 0].any()
    with pytest.raises(UsageError, match="needs a known graph of the clients, and there is none"):
        train(Mixture(among=Linked()), federation)


@pytest.mark.parametrize("weigh", [Softmax(0.3), Softmax(0.3, self_weight=0.2), Kernel(0.05, 1.0), Simplex(0.5)])
@pytest.mark.parametrize("by_layer", [False, True])
def test_who_is_not_listed_has_the_weight_of_everybodys_form_or_is_stood_for(weigh, by_layer, roster, monkeypatch):
    """With a sample of all that are not listed, mixtures are those of everybody."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    known = roster(9, module, [3, 7, 5, 9, 4, 6, 2, 8, 1])
    theta = known.theta + torch.randn(9, known.layout.size, generator=torch.Generator().manual_seed(0)).double()
    theta[:, ~known.layout.trainable] = torch.rand(9, 6, generator=torch.Generator().manual_seed(1)).double()
    seen = torch.arange(9) != 4
    methods = [Mixture(Cosine(by_layer), weigh, among) for among in (Everyone(), Nearest(3))]
    servers = [method.start(known)._replace(theta=theta, seen=seen) for method in methods]
    full, few = (m.relation(known, s, known.everyone) for m, s in zip(methods, servers, strict=True))
    close = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(few, full, **close)
    monkeypatch.setattr("kinfed.relations.relation.SAMPLE", 3)
    known.memo.clear()
    few = methods[1].relation(known, servers[1], known.everyone)
    weights, _ = methods[1].weights(known, servers[1], known.everyone)
    listed = torch.zeros(9, 9, dtype=torch.bool).scatter(1, weights.near, True)
    assert (listed.sum(1) == 4).all()
    torch.testing.assert_close(few.sum(-1), torch.ones_like(few[..., 0]), **close)
    listed[:, weights.rest.sample] = True
    mass = known.sizes.double() * seen * ~listed
    others = torch.where(listed, 0.0, few)  # count by their mean
    mean = others.sum(-1, keepdim=True) * (mass / mass.sum(1, keepdim=True).clamp(min=1e-9))
    torch.testing.assert_close(others[..., seen, :], mean[..., seen, :], **close)
    rows = few if few.ndim == 3 else few.expand(len(known.layout.layers), 9, 9)
    mixed = torch.cat([row @ theta[:, x.at] for row, x in zip(rows, known.layout.layers, strict=True)], 1)
    sent, learned = methods[1].send(known, servers[1], known.everyone).theta, known.layout.trainable
    torch.testing.assert_close(sent[:, learned], mixed[:, learned], **close)
    assert (sent[:, ~learned] >= 0).all()  # variances are means
    own, mixed = (
        methods[1].diagnostics(known, servers[1], known.everyone, Params(theta), Params(theta))[k] for k in KEYS
    )
    rows = few.view(-1, 9, 9)
    torch.testing.assert_close(own, rows.diagonal(dim1=1, dim2=2).mean(0), **close)
    entropy = torch.special.entr(rows.clamp(min=0)).sum(2)
    torch.testing.assert_close(mixed, entropy.exp().mean(0), rtol=0, atol=1e-7)


@dataclass(frozen=True)
class Halves:
    """A user's part: half of the weight for oneself, half for the one other that is most alike."""

    def weigh(self, similarity, mass, itself, counts):
        best = similarity.masked_fill(itself | (mass == 0), -torch.inf).argmax(-1, keepdim=True)
        rows = torch.zeros_like(similarity).scatter(-1, best, 0.5)
        return rows + 0.5 * itself


@dataclass(frozen=True)
class Made:
    """A user's part that gives what a function makes."""

    make: Callable

    def weigh(self, similarity, mass, itself, counts):
        return self.make(similarity, mass)

    def compare(self, rows, others, near, layout):
        return self.make(rows, others if near is None else others[near])


def test_a_part_of_ones_own(federation):
    relation = train(Mixture(weigh=Halves()), federation).relation
    assert ((relation == 0.5).sum(1) == 2).all()
    assert not relation[0::2, 1::2].any()  # the other group labels the opposite way


def shares(similarity, mass):
    return (mass / mass.sum(-1, keepdim=True)).expand_as(similarity)


def borrow(similarity, mass):
    rows = torch.zeros_like(similarity)
    return rows.index_copy(-1, torch.arange(2), torch.tensor([2.0, -1.0]).expand(*rows.shape[:-1], 2))


def centre(similarity, mass):
    return ((similarity - similarity.mean(1, keepdim=True)) * 9 + mass.log()).softmax(-1)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda s, mass: 0.3 * shares(s, mass), "gives rows that do not sum to one; divide each by its sum"),
        (lambda s, mass: s * torch.nan, "gives rows that do not sum to one"),
        (borrow, "gives another client a negative weight; only a client's own may be negative"),
        (lambda s, mass: torch.ones_like(s) / s.shape[-1], "gives weight to a client of mass 0, which has not taken"),
        (centre, "gives a client's row by who else is asked"),
        (lambda s, mass: shares(s, mass)[0], r"gives \[6, \d+\]; it must be \[1, 6, \d+\]"),
        (lambda s, mass: [], r"gives a list; it must be a tensor \[1, 6, \d+\]"),
        (lambda s: s, r"fails: TypeError: .* takes 1 positional argument but 2 were given"),
    ],
)
@pytest.mark.parametrize("among", [Everyone(), Nearest(3)])
def test_weights_that_are_none_are_refused(make, problem, among, federation):
    with pytest.raises(UsageError, match=rf"^method\.weigh: Made {problem}"):
        train(Mixture(weigh=Made(make), among=among), federation, participation=0.5)


def inner(rows, others):
    return rows @ others.T if others.ndim == 2 else (others @ rows[..., None])[..., 0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (inner, r"gives \[6, \d+\]; it must be \[1, 6, \d+\] or \[2, 6, \d+\]"),
        (lambda rows, others: inner(rows, others)[None] * torch.nan, "gives a similarity that is no finite number"),
        (lambda rows, others: inner(rows - rows.mean(0), others)[None], "gives a client's row by who else is asked"),
        (lambda rows, others: None, "gives a NoneType; it must be a tensor"),
        (lambda rows, others: (rows @ others)[None], "fails: RuntimeError: "),
    ],
)
@pytest.mark.parametrize("among", [Everyone(), Nearest(3)])
def test_similarities_that_are_none_are_refused(make, problem, among, federation):
    with pytest.raises(UsageError, match=rf"^method\.compare: Made {problem}"):
        train(Mixture(Made(make), among=among, vectors="models"), federation, participation=0.5)


def test_a_comparison_of_ones_own_is_used_with_lists_and_without(federation):
    method = Mixture(Made(lambda rows, others: inner(rows, others)[None]), Softmax(0.5), Nearest(11))
    everyone, listed = (train(m, federation).relation for m in (method, replace(method, among=Nearest(5))))
    torch.testing.assert_close(listed, everyone, rtol=1e-4, atol=1e-5)  # the sample of 64 is all the others


def test_a_part_must_be_an_object_that_has_the_function():
    for part in (Softmax, object(), Cosine()):
        with pytest.raises(UsageError, match=r"Mixture\.weigh must be Softmax\(\.\.\.\) or "):
            Mixture(weigh=part)


def test_more_neighbours_than_there_are_leave_nobody_out(federation):
    with pytest.warns(UserWarning, match="neighbours=12 leaves nobody out, as there are 12 clients; below 11 it"):
        many = train(Mixture(among=Nearest(12)), federation, rounds=2)
    assert torch.equal(many.relation, train(Mixture(), federation, rounds=2).relation)


def test_a_config_composes_it_and_takes_a_part_from_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = ["from dataclasses import dataclass", "@dataclass(frozen=True)", "class Same:"]
    source += [
        "    def weigh(self, similarity, mass, itself, counts):",
        "        shares = mass / mass.sum(-1, keepdim=True)",
    ]
    source += ["        return shares.expand_as(similarity)"]
    (tmp_path / "mine.py").write_text("\n".join(source))
    small = ["rounds=2", "federation.clients=4", "model=mlp", "--beside", "none", "--quiet"]
    parts = ["method.compare=distance", "method.weigh.name=kernel", "method.weigh.sigma=5", "method.vectors=models"]
    assert main(["run", "mixture", *parts, *small, "--out", "a"]) == 0
    assert 'name = "kernel"' in (tmp_path / "a" / "config.toml").read_text()
    assert main(["run", "mixture", "method.weigh=mine.py:Same", *small, "--out", "b"]) == 0
    assert main(["run", "mixture", "method.weigh=kernal", *small, "--out", "c"]) == 2
    assert "method.weigh" in capsys.readouterr().err
    assert main(["run", "mixture", "method.among.count=5", *small, "--out", "d"]) == 2
    assert "method.among: 'everyone' has no 'count'; set method.among.name=nearest as well" in capsys.readouterr().err


def test_it_is_ahead_of_learning_alone_where_groups_are_hidden(federation):
    alone, mixed = (train(method, federation, rounds=10) for method in (Local(), Mixture()))
    assert mixed.summary.scores["mixed"]["mean"] > alone.summary.scores["own"]["mean"] + 0.02
