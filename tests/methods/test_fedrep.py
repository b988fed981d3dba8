import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedRep

float64 = torch.float64


def product(base, head):
    """y = head * base * x."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        module[0].weight.fill_(base)
        module[1].weight.fill_(head)
    return module


def one_example(*targets):
    """x, y with mean squared error (head * base - target)^2 / 2."""
    side = 0.5**0.5
    x = [torch.full((1, 1), side, dtype=float64) for _ in targets]
    return x, [torch.full((1, 1), side * target, dtype=float64) for target in targets]


def test_head_first_then_base(examples, executor):
    x, y = one_example(3.0)
    trial = examples(product(1, 2), x, y, FedRep(head_epochs=1), training=Training(1, 1, SGD(0.1)), executor=executor)
    server = trial.run(1)
    assert float(server.theta) == pytest.approx(1.189, abs=1e-13)  # 1 + 0.1 * (3 - 2.1) * 2.1
    assert trial.headline.squeeze(0).tolist() == pytest.approx([1.189, 2.1], abs=1e-13)


def test_averages_bases_by_training_examples_and_keeps_heads(examples, executor):
    x, y = one_example(3.0, 1.0)
    x[1], y[1] = x[1].repeat(3, 1), y[1].repeat(3, 1)
    trial = examples(product(1, 2), x, y, FedRep(head_epochs=1), training=Training(1, 5, SGD(0.1)), executor=executor)
    server = trial.run(1)
    # Second client: head 2 + 0.1 (1 - 2) = 1.9, base 1 + 0.1 (1 - 1.9) 1.9 = 0.829; bases weigh 1 to 3.
    base = (1.189 + 3 * 0.829) / 4
    assert float(server.theta) == pytest.approx(base, abs=1e-13)
    torch.testing.assert_close(trial.headline, torch.tensor([[base, 2.1], [base, 1.9]], dtype=float64))
    own = 0.5 * (torch.tensor([base * 2.1, base * 1.9], dtype=float64) - torch.tensor([3.0, 1.0])).square()
    torch.testing.assert_close(trial.loss("mixed"), own, rtol=0, atol=1e-13)
    assert [t.shape for t in tree_leaves(trial.fleet.state)] == [(2, 1)]  # nobody keeps more than its head


@pytest.mark.parametrize("norm", [False, True])
def test_each_phase_leaves_the_other_part_bitwise_alone(examples, noisy, perceptron, norm, executor):
    x, y = noisy(2, 2)
    training = Training(2, 3, SGD(0.1, momentum=0.9, weight_decay=0.1))  # decay must not touch a frozen part
    for method, moves in ((FedRep(head_epochs=2, base_epochs=0), "head"), (FedRep(head_epochs=0), "base")):
        trial = examples(perceptron(norm), x, y, method, training=training, executor=executor)
        layout = trial.roster.layout
        method, everyone = trial.method, trial.roster.everyone
        _, uploads = trial.fleet.train(0, everyone, method.send(trial.roster, method.start(trial.roster), everyone))
        theta = method.sharing.compose(uploads.theta, trial.fleet.state.personal)
        changed = theta != trial.roster.theta  # [2, d]
        for entry in layout.entries:
            part = "head" if entry.name in layout.head else "base"
            if entry.trainable and part != moves:
                assert not changed[:, entry.at].any(), f"{entry.name} moved in the {moves} phase"
            else:  # running statistics follow the examples in both phases
                assert changed[:, entry.at].all(), f"{entry.name} stood still in the {moves} phase"


def test_something_must_be_personal():
    with pytest.raises(UsageError, match="fedrep: personal names no tensor; name some"):
        FedRep(personal=())
