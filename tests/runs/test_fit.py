"""What `kinfed.fit` says to arguments that it cannot take."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import kinfed
from kinfed import Federation, Graph, UsageError, fit
from kinfed.core.engine import Rounds
from kinfed.core.model import Model
from kinfed.core.tasks import Regression
from kinfed.methods import FedAvg, FedRep
from kinfed.simulation.execution import Execution

X = torch.randn(40, 4, 3, generator=torch.Generator().manual_seed(0))
OWNER = torch.arange(40) % 4
LABELS = (X[:, 0, 0] > 0).long()
NET = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))


class Product(nn.Module):
    """A model without a linear layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 2))

    def forward(self, x):
        return x.flatten(1) @ self.weight


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rounds": "3"}, "rounds must be a whole number, .*; got '3'"),
        ({"rounds": 2.5}, "rounds must be a whole number, .*; got 2.5"),
        ({"rounds": (20, 0)}, "evaluate_every must be a whole number, at least 1"),
        ({"seed": "a"}, "seed must be a whole number, .*; got 'a'"),
        ({"seed": -1}, "seed must be a whole number, at least 0"),
        ({"folder": 3}, "folder must be a path"),
        ({"training": {"epochs": 1}}, r"training must be like kinfed\.Training\(.*; got \{'epochs': 1\}"),
        ({"participation": "all"}, "participation must be a share"),
        ({"execution": {"device": 3.5}}, "Execution.device must be text; got 3.5"),
        ({"rounds": (20, 1, ["auc"])}, r"select_by: no score \['auc'\]"),
        (
            {"execution": {"checkpoint_seconds": "often"}},
            "Execution.checkpoint_seconds must be a number; got 'often'",
        ),
        ({"execution": {"progress": "bar"}}, "progress must be a function"),
        ({"execution": {"executor": ["loop"]}}, r"executor must be one of .*; got \['loop'\]"),
        ({"execution": {"precision": 16}}, "precision must be"),
        ({"execution": "loop"}, r"execution must be like kinfed\.Execution\(.*; got 'loop'"),
        ({"attack": "poison"}, "attack must be one such as"),
        ({"head": 3}, "the model has no layer 3 to serve as head"),
    ],
)
def test_arguments_of_a_wrong_kind(wrong, said):
    made = {"rounds": lambda counts: Rounds(*counts), "execution": lambda how: Execution(**how)}

    def ask():
        asked = {
            name: made[name](value) if isinstance(value, tuple | dict) and name in made else value
            for name, value in wrong.items()
        }
        module = Model(NET, asked.pop("head")) if "head" in asked else NET
        fit(FedAvg(), Federation.from_arrays(X, LABELS, OWNER), module, **asked)

    with pytest.raises(UsageError, match=said):
        ask()


def test_a_federation_of_single_numbers_has_a_digest():
    """One number may have any stride and count as contiguous."""
    x = torch.arange(12.0).view(4, 3)[:, :1]
    data = Federation.from_arrays(X, LABELS, OWNER)
    rows = {split: [torch.arange(4)[at : at + 1]] for at, split in enumerate(data.rows)}
    one = Federation(x, torch.arange(8.0).view(4, 2)[:, :1], rows, Regression())
    graph = replace(one, graph=Graph(torch.arange(3.0)[::3].view(1, 1), "given"))
    assert len({one.digest(), graph.digest(), data.digest()}) == 3


def test_a_folder_may_be_text(tmp_path):
    fit(
        FedAvg(),
        Federation.from_arrays(X, LABELS, OWNER),
        NET,
        rounds=2,
        folder=str(tmp_path),
        execution=Execution(checkpoint_seconds=0),
    )
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_a_personal_head_needs_a_layer_that_is_one():
    federation = Federation.from_arrays(X, LABELS, OWNER)
    with pytest.raises(UsageError, match=r"no nn\.Linear that could be its head; name the layer that is one"):
        fit(FedRep(), federation, Product(), rounds=1)


def test_labels_that_do_not_count_from_0():
    with pytest.raises(UsageError, match="3 classes; no example has the label 0, and labels should count from 0"):
        fit(FedAvg(), Federation.from_arrays(X, LABELS + 1, OWNER), NET, rounds=1)


def test_owners_of_unlike_lengths():
    with pytest.raises(UsageError, match="client must name the owner of every example"):
        Federation.from_arrays(X, LABELS, [[1, 2], [3]])


def test_labels_may_be_text():
    named = Federation.from_arrays(X, ["yes" if label else "no" for label in LABELS], OWNER)
    assert named.classes == ("no", "yes")
    assert torch.equal(named.y, LABELS)
    assert kinfed.Federation.from_arrays(X, LABELS, OWNER).classes == ()


def test_recurrent_layers_are_batched_without_a_word_of_the_library():
    with warnings.catch_warnings(record=True) as told:
        fit(FedAvg(), Federation.from_arrays(X, LABELS, OWNER), Recurrent(), rounds=1, execution=Execution("vmap"))
    assert [str(one.message) for one in told] == []
