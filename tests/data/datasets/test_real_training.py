"""Real images and domains, in small slices: each set is trained alone, averaged, and along a graph."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kinfed import SGD, Split, Training, fit
from kinfed.core.engine import Rounds
from kinfed.core.seeding import generator
from kinfed.data.datasets import DATASETS
from kinfed.data.federation import divide
from kinfed.data.partitions import IID, Natural
from kinfed.methods import SFL, FedAMP, FedAvg, Local
from kinfed.models import MODELS

SLICE, CLIENTS = 600, 4
SETS = ["mnist", "cifar100_subset", "dg15", "digits"]  # grey, in colours, of domains with links, and bundled


@pytest.mark.parametrize("name", SETS)
def test_real_examples_train_with_three_methods(name):
    folder = os.environ.get("KINFED_DATA")
    if name != "digits" and (not folder or not (Path(folder) / f"{name}.npz").is_file()):
        pytest.skip(f"needs {name}.npz in the folder named by KINFED_DATA")
    data = DATASETS[name]()
    if data.client is None:
        # A few hundred images cannot have each of 100 classes in training and in test: the ten first ones will do.
        mine = (data.y < 10 if data.task.classes > 10 else data.y >= 0).nonzero().squeeze(1)
        few = mine[torch.randperm(len(mine), generator=generator(0, "slice"))[:SLICE]]
        data = replace(data, x=data.x[few].clone(), y=data.y[few].clone())
    parts = (Natural() if data.client is not None else IID())(
        data, CLIENTS if data.client is None else 0, generator(0, "p")
    )
    federation = divide(parts.dataset, parts.owned, Split(0.2, 0.0), 0)
    torch.manual_seed(0)
    module = MODELS["linear"](tuple(federation.x.shape[1:]), federation.outputs)
    related = SFL() if federation.graph is not None else FedAMP()

    def loss(method, lr):
        how = Training(2, 16, SGD(lr))
        history = fit(method, federation, module, rounds=Rounds(2, evaluate_every=2), training=how).history
        return float(history.scores[-1][history.headline, "test", "loss"].mean())

    untrained, rate = loss(FedAvg(), 1e-9), 0.003 * min(1, 3072 / federation.x[0].numel())  # less for larger images
    for method in (Local(), FedAvg(), related):
        assert loss(method, rate) < untrained, method
