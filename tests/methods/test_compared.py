"""What methods say that they compare is what their weights are made of."""

from dataclasses import replace

import pytest
import torch

from kinfed import CFL, FedAGHN, FedAMP, FedAvg, Federation, HeurFedAMP, PFedGraph, fit
from kinfed.experiments.compared import compared
from kinfed.experiments.run_folder import RunFolder
from kinfed.methods.parts.answers import Answers
from kinfed.methods.parts.model_attention import Cosine, Gaussian
from kinfed.methods.parts.tuning import Pooled
from kinfed.ops.sparsify import project_simplex


@pytest.fixture(scope="module")
def federation():
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(120, 4, generator=draw), torch.arange(120) % 5
    flipped = (client > 2) * 2 - 1
    return Federation.from_arrays(x, (x[:, 0] * flipped > 0).long(), client)


def told(method, federation):
    """The values that a method compared after two rounds, the relation made of them, and what the server knows."""
    run = fit(method, federation, torch.nn.Linear(4, 2), rounds=2)
    roster, server = replace(run.left.roster, layout=run.model.layout), run.left.progress.server
    return method.compared(roster, server), method.relation(roster, server, roster.everyone), roster


def test_of_cosines_fedamp_makes_a_softmax(federation):
    found, relation, _ = told(FedAMP(attention=Cosine(tau=0.3)), federation)
    assert found.what == "cosine of how far models moved"
    torch.testing.assert_close((found.values / 0.3).softmax(1).to(relation), relation, atol=1e-4, rtol=1e-3)
    assert found.values[0, 1] > found.values[0, 4] + 0.5  # whose labels are flipped


def test_of_squared_distances_fedamp_makes_the_papers_weights(federation):
    found, relation, _ = told(FedAMP(attention=Gaussian(alpha=0.1, sigma=2.0)), federation)
    assert found.what == "squared distance of models"
    others = ~torch.eye(5, dtype=torch.bool)
    expected = 0.05 * torch.exp(-found.values / 2)
    torch.testing.assert_close(expected[others].to(relation), relation[others], atol=1e-5, rtol=1e-4)


def test_heurfedamp_keeps_its_part_and_deals_the_rest_by_cosines(federation):
    found, relation, _ = told(method := HeurFedAMP(), federation)
    home = method.attention.home
    others = (10 * found.values).fill_diagonal_(-torch.inf).softmax(1) * (1 - home)
    torch.testing.assert_close(others.fill_diagonal_(home).to(relation), relation, atol=1e-4, rtol=1e-3)


def test_pfedgraph_projects_its_cosines_onto_a_mean(federation):
    found, relation, roster = told(PFedGraph(alpha=0.5), federation)
    rows = project_simplex(roster.sizes / roster.sizes.sum() + found.values)
    torch.testing.assert_close(rows.to(relation), relation, atol=1e-6, rtol=1e-5)


def test_fedaghn_makes_a_softmax_of_cosines_of_updates(federation):
    method = FedAGHN(granularity="model", tuning=Pooled(), lr=0.0, home=0.3, sharpness=4.0)
    found, relation, _ = told(method, federation)
    scores = 4 * found.values.clone()
    if not method.tuning.includes_itself:
        scores.fill_diagonal_(-torch.inf)
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


def test_answers_are_called_so():
    from kinfed.methods.parts.model_attention import called

    assert "answers" in called(Answers())
    assert called("models") == "cosine of models"


def test_a_folder_without_a_state_tells_nothing(tmp_path):
    assert compared(RunFolder(tmp_path)) is None
