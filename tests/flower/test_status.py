"""What a run writes down while it goes on, and what its user reads of it."""

import json
import time

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed.cli import main
from kinfed.errors import RunError
from kinfed_flower.programs import authentication, ending, status, superlink
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server import monitoring, server, status_file
from kinfed_flower.server.broker import Broker
from kinfed_flower.server.node_traffic import Traffic
from kinfed_flower.server.nodes import Nodes
from kinfed_flower.wire import keys
from kinfed_flower.wire.link import Link


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A server's folder with the keys of four sites, and a run of two of them."""
    out = tmp_path / "first"
    out.mkdir()
    (tmp_path / superlink.LAST).write_text(json.dumps({"out": str(out)}))
    keys.make(tmp_path / "keys", [], ["ann", "bob", "eve", "new"])
    site = {"rounds": 3, "missed": 0, "down": 5000, "up": 400, "late": 0.0, "left_out": ""}
    sites = {"ann": site | {"node": "1"}, "bob": site | {"missed": 2, "node": "2", "left_out": "no reply"}}
    words = {"state": "running", "why": "", "round": 4, "rounds": 20, "seconds": 61.5, "sites": sites}
    monkeypatch.setattr(ending, "process", lambda out: 8)
    status_file.write(out, words | {"scores": {"round": 3, "means": {"test/accuracy/own": 0.75}}})
    return tmp_path


@pytest.fixture
def runs(monkeypatch, home):
    """Its SuperLink runs: ann called lately, bob a while ago, the others never, and one without a name just now."""
    where = {"address": "127.0.0.1:8000", "ca": str(home / "keys" / "ca.crt"), "pid": 7}
    (home / "link.json").write_text(json.dumps(where))
    monkeypatch.setattr(status, "is_alive", lambda pid, program: (pid, program) == (7, superlink.PROGRAM))
    heard = {name: authentication.fingerprint(key) for key, name in keys.members(home / "keys").items()}
    heard = {heard["ann"]: time.time() - 5, heard["bob"]: time.time() - 45, "other": time.time()}
    monkeypatch.setattr(Link, "ask", lambda self, path, secret: heard)


def test_a_site_is_online_while_it_gives_signs_of_life(home, runs):
    now = status.read(home)
    online = {name: site["online"] for name, site in now["sites"].items()}
    assert online == {"ann": True, "bob": False, "eve": False, "new": False}
    assert now["sites"]["bob"]["left_out"] == "no reply"
    assert now["run"]["state"] == "running"
    assert now["superlink"] == {"address": "127.0.0.1:8000", "running": True}


def test_a_superlink_that_has_stopped_has_no_site_online(home):
    assert not any(site["online"] for site in status.read(home)["sites"].values())


def test_without_keys_a_site_is_known_by_the_run_alone(home, runs, monkeypatch):
    (home / "link.json").write_text(json.dumps({"address": "127.0.0.1:8000", "ca": "", "pid": 7}))
    monkeypatch.setattr(Link, "ask", lambda self, path, secret: {"2": time.time(), "3": time.time()})
    assert {name: site["online"] for name, site in status.read(home)["sites"].items()} == {"ann": False, "bob": True}


def test_a_run_whose_process_is_gone_has_stopped(home, monkeypatch):
    assert status.read(home)["run"]["state"] == "running"
    monkeypatch.undo()
    assert status.read(home)["run"]["state"] == "stopped"


def test_a_server_without_runs_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KINFED_FLOWER_HOME", str(tmp_path))
    assert main(["flower", "status"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"no SuperLink of {tmp_path} is running; start it: kinfed flower up",
        "no run has begun yet",
    ]


def test_the_status_on_screen_and_as_json(home, runs, capsys, monkeypatch):
    monkeypatch.setenv("KINFED_FLOWER_HOME", str(home))
    assert main(["flower", "status"]) == 0
    text = capsys.readouterr().out
    assert f"the run in {home / 'first'}: running, round 4 of 20, 62 s" in text
    assert "after round 3: test/accuracy/own 0.75" in text
    (ann,) = [line.split() for line in text.splitlines() if line.startswith("ann")]
    assert ann == ["ann", "online", "3", "0", "5", "kB", "400", "B"]
    assert "bob was left out: no reply" in text
    assert main(["flower", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["round"] == 4


def test_the_status_shows_what_a_budget_has_left(home, runs, capsys, monkeypatch):
    monkeypatch.setenv("KINFED_FLOWER_HOME", str(home))
    kept = status_file.read(home / "first")
    kept["sites"]["ann"] |= {"noise": 1.5, "steps": 18, "spent": 1.234, "budget": 8.0}
    status_file.write(home / "first", kept)
    assert main(["flower", "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("epsilon spent") for line in lines)
    [ann] = [line for line in lines if line.startswith("ann")]
    assert ann.endswith("1.23 of 8")


def test_a_run_writes_down_how_it_is_doing(trial):
    trial = trial("fedaghn", rounds=3, deadline=0.5)
    trial.grid.faults["b", 3] = lambda answer: None
    trial.serve()
    words = json.loads((trial.folder / "out" / status_file.FILE).read_text())
    assert (words["state"], words["round"], words["rounds"]) == ("finished", 3, 3)
    assert words["sites"]["a"]["rounds"] == 3
    assert words["sites"]["b"]["rounds"] == 2
    assert words["sites"]["b"]["missed"] == 1
    summary = json.loads((trial.folder / "out" / "summary.json").read_text())
    assert words["sites"]["a"]["down"] == summary["sites"]["bytes_by_client"]["a"]["down"]


def test_a_run_that_waits_for_sites_writes_down_for_what(tmp_path):
    nodes = Nodes(print, None)
    waits = Broker(nodes, Traffic(Here([]), nodes, patience=-1.0), problems={"eve": "no such column"})
    monitoring.Watch(tmp_path, 20, waits)
    with pytest.raises(RunError, match="waited 0 s for 4 sites"):
        waits.discover(lambda: False, "4 sites")
    words = json.loads((tmp_path / status_file.FILE).read_text())
    assert (words["state"], words["why"]) == ("running", "waiting for 4 sites")
    assert words["sites"]["eve"]["left_out"] == "no such column"


def test_a_run_that_fails_writes_down_why(trial, monkeypatch):
    trial = trial("fedavg", rounds=3)

    def fail(*_, **__):
        raise RunError("the disk is full")

    monkeypatch.setattr(server, "summarise", fail)
    with pytest.raises(RunError, match="disk"):
        trial.serve()
    words = json.loads((trial.folder / "out" / status_file.FILE).read_text())
    assert (words["state"], words["why"]) == ("failed", "the disk is full")


def test_a_removed_site_is_away_though_it_called_just_now(home, runs, monkeypatch):
    (home / "keys" / "sites" / "ann").rename(home / "keys" / "ann")
    monkeypatch.setattr(Link, "ask", lambda self, path, secret: {"1": time.time()})
    assert status.read(home)["sites"]["ann"]["online"] is False
