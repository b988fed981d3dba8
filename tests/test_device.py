"""What a GPU asks of kinfed, where there is none: `test_gpu.py` on a pretend device, and what cuDNN does to weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import backend_registration

from kinfed import SGD, Federation, Training, fit
from kinfed.methods import METHODS
from kinfed.models import MODELS
from kinfed.simulation.execution import Execution


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch sets up no device from Python",
)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_a_pretend_device(which):
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", f"gpu and {which}", "tests/test_gpu.py"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": path, "KINFED_PRETEND": "1", "CI": ""},  # some need CUDA: they are skipped
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, f"{ended.stdout[-20_000:]}\n{ended.stderr[-5_000:]}"
    assert " passed" in ended.stdout


class Flattening(nn.Module):
    """A recurrent model whose author asks for one block of memory, as PyTorch's pages advise."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        self.cell.flatten_parameters()
        return self.head(self.cell(input=x)[0][:, -1])


@pytest.mark.parametrize(
    ("name", "executor"),
    [("rnn", "loop"), ("rnn", "vmap"), ("rnn", "fused"), ("gru", "loop"), ("gru", "fused"), ("own", "loop")],
)
def test_cudnn_does_not_take_the_weights_away(name, executor, monkeypatch):
    def flatten(self):
        """As on CUDA: the weights become parts of one new buffer, wherever they were."""
        weights = self._flat_weights
        if len({w.data_ptr() for w in weights}) == len(weights) == len(self._flat_weights_names):
            with torch.no_grad():
                buffer = torch.cat([w.flatten() for w in weights])
                for w, part in zip(weights, buffer.split([w.numel() for w in weights]), strict=True):
                    w.set_(part.view(w.shape))

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, 2, generator=draw)
    data = Federation.from_arrays(x, x.cumsum(1)[:, -3:, 0], torch.arange(64) % 4)
    torch.manual_seed(0)
    module = Flattening() if name == "own" else MODELS[name]((6, 2), 3, hidden=8)
    how = {"rounds": 2, "training": Training(2, 8, SGD(0.1)), "execution": Execution(executor, device="cpu")}
    expected = fit(METHODS["fedavg"](), data, module, **how).theta(position=0)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    assert torch.equal(fit(METHODS["fedavg"](), data, module, **how).theta(position=0), expected)
