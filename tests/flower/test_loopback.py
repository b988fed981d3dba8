"""The real thing on one machine: a server and three sites over TLS, each started by the command line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from safetensors.torch import load_file

from kinfed.methods import METHODS
from kinfed.runs.config import experiment, plugins
from kinfed_flower.programs import ending, hub, server_app, subprocesses

pytestmark = pytest.mark.slow

NAMES = "abc"  # of 3, 9 and 8 training examples
ROUNDS = 4


def kinfed(*arguments, **how):
    return subprocess.Popen([str(Path(sys.executable).parent / "kinfed"), "flower", *map(str, arguments)], **how)


@pytest.fixture(scope="module")
def federation(tmp_path_factory, examples, own_code, free_port):
    """Its folder, and what runs a command there and returns what that printed, or what it said if it failed."""
    folder, port = tmp_path_factory.mktemp("federation"), free_port()
    environment = {**os.environ, "KINFED_FLOWER_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    where = {"env": environment, "cwd": folder}
    started = []

    def do(*arguments, code=0):
        process = kinfed(*arguments, **where, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        out, said = process.communicate(timeout=600)
        assert process.returncode == code, said
        return said if code else out

    do("keys", "keys", *NAMES)
    do("up", "--keys", "keys", "--port", port)
    (folder / "any.toml").write_text('runs = "any"')
    try:
        for name in NAMES:
            np.savez(folder / f"{name}.npz", **examples[name])
            (folder / "code" / name).mkdir(parents=True)
            (folder / "code" / name / "mine.py").write_text(own_code)
            asked = ("node", name, "--data", f"{name}.npz", "--server", f"127.0.0.1:{port}", "--device", "cpu")
            asked += ("--keys", f"keys/sites/{name}", "--state", "states")
            asked += ("--code", f"code/{name}/mine.py", "--few-rows", "--policy", "any.toml")
            started.append(kinfed(*asked, **where, stderr=subprocess.DEVNULL))
        yield folder, do
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(timeout=60)
        do("down")


def test_a_run_that_fails_says_why_at_once_and_goes_on_when_that_is_mended(federation, trial):
    folder, do = federation
    trial = trial("sfl", rounds=2, clients=len(NAMES))
    links = Path(trial.planned.deployment.graph)
    good = links.read_text()
    links.write_text("here,there\na,b\n")
    experiment.write(trial.planned.table, folder / "broken.toml")
    said = do("run", "broken.toml", "--out", "broken", code=1)
    assert "the header must have the columns from and to; got here, there" in said.splitlines()[-1]
    assert "restarting" not in said
    links.write_text(good)
    assert json.loads(do("run", "broken", "--json"))["rounds"] == 2


def test_strangers_reach_nothing_and_what_is_made_is_its_owners_alone(federation):
    folder, _ = federation
    home = folder / "home"
    address = json.loads((home / "link.json").read_text())["address"]
    reach = {"default": "kinfed", "kinfed": {"address": address, "root-certificates": str(folder / "keys" / "ca.crt")}}
    (home / "flwr" / "config.toml").write_text(tomli_w.dumps({"superlink": reach}))
    (folder / "foreign").mkdir()
    (folder / "foreign" / "pyproject.toml").write_text(tomli_w.dumps(server_app.bundle({"out": str(folder)})))
    stranger = str(Path(sys.executable).with_name("flwr"))
    for arguments in (["list", "kinfed"], ["supernode", "list", "kinfed"], ["run", str(folder / "foreign"), "kinfed"]):
        environment = subprocesses.environment(home / "flwr")
        done = subprocess.run([stranger, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode
        assert "404" in done.stdout + done.stderr
    runs = [path.parent.name for path in folder.glob(f"*/{ending.JOURNAL}")]
    made = [p for top in ("home", "states", "keys", *runs) for p in (folder / top).rglob("*") if not p.is_dir()]
    assert made
    assert (home / hub.DATABASE).read_bytes().startswith(b"SQLite format 3")  # which encrypts nothing
    assert not [path for path in made if path.name != "config.toml" and path.stat().st_mode & 0o077]


@pytest.mark.parametrize("name", [*METHODS, "mine.py:Between"])
def test_sites_over_tls_end_with_the_models_of_a_simulation(name, federation, trial, own_code, monkeypatch):
    folder, do = federation
    monkeypatch.chdir(folder)
    Path("mine.py").write_text(own_code)  # the server's copy
    trial = trial(name, rounds=ROUNDS, clients=len(NAMES), norm_bound=0.0)  # of three sites two may hardly move
    name = plugins.short_name(name)
    experiment.write(trial.planned.table, folder / f"{name}.toml")
    summary = json.loads(do("run", f"{name}.toml", "--out", name, "--json"))
    expected = trial.simulate(names=list(NAMES))
    assert summary["by_client"]["names"] == list(NAMES)
    assert summary["selection"]["chosen"] == expected.history.chosen
    apart = 0.0
    for i, site in enumerate(NAMES):
        mine = load_file(folder / "states" / site / summary["sites"]["experiment"] / "model.safetensors")
        wanted = {}
        for leaf, values in expected.history.models.items():
            wanted |= expected.layout.tensors(values[i]) if leaf == "theta" else {leaf: values[i]}
        assert mine.keys() == wanted.keys()
        apart = max(apart, *(float((mine[key] - value).abs().max()) for key, value in wanted.items()))
    print(f"{name}: the models differ by at most {apart:.1e}")
    assert apart <= 1e-5
    for key, scores in summary["by_client"]["scores"].items():
        assert scores == pytest.approx(expected.history.test(key).tolist(), abs=1e-5)
