"""Masks in separate processes: ten sites over TLS with signed keys, of which two are killed and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tomli_w

pytestmark = pytest.mark.slow

NAMES = [f"site{i}" for i in range(10)]
PLAN = {
    "rounds": 4,
    "method": "fedavg",
    "model": {"name": "mlp", "hidden": [8]},
    "privacy": {"masked": True, "members": 6},
    "flower": {"clients": 10, "deadline": 20.0, "beside": [], "classes": 2},
}


@pytest.fixture
def federation(tmp_path, free_port):
    """Starts what a command line of `kinfed flower` names, in a folder of its own; all of it ends with the test."""
    environment = {**os.environ, "KINFED_FLOWER_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    program, started, port = str(Path(sys.executable).parent / "kinfed"), {}, free_port()

    def begin(*arguments, **how):
        command = [program, "flower", *map(str, arguments)]
        return subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, **how)

    def start(name):
        site = ["node", name, "--data", f"{name}.npz", "--server", f"127.0.0.1:{port}", "--device", "cpu"]
        site += ["--keys", f"keys/sites/{name}", "--state", "states", "--policy", "rules.toml", "--few-rows"]
        started[name] = begin(*site, stderr=subprocess.DEVNULL)

    assert begin("keys", "keys", *NAMES, stderr=subprocess.DEVNULL).wait(60) == 0
    (tmp_path / "rules.toml").write_text('runs = "any"\nmasked = "required"\nmembers = "keys/members.txt"\n')
    assert begin("up", "--keys", "keys", "--port", port, stderr=subprocess.DEVNULL).wait(120) == 0
    try:
        for i, name in enumerate(NAMES):
            draw = np.random.default_rng(i)
            x = draw.normal(size=(40 + i, 6)).astype(np.float32)
            np.savez(tmp_path / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
            start(name)
        yield begin, start, started
    finally:
        for process in started.values():
            process.send_signal(signal.SIGINT)
        for process in started.values():
            process.wait(60)
        begin("down", stderr=subprocess.DEVNULL).wait(60)


def test_ten_sites_over_tls_go_on_when_members_are_killed(federation, tmp_path):
    begin, start, started = federation
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(PLAN))
    run, lines, gone = begin("run", "plan.toml", "--out", "run", stderr=subprocess.PIPE), [], 0.0
    for line in run.stderr:
        lines.append(line)
        if line.startswith("round 1 of") and not gone:
            for name in NAMES[:2]:
                started[name].kill()
                started[name].wait()
            gone = time.monotonic()
        if gone and line.startswith("round 2 of"):
            for name in NAMES[:2]:
                start(name)
    assert run.wait(60) == 0, lines
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 4
    rows = [line.split(",") for line in (tmp_path / "run" / "bytes.csv").read_text().splitlines()[1:]]
    used = [sum(flag == "1" and round == str(number) for _, round, *_, flag in rows) for number in range(1, 5)]
    assert used[:2] == [10, 8]
    assert min(used) >= 8
    kept = [p for top in ("home", "run", "states") for p in (tmp_path / top).rglob("*") if p.is_file()]
    assert kept
    assert not [path for path in kept if b"upload/theta" in path.read_bytes()]
