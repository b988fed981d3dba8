"""The model that a run saves is the one that it scored, for every method."""

import pytest
import test_variants as variants
import torch
from torch import nn

import kinfed
from kinfed import SGD, Training

CASES = {
    **{name: (variants.METHODS[name], variants.BASE.get(name, {})) for name in variants.METHODS},
    "a personal head": (kinfed.FedAvg, {"personal": ("head.*",)}),
    "a frozen layer": (kinfed.methods.FedAGHN, {"frozen": ("0.*",)}),
    "norms at home": (kinfed.FedAvg, {"bn": "personal"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:fed", "ignore:sfl", "ignore:panacea")
def test_the_saved_model_is_the_scored_one(case, tmp_path):
    kind, settings = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = variants.net(case)
    data = variants.federation()
    run = kinfed.fit(
        kind(**settings), data, net, rounds=3, training=Training(1, 4, SGD(0.2)), participation=0.4, seed=5
    )
    kinfed.save(run, tmp_path / "run")
    history = run.history
    at = history.rounds.index(history.select(history.chosen))
    scores = history.scores[at][history.chosen, "test", "loss"]
    for i, rows in enumerate(data.rows["test"]):
        loaded = kinfed.load_model(tmp_path / "run", module=net, method=kind(**settings), position=i).double()
        loss = nn.functional.cross_entropy(loaded(data.x[rows]), data.y[rows])
        torch.testing.assert_close(loss, scores[i].to(loss), rtol=1e-6, atol=1e-6)
