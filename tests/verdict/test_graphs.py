import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from sklearn.metrics import rand_score, roc_auc_score

from kinfed.core.graph import NeighbourLists
from kinfed.errors import UsageError
from kinfed.verdict.graph_quality import (
    adjusted_rand_index,
    clusters,
    consensus,
    distance_from_uniform,
    edge_auroc,
    find_communities,
    group_weights,
    isolation,
    label_overlap,
    rand_by_round,
    rand_index,
    row_entropy,
)

PAIRS = torch.tensor([0, 0, 1, 1])


@st.composite
def relations(draw):
    """A relation with many ties, groups of at least two kinds with one pair or more, and a renaming of the clients."""
    count = draw(st.integers(3, 8))
    levels = st.integers(0, 4)
    weights = draw(st.lists(st.lists(levels, min_size=count, max_size=count), min_size=count, max_size=count))
    groups = [0, 0, 1, *draw(st.lists(st.integers(0, 3), min_size=count - 3, max_size=count - 3))]
    order = draw(st.permutations(range(count)))
    return torch.tensor(weights, dtype=torch.float32), torch.tensor(groups), torch.tensor(order)


labels = st.integers(2, 9).flatmap(
    lambda n: st.tuples(*2 * [st.lists(st.integers(0, 3), min_size=n, max_size=n).map(torch.tensor)])
)


def test_auroc_by_hand():
    # Same-group edges weigh 3, 3, 2, 1; of the eight others one weighs 2, the rest 0.
    # Wins over the eight: 8 + 8 + 7.5 + 7 of 4 x 8 pairs.
    weights = torch.tensor([[9.0, 3, 0, 2], [3, 9, 0, 0], [0, 0, 9, 2], [0, 0, 1, 9]])
    assert edge_auroc(weights, PAIRS) == pytest.approx(30.5 / 32)


def test_auroc_reads_both_directions_apart():
    # i listens to its kin, j does not: two of four same-group edges beat the rest, two tie with it.
    weights = torch.zeros(4, 4)
    weights[0, 1] = weights[2, 3] = 1
    assert edge_auroc(weights, PAIRS) == pytest.approx(0.75)


@given(relations())
def test_pairs_may_be_told_without_groups(case):
    weights, groups, _ = case
    pairs = groups[:, None] == groups[None, :]
    assert edge_auroc(weights, pairs) == edge_auroc(weights, groups)
    assert group_weights(weights, pairs) == pytest.approx(group_weights(weights, groups), nan_ok=True)
    with pytest.raises(UsageError, match=r"integer labels \[N\]"):
        edge_auroc(weights, pairs[:2])


def test_labels_in_common_by_hand():
    # Shares (3/4, 1/4, 0), (1/2, 0, 1/2), (0, 0, 1): sums of the lesser ones.
    overlap = label_overlap(torch.tensor([[3, 1, 0], [5, 0, 5], [0, 0, 2]]))
    assert overlap.tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]


@given(relations())
def test_auroc_is_the_one_of_scikit_learn(case):
    weights, groups, _ = case
    edges = [(i, j) for i in range(len(groups)) for j in range(len(groups)) if i != j]
    truth = [bool(groups[i] == groups[j]) for i, j in edges]
    assert edge_auroc(weights, groups) == pytest.approx(roc_auc_score(truth, [float(weights[e]) for e in edges]))


@given(relations())
def test_renaming_clients_or_groups_changes_nothing(case):
    weights, groups, order = case
    renamed = 7 - 2 * groups[order]
    moved = weights[order][:, order]
    assert edge_auroc(moved, renamed) == pytest.approx(edge_auroc(weights, groups))
    assert group_weights(moved, renamed) == pytest.approx(group_weights(weights, groups))
    assert torch.allclose(row_entropy(moved + 1), row_entropy(weights + 1)[order])
    assert torch.allclose(distance_from_uniform(moved + 1), distance_from_uniform(weights + 1)[order])


@given(relations())
def test_auroc_needs_only_the_order_of_weights_and_not_the_diagonal(case):
    weights, groups, _ = case
    other = (weights.exp() + 5).fill_diagonal_(1e6)
    assert edge_auroc(other, groups) == pytest.approx(edge_auroc(weights, groups))
    assert edge_auroc(-weights, groups) == pytest.approx(1 - edge_auroc(weights, groups))


