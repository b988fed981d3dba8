"""kinfed flower: what is wrong is said in one line, before anything is started."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kinfed.cli import main
from kinfed_flower.wire.flower_names import VERSIONS

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

PLAN = 'method = "fedavg"\nmodel = "mlp"\n'


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command that must be refused; returns the one line that it says."""
    monkeypatch.setenv("KINFED_FLOWER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def ask(*arguments):
        assert main(["flower", *map(str, arguments)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        (line,) = said.err.strip().splitlines()
        assert line.startswith("kinfed: ")
        return line

    return ask


def test_without_flower_it_is_said_how_to_get_it(refused, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "flwr" else real(name, *rest))
    for action in (["keys", "k"], ["up", "--insecure"], ["node", "a", "--data", "x.npz"], ["run", "f.toml"], ["down"]):
        assert refused(*action) == "kinfed: kinfed flower needs Flower; install it: pip install 'kinfed[flower]'"


def test_without_its_package_kinfed_says_so_and_does_all_else(tmp_path):
    start = """
import sys

class Gone:
    def find_spec(name, *rest):
        if name == "kinfed_flower":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Gone)
from kinfed.cli import main
sys.exit(main())
"""

    def ask(*arguments):
        command = [sys.executable, "-c", start, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.replace("\n", "")

    problem = "kinfed: this needs the package kinfed_flower, which comes with kinfed; install kinfed again"
    assert ask("flower", "status") == (2, problem)
    assert ask("run", "local", "rounds=1", "--beside", "none", "--quiet", "--out", "run") == (0, "")
    (tmp_path / "site" / "experiment").mkdir(parents=True)
    (tmp_path / "site" / "experiment" / "join.safetensors").touch()
    assert ask("report", "site") == ask("predict", "site", "rows.csv") == (2, problem)


def test_a_flower_that_was_not_tested_is_refused(refused, monkeypatch):
    real = importlib.metadata.version
    assert "no SuperLink of" in refused("down")
    for version in ("1.39.0", "1.43.0", "2.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, v=version: v if name == "flwr" else real(name))
        for action in (["down"], ["up", "--insecure"], ["node", "a", "--data", "x.npz"], ["run", "f.toml"]):
            assert refused(*action).endswith(f"found {version}: pip install 'flwr>=1.40,<1.43'")


def test_the_tested_version_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    most = int(VERSIONS[-1].partition(".")[2]) + 1
    assert f"flwr>={VERSIONS[0]},<1.{most}" in project["optional-dependencies"]["flower"]


def test_what_is_missing_or_excludes_another_is_said(refused, tmp_path):
    assert "give --keys DIR" in refused("up")
    assert "give --keys DIR" in refused("node", "a", "--data", "x.npz")
    assert "exclude each other" in refused("up", "--keys", "k", "--insecure")
    assert "--insecure works on this machine only, so --host must be 127.0.0.1; got 0.0.0.0" in refused(
        "up", "--insecure", "--host", "0.0.0.0"
    )
    assert "lacks ca.crt, server.crt, server.key; make them: kinfed flower keys" in refused("up", "--keys", "k")
    assert "lacks ca.crt; --keys must name this site's folder" in refused("node", "a", "--data", "x.npz", "--keys", "k")
    assert "there is no file x.npz" in refused("node", "a", "--data", "x.npz", "--insecure")
    (tmp_path / "x.npz").touch()
    assert "--insecure works on this machine only, so --server must name it; got hub:8000" in refused(
        "node", "a", "--data", "x.npz", "--insecure", "--server", "hub:8000"
    )
    code = ("--code", "gone.py")
    assert "--code: there is no file gone.py" in refused("node", "a", "--data", "x.npz", "--insecure", *code)
    for address in ("hub", "hub:99999", "hub:0"):
        assert "must be HOST:PORT" in refused("node", "a", "--data", "x.npz", "--insecure", "--server", address)
    assert "a site's name consists of letters" in refused("node", "a b", "--data", "x.npz", "--insecure")
    assert "no SuperLink of" in refused("down")
    assert "say where its keys are: --keys DIR" in refused("revoke", "ann")


def test_a_plan_is_checked_before_anything_runs(refused, tmp_path):
    (tmp_path / "f.toml").write_text(PLAN)
    assert "start it: kinfed flower up" in refused("run", "f.toml")
    assert not (tmp_path / "runs").exists()
    assert "is not the folder of a run" in refused("run", tmp_path)
    wrong = {
        "flower.clients=0": "flower.clients must be at least 1; got 0",
        "flower.quorum=0.0": "flower.quorum must be in (0, 1]",
        "flower.deadline=-1.0": "flower.deadline must be positive",
        "flower.norm_bound=0.5": "flower.norm_bound must be above 1",
        "flower.stale=forget": "flower.stale must be one of 'keep', 'decay', 'drop'; got 'forget'",
        "flower.decay=1.0": "flower.decay must be in (0, 1)",
        "flower.client=3": "unknown key 'flower.client'; did you mean 'clients'?",
        "federation.dataset=digits": "of federation only split may be set here",
        "seeds=3": "a federation runs one seed at a time",
        "participation={late=0.5, joins=2}": "participation.late and by_group are for simulations",
    }
    for override, message in wrong.items():
        assert message in refused("run", "f.toml", override)


def test_keys_says_what_to_hand_to_whom(capsys, tmp_path):
    assert main(["flower", "keys", str(tmp_path), "ann", "bob", "--host", "hub.example.org"]) == 0
    said = capsys.readouterr().err
    assert f"give {tmp_path}/sites/ann to ann and to nobody else" in said
    assert (tmp_path / "sites" / "bob" / "key").exists()


def test_the_written_plan_is_the_same_plan(tmp_path):
    from kinfed.runs.config import experiment
    from kinfed_flower import plan

    (tmp_path / "f.toml").write_text(PLAN + "[flower]\nclients = 4\nquorum = 0.75\n")
    first = plan.resolve(experiment.read(str(tmp_path / "f.toml"), []))
    experiment.write(first.table, tmp_path / "config.toml")
    again = plan.resolve(experiment.read(str(tmp_path / "config.toml"), []))
    assert again.table == first.table == json.loads(json.dumps(first.table))
    assert (again.deployment.clients, again.deployment.quorum) == (4, 0.75)


def test_a_finished_run_is_resumed_by_telling_its_end(capsys, tmp_path, monkeypatch, finished):
    monkeypatch.setenv("KINFED_FLOWER_HOME", str(tmp_path / "home"))
    (tmp_path / "config.toml").write_text(PLAN)
    summary = finished(tmp_path, {"shared": {}}, dataset="sites", executor="flower").read_summary().to_dict()
    assert main(["flower", "run", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == summary
    assert f"the run in {tmp_path} has finished" in said.err
