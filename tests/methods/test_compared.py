"""What methods say that they compare is what their weights are made of."""

import importlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kinfed import FedAvg, Federation, Hedge, fit
from kinfed.core.graph import Graph
from kinfed.core.mixins import Explains
from kinfed.methods import (
    CFL,
    DPFL,
    IFCA,
    METHODS,
    SFL,
    FedAGHN,
    FedAMP,
    FedCedar,
    FedFomo,
    FedSem,
    HeurFedAMP,
    Kin,
    PFedGAT,
    PFedGraph,
)
from kinfed.methods.parts.hypernetwork import Hypernetwork
from kinfed.methods.sfl import Similarity
from kinfed.ops.sparsify import project_simplex
from kinfed.report.page.page_data import read_comparison
from kinfed.runs.run_folder import RunFolder
from kinfed_papers.pfedgat.graphs import Logits, Projected


@pytest.fixture(scope="module")
def federation():
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(120, 4, generator=draw), torch.arange(120) % 5
    flipped = (client > 2) * 2 - 1
    return Federation.from_arrays(x, (x[:, 0] * flipped > 0).long(), client)


def finished(method, federation, rounds=2, **settings):
    """What the server knows after so many rounds, and its state."""
    torch.manual_seed(0)
    run = fit(method, federation, torch.nn.Linear(4, 2), rounds=rounds, **settings)
    return replace(run.final.roster, layout=run.architecture.layout), run.final.progress.server


def told(method, federation, **settings):
    """The values that a method compared after two rounds, the relation made of them, and what the server knows."""
    roster, server = finished(method, federation, **settings)
    return method.similarity(roster, server), method.relation(roster, server, roster.everyone), roster


def test_of_squared_distances_fedamp_makes_its_weights(federation):
    found, relation, _ = told(FedAMP(alpha=0.1, sigma=2.0), federation)
    assert found.what == "squared distance of models"
    others = ~torch.eye(5, dtype=torch.bool)
    expected = 0.05 * torch.exp(-found.values / 2)
    torch.testing.assert_close(expected[others].to(relation), relation[others], atol=1e-5, rtol=1e-4)


def test_heurfedamp_keeps_its_part_and_deals_the_rest_by_cosines(federation):
    found, relation, _ = told(HeurFedAMP(sharpness=10.0, home=0.3), federation)
    assert found.what == "cosine of models"
    others = (10 * found.values).fill_diagonal_(-torch.inf).softmax(1) * 0.7
    torch.testing.assert_close(others.fill_diagonal_(0.3).to(relation), relation, atol=1e-4, rtol=1e-3)


def test_pfedgraph_projects_its_cosines_onto_a_mean(federation):
    found, relation, roster = told(PFedGraph(alpha=0.5), federation)
    rows = project_simplex(roster.sizes / roster.sizes.sum() + found.values)
    torch.testing.assert_close(rows.to(relation), relation, atol=1e-6, rtol=1e-5)


def test_fedaghn_makes_a_softmax_of_cosines_of_updates(federation):
    found, (relation,), _ = told(FedAGHN(lr=0.0, home=0.3, sharpness=4.0), federation)  # of a model of one layer
    scores = 4 * found.values.clone().fill_diagonal_(-torch.inf)
    others = scores.softmax(1)
    mine = torch.eye(5) * relation.diagonal()
    expected = others / others.fill_diagonal_(0).sum(1, keepdim=True) * (1 - relation.diagonal())[:, None] + mine
    torch.testing.assert_close(expected.fill_diagonal_(0), relation.clone().fill_diagonal_(0), atol=1e-5, rtol=1e-4)


def test_cfl_compares_updates_and_averaging_nothing(federation):
    found, _, _ = told(CFL(), federation)
    assert found.what == "cosine of updates"
    torch.testing.assert_close(found.values.diagonal(), torch.ones(5, dtype=found.values.dtype))
    assert found.values[0, 1] > found.values[0, 4]
    assert told(FedAvg(), federation)[0] is None


def same(found, expected, **tolerance):
    torch.testing.assert_close(found.double(), expected.double(), **{"atol": 1e-5, "rtol": 1e-4, **tolerance})


def test_of_squared_distances_in_medians_sfl_makes_a_kernel(federation):
    method = SFL(structure=Similarity())
    roster, server = finished(method, federation, rounds=1)
    found = method.similarity(roster, server)
    assert found.what == "squared distance of models, in medians"
    apart = torch.cdist(server.theta, server.theta).square()
    pairs = torch.pdist(server.theta).square()
    same(found.values, apart / pairs.quantile(0.5))
    same((found.values / -2).softmax(1), server.links)


