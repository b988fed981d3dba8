"""Tables as they are at sites: what is told of them, and the same description, examples and models as all rows give."""

import csv
import hashlib
import io
import json
import math
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kinfed
from kinfed import UsageError
from kinfed.cli import main
from kinfed.cli.predict import open_predictor
from kinfed.core.engine import Rounds
from kinfed.core.mixins import model_for
from kinfed.core.seeding import generator
from kinfed.core.tasks import Classification, Regression
from kinfed.data.graph_files import GraphFile
from kinfed.data.split import Split
from kinfed.data.tables import disclosure, open_table as reading
from kinfed.data.tables.column_statistics import NumberStatistics
from kinfed.data.tables.open_table import open_table
from kinfed.data.tables.schema import Description
from kinfed.errors import Fault
from kinfed.methods.solved.personal_boosting import PersonalBoosting
from kinfed.runs.config.experiment import resolve
from kinfed.runs.launch import launch
from kinfed.runs.prediction_intervals import find_half_widths
from kinfed.runs.run import Run
from kinfed.runs.run_folder import RunFolder
from kinfed.serving import joining_clients
from kinfed.serving.requests import answer
from kinfed_flower import plan
from kinfed_flower.programs.site_check import rehearse
from kinfed_flower.server.schema_negotiation import Describing
from kinfed_flower.server.validation import read_scores
from kinfed_flower.site import site_examples
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_files import ExperimentFolder
from kinfed_flower.site.site_predictor import predictor_at
from kinfed_flower.site.site_reading import Reading, names_of
from kinfed_flower.wire import messages
from kinfed_flower.wire.transport import unpack

KINDS = {"fruit": ("apple", "pear", "plum", "quince"), "level": ("low", "high")}
HEADING = ["weight", "fruit", "bought", "age", "sold", "kept"]


def table(seed, rows=120):
    """Rows of a site: numbers with holes, text with holes, dates, flags, and a target."""
    draw = np.random.default_rng(seed)
    weights = draw.normal(10 + seed, 2, rows)
    fruits = draw.choice(KINDS["fruit"][: 3 + seed % 2], rows)
    days = np.datetime64("2024-01-01") + draw.integers(0, 500, rows)
    ages = draw.integers(18, 60, rows)
    flags = draw.integers(0, 2, rows)
    sold = 3 * weights + 5 * (fruits == "pear") + flags + draw.normal(size=rows)
    lines = []
    for row in zip(weights, fruits, days, ages, sold, flags, draw.uniform(size=rows), strict=True):
        weight, fruit, day, age, value, flag, chance = row
        lines.append([f"{weight:.3f}", fruit, str(day), str(age), f"{value:.3f}", str(flag)])
        if chance < 0.1:
            lines[-1][int(chance * 30)] = ""  # one of the first three
    return lines


def write(path, rows, heading=HEADING, order=None, client=None):
    """A CSV with columns in this order of places, and perhaps one of the client's name."""
    order = order or range(len(heading))
    lines = [",".join([heading[i] for i in order] + ["who"] * bool(client))]
    lines += [",".join([row[i] for i in order] + [who] * bool(client)) for who, row in rows]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def tables(trial, tmp_path):
    """Makes a Trial whose six sites have tables, of which those that `readings` names are read in another way.

    Nothing is cut: a site cuts at its own deviations, and a simulation at those of all.
    """

    def make(target="sold", readings=None, change=lambda name, rows: rows, method="fedavg", cut=math.inf, **settings):
        made = trial(method, linked=False, cut=cut, **settings)
        whole = []
        for i, config in enumerate(made.grid.sites.values()):
            name = config["client-id"]
            rows = [(name, row) for row in change(name, table(i))]
            whole += rows
            path = tmp_path / "sites" / name / "data.csv"
            heading, order = (["Gewicht", *HEADING[1:]], [3, 1, 0, 5, 4, 2]) if name == "b" else (HEADING, None)
            write(path, rows, heading, order)
            columns = {"Gewicht": "weight"} if name == "b" else {}
            reading = (readings or {}).get(name, Reading(target, columns))
            config |= {"data": str(path), "reading": json.dumps(asdict(reading))}
        write(tmp_path / "all.csv", whole, client=True)
        return made

    return make


def alike(found, wanted):
    """Two descriptions are equal to rounding, medians to what a group of rows spans."""
    assert [type(one) for one in found.inputs] == [type(one) for one in wanted.inputs]
    assert found.names == wanted.names
    for one, other in zip(found.inputs, wanted.inputs, strict=True):
        a, b = vars(one).copy(), vars(other).copy()
        if "median" in a:
            assert a.pop("median") == pytest.approx(b.pop("median"), abs=0.1 * one.deviation)
        assert a == {
            key: pytest.approx(value, rel=1e-12) if type(value) is float else value for key, value in b.items()
        }
    assert found.clients.keys() == wanted.clients.keys()
    for client, own in wanted.clients.items():
        assert found.clients[client].keys() == own.keys()
        for name, scale in own.items():
            mine = found.clients[client][name]
            assert mine[:2] == pytest.approx(scale[:2], rel=1e-12)
            assert mine.median == pytest.approx(scale.median, abs=0.2 * scale.deviation)
    for one, other in zip(found.targets, wanted.targets, strict=True):
        assert (one.name, one.classes) == (other.name, other.classes)
        assert (one.mean, one.deviation) == pytest.approx((other.mean, other.deviation), rel=1e-12)


@pytest.fixture
def unmasked(monkeypatch):
    """Trees grow from sums of each site, whose arithmetic is the same under masks."""
    monkeypatch.setattr(PersonalBoosting, "needs_masks", False)


@pytest.fixture
def exact(monkeypatch):
    """Sums leave sites as they are: with them, a federation is its simulation to the last digits."""
    monkeypatch.setattr(disclosure, "round_statistics", lambda known: known)


@pytest.mark.parametrize("target", ["sold", "fruit"])
@pytest.mark.usefixtures("exact")
def test_the_description_found_in_a_federation_is_that_of_all_rows(tables, tmp_path, target):
    made = tables(target, rounds=1)
    summary = made.serve()
    federation = kinfed.from_csv(tmp_path / "all.csv", client="who", target=target, seed=11)
    alike(Description.from_dict(json.loads(json.dumps(summary.data.columns))), federation.columns)
    assert summary.data.classes == (list(federation.class_names) if target == "fruit" else None)
    assert summary.metric.name == federation.task.metric
    if target == "sold":
        assert summary.data.scale["targets"]["sold"]["mean"] == pytest.approx(federation.task.mean[0])
    # No site is told of the scales of another.
    for name, kind, message in made.grid.sent:
        if kind == "join":
            assert set(message.fields["description"]["clients"]) <= {name}


def whole_numbers(name, rows):
    """Without holes among fractions, so that medians cannot differ by a hair."""
    return [["7.500" if not cell and i == 0 else cell for i, cell in enumerate(row)] for row in rows]


@pytest.mark.parametrize(
    ("target", "method", "counts", "model"),
    [
        ("sold", "fedaghn", False, "mlp"),
        ("fruit", "fedavg", False, "mlp"),
        ("sold,age", "fedavg", False, "mlp"),
        ("age", "fedamp", True, "mlp"),
        ("sold", "fedaghn", False, "embedded"),
        ("sold", "partial-pooling", False, "additive"),
        ("sold", "partial-pooling", False, "log-linear"),
        ("sold", "mixed-model", False, "linear"),
        ("sold", "private-pooling", False, "linear"),
        ("sold", "private-kin", False, "linear"),
        ("age", "mixed-model", True, "linear"),
        ("age", "private-pooling", True, "linear"),
        ("fruit", "partial-pooling", False, "additive"),
        ("sold", "personal-boosting", False, "trees"),
        ("fruit", "personal-boosting", False, "trees"),
        ("fruit", "standard", False, "linear"),
    ],
)
@pytest.mark.usefixtures("exact", "unmasked")
def test_sites_with_tables_end_with_the_models_of_a_simulation(tables, tmp_path, target, method, counts, model):
    rounds = 12 if model == "trees" else 2  # of which three count, and four grow the first tree
    made = tables(target, rounds=rounds, change=whole_numbers, method=method, counts=counts, model=model)
    summary = made.serve()
    federation = kinfed.from_csv(
        tmp_path / "all.csv",
        client="who",
        target=target.split(","),
        labels=False if counts else None,
        counts=counts,
        seed=11,
    )
    assert summary.metric.name == federation.task.metric
    assert summary.data.task.keys() == {"name", *vars(federation.task)}
    compare(made, summary, federation)


