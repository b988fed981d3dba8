from dataclasses import replace

import pytest
import torch
from torch import nn

from kinfed import Federation, Split, UsageError, fit
from kinfed.core.tasks import Classification
from kinfed.methods import Local
from kinfed.runs import test_scores
from kinfed.verdict.class_counts import count_correct, reweighted_accuracy


def test_weighted_by_the_clients_label_shares():
    correct, total = torch.tensor([[80, 40], [80, 40]]), torch.tensor([100, 100])
    found = reweighted_accuracy(correct, total, torch.tensor([[0.75, 0.25], [0.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([0.70, 0.40]))


def test_hits_are_counted_by_class():
    outputs = torch.tensor([[0.9, 0.1, 0], [0.1, 0.9, 0], [0.9, 0.1, 0], [0, 0, 1.0]])
    assert count_correct(outputs, torch.tensor([0, 1, 1, 2]), 4).tolist() == [1, 1, 1, 0]


def test_of_a_run_and_its_pooled_accuracy():
    draw = torch.Generator().manual_seed(0)
    client = torch.tensor([0] * 60 + [1] * 20)
    # The first client only knows class 0, the second both.
    y = torch.cat([torch.zeros(60, dtype=torch.int64), torch.arange(20) % 2])
    x = torch.randn(80, 2, generator=draw) + 3 * y[:, None]
    run = fit(Local(), Federation.from_arrays(x, y, client, split=Split(stratify=False)), nn.Linear(2, 2), rounds=3)
    rows = torch.cat(list(run.federation.rows["test"]))
    expected = []
    train = y[run.federation.rows["train"][1]]
    second = [float((train == c).double().mean()) for c in (0, 1)]
    assert second != [0.5, 0.5]  # as they are in all of its examples
    for i, shares in enumerate(([1.0, 0.0], second)):
        hits = run.model(position=i)(x[rows]).argmax(1) == y[rows]
        parts = [(hits[y[rows] == c].double().sum(), (y[rows] == c).sum()) for c in (0, 1)]
        up, down = (sum(s * p[k] for s, p in zip(shares, parts, strict=True)) for k in (0, 1))
        expected.append(up / down)
    accuracies = test_scores.reweighted_accuracy(run.federation, map(run.model, run.names))
    torch.testing.assert_close(accuracies, torch.stack(expected))
    score = run.summary.scores["own"]
    assert "reweighted" not in score  # as it takes time
    asked = replace(run.federation, task=Classification(2, reweighted=True))
    found = replace(run, federation=asked).summary.scores["own"]
    assert found == {**score, "reweighted": pytest.approx(float(sum(expected)) / 2)}
    each = run.history.test("own")
    assert score["pooled"] == pytest.approx((12 * float(each[0]) + 4 * float(each[1])) / 16)
    with pytest.raises(UsageError, match="needs class labels"):
        test_scores.reweighted_accuracy(Federation.from_arrays(x, x[:, 0], client), [])
