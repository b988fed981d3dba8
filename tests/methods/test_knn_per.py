import math

import numpy as np
import pytest
import torch
from torch import nn

from kinfed import SGD, Execution, Federation, Training, UsageError, fit
from kinfed.core.tasks import Classification, Regression
from kinfed.methods import FedAvg, KNNPer
from kinfed.methods.knn_per import Memory

float64 = torch.float64
TINY = float(np.finfo(float).tiny)
LOOP = Execution("loop")


def federation(sizes=(12, 7, 15), validation=4, seed=3, width=3):
    """Clients whose labels are the signs of one number each has its own way with."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(sizes) + len(sizes) * (validation + 5)
    x = torch.randn(total, width, generator=draw, dtype=float64)
    y, rows, at = torch.zeros(total, dtype=torch.int64), {"train": [], "validation": [], "test": []}, 0
    for i, size in enumerate(sizes):
        begin = at
        for split, count in (("train", size), ("validation", validation), ("test", 5)):
            rows[split].append(torch.arange(at, at + count))
            at += count
        y[begin:at] = (x[begin:at, i % width] * (-1) ** i > 0).long()
    return Federation(x, y, rows, Classification(2))


def module(norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        middle = [nn.BatchNorm1d(4)] if norm else []
        return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2)).double()


def run(method, data=None, model=None, rounds=3, **how):
    training = Training(1, 4, SGD(0.1))
    return fit(method, data or federation(), model or module(), rounds=rounds, training=training, **how)


def test_the_worked_mixture():
    """Squared distances 0, 2 and 8 of two features: kernels 1, 1/e and 1/e^4; half of that and half of a softmax."""
    method = KNNPer(neighbours=3)
    z = torch.zeros(1, 2, dtype=float64)
    features = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], dtype=float64)
    classes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=float64)
    assert method.vote(z, features, classes)[0].tolist() == pytest.approx([0.721399, 0.278601], abs=1e-6)
    remembering = method.export(_Model([0.0, 1.0]), Memory(z[0], features, classes, torch.tensor(0.5, dtype=float64)))
    assert remembering(z)[0].exp().tolist() == pytest.approx([0.495170, 0.504830], abs=1e-6)


class _Model:
    """A model whose head says the same to everything."""

    head_name = "0"

    def __init__(self, bias):
        self.bias = bias

    def export(self, theta):
        plain = nn.Sequential(nn.Linear(2, 2)).double()
        with torch.no_grad():
            plain[0].weight.zero_()
            plain[0].bias.copy_(torch.tensor(self.bias))
        return plain


def test_votes_are_finite_at_any_distance():
    """Kernels of neighbours that are far away are all zero in any precision; their shares are not."""
    features = torch.tensor([[100.0], [101.0], [4000.0]], dtype=float64)
    found = KNNPer(neighbours=2).vote(torch.zeros(1, 1, dtype=float64), features, torch.eye(3, dtype=float64))[0]
    assert found.tolist() == pytest.approx([1.0, math.exp(-201), 0.0], abs=1e-12)


def test_rows_that_only_fill_up_and_neighbours_beyond_all_examples_say_nothing():
    method = KNNPer(neighbours=5)
    features, classes = torch.tensor([[3.0], [4.0]], dtype=float64), torch.eye(2, dtype=float64)
    padded = torch.cat([features, features.new_zeros(3, 1)]), torch.cat([classes, classes.new_zeros(3, 2)])
    z = torch.tensor([[0.1], [3.4]], dtype=float64)
    torch.testing.assert_close(method.vote(z, features, classes), method.vote(z, *padded))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_votes_are_those_of_the_equations(norm, scale):
    """From the features of the shared model to the loss on test examples, example by example, in NumPy."""
    data, model = federation(), module(norm)
    found = run(KNNPer(neighbours=3, scale=scale), data, model, participation=0.67, execution=LOOP)
    history = found.history
    for i in range(3):
        memory = found.model(position=i)
        net = memory.model
        base = net[:-1]
        x, y = data.x[data.rows["train"][i]], data.y[data.rows["train"][i]]
        z, own = base(x).detach().numpy(), y.numpy()
        weight = float(memory.weight)
        losses, right = {}, {}
        for split in ("validation", "test"):
            for lam in sorted({weight, *np.linspace(0, 1, 11).round(1)}):
                total, hits = [], 0
                for e in data.rows[split][i].tolist():
                    q, p = base(data.x[e : e + 1]).detach().numpy()[0], net(data.x[e : e + 1]).detach().softmax(-1)[0]
                    apart = sorted((float(np.sum((q - v) ** 2)), int(c)) for v, c in zip(z, own, strict=True))[:3]
                    kernel = [math.exp(-d / (scale * 4)) for d, _ in apart]
                    shares = [sum(k for k, (_, c) in zip(kernel, apart, strict=True) if c == y) for y in (0, 1)]
                    mixed = [lam * s / sum(kernel) + (1 - lam) * float(p[y]) for y, s in enumerate(shares)]
                    total.append(-math.log(max(mixed[data.y[e]], TINY)))
                    hits += mixed[data.y[e]] > mixed[1 - data.y[e]]
                losses[split, lam], right[split, lam] = float(np.mean(total)), hits
        chosen = history.scores[history.rounds.index(history.select(history.chosen))]
        assert float(chosen[history.chosen, "test", "loss"][i]) == pytest.approx(losses["test", weight], abs=1e-9)
        if history.chosen == "mixed":
            best = max(np.linspace(0, 1, 11).round(1), key=lambda lam: right["validation", lam])  # the least of equals
            assert weight == pytest.approx(best)


def test_the_shared_model_is_fedavgs_and_one_number_more_goes_down():
    ours, fedavg = run(KNNPer(neighbours=3), execution=LOOP), run(FedAvg(), execution=LOOP)
    for a, b in zip(ours.history.scores, fedavg.history.scores, strict=True):
        torch.testing.assert_close(a["shared", "test", "loss"], b["shared", "test", "loss"], rtol=1e-12, atol=0)
    assert (ours.history.cost.bytes_up, ours.history.cost.bytes_down) == (
        fedavg.history.cost.bytes_up,
        fedavg.history.cost.bytes_down + 3 * 3 * 8,
    )


def test_the_nearest_neighbour_knows_all_training_examples():
    data = federation()
    data.rows["test"] = data.rows["train"]
    found = run(KNNPer(neighbours=1, weight=1.0), data)
    assert (found.history.scores[-1]["mixed", "test", "accuracy"] == 1).all()


def test_without_validation_examples_it_is_fedavg():
    found = run(KNNPer(neighbours=3), federation(validation=0))
    scores = found.history.scores[-1]
    assert torch.equal(scores["mixed", "test", "loss"], scores["shared", "test", "loss"])


def test_bad_input_is_one_line():
    with pytest.warns(UserWarning, match=r"knn-per: 1 of 3 clients have fewer training examples than neighbours=10"):
        run(KNNPer())
    data = federation()
    numbers = Federation(data.x, data.x[:, :1], data.rows, Regression())
    with pytest.raises(UsageError, match="knn-per compares classes, and this data has numbers to predict"):
        run(KNNPer(neighbours=3), numbers, nn.Linear(3, 1).double())
    headless = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 3), nn.Flatten()).double()
    with pytest.raises(UsageError, match=r"the model has no nn\.Linear to serve as head, so it has no features"):
        run(KNNPer(neighbours=3), data, headless)
    late = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    with pytest.raises(UsageError, match="the model's head '0' is not the last layer"):
        run(KNNPer(neighbours=3), data, late)


def test_a_head_that_is_the_whole_model_compares_examples_themselves():
    found = run(KNNPer(neighbours=1, weight=1.0), model=nn.Linear(3, 2).double())
    assert torch.isfinite(found.history.scores[-1]["mixed", "test", "loss"]).all()


def test_rows_as_far_as_the_last_neighbour_all_vote_in_whatever_order():
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 40, generator=draw)
    features, labels = rows.repeat(5, 1), torch.randint(3, (30,), generator=draw)  # each row five times
    z, classes, method = rows + 0.1, torch.eye(3)[labels], KNNPer(neighbours=3)
    votes = method.vote(z, features, classes)
    for i, vote in enumerate(votes):  # its five copies are nearest, and none of the three is to be drawn among them
        torch.testing.assert_close(vote, classes[i::6].mean(0), atol=1e-4, rtol=0)
    order = torch.randperm(30, generator=draw)
    torch.testing.assert_close(method.vote(z, features[order], classes[order]), votes, atol=1e-5, rtol=0)
