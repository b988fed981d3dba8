"""The memo: a result is made once for what it is made of, and never of anything else."""

import copy
import pickle

import torch

from kinfed.core.method import Memo
from kinfed.methods import FedAvg, Local


def test_a_result_is_made_once_for_the_same_tensors_and_equal_ids():
    memo, theta, made = Memo(), torch.zeros(3, 2), []

    def ask(name="mixed", table=theta, cohort=(0, 2), method=None):
        made_of = method or FedAvg(), table, torch.tensor(cohort)
        before = len(made)
        result = memo.once(name, made_of, lambda: made.append(name) or len(made))
        return result, len(made) > before

    assert ask() == (1, True)
    assert ask() == (1, False)
    assert ask("weights") == (2, True)  # a slot of its own
    assert ask() == (1, False)
    assert ask(cohort=(0, 1)) == (3, True)
    assert ask(cohort=(0,)) == (4, True)
    assert ask() == (5, True)  # a slot holds the last result only
    assert ask(table=theta.clone()) == (6, True)  # equal numbers of another state are not compared
    assert ask(method=Local()) == (7, True)
    assert ask(method=FedAvg(uniform=True)) == (8, True)


def test_copies_know_nothing_of_it():
    memo = Memo()
    memo.once("mixed", (1,), lambda: 1)
    for other in (pickle.loads(pickle.dumps(memo)), copy.deepcopy(memo)):
        assert other.once("mixed", (1,), lambda: 2) == 2
    memo.clear()
    assert memo.once("mixed", (1,), lambda: 3) == 3


def test_a_failure_is_not_remembered():
    memo = Memo()
    memo.once("mixed", (1,), lambda: 1)
    try:
        memo.once("mixed", (2,), lambda: 1 / 0)
    except ZeroDivisionError:
        assert memo.once("mixed", (2,), lambda: 3) == 3
