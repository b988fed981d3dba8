"""Published tables: every printed number has its place, and settings are what the papers print."""

import csv
import json

import pytest
import torch

from kinfed import UsageError
from kinfed.cli import main
from kinfed.core.engine import sample
from kinfed.core.method import Roster
from kinfed.core.seeding import tags
from kinfed.methods.parts.graph_hypernetwork import GCN
from kinfed.methods.parts.heads import FullHeads
from kinfed.methods.sfl import Known
from kinfed.runs.config import experiment
from kinfed_papers import published_table
from kinfed_papers.published_table import CONTROL, UNPRINTED, Row
from kinfed_papers.reproduction import MEASURES

PAPERS = ("fedaghn", "fedcedar", "panacea", "pfedgat", "sfl")
# As printed: rounds, clients in a round, batch, epochs or steps, client rate (None: not printed), the method's.
PRINTED = {
    "sfl/table2/cifar10/shards2": (
        20, 100, 128, None, None, {"steps": 1, "rho": 1.0, "begin": "own", "structure": Known()}
    ),
    "sfl/table2/cifar10/shards5-released": (
        20, 100, 128, 20, None, {"steps": 3, "begin": "shared", "pull": 0.0, "rho": 1.0}
    ),
    "sfl/table1/metr_la": (20, 207, 128, None, None, {"structure": Known()}),
    "pfedgat/table1/cifar10/dirichlet": (
        50, 10, 64, 5, 0.01, {"heads": 8, "slope": 0.2, "lr": 0.01, "feedback": "test"}
    ),
    "pfedgat/table3/cifar10/50": (50, 50, 64, 5, 0.01, {"heads": 8}),
    "fedaghn/table1/cifar10/dirichlet": (
        200, 20, 64, 5, 0.01, {"home": 0.03, "sharpness": 0.5, "lr": 0.005, "sign": "printed", "feedback": "train"}
    ),
    "fedaghn/table1/tiny_imagenet/pathological-resnet18": (40, 20, 64, 5, 0.01, {"sign": "printed"}),
    "fedaghn/table3/cifar10/groups": (200, 20, 64, 5, 0.01, {"home": 0.03, "lr": 0.005, "sign": "printed"}),
    "fedcedar/table1/cifar10/shards": (100, 30, 16, 5, 0.01, {"clusters": 5, "steps": 2}),
    "panacea/table2/fl60": (800, 5, 64, 50, None, {"embedding": 100, "encoder": GCN(3, 100), "steps": 10}),
    "panacea/table2/tpt48": (800, 5, 64, 50, None, {"decoder": FullHeads(3, 100), "steps": 10}),
    "panacea/table2/metr_la": (800, 5, 64, 50, None, {"reconstruction": 0.1, "steps": 10}),
    "panacea/table2/compcars": (100, 5, 64, 50, None, {"steps": 10}),
}  # fmt: skip
OWNERS = {"synthetic": 60, "dg60": 60, "compcars": 30, "tpt48": 48, "metr_la": 207, "pems_bay": 325}
OWNERS |= {"metr_la_subset": 29, "pems_bay_subset": 67}
SHAPES = {"cifar10": (3, 32, 32), "tiny_imagenet": (3, 64, 64), "metr_la": (12, 2), "synthetic": (2,), "tpt48": (6, 1)}
SHAPES |= {"compcars": (3, 64, 64)}
OUTPUTS = {"metr_la": 12, "synthetic": 2, "tpt48": 6, "compcars": 4, "tiny_imagenet": 200}


