"""The examples run, as a reader would run them, only shorter."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kinfed
from kinfed.cli import main
from kinfed.methods import FedAvg, Local

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["known_graph", "own_data", "own_method"])
def test_an_example_runs_and_says_what_it_found(name, capsys):
    load(name).main(rounds=2)
    said = capsys.readouterr().out.splitlines()
    assert len(said) >= 2
    assert all(": " in line or line.startswith(("shop", "its own")) for line in said)


def test_the_first_run_compares_ten_methods_and_continues_where_it_was_interrupted(tmp_path, capsys):
    first = load("first_run")
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"first_run", "known_graph", "own_data", "own_method"}
    small = ("rounds=1", "federation.clients=4", "training.epochs=1")
    first.main(tmp_path, small)
    for name in ("local", "pfedgraph"):
        (tmp_path / name / "summary.json").unlink()
    before = {name: (tmp_path / name / "summary.json").stat().st_mtime_ns for name in first.METHODS[1:-1]}
    capsys.readouterr()
    first.main(tmp_path, small)
    said = capsys.readouterr().out
    assert [line.split()[2] for line in said.splitlines() if line.startswith("$")] == ["resume"] * 2 + [
        "compare",
        "report",
    ]
    assert before == {name: (tmp_path / name / "summary.json").stat().st_mtime_ns for name in before}
    assert all(f"\n{name} " in said for name in first.METHODS)
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "kin" / "relation.png").exists()


def test_the_example_of_a_method_is_local_at_one_end_and_fedavg_at_the_other():
    method = load("own_method").StayHome
    torch.manual_seed(0)
    x, client, network = torch.randn(120, 4), torch.arange(120) % 3, torch.nn.Linear(4, 2)
    federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    for share, other, model in ((0.0, Local(), "own"), (1.0, FedAvg(), "between")):
        one = kinfed.fit(method(share), federation, network, rounds=3)
        two = kinfed.fit(other, federation, network, rounds=3)
        torch.testing.assert_close(one.history.test(model), two.history.test(two.history.headline))


STORIES = {
    "shops": (["day", "article", "price", "weather"], "shops"),
    "sensors": (None, "levels"),
    "patients": (["admitted", "age", "pressure", "marker", "ward", "note"], "plain"),
}


@pytest.mark.parametrize("story", STORIES)
def test_the_page_of_a_story_says_what_its_commands_say(story, tmp_path, monkeypatch, capsys):
    """Every command of the page, in its order, but with two rounds."""
    columns, out = STORIES[story]
    page = EXAMPLES / "own_data" / story / "README.md"
    alone = page.read_text().partition("## Over three sites")[0]  # the rest: tests/flower/test_stories.py
    blocks = re.findall(r"```console\n(.*?)```", alone, re.DOTALL)
    shown = {block.splitlines()[0].removeprefix("$ "): block.splitlines()[1:] for block in blocks}
    monkeypatch.chdir(tmp_path)
    make, inspect, run, *others, cut = shown
    subprocess.run([sys.executable, EXAMPLES.parent / make.split()[1]], check=True)
    head, *lines = shown[make]
    assert Path(head.split()[-1]).read_text().splitlines()[: len(lines)] == lines
    assert main(shlex.split(inspect)[1:]) == 0
    said = " ".join("".join(reversed(capsys.readouterr())).split())
    for line in shown[inspect]:
        assert " ".join(line.split()) in said
    for command in (run, *others):
        name, table, *options = shlex.split(command)[1:]
        assert main([name, table, "rounds=2", *options, "--quiet"]) == 0
    summary = json.loads(Path(out, "summary.json").read_text())
    assert summary["verdict"]["sentence"]
    if columns:
        assert [column["name"] for column in summary["data"]["columns"]["inputs"]] == columns
    subprocess.run(cut, shell=True, check=True)
    rows = [Path(f"{name}.csv").read_text().splitlines() for name in summary["by_client"]["names"]]
    whole = Path(head.split()[-1]).read_text().splitlines()
    assert {one[0] for one in rows} == {whole[0]}
    assert sorted(row for one in rows for row in one[1:]) == sorted(whole[1:])


def test_one_command_without_an_edit_goes_from_a_raw_file_to_a_verdict(tmp_path):
    """What the page's table counts, with two rounds."""
    found = load("own_data/count").count("sensors", tmp_path, ["rounds=2"])
    assert found[:4] == ("sensors", 1, 0, 0)
    assert found.verdict != "none"
