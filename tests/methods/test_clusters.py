"""IFCA and FedSem: one model a cluster."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from kinfed import UsageError
from kinfed.core.graph import relate_members
from kinfed.core.method import Params
from kinfed.core.mixins import join, reduce_uploads
from kinfed.methods import IFCA, FedSem, fedsem, ifca
from kinfed.methods.parts.random_starts import shuffle_models

float64 = torch.float64
FOUR = [[3.0, 0.1], [3.1, -0.1], [-3.0, 0.1], [-2.9, 0.2]]  # two groups, opposite


def centres(theta, label):
    """A state of FedSem."""
    return fedsem.Server(torch.as_tensor(theta, dtype=float64), torch.tensor(label))


def served(theta, members=(0, 0)):
    """A state of IFCA."""
    return ifca.Server(torch.as_tensor(theta, dtype=float64), torch.tensor(members, dtype=float64))


def trained(server, theta, cluster):
    """What clients upload to IFCA that have trained theta: [K, d] from the models cluster: [K]."""
    member = torch.nn.functional.one_hot(cluster, len(server.theta)).to(float64)
    return ifca.Upload(member[:, :, None] * (theta - server.theta[cluster])[:, None], member)


def test_clients_choose_by_their_loss_by_hand(bowls, executor):
    """Models at 0 and 10; a client's loss at w is (w - b)^2 / 2, so 4.9 goes with 0, and 5.1 with 10, as 5 does not."""
    trial = bowls(IFCA(clusters=2), [4.9, 5.1, 1.0, 5.0], lr=0.5, executor=executor)
    before = served([[0.0], [10.0]])
    trial.roster = replace(trial.roster, round=1)
    cohort, uploads = trial.fleet.train(0, trial.roster.everyone, trial.method.send(trial.roster, before, None))
    assert uploads.member.tolist() == [[1, 0], [0, 1], [1, 0], [1, 0]]  # of equal ones the first
    torch.testing.assert_close(uploads.change[:2, :, 0], torch.tensor([[2.45, 0], [0, -2.45]], dtype=float64))
    given = reduce_uploads(trial.method, trial.roster, cohort, uploads)
    assert given.change.shape == (2, 1)
    after = trial.method.aggregate(trial.roster, before, cohort, given)
    assert after.theta[:, 0].tolist() == pytest.approx([(2.45 + 0.5 + 2.5) / 3, 7.55])
    assert after.members.tolist() == [3, 1]
    assert trial.method.relation(trial.roster, after, cohort) is None
    assert torch.equal(trial.fleet.state.share, uploads.member)
    relation = relate_members(trial.fleet.state.share)
    third = 1 / 3
    wanted = [[third, 0, third, third], [0, 1, 0, 0], [third, 0, third, third], [third, 0, third, third]]
    torch.testing.assert_close(relation, torch.tensor(wanted, dtype=float64))


def test_the_worked_choice(roster):
    losses = torch.tensor([[0.2, 0.9], [0.8, 0.3], [0.1, 0.5], [0.4, 0.4]])
    server, method = served([[0.0], [0.0]]), IFCA(clusters=2)
    uploads = trained(server, torch.tensor([[1.0], [7.0], [3.0], [8.0]], dtype=float64), losses.argmin(1))
    sizes = roster(4, sizes=[1, 1, 2, 1])
    given = reduce_uploads(method, sizes, sizes.everyone, uploads)
    assert method.aggregate(sizes, server, sizes.everyone, given).theta[:, 0].tolist() == [4.0, 7.0]


