import math
import re
import warnings
from dataclasses import replace

import pytest
import torch

from kinfed.core.method import Params
from kinfed.methods import CFL, FedAvg

float64 = torch.float64
PAIRS = torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.1], [-0.9, 0.0]], dtype=float64)


def printed(eps1, eps2, linkage="complete", **settings):
    """As its public codes cut, if nothing else is said."""
    return CFL(eps1=eps1, eps2=eps2, linkage=linkage, **{"min_size": 2, **settings})


def groups(label):
    """The clusters as sets of client ids."""
    return {frozenset((label == c).nonzero().squeeze(1).tolist()) for c in set(label.tolist())}


def directions(*degrees):
    angle = torch.tensor(degrees, dtype=float64) * math.pi / 180
    return torch.stack([angle.cos(), angle.sin()], 1)


def aggregate(method, known, server, change):
    """The server's state after every client's model changed by change: [N, d]."""
    sent = method.send(known, server, known.everyone).theta
    return method.aggregate(known, server, known.everyone, Params(sent + change))


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_splits_by_hand(roster, linkage):
    known = roster(4, size=2)
    # The mean update has length 0.05 and the longest 1.004988.
    for eps1, eps2, splits in [(0.4, 1.6, 0), (0.4, 0.5, 1), (0.0501, 1.0049, 1), (0.0499, 0.5, 0), (0.4, 1.0051, 0)]:
        method = printed(eps1=eps1, eps2=eps2, linkage=linkage)
        server = aggregate(method, known, method.start(known), PAIRS)
        assert groups(server.label) == ({frozenset({0, 1}), frozenset({2, 3})} if splits else {frozenset(range(4))})


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_ties_are_split_too(roster, linkage):
    # Three pairs at right angles: every merge of two pairs is as good as every other.
    change = torch.eye(3, dtype=float64).repeat_interleave(2, 0) * torch.tensor([2.0, 2.1] * 3, dtype=float64)[:, None]
    known, method = roster(6, size=3), printed(eps1=10, eps2=0.5, linkage=linkage)
    found = groups(aggregate(method, known, method.start(known), change).label)
    assert len(found) == 2
    assert all({0, 1} <= part or not {0, 1} & part for part in found)


def test_new_clusters_move_by_their_own_members_mean(roster):
    known, method = roster(4, size=2), printed(eps1=0.4, eps2=0.5)
    start = method.start(known)
    server = aggregate(method, known, start, PAIRS)
    expected = start.theta + torch.tensor([[0.95, 0.05], [-0.95, 0.05]], dtype=float64)
    torch.testing.assert_close(server.theta, expected, rtol=0, atol=1e-15)


def test_splits_of_splits_keep_clients_ids(roster):
    # Two rounds: east against west, then each against its own north and south; clients are interleaved on purpose.
    known, method = roster(8, size=2), printed(eps1=0.5, eps2=0.5)
    east, west = {1, 3, 4, 6}, {0, 2, 5, 7}
    north = {1, 5, 6, 7}
    first = torch.tensor([[1.0 if i in east else -1.0, 0.01 * i] for i in range(8)], dtype=float64)
    server = aggregate(method, known, method.start(known), first)
    assert groups(server.label) == {frozenset(east), frozenset(west)}
    second = torch.tensor([[0.01 * i, 1.0 if i in north else -1.0] for i in range(8)], dtype=float64)
    server = aggregate(method, known, server, second)
    assert groups(server.label) == {frozenset(g) for g in ({1, 6}, {3, 4}, {5, 7}, {0, 2})}
    sent = method.send(known, server, known.everyone).theta - known.theta
    parent = torch.stack([first[[j for j in range(8) if (j in east) == (i in east)]].mean(0) for i in range(8)])
    own = torch.stack([second[server.label == c].mean(0) for c in server.label])
    torch.testing.assert_close(sent, parent + own, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("linkage", "expected", "cross"), [("single", {0, 1, 2}, 0.7071068), ("complete", {0, 1}, 0.7660444)]
)
def test_linkages_differ(roster, linkage, expected, cross):
    # Complete linkage would have to toss a coin if the first two angles were equal to the last digit.
    known, change = roster(4, size=2), directions(0, 40, 80 + 1e-6, 125)
    bound = math.sqrt((1 - cross) / 2)
    for gamma, splits in ((bound - 1e-6, True), (bound + 1e-6, False)):
        method = printed(eps1=10.0, eps2=0.5, linkage=linkage, gamma=gamma)
        server = aggregate(method, known, method.start(known), change)
        halves = {frozenset(expected), frozenset(range(4)) - expected}
        assert groups(server.label) == (halves if splits else {frozenset(range(4))})


