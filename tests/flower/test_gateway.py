"""Many clients at one site: who they are, and that one batch of them trains as each would by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import UsageError
from kinfed.methods.solved.personal_boosting import PersonalBoosting
from kinfed_flower import plan
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server import broker, nodes
from kinfed_flower.server.server import serve
from kinfed_flower.site import site_cohort
from kinfed_flower.site.gateway import Gateway, split_by_client
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import OwnTable, Reading
from kinfed_flower.wire import messages
from kinfed_flower.wire.messages import Message

READING = Reading(target="y", few_rows=True, ignore=["times"])
WEIGHTED = Reading(target="y", few_rows=True, weight="times")
WARDS = {"h": ["a", "b", "c", "d"], "g": ["a", "b"], "": ["s", "t", "u"]}  # two gateways and three single sites


def rows(name, count):
    draw = np.random.default_rng(sum(map(ord, name)))
    x = draw.normal(size=(count, 3))
    return [[*one.round(4), "yes" if one @ [1, -1, 0.5] > 0 else "no"] for one in x]


def write(path, table):
    """Rows by ward as one CSV, with how often each counts; with a single ward, without the column that names it."""
    many = len(table) > 1
    lines = [",".join(["p", "q", "r", "y", "times", *["ward"] * many])]
    lines += [
        ",".join(map(str, [*row, 1 + i % 3, *[ward] * many]))
        for ward, rows in table.items()
        for i, row in enumerate(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def federation(tmp_path, monkeypatch, request):
    """The same nine clients twice: behind two gateways and three nodes, and each at its own node."""
    reading = getattr(request, "param", READING)
    for module in (broker, nodes):
        for name in ("LOOK", "RETRY", "LATER"):
            monkeypatch.setattr(module, name, 0.0, raising=False)
    grouped, single, told = [], [], []
    for site, wards in WARDS.items():
        names = {ward: f"{site}.{ward}" if site else ward for ward in wards}
        table = {ward: rows(name, 30 + 7 * i) for i, (ward, name) in enumerate(names.items())}
        for ward, name in names.items():
            path = write(tmp_path / f"{name}.csv", {ward: table[ward]})
            single.append(Site(name, path, tmp_path / "single", "cpu", reading, policy=Policy(runs="any")))
            if not site:
                grouped.append(Site(name, path, tmp_path / "grouped", "cpu", reading, policy=Policy(runs="any")))
        if site:
            files = split_by_client(write(tmp_path / f"{site}.csv", table), "ward", site, tmp_path / "parts")
            many = replace(reading, client="ward")
            made = Gateway(site, files, tmp_path / "grouped", "cpu", many, (), told.append, Policy(runs="any"))
            grouped.append(made)
    return grouped, single, told


def train(sites, out, method):
    grows = method == "personal-boosting"  # three rounds count, and a tree of three levels takes three
    model = {"name": "trees", "depth": 3} if grows else {"name": "mlp", "hidden": [6]}
    table = {"rounds": 9 if grows else 3, "seed": 5, "method": method, "model": model}
    table |= {"training": {"epochs": 2, "batch": 8, "optimiser": {"name": "sgd", "lr": 0.2}}}
    table |= {"flower": {"clients": 9, "beside": ["local"]}}
    return serve(plan.resolve(table), Here(sites), out, log=lambda line: None, poll=0.0)


@pytest.mark.parametrize(
    ("method", "federation"),
    [
        ("fedavg", READING),
        ("fedaghn", READING),
        ("ditto", READING),
        ("fedper", READING),
        ("fedavg", WEIGHTED),
        ("personal-boosting", READING),
    ],
    indirect=["federation"],
)
def test_clients_of_gateways_end_with_the_models_that_each_gets_at_a_node_of_its_own(
    federation, method, tmp_path, monkeypatch
):
    monkeypatch.setattr(PersonalBoosting, "needs_masks", False)  # as masked clients share no gateway's computation
    grouped, single, told = federation
    sizes, real = [], site_cohort.compute
    monkeypatch.setattr(
        "kinfed_flower.site.site_cohort.compute", lambda parts, *one: sizes.append(len(parts)) or real(parts, *one)
    )
    ours, theirs = (train(sites, tmp_path / f"out-{i}", method) for i, sites in enumerate((grouped, single)))
    assert set(sizes) == {4, 2}
    assert sorted(ours.by_client.names) == sorted(theirs.by_client.names)
    assert len(ours.by_client.names) == 9
    for name in ours.by_client.names:
        mine, other = (
            load_file(tmp_path / kind / name / summary.sites.experiment / "model.safetensors")
            for kind, summary in (("grouped", ours), ("single", theirs))
        )
        for key, value in other.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-5)
    assert not [line for line in told if "fails" in line]
    assert len([line for line in told if line.startswith("tensors: ")]) == 2


def test_a_client_that_fails_harms_no_other_of_its_gateway(federation, tmp_path, monkeypatch):
    grouped, _, told = federation
    real = site_cohort.compute

    def compute(parts, *one):
        if any(part.simulation.names == ("h.b",) for part in parts):
            raise RuntimeError("of its own")
        return real(parts, *one)

    monkeypatch.setattr("kinfed_flower.site.site_cohort.compute", compute)
    summary = train(grouped, tmp_path / "out", "fedavg")
    assert "h.a" in summary.clients.names
    assert any("client h.b: unexpected RuntimeError: of its own" in line for line in told)


def test_a_gateway_speaks_for_names_that_begin_with_its_own_alone():
    words = {"shape": [1], "outputs": 1, "task": {"name": "Regression"}, "columns": []}
    said = {
        "client": "h",
        "kinfed": nodes.__version__,
        "clients": {"h.a": words, "eve": words, "h.": words, "hx.b": words},
    }
    lines = []
    known = nodes.Nodes(lines.append, None)
    known.online[7] = nodes.Node("now", "h")
    known.admit(7, Message(said, {}), 0.0)
    assert list(known.clients) == ["h.a", "h."]
    assert known.gateways == {7}
    assert "2 of its clients cannot take part; eve: it claims to be client eve, but its key is that of h" in lines[0]


def test_what_is_no_bundle_or_of_no_client_here_is_refused(federation):
    gateway = federation[0][0]
    assert "no bundle" in gateway.reply("round", Message({"experiment": "e"}, {})).fields["refused"]
    gateway._report = (told := []).append
    for _ in range(2):
        reply = gateway.reply("verdict", messages.bundle({"eve": Message({"experiment": "e"}, {})}))
    assert messages.unbundle(reply)["eve"].fields["refused"] == "no row of its site's file names it"
    assert told == ["client eve: no row of this site's file names it, so the run goes on without it"]


def test_two_columns_name_the_clients_of_a_gateway(tmp_path):
    text = "hospital,ward,age,y\n" + "".join(f"h{i % 2},w{i // 4},{i},{i}\n" for i in range(8))
    path, dotted = tmp_path / "h.csv", tmp_path / "d.csv"
    path.write_text(text)
    dotted.write_text(text.replace("w1", "w.1"))
    files = split_by_client(path, "hospital,ward", "north", tmp_path / "parts")
    assert sorted(files) == ["north.h0.w0", "north.h0.w1", "north.h1.w0", "north.h1.w1"]
    reading = Reading(client="hospital,ward", columns={"age": "years"})
    gateway = Gateway("north", files, tmp_path / "grouped", "cpu", reading)
    table = OwnTable(files["north.h1.w0"], "north.h1.w0", gateway.sites["north.h1.w0"]._reading)
    assert table.frame["y"].numbers().tolist() == [1, 3]
    assert table.kinds == {"years": "number"}
    with pytest.raises(
        UsageError, match=r"'north\.h0\.w\.1' cannot be a client's name; letters, digits, '_' and '-' may be used"
    ):
        split_by_client(dotted, "hospital,ward", "north", tmp_path / "parts")


def test_a_column_of_clients_must_name_clients(tmp_path):
    path = write(tmp_path / "t.csv", {"a": rows("a", 3), "b": rows("b", 3)})
    with pytest.raises(UsageError, match="wards"):
        split_by_client(path, "wards", "h", tmp_path / "parts")
    bad = write(tmp_path / "bad.csv", {"a": rows("a", 3), "b/c": rows("b", 3)})
    with pytest.raises(UsageError, match=r"'h\.b/c' cannot be a client's name"):
        split_by_client(bad, "ward", "h", tmp_path / "parts")
    empty = write(tmp_path / "empty.csv", {"a": rows("a", 3), "": rows("b", 3)})
    with pytest.raises(UsageError, match=r"line 5, column 'ward' is empty, so its row is no client's"):
        split_by_client(empty, "ward", "h", tmp_path / "parts")
    (tmp_path / "x.npz").touch()
    with pytest.raises(UsageError, match="--client names a column of a table"):
        split_by_client(tmp_path / "x.npz", "ward", "h", tmp_path / "parts")
