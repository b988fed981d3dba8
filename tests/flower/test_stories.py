"""The stories of examples/own_data over three sites: every command of their pages, as a reader would type it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kinfed.cli import main
from kinfed.cli.program import parser_of
from kinfed.runs.config import experiment
from kinfed_flower import plan
from kinfed_flower.programs import cli as flower
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site

STORIES = Path(__file__).parents[2] / "examples" / "own_data"
EACH = ("shops", "sensors", "patients")


def page(story):
    """The commands that cut the story's file, then those of its three sites, each with the lines that it shows."""
    alone, sites = (STORIES / story / "README.md").read_text().split("## Over three sites")
    cut = re.findall(r"\$ (awk .*)", alone)
    shown = {}
    for block in re.findall(r"```console\n(.*?)```", sites, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                command = line.removeprefix("$ ")
                shown[command] = []
            else:
                shown[command].append(line)
    return cut, shown


def prepare(story, monkeypatch, tmp_path):
    """Make the story's files in a folder, and run the page's commands that are not kinfed's."""
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, STORIES / story / "make.py"], check=True)
    cut, shown = page(story)
    for command in [*cut, *(one for one in shown if not one.startswith("kinfed"))]:
        subprocess.run(command, shell=True, check=True)
    return shown


def nodes(shown):
    """The arguments of each node that takes part, by its name."""
    parser, found = parser_of("flower"), {}
    for command in shown:
        if " node " in command and "--check" not in command:
            args, settings = parser.parse_known_args(shlex.split(command.removesuffix(" &"))[1:])
            args.overrides += settings  # those behind an option
            assert args.keys == Path("keys/sites") / args.site
            found[args.site] = args
    return found


@pytest.mark.parametrize("story", ["shops", pytest.param("sensors", marks=pytest.mark.slow)])
def test_sites_that_start_as_the_page_says_are_told_whether_kin_helped(story, tmp_path, monkeypatch, capsys):
    """Two rounds, without Flower between server and sites."""
    shown, told = prepare(story, monkeypatch, tmp_path), []
    for command, lines in shown.items():
        if "--check" in command:
            assert main(shlex.split(command)[1:]) == 0
            said = "".join(reversed(capsys.readouterr()))
            assert all(line in said for line in lines)
    sites = [
        Site(name, Path(args.data), args.state, "cpu", flower._reading(args), (), told.append, Policy(runs="any"))
        for name, args in nodes(shown).items()
    ]
    raw = experiment.read("plan.toml", ["rounds=2"])
    raw["flower"] |= {"beside": ["local", "fedavg"]}
    summary = serve(plan.resolve(raw), Here(sites), Path("sites"), log=lambda line: None, poll=0.0)
    assert summary.clients.names == [site.name for site in sites]
    assert summary.metric.name == "mae"
    assert summary.verdict["over"].keys() == {"alone", "pooled"}
    baselines = (" with the best baseline without others, ", " with one model for all. ")
    sentences = [line for line in told if all(name in line for name in baselines)]
    assert len(sentences) == 3


@pytest.mark.slow
@pytest.mark.parametrize("story", EACH)
def test_the_commands_of_a_page_train_three_sites_over_tls(story, tmp_path, monkeypatch, free_port):
    """The real thing with two rounds: each command as it stands, but for a port that is free."""
    shown = prepare(story, monkeypatch, tmp_path)
    monkeypatch.setenv("KINFED_FLOWER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    started, said, port = [], {}, free_port()
    Path("plan.toml").write_text(f"rounds = 2\n{Path('plan.toml').read_text()}")  # before anyone agrees to it
    try:
        for command in shown:
            if not command.startswith("kinfed") or command == "kinfed flower down":
                continue
            words = [*shlex.split(command.removesuffix(" &"))]
            words += ["--port", str(port)] if words[2] == "up" else []
            words += ["--server", f"127.0.0.1:{port}"] if words[2] == "node" else []
            words += ["--json"] if words[2] == "run" else []
            if command.endswith(" &"):
                with open(f"{words[3]}.log", "w") as log:
                    started.append(subprocess.Popen(words, stdout=log, stderr=log))
            else:
                done = subprocess.run(words, capture_output=True, text=True, timeout=1500, check=False)
                assert done.returncode == 0, done.stderr
                said[words[2]] = done.stdout
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(timeout=60)
        subprocess.run(["kinfed", "flower", "down"], check=True)
    summary = json.loads(said["run"])
    assert summary["by_client"]["names"] == [*nodes(shown)]
    assert summary["verdict"]["over"].keys() == {"alone", "pooled"}
    for name in summary["by_client"]["names"]:
        own = json.loads((Path("kinfed-site") / name / summary["sites"]["experiment"] / "verdict.json").read_text())
        assert own["scores"].keys() == {summary["method"], "alone", "fedavg"}
        assert own["sentence"] in " ".join(Path(f"{name}.log").read_text().split())