@pytest.mark.parametrize(
    ("method", "model", "few_rows"), [("fedavg", "mlp", True), ("partial-pooling", "additive", False)]
)
@pytest.mark.usefixtures("exact")
def test_sites_with_weights_end_with_the_models_of_a_simulation(tables, tmp_path, method, model, few_rows):
    """One site's weights are all 1, and others' rows of weight 0 are as if they were not there."""

    def change(name, rows):
        return [[*row[:3], "1" if name == "c" else str(int(row[3]) % 4), *row[4:]] for row in whole_numbers(name, rows)]

    readings = {
        name: Reading("sold", {"Gewicht": "weight"} if name == "b" else {}, weight="age", few_rows=few_rows)
        for name in "abcdef"
    }
    made = tables("sold", readings, change, rounds=2, method=method, model=model)
    summary = made.serve()
    federation = kinfed.from_csv(tmp_path / "all.csv", client="who", target="sold", weight="age", seed=11)
    assert federation.weights is not None
    compare(made, summary, federation)
    assert "age" not in json.dumps([summary.data.columns["inputs"], summary.data.columns["clients"]])


def predicted(folder, rows, capsys, *words):
    assert main(["predict", str(folder), str(rows), *words]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.parametrize(
    ("target", "method", "model", "cut"),
    [
        ("sold", "fedaghn", "mlp", math.inf),
        ("fruit", "knn-per", "mlp", math.inf),
        ("sold", "fedaghn", "embedded", math.inf),
        ("sold", "fedavg", "mlp", 0.5),
        ("sold", "partial-pooling", "additive", math.inf),
        ("sold", "partial-pooling", "log-linear", math.inf),
        ("sold", "personal-boosting", "trees", math.inf),
    ],
)
@pytest.mark.usefixtures("unmasked")
def test_a_site_predicts_its_rows_as_its_model_was_scored(tables, tmp_path, capsys, target, method, model, cut):
    """The site of which columns have other names; its own rows, through its own model, are the other way."""
    made = tables(target, rounds=12 if model == "trees" else 2, method=method, model=model, cut=cut)
    made.serve()
    [folder] = [path.parent for path in (tmp_path / "sites" / "b").rglob("join.safetensors")]
    rows = predicted(folder, tmp_path / "sites" / "b" / "data.csv", capsys)
    assert rows == predicted(folder.parent, tmp_path / "sites" / "b" / "data.csv", capsys)
    assert {(row["client"], row["method"]) for row in rows} == {("b", method)}
    data = site_examples.find(tmp_path / "sites" / "b" / "data.csv", "b", Reading(target, {"Gewicht": "weight"}))
    invitation = ExperimentFolder(folder.parent, folder.name).invitation()
    task = plan.read_task(invitation.fields["task"])
    federation = data.federate(invitation.fields, task, made.planned.split, made.planned.learning.seed, cut)
    kept = [i for i, line in enumerate(table(1)) if line[HEADING.index(target)]]
    with torch.inference_mode():
        outputs = predictor_at(folder).module("b")(federation.x)
        for place, client in ((folder, "b"), (folder.parent, "b"), (str(folder.parent), None)):
            assert torch.equal(kinfed.load_model(place, client)(federation.x), outputs)
    with pytest.raises(UsageError, match="there is no client 'c'"):
        kinfed.load_model(folder, "c")
    if target == "sold":
        wanted = outputs[:, 0] * task.deviation[0] + task.mean[0]
        assert [float(rows[i]["sold"]) for i in kept] == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-5)
        errors = (wanted - federation.y[:, 0])[federation.rows["test"][0]]
        [half, _] = find_half_widths([errors[:, None].numpy()], 0.8)[:, 0]
        bounded = predicted(folder, tmp_path / "sites" / "b" / "data.csv", capsys, "--interval", "80")[kept[0]]
        bounds = [float(bounded["sold low"]), float(bounded["sold high"])]
        assert bounds == pytest.approx([float(wanted[0]) - half, float(wanted[0]) + half], rel=1e-4, abs=1e-4)
    else:
        wanted = [federation.classes[i] for i in outputs.argmax(1)]
        assert [rows[i]["fruit"] for i in kept] == wanted
    text = (tmp_path / "sites" / "b" / "data.csv").read_bytes()
    assert answer(open_predictor(folder)[0], text, "text/csv")[0].rows(named=True)[5][target] == pytest.approx(
        float(rows[5][target]) if target == "sold" else rows[5][target]
    )


