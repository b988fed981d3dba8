"""kinfed's app on Flower's own programs, with nothing of kinfed's around them: a deployment, and a simulation."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from safetensors.torch import load_file

from kinfed.cli import main
from kinfed.runs.config import experiment
from kinfed_flower.programs.subprocesses import quiet

pytestmark = pytest.mark.slow

PATIENCE = 400.0  # seconds for a run, on a machine that is busy with other work
ROUNDS = 3


@pytest.fixture
def stock(tmp_path, free_port):
    """Starts Flower's programs with a home of their own; ends them all, and what they have started."""
    home, port, started = tmp_path / "flwr", free_port(), []
    home.mkdir()
    own = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment = {**os.environ, **quiet(home), **own, "NO_PROXY": "127.0.0.1,localhost"}
    where = {"superlink": {"default": "own", "own": {"address": f"127.0.0.1:{port}", "insecure": True}}}
    (home / "config.toml").write_text(tomli_w.dumps(where))

    class Stock:
        log = tmp_path / "flower.log"
        address = f"127.0.0.1:{port}"

        @staticmethod
        def start(program, *options):
            with Stock.log.open("ab") as log:
                command = [str(Path(sys.executable).with_name(program)), "--insecure", *options]
                how = {"env": environment, "cwd": tmp_path, "stdout": log, "stderr": log, "start_new_session": True}
                started.append(subprocess.Popen(command, **how))

        @staticmethod
        def flwr(*arguments):
            command = [str(Path(sys.executable).with_name("flwr")), *map(str, arguments)]
            how = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "check": False}
            return subprocess.run(command, timeout=PATIENCE, **how)

        @staticmethod
        def superlink(*options):
            Stock.start("flower-superlink", "--host", "127.0.0.1", "--port", str(port), *options)
            begin = time.monotonic()
            while Stock.flwr("list", "own").returncode:
                assert time.monotonic() - begin < 90, Stock.log.read_text()[-2000:]
                time.sleep(0.5)

    yield Stock
    for process in reversed(started):
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(timeout=20)


def carry_out(stock, *asked):
    """Run an app to its end; returns the run's state and what was logged of it."""
    begun = json.loads(stock.flwr("run", *asked, "--format", "json").stdout)
    assert begun["success"], begun
    id, begin = begun["run-id"], time.monotonic()
    while time.monotonic() - begin < PATIENCE:
        listed = json.loads(stock.flwr("list", "own", "--run-id", id, "--format", "json").stdout)
        if (status := listed["runs"][0]["status"]).startswith("finished"):
            return status
        time.sleep(1)
    raise AssertionError(f"the run has not ended: {stock.log.read_text()[-3000:]}")


@pytest.fixture
def written(tmp_path, trial, examples):
    """Writes the app of a plan for some of the six clients, and their files; returns the trial."""

    def make(names):
        files = tmp_path / "files"
        files.mkdir()
        for name in names:
            np.savez(files / f"{name}.npz", **examples[name])
        made = trial("fedaghn", rounds=ROUNDS, clients=len(names), linked=False)
        experiment.write(made.planned.table, tmp_path / "plan.toml")
        assert main(["flower", "app", str(tmp_path / "app"), str(tmp_path / "plan.toml")]) == 0
        return made

    return make


def compare(summary, models, expected, names):
    """The sites' models and scores are those of a simulation: [P] each."""
    assert summary["by_client"]["names"] == list(names)
    assert summary["selection"]["chosen"] == expected.history.chosen
    for i, mine in enumerate(models):
        wanted = {}
        for leaf, values in expected.history.models.items():
            wanted |= expected.layout.tensors(values[i]) if leaf == "theta" else {leaf: values[i]}
        assert mine.keys() == wanted.keys()
        assert max(float((mine[key] - value).abs().max()) for key, value in wanted.items()) <= 1e-5
    for key, scores in summary["by_client"]["scores"].items():
        assert scores == pytest.approx(expected.history.test(key).tolist(), abs=1e-5)


def test_a_stock_deployment_ends_with_the_models_of_a_simulation(stock, written, tmp_path, free_port):
    names = ("d", "f")
    trial = written(names)
    stock.superlink("--disable-runtime-dependency-installation")
    (tmp_path / "any.toml").write_text("runs = 'any'")
    for name in names:
        own = {"data": str(tmp_path / "files" / f"{name}.npz"), "state-dir": str(tmp_path / "states"), "device": "cpu"}
        own["policy"] = str(tmp_path / "any.toml")
        settings = " ".join(f'{key}="{value}"' for key, value in own.items())
        settings += """ reading='{"few_rows": true}'"""  # exact scores, so that the round is that of a simulation
        stock.start(
            "flower-supernode", "--superlink", stock.address, "--port", str(free_port()), "--node-config", settings
        )
    out = tmp_path / "out"
    assert carry_out(stock, tmp_path / "app", "own", "-c", f'out="{out}"') == "finished:completed"
    summary = json.loads((out / "summary.json").read_text())
    experiment = summary["sites"]["experiment"]
    models = [load_file(tmp_path / "states" / name / experiment / "model.safetensors") for name in names]
    compare(summary, models, trial.simulate(names=list(names)), names)


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'flwr[simulation]'"
)
def test_flowers_simulation_ends_with_the_models_of_a_simulation(stock, written, tmp_path):
    names = ("b", "c", "d", "f")
    trial = written(names)
    stock.superlink("--simulation")
    settings = {"data": str(tmp_path / "files"), "out": str(tmp_path / "out"), "reading": '{"few_rows": true}'}
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(settings))
    nodes = "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2"  # so many workers
    asked = ("-c", tmp_path / "settings.toml", "--federation-config", nodes)
    assert carry_out(stock, tmp_path / "app", "own", *asked) == "finished:completed"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    folders = [tmp_path / ".kinfed" / "sites" / name / summary["sites"]["experiment"] for name in names]
    compare(
        summary,
        [load_file(folder / "model.safetensors") for folder in folders],
        trial.simulate(names=list(names)),
        names,
    )
