"""What a run writes down while it goes on, and what its user and Prometheus read of it."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from prometheus_client.parser import text_string_to_metric_families as parsed

from kinfed.cli import main
from kinfed.errors import RunError, UsageError
from kinfed.flower import metrics, server, status, superlink
from kinfed.flower.subprocesses import free_port


def node(name, number, seen, state="online"):
    return name, number, state, None if seen is None else seen + 60, 30.0


@pytest.fixture
def home(tmp_path):
    """A server's folder, whose SuperLink knows four sites, and a run of three of them."""
    (tmp_path / "app").mkdir()
    out, now = tmp_path / "first", time.time()
    out.mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text(f'[tool.flwr.app.config]\nout = "{out}"\n')
    with closing(sqlite3.connect(tmp_path / superlink.DATABASE)) as database, database:
        database.execute("CREATE TABLE node (name, node_id, status, online_until, heartbeat_interval)")
        nodes = [node("ann", 1, now - 5), node("bob", 2, now - 45), node("eve", 3, now, "offline")]
        nodes += [node("new", 4, None), node("gone", 5, now, "unregistered")]
        database.executemany("INSERT INTO node VALUES (?, ?, ?, ?, ?)", nodes)
    site = {"rounds": 3, "missed": 0, "down": 5000, "up": 400, "late": 0.0, "left_out": ""}
    sites = {"ann": site | {"node": 1}, "bob": site | {"missed": 2, "node": 2, "left_out": "no reply"}}
    words = {"state": "running", "why": "", "round": 4, "rounds": 20, "seconds": 61.5, "sites": sites}
    status.write(out, words | {"scores": {"round": 3, "means": {"test/accuracy/own": 0.75}}})
    return tmp_path


@pytest.fixture
def runs(monkeypatch, home):
    (home / "link.json").write_text(json.dumps({"address": "127.0.0.1:8000", "ca": "", "pid": os.getpid()}))
    monkeypatch.setattr(superlink, "is_alive", lambda started: True)


def test_a_site_is_online_while_it_gives_signs_of_life(home, runs):
    now = status.read(home)
    assert {name: site["online"] for name, site in now["sites"].items()} == {
        **{"ann": True, "bob": False, "eve": False, "new": False}
    }
    assert now["sites"]["bob"]["left_out"] == "no reply"
    assert now["run"]["state"] == "running"
    assert now["superlink"] == {"address": "127.0.0.1:8000", "running": True}


def test_a_superlink_that_has_stopped_has_no_site_online(home):
    assert not any(site["online"] for site in status.read(home)["sites"].values())


@pytest.mark.parametrize(("age", "pid"), [(500, os.getpid()), (0, 2**22 + 1)], ids=["silent", "ended"])
def test_a_run_whose_process_is_gone_has_stopped(home, age, pid):
    path = home / "first" / status.FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"at": time.time() - age, "pid": pid}))
    assert status.read(home)["run"]["state"] == "stopped"