def onboarded(folder, rows, out, capsys):
    """What a newcomer is told by the command, by number of examples."""
    capsys.readouterr()  # a slow run before it tells how far it is
    asked = ["onboard", str(folder), "--data", str(rows), "--shots", "0,8,all", "--rounds", "2", "--out", str(out)]
    assert main([*asked, "how.executor=loop", "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("["), shown
    return {one["examples"]: one["scores"] for one in json.loads(shown.out)}


def hashes(folder):
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("target", "method", "flower"),
    [
        ("sold", "fedavg", {"stale": "drop"}),
        ("sold", "fedprox", {"beside": ["local", "fedavg"]}),
        ("fruit", "fedper", {}),
        ("sold", "fedrep", {}),
    ],
)
@pytest.mark.usefixtures("exact")
def test_a_newcomer_to_sites_is_told_what_one_to_the_equal_simulation_is(
    tables, tmp_path, capsys, target, method, flower
):
    made = tables(target, rounds=2, change=whole_numbers, method=method, **flower)
    made.serve()
    capsys.readouterr()
    data = {"name": "csv", "path": str(tmp_path / "all.csv"), "client": "who", "target": target}
    plain = {key: value for key, value in made.planned.table.items() if key != "flower"}
    simulated = resolve({**plain, "federation": {**plain["federation"], "dataset": data}})
    beside = ("fedavg",) if "beside" in flower else ()
    launch(simulated, tmp_path / "simulated", kinfed.Execution("loop", 1), beside=beside)
    write(tmp_path / "new.csv", [("new", row) for row in table(6, 60) if all(row)])
    handed = tmp_path / "elsewhere" / "handed"  # all that the newcomer is given
    for source in [*(tmp_path / "out").rglob("*.toml")]:
        folder = handed / source.parent.relative_to(tmp_path / "out")
        folder.mkdir(parents=True)
        for name in ("config.toml", "summary.json", "state.safetensors"):
            shutil.copy(source.with_name(name), folder)
    shutil.rmtree(tmp_path / "sites")
    shutil.rmtree(tmp_path / "out")
    before = hashes(handed)
    found = onboarded(handed, tmp_path / "new.csv", tmp_path / "joined", capsys)
    wanted = onboarded(tmp_path / "simulated", tmp_path / "new.csv", tmp_path / "too", capsys)
    assert hashes(handed) == before
    assert found.keys() == wanted.keys()
    for count, scores in wanted.items():
        scores.pop("best existing", None)  # whose model stayed at its site
        assert found[count] == pytest.approx(scores, rel=1e-4)
    assert {"fedavg", "local"} <= found[8].keys() or "beside" not in flower
    mine, theirs = (kinfed.load_model(tmp_path / one, "new").state_dict() for one in ("joined", "too"))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    told = [predicted(tmp_path / "joined", tmp_path / "new.csv", capsys)]
    told += [predicted(tmp_path / "too", tmp_path / "new.csv", capsys, "--client", "new")]
    assert {row["client"] for row in told[0]} == {"new"}
    if "beside" in flower:
        assert main(["explain", str(tmp_path / "joined"), "new"]) == 2
        assert "holds models of newcomers alone, whose weights were not kept" in capsys.readouterr().err
    if target == "fruit":
        assert [row["fruit"] for row in told[0]] == [row["fruit"] for row in told[1]]


def test_what_a_servers_folder_cannot_give_is_told_in_one_line(tables, trial, tmp_path, capsys):
    out = tmp_path / "out"
    tables(rounds=1).serve()
    write(tmp_path / "new.csv", [("new", row) for row in table(9)])

    def refused(*words):
        capsys.readouterr()
        assert main([*words]) == 2
        shown = capsys.readouterr().err
        assert shown.count("kinfed: ") == 1
        return " ".join(shown.split())

    new = ("--data", str(tmp_path / "new.csv"))
    assert "stayed at its sites: name the newcomer's own with --data FILE" in refused("onboard", str(out))
    assert "is of real sites, whose rows and private states stayed there" in refused("run", "--from", str(out))
    write(tmp_path / "a.csv", [("a", row) for row in table(9)])
    assert "client 'a' took part in" in refused("onboard", str(out), "--data", str(tmp_path / "a.csv"))
    assert main(["onboard", str(out), *new, "--shots", "8", "--rounds", "1"]) == 0
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "the members' models stayed at their sites, so none is tried as the best existing model" in shown
    summary = json.loads((out / "summary.json").read_text())
    others = summary["by_client"] | {"names": [*"abcdeg"]}
    (out / "summary.json").write_text(json.dumps(summary | {"by_client": others}))
    assert "its files do not belong together: state.safetensors is of another run" in refused("onboard", str(out), *new)
    (out / "summary.json").write_text(json.dumps(summary))
    (out / "state.safetensors").unlink()
    assert "has no state.safetensors" in refused("onboard", str(out), *new)
    (out / "config.toml").unlink()
    assert "config.toml" in refused("onboard", str(out), *new)


def test_a_folder_that_would_hold_sites_models_joins_nobody_and_says_so(tables, tmp_path, capsys):
    made = tables(rounds=1, method="fedamp", beside=["local", "fedavg"])
    made.serve()
    write(tmp_path / "new.csv", [("new", row) for row in table(9)])
    capsys.readouterr()
    new = ("--data", str(tmp_path / "new.csv"), "--shots", "8", "--rounds", "1")
    assert main(["onboard", str(tmp_path / "out"), *new]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "hands none on where it would hold single sites' models, as with fedamp; name" in shown
    assert main(["onboard", str(tmp_path / "out" / "beside" / "fedavg"), *new]) == 0


def test_no_file_joins_sites_with_arrays(trial, tmp_path):
    trial("fedavg", rounds=1).serve()
    with pytest.raises(UsageError, match="was not trained on tables whose rows are examples"):
        joining_clients.of_table(Run(RunFolder(tmp_path / "out")), tmp_path / "new.csv", None)


def test_what_a_site_cannot_predict_is_told_in_one_line(tables, tmp_path, capsys):
    made = tables(rounds=1)
    made.serve()
    [folder] = [path.parent for path in (tmp_path / "sites" / "b").rglob("join.safetensors")]
    rows = str(tmp_path / "sites" / "b" / "data.csv")
    capsys.readouterr()  # what training says

    def told(place, *words, code=2):
        assert main(["predict", str(place), *words, rows]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("kinfed: ") == 1
        return " ".join(err.split())

    assert "its models stayed at the sites; predict there: kinfed predict kinfed-site/NAME" in told(tmp_path / "out")
    assert "there is no client 'bb'; did you mean 'b'?" in told(folder, "--client", "bb")
    assert main(["export", str(folder), "--out", str(tmp_path / "models")]) == 2
    assert "is the folder of a site, whose model kinfed predict and kinfed serve use" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
    assert main(["report", str(folder.parent), "-o", str(tmp_path / "site.html")]) == 0
    assert "b, a site of a federation" in (tmp_path / "site.html").read_text()
    assert "intervals that hold 0.99 of all rows need at least 99 rows" in told(folder, "--interval", "99")
    (folder / "errors.safetensors").unlink()
    assert f"{folder} has no intervals: it keeps no errors of test rows" in told(folder, "--interval", "90")
    shutil.copytree(folder, folder.with_name("another"))
    assert "holds 2 experiments of sites; name one of them, such as" in told(folder.parent)
    (folder / "model.safetensors").rename(folder / "kept")
    assert "has no model yet: no round has been evaluated at this site" in told(folder)
    (folder / "model.safetensors").write_bytes((folder / "kept").read_bytes()[:-20])
    assert "model.safetensors cannot be read" in told(folder, code=1)
    (folder / "description.json").unlink()
    assert "was made before sites kept how their tables are read" in told(folder)


def test_a_model_that_is_not_what_this_site_wrote_answers_nothing(tables, tmp_path, capsys):
    """Another site's, numbers that are none, and inputs by another description: all would answer, and wrongly."""
    made = tables(rounds=1)
    made.serve()
    folder, other = (next((tmp_path / "sites" / name).rglob("join.safetensors")).parent for name in "bc")
    model, described = folder / "model.safetensors", folder / "description.json"
    kept, text = model.read_bytes(), described.read_text()
    with safe_open(model, "pt") as file:
        about = file.metadata()
    tensors = load_file(model)
    name = min(tensors)

    def refuse():
        assert main(["predict", str(folder), str(tmp_path / "sites" / "b" / "data.csv")]) == 1
        out, err = capsys.readouterr()
        model.write_bytes(kept)
        described.write_text(text)
        assert out == ""
        assert err.count("kinfed: ") == 1
        return " ".join(err.split())

    capsys.readouterr()
    shutil.copy(other / "model.safetensors", model)
    assert "is of another site or run, or description.json beside it is" in refuse()
    changed = json.loads(text)
    changed["columns"]["inputs"].reverse()
    described.write_text(json.dumps(changed))
    assert "is of another site or run, or description.json beside it is" in refuse()
    for tensor, why in ((tensors[name] * torch.nan, "holds NaN or infinity"), (tensors[name].long(), "torch.int64")):
        save_file(tensors | {name: tensor}, model, about)
        assert f"is not what this site wrote (ValueError: '{name}' " in (line := refuse())
        assert why in line
    assert main(["predict", str(folder), str(tmp_path / "sites" / "b" / "data.csv")]) == 0


def test_a_site_forecasts_from_its_readings(meters, tmp_path, capsys):
    meters(rounds=1).serve()
    [folder] = [path.parent for path in (tmp_path / "sites" / "a").rglob("join.safetensors")]
    rows = predicted(folder, tmp_path / "sites" / "a" / "data.csv", capsys)
    [row] = [row for row in rows if row["when"] == "2024-03-03 07:00"]  # step 55
    known = [line.split(",") for line in (tmp_path / "sites" / "a" / "data.csv").read_text().splitlines()[51:57]]
    assert known[-1][0] == row["when"]
    series = predictor_at(folder).series
    hours = [int(when[11:13]) / 24 for when, _ in known]
    scaled = [(float(value) - series.mean) / series.deviation for _, value in known]
    x = torch.tensor([scaled, hours]).T[None]
    wanted = predictor_at(folder).module("a")(x).flatten().detach() * series.deviation + series.mean
    assert [float(row[f"load+{i}"]) for i in range(1, 5)] == pytest.approx(wanted.tolist(), rel=1e-4)
    bounded = predicted(folder, tmp_path / "sites" / "a" / "data.csv", capsys, "--interval", "50")[0]
    for i in range(1, 5):
        assert float(bounded[f"load+{i} low"]) < float(bounded[f"load+{i}"]) < float(bounded[f"load+{i} high"])


def test_a_site_predicts_from_its_arrays(trial, tmp_path, capsys):
    made = trial("fedavg", rounds=1)
    made.serve()
    [folder] = [path.parent for path in (tmp_path / "sites" / "a").rglob("join.safetensors")]
    x = made.examples["a"]["x_train"]
    np.savez(tmp_path / "new.npz", x=x)
    rows = predicted(folder, tmp_path / "new.npz", capsys)
    chances = predictor_at(folder).module("a")(torch.from_numpy(x)).softmax(1).detach()
    found = [[float(row[f"P({c})"]) for c in range(3)] for row in rows]
    torch.testing.assert_close(torch.tensor(found), chances, rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="has no intervals: its answers are classes, each with a probability"):
        open_predictor(folder, percent=90)


def test_each_site_reads_dates_and_numbers_in_the_formats_of_its_own_file(tmp_path):
    """The same rows at three sites, whose new rows are read as the site's own were."""
    rows = [(f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}", 1000 + 7.5 * i, i % 5 + 0.5) for i in range(60)]
    ways = {
        "iso": lambda year, month, day, price: (f"{year}-{month}-{day}", f"{price}"),
        "day": lambda year, month, day, price: (
            f"{day}/{month}/{year}",
            f'"{price // 1000:.0f}.{price % 1000:05.1f} €"',
        ),
        "month": lambda year, month, day, price: (f"{month}/{day}/{year}", f'"{price:,} €"'),
    }
    formats = {
        "iso": {},
        "day": {"dates": "%d/%m/%Y", "decimal": ",", "thousands": ".", "units": "€"},
        "month": {"dates": "%m/%d/%Y", "thousands": ",", "units": "€"},
    }
    agreed = {"targets": ["sold"], "counts": False, "inputs": [["when", "date"], ["price", "number"]], "classes": None}
    columns = dict(zip(("when", "price", "sold"), map(list, zip(*rows, strict=True)), strict=True))
    whole = kinfed.from_frame(polars.DataFrame({"who": ["x", "y"] * 30, **columns}), client="who", target="sold")
    described = Description("", whole.columns.inputs, [replace(one, bounds=()) for one in whole.columns.targets])
    words = {"agreed": agreed, "description": described.to_dict()}
    found = {}
    for name, way in ways.items():
        path, new = tmp_path / f"{name}.csv", tmp_path / "new.csv"
        cells = [way(*when.split("-"), price) for when, price, _ in rows]
        if name == "day":
            cells = [(when, ",".join(price.rsplit(".", 1))) for when, price in cells]
        mark = "," if name == "day" else "."
        sold = [f'"{each}"'.replace(".", mark) for _, _, each in rows]
        lines = [f"{when},{price},{each}" for (when, price), each in zip(cells, sold, strict=True)]
        path.write_text("\n".join(["when,price,sold", *lines]) + "\n")
        reading = Reading("sold", **formats[name])
        data = site_examples.find(path, name, reading)
        federation = data.federate(words, Regression(), Split(), 0)
        found[name] = federation.x
        new.write_text(f"when,price\n{','.join(cells[2])}\n")  # 3 March, and a thousand and 15
        kept = Description.from_dict(data.describe_reading(words, federation)["columns"])
        assert kept.encode(open_table(new))[0].equal(found[name][2])
    assert found["day"].equal(found["iso"])
    assert found["month"].equal(found["iso"])
    for name, option in (("day", "decimal"), ("month", "dates")):
        with pytest.raises(UsageError, match=rf"line 2, column .* is not a .*{option}=.* would read it"):
            site_examples.find(tmp_path / f"{name}.csv", name, Reading("sold")).federate(
                words, Regression(), Split(), 0
            )


def compare(made, summary, federation):
    """The sites' scores and models are those of a simulation."""
    learning = made.planned.learning
    # A log-linear model is built by columns' medians, which at sites are those of groups of rows.
    columns = federation.columns and Description.from_dict(json.loads(json.dumps(summary.data.columns)))
    model = model_for(learning.method, module(made.planned, summary, columns), seed=11)
    rounds = Rounds(learning.rounds.count, keep=summary.selection.chosen)
    run = kinfed.fit(
        learning.method,
        federation,
        model,
        rounds=rounds,
        training=learning.training,
        seed=11,
        execution=kinfed.Execution(executor="loop"),
    )
    at = run.history.scores[run.history.rounds.index(run.history.select(summary.selection.chosen))]
    means = {
        name: float(at[name, "validation", run.history.selector.score].mean()) for name in run.history.named_models
    }
    best = (max if run.history.selector.higher_is_better else min)(means.values())
    least = min(len(part) for part in federation.rows["validation"])
    chosen = means[summary.selection.chosen]
    assert chosen == pytest.approx(best, rel=0.5 / least + 1e-4)  # of scores that leave rounded, one of the best
    rows = [len(part) for part in federation.rows["test"]]
    for key, scores in summary.clients.scores.items():
        for score, exact, count in zip(scores, run.history.test(key).tolist(), rows, strict=True):
            assert score == pytest.approx(exact, rel=0.5 / count + 1e-4, abs=1e-5)  # as it leaves: Disclosure.rounded
    for i, name in enumerate(summary.clients.names):
        (folder,) = (made.folder / "sites" / name / name).glob("*/model.safetensors")
        mine = load_file(folder)
        for key, value in run.model(position=i).state_dict().items():
            torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-5)


def module(planned, summary, columns=None):
    """The network with the initial values that a server gives it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(planned.learning.seed, "model").initial_seed())
        return planned.learning.model(tuple(summary.data.shape), summary.data.outputs, columns=columns)


START = np.datetime64("2024-03-01T00:00")


def series(path, seed, steps=260, minutes=60, gaps=(), missing=(), zone="", late=0, unit=1):
    """A site's readings: those at `gaps` have no row, those of `missing` no value."""
    draw, lines = np.random.default_rng(seed), ["when,load"]
    values = unit * (50 + 10 * np.sin(np.arange(steps) / (3 + seed)) + draw.normal(size=steps))
    for i in range(late, steps):
        if i not in gaps:
            when = str(START + np.timedelta64(i * minutes, "m")).replace("T", " ") + zone
            lines.append(f"{when},{'' if i in missing else f'{values[i]:.4f}'}")
    path.write_text("\n".join(lines) + "\n")
    return lines[1:]


OUTAGE = range(100, 112)  # no site has a reading, though some have rows


def beside(site, at):
    """The cells of covariates: heat, some of them missing, a tariff, and what is the same in all rows of a site."""
    draw = np.random.default_rng([site, at])
    heat = "" if draw.random() < 0.1 else f"{10 + 3 * site + draw.normal():.3f}"
    return f"{heat},{draw.choice(['day', 'night', 'peak'])},{'north' if site < 3 else 'south'}"


@pytest.fixture
def meters(trial, tmp_path):
    """Makes a Trial of six sites with series, and the same in one file."""

    def make(method="fedavg", change=lambda name: {}, covariates=(), group="", **settings):
        made = trial(method, **settings)
        lines = [",".join(["who,when,load", *covariates, *([group] if group else [])])]
        for i, config in enumerate(made.grid.sites.values()):
            name, path = config["client-id"], tmp_path / "sites" / config["client-id"] / "data.csv"
            how = {
                "gaps": {*range(60, 60 + 9 * i)} & {*range(60, 80)} | ({*range(150, 155)}),
                "missing": {*OUTAGE, *range(20 * i, 20 * i + 7)},
                "late": 30 * (i == 3),
            }
            own = series(path, i, **how | change(name))
            if covariates:
                own = [f"{line},{beside(i, at)}" for at, line in enumerate(own)]
                path.write_text("\n".join([",".join(["when,load", *covariates]), *own]) + "\n")
            if group:  # forty readings each, of nobody else
                own = [f"{line},{name} {at // 40}" for at, line in enumerate(own)]
                path.write_text("\n".join([f"when,load,{group}", *own]) + "\n")
            lines += [f"{name},{line}" for line in own]
            known = {"future": ("tariff",), "static": ("region",)} if covariates else {}
            reading = Reading("load", time="when", past=6, horizon=4, group=group, **known)
            config |= {"data": str(path), "reading": json.dumps(asdict(reading))}
        (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
        return made

    return make


@pytest.mark.parametrize("quantiles", [[], [0.1, 0.5, 0.9]])
@pytest.mark.usefixtures("exact")
def test_sites_with_series_end_with_the_models_of_a_simulation(meters, tmp_path, quantiles):
    miles = [f"{a},{b},{1 + abs(i - j)}\n" for i, a in enumerate("abcdef") for j, b in enumerate("abcdef") if i < j]
    (tmp_path / "map.csv").write_text("from,to,miles\n" + "".join(miles))
    links = {"path": str(tmp_path / "map.csv"), "distances": "miles", "sigma": 2.0}
    made = meters("sfl", rounds=2, quantiles=quantiles, graph=links, horizons=[2])
    summary = made.serve()
    federation = kinfed.from_csv(
        tmp_path / "all.csv",
        client="who",
        target="load",
        time="when",
        past=6,
        horizon=4,
        horizons=[2],
        edges=GraphFile(**links),
        quantiles=quantiles,
        seed=11,
    )
    assert (summary.data.shape, summary.data.outputs) == ([6, 2], 12 if quantiles else 4)
    assert summary.metric.name == federation.task.metric
    compare(made, summary, federation)
    mean = summary.data.scale["inputs"]["reading"]["mean"]
    assert mean == pytest.approx(federation.scale["inputs"]["reading"]["mean"])


@pytest.mark.usefixtures("exact")
def test_sites_with_changes_of_series_end_with_the_models_of_a_simulation(meters, tmp_path):
    made = meters("partial-pooling", rounds=2, model="changes")
    summary = made.serve()
    how = {"client": "who", "target": "load", "time": "when", "past": 6, "horizon": 4}
    compare(made, summary, kinfed.from_csv(tmp_path / "all.csv", **how, seed=11))


@pytest.mark.usefixtures("exact")
def test_sites_with_weights_of_series_end_with_the_models_of_a_simulation(meters, tmp_path):
    made, columns = meters("fedavg", rounds=2), {"time": "when", "past": 6, "horizon": 4, "weight": "counts"}
    for config in made.grid.sites.values():
        path = Path(config["data"])
        path.write_text(
            "".join(
                f"{line},{'counts' if at == 0 else at % 4}\n" for at, line in enumerate(path.read_text().splitlines())
            )
        )
        config["reading"] = json.dumps(asdict(Reading("load", **columns, few_rows=True)))
    texts = {config["client-id"]: Path(config["data"]).read_text() for config in made.grid.sites.values()}
    lines = [f"{name},{line}\n" for name, text in texts.items() for line in text.splitlines()[1:]]
    (tmp_path / "all.csv").write_text("who,when,load,counts\n" + "".join(lines))
    summary = made.serve()
    federation = kinfed.from_csv(tmp_path / "all.csv", client="who", target="load", **columns, seed=11)
    assert federation.weights is not None
    compare(made, summary, federation)


@pytest.mark.usefixtures("exact")
def test_sites_with_covariates_end_with_the_models_of_a_simulation(meters, tmp_path):
    columns = ("heat", "tariff", "region")
    made = meters("fedavg", rounds=2, covariates=columns, calendar=["hour", "weekday"])
    summary = made.serve()
    federation = kinfed.from_csv(
        tmp_path / "all.csv",
        client="who",
        target="load",
        time="when",
        past=6,
        horizon=4,
        future=["tariff"],
        static=["region"],
        calendar=["hour", "weekday"],
        seed=11,
    )
    assert summary.data.shape == list(federation.x.shape[1:]) == [6, 1 + 2 + 7 + 1 + 3 + 2 + 3]
    compare(made, summary, federation)
    for ours, theirs in zip(
        summary.data.scale["covariates"]["inputs"], federation.scale["covariates"]["inputs"], strict=True
    ):
        assert ours.get("categories") == theirs.get("categories")
        assert ours.get("mean") == pytest.approx(theirs.get("mean"))


def test_no_message_that_leaves_a_site_holds_what_is_in_a_row(tables):
    """A cell that is no number or date, at a site each: the site says what, the server is told line and column."""
    places = {"c": (0, "weight"), "d": (2, "bought"), "e": (4, "sold")}

    def change(name, rows):
        if name in places:
            rows[40][places[name][0]] = "SECRET"
        return rows

    made = tables(change=change, rounds=1, clients=3)
    replies = []
    pull = made.grid.pull_messages

    def keep(ids):
        found = pull(ids)
        replies.extend(json.dumps(unpack(one.content).fields) for one in found if one.has_content())
        return found

    made.grid.pull_messages = keep
    assert made.serve().by_client.names == ["a", "b", "f"]
    assert not [text for text in replies if "SECRET" in text]
    for name, (_, column) in places.items():
        fault = "a cell is not a date or time" if column == "bought" else "a cell is not a number"
        why = rf"\b{name}(\)| out): its file cannot be used: {fault}, in column '{column}' \(line 42\)"
        assert any(re.search(why, line) for line in made.lines), made.lines


def test_the_site_itself_says_what_is_in_the_cell(tmp_path):
    said = []
    (tmp_path / "d.csv").write_text("a,y\n1.5,2.5\n2.5,4.5\nfoo,6.5\n2.25,7.5\n")
    site = Site("d", tmp_path / "d.csv", tmp_path, "cpu", report=said.append, policy=Policy(runs="any"))
    agreed = {"targets": ["y"], "counts": False, "inputs": [["a", "number"]], "classes": None}
    words = {"agreed": agreed, "split": {}, "seed": 0}
    refused = site.reply("describe", messages.Message(words, {})).fields["refused"]
    assert refused == (
        "its file cannot be used: a cell is not a number, in column 'a' (line 4); its own screen says more"
    )
    assert said == [
        f"client d: {tmp_path}/d.csv, line 4, column 'a': 'foo' is not a number; correct it, leave it empty if "
        'it is missing, or leave the column out with ignore, or say text=["a"] if its cells are names'
    ]


@pytest.fixture
def asked(tmp_path):
    """Asks a site for a description of these columns; returns its reply and what it says on its own screen."""
    lines = [f"{1000 + i},{(i % 4) * 7},{2000 + i}-01-01,w{i % 3},{i % 2}\n" for i in range(40)]
    (tmp_path / "d.csv").write_text("a,b,when,word,y\n" + "".join(lines))

    def ask(reading, **agreed):
        said = []
        site = Site("d", tmp_path / "d.csv", tmp_path, "cpu", reading, report=said.append, policy=Policy(runs="any"))
        agreed = {"targets": ["y"], "inputs": [["a", "number"]], "classes": ["0", "1"], "counts": False} | agreed
        words = {"agreed": {key: one for key, one in agreed.items() if one != []}, "split": {}, "seed": 0}
        return site.reply("describe", messages.Message(words, {})).fields, said

    return ask


@pytest.mark.parametrize(
    "agreed",
    [
        {"inputs": [["a", "number"], ["word", "category"]]},
        {"inputs": [["when", "date"]]},
    ],
)
def test_a_server_that_asks_for_what_a_site_leaves_out_is_refused(asked, agreed):
    reply, said = asked(Reading("y", ignore=["word", "b"], time="when"), **agreed)
    assert reply.keys() == {"client", "refused"}
    assert reply["refused"].endswith(f"its file cannot be used: {Fault.WITHHELD}; its own screen says more")
    assert "which stays here (--ignore, --time, --group, --weight)" in said[0]


def test_a_server_that_asks_for_another_target_is_refused(asked):
    reply, _ = asked(Reading("y", ignore=["word", "b"], time="when"), targets=["b"], classes=None)
    assert reply == {
        "client": "d",
        "refused": "it predicts y (--target), and the server asks for other targets",
    }


def test_numbers_that_are_categories_elsewhere_are_told_only_where_many_rows_have_them(asked):
    """Else a server that calls a column text would learn the number in each row."""
    reply, _ = asked(Reading("y"), inputs=[["a", "category"], ["b", "category"], ["when", "category"]])
    told = reply["statistics"]
    assert told["a"] == {"kind": "category", "counts": {}, "missing": 0, "others": 28, "unnamed": 28}
    assert told["b"]["counts"].keys() == {"0", "7", "14", "21"}
    assert told["when"]["counts"] == {}


def test_what_a_server_says_wrongly_is_not_told_as_a_fault_of_the_file(asked):
    reply, _ = asked(Reading("y"), inputs=[])
    assert "what the server says of the columns cannot be used (KeyError); install the same" in reply["refused"]
    reply, _ = asked(Reading("y"), inputs=[["gone", "number"]])
    assert reply["refused"] == f"its file cannot be used: {Fault.COLUMNS}; its own screen says more"


@pytest.mark.parametrize(
    ("text", "why", "fault"),
    [
        ("a,b\n1,0\n", "d.csv has no column 'y'", "COLUMNS"),
        ("a,y,y\n1,0,0\n", "two columns are named 'y'", "COLUMNS"),
        ("a,y\n", "d.csv has no rows", "EMPTY"),
        ("a,y\n1,2,SECRET\n", "line 2: 3 entries, but the header has 2", "UNREADABLE"),
        ("y\n1\n", "no column is left for the inputs beside 'y'", "INPUTS"),
        ("a,y\n" + "".join(f"1,k{i}\n" for i in range(30)), "'y' has 30 different labels in 30 rows", "TARGET"),
        ("a,y\n1,\n2,\n", "'y' has no value in any row", "TARGET"),
        ("a,y\n1,1.5\n2,2.5 lb\n", "'2.5 lb' is not a number; units=[\"lb\"] would read it as 2.5", "NUMBER"),
        (None, "did you mean 'd.tsv'?", "GONE"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_when_greeted(tmp_path, text, why, fault):
    said = []
    (tmp_path / ("d.tsv" if text is None else "d.csv")).write_text(text or "")
    reply = Site("d", tmp_path / "d.csv", tmp_path, "cpu", report=said.append, policy=Policy(runs="any")).reply(
        "hello", messages.Message({}, {})
    )
    where = ", in column 'y' (line 3)" if fault == "NUMBER" else ""
    assert reply.fields["refused"] == (f"its file cannot be used: {Fault[fault]}{where}; its own screen says more")
    assert why in said[0]


def test_a_file_that_changes_while_a_site_reads_it_is_told_on_both_sides(tables, monkeypatch):
    """At each reading another row comes: the site says which file and what to do, the server which site and why."""
    read, said = reading._csv, []

    def slow(path):
        if path.parent.name == "d":
            path.write_text(path.read_text() + "1,SECRET,2024-01-01,3,4,0\n")
        return read(path)

    made = tables(rounds=1, clients=3)
    monkeypatch.setattr(reading, "_csv", slow)
    monkeypatch.setattr("kinfed_flower.programs.site_app._print", said.append)
    assert "d" not in made.serve().by_client.names
    told = next(line for line in said if "changed while" in line)
    assert "d/data.csv changed while it was read (from " in told
    assert "try again when nothing writes to it" in told
    why = "its file cannot be used: it changed while it was read; its own screen says more"
    assert any(why in line for line in made.lines), made.lines
    assert not any("SECRET" in line for line in [*made.lines, *said])


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_a_file_that_is_another_than_at_joining_is_refused(trial, tables, kind, tmp_path):
    """Or rows that were tested on could be trained on; the model of before stays as it was."""
    made = tables(rounds=2, clients=6) if kind == "csv" else trial("fedavg", rounds=2)
    path = tmp_path / "sites" / "d" / f"data.{kind}"

    def change(answer):
        if kind == "csv":
            path.write_text("\n".join(path.read_text().splitlines()[:-10]) + "\n")
        else:
            np.savez(path, **{name: array[:-1] for name, array in np.load(path).items()})
        return answer

    made.grid.faults["d", 1] = change
    made.serve()
    why = "its file cannot be used: its examples are not those with which it joined; its own screen says more"
    assert any(why in line for line in made.lines), made.lines


def test_columns_that_differ_are_told_by_name_with_the_fix(tables):
    def change(name, rows):
        return [[*row[:5], "x"] for row in rows] if name == "f" else rows

    made = tables(
        readings={"e": Reading("sold", {"age": "years"}), "d": Reading("sold", ignore=["kept"])},
        change=change,
        clients=3,
        rounds=1,
    )
    assert made.serve().by_client.names == ["a", "b", "c"]
    assert (
        "left client e out: these columns are not in both its table and the others': age, years; rename its own with "
        "--column THEIRS=OURS, or leave out what others lack with --ignore"
    ) in made.lines
    assert any(line.startswith("left client d out: these columns are not in both") for line in made.lines)
    assert (
        "left client f out: its column 'kept' is text, at other sites numbers; correct it, or name another"
        in made.lines
    )


def test_another_target_is_told_by_name(tables):
    made = tables(readings={"f": Reading("age", ignore=["sold"])}, clients=5, rounds=1)
    assert made.serve().by_client.names == list("abcde")
    assert any(line.startswith("left client f out: its target is age, at other sites sold") for line in made.lines)


def test_a_wrong_column_at_a_site_that_is_needed_is_told_at_once(tables, tmp_path, capfd):
    """In the run's log, in its status and on the site's own screen, while the run waits; corrected, the site joins."""
    made = tables(readings={"f": Reading("sold", {"age": "years"})}, clients=6, rounds=1)
    config = made.grid.sites[106]
    good, seen = Reading("sold"), []

    def correct():  # once the operator has read why
        shown = capfd.readouterr().err
        if "the server cannot use this node: these columns are not in both its table and the others': age" in shown:
            seen.append(json.loads((tmp_path / "out" / "status.json").read_text())["sites"]["f"]["left_out"])
            config["reading"] = json.dumps(asdict(good))
            made.grid.stamps[106] = "restarted"

    look = made.grid.get_nodes
    made.grid.get_nodes = lambda: correct() or look()
    assert made.serve().by_client.names == list("abcdef")
    assert seen[0].startswith("these columns are not in both its table and the others': age, years; rename its own")
    assert sum(line.startswith("left client f out: these columns are not in both") for line in made.lines) == 1


def test_a_column_that_is_empty_at_a_site_is_an_input_and_one_that_is_everywhere_is_none(tables):
    def change(name, rows):
        return [["" if name == "c" else row[0], *row[1:5], ""] for row in rows]

    made = tables(change=change, rounds=1)
    summary = made.serve()
    columns = {one["name"]: one for one in summary.data.columns["inputs"]}
    assert summary.clients.names == list("abcdef")
    assert "kept" not in columns
    assert columns["weight"]["missing"] > 84


def test_other_units_at_a_site_are_warned_of_by_name(tables):
    def change(name, rows):
        return [[str(1000 * float(row[0])) if row[0] else "", *row[1:]] if name == "d" else row for row in rows]

    made = tables(change=change, rounds=1)
    summary = made.serve()
    warned = [line for line in made.lines if "in another unit" in line]
    assert len(warned) == 1
    assert warned[0].startswith("client d: its 'weight' has mean ")
    assert summary.data.columns["clients"].keys() == set("abcdef")  # and it is scaled by each client's own


@pytest.mark.parametrize("place", [0, 4])
def test_sites_in_euros_and_in_dollars_are_not_merged(tables, place):
    """An input and the target: who is in another unit than most is left out, who names none is warned of."""
    units = {"a": "€ {}", "c": "$ {}", "d": "{}"}

    def change(name, rows):
        cells = [f"{float(row[place] or 9.5):.2f}" for row in rows]
        return [
            [*row[:place], units.get(name, "{} €").format(cell), *row[place + 1 :]]
            for row, cell in zip(rows, cells, strict=True)
        ]

    readings = {
        name: Reading("sold", {"Gewicht": "weight"} if name == "b" else {}, units=["€", "$"]) for name in "abcdef"
    }
    made = tables(change=change, readings=readings, rounds=1, clients=5)
    assert made.serve().by_client.names == ["a", "b", "d", "e", "f"]
    name = HEADING[place]
    assert any(
        line.startswith(f"left client c out: its column '{name}' is in $, at other sites in €") for line in made.lines
    )
    warned = [line for line in made.lines if "names no unit" in line]
    assert len(warned) == 1
    assert warned[0].startswith(f"client d: its column '{name}' names no unit, and at other sites it is in €")


def test_a_site_names_as_many_categories_as_its_operator_allows(tables, tmp_path):
    def change(name, rows):
        return [[row[0], f"{row[1]}{i % 40}", *row[2:]] for i, row in enumerate(rows)]

    few, none = (Reading("sold", {}, categories=most) for most in (3, 0))
    made = tables(readings={"a": few, "c": none}, change=change, rounds=1)
    said = {}
    pull = made.grid.pull_messages

    def keep(ids):
        found = pull(ids)
        for one in found:
            words = unpack(one.content).fields
            if "statistics" in words:
                said[words["client"]] = words["statistics"]["fruit"]
        return found

    made.grid.pull_messages = keep
    made.serve()
    assert len(said["a"]["counts"]) == 3
    assert said["c"]["counts"] == {}
    assert said["c"]["others"] + said["c"]["missing"] == 84
    assert len(said["d"]["counts"]) > 40


def test_one_class_and_many_categories_are_told_to_the_operator(tmp_path):
    said = []
    rows = [f"{i},c{i % 1500},no\n" for i in range(4000)]  # of 1,500 categories 1,431 are in training rows
    (tmp_path / "d.csv").write_text("a,b,y\n" + "".join(rows))
    site = Site("d", tmp_path / "d.csv", tmp_path, "cpu", report=said.append, policy=Policy(runs="any"))
    agreed = {
        "targets": ["y"],
        "counts": False,
        "inputs": [["a", "number"], ["b", "category"]],
        "classes": ["no", "yes"],
    }
    reply = site.reply("describe", messages.Message({"agreed": agreed, "split": {}, "seed": 0}, {}))
    assert len(reply.fields["statistics"]["b"]["counts"]) == 1000
    assert said.pop(0).startswith("sent: description of 2,800 training rows: a: count 2,800")
    assert said == [
        "d.csv: 'b' has 1,431 categories, of which the 1,000 most frequent are named to the server (categories)",
        "d.csv: all 2,800 training rows are of one class, 'no', so a model learns nothing else here",
    ]


def test_a_column_that_is_constant_at_a_site_that_joins_has_the_scale_of_all():
    """The deviation of twelve times 0.1 is not 0 but 1e-17, by which nothing may be divided."""
    known = NumberStatistics.from_values(np.full(12, 0.1))
    assert known.deviation > 0
    words = {"statistics": {"price": disclosure.to_json(known)}, "answers": disclosure.to_json(known), "rows": 12}
    greeting = {"plans": [{}], "experiment": "run"}
    reply = {"new": messages.Message(words, {})}
    broker = SimpleNamespace(
        request=lambda kind, asked, needed, problem: reply, nodes=SimpleNamespace(greeting=greeting)
    )
    planned = SimpleNamespace(table={"federation": {"split": {}}}, learning=SimpleNamespace(seed=0))
    scale = {"mean": 3.0, "deviation": 2.0, "median": 3.0}
    description = {"clients": {"a": {"price": scale}}, "inputs": [{"name": "price", **scale}]}
    agreed = {"inputs": [("price", "number")], "classes": None}
    facts = {"experiment": "run", "agreed": agreed, "description": description}
    assert Describing(planned, broker, facts).add(["new"]) == ["new"]
    assert description["clients"]["new"]["price"]["deviation"] == 2.0


def test_two_clocks_are_told_apart(meters):
    def change(name):
        return {"zone": "+01:00"} if name in "ab" else {"late": 120} if name == "f" else {}

    made = meters(change=change, rounds=1)
    made.serve()
    for name in "cdef":
        assert any(line.startswith(f"client {name}: its times name no time zone, as others' do") for line in made.lines)
    assert any(line.startswith("client f: it has rows at ") for line in made.lines)


def test_a_series_in_another_unit_is_warned_of_by_name(meters):
    made = meters(change=lambda name: {"unit": 1000} if name == "d" else {}, rounds=1)
    made.serve()
    [told] = [line for line in made.lines if "in another unit" in line]
    assert told.startswith("client d: its 'load' has mean ")


def test_a_series_whose_times_name_two_clocks_is_refused(tmp_path):
    said = []
    (tmp_path / "d.csv").write_text("when,y\n2024-01-01 00:00+01:00,1\n2024-01-01 01:00+01:00,2\n2024-01-01 03:00,3\n")
    reading = Reading("y", time="when", past=1, horizon=1)
    Site("d", tmp_path / "d.csv", tmp_path, "cpu", reading, report=said.append, policy=Policy(runs="any")).reply(
        "hello", messages.Message({}, {})
    )
    assert "line 4, column 'when': '2024-01-01 03:00' has no time zone, but" in said[0]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"time": "when"}, "has no column 'when'"),
        ({"time": "when", "past": 3}, "give all three"),
        ({"past": 3, "horizon": 2}, "give all three"),
        ({"columns": {"a": "b", "c": "b"}}, "two columns would be named 'b'"),
        ({"columns": {"z": "b"}}, "has no column 'z'"),
        ({"ignore": ["z"]}, "has no column 'z'"),
    ],
)
def test_settings_of_a_reading_that_do_not_fit_the_file(tmp_path, settings, why):
    (tmp_path / "d.csv").write_text("a,c,y\n1,2,3\n")
    with pytest.raises(UsageError, match=why):
        site_examples.find(tmp_path / "d.csv", "d", Reading(**settings)).hello()


def of_time(name, rows):
    """Rows whose dates are all there, each site's later than those of the site before."""
    begin = np.datetime64("2023-01-01") + 100 * (ord(name) - ord("a"))
    for i, row in enumerate(whole_numbers(name, rows)):
        row[2] = str(begin + (37 * i) % 90)  # several rows a day
        yield row


@pytest.mark.parametrize("target", ["sold", "kept"])
@pytest.mark.usefixtures("exact")
def test_rows_in_order_of_time_are_split_by_each_sites_own_times(tables, tmp_path, target):
    """As in a simulation with `own_times`; nothing of the times leaves the sites."""
    readings = {name: Reading(target, {"Gewicht": "weight"} if name == "b" else {}, time="bought") for name in "abcdef"}
    made = tables(target, readings, lambda name, rows: [*of_time(name, rows)], rounds=2)
    summary = made.serve()
    assert "bought" not in {one["name"] for one in summary.data.columns["inputs"]}
    split = Split(own_times=True)
    federation = kinfed.from_csv(tmp_path / "all.csv", client="who", target=target, time="bought", split=split, seed=11)
    compare(made, summary, federation)
    config = next(iter(made.grid.sites.values()))
    site = Site("a", Path(config["data"]), tmp_path, "cpu", readings["a"], policy=Policy(runs="any"))
    hello = site.reply("hello", messages.Message({}, {})).fields
    assert hello["table"].keys() == {"targets", "kinds", "labels", "units", "in_order"}
    asked = next(one for _, kind, one in made.grid.sent if kind == "describe")
    said = site.reply("describe", asked).fields
    assert said.keys() - {"answers"} == {"client", "statistics", "rows"}
    assert "bought" not in json.dumps([hello, said])


@pytest.mark.usefixtures("exact")
def test_rows_of_a_group_stay_together_at_a_site_and_count_as_one_there(tables, tmp_path):
    """As in a simulation; no group leaves the site, and its verdict says that groups were counted."""
    readings = {
        name: Reading("kept", {"Gewicht": "weight"} if name == "b" else {}, group="bought") for name in "abcdef"
    }

    def by_three(name, rows):  # three rows a person, whom no other site knows
        return [[row[0] or "10", row[1], f"{name} {i // 3}", *row[3:]] for i, row in enumerate(rows)]

    made = tables("kept", readings, by_three, rounds=2)
    summary = made.serve()
    assert "bought" not in {one["name"] for one in summary.data.columns["inputs"]}
    federation = kinfed.from_csv(tmp_path / "all.csv", client="who", target="kept", group="bought", seed=11)
    compare(made, summary, federation)
    config = next(iter(made.grid.sites.values()))
    site = Site("a", Path(config["data"]), tmp_path, "cpu", readings["a"], policy=Policy(runs="any"))
    hello = site.reply("hello", messages.Message({}, {})).fields
    said = site.reply("describe", next(one for _, kind, one in made.grid.sent if kind == "describe")).fields
    assert "bought" not in json.dumps([hello, said])


@pytest.mark.usefixtures("exact")
def test_windows_of_a_group_count_as_one_at_a_site(meters, tmp_path):
    made = meters(rounds=2, horizons=[2], group="crew")
    summary = made.serve()
    how = {"client": "who", "target": "load", "time": "when", "past": 6, "horizon": 4, "horizons": [2], "seed": 11}
    compare(made, summary, kinfed.from_csv(tmp_path / "all.csv", group="crew", **how))
    assert "crew" not in json.dumps([message.fields for _, _, message in made.grid.sent])
    config = next(iter(made.grid.sites.values()))
    reading = Reading(**json.loads(config["reading"]))
    site = Site("a", Path(config["data"]), tmp_path, "cpu", reading, policy=Policy(runs="any"))
    assert "crew" not in json.dumps(site.reply("hello", messages.Message({}, {})).fields)


def test_sites_that_do_not_split_by_time_are_named(tables):
    readings = {"c": Reading("sold", ignore=["bought"]), "b": Reading("sold", {"Gewicht": "weight"}, time="bought")}
    readings |= {name: Reading("sold", time="bought") for name in "adef"}
    made = tables("sold", readings, lambda name, rows: [*of_time(name, rows)], rounds=1)
    made.serve()
    [told] = [line for line in made.lines if "time order" in line]
    assert told.startswith("client c: its rows are not split in time order, as those of others are")
    made = tables("sold", readings, lambda name, rows: [*of_time(name, rows)], rounds=1, split={"shuffle": True})
    made.serve()
    assert not [line for line in made.lines if "time order" in line]


@pytest.mark.usefixtures("exact")
def test_a_series_is_cut_by_its_own_times_if_the_run_says_so(meters, tmp_path):
    made = meters(
        rounds=1, split={"own_times": True}, change=lambda name: {"late": 10 * (ord(name) - ord("a"))}, horizons=[2]
    )
    summary = made.serve()
    assert not [one for _, _, one in made.grid.sent if "cuts" in one.fields.get("agreed", {})]
    federation = kinfed.from_csv(
        tmp_path / "all.csv",
        client="who",
        target="load",
        time="when",
        past=6,
        horizon=4,
        horizons=[2],
        split=Split(own_times=True),
        seed=11,
    )
    compare(made, summary, federation)


def test_names_of_columns_are_pairs():
    assert names_of(["Alter=age", "x=1=y"]) == {"Alter": "age", "x=1": "y"}
    for pairs in (["age"], ["=age"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(UsageError, match="THEIRS=OURS"):
            names_of(pairs)


PLAN = """
rounds = 9
method = "fedaghn"
model = { name = "net.py:Net", width = 4 }
[flower]
clients = 7
"""
NET = """
from torch import nn
def Net(shape, outputs, *, width: int):
    return nn.Sequential(nn.Linear(shape[0], width), nn.Tanh(), nn.Linear(width, outputs))
"""


@pytest.fixture
def check(tmp_path):
    """Rehearses with a site's table; returns what is printed."""
    write(tmp_path / "d.csv", [("d", row) for row in table(1)])
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "net.py").write_text(NET)

    def go(reading, code=("net.py",), run="plan.toml"):
        lines, files = [], [tmp_path / name for name in code]
        rehearse("d", tmp_path / "d.csv", reading, files, "cpu", tmp_path / run if run else None, lines.append)
        return lines

    return go


def as_sqlite(file, path):
    """The same rows in a database."""
    with closing(sqlite3.connect(path)) as made, file.open(newline="") as opened:
        heading, *rows = csv.reader(opened)
        made.execute(f"CREATE TABLE sales ({', '.join(heading)})")
        cells = [[cell or None for cell in row] for row in rows]
        made.executemany(f"INSERT INTO sales VALUES ({', '.join('?' * len(heading))})", cells)
        made.commit()


def test_a_check_says_what_fits_and_what_would_leave(check, tmp_path):
    lines = check(Reading("sold", categories=2))
    text = "\n".join(lines)
    assert "fits: by its own rows an example is [19], and a model has 1 output" in lines[0]
    assert "note      d.csv: 'fruit' has 4 categories, of which the 2 most frequent are named to the server" in text
    assert "model     Net fits: 85 parameters; method fedaghn" in lines
    assert "tensors   shared 0.weight, 0.bias, 2.weight, 2.bias (85 numbers)" in lines
    assert "greeting  names and kinds of 5 columns: weight (numbers), fruit (text), bought (dates)" in text
    assert "greeting  that its rows are not split in time order" in lines
    assert "2 categories by name and count:" in text
    assert (
        "a step takes 8 rows here; fewer than 8 are refused without --few-rows, as a gradient of few rows reveals them"
        in text
    )
    assert "upload/theta (float32 [85]), 340 bytes" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.csv", "net.py", "plan.toml"]  # nothing is written
    assert "model     not checked" in check(Reading("sold"), run="")[1]
    write(tmp_path / "d.csv", [("d", row) for row in of_time("d", table(1))])
    assert "greeting  that its rows are split in time order" in check(Reading("sold", time="bought"))


@pytest.mark.parametrize(
    ("reading", "code", "why"),
    [
        (Reading("none"), ["net.py"], "has no column 'none'"),
        (Reading("sold"), [], "this site has no file 'net.py'"),
        (
            Reading("sold", time="bought", past=3, horizon=2),
            ["net.py"],
            "is not a date|another row at the time|is not a",
        ),
    ],
)
def test_a_check_says_what_does_not_fit(check, reading, code, why):
    with pytest.raises(UsageError, match=why):
        check(reading, code)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("nn.Linear(3, outputs)", r"the model cannot take an example, which is \[\d+\]: mat1 and mat2 shapes"),
        ("nn.Linear(shape[0], 7)", r"the model gives \[7\] for an example, but its target is \[1\]$"),
    ],
)
def test_a_check_says_that_a_model_does_not_fit(check, tmp_path, layer, why):
    (tmp_path / "net.py").write_text(
        f"from torch import nn\ndef Net(shape, outputs, *, width: int):\n    return {layer}\n"
    )
    with pytest.raises(UsageError, match=why):
        check(Reading("sold"))


def test_a_check_says_what_only_all_sites_decide(check, tmp_path):
    """Whole numbers may be classes at one site, and numbers among all."""
    lines = check(Reading("kept"), run="")
    assert any(
        line.startswith("note      'kept' has 2 different whole numbers here: whether these are") for line in lines
    )
    (tmp_path / "plan.toml").write_text(PLAN + "labels = false\n")
    assert "a model has 1 output" in check(Reading("kept"))[0]
    assert not any("whole numbers here" in line for line in check(Reading("kept")))


def test_a_check_of_a_database_says_what_the_file_would(check, tmp_path, monkeypatch):
    """What it answered is in no file afterwards, and is called by the database's address."""
    monkeypatch.chdir(tmp_path)
    expected, lines = check(Reading("sold")), []
    as_sqlite(tmp_path / "d.csv", tmp_path / "d.db")
    kept = sorted(path.name for path in tmp_path.iterdir())
    examples = site_examples.open_examples("sqlite:///d.db", "SELECT * FROM sales", Reading("sold"))
    rehearse("d", examples, Reading("sold"), [tmp_path / "net.py"], "cpu", tmp_path / "plan.toml", lines.append)
    assert lines[0].startswith("file      sqlite:///d.db, the query fits: ")
    of_rows = ("file", "note", "columns")  # which come in another order, so that others are for training
    assert [line for line in lines if not line.startswith(of_rows)] == [
        line for line in expected if not line.startswith(of_rows)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_what_a_database_answered_stays_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d.csv", [("d", row) for row in table(1)])
    as_sqlite(tmp_path / "d.csv", tmp_path / "d.db")
    reading = Reading("sold", {"price": "weight"}, ignore=["notes"])
    query = "SELECT weight AS price, fruit, sold, x'00' AS notes FROM sales"
    with pytest.raises(UsageError, match=r"column 'notes' holds .*, not numbers, text or dates; convert it, or leave"):
        site_examples.open_examples("sqlite:///d.db", query, replace(reading, ignore=()))
    path = site_examples.keep_examples(site_examples.open_examples("sqlite:///d.db", query, reading), tmp_path)
    (tmp_path / "d.db").unlink()
    said = site_examples.find(path, "d", reading).hello()
    assert said["table"]["kinds"] == {"weight": "number", "fruit": "category"}
    with pytest.raises(UsageError, match=r"d\.csv is not a database"):
        site_examples.open_examples("d.csv", "SELECT 1", Reading())
    with pytest.raises(UsageError, match=r"there is no file e\.csv"):
        site_examples.open_examples("e.csv", "", Reading())


def test_scores_that_a_task_can_have_are_believed():
    keys = [("own", "test", name) for name in ("accuracy", "log_loss", "brier", "r2", "r2@x", "mae")]
    possible = {"accuracy": 1.0, "log_loss": 3.5, "brier": 1.9, "r2": -40.0, "r2@x": -2.0, "mae": 7.0}
    for task, names in ((Classification(3), ("accuracy", "log_loss", "brier")), (Regression(), ("r2", "r2@x", "mae"))):
        rows = [["own", "test", name, possible[name]] for name in names]
        assert read_scores(rows, keys, task) == {("own", "test", name): possible[name] for name in names}
    for task, name, value in (
        (Classification(3), "brier", 2.1),
        (Classification(3), "accuracy", 1.1),
        (Regression(), "mae", -1),
    ):
        with pytest.raises(ValueError, match=name):
            read_scores([["own", "test", name, value]], keys, task)


def test_sites_select_labels_as_a_simulation_of_their_table_does(tables, tmp_path):
    """By the loss, and the server says so; what it says of a task is read as it was."""
    made = tables("fruit", rounds=1)
    made.serve()
    [folder] = [path.parent for path in (tmp_path / "sites" / "b").rglob("join.safetensors")]
    words = ExperimentFolder(folder.parent, folder.name).invitation().fields["task"]
    simulated = kinfed.from_csv(tmp_path / "all.csv", client="who", target="fruit").task
    assert plan.read_task(words).selects == simulated.selects == "loss"
    assert plan.describe_task(plan.read_task(words)) == words


@pytest.mark.usefixtures("unmasked")
def test_sites_keep_answers_monotone_in_the_names_of_their_own_files(tables, tmp_path):
    made = tables("sold", rounds=12, method="personal-boosting", model="trees", monotone="weight:-")
    made.serve()
    for name, column in (("a", "weight"), ("b", "Gewicht")):
        [folder] = [path.parent for path in (tmp_path / "sites" / name).rglob("join.safetensors")]
        row = polars.read_csv(tmp_path / "sites" / name / "data.csv", infer_schema_length=0)[5]
        rows = polars.concat([row] * 20).with_columns(polars.Series(column, range(20)).cast(polars.String))
        rows.write_csv(tmp_path / "new.csv")
        answers = predictor_at(folder)(open_table(tmp_path / "new.csv"))["sold"].diff().drop_nulls()
        assert answers.max() <= 0