@pytest.mark.parametrize("name", PRINTED)
def test_settings_are_those_that_are_printed(name):
    found = experiment.resolve(experiment.read(f"papers/{name}", []))
    rounds, cohort, batch, work, rate, settings = PRINTED[name]
    data = found.table["federation"]["dataset"]["name"]
    count = found.table["federation"]["clients"] or OWNERS[data]
    assert found.table["rounds"] == rounds
    assert round(found.participation.share * count) == cohort
    assert found.training.batch == batch
    assert work in (None, found.training.steps or found.training.epochs)
    assert rate in (None, found.training.optimiser.lr)
    assert {key: getattr(found.method, key) for key in settings} == settings
    outputs = OUTPUTS.get(data, 10)
    assert found.model(SHAPES[data], outputs)(torch.zeros(2, *SHAPES[data])).shape == (2, outputs)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_printed_number_has_a_cell_or_a_reason(paper):
    known = {name: published_table.load(name) for name in published_table.tables() if name.startswith(f"{paper}.")}
    placed = {
        (number, row.printed, column.dataset, column.setting)
        for name, table in known.items()
        for number in [published_table.printed_as(name)]
        for row in table.rows.values()
        for column in table.columns.values()
    }
    with (published_table.PAPERS / paper / "printed.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    without = published_table.elsewhere(paper)
    assert all(len(reason) > 20 for reason in without.values())
    assert not set(without) & {published_table.printed_as(name) for name in known}
    for line in lines:
        float(line["mean"])
        assert line["std"] == "" or float(line["std"]) >= 0
        if line["table"] not in without:
            assert (line["table"], line["method"], line["dataset"], line["setting"]) in placed
    assert sum(len(table.numbers) for table in known.values()) == sum(line["table"] not in without for line in lines)


@pytest.mark.parametrize("name", published_table.tables())
def test_every_cell_resolves_whole_and_scaled(name):
    table = published_table.load(name)
    assert table.seeds >= 1
    assert table.spread in ("seeds", "clients")
    for column in table.columns.values():
        assert set(table.metrics(column)) <= set(MEASURES)
        assert table.metrics(column)
        assert set(column.mean_of) <= set(table.columns)
        for row in table.rows.values():
            if row.missing or column.mean_of:
                continue
            raw = table.raw(row, column)
            found = experiment.resolve(raw)
            assert found.table["rounds"] % found.table["evaluate_every"] == 0
            assert column.novel == (found.participation.joins == found.table["rounds"])
            part = experiment.resolve(published_table.scale_config(raw, 0.1))
            assert part.table["rounds"] == max(5, found.table["rounds"] // 10)
            assert column.novel == (part.participation.joins == part.table["rounds"])
            if name.startswith("panacea"):
                owners = OWNERS[found.table["federation"]["dataset"]["name"]]
                here = owners - (round(0.2 * owners) if column.novel else 0)
                assert _cohort(found.participation.share, here) == 5


@pytest.mark.parametrize("paper", PAPERS)
def test_fine_tuning_in_tables_takes_one_rounds_training(paper):
    """As the papers' own programs have it; the default outside tables is longer."""
    for name in published_table.tables():
        table = published_table.load(name)
        for row in table.rows.values():
            if name.startswith(paper) and row.name in ("fedavg-ft", "fedprox-ft"):
                for column in table.columns.values():
                    if not column.mean_of:
                        assert experiment.resolve(table.raw(row, column)).method.length == 1


def _cohort(share, count):
    ones, names = torch.ones(count, dtype=torch.int64), tags([str(i) for i in range(count)])
    return len(sample(Roster(torch.zeros(1), None, ones, None, 0, names), share))


def test_scaling_shortens_what_counts_rounds_and_nothing_else():
    table = published_table.load("fedaghn.table1")
    raw = table.raw(table.rows["cfl"], table.columns["cifar10/dirichlet"])
    whole, part = (experiment.resolve(r).table for r in (raw, published_table.scale_config(raw, 0.25)))
    assert (whole["rounds"], part["rounds"]) == (200, 50)
    assert (whole["method"]["begin"], part["method"]["begin"]) == (20, 5)
    assert (whole["evaluate_every"], part["evaluate_every"]) == (5, 5)
    assert part["federation"]["split"] == {**whole["federation"]["split"], "share": 0.25}
    for key in ("training", "model", "participation", "seed"):
        assert whole[key] == part[key]
    few = experiment.resolve(published_table.scale_config(raw, 0.001)).table
    assert (few["rounds"], few["evaluate_every"], few["method"]["begin"]) == (5, 1, 1)
    last = published_table.load("fedcedar.table1")
    raw = last.raw(last.rows["fedcedar"], last.columns["mnist/iid"])
    found = experiment.resolve(published_table.scale_config(raw, 0.5)).table
    assert (found["rounds"], found["evaluate_every"]) == (50, 50)  # scored after the last round, as before
    nodes = published_table.load("fedcedar.figure3")
    raw = nodes.raw(nodes.rows["fedcedar"], nodes.columns["mnist/path3"])
    found = experiment.resolve(published_table.scale_config(raw, 0.1)).table
    assert (found["rounds"], found["evaluate_every"], found["participation"]["by_group"]) == (20, 5, 5)  # in step


def test_tables_laid_over_each_other():
    under = {"a": 1, "part": {"name": "x", "k": 1}, "deep": {"b": {"c": 1, "d": 2}}}
    assert published_table.merge_tables(under, {"part": {"k": 2}, "deep": {"b": {"c": 3}}}) == {
        "a": 1,
        "part": {"name": "x", "k": 2},
        "deep": {"b": {"c": 3, "d": 2}},
    }
    assert published_table.merge_tables(under, {"part": {"name": "y"}})["part"] == {"name": "y"}
    assert published_table.merge_tables(under, {"part": "y"})["part"] == "y"
    assert under["deep"]["b"]["c"] == 1


def test_a_subset_stands_beside_the_data_it_stands_for():
    table = published_table.load("panacea.table2")
    whole, part = table.columns["metr_la"], table.columns["metr_la_subset"]
    assert (whole.subset, part.subset) == (False, True)
    assert (part.dataset, part.setting) == (whole.dataset, whole.setting)
    assert part.changes["federation"]["dataset"] == {"name": "metr_la_subset", "error": "squared"}
    assert whole.changes["federation"]["dataset"] == {"name": "metr_la", "error": "squared"}
    assert "cifar100_subset/iid" in published_table.load("pfedgat.table1").columns


def test_a_row_with_settings_of_its_own_is_another_method():
    table = published_table.load("pfedgat.table1")
    column = table.columns["cifar10/iid"]
    methods = {
        name: experiment.resolve(table.raw(table.rows[name], column)).method for name in ("pfedgat", "pfedgat-fair")
    }
    assert (methods["pfedgat"].feedback, methods["pfedgat-fair"].feedback) == ("test", "held-out")
    assert methods["pfedgat-fair"].heads == methods["pfedgat"].heads == 8


def test_a_file_of_your_own_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "papers" / "sfl" / "table1").mkdir(parents=True)
    (tmp_path / "papers" / "sfl" / "table1" / "metr_la").write_text("rounds = 3")
    assert experiment.read("papers/sfl/table1/metr_la", []) == {"rounds": 3}


def test_other_methods_have_the_papers_settings_for_them():
    found = experiment.resolve(experiment.read("papers/fedaghn/table1/cifar10/dirichlet", ["method.name=cfl"]))
    assert (found.method.eps1, found.method.eps2) == (0.5, 0.5)


def test_names_are_listed_and_a_wrong_one_is_put_right(capsys):
    assert main(["papers", "list", "experiments", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries["papers/fedaghn/table3/cifar10/groups"]["what"].startswith("CIFAR-10 (4-layer CNN+BN), case study")
    assert main(["papers", "list", "tables", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert set(entries) == set(published_table.tables())
    assert entries["pfedgat.table3"]["what"].startswith("Accuracy of 10, 25 and 50 clients")
    with pytest.raises(UsageError, match="there is no 'papers/sfl/table1/metr'; did you mean"):
        experiment.read("papers/sfl/table1/metr", [])
    with pytest.raises(UsageError, match=r"'papers/nope'; did you mean '[^']+'\? \(kinfed papers list experiments "):
        experiment.read("papers/nope", [])
    with pytest.raises(UsageError, match="there is no table"):
        published_table.load("sfl.tabel1")


@pytest.mark.parametrize("name", published_table.tables())
def test_every_table_of_scores_has_controls_where_they_can_be(name):
    table = published_table.load(name)
    controls = [row for row in table.rows.values() if row.kind == CONTROL]
    if name in ("fedaghn.table4", "fedaghn.appendix2", "fedcedar.figure3"):  # of weights, and of clusters
        assert not controls
    else:
        assert {"local", "fedavg", "fedavg-ft"} <= {*table.rows}
    column = next(column for column in table.columns.values() if not column.mean_of)
    for row in controls:
        if row.name not in column.lacks:
            graph = experiment.resolve(table.raw(row, column)).table["federation"]["graph"]
            assert (graph["name"] == "shuffled") == (row.name == "shuffled")


@pytest.mark.parametrize("name", published_table.tables())
def test_every_printed_method_is_in_kinfed(name):
    table = published_table.load(name)
    assert {method for _, _, method, _ in table.numbers} <= {row.printed for row in table.rows.values()}
    assert not [row.name for row in table.rows.values() if row.missing == "not in kinfed"]


def test_the_shuffled_graph_is_that_of_the_column():
    for name, column, expected in (
        ("sfl.table2", "cifar10/shards2", ("sfl", {"name": "shuffled", "of": "label_overlap"})),
        ("sfl.table1", "metr_la_subset", ("sfl", {"name": "shuffled", "of": "given"})),
        ("panacea.table2", "fl60", ("panacea", {"name": "shuffled", "of": "given"})),
        ("fedaghn.table3", "cifar10/groups", ("sfl", {"name": "shuffled", "of": "oracle"})),
        ("pfedgat.table1", "cifar10/pathological", ("sfl", {"name": "shuffled", "of": "label_overlap"})),
    ):
        table = published_table.load(name)
        found = experiment.resolve(table.raw(table.rows["shuffled"], table.columns[column])).table
        assert (found["method"]["name"], found["federation"]["graph"]) == expected
    assert "no such graph" in published_table.load("fedaghn.table1").columns["cifar10/dirichlet"].lacks.values()
    assert "oracle" not in published_table.load("pfedgat.table3").rows  # no column has a graph


def test_panaceas_baselines_have_their_own_papers_settings():
    for name, score in (("panacea.table2", "own"), ("panacea.table3", "shared")):
        table = published_table.load(name)
        fl60 = table.columns["fl60"]
        found = {row: experiment.resolve(table.raw(table.rows[row], fl60)).method for row in ("pfedme", "ditto")}
        assert (found["pfedme"].pull, found["pfedme"].steps) == (15.0, 5)
        assert found["pfedme"].share == pytest.approx(15 * 0.03)  # lambda times the rate
        assert found["ditto"].pull == 1.0
        assert {table.rows[row].score for row in found} == {score}
        assert [column.name for column in table.columns.values() if column.generated] == ["fl60"]


def test_a_method_of_the_paper_that_a_table_does_not_print_has_the_papers_settings():
    table = published_table.load("fedaghn.table3")
    row = table.extra("ditto")
    assert (row.kind, row.score, row.printed) == (UNPRINTED, "own", "Ditto")
    assert experiment.resolve(table.raw(row, table.columns["cifar10/groups"])).method.pull == 1.0
    assert table.extra("fedfomo") == Row("fedfomo", "fedfomo", kind=UNPRINTED, scoring=table.scoring)
