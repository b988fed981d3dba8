"""Who takes part in a round."""

import pytest
import torch
from hypothesis import given, strategies as st

from kinfed import SGD, Training, UsageError, fit
from kinfed.core.engine import Participation, latecomers, run, sample
from kinfed.core.history import History, Recorder
from kinfed.core.method import Roster
from kinfed.core.model import Model
from kinfed.core.seeding import tags
from kinfed.data.federation import Federation
from kinfed.methods import FedAvg
from kinfed.runs.config import experiment as config
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation


def roster(names, round=0):
    """What sampling needs of a roster."""
    ones = torch.ones(len(names), dtype=torch.int64)
    return Roster(torch.zeros(1), None, ones, Training(), 7, tags(names), round=round)


def named(names, cohort):
    return {names[i] for i in cohort.tolist()}


@given(st.integers(1, 60), st.floats(0.001, 1.0), st.integers(0, 20))
def test_a_cohort_is_its_share_of_all_without_repetition(count, share, at):
    cohort = sample(roster([str(i) for i in range(count)], at), share).tolist()
    assert cohort == sorted(set(cohort))
    assert len(cohort) == max(1, round(share * count))
    assert set(cohort) <= set(range(count))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.floats(0.01, 1.0), st.randoms(use_true_random=False))
def test_by_group_every_group_gives_its_share_whatever_the_order(groups, share, random):
    names = [f"client {i}" for i in range(len(groups))]
    cohort = sample(roster(names), share, torch.tensor(groups))
    for group in set(groups):
        size = groups.count(group)
        assert [groups[i] for i in cohort.tolist()].count(group) == max(1, round(share * size))
    order = list(range(len(names)))
    random.shuffle(order)
    moved = sample(roster([names[i] for i in order]), share, torch.tensor([groups[i] for i in order]))
    assert named(names, cohort) == named([names[i] for i in order], moved)


def test_every_client_is_drawn_about_as_often_as_another():
    names = [str(i) for i in range(10)]
    drawn = torch.bincount(torch.cat([sample(roster(names, round), 0.3) for round in range(1000)]), minlength=10)
    assert drawn.sum() == 3000
    assert (drawn - 300).abs().max() < 75  # deviation 14.5


def experiment(*overrides):
    table = config.read("fedavg", ["rounds=4", "federation.clients=12", "evaluate_every=1", *overrides])
    return config.resolve(table)


def cohorts(made):
    """[rounds] sets of clients, read off a run's relation: FedAvg weighs the cohort alone."""
    federation = made.federation(None, 0)
    run = fit(
        FedAvg(),
        federation,
        made.module(federation, 0),
        rounds=4,
        participation=made.participation,
        training=Training(1, 64, SGD(0.1)),
    )
    return [relation[0].nonzero().squeeze(1) for relation in run.history.relations]


def test_periodic_participation_from_a_config_draws_from_each_hidden_group():
    made = experiment("participation={share=0.3, by_group=2}")
    assert made.table["participation"] == {"share": 0.3, "by_group": 2, "late": 0.0, "joins": 0}
    assert config.resolve(made.table).participation == Participation(0.3, 2)
    groups = made.federation(None, 0).groups  # 4 groups of 3: round(0.9) of each, or round(3.6) of all
    for round, cohort in enumerate(cohorts(made)):
        if round % 2:
            assert torch.equal(groups[cohort], torch.arange(4))
        else:
            assert len(cohort) == 4
    plain = cohorts(experiment("participation=0.3"))
    assert all(len(cohort) == 4 for cohort in plain)
    assert [c.tolist() for c in plain[::2]] == [c.tolist() for c in cohorts(made)[::2]]
    assert sorted(groups[plain[1]].tolist() + groups[plain[3]].tolist()) != [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "participation=0.0",
            r"participation.share must be in \(0, 1\]; got 0.0 \(share of the clients that take part in a round\)",
        ),
        ("participation={share=1.5}", "got 1.5"),
        ("participation={share=0.5, by_group=-1}", "participation.by_group must be zero or more; got -1 .*rounds"),
        ("participation={shar=0.5}", r"unknown key 'participation.shar'; did you mean 'share'\?"),
        ("participation=half", "participation must be a number; got 'half'"),
        ("participation={late=0.2}", "the rounds before these join, go together; got late=0.2 and joins=0"),
        ("participation={joins=3}", "go together; got late=0.0 and joins=3"),
        (
            "participation={late=1.0, joins=3}",
            r"participation.late must be in \[0, 1\); got 1.0 \(share of the clients",
        ),
        ("participation={late=0.5, joins=-1}", "participation.joins must be zero or more; got -1"),
    ],
)
def test_wrong_participation(override, message):
    with pytest.raises(UsageError, match=message):
        experiment(override)


def test_by_group_needs_groups():
    made = experiment("participation={share=0.5, by_group=2}", 'federation.partition="iid"')
    with pytest.raises(UsageError, match="draws from each hidden group, but these clients have none"):
        cohorts(made)


