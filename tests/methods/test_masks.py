"""FedPer and LG-FedAvg are FedAvg with a part of the model at home, to the bit."""

import pytest
import torch
from torch import nn

from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedAvg, FedPer, FedRep, LGFedAvg, Local

HEAD, BASE = ("3.weight", "3.bias"), ("0.*", "1.*")
TRAINING = Training(2, 3, SGD(0.1, momentum=0.9))


def outcome(trial, rounds=3, participation=0.67):
    server = trial.run(rounds, participation=participation)
    return server.theta, trial.headline


@pytest.mark.parametrize(
    ("method", "mask"),
    [
        (FedPer(), FedAvg(personal=HEAD)),
        (FedPer(personal=BASE), FedAvg(personal=("base",))),
        (LGFedAvg(), FedAvg(personal=BASE, uniform=True)),
    ],
    ids=str,
)
def test_it_is_a_mask(method, mask, examples, noisy, perceptron, executor):
    x, y = noisy(3, 2, sizes=[7, 5, 9])
    one, other = (
        outcome(examples(perceptron(norm=True), x, y, m, training=TRAINING, executor=executor)) for m in (method, mask)
    )
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def test_fedper_trains_both_parts_at_once(examples):
    # y = head * base * x, loss (head * base - 3)^2 / 2 from base 1, head 2: each moves by 0.1 times the other.
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        module[0].weight.fill_(1.0)
        module[1].weight.fill_(2.0)
    side = torch.full((1, 1), 0.5**0.5, dtype=torch.float64)
    for method, wanted in ((FedPer(), [1.2, 2.1]), (FedRep(head_epochs=1), [1.189, 2.1])):
        trial = examples(module, [side], [3 * side], method, training=Training(1, 1, SGD(0.1)))
        trial.run(1)
        assert trial.headline.squeeze(0).tolist() == pytest.approx(wanted, abs=1e-13)


@pytest.mark.parametrize("uniform", [True, False])
def test_lg_fedavg_averages_heads_by_clients_or_by_examples(uniform, examples, noisy, perceptron):
    x, y = noisy(2, 2, sizes=[2, 6])
    trial = examples(perceptron(), x, y, LGFedAvg(uniform=uniform), training=Training(1, 10, SGD(0.1)))
    whole = [
        examples(perceptron(), [a], [b], Local(), training=Training(1, 10, SGD(0.1))) for a, b in zip(x, y, strict=True)
    ]
    for alone in whole:
        alone.run(1)
    heads = torch.stack([alone.headline[0, -4:] for alone in whole])
    weights = torch.tensor([0.5, 0.5] if uniform else [0.25, 0.75], dtype=torch.float64)
    torch.testing.assert_close(trial.run(1).theta, weights @ heads)
    for i, alone in enumerate(whole):
        torch.testing.assert_close(trial.headline[i, :-4], alone.headline[0, :-4])


def test_all_but_a_head_needs_a_head(examples):
    x = [torch.ones(2, 1, 2, 2, dtype=torch.float64)] * 2
    for module, said in (
        (
            nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten()).double(),
            "'base' means all but the head, and the model has no",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 1)).double(), "the model is nothing but its head"),
    ):
        with pytest.raises(UsageError, match=said):
            examples(module, x, [torch.ones(2, 1).double()] * 2, LGFedAvg(), training=Training())