def test_a_server_without_runs_says_so(tmp_path, capsys):
    assert main(["flower", "status", "--home", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"no SuperLink of {tmp_path} is running; start it: kinfed flower up",
        "no run has begun yet",
    ]


def test_the_status_on_screen_and_as_json(home, runs, capsys):
    assert main(["flower", "status", "--home", str(home)]) == 0
    text = capsys.readouterr().out
    assert f"the run in {home / 'first'}: running, round 4 of 20, 62 s" in text
    assert "after round 3: test/accuracy/own 0.75" in text
    (ann,) = [line.split() for line in text.splitlines() if line.startswith("ann")]
    assert ann == ["ann", "online", "3", "0", "5", "kB", "400", "B"]
    assert "bob was left out: no reply" in text
    assert main(["flower", "status", "--home", str(home), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["round"] == 4


def scraped(port):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            return {(s.name, *s.labels.values()): s.value for family in parsed(text) for s in family.samples}
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody answers")


def test_what_prometheus_scrapes(home, runs):
    found = {
        (f"kinfed_{key}" if isinstance(key, str) else key): value
        for family in metrics.Federation(home).collect()
        for key, value in (((s.name, *s.labels.values()), s.value) for s in family.samples)
    }
    assert found["kinfed_site_online", "ann"] == 1
    assert found["kinfed_site_online", "bob"] == 0
    assert found["kinfed_site_left_out", "bob"] == 1
    assert found["kinfed_site_down_bytes", "ann"] == 5000
    assert ("kinfed_site_used_rounds", "new") not in found
    assert found["kinfed_round",] == 4
    assert found["kinfed_run_state", "running"] == 1
    assert found["kinfed_score", "test", "accuracy", "own"] == 0.75


def test_metrics_are_served_on_this_machine_and_end_with_down(home):
    port, said = free_port(), []
    superlink.measure(home, port, said.append)
    try:
        assert scraped(port)["kinfed_superlink_up",] == 0
        assert said == [f"metrics for Prometheus are at http://127.0.0.1:{port}/metrics, on this machine only"]
    finally:
        with pytest.raises(UsageError, match="no SuperLink"):
            superlink.down(home, print)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_a_port_that_is_taken_is_refused(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="is in use; choose another for --metrics"):
            superlink.measure(home, taken.getsockname()[1], print)
    with pytest.raises(UsageError, match="must be a port, 1 to 65535; got 70000"):
        superlink.measure(home, 70000, print)


def test_a_run_writes_down_how_it_is_doing(trial):
    trial = trial("fedaghn", rounds=3, deadline=0.5)
    trial.grid.faults["b", 3] = lambda answer: None
    trial.serve()
    words = json.loads((trial.folder / "out" / status.FILE).read_text())
    assert (words["state"], words["round"], words["rounds"]) == ("finished", 3, 3)
    assert words["sites"]["a"]["rounds"] == 3
    assert words["sites"]["b"]["rounds"] == 2
    assert words["sites"]["b"]["missed"] == 1
    summary = json.loads((trial.folder / "out" / "summary.json").read_text())
    assert words["sites"]["a"]["down"] == summary["bytes_by_client"]["a"]["down"]


def test_a_run_that_fails_writes_down_why(trial, monkeypatch):
    trial = trial("fedavg", rounds=3)

    def fail(*_, **__):
        raise RunError("the disk is full")

    monkeypatch.setattr(server, "summarise", fail)
    with pytest.raises(RunError, match="disk"):
        trial.serve()
    words = json.loads((trial.folder / "out" / status.FILE).read_text())
    assert (words["state"], words["why"]) == ("failed", "the disk is full")


@pytest.mark.slow
@pytest.mark.needs("prometheus", "prometheus")
def test_prometheus_shows_within_a_minute_that_a_site_was_killed(tmp_path):
    import numpy as np

    home, port, ask, nodes = tmp_path / "home", free_port(), free_port(), []
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 5s}}\nscrape_configs: [{{job_name: kinfed, static_configs: "
        f'[{{targets: ["127.0.0.1:{port}"]}}]}}]\n'
    )
    kinfed = [sys.executable, "-m", "kinfed", "flower"]

    def value(site):
        url = f"http://127.0.0.1:{ask}/api/v1/query?query=kinfed_site_online{{site=%22{site}%22}}"
        try:
            found = json.load(urllib.request.urlopen(url, timeout=5))["data"]["result"]
        except OSError:
            return None
        return float(found[0]["value"][1]) if found else None

    def wait(site, wanted, seconds):
        began = time.monotonic()
        while value(site) != wanted:
            assert time.monotonic() - began < seconds, (site, value(site))
            time.sleep(1)
        return time.monotonic() - began

    def start(*command, **how):
        nodes.append(subprocess.Popen([*command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    subprocess.run([*kinfed, "keys", "keys", "ann", "bob"], cwd=tmp_path, check=True)
    try:
        up = ["up", "--home", home, "--keys", "keys", "--port", str(free_port()), "--metrics", str(port)]
        subprocess.run([*kinfed, *up], cwd=tmp_path, check=True)
        address = json.loads((home / "link.json").read_text())["address"]
        for site in ("ann", "bob"):
            np.savez(tmp_path / f"{site}.npz", x=np.zeros((9, 2), np.float32), y=np.arange(9) % 2)
            start(*kinfed, "node", site, "--data", f"{site}.npz", "--server", address, "--keys", f"keys/sites/{site}")
        start(shutil.which("prometheus"), f"--web.listen-address=127.0.0.1:{ask}", "--config.file=prometheus.yml")
        wait("ann", 1, 300)  # nodes start slowly on a machine that is busy with other work
        wait("bob", 1, 300)
        nodes[1].kill()
        print(f"\na killed site is shown as lost after {wait('bob', 0, 60):.0f} s")  # docs/deploy.md has it: pytest -s
        assert value("ann") == 1
    finally:
        for one in nodes:
            one.terminate()
            one.wait()
        subprocess.run([*kinfed, "down", "--home", home], cwd=tmp_path, check=False)
