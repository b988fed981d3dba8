"""Columns by what is public of them: no row has a say in how rows become inputs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import kinfed
from kinfed.cli import main
from kinfed.data.tables.columns import Unused
from kinfed.data.tables.public_columns import describe_publicly, is_public
from kinfed.data.tables.table_reader import TableReader

READER = TableReader(client="site", target="cost")
PUBLIC = {"age": [0, 100], "ward": ["x", "y"], "cost": [0, 40]}


def write(path, changed=False):
    draw = np.random.default_rng(0)
    lines = ["site,age,ward,cost"]
    for i in range(240):
        age = "9999" if changed and i == 3 else f"{draw.uniform(20, 90):.1f}"
        lines.append(f"s{i % 6},{age},{draw.choice(['x', 'y', 'z'])},{draw.uniform(5, 35):.2f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_inputs_and_targets_are_scaled_by_public_ranges_by_hand(tmp_path):
    dataset = describe_publicly(READER.read(write(tmp_path / "t.csv")), PUBLIC)
    scaled = dataset.prepare(dataset, torch.arange(240))
    places = {name: i for i, name in enumerate(scaled.columns.names)}
    torch.testing.assert_close(scaled.x[:, places["age"]], ((dataset.x[:, 0] - 50) / 25).float())
    assert (scaled.task.mean, scaled.task.deviation) == ((20.0,), (10.0,))
    assert (scaled.task.low, scaled.task.high) == ((0.0,), (40.0,))
    assert is_public(scaled.columns, PUBLIC)


def test_no_row_changes_how_rows_become_inputs(tmp_path):
    described = [
        describe_publicly(READER.read(write(tmp_path / "t.csv", changed)), PUBLIC).columns for changed in (False, True)
    ]
    assert described[0] == described[1]
    assert not is_public(kinfed.from_csv(tmp_path / "t.csv", client="site", target="cost").columns, PUBLIC)


def command(tmp_path, *settings):
    table = str(write(tmp_path / "t.csv"))
    asked = ["run", table, "--client", "site", "--target", "cost", "--method", "private-pooling", "--beside", "none"]
    return [*asked, "rounds=2", "privacy.epsilon=8", "privacy.unit=client", *settings]


def test_columns_that_are_public_as_something_else_are_not_scaled_publicly(tmp_path):
    dataset = describe_publicly(READER.read(write(tmp_path / "t.csv")), PUBLIC)
    for other in ({"age": ["young", "old"]}, {"age": [0, 99]}, {"ward": ["x"]}, {"ward": [0, 1]}):
        assert not is_public(dataset.columns, PUBLIC | other)
    assert not is_public(dataset.columns, {"age": [0, 100]})
    without_use = replace(dataset.columns, inputs=(*dataset.columns.inputs, Unused("note", "different in every row")))
    assert is_public(without_use, PUBLIC)


def test_a_simulation_with_public_columns_warns_of_no_statistics(tmp_path, capsys):
    public = 'privacy.columns={age=[0,100],ward=["x","y"],cost=[0,40]}'
    for settings, warned in (([], True), ([public], False)):
        out = tmp_path / f"warned {warned}"
        assert main(command(tmp_path, *settings, "--out", str(out))) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert ("which the epsilon does not cover" in said) == warned
        assert ("scaled by the ranges of privacy.columns" in said) != warned
        assert bool(json.loads((out / "summary.json").read_text())["warnings"]) == warned


@pytest.mark.parametrize(
    ("public", "settings", "why"),
    [
        ("{age=[0,100]}", [], "it lacks ward, cost; give the least and the largest number"),
        ('{age=["a"],ward=["x"],cost=[0,1]}', [], "privacy.columns.age must be the least and the largest number"),
        ('{age=[0,9],ward=["x"],cost=[0,1]}', ["scale=client"], "takes clients' own rows, which have no price"),
    ],
)
def test_what_cannot_be_described_publicly_is_refused_in_a_line(tmp_path, capsys, public, settings, why):
    how = [*settings, f"privacy.columns={public}", "--out", str(tmp_path / "o")]
    assert main(command(tmp_path, *how)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
