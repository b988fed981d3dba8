"""kinfed list as a person uses it for data: which there are, how to get them, what is in them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image

from kinfed.cli import main
from kinfed.data.datasets import DATASETS


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    code = main(["list", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KINFED_DATA", raising=False)


def test_every_data_set_is_listed_with_how_to_come_by_it(capsys, publish, tmp_path):
    publish("mnist")
    assert run(capsys, "datasets", "--fetch", "mnist", "--data-dir", tmp_path)[0] == 0
    code, out, _ = run(capsys, "datasets", "--data-dir", tmp_path, "--json")
    rows = json.loads(out)
    assert code == 0
    assert list(rows) == list(DATASETS)
    ways = {name: rows[name]["status"] for name in ("digits", "mnist", "metr_la", "compcars", "dg60")}
    assert ways == {
        "digits": "built in",
        "mnist": "here",
        "metr_la": "--fetch",
        "compcars": "--fetch --from",
        "dg60": "your file",
    }
    assert rows["mnist"]["bytes"] == (tmp_path / "mnist.npz").stat().st_size
    assert all(row["what"] for row in rows.values())
    code, out, err = run(capsys, "datasets")
    assert "Images [n, 1, 28, 28] of 10 classes" in out
    assert "set KINFED_DATA or --data-dir" in err


def test_fetching_says_where_the_file_is_and_what_to_know_of_it(capsys, publish, tmp_path):
    publish("cifar10")
    publish("tpt48", checksums=False)
    code, out, err = run(
        capsys, "datasets", "--fetch", "cifar10", "tpt48", "--data-dir", tmp_path / "new[/d]", "--json"
    )
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == ["cifar10", "tpt48"]
    assert f"cifar10: {tmp_path / 'new[/d]' / 'cifar10.npz'}" in err
    assert "no checksum of climdiv-tmpcst-v1.0.0-20200106 is published" in err
    assert sorted(os.listdir(tmp_path / "new[/d]")) == ["checksums.json", "cifar10.npz", "tpt48.npz"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["datasets", "--fetch", "mnist"], 2, "no data directory: set KINFED_DATA or --data-dir"),
        (
            ["datasets", "--fetch", "mnst", "--data-dir", "d"],
            2,
            "there is nothing to fetch for 'mnst'; did you mean 'mnist'?",
        ),
        (
            ["datasets", "--fetch", "mnist", "svhn", "--data-dir", "d", "--from", "."],
            2,
            "--from holds the originals of one data set",
        ),
        (["datasets", "--fetch", "mnist", "--data-dir", "d"], 1, "answers 404 Client Error"),
        (
            ["datasets", "--fetch", "mnist", "--data-dir", "d", "--from", "."],
            1,
            "there is no train-images-idx3-ubyte.gz in",
        ),
        (["datasets", "digit"], 2, "there is no 'digit'; did you mean 'digits'?"),
        (["datasets", "mnist", "stride=3"], 2, "unknown key 'dataset.stride'"),
        (
            ["datasets", "mnist", "--out", "p.png", "--data-dir", "."],
            2,
            "get it with 'kinfed list datasets --fetch mnist'",
        ),
        (["datasets", "digits", "seed=3"], 2, "unknown key 'dataset.seed'"),
        (["nowhere.toml"], 2, "cannot read nowhere.toml"),
        (["datasets", "digits", "--out", "no/such/folder.png"], 1, "cannot write no/such/folder.png"),
    ],
)
def test_wrong_requests_end_in_one_line(arguments, code, said, capsys, publisher, tmp_path):
    found, out, err = run(capsys, *arguments)
    assert found == code
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert said in err
    assert {path.name for path in tmp_path.rglob("*")} <= {"d"}  # the data directory, empty


@pytest.mark.pictures
def test_inspecting_series_tells_gaps_missing_readings_and_links(capsys, tmp_path):
    values = np.arange(120.0).reshape(40, 3) + 1
    values[5:8, 1] = 0
    values[:, 2] = 7
    steps = np.r_[0:30, 50:60]
    np.savez(
        tmp_path / "metr_la.npz",
        values=values,
        adjacency=np.array([[1, 0.5, 0], [0, 1, 0], [0, 0, 1]]),
        start=np.array("2012-03-01"),
        time_index=steps,
    )
    arguments = ["datasets", "metr_la", "past=3", "horizon=2", "--data-dir", tmp_path]
    code, out, _ = run(capsys, *arguments, "--json", "--out", "metr_la.png")
    found = json.loads(out)["metr_la"]
    assert code == 0
    # Windows of 5 begin at 26 + 6 steps; the second series
    # lacks two of them for want of a target, and one for want of an input.
    assert found["examples"] == 3 * 32 - 2 - 1
    assert found["steps"] == "40 with 1 gap, windows of 5"
    assert found["missing readings"] == "2.50 %, at most 7.50 % of a client's"
    assert found["graph"] == "given, 1 one-way link between different clients, 1 client without any"
    assert found["clients"] == "3, 29 to 32 examples each"
    assert found["picture"] == "metr_la.png"
    assert Image.open("metr_la.png").size[0] > 500
    before = set(Path().iterdir())
    _, out, _ = run(capsys, *arguments)
    assert set(Path().iterdir()) == before  # no picture unasked
    assert out.startswith("metr_la")
    assert "7.50 %" in out


def test_inspecting_an_experiment_tells_what_is_really_used(capsys, tmp_path):
    (tmp_path / "x.toml").write_text(
        'federation = { dataset = "digits", clients = 5, partition = "iid" }\nmodel = "mlp"\nmethod = "local"\n'
    )
    code, out, _ = run(capsys, "x.toml", "federation.split.examples=100", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["federation"] == "5 clients"
    assert [found[f"  {split}"] for split in ("train", "validation", "test")] == [
        "350 examples, 70 per client",
        "50 examples, 10 per client",
        "100 examples, 20 per client",
    ]
    assert found["examples"] == 1797


@pytest.mark.pictures
@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_pictures_of_images_and_points(name, capsys):
    picture = Path("/".join(["folder"] * 20)) / "p.png"  # longer than a line, and not cut
    picture.parent.mkdir(parents=True)
    code, out, _ = run(capsys, "datasets", name, "--out", picture)
    assert code == 0
    assert str(picture) in "".join(out.split())
    pixels = np.asarray(Image.open(picture).convert("L"))
    assert pixels.std() > 5  # something was drawn


def test_from_an_empty_folder_to_a_papers_table(capsys, publish, tmp_path, monkeypatch):
    """What a new user types: fetch, look, run, and rebuild a column."""
    publish("tpt48")
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("KINFED_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("kinfed_papers.published_table.LEAST_ROUNDS", 2)
    assert run(capsys, "datasets", "--fetch", "tpt48")[0] == 0
    code, out, _ = run(capsys, "papers/panacea/table2/tpt48")
    assert code == 0
    assert "48 clients" in out
    assert main(["run", "papers/panacea/table2/tpt48", "rounds=2", "evaluate_every=2", "--out", "one"]) == 0
    assert "panacea on tpt48: 48 clients" in capsys.readouterr().err
    asked = ["papers", "run", "panacea.table2", "--method", "fedavg,panacea", "--column", "tpt48"]
    assert main([*asked, "--seeds", "1", "--scale", "0.001", "--out", "table"]) == 0
    page = (tmp_path / "table" / "table.md").read_text()
    assert page.count(", scaled 0.001 |") == 2
    assert "$ kinfed papers run panacea.table2 --method fedavg,panacea --column tpt48 --seeds 1 --scale 0.001" in page


def test_ctrl_c_keeps_what_has_arrived_and_the_same_command_goes_on(capsys, publish, publisher, tmp_path, monkeypatch):
    publish("mnist")

    def broken_off(answer, size):
        yield answer.raw.read(100)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(requests.Response, "iter_content", broken_off)
        code, _, err = run(capsys, "datasets", "--fetch", "mnist", "--data-dir", tmp_path)
    assert code == 130
    assert err.strip().endswith("interrupted; run the same command again to resume")
    assert not (tmp_path / "mnist.npz").exists()
    assert run(capsys, "datasets", "--fetch", "mnist", "--data-dir", tmp_path)[0] == 0
    assert "bytes=100-" in [part for _, part in publisher.asked]
    assert os.listdir(tmp_path) == ["mnist.npz"]
