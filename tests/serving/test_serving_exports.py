"""Folders of ONNX exports answer as the run that they are of."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import polars
import pytest
import requests

import kinfed
from kinfed.cli import main
from kinfed.cli.predict import opened
from kinfed.serving.requests import answer

CSV, JSON = "text/csv", "application/json"


def alike(found, expected):
    """Whether answers are the same, numbers to 1e-5 of the largest."""
    assert found.columns == expected.columns
    for name in found.columns:
        if found[name].dtype.is_float():
            largest = max(1.0, expected[name].abs().max())
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-5 * largest)
        else:
            assert found[name].to_list() == expected[name].to_list()


def test_exports_answer_a_table_as_the_run_does(shops, exported):
    """Also cells that are missing, text that no training row had, and columns that are not known."""
    run, (models, method) = opened(shops / "run")[0], opened(exported)
    assert (method, models.names) == ("knn-per", run.names)
    body = (shops / "shops.csv").read_bytes()
    lines = b"shop,kind,age,seen,more\nshop 2,strange,,2024-02-29,1\nshop 5,,31,,2\n"
    for asked in (body, lines):
        alike(answer(models, asked, CSV).frame, answer(run, asked, CSV).frame)
        alike(answer(models.of_client("shop 3"), asked, CSV).frame, answer(run.of_client("shop 3"), asked, CSV).frame)
    assert answer(models, lines, CSV).ignored == ["more"]


def test_exports_answer_series_and_counts_as_the_run_does(tmp_path):
    draw = np.random.default_rng(0)
    levels = "".join(
        f"{who},{np.datetime64('2024-01-01') + day},{'' if day % 9 == 4 else f'{1000 * i + 30 * draw.normal():.2f}'}\n"
        for i, who in enumerate(("a", "b"))
        for day in range(90)
    )
    (tmp_path / "levels.csv").write_text("who,day,level\n" + levels)
    sold = "".join(f"{'ab'[i % 2]},{draw.normal():.3f},{draw.poisson(3)}\n" for i in range(80))
    (tmp_path / "sold.csv").write_text("who,price,sold\n" + sold)
    small = ["--client", "who", "--method", "local", "rounds=1", "--beside", "none", "--quiet"]
    series = ["--target", "level", *(f"federation.dataset.{one}" for one in ("time=day", "past=4", "horizon=2"))]
    for name, words in (("levels", series), ("sold", ["--target", "sold", "federation.dataset.counts=true"])):
        out, table = tmp_path / name, tmp_path / f"{name}.csv"
        assert main(["run", str(table), *words, *small, "--out", str(out)]) == 0
        assert main(["export", str(out), "--out", str(out / "onnx")]) == 0
        run, models = kinfed.load_run(out).predictor(), opened(out / "onnx")[0]
        alike(answer(models, table.read_bytes(), CSV).frame, answer(run, table.read_bytes(), CSV).frame)


def test_exports_answer_arrays_as_the_run_does(tmp_path):
    small = ["rounds=1", "federation.clients=4", "federation.partition.groups=2", "training.epochs=1", "--quiet"]
    assert main(["run", "local", *small, "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--client", "2", "--out", str(tmp_path / "one")]) == 0
    run, models = opened(tmp_path / "run")[0], opened(tmp_path / "one")[0]
    assert len(models.names) == 1
    x = np.random.default_rng(0).normal(size=(3, *run.shape)).round(3)
    asked = json.dumps({"x": x.tolist()}).encode()
    one = models.names[0]
    alike(answer(models.of_client(one), asked, JSON).frame, answer(run.of_client(one), asked, JSON).frame)


def test_a_server_of_exports_answers_by_http(shops, exported):
    command = [sys.executable, "-m", "kinfed", "serve", str(exported), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        try:
            address = json.loads(served.stdout.readline())["address"]
            assert requests.get(f"{address}/health").json() == {"status": "ok", "method": "knn-per", "clients": 6}
            assert requests.get(f"{address}/clients").json()["clients"] == [f"shop {i}" for i in range(6)]
            rows = [{"age": 31, "kind": "new", "seen": "2024-03-02"}, {"age": None, "kind": None, "seen": None}]
            (got, other) = requests.post(f"{address}/predict/shop 4", json={"rows": rows}).json()["answers"]
            expected = answer(opened(shops / "run")[0].of_client("shop 4"), json.dumps({"rows": rows}).encode(), JSON)
            alike(polars.DataFrame([got, other]), expected.frame)
            wrong = requests.post(f"{address}/predict/shop4", json={"rows": rows})
            assert (wrong.status_code, "did you mean 'shop 4'?" in wrong.json()["error"]) == (404, True)
            assert "kinfed_rows_total 2.0" in requests.get(f"{address}/metrics").text
            served.send_signal(signal.SIGTERM)
            assert served.wait(20) == 0
            assert served.stderr.read() == "stopped\n"
        finally:
            served.kill()


def spoilt(path):
    path.write_bytes(path.read_bytes() + b" ")


def other_run(path):
    """As if the file were of another run, and its card too."""
    import hashlib

    import onnx

    model = onnx.load(path)
    for one in model.metadata_props:
        one.value = one.value.replace('"identity": "', '"identity": "x') if one.key == "run" else one.value
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    onnx.save(model, path)
    card = path.with_name(f"{path.name}.md")
    card.write_text(card.read_text().replace(before, hashlib.sha256(path.read_bytes()).hexdigest()))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoilt, "shop 3.onnx is not the file of which shop 3.onnx.md has the SHA-256; copy the whole folder again"),
        (lambda path: path.with_name("shop 3.onnx.md").unlink(), "has no card shop 3.onnx.md beside it"),
        (lambda path: path.with_name("shop 3.onnx.md").write_bytes(b"\xff"), "can't decode byte"),
        (other_run, "shop 3.onnx is of another run than shop 0.onnx; export each run into a folder of its own"),
    ],
)
def test_exports_that_do_not_belong_together_are_refused_in_one_line(spoil, why, exported, tmp_path, capsys):
    for path in (*exported.glob("shop 0*"), *exported.glob("shop 3*")):
        shutil.copy(path, tmp_path)
    spoil(tmp_path / "shop 3.onnx")
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert (why in err, err.count("\n")) == (True, 1), err


def test_a_folder_of_other_formats_is_refused_in_one_line(shops, tmp_path, capsys):
    for kind in ("pt2", "safetensors"):
        asked = ["export", str(shops / "run"), "--client", "shop 3", "--format", kind, "--out", str(tmp_path)]
        assert main(asked) == 0
    capsys.readouterr()
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "holds pt2 and safetensors only, and exports answer as ONNX: kinfed export RUN --format onnx" in err
    assert err.count("\n") == 1