@given(relations(), relations())
def test_layers_are_averaged(one, other):
    weights, groups, _ = one
    second = torch.zeros_like(weights)
    n = min(len(weights), len(other[0]))
    second[:n, :n] = other[0][:n, :n]
    layers = torch.stack([weights, second])
    mean = (weights + second) / 2
    assert edge_auroc(layers, groups) == edge_auroc(mean, groups)
    assert group_weights(layers, groups) == pytest.approx(group_weights(mean, groups))
    assert torch.allclose(row_entropy(layers + 1), row_entropy(mean + 1))


def test_group_weights_by_hand():
    weights = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.7, 0.0, 0.2], [0.0, 0.0, 0.6, 0.4], [0.1, 0.1, 0.2, 0.6]])
    found = group_weights(weights, PAIRS)
    assert found.itself == pytest.approx((0.5 + 0.7 + 0.6 + 0.6) / 4)
    assert found.within == pytest.approx((0.3 + 0.1 + 0.4 + 0.2) / 4)
    assert found.between == pytest.approx((0.2 + 0.2 + 0.1 + 0.1) / 8)


def test_what_is_not_defined_is_nan():
    weights = torch.rand(3, 3)
    together, apart = torch.tensor([4, 4, 4]), torch.tensor([0, 1, 2])
    assert math.isnan(edge_auroc(weights, together))
    assert math.isnan(edge_auroc(weights, apart))
    assert math.isnan(group_weights(weights, together).between)
    assert math.isnan(group_weights(weights, apart).within)
    assert row_entropy(torch.tensor([[1.0, 1], [0, 0]])).isnan().tolist() == [False, True]


def test_entropy_and_distance_by_hand():
    # Rows as distributions: all on one; uniform; (1/2, 1/4, 1/4, 0).
    weights = torch.tensor([[0.0, 2, 0, 0], [1, 1, 1, 1], [2, 1, 1, 0], [0, 0, 0, 1]])
    half = math.log(2) / 2 + math.log(4) / 2
    assert row_entropy(weights).tolist() == pytest.approx([0, math.log(4), half, 0])
    assert distance_from_uniform(weights).tolist() == pytest.approx([0.75, 0, 0.25, 0.75])


def test_collapse_by_hand():
    """One mean for all, everybody alone, and two pairs; whatever the rows sum to, and with one relation a layer."""
    one, alone = torch.ones(4, 4), torch.eye(4)
    pairs = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
    for relation, wanted in ((one, (1, 0)), (alone, (0, 1)), (pairs, (1 / 3, 1 / 3)), (1 - alone, (2 / 3, -1 / 3))):
        assert (consensus(relation), isolation(relation)) == pytest.approx(wanted)
        assert (consensus(torch.stack([3 * relation] * 2)), isolation(3 * relation)) == pytest.approx(wanted)
    lead = torch.zeros(4, 4)
    lead[:, 0] = 1  # all have the first one's model
    assert (consensus(lead), isolation(lead)) == pytest.approx((1, 0))
    assert math.isnan(consensus(torch.ones(1, 1)))
    assert math.isnan(isolation(torch.ones(1, 1)))
    with pytest.raises(UsageError, match="negative weights"):
        consensus(-one)


def test_rand_index_by_hand():
    # Of 15 pairs the two put 3 and 4 together, 2 of them in common: 2 + (15 - 3 - 4 + 2) = 12 agree.
    a, b = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 1, 2, 2, 2])
    assert rand_index(a, b) == pytest.approx(0.8)
    # Adjusted: (2 - 3 * 4 / 15) / ((3 + 4) / 2 - 3 * 4 / 15).
    assert adjusted_rand_index(a, b) == pytest.approx(1.2 / 2.7)


@given(labels)
def test_rand_index_is_symmetric_and_blind_to_names(case):
    a, b = case
    assert rand_index(a, b) == rand_index(b, a) == rand_index(10 - 3 * a, b)
    assert rand_index(a, b) == pytest.approx(rand_score(a.tolist(), b.tolist()))
    assert rand_index(a, 5 - a) == 1
    assert adjusted_rand_index(a, 5 - a) == 1
    assert adjusted_rand_index(a, b) == pytest.approx(adjusted_rand_index(10 - 3 * a, b))


