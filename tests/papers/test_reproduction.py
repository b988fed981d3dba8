"""What a published table reads out of runs, against the same numbers found another way."""

import json

import numpy as np
import pytest

from kinfed.runs.launch import run_all
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution
from kinfed_papers.analyses.late import held_back
from kinfed_papers.published_table import Column, Number, Protocol, Row
from kinfed_papers.reproduction import Reproduction
from kinfed_papers.scoring import Scoring
from kinfed_papers.table_statistics import comparison

SHARED = {
    "rounds": 6,
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"epochs": 1, "optimiser": {"name": "sgd", "lr": 0.1}},
    "federation": {"dataset": "digits", "clients": 6, "partition": "iid"},
}


def lines(tmp_path, row, column, *metrics):
    """The lines of a table with one cell, whose run is made; and the run's folder."""
    numbers = {(column.dataset, column.setting, row.printed, metric): Number(0.5, None, "") for metric in metrics}
    table = Protocol("made.table", "", "", 1, "seeds", {row.name: row}, {column.name: column}, [], SHARED, numbers)
    made = Reproduction(table, tmp_path, None)
    for outcome in run_all(made.runs(), Execution("loop"), on_begin=print):
        assert outcome.problem is None
    found = made.lines()
    assert [line.metric for line in found] == list(metrics)
    return {line.metric: line for line in found}, made.folder(row, column) / "seed-0"