def test_single_linkage_is_the_best_cut(roster):
    known, method = roster(7, size=3), printed(eps1=10.0, eps2=0.1, linkage="single")
    for seed in range(10):
        change = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed), dtype=float64)
        alike = torch.corrcoef(torch.cat([change, -change], 1))  # centred already, so these are the cosines
        label = aggregate(method, known, method.start(known), change).label

        def across(first, alike=alike):
            return float(alike[first][:, ~first].max())

        cuts = [torch.tensor([bool(bits >> i & 1) for i in range(7)]) for bits in range(1, 64)]
        assert across(label == 0) == pytest.approx(min(map(across, cuts)), abs=1e-12)


def test_before_begin_it_is_uniform_fedavg(bowls, executor):
    method = printed(eps1=100.0, eps2=0.0, begin=3)
    clients = {"h": [1.0, 2.0, 1.5], "epochs": 2, "executor": executor}
    trial = bowls(method, [0.0, 4.0, 9.0], copies=[1, 2, 3], **clients)
    uniform = bowls(FedAvg(), [0.0, 4.0, 9.0], **clients)
    server = trial.run(3)
    torch.testing.assert_close(server.theta[0], uniform.run(3).theta, rtol=0, atol=1e-14)
    torch.testing.assert_close(trial.history.relations[-1], torch.full((3, 3), 1 / 3))
    server = trial.run(4, begin=3, server=server)
    assert len(server.theta) == 2


def test_clusters_relate_their_members(bowls, executor):
    trial = bowls(printed(eps1=10.0, eps2=0.0, min_size=2), [0.0, 1.0, 9.0], start=5.0, executor=executor)
    trial.run(1)
    half = [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]
    torch.testing.assert_close(trial.history.relations[0], torch.tensor(half))
    # What a client is sent now is just this mixture of the trained models 4.5, 4.6 and 5.4.
    torch.testing.assert_close(trial.headline.squeeze(1), torch.tensor([4.55, 4.55, 5.4], dtype=float64))


@pytest.mark.parametrize(("size", "splits"), [(1, True), (2, True), (3, True), (4, False), (5, False)])
def test_small_clusters_stay_whole(roster, size, splits):
    known, method = roster(4, size=2), printed(eps1=0.4, eps2=0.5, min_size=size)
    server = aggregate(method, known, method.start(known), PAIRS)
    assert len(server.theta) == (2 if splits else 1)


def test_one_client_never_splits(roster):
    known, method = roster(3, size=2), printed(eps1=10.0, eps2=0.0, min_size=1)
    server = method.start(known)
    for _ in range(4):
        server = aggregate(method, known, server, directions(0, 90, 200))
    assert groups(server.label) == {frozenset({0}), frozenset({1}), frozenset({2})}


def test_a_cluster_waits_until_all_have_taken_part(roster):
    known, method = roster(4, size=2), printed(eps1=0.4, eps2=0.5)
    server = method.start(known)
    for cohort, clusters in ((torch.tensor([0, 2]), 1), (torch.tensor([1]), 1), (torch.tensor([3]), 2)):
        sent = method.send(known, server, cohort).theta
        server = method.aggregate(known, server, cohort, Params(sent + PAIRS[cohort]))
        assert len(server.theta) == clusters
        if len(cohort) == 2:  # who has not trained is in no mixture
            assert method.relation(known, server, cohort).tolist() == [[0.5, 0, 0.5, 0]] * 4
    assert groups(server.label) == {frozenset({0, 1}), frozenset({2, 3})}
    # Only those present move a model: (0 + 2) / 2, then 1, then 3 its own half.
    base = (PAIRS[0] + PAIRS[2]) / 2 + PAIRS[1]
    torch.testing.assert_close(server.theta - known.theta, torch.stack([base, base + PAIRS[3]]), rtol=0, atol=1e-14)


