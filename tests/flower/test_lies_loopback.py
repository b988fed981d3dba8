"""Lies in separate processes over TLS: a server's program that lies to honest sites, and a site that lies to the rest.

The program that lies is kinfed's own, which a module beside it changes as it starts.
"""

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

NAMES = ("ann", "bob", "eve")
PLAN = {
    "rounds": 2,
    "method": "fedavg",
    "model": "linear",
    "training": {"epochs": 1, "batch": 16},
    "flower": {"clients": 2, "beside": [], "deadline": 5.0, "patience": 8.0},
}
LIAR = '''
import importlib.abc
import importlib.machinery
import os
import sys

DRAWN = "\\x1b[2J\\nkinfed: done"


def lie(fields, arrays):
    """Change what is packed, as the environment says."""
    wanted = os.environ["LIE"]
    if "agreed" in fields and "layout" not in fields:  # a description is asked for
        if wanted == "columns":
            fields["agreed"]["inputs"][0] = ["sick", "number"]
        if wanted == "classes":
            fields["agreed"]["classes"] = ["1"]
        if wanted == "characters":
            fields["agreed"]["inputs"][0] = [DRAWN, "number"]
    if "description" in fields and wanted == "scales":
        fields["description"]["inputs"][0]["deviation"] = float("nan")
    if "layout" in fields and wanted == "experiment":
        fields["experiment"] = "../../" + fields["experiment"]
    if "train" in fields and wanted == "numbers":
        arrays = {name: t * float("nan") if t.is_floating_point() else t for name, t in arrays.items()}
    if "statistics" in fields and wanted == "statistics":
        fields["statistics"]["age"].update(mean=1e308, present=-1)
    if "scores" in fields and wanted == "scores":
        fields["scores"] = [[DRAWN, "test", "accuracy", 7.0]]
    if "upload" in fields and wanted == "upload":
        arrays = {name: t[:0] for name, t in arrays.items()}
    return fields, arrays


class Liar(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "kinfed_flower.wire.transport":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def load(module):
            run(module)
            pack = module.pack
            module.pack = lambda message: pack(type(message)(*lie(*message)))

        spec.loader.exec_module = load
        return spec


sys.meta_path.insert(0, Liar())
'''


@pytest.fixture
def network(tmp_path, free_port):
    """Starts what a command line of `kinfed flower` names, honest or with a lie; all of it ends with the test."""
    program, started, port = str(Path(sys.executable).parent / "kinfed"), {}, free_port()
    (tmp_path / "liar").mkdir()
    (tmp_path / "liar" / "sitecustomize.py").write_text(LIAR)
    honest = {**os.environ, "KINFED_FLOWER_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def begin(*arguments, lie="", **how):
        environment = honest | ({"LIE": lie, "PYTHONPATH": str(tmp_path / "liar")} if lie else {})
        return subprocess.Popen([program, "flower", *arguments], env=environment, cwd=tmp_path, text=True, **how)

    def start(name, lie=""):
        site = ["node", name, "--data", f"{name}.csv", "--target", "sick", "--server", f"127.0.0.1:{port}"]
        site += ["--keys", f"keys/sites/{name}", "--state", "states", "--policy", "rules.toml", "--device", "cpu"]
        started[name] = begin(*site, lie=lie, stderr=(tmp_path / f"{name}.log").open("a"))

    for i, name in enumerate(NAMES):
        draw = np.random.default_rng(i)
        lines = [f"{draw.normal(60, 9):.4f},kind-{draw.integers(3)},{draw.integers(2)}" for _ in range(90)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,kind,sick", *lines]) + "\n")
    (tmp_path / "rules.toml").write_text('runs = "any"\n')
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(PLAN))
    assert begin("keys", "keys", *NAMES, stderr=subprocess.DEVNULL).wait(60) == 0
    assert begin("up", "--keys", "keys", "--port", str(port), stderr=subprocess.DEVNULL).wait(120) == 0
    try:
        yield begin, start, started
    finally:
        for process in started.values():
            process.send_signal(signal.SIGINT)
        for process in started.values():
            process.wait(60)
        begin("down", stderr=subprocess.DEVNULL).wait(60)


def lines_of(path, before=0):
    """The lines that a site has told, of which none is raw."""
    lines = path.read_text().splitlines()[before:]
    assert not [line for line in lines if "Traceback" in line or "unexpected" in line or not line.isprintable()]
    return lines


def test_a_server_that_lies_over_tls_gets_a_line_and_the_honest_run_after_it_is_trained(network, tmp_path):
    begin, start, _ = network
    for name in NAMES[:2]:
        start(name)
    told = {
        "columns": "asks for column 'sick', which stays here",
        "classes": "the server leaves out classes that this site has",
        "characters": "kinfed: done",
        "scales": "the server's description of the columns cannot be used",
        "experiment": "an experiment's name consists of letters",
        "numbers": "holds NaN or infinity",
    }
    for lie, why in told.items():
        before = len(lines_of(tmp_path / "ann.log")) if (tmp_path / "ann.log").exists() else 0
        run = begin("run", "plan.toml", "--out", lie, lie=lie, stderr=subprocess.PIPE)
        said = run.communicate(timeout=200)[1]
        assert run.returncode in (1, 2), (lie, said)
        assert "Traceback" not in said
        assert "unexpected" not in said
        lines = lines_of(tmp_path / "ann.log", before)
        assert any(why in line for line in lines), (lie, said, lines)
        assert not [*(tmp_path / "states").rglob("model.safetensors")], lie
    run = begin("run", "plan.toml", "--out", "honest", stderr=subprocess.PIPE)
    said = run.communicate(timeout=200)[1]
    assert run.returncode == 0, said
    summary = json.loads((tmp_path / "honest" / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert summary["by_client"]["names"] == ["ann", "bob"]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("statistics", "left client eve out: it sent no statistics"),
        ("scores", "eve"),
        ("upload", "left client eve out: "),
    ],
)
def test_a_site_that_lies_over_tls_is_named_and_ends_no_run(network, tmp_path, lie, why):
    begin, start, _ = network
    for name in NAMES:
        start(name, lie if name == "eve" else "")
    while not all("is connected" in (tmp_path / f"{name}.log").read_text() for name in NAMES):
        time.sleep(0.5)  # until all are connected, as a run of two may begin without eve
    run = begin("run", "plan.toml", "--out", "run", stderr=subprocess.PIPE)
    said = run.communicate(timeout=200)[1]
    assert run.returncode == 0, said
    assert why in said
    assert all(line.isprintable() for line in said.splitlines())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"ann", "bob"} <= {*summary["by_client"]["names"]}
    assert summary["rounds"] == 2
