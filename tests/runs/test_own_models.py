"""Networks of one's own on text, tables, series and images: parts personal or frozen, and loaded from the run."""

from pathlib import Path

import numpy as np
import polars
import pytest
import torch
from torch import nn

import kinfed
from kinfed.cli import main
from kinfed.models import MODELS
from kinfed.runs.run_folder import RunFolder

NET = '''
import torch
from torch import nn
from torch import nn
import kinfed


class Text(nn.Module):
    """Places of words in a vocabulary of nine -> embeddings, their mean, classes."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(self.body(self.words(x.long()).mean(1)).relu())


class Flat(nn.Module):
    """Any example, flattened."""

    def __init__(self, shape, outputs):
        super().__init__()
        size = 1
        for n in shape:
            size *= n
        self.words, self.body, self.head = nn.Linear(size, 4), nn.Linear(4, 6), nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(self.body(self.words(x.flatten(1)).relu()).relu())


class Series(nn.Module):
    """Windows [B, past, features] through a GRU of our own."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.words = nn.GRU(shape[-1], 4, batch_first=True)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(self.body(self.words(x)[0][:, -1]).relu())


class Images(nn.Module):
    """Images [B, C, H, W] through a convolution of our own."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.words, self.body, self.head = nn.Conv2d(shape[0], 4, 3), nn.Linear(4, 6), nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(self.body(self.words(x).relu().mean((2, 3))).relu())


def text(data_dir):
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(9, (60, 5), generator=draw)
    return kinfed.Dataset(x.float(), (x[:, 0] > 4).long(), kinfed.Classification(2), client=torch.arange(60) % 3)


def images(data_dir):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 6, 6, generator=draw)
    return kinfed.Dataset(x, (x.mean((1, 2, 3)) > 0).long(), kinfed.Classification(2), client=torch.arange(60) % 3)
'''
TABLE = ["name=csv", "path=t.csv", "client=who", "target=y"]
KINDS = {
    "Text": ["federation.dataset=net.py:text"],
    "Flat": [f"federation.dataset.{one}" for one in TABLE],
    "Series": [f"federation.dataset.{one}" for one in (*TABLE, "time=when", "past=4", "horizon=2")],
    "Images": ["federation.dataset=net.py:images"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_ones_own_trains_in_parts_and_is_loaded(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    lines = [f"{who},{i},{i % 7}.25,{(3 * i + len(who)) % 11}.5" for who in ("a", "bb", "ccc") for i in range(60)]
    Path("t.csv").write_text("\n".join(["who,when,x,y", *lines]) + "\n")
    parts = ['method.personal=["head.*"]', 'method.frozen=["words.*"]']
    parts += ["rounds=2", "--out", "r", "--quiet"]
    assert main(["run", "fedavg", *KINDS[kind], f"model=net.py:{kind}", *parts]) == 0
    summary = RunFolder(Path("r")).read_summary()
    assert (summary.sharing["shared"]["tensors"], summary.sharing["personal"]["tensors"]) == (2, 2)
    assert summary.sharing["frozen"]["tensors"] == (1 if kind == "Text" else 4 if kind == "Series" else 2)
    one, two = (dict(kinfed.load_model("r", position=client).state_dict()) for client in (0, 1))
    same = {name.partition(".")[0]: torch.equal(one[name], two[name]) for name in one}
    assert same == {"words": True, "body": True, "head": False}
    out = kinfed.load_model("r", position=0)(torch.zeros(2, *summary.data.shape))
    assert out.shape == (2, summary.data.outputs)


@pytest.mark.parametrize(
    ("last", "match"), [([nn.Linear(4, 2), nn.Softmax(1)], "are probabilities"), ([nn.Linear(4, 5)], "5 outputs for 2")]
)
def test_outputs_that_cross_entropy_trains_badly_are_warned_of(last, match):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    federation = kinfed.Federation.from_arrays(x, (x.sum(1) > 0).long(), torch.arange(3).repeat_interleave(20))
    with pytest.warns(UserWarning, match=match):
        kinfed.fit(kinfed.FedAvg(), federation, nn.Sequential(*last), rounds=1)


def test_the_usual_model_of_a_series_forecasts_levels_that_no_training_window_had():
    """Where readings rise for good, an MLP of the readings themselves falls behind, because it has not seen such."""
    draw = np.random.default_rng(0)
    rows = [(who, t, 0.5 * t + draw.normal()) for who in "ABC" for t in range(120)]
    frame = polars.DataFrame(rows, schema=["who", "t", "y"], orient="row")
    series = kinfed.from_frame(frame, client="who", target="y", time="t", past=6)
    usual = kinfed.fit(kinfed.Local(), series, rounds=20).score()
    levels = kinfed.fit(kinfed.Local(), series, MODELS["mlp"]((6, 1), 1), rounds=20).score()
    assert usual < 0.8 * levels