def test_centres_by_hand(roster):
    """Models 0, 1, 9, 11, 4 and centres 0, 10: the last goes with 0, and the centres to 5/3 and 10."""
    uploads = Params(torch.tensor([[0.0], [1.0], [9.0], [11.0], [4.0]], dtype=float64))
    known, method = replace(roster(5), round=1), FedSem(clusters=2)
    after = method.aggregate(known, centres([[0.0], [10.0]], [0] * 5), known.everyone, uploads)
    assert after.label.tolist() == [0, 0, 1, 1, 0]
    assert after.theta[:, 0].tolist() == pytest.approx([5 / 3, 10.0])
    few = torch.tensor([2, 3])
    uploads = Params(uploads.theta[:2])
    alone = method.aggregate(known, centres([[0.0], [10.0]], [0, 0, 1, 1, -1]), few, uploads)
    assert alone.label.tolist() == [0, 0, 0, 0, -1]
    assert alone.theta[:, 0].tolist() == [0.5, 10.0]  # nobody came: it stays
    assert FedSem().labels(alone).tolist() == [0] * 5


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["plain", "norm"])
def test_steps_of_the_server_are_those_of_the_equations(kind, share, roster, perceptron):
    draw, rng = torch.Generator().manual_seed(4), np.random.default_rng(4)
    known = replace(roster(8, perceptron(kind == "norm"), sizes=[3, 5, 2, 9, 4, 4, 1, 7]), round=2)
    d, learned = len(known.theta), known.layout.trainable.numpy()
    cohort = torch.from_numpy(np.sort(rng.choice(8, int(8 * share), replace=False)))
    before, label = torch.randn(3, d, generator=draw, dtype=float64), [2, -1, 0, 1, 1, 0, 2, -1]
    sent = torch.randn(len(cohort), d, generator=draw, dtype=float64)
    chosen = torch.tensor([2, 0, 2, 0, 0, 2, 2, 0])[: len(cohort)]
    nearest = [int(np.argmin([np.sum((v[learned] - m[learned]) ** 2) for m in before.numpy()])) for v in sent.numpy()]

    def mean(label, c):
        members = [sent.numpy()[a] for a, at in enumerate(label) if at == c]
        return sum(members) / len(members) if members else before.numpy()[c]

    server = served(before, [1, 4, 2])
    given = reduce_uploads(IFCA(), known, cohort, trained(server, sent, chosen))
    after = IFCA(clusters=3).aggregate(known, server, cohort, given)
    np.testing.assert_allclose(after.theta, [mean(chosen.tolist(), c) for c in range(3)], rtol=0, atol=1e-12)
    assert torch.equal(after.theta[1], before[1])  # nobody chose it
    assert after.members.tolist() == [chosen.tolist().count(0), 4, chosen.tolist().count(2)]
    after = FedSem(clusters=3).aggregate(known, centres(before, label), cohort, Params(sent))
    np.testing.assert_allclose(after.theta, [mean(nearest, c) for c in range(3)], rtol=0, atol=1e-12)
    assert after.label[cohort].tolist() == nearest
    absent = ~torch.isin(known.everyone, cohort)
    assert torch.equal(after.label[absent], torch.tensor(label)[absent])


