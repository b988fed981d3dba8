import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import kinfed
from kinfed import SGD, Training, fit
from kinfed.core.sharing import Sharing
from kinfed.core.tasks import Classification
from kinfed.data.federation import Federation
from kinfed.methods import FedRoD
from kinfed.simulation.execution import Execution

float64 = torch.float64
X = torch.tensor([[1.0], [2.0], [-1.0], [0.5]], dtype=float64)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3)).double()


def trained(y, method=None, epochs=1, **how):
    """A run of one round of one client whose training examples are X."""
    rows = {"train": [torch.arange(4)], "validation": [torch.arange(0)], "test": [torch.arange(4)]}
    data = Federation(X, torch.tensor(y), rows, Classification(3))
    training, execution = Training(epochs, 4, SGD(0.1)), Execution("loop")
    return fit(method or FedRoD(), data, net(), rounds=1, training=training, execution=execution, **how)


def test_balanced_softmax_by_hand():
    """Logits of 0 and class counts of 8, 2 and 0 are chances of 0.8, 0.2 and 0; the absent class costs nothing."""
    counts = torch.tensor([8.0, 2.0, 0.0], dtype=float64)
    loss = cross_entropy(torch.zeros(2, 3, dtype=float64) + counts.log(), torch.tensor([0, 1]), reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.2231436, 1.6094379], dtype=float64), rtol=0, atol=1e-7)


def test_one_step_moves_base_and_generic_head_on_one_loss_and_the_personal_head_on_the_other():
    y = [0, 0, 1, 0]  # class 2 is absent
    found = trained(y).model(position=0)
    base, generic = net()
    own = net()[1]
    z = base(X)
    outputs = generic(z)
    chances = torch.tensor([3.0, 1.0, 0.0], dtype=float64) * outputs.exp()
    balanced = -(chances[torch.arange(4), y] / chances.sum(1)).log().mean()
    personal = cross_entropy(outputs.detach() + own(z.detach()), torch.tensor(y))
    (balanced + personal).backward()
    for part, other in ((base, found[0]), (generic, found[1].generic), (own, found[1].personal_head)):
        for p, q in zip(part.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.data - 0.1 * p.grad, q.data)


def test_the_personal_head_never_travels_whatever_else_is_kept():
    for settings in ({}, {"personal": ("0.*",)}):
        run = trained([0, 1, 2, 0], FedRoD(**settings))
        sharing = Sharing.from_method(run.method, run.architecture.layout)
        assert sharing.count("personal") == (2 + 2 * bool(settings), 9 + 4 * bool(settings))
        assert sharing.count("shared")[1] == 13 - 4 * bool(settings)


@pytest.mark.parametrize(
    ("module", "y", "said"),
    [
        (nn.Linear(1, 3).double(), torch.tensor([0, 1, 2, 0]), "fedrod: the model needs a head after other layers"),
        (nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double(), X.clone(), "fedrod compares classes, and this data"),
    ],
)
def test_refuses(module, y, said):
    rows = {split: [torch.arange(4)] for split in ("train", "validation", "test")}
    task = Classification(3) if y.ndim == 1 else kinfed.Regression()
    with pytest.raises(kinfed.UsageError, match=said):
        fit(FedRoD(), Federation(X, y, rows, task), module, rounds=1, execution=Execution("loop"))