def test_a_lone_client_agrees_with_itself():
    assert rand_index(torch.tensor([3]), torch.tensor([0])) == 1


@pytest.mark.parametrize(
    ("relation", "groups", "message"),
    [
        (torch.ones(3, 4), torch.zeros(3, dtype=torch.int64), r"must be \[N, N\].*got \[3, 4\]"),
        (torch.full((2, 2), math.nan), torch.tensor([0, 1]), "NaN"),
        (torch.ones(3, 3), torch.tensor([0, 1]), "3 clients need 3 group labels; got 2"),
        (torch.ones(2, 2), torch.tensor([0.0, 1.0]), "integer labels"),
    ],
)
def test_unusable_input_is_refused(relation, groups, message):
    for score in (edge_auroc, group_weights):
        with pytest.raises(UsageError, match=message):
            score(relation, groups)


def test_unusable_rows_and_clusterings_are_refused():
    with pytest.raises(UsageError, match="negative weights"):
        row_entropy(torch.tensor([[1.0, -0.5], [0, 1]]))
    for index in (rand_index, adjusted_rand_index):
        with pytest.raises(UsageError, match="2 clients need 2 group labels; got 3"):
            index(torch.tensor([0, 1]), torch.tensor([0, 1, 1]))


def mixtures(label, absent=()):
    """A relation in which clients with one label, those absent apart, give equally to each other."""
    label = torch.tensor(label)
    same = (label[:, None] == label[None, :]).float()
    same[:, list(absent)] = 0
    same[same.sum(1) == 0] = 1 - torch.eye(len(label))[list(absent)].sum(0)  # absent: the mean
    return same / same.sum(1, keepdim=True)


def test_clusters_are_read_off_a_relation():
    found = clusters(mixtures([7, 1, 7, 1, 3, 7], absent=[2])).tolist()
    assert found[2] == -1
    assert found[0] == found[5]
    assert found[1] == found[3]
    assert len(set(found)) == 4
    assert len(set(clusters(torch.full((3, 3), 1 / 3)).tolist())) == 1
    assert clusters(torch.stack([mixtures([0, 0, 1]), mixtures([0, 1, 1])])).unique().numel() == 3


def test_rand_index_over_rounds():
    truth = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    found = rand_by_round(torch.tensor([[5, 5, 1, 2, 2, 2, -1], [4, 4, 3, 3, 1, 1, -1]]), truth)
    assert found.shape == (2, 2)
    assert found[0].tolist() == pytest.approx([0.8, adjusted_rand_index(torch.tensor([0, 0, 1, 2, 2, 2]), truth[:6])])
    assert found[1].tolist() == [1, 1]
    assert rand_by_round(torch.zeros(0, 7, dtype=torch.int64), truth).shape == (0, 2)


def test_lists_show_who_belongs_together():
    """Groups of 300, 40 and 40, in which each lists some of its own, and a stranger by less; five that nobody heard."""
    sizes = [300, 40, 40]
    groups = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))[torch.randperm(380)]
    near = torch.randint(380, (385, 8))
    for group in range(3):
        near[:380][groups == group, 1:7] = (
            (groups == group).nonzero().squeeze(1)[torch.randint(sizes[group], (sizes[group], 6))]
        )
    near[:, 0] = torch.arange(385)
    weights = torch.tensor([0.5, *[0.06] * 6, 0.03]).expand(385, -1)
    mass = torch.cat([torch.full((380,), 1 / 380), torch.zeros(5)])
    found = find_communities(NeighbourLists(weights, near.int(), 1 - weights.sum(1), mass))
    assert (found[380:] == -1).all()
    assert rand_score(groups, found[:380]) == 1
    assert (found[:380][groups == 0] == 0).all()  # the largest comes first


def test_lists_of_clients_that_are_alike_show_one_cluster():
    near = torch.cat([torch.arange(500)[:, None], torch.randint(500, (500, 20))], 1)
    weights = torch.full((500, 21), 0.04)
    assert (
        find_communities(NeighbourLists(weights, near.int(), 1 - weights.sum(1), torch.full((500,), 0.002))) == 0
    ).all()
