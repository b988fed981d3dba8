"""IFCA and FedSem: one model a cluster."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from kinfed import UsageError
from kinfed.core.mixins import join
from kinfed.methods import IFCA, FedSem, fedsem, ifca
from kinfed.methods.ifca import Upload
from kinfed.methods.parts.random_starts import shuffle_models

float64 = torch.float64
FOUR = [[3.0, 0.1], [3.1, -0.1], [-3.0, 0.1], [-2.9, 0.2]]  # two groups, opposite


def served(method, theta, label):
    kind = ifca.Server if isinstance(method, IFCA) else fedsem.Server
    return kind(torch.as_tensor(theta, dtype=float64), torch.tensor(label))


def test_clients_choose_by_their_loss_by_hand(bowls, executor):
    """Models at 0 and 10; a client's loss at w is (w - b)^2 / 2, so 4.9 goes with 0, and 5.1 with 10, as 5 does not."""
    trial = bowls(IFCA(clusters=2), [4.9, 5.1, 1.0, 5.0], lr=0.5, executor=executor)
    before = served(trial.method, [[0.0], [10.0]], [-1] * 4)
    trial.roster = replace(trial.roster, round=1)
    cohort, uploads = trial.fleet.train(0, trial.roster.everyone, trial.method.send(trial.roster, before, None))
    assert uploads.cluster.tolist() == [0, 1, 0, 0]  # of equal ones the first
    after = trial.method.aggregate(trial.roster, before, cohort, uploads)
    assert after.theta[:, 0].tolist() == pytest.approx([(2.45 + 0.5 + 2.5) / 3, 7.55])
    relation = trial.method.relation(trial.roster, after, cohort)
    third = 1 / 3
    wanted = [[third, 0, third, third], [0, 1, 0, 0], [third, 0, third, third], [third, 0, third, third]]
    torch.testing.assert_close(relation, torch.tensor(wanted, dtype=float64))


def test_the_worked_choice(roster):
    losses = torch.tensor([[0.2, 0.9], [0.8, 0.3], [0.1, 0.5], [0.4, 0.4]])
    uploads = Upload(torch.tensor([[1.0], [7.0], [3.0], [8.0]], dtype=float64), losses.argmin(1))
    method = IFCA(clusters=2)
    sizes = roster(4, sizes=[1, 1, 2, 1])
    after = method.aggregate(sizes, served(method, [[0.0], [0.0]], [-1] * 4), sizes.everyone, uploads)
    assert after.theta[:, 0].tolist() == [4.0, 7.0]


def test_centres_by_hand(roster):
    """Models 0, 1, 9, 11, 4 and centres 0, 10: the last goes with 0, and the centres to 5/3 and 10."""
    uploads = type("Uploads", (), {"theta": torch.tensor([[0.0], [1.0], [9.0], [11.0], [4.0]], dtype=float64)})
    known, method = replace(roster(5), round=1), FedSem(clusters=2)
    after = method.aggregate(known, served(method, [[0.0], [10.0]], [0] * 5), known.everyone, uploads)
    assert after.label.tolist() == [0, 0, 1, 1, 0]
    assert after.theta[:, 0].tolist() == pytest.approx([5 / 3, 10.0])
    few = torch.tensor([2, 3])
    uploads.theta = uploads.theta[:2]
    alone = method.aggregate(known, served(method, [[0.0], [10.0]], [0, 0, 1, 1, -1]), few, uploads)
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
    before = torch.randn(3, d, generator=draw, dtype=float64), [2, -1, 0, 1, 1, 0, 2, -1]
    uploads = Upload(torch.randn(len(cohort), d, generator=draw, dtype=float64), torch.tensor([2, 0, 2, 0, 0, 2, 2, 0]))
    uploads = uploads._replace(cluster=uploads.cluster[: len(cohort)])
    for method in (IFCA(clusters=3), FedSem(clusters=3)):
        server = served(method, *before)
        after = method.aggregate(known, server, cohort, uploads)
        centres, sent = server.theta.numpy(), uploads.theta.numpy()
        if isinstance(method, IFCA):
            label = uploads.cluster.tolist()
        else:
            label = [int(np.argmin([np.sum((v[learned] - m[learned]) ** 2) for m in centres])) for v in sent]
        assert after.label[cohort].tolist() == label
        for c in range(3):
            members = [a for a, at in enumerate(label) if at == c]
            wanted = sum(sent[a] for a in members) / len(members) if members else centres[c]
            np.testing.assert_allclose(after.theta[c], wanted, rtol=0, atol=1e-12)
        absent = ~torch.isin(known.everyone, cohort)
        assert torch.equal(after.label[absent], server.label[absent])


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
    everyone, newcomer = replace(roster(3), round=4), torch.tensor([2])
    uploads = Upload(torch.tensor([[9.0]], dtype=float64), torch.tensor([1]))
    for method in (IFCA(clusters=2), FedSem(clusters=2)):
        joined = method.add_clients(everyone, served(method, [[0.0], [10.0]], [0, 0]), newcomer)
        assert joined.label[:2].tolist() == [0, 0]
        assert joined.label[2] < 0
        found = join(method, everyone, joined, newcomer, uploads)
        assert found.label.tolist() == [0, 0, 1]
        assert found.theta[:, 0].tolist() == [0.0, 10.0]


def test_a_newcomer_with_few_examples_belongs_where_it_moves_and_not_where_it_is(roster):
    """Centres (0, 0), (0, 2) and (10, 1): from their mean, (10/3, 1), a short way down leads to the first."""
    everyone, newcomer, method = replace(roster(5, size=2), round=4), torch.tensor([4]), FedSem(clusters=3)
    server = served(method, [[0.0, 0.0], [0.0, 2.0], [10.0, 1.0]], [0, 1, 2, 2])
    joined = method.add_clients(everyone, server, newcomer)
    mean = torch.tensor([[10 / 3, 1.0]], dtype=float64)
    torch.testing.assert_close(method.send(everyone, joined, newcomer).theta, mean)
    third = torch.tensor([1 / 3, 1 / 3, 1 / 6, 1 / 6, 0], dtype=float64)
    torch.testing.assert_close(method.relation(everyone, joined, everyone.everyone)[4], third)
    for moved, cluster in (([0.1, 0.0], 2), ([-0.1, -0.1], 0), ([-0.1, 0.1], 1)):
        uploads = Upload(mean + torch.tensor([moved], dtype=float64), torch.tensor([0]))
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
    assert trial.history.cost.bytes_up == 4 * (2 * 8 + 8)
