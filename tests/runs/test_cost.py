"""What a run takes, by round: bytes, examples and seconds, counted by hand."""

import pytest
import torch
from torch import nn

from kinfed import SGD, FedAvg, Federation, Training, fit
from kinfed.core.engine import Rounds
from kinfed.errors import UsageError
from kinfed.runs.results import save
from kinfed.runs.round_tables import read_cost

SIZES = (10, 23, 7)
X = torch.randn(sum(SIZES), 3, generator=torch.Generator().manual_seed(0))


def federation():
    owner = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
    return Federation.from_arrays(X, (X[:, 0] > 0).long(), owner)


def trained(folder=None, until=0, **how):
    data = federation()
    torch.manual_seed(0)  # a run goes on with the model that it began with
    return data, fit(
        FedAvg(),
        data,
        nn.Linear(3, 2),
        rounds=Rounds(5, evaluate_every=2, until=until),
        training=Training(batch=4, optimiser=SGD(0.1), **how),
        folder=folder,
    )


def test_examples_in_a_number_of_steps_by_hand():
    """Ten examples in batches of 4, 4 and 2: seven steps are two passes and one batch of 4."""
    sizes = torch.tensor([10, 4, 3])
    assert Training(batch=4, steps=7).count_examples(sizes).tolist() == [24, 28, 21]
    assert Training(batch=4, epochs=3).count_examples(sizes).tolist() == [30, 12, 9]
    passes = Training(batch=4, epochs=3)
    steps = [Training(batch=4, steps=int(n)) for n in passes.count_steps(sizes)]
    assert [int(one.count_examples(size)) for one, size in zip(steps, sizes, strict=True)] == [30, 12, 9]


def test_what_a_run_took_by_round_and_in_all(tmp_path):
    """A linear model has 8 numbers of 4 bytes, sent to three clients and back; rounds 2, 4 and 5 are evaluated."""
    data, run = trained(epochs=3)
    save(run, tmp_path)
    cost = read_cost(tmp_path / "cost.csv")
    examples = 3 * int(sum(len(rows) for rows in data.rows["train"]))
    assert list(cost) == [2, 4, 5]
    for done, spent in cost.items():
        assert (spent.bytes_up, spent.bytes_down, spent.examples) == (done * 3 * 32, done * 3 * 32, done * examples)
    summary = run.summary
    assert (cost[5].bytes_up, cost[5].bytes_down) == (summary.cost.bytes_up, summary.cost.bytes_down)
    assert summary.intervals["shared"]["over"] == "clients"
    assert 0 < cost[2].seconds <= cost[4].seconds <= cost[5].seconds
    (tmp_path / "cost.csv").write_text("round\n2\n")
    with pytest.raises(UsageError, match=r"cost\.csv cannot be read"):
        read_cost(tmp_path / "cost.csv")
    (tmp_path / "cost.csv").unlink()
    assert read_cost(tmp_path / "cost.csv") == {}


def test_a_run_that_is_stopped_and_resumed_has_taken_as_much(tmp_path):
    _, whole = trained(steps=5)
    trained(tmp_path, until=2, steps=5)
    _, resumed = trained(tmp_path, steps=5)
    assert [one[:-1] for one in resumed.history.cost.spent] == [one[:-1] for one in whole.history.cost.spent]
    seconds = [one.seconds for one in resumed.history.cost.spent]
    assert seconds == sorted(seconds)
