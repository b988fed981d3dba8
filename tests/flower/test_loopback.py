"""The real thing on one machine: a SuperLink and two SuperNodes over TLS, each started by the command line."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

PLAN = """
rounds = 2
seed = 11
method = { name = "fedaghn", sharpness = 3.0, lr = 0.1 }
model = { name = "mlp", hidden = [5] }
training = { epochs = 2, batch = 8, optimiser = { name = "sgd", lr = 0.2 } }
flower = { clients = 2, classes = 3, deadline = 300 }
"""


def kinfed(*arguments, **how):
    return subprocess.Popen([str(Path(sys.executable).parent / "kinfed"), "flower", *map(str, arguments)], **how)


def test_two_sites_over_tls_end_with_the_models_of_a_simulation(tmp_path, examples, trial):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "KINFED_FLOWER_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    started = []

    def do(*arguments):
        process = kinfed(
            *arguments, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        out, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
        return out, said

    (tmp_path / "plan.toml").write_text(PLAN)
    do("keys", "keys", "d", "f")
    do("up", "--keys", "keys", "--port", port)
    try:
        for name in "df":
            np.savez(tmp_path / f"{name}.npz", **examples[name])
            asked = ("node", name, "--data", f"{name}.npz", "--server", f"127.0.0.1:{port}", "--device", "cpu")
            asked += ("--keys", f"keys/sites/{name}", "--state", "states")
            started.append(kinfed(*asked, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL))
        begin = time.monotonic()
        out, said = do("run", "plan.toml", "--out", "out", "--json")
        print(f"{time.monotonic() - begin:.0f} s\n{said}")
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(timeout=60)
        do("down")
    summary = json.loads(out)
    trial = trial("fedaghn", rounds=2, linked=False)
    expected = trial.simulate(names=["d", "f"])
    assert summary["names"] == ["d", "f"]
    for i, name in enumerate("df"):
        (folder,) = (p for p in (tmp_path / "states" / name).iterdir() if p.name != "node")
        mine = load_file(folder / "model.safetensors")
        for key, value in expected.layout.tensors(expected.history.models["theta"][i]).items():
            torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-5)
    for key, scores in summary["clients_scores"].items():
        assert scores == pytest.approx(expected.history.test(key).tolist(), abs=1e-5)