def test_sfl_without_a_graph_says_what_the_learned_one_is_made_of_and_with_one_its_links(federation):
    with pytest.warns(UserWarning, match="so one is learned"):
        roster, server = finished(SFL(), federation, participation=0.6, rounds=1)
    found = SFL().similarity(roster, server)
    assert found.what == "squared distance of models, in medians"
    assert torch.equal(found.values.isnan(), ~(server.seen[:, None] & server.seen))
    known = torch.tensor([[0.0, 2, 0, 0, 0], [0, 0, 3, 0, 0], [0, 0, 0, 0, 1], [0.5, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    roster = replace(roster, graph=Graph(known, "given"))
    found = SFL().similarity(roster, SFL().start(roster))
    assert found.what == "weight of the known link"
    same(found.values, known + torch.eye(5))


def test_fedcedar_compares_centres_of_clusters_and_of_who_was_absent_nothing(federation):
    method = FedCedar(clusters=2)
    roster, server = finished(method, federation, participation=0.8)
    found, label, absent = method.similarity(roster, server), server.label, server.label < 0
    assert found.what == "cosine of the centres of clusters of models"
    assert (int(absent.sum()), len(server.cosines)) == (1, 2)
    assert torch.equal(found.values.isnan(), absent[:, None] | absent)
    for i, j in torch.cartesian_prod(*[(~absent).nonzero()[:, 0]] * 2).tolist():
        assert found.values[i, j] == (1 if label[i] == label[j] else server.cosines[0, 1])
    rows = server.cosines.clamp(min=0)
    rows = rows / rows.sum(1, keepdim=True)
    same(rows @ rows, server.graph)


def test_hedges_factors_change_the_weights_of_kin(federation):
    method = Hedge(by_layer=False, clip=math.inf)
    roster, server = finished(method, federation, rounds=4)
    found, relation = method.similarity(roster, server), method.relation(roster, server, roster.everyone)
    assert found.what == "evidence that its model lowers the loss"
    assert found.values.diagonal().isnan().all()
    kin = Kin(by_layer=False, clip=math.inf).relation(roster, server, roster.everyone)
    factors = torch.exp(server.sharpness.exp() * found.values).fill_diagonal_(0)
    others, p = kin * factors, server.home.exp() * kin.diagonal()
    p = (p / (p + 1 - kin.diagonal()))[:, None]
    same((1 - p) * others / others.sum(1, keepdim=True) + torch.diag(p[:, 0]), relation)
    assert found.values[0, [1, 2]].min() > found.values[0, [3, 4]].max()  # their labels are flipped


def test_pfedgats_other_graphs_say_scores_logits_and_weights(federation):
    found, relation, _ = told(PFedGAT(heads=1, lr=0.1), federation)
    assert found.what == "attention score, mean over heads"
    same(found.values.softmax(1), relation)
    found, relation, _ = told(Logits(lr=0.1), federation)
    same(found.values.softmax(1), relation)
    found, relation, _ = told(Projected(lr=0.1), federation)
    same(found.values / found.values.sum(1, keepdim=True), relation)


@pytest.mark.parametrize("method", [FedFomo(explore=0.0), DPFL(explore=0.0)], ids=str)
def test_fedfomo_and_dpfl_add_up_the_weights_that_clients_gave(method, federation):
    first, second = (finished(method, federation, rounds=rounds) for rounds in (1, 2))
    given = method.similarity(*second).values - method.similarity(*first).values
    relation = method.relation(*second, second[0].everyone)
    assert given.diagonal().isnan().all()
    same(given.clamp(min=0).fill_diagonal_(0), relation.fill_diagonal_(0))
    assert (given != 0).any()


@pytest.mark.parametrize("method", [IFCA(clusters=2), FedSem(clusters=2)], ids=str)
def test_how_clusters_come_about_is_told_in_words(method, federation):
    assert method.similarity(*finished(method, federation)) is None
    assert method.weighs


def test_every_method_says_what_it_compares_or_how_weights_come_about():
    for name, kind in METHODS.items():
        if issubclass(kind, Hypernetwork):  # no models are mixed
            continue
        assert kind.similarity is not Explains.similarity or kind.weighs, name
        assert not kind.weighs.endswith("."), name
        assert kind.weighs[:1].islower() == bool(kind.weighs), name


def test_a_folder_without_a_state_tells_nothing(tmp_path):
    assert read_comparison(RunFolder(tmp_path)) == ""


EVIDENCE = Path(__file__).parents[2] / "evidence"


def test_each_rule_that_the_ablations_of_kin_change_is_one_that_kin_has(monkeypatch, federation):
    monkeypatch.syspath_prepend(str(EVIDENCE))
    ablations = importlib.import_module("many_clients").ABLATIONS
    usual = finished(Kin(), federation, rounds=4, participation=0.6)[1].theta
    same = ("kin as it is", "the 30 of the largest weights, others dropped", "`by_layer` false")
    # With five clients and one layer these change nothing.
    for name, method in ablations.items():
        changed = not torch.equal(finished(method, federation, rounds=4, participation=0.6)[1].theta, usual)
        assert changed == (name not in same), name


def test_the_oracle_of_a_single_group_is_fedavg_also_where_few_take_part(monkeypatch, federation):
    monkeypatch.syspath_prepend(str(EVIDENCE))
    oracle = importlib.import_module("hidden_groups").InsideGroups((0,) * len(federation))
    models = finished(oracle, federation, rounds=4, participation=0.6)[1].theta
    mean = finished(FedAvg(), federation, rounds=4, participation=0.6)[1].theta
    assert torch.allclose(models, mean.expand_as(models), rtol=0, atol=1e-6)
