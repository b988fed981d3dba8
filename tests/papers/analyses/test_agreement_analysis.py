import math

import pytest
import torch

from kinfed.errors import UsageError
from kinfed.verdict.graph_quality import hops, rank_correlation
from kinfed_papers.analyses.agreement import agreement

PATH = torch.tensor([[0, 2, 0, 0], [2, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).double()  # 0 - 1 - 2, and 3 alone


def test_hops_are_links_between_clients():
    far = math.inf
    assert hops(PATH).tolist() == [[0, 1, 2, far], [1, 0, 1, far], [2, 1, 0, far], [far, far, far, 0]]


def test_the_rank_correlation_is_spearmans():
    """Off the diagonal 1, 2, 3, 4, 5, 6 against 1, 2, 3, 4, 6, 5: one less 6 * (1 + 1) / (6 * 35)."""
    one = torch.tensor([[9.0, 1, 2], [3, 9, 4], [5, 6, 9]])
    other = torch.tensor([[0.0, 10, 20], [30, 0, 40], [60, 50, 0]])
    assert rank_correlation(one, other) == pytest.approx(1 - 12 / 210)
    assert rank_correlation(one, one.exp()) == pytest.approx(1.0)
    assert math.isnan(rank_correlation(one, torch.ones(3, 3)))


def test_a_learned_relation_beside_the_given_graph(study):
    found = agreement(study("fedaghn", "federation.graph=oracle", "rounds=3"), rounds=2)
    first, last, selected = found.rows
    assert (first["round"], last["round"]) == ("1", "3")
    assert str(selected["round"]).startswith("selected: ")
    assert last["AUROC"] > 0.9  # two groups of rotations, which FedAGHN finds at once
    assert last["1 hop"] > last["3+ hops"]  # the groups are not connected
    assert last["2 hops"] is None
    assert found.pictures[0].read_bytes().startswith(b"\x89PNG")


def test_without_a_given_graph_it_says_so_before_anything_is_run(study, tmp_path):
    with pytest.raises(UsageError, match="these clients have none"):
        agreement(study("fedaghn"))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UsageError, match=r"analysis\.rounds"):
        agreement(study("fedaghn", "federation.graph=oracle"), rounds=1)