@given(st.integers(1, 40), st.floats(0.0, 0.99), st.integers(0, 9), st.randoms(use_true_random=False))
def test_latecomers_are_their_share_whatever_the_order(count, share, seed, random):
    names = [f"client {i}" for i in range(count)]
    late = latecomers(seed, tags(names), share)
    assert late.tolist() == sorted(set(late.tolist()))
    assert len(late) == (min(max(1, round(share * count)), count - 1) if share else 0)
    random.shuffle(names)
    assert named(names, latecomers(seed, tags(names), share)) == {f"client {i}" for i in late.tolist()}


def test_another_seed_has_other_latecomers():
    names = tags([str(i) for i in range(20)])
    drawn = torch.bincount(torch.cat([latecomers(seed, names, 0.2) for seed in range(500)]), minlength=20)
    assert (drawn - 100).abs().max() < 45  # deviation 9


class Noted(FedAvg):
    """FedAvg that keeps a diary of whom its server saw."""

    def __init__(self):
        self.diary = []

    def aggregate(self, roster, server, cohort, uploads):
        self.diary.append((roster.round, len(roster), roster.tags[cohort].tolist()))
        return super().aggregate(roster, server, cohort, uploads)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return {"number": roster.everyone.double(), "all": roster.theta.sum()}


def late_run(participation, rounds=6, groups=None):
    """Ten clients' diary, history and [N] tags."""
    made = experiment("federation.clients=10", "federation.partition.groups=2")
    data = made.federation(None, 0)
    method = Noted()
    fleet = Simulation(
        data, Model(made.module(data, 0)), method, Training(1, 64, SGD(0.1)), execution=Execution("loop")
    )
    roster, history = fleet.roster(), History(tuple(data.names), data.task)
    run(method, roster, fleet, Recorder(history), rounds=rounds, participation=participation, groups=groups)
    return method.diary, history, roster.tags.tolist()


def test_late_clients_join_when_they_should_and_take_part_from_then_on():
    diary, history, names = late_run(Participation(0.5, late=0.3, joins=2))
    late = latecomers(0, torch.tensor(names), 0.3)
    unknown = {names[i] for i in late.tolist()}
    assert [(round, size) for round, size, _ in diary] == [(0, 7), (1, 7), (2, 10), (3, 10), (4, 10), (5, 10)]
    assert [len(cohort) for _, _, cohort in diary] == [4, 4, 5, 5, 5, 5]  # round(3.5) is even
    assert not unknown & {tag for _, _, cohort in diary[:2] for tag in cohort}
    assert unknown < {tag for _, _, cohort in diary[2:] for tag in cohort}
    number = history.diagnostics[0]["number"]
    assert number[late].isnan().all()
    assert number[~number.isnan()].tolist() == list(range(7))
    assert history.diagnostics[2]["number"].tolist() == list(range(10))
    assert history.diagnostics[0]["all"].ndim == 0
    for round, relation in enumerate(history.relations):
        assert relation.shape == (10, 10)
        assert ((relation[:, late] > 0).any(), (relation.sum(1) - 1).abs().max() < 1e-6) == (round >= 2, True)


def test_a_client_that_never_joins_is_scored_with_what_it_would_be_sent():
    """For FedAvg that is the shared model, which the others made alone."""
    _, history, names = late_run(Participation(1.0, late=0.3, joins=6))
    late = latecomers(0, torch.tensor(names), 0.3).tolist()
    theta = history.models["theta"]
    assert (theta == theta[0]).all()
    alone = [i for i in range(10) if i not in late]
    made = experiment("federation.clients=10", "federation.partition.groups=2")
    data = made.federation(None, 0)
    rows = {split: [parts[i] for i in alone] for split, parts in data.rows.items()}
    few = Federation(data.x, data.y, rows, data.task, [data.names[i] for i in alone])
    # Rounds are selected by everybody's validation scores, so the last round's are compared.
    ended = fit(
        FedAvg(), few, made.module(data, 0), rounds=6, training=Training(1, 64, SGD(0.1)), execution=Execution("loop")
    )
    key = ("shared", "test", "accuracy")
    assert torch.equal(history.scores[-1][key][alone], ended.history.scores[-1][key])


def test_whole_groups_may_come_late():
    groups = torch.arange(10) // 5
    diary, _, names = late_run(Participation(0.4, by_group=1, late=0.3, joins=3), groups=groups)
    late = latecomers(0, torch.tensor(names), 0.3)
    here = torch.bincount(groups, minlength=2) - torch.bincount(groups[late], minlength=2)
    wanted = [max(1, round(0.4 * size)) for size in here.tolist()]
    for at, _, cohort in diary:
        found = torch.bincount(groups[[names.index(tag) for tag in cohort]], minlength=2).tolist()
        assert found == (wanted if at < 3 else [2, 2])


def test_one_client_alone_cannot_be_late():
    assert len(latecomers(0, tags(["alone"]), 0.9)) == 0