def test_running_statistics_do_not_split(roster, perceptron):
    known, method = roster(4, perceptron(norm=True)), printed(eps1=1e9, eps2=0.0, linkage="single")
    change = torch.zeros(4, known.layout.size, dtype=float64)
    change[:, known.layout.trainable.nonzero()[:2, 0]] = PAIRS
    change[:, ~known.layout.trainable] = 100 * directions(0, 180, 0, 180).repeat(1, 3)
    assert groups(aggregate(method, known, method.start(known), change).label) == {frozenset({0, 1}), frozenset({2, 3})}


def test_the_latest_updates_count(roster):
    """Two rounds that agree, and then one in which the halves go apart."""
    known, method = roster(4, size=2), CFL(eps1=0.4, eps2=0.5)
    server = method.start(known)
    for round, change in enumerate((torch.ones(4, 2), torch.ones(4, 2), PAIRS)):
        assert len(server.theta) == 1
        server = aggregate(method, replace(known, round=round), server, change.double())
    torch.testing.assert_close(server.change, PAIRS, rtol=0, atol=1e-14)
    assert groups(server.label) == {frozenset({0, 1}), frozenset({2, 3})}


def test_updates_that_are_too_long_to_compare_split_nothing(roster):
    known, method = roster(4, size=2), CFL(eps1=1.0, eps2=0.0)
    server = aggregate(method, known, method.start(known), 1e200 * directions(0, 180, 0, 180))
    assert len(server.theta) == 1


def told(method, known, change, rounds):
    """The warnings of so many rounds with the same updates: [N, d]."""
    server = method.start(known)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for round in range(rounds):
            server = aggregate(method, replace(known, round=round), server, change)
    return [str(one.message) for one in seen]


def test_thresholds_that_do_not_fit_are_told_of_once(roster):
    known, away = roster(4, size=2), directions(0, 90, 180, 270)
    for method, change, last, said in (
        (CFL(), away, 15, "round 10: 10 rounds have split nothing, .* shorter than eps1=0.4 .*, or use kin"),
        (CFL(begin=2), away, 15, "round 12: 10 rounds have split nothing"),
        (CFL(eps1=9.0, eps2=0.0), away, 5, "round [23]: all clients are alone now"),
    ):
        (line,) = told(method, known, change, last)
        assert re.match(f"cfl: {said}", line)
        assert "\n" not in line
    assert not told(CFL(eps1=0.4, eps2=0.5), known, PAIRS, 15)


def test_a_newcomer_stays_in_the_cluster_whose_updates_are_like_its_first(roster):
    known, everyone = roster(4, size=2), roster(5, size=2)
    method = CFL(eps1=0.4, eps2=0.5)
    server = aggregate(method, known, method.start(known), PAIRS)
    newcomer = torch.tensor([4])
    for way in (0, 2):
        joined = method.add_clients(everyone, server, newcomer)
        sent = method.send(everyone, joined, newcomer).theta
        found = method.join(everyone, joined, newcomer, Params(sent + PAIRS[way]))
        assert int(found.label[4]) == int(server.label[way])
        assert torch.equal(found.theta, server.theta)


def test_a_newcomer_is_put_into_the_largest_cluster(roster):
    known, everyone = roster(5, size=2), roster(7, size=2)
    method = printed(eps1=9.0, eps2=0.0)
    server = aggregate(method, known, method.start(known), directions(180, 0, 170, 10, 20))
    assert groups(server.label) == {frozenset({0, 2}), frozenset({1, 3, 4})}
    newcomers = torch.tensor([0, 4])
    joined = method.add_clients(everyone, server, newcomers)
    assert groups(joined.label) == {frozenset({1, 3}), frozenset({0, 2, 4, 5, 6})}
    sent = method.send(everyone, joined, everyone.everyone).theta
    torch.testing.assert_close(sent[newcomers], sent[[5, 5]], rtol=0, atol=0)
    assert joined.seen.tolist() == [False, True, True, True, False, True, True]
