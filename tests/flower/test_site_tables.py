"""Tables as they are at sites: what is told of them, and the same description, examples and models as all rows give."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import kinfed
from kinfed.core.method import model_for
from kinfed.core.seeding import generator
from kinfed.data.description import Description
from kinfed.flower.site_reading import Reading

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
    """Makes a Trial whose six sites have tables, of which those that `readings` names are read in another way."""

    def make(target="sold", readings=None, change=lambda name, rows: rows, method="fedavg", **settings):
        made = trial(method, linked=False, **settings)
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
            reading.write(tmp_path / "sites" / name / "reading.json")
            config |= {"data": str(path), "reading": str(tmp_path / "sites" / name / "reading.json")}
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


@pytest.mark.parametrize("target", ["sold", "fruit"])
def test_the_description_found_in_a_federation_is_that_of_all_rows(tables, tmp_path, target):
    made = tables(target, rounds=1)
    summary = made.serve()
    federation = kinfed.from_csv(tmp_path / "all.csv", client="who", target=target, seed=11)
    alike(Description.from_dict(json.loads(json.dumps(summary.columns))), federation.columns)
    assert summary.classes == (list(federation.class_names) if target == "fruit" else None)
    assert summary.metric == federation.task.metric
    if target == "sold":
        assert summary.scale["targets"]["sold"]["mean"] == pytest.approx(federation.task.mean)
    # No site is told of the scales of another.
    for name, kind, message in made.grid.sent:
        if kind == "join":
            assert set(message.words["description"]["clients"]) <= {name}


@pytest.mark.parametrize(("target", "method"), [("sold", "fedaghn"), ("fruit", "fedavg")])
def test_sites_with_tables_end_with_the_models_of_a_simulation(tables, tmp_path, target, method):
    def whole_numbers(name, rows):  # without holes among fractions, so that medians cannot differ by a hair
        return [["7.500" if not cell and i == 0 else cell for i, cell in enumerate(row)] for row in rows]

    made = tables(target, rounds=3, change=whole_numbers, method=method)
    summary = made.serve()
    federation = kinfed.from_csv(tmp_path / "all.csv", client="who", target=target, seed=11)
    learning = made.planned.learning
    run = kinfed.fit(
        learning.method,
        federation,
        model_for(learning.method, module(made.planned, summary), seed=11),
        rounds=3,
        training=learning.training,
        seed=11,
        execution=kinfed.Execution(executor="loop"),
    )
    compare(made, summary, run)


def compare(made, summary, run):
    """The sites' scores and models are those of a simulation."""
    assert summary.chosen == run.history.chosen
    for key, scores in summary.clients_scores.items():
        assert scores == pytest.approx(run.history.test(key).tolist(), rel=1e-4, abs=1e-5)
    for i, name in enumerate(summary.names):
        (folder,) = (made.folder / "sites" / name / name).glob("*/model.safetensors")
        mine = load_file(folder)
        for key, value in run.load_model(i).state_dict().items():
            torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-5)


def module(planned, summary):
    """The network with the initial values that a server gives it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(planned.learning.seed, "model").initial_seed())
        return planned.learning.model(tuple(summary.shape), summary.outputs)


START = np.datetime64("2024-03-01T00:00")


def series(path, seed, steps=260, minutes=60, gaps=(), missing=(), zone="", late=0):
    """A site's readings: those at `gaps` have no row, those of `missing` no value."""
    draw, lines = np.random.default_rng(seed), ["when,load"]
    values = 50 + 10 * np.sin(np.arange(steps) / (3 + seed)) + draw.normal(size=steps)
    for i in range(late, steps):
        if i not in gaps:
            when = str(START + np.timedelta64(i * minutes, "m")).replace("T", " ") + zone
            lines.append(f"{when},{'' if i in missing else f'{values[i]:.4f}'}")
    path.write_text("\n".join(lines) + "\n")
    return lines[1:]


OUTAGE = range(100, 112)  # no site has a reading, though some have rows


@pytest.fixture
def meters(trial, tmp_path):
    """Makes a Trial of six sites with series, and the same in one file."""

    def make(method="fedavg", change=lambda name: {}, **settings):
        made = trial(method, **settings)
        lines = ["who,when,load"]
        for i, config in enumerate(made.grid.sites.values()):
            name, path = config["client-id"], tmp_path / "sites" / config["client-id"] / "data.csv"
            how = {
                "gaps": {*range(60, 60 + 9 * i)} & {*range(60, 80)} | ({*range(150, 155)}),
                "missing": {*OUTAGE, *range(20 * i, 20 * i + 7)},
                "late": 30 * (i == 3),
            }
            lines += [f"{name},{line}" for line in series(path, i, **how | change(name))]
            Reading("load", time="when", past=6, horizon=4).write(path.with_name("reading.json"))
            config |= {"data": str(path), "reading": str(path.with_name("reading.json"))}
        (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
        return made

    return make


def test_sites_with_series_end_with_the_models_of_a_simulation(meters, tmp_path):
    miles = [f"{a},{b},{1 + abs(i - j)}\n" for i, a in enumerate("abcdef") for j, b in enumerate("abcdef") if i < j]
    (tmp_path / "map.csv").write_text("from,to,miles\n" + "".join(miles))
    graph = {"graph": str(tmp_path / "map.csv"), "distances": "miles", "sigma": 2.0, "horizons": [2]}
    made = meters("sfl", rounds=2, **graph)
    summary = made.serve()
    federation = kinfed.from_csv(
        tmp_path / "all.csv",
        client="who",
        target="load",
        time="when",
        past=6,
        horizon=4,
        horizons=[2],
        edges=tmp_path / "map.csv",
        distances="miles",
        sigma=2.0,
        seed=11,
    )
    assert (summary.shape, summary.outputs) == ([6, 2], 4)
    learning = made.planned.learning
    run = kinfed.fit(
        learning.method,
        federation,
        model_for(learning.method, module(made.planned, summary), seed=11),
        rounds=2,
        training=learning.training,
        seed=11,
        execution=kinfed.Execution(executor="loop"),
    )
    compare(made, summary, run)
    assert summary.scale["inputs"]["reading"]["mean"] == pytest.approx(federation.scale["inputs"]["reading"]["mean"])
