"""FedEM on clients of two kinds, and by hand."""

import pytest
import torch
from torch import nn

from kinfed.core.optimiser import SGD
from kinfed.core.tasks import Classification
from kinfed.core.training import Training
from kinfed.errors import UsageError
from kinfed.methods import FedEM
from kinfed.methods.parts.mixed_outputs import Mixed, mix_outputs


def halves(clients=6, each=24):
    """Two classes by the sign of one number; every other client names them the other way round."""
    draw = torch.Generator().manual_seed(2)
    x = [torch.randn(each, 1, generator=draw, dtype=torch.float64) for _ in range(clients)]
    return x, [((part[:, 0] > 0) ^ bool(i % 2)).long() for i, part in enumerate(x)]


def line():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(1, 2).double()


def test_the_mixture_by_hand():
    """Probabilities 0.5 and 0.8 of the first class, with weights 1/4 and 3/4: 0.725."""
    outputs = torch.tensor([[[0.0, 0.0]], [[0.8, 0.2]]], dtype=torch.float64)
    outputs[1] = outputs[1].log()
    share = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert float(mix_outputs(outputs, share)[0, 0].exp()) == pytest.approx(0.725, abs=1e-12)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_clients_of_two_kinds_take_a_model_each(examples, executor):
    x, y = halves()
    trial = examples(
        line(), x, y, FedEM(components=2), training=Training(2, 8, SGD(0.5)), task=Classification(2), executor=executor
    )
    trial.run(15)
    share = trial.fleet.state.share
    torch.testing.assert_close(share.sum(1), torch.ones(6, dtype=torch.float64))
    assert (share.max(1).values > 0.9).all()
    first = share.argmax(1)
    assert first.tolist() == [first[0], 1 - first[0]] * 3


def test_what_is_exported_answers_as_what_was_scored(examples):
    x, y = halves(2)
    trial = examples(line(), x, y, FedEM(), training=Training(1, 8, SGD(0.5)), task=Classification(2))
    trial.run(2)
    models = trial.history.models
    parts = []
    for theta in [models["theta"][0], *models["others"][0]]:
        part = line()
        part.weight.data, part.bias.data = theta[:2, None], theta[2:]
        parts.append(part)
    accuracy = (Mixed(parts, models["share"][0])(x[0]).argmax(1) == y[0]).double().mean()
    assert float(accuracy) == pytest.approx(float(trial.history.scores[-1]["mixture", "test", "accuracy"][0]))


def test_numbers_are_refused(bowls):
    with pytest.raises(UsageError, match="fedem mixes probabilities of classes"):
        bowls(FedEM(), [1.0, 2.0]).run(1)