@pytest.mark.parametrize(("stage", "layers"), [("first", "all"), ("middle", "deep"), ("final", "shallow")])
def test_weights_are_read_by_layer_and_stage(tmp_path, stage, layers):
    groups = {"federation": {"partition": {"name": "label_groups", "groups": 3, "share": 0.8}}}
    column = Column("digits", "Digits", "groups", at={"stage": stage, "layers": layers}, changes=groups)
    names = ("weight_self", "weight_similar", "weight_other")
    row = Row(
        "fedaghn",
        "FedAGHN",
        scoring=Scoring(("own",)),
        changes={"method": {"name": "fedaghn", "lr": 0.5, "feedback": "train"}},
    )
    found, folder = lines(tmp_path, row, column, *names)
    with np.load(folder / "relations.npz") as file:
        weights = file["relation"]  # [T, L, N, N]: one layer of the network below another
    selected = RunFolder(folder).read_summary().scores["own"]["round"]
    at = {"first": 1, "middle": max(1, round(selected / 2)), "final": selected}[stage] - 1
    one = weights[at][{"all": slice(None), "shallow": slice(0, 1), "deep": slice(1, 2)}[layers]].mean(0)
    own, same, other = [], [], []
    for i in range(6):
        for j in range(6):
            (own if i == j else same if i // 2 == j // 2 else other).append(one[i, j])
    expected = [np.mean(values) for values in (own, same, other)]
    assert [found[name].mean for name in names] == pytest.approx(expected, abs=1e-6)
    assert expected[0] + expected[1] + 4 * expected[2] == pytest.approx(1, abs=1e-5)
    assert found["weight_self"].difference == pytest.approx(expected[0] - 0.5, abs=1e-6)
    assert found["weight_self"].over_clients is None


def test_a_run_that_cannot_be_read_is_its_own_cells_failure(tmp_path):
    column = Column("digits", "Digits", "iid")
    rows = {name: Row(name, name, changes={"method": name}) for name in ("local", "fedavg")}
    numbers = {("Digits", "iid", name, "accuracy_pct"): Number(50.0, None, "") for name in rows}
    table = Protocol("made.table", "", "", 2, "seeds", rows, {"digits": column}, [], SHARED | {"rounds": 1}, numbers)
    made = Reproduction(table, tmp_path, None)
    assert [one.problem for one in run_all(made.runs(), Execution("loop"), on_begin=print)] == [None] * 4
    whole = {line.row.name: line for line in made.lines()}
    (made.folder(rows["local"], column) / "seed-1" / "history.csv").write_text("round\n")
    broken = {line.row.name: line for line in made.lines()}
    assert broken["fedavg"] == whole["fedavg"]
    assert broken["local"].by_seed == {0: whole["local"].by_seed[0]}
    assert broken["local"].status.startswith("failed: seed 1 cannot be read: ")
    found = comparison(made)
    assert [row.method for row in found.sets[0]] == ["fedavg"]
    assert found.warnings[0].startswith("local on digits has no statistics: ")


def test_clients_that_never_train_are_scored_alone(tmp_path):
    late = {"participation": {"late": 0.34, "joins": 6}, "evaluate_every": 6}
    column = Column("digits", "Digits", "novel", novel=True, changes=late)
    found, folder = lines(tmp_path, Row("fedavg", "FedAvg", scoring=Scoring(("shared",))), column, "accuracy_pct")
    absent = held_back(RunFolder(folder), 0.34)[0]
    assert absent.sum() == 2
    scores = np.array(RunFolder(folder).read_summary().clients.scores["shared"])
    assert found["accuracy_pct"].mean == pytest.approx(100 * scores[absent].mean(), abs=1e-4)
    assert found["accuracy_pct"].mean != pytest.approx(100 * scores.mean(), abs=1e-4)
    assert found["accuracy_pct"].over_clients == pytest.approx(100 * scores[absent].std(), abs=1e-4)


def test_best_and_worst_clients_and_a_model_that_is_named(tmp_path):
    column = Column("digits", "Digits", "all", changes={"federation": {"clients": 30}})
    names = ("mean_accuracy_pct", "best5pct_accuracy_pct", "worst5pct_accuracy_pct")
    found, folder = lines(tmp_path, Row("fedaghn", "FedAGHN", scoring=Scoring(("mixed",))), column, *names)
    score = RunFolder(folder).read_summary().scores["mixed"]
    expected = [100 * score[key] for key in ("mean", "best5", "worst5")]
    assert [found[name].mean for name in names] == pytest.approx(expected, abs=1e-4)
    scores = np.sort(RunFolder(folder).read_summary().clients.scores["mixed"])
    expected = [100 * part.std() for part in (scores, scores[-2:], scores[:2])]
    assert [found[name].over_clients for name in names] == pytest.approx(expected, abs=1e-4)
    assert expected[0] not in expected[1:]


def test_a_mean_of_columns_is_of_runs_with_the_same_seed(tmp_path):
    shards = {"federation": {"partition": {"name": "shards", "per_client": 2}}}
    columns = {
        "iid": Column("iid", "Digits", "iid"),
        "shards": Column("shards", "Digits", "shards", changes=shards),
        "mean": Column("mean", "Digits", "mean", mean_of=["iid", "shards"]),
    }
    row = Row("local", "Local", scoring=Scoring(("own",)))
    numbers = {("Digits", name, "Local", "accuracy_pct"): Number(0.5, None, "") for name in columns}
    table = Protocol("made.table", "", "", 11, "seeds", {"local": row}, columns, [], {**SHARED, "rounds": 1}, numbers)
    made = Reproduction(table, tmp_path, None, columns=["mean"])
    for seed in (2, 9, 10):  # by name, 10 comes before 2
        for column in ("iid", "shards"):
            if (seed, column) != (9, "iid"):
                one = [job for job in made.runs() if job.name == f"local on {column}, seed {seed}"]
                assert [outcome.problem for outcome in run_all(one, Execution("loop"), on_begin=print)] == [None]
    iid, dealt, mean = (line.by_seed for name in columns for line in made.lines() if line.column.name == name)
    assert (list(iid), list(dealt), list(mean)) == ([2, 10], [2, 9, 10], [2, 10])
    assert mean == {seed: pytest.approx((iid[seed] + dealt[seed]) / 2) for seed in (2, 10)}


def test_a_backdoor_is_scored_on_honest_clients(tmp_path):
    attack = {"attack": {"name": "backdoor", "share": 0.2}}
    found, folder = lines(
        tmp_path,
        Row("fedavg", "FedAvg", scoring=Scoring(("shared",))),
        Column("d", "D", "s", changes=attack),
        "asr_pct",
        "accuracy_pct",
    )
    score = json.loads((folder / "summary.json").read_text())["attack"]["scores"]["shared"]
    assert found["asr_pct"].mean == pytest.approx(100 * score["success"])
    assert found["accuracy_pct"].mean == pytest.approx(100 * score["mean"])


def test_the_least_rand_index_of_all_rounds(tmp_path):
    nodes = {"federation": {"partition": {"name": "topologies", "nodes": 3}}, "methods": {"fedcedar": {"clusters": 3}}}
    row = Row("fedcedar", "FedCedar", scoring=Scoring(("tuned",)))
    found, folder = lines(tmp_path, row, Column("d", "D", "s", changes=nodes), "rand_index_min")
    labels = {}
    for line in (folder / "diagnostics.csv").read_text().splitlines()[1:]:
        round, client, note, value = line.split(",")
        if note == "cluster":
            labels.setdefault(round, {})[int(client)] = value
    assert len(labels) == 6
    index = [
        np.mean([(one[i] == one[j]) == (i // 2 == j // 2) for i in one for j in one if i < j])
        for one in labels.values()
    ]
    assert found["rand_index_min"].mean == pytest.approx(min(index))


def test_columns_that_look_at_the_same_runs_share_them(tmp_path):
    columns = {name: Column(name, "Digits", name, at={"stage": name, "layers": "all"}) for name in ("first", "final")}
    columns["other"] = Column("other", "Digits", "other", changes={"rounds": 7})
    rows = {"local": Row("local", "Local", scoring=Scoring(("own",)))}
    numbers = {("Digits", "first", "Local", "weight_self"): Number(1, None, "")}
    made = Reproduction(Protocol("made.t", "", "", 2, "seeds", rows, columns, [], SHARED, numbers), tmp_path, None)
    folders = [job.folder for job in made.runs()]
    assert folders == [tmp_path / "runs" / c / "local" / f"seed-{s}" for s in (0, 1) for c in ("first", "other")]
    assert [line.status for line in made.lines()] == ["not run"] * 3
