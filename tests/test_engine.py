"""Who takes part in a round."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed import SGD, Training, UsageError, config, fit
from kinfed.engine import Participation, sample
from kinfed.method import Roster
from kinfed.methods import FedAvg
from kinfed.seeding import tags


def roster(names, round=0):
    """What sampling needs of a roster."""
    ones = torch.ones(len(names), dtype=torch.int64)
    return Roster(torch.zeros(1), None, ones, Training(), 7, tags(names), round=round)


def named(names, cohort):
    return {names[i] for i in cohort.tolist()}


@settings(deadline=None)
@given(st.integers(1, 60), st.floats(0.001, 1.0), st.integers(0, 20))
def test_a_cohort_is_its_share_of_all_without_repetition(count, share, at):
    cohort = sample(roster([str(i) for i in range(count)], at), share).tolist()
    assert cohort == sorted(set(cohort))
    assert len(cohort) == max(1, round(share * count))
    assert set(cohort) <= set(range(count))


@settings(deadline=None)
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
    assert made.table["participation"] == {"share": 0.3, "by_group": 2}
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
        ("participation=0.0", r"share of clients in a round, in \(0, 1\]; got 0.0"),
        ("participation={share=1.5}", "got 1.5"),
        ("participation={share=0.5, by_group=-1}", "by_group counts rounds, so it must be zero or more; got -1"),
        ("participation={shar=0.5}", r"unknown key 'participation.shar'; did you mean 'share'\?"),
        ("participation=half", "participation must be a number; got 'half'"),
    ],
)
def test_wrong_participation(override, message):
    with pytest.raises(UsageError, match=message):
        experiment(override)


def test_by_group_needs_groups():
    made = experiment("participation={share=0.5, by_group=2}", 'federation.partition="iid"')
    with pytest.raises(UsageError, match="draws from each hidden group, but these clients have none"):
        cohorts(made)