def test_a_round_is_that_of_a_plain_program(bowls, executor):
    """Three rounds of Algorithm 1 in NumPy: a client's step from w at rate 0.2 ends at w - 0.2 (w - b)."""
    b = np.array(FOUR)
    trial = bowls(IFCA(clusters=3), FOUR, lr=0.2, executor=executor, start=[[2.0, -2.0]])
    models = trial.method.start(trial.roster).theta.numpy().copy()
    for _ in range(3):
        label = [int(np.argmin([np.sum((m - target) ** 2) for m in models])) for target in b]
        ends = [models[c] - 0.2 * (models[c] - target) for c, target in zip(label, b, strict=True)]
        for c in set(label):
            models[c] = np.mean([end for end, at in zip(ends, label, strict=True) if at == c], axis=0)
    server = trial.run(3)
    np.testing.assert_allclose(server.theta, models, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(trial.fleet.state.share.argmax(1), label)
    shown = np.equal.outer(label, label)
    np.testing.assert_allclose(trial.history.relations[-1], shown / shown.sum(1, keepdims=True), atol=1e-7)


def test_the_server_learns_no_membership(bowls):
    """Two clients that swap their clusters leave it with the same state."""
    method, server = IFCA(clusters=2), served([[0.0], [10.0]])
    ends, known = torch.tensor([[1.0], [9.0], [2.0], [8.0]], dtype=float64), bowls(method, [1.0] * 4).roster
    first, second = (
        method.aggregate(
            known,
            server,
            known.everyone,
            reduce_uploads(method, known, known.everyone, trained(server, ends[order], torch.tensor(label))),
        )
        for order, label in (([0, 1, 2, 3], [0, 1, 0, 1]), ([1, 0, 3, 2], [1, 0, 1, 0]))
    )
    for mine, other in zip(first, second, strict=True):
        torch.testing.assert_close(mine, other)


def test_opposite_clients_part_after_the_first_round(bowls):
    """Each cluster then moves to the mean of its own."""
    method = FedSem(clusters=2)
    wanted = torch.tensor([[3.05, 0.0], [-2.95, 0.15]], dtype=float64)
    for server, way in ((bowls(method, FOUR).run(1), 0.1), (bowls(method, FOUR).run(120), 1.0)):
        ours, theirs = int(server.label[0]), int(server.label[2])
        assert server.label.tolist() == [ours, ours, theirs, theirs]
        torch.testing.assert_close(server.theta[[ours, theirs]], way * wanted, atol=1e-4 * way, rtol=0)


def test_the_first_centres_are_those_of_k_means_and_no_more_than_clients(bowls):
    trial = bowls(FedSem(clusters=3), FOUR)
    with pytest.warns(UserWarning, match="clusters=3 is more than the clients of the first round, 2") as seen:
        server = trial.run(5, participation=0.5)
    assert len(seen) == 1
    assert len(server.theta) == 2
    still = bowls(FedSem(clusters=3), FOUR, lr=1e-300).run(1)  # nobody moved: all models are one
    assert still.theta.shape == (1, 2)
    assert torch.isfinite(still.theta).all()


def test_a_start_that_suits_all_is_told_of_once(bowls):
    for b, said in (([[3.0, 0.1]] * 4, True), (FOUR, False)):
        trial = bowls(IFCA(clusters=2), b, start=[[2.0, -2.0]])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trial.run(8)
        found = [str(one.message) for one in seen]
        assert [one.startswith("ifca: round 5: all clients chose one of the 2 models") for one in found] == [
            True
        ] * said


def test_newcomers_belong_where_the_rule_puts_them(roster):
    everyone, newcomer, method = replace(roster(3), round=4), torch.tensor([2]), FedSem(clusters=2)
    joined = method.add_clients(everyone, centres([[0.0], [10.0]], [0, 0]), newcomer)
    assert joined.label[:2].tolist() == [0, 0]
    assert joined.label[2] < 0
    placed = join(method, everyone, joined, newcomer, Params(torch.tensor([[9.0]], dtype=float64)))
    assert placed.label.tolist() == [0, 0, 1]
    assert placed.theta[:, 0].tolist() == [0.0, 10.0]


def test_a_newcomer_changes_no_model_of_a_cluster(roster):
    everyone, newcomer, method = replace(roster(3), round=4), torch.tensor([2]), IFCA(clusters=2)
    server = served([[0.0], [10.0]], [1, 1])
    given = reduce_uploads(method, everyone, newcomer, trained(server, torch.tensor([[9.0]]).double(), newcomer - 1))
    placed = join(method, everyone, method.add_clients(everyone, server, newcomer), newcomer, given)
    assert torch.equal(placed.theta, server.theta)
    assert torch.equal(placed.members, server.members)


def test_a_newcomer_with_few_examples_belongs_where_it_moves_and_not_where_it_is(roster):
    """Centres (0, 0), (0, 2) and (10, 1): from their mean, (10/3, 1), a short way down leads to the first."""
    everyone, newcomer, method = replace(roster(5, size=2), round=4), torch.tensor([4]), FedSem(clusters=3)
    server = centres([[0.0, 0.0], [0.0, 2.0], [10.0, 1.0]], [0, 1, 2, 2])
    joined = method.add_clients(everyone, server, newcomer)
    mean = torch.tensor([[10 / 3, 1.0]], dtype=float64)
    torch.testing.assert_close(method.send(everyone, joined, newcomer).theta, mean)
    third = torch.tensor([1 / 3, 1 / 3, 1 / 6, 1 / 6, 0], dtype=float64)
    torch.testing.assert_close(method.relation(everyone, joined, everyone.everyone)[4], third)
    for moved, cluster in (([0.1, 0.0], 2), ([-0.1, -0.1], 0), ([-0.1, 0.1], 1)):
        uploads = Params(mean + torch.tensor([moved], dtype=float64))
        found = join(method, everyone, joined, newcomer, uploads)
        assert found.label.tolist() == [0, 1, 2, 2, cluster]
        assert torch.equal(method.send(everyone, found, newcomer).theta[0], server.theta[cluster])


def test_random_models_are_the_first_one_in_another_order(roster, perceptron):
    known = roster(3, perceptron(norm=True))
    models = shuffle_models(known, 4)
    for entry in known.layout.entries:
        for model in models:
            if entry.trainable:
                assert model[entry.at].sort().values.tolist() == known.theta[entry.at].sort().values.tolist()
            else:
                assert torch.equal(model[entry.at], known.theta[entry.at])
    assert len({tuple(m.tolist()) for m in models}) == 4
    assert torch.equal(models[:2], shuffle_models(known, 2))


def test_bad_input_is_one_line(bowls):
    with pytest.warns(UserWarning, match=r"clusters=5 is more than there are clients, 4, so some have no member"):
        bowls(IFCA(clusters=5), FOUR).run(2)
    with pytest.raises(UsageError, match=r"no tensor of the model matches 'hed.\*'"):
        bowls(FedSem(layers=("hed.*",)), FOUR).run(1)


def test_models_of_all_clusters_go_down(bowls):
    trial = bowls(IFCA(clusters=2), FOUR)
    trial.run(1)
    assert trial.history.cost.bytes_down == 4 * 2 * 2 * 8
    assert trial.history.cost.bytes_up == 4 * (2 * 2 * 8 + 2 * 8)
