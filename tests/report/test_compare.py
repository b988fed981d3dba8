import json
import math

import pytest
from plain_summary import nest
from rich.console import Console

from kinfed.errors import UsageError
from kinfed.report.tables.compare import compare
from kinfed.report.tables.runs_table import terminal

FEDERATION = {"dataset": {"name": "mnist"}, "partition": {"name": "iid"}}

NO_LOCAL = "Local is not among these runs; method.name=local shows the worth of"


def write(folder, method, values, **changes):
    """A run's folder with a summary of these clients' test scores."""
    mean = sum(values) / len(values)
    known = {
        "method": method,
        "dataset": "mnist",
        "federation": FEDERATION,
        "rounds": 3,
        "clients": len(values),
        "parameters": 10,
        "scores": {
            "own": {
                "mean": mean,
                "std": math.sqrt(sum((s - mean) ** 2 for s in values) / len(values)),
                "worst5": min(values),
                "best5": max(values),
                "round": 2,
            },
            "mixed": {"mean": 0.0, "std": 0.0, "worst5": 0.0, "best5": 0.0, "round": 1},
        },
        "clients_scores": {"own": values, "mixed": [0.0] * len(values)},
        "seconds": 12.0,
        "out": str(folder),
    }
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(nest(known | changes)))
    return folder


def drawn(comparison, width=80):
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        for part in terminal(comparison):
            console.print(part, soft_wrap=True)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_rows_are_sorted_best_first_and_headed_by_the_headline_model(tmp_path):
    worse = write(tmp_path / "a", "fedavg", [0.5, 0.7])
    better = write(tmp_path / "b", "fedamp", [0.8, 0.6], relation={"origin": "learned", "auroc": 0.9})
    (rows,) = compare([worse, better]).sets
    assert [row.method for row in rows] == ["fedamp", "fedavg"]
    assert [row.model for row in rows] == ["own", "own"]
    assert [row.auroc for row in rows] == [0.9, None]
    assert rows[0].mean == pytest.approx(0.7)
    assert rows[0].scores["std"] == pytest.approx(0.1)
    assert (rows[0].scores["worst5"], rows[0].scores["best5"], rows[0].over_seeds) == (0.6, 0.8, None)


def test_the_named_model_that_validation_prefers_on_the_mean_over_seeds_is_scored(tmp_path):
    """Of two models, and never by their test scores."""
    run = tmp_path / "a"
    for seed, (own, mixed) in enumerate([(0.9, 0.7), (0.4, 0.7)]):
        folder = write(run / f"seed-{seed}", "fedavg", [0.5, 0.7], seed=seed)
        summary = json.loads((folder / "summary.json").read_text())
        summary["scores"]["own"]["validation"] = own
        summary["scores"]["mixed"]["validation"] = mixed
        (folder / "summary.json").write_text(json.dumps(summary))
    assert compare([run]).sets[0][0].model == "mixed"
    assert compare([run / "seed-0"]).sets[0][0].model == "own"


def test_a_verdict_on_other_models_than_the_scores_says_so(tmp_path):
    """Each seed chose its own model, of which it kept the scores of examples; the table has one for all seeds."""
    for name in ("fedavg", "local"):
        for seed in (0, 1):
            folder = write(tmp_path / name / f"seed-{seed}", name, [0.5, 0.7], seed=seed)
            summary = json.loads((folder / "summary.json").read_text())
            summary["scores"]["own"]["validation"] = 0.6
            summary["scores"]["mixed"]["validation"] = 0.5 + 0.15 * seed * (name == "fedavg")
            summary["selection"]["chosen"] = "mixed" if name == "fedavg" and seed else "own"
            summary["scores"]["own"]["round"] = summary["scores"]["mixed"]["round"] = 1
            (folder / "summary.json").write_text(json.dumps(summary))
            (folder / "history.csv").write_text("round,client,model,split,metric,value\n")
    assert compare([tmp_path / "fedavg", tmp_path / "local"]).warnings == (
        "fedavg: its verdict is on the model that each seed chose ('own', 'mixed'), the scores on 'own'",
    )


def test_a_gain_over_fewer_seeds_than_local_has_says_over_which(tmp_path):
    for name, seeds in (("local", (0, 1, 2)), ("fedavg", (0, 2))):
        for seed in seeds:
            write(tmp_path / name / f"seed-{seed}", name, [0.5, 0.7], seed=seed)
    told = "fedavg's gain and verdict are over seeds 0, 2 alone, which local's row is not"
    assert told in compare([tmp_path / "fedavg", tmp_path / "local"]).warnings


def test_runs_with_different_graphs_are_compared_and_told_apart(tmp_path):
    graphs = ("given", "shuffled")
    runs = [
        write(tmp_path / g, "sfl", [0.5, 0.7], federation={"partition": {"name": "iid"}, "graph": {"name": g}})
        for g in graphs
    ]
    comparison = compare(runs)
    assert [len(rows) for rows in comparison.sets] == [2]
    lines = drawn(comparison)
    assert any(line.startswith("sfl (shuffled)") for line in lines)
    assert comparison.warnings == (f"{NO_LOCAL} sfl, sfl (shuffled)",)


def test_the_origin_of_a_relation_stands_beside_the_graphs_name(tmp_path):
    graph = {"partition": {"name": "iid"}, "graph": {"name": "shuffled"}}
    runs = [
        write(tmp_path / "a", "sfl", [0.5, 0.9], federation=graph, relation={"origin": "oracle"}),
        write(
            tmp_path / "b",
            "fedaghn",
            [0.5, 0.7],
            federation={"partition": {"name": "iid"}},
            relation={"origin": "learned"},
        ),
        write(tmp_path / "c", "pfedhn", [0.5, 0.6], federation={"partition": {"name": "iid"}}),
    ]
    comparison = compare(runs)
    assert [row.origin for row in comparison.sets[0]] == ["oracle", "learned", None]
    assert drawn(comparison)[-1] == "relations learned: fedaghn; oracle: sfl (shuffled)"
    fixed = drawn(compare([write(tmp_path / "d", "fedavg", [0.5], relation={"origin": "fixed"})]))
    assert not any(line.startswith("relations") for line in fixed)  # nobody gave them to it
    assert [run["origin"] for run in comparison.to_dict()["runs"]] == ["oracle", "learned", None]


def test_attacked_runs_are_tagged_and_scored_over_honest_clients(tmp_path):
    attack = {
        "name": "label_flip",
        "share": 0.3,
        "attackers": ["b"],
        "scores": {name: {"mean": 0.75, "std": 0.05, "worst5": 0.7, "best5": 0.8} for name in ("own", "mixed")},
    }
    clean = write(tmp_path / "clean", "fedavg", [0.8, 0.9, 0.9])
    attacked = write(tmp_path / "attacked", "fedavg", [0.8, 0.1, 0.7], attack=attack, names=["a", "b", "c"])
    local = write(tmp_path / "local", "local", [0.7, 0.7, 0.8])
    comparison = compare([clean, attacked, local])
    (rows,) = comparison.sets
    assert [(row.method, row.attack) for row in rows] == [("fedavg", ""), ("fedavg", "label_flip 0.3"), ("local", "")]
    assert (rows[1].mean, rows[1].scores["worst5"], rows[1].scores["best5"]) == (0.75, 0.7, 0.8)
    assert rows[0].counts == (3, 0, False)
    assert rows[1].counts == (1, 1, False)  # whatever became of the attacker
    lines = drawn(comparison)
    assert any(line.startswith("fedavg [label_flip 0.3] ") for line in lines)
    narrow = drawn(comparison, width=60)  # words fold and numbers are whole
    assert [line.split()[-6:] for line in narrow if " 75.00 " in line] == [
        line.split()[-6:] for line in lines if " 75.00 " in line
    ]
    assert any(line.startswith("under an attack") for line in lines)
    json.dumps(comparison.to_dict(), allow_nan=False)
    assert not any("attack" in line for line in drawn(compare([clean, local])))


def test_an_error_is_sorted_and_counted_the_other_way(tmp_path):
    error = {"metric": "mse", "higher_is_better": False}
    local = write(tmp_path / "local", "local", [2.0, 1.0, 4.0, 3.0], **error)
    other = write(tmp_path / "other", "fedavg", [1.0, 1.0, 5.0, 2.0], **error)
    (rows,) = compare([local, other]).sets
    assert [(row.method, row.counts) for row in rows] == [("fedavg", (2, 1, False)), ("local", None)]


def test_clients_helped_and_hurt_against_local(tmp_path):
    local = write(tmp_path / "local", "local", [0.5, 0.5, 0.5, 0.5, 0.5])
    other = write(tmp_path / "other", "fedavg", [0.6, 0.5, 0.4, 0.3, 0.1])
    (rows,) = compare([local, other]).sets
    assert rows[1].counts == (1, 3, False)
    assert compare([other]).sets[0][0].counts is None


def test_spread_over_seeds_is_apart_from_spread_over_clients(tmp_path):
    for seed, (own, local) in enumerate([([0.2, 0.4], [0.1, 0.5]), ([0.4, 0.8], [0.5, 0.9]), ([0.9, 0.9], [0.1, 0.1])]):
        write(tmp_path / "fedamp" / f"seed-{seed}", "fedamp", own, seed=seed, seconds=10.0 * (seed + 1))
        write(tmp_path / "local" / f"seed-{seed}", "local", local, seed=seed)
    (rows,) = compare([tmp_path / "local", tmp_path / "fedamp"]).sets
    row = rows[0]
    assert (row.method, row.seeds, str(row.folder)) == ("fedamp", (0, 1, 2), str(tmp_path / "fedamp"))
    # Means 0.3, 0.6 and 0.9 over two clients each, which differ by 0.2, 0.4 and 0.
    assert row.mean == pytest.approx(0.6)
    assert row.over_seeds == pytest.approx(0.3)
    assert row.scores["std"] == pytest.approx((0.1 + 0.2 + 0.0) / 3)
    assert row.scores["worst5"] == pytest.approx((0.2 + 0.4 + 0.9) / 3)
    assert row.seconds == 20
    # Helped: client 0; none; both. Hurt: client 1; both; none.
    assert row.counts == (1, 1, False)


def test_local_with_other_seeds_is_no_reference(tmp_path):
    local = write(tmp_path / "local", "local", [0.5, 0.5], seed=1)
    comparison = compare([local, write(tmp_path / "other", "fedavg", [0.6, 0.4])])
    assert comparison.sets[0][0].counts is None
    assert comparison.warnings == ("fedavg is not compared with local, which was not run with its seeds (0)",)


@pytest.mark.parametrize(
    ("clients", "changes", "differing"),
    [
        (3, {"dataset": "cifar10"}, "data set"),
        (2, {}, "clients"),
        (3, {"metric": "mse", "higher_is_better": False}, "metric"),
        (3, {"federation": FEDERATION | {"split": {"test": 0.3}}}, "federation.split.test"),
    ],
)
def test_runs_that_are_not_comparable_are_told_apart(tmp_path, clients, changes, differing):
    local = write(tmp_path / "local", "local", [0.1, 0.2, 0.3])
    other = write(tmp_path / "other", "fedavg", [0.9] * clients, **changes)
    third = write(tmp_path / "third", "fedamp", [0.3, 0.3, 0.3])
    comparison = compare([other, local, third])
    assert [[row.method for row in rows] for rows in comparison.sets] == [["fedamp", "local"], ["fedavg"]]
    assert comparison.sets[1][0].counts is None
    assert comparison.warnings[0] == f"runs that differ in {differing} are not comparable"
    lines = drawn(comparison)
    assert [line.split()[:2] for line in lines[3:7]] == [["A", "fedamp"], ["A", "local"], [], ["B", "fedavg"]]
    assert any(line.startswith("! runs that differ in") for line in lines)


def test_a_run_from_before_a_setting_came_has_its_default(tmp_path):
    before = write(tmp_path / "a", "local", [0.1, 0.2, 0.3], federation=FEDERATION | {"split": {"test": 0.2}})
    now = {"test": 0.2, "own_times": False, "fold": 0}
    since = write(tmp_path / "b", "fedavg", [0.3, 0.3, 0.3], federation=FEDERATION | {"split": now})
    assert len(compare([before, since]).sets) == 1


def test_leaking_runs_are_marked_and_explained(tmp_path):
    fair = write(tmp_path / "fair", "fedavg", [0.5, 0.7])
    lines = drawn(compare([fair, write(tmp_path / "leaks", "pfedgat", [0.9, 0.9], caution="it is told")]), width=200)
    assert lines[3].startswith("pfedgat * ")
    assert lines[4].startswith("fedavg   ")
    assert any(line.startswith("* leaking") for line in lines)
    assert not any("leaking" in line for line in drawn(compare([fair])))


def test_runs_of_one_method_are_numbered_and_named_by_folder(tmp_path):
    one = write(tmp_path / ("long" * 20) / "one", "fedavg", [0.5, 0.7])
    two = write(tmp_path / ("long" * 20) / "two", "fedavg", [0.6, 0.8])
    lines = drawn(compare([one, two]))
    assert [line.split()[:2] for line in lines[3:5]] == [["1", "fedavg"], ["2", "fedavg"]]
    assert lines[5:] == [f"! {NO_LOCAL} fedavg", f"1: {two}", f"2: {one}"]


def test_numbers_in_the_table(tmp_path):
    write(tmp_path / "run", "fedamp", [0.25, 0.75], relation={"origin": "learned", "auroc": 0.875})
    lines = drawn(compare([tmp_path / "run"]))
    assert lines[0] == "Test scores: mnist, 2 clients, accuracy in % (higher is better)"
    assert lines[3].split() == ["fedamp", "own", "50.00", "25.00", "25.00", "75.00", "0.875", "12"]
    error = write(tmp_path / "error", "fedamp", [0.011, 0.013], metric="mse", higher_is_better=False)
    assert drawn(compare([error]))[3].split() == ["fedamp", "own", "0.0120", "0.0010", "0.0110", "0.0130", "12"]


def test_to_dict_is_plain_json(tmp_path):
    undefined = write(tmp_path / "a", "fedamp", [0.5, 0.7], relation={"origin": "learned", "auroc": math.nan})
    given = write(tmp_path / "b", "local", [0.5, 0.6], relation={"origin": "given"})
    found = json.loads(json.dumps(compare([undefined, given]).to_dict(), allow_nan=False))
    assert [(run["set"], run["method"], run["auroc"], run["seeds"]) for run in found["runs"]] == [
        (1, "fedamp", None, [0]),
        (1, "local", None, [0]),
    ]
    assert found["warnings"] == []


def test_what_is_no_run_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="nothing to compare"):
        compare([])
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere"):
        compare([tmp_path / "nowhere"])
    broken = write(tmp_path / "broken", "fedavg", [0.5])
    (broken / "summary.json").write_text('{"method": ')
    with pytest.raises(UsageError, match="broken"):
        compare([broken])
    write(tmp_path / "repeated" / "seed-0", "fedavg", [0.5])
    (tmp_path / "repeated" / "seed-1").mkdir()
    with pytest.raises(UsageError, match="seed-1"):
        compare([tmp_path / "repeated"])


def test_unfinished_runs_are_left_out_and_named(tmp_path):
    done = write(tmp_path / "done", "fedavg", [0.5])
    begun, repeated = tmp_path / "begun", tmp_path / "repeated"
    write(repeated / "seed-0", "fedavg", [0.5])
    for folder in (begun, repeated / "seed-0", repeated / "seed-1"):
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").touch()
    found = compare([begun, done, repeated])
    assert [[str(row.folder) for row in rows] for rows in found.sets] == [[str(done)]]
    assert found.warnings[0] == f"left out, as not finished (kinfed resume continues them): {begun}, {repeated}"
    with pytest.raises(UsageError, match=r"no run is finished: .*begun; resume one: kinfed resume .*begun"):
        compare([begun])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a run's summary"),
        ("{}", "has no 'method'"),
        ('{"method": "local", "rounds": "3"}', "its 'rounds' is '3'"),
    ],
)
def test_a_summary_of_something_else_is_refused(tmp_path, text, message):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        compare([tmp_path])
    assert str(tmp_path) in str(caught.value)


def test_scores_that_are_missing_or_not_numbers_are_refused(tmp_path):
    for name, scores in (("nan", [0.5, math.nan]), ("short", [0.5])):
        folder = write(tmp_path / name, "fedavg", [0.5, 0.6], clients_scores={"own": scores})
        with pytest.raises(UsageError, match=f"{name}.*each of its 2 clients; got 1"):
            compare([folder])


def test_folders_of_seeds_must_be_one_run(tmp_path):
    write(tmp_path / "mixed" / "seed-0", "fedavg", [0.5])
    write(tmp_path / "mixed" / "seed-1", "fedamp", [0.5], seed=1)
    write(tmp_path / "copied" / "seed-0", "fedavg", [0.5])
    write(tmp_path / "copied" / "seed-0-copy", "fedavg", [0.5])
    for name in ("mixed", "copied"):
        with pytest.raises(UsageError, match=f"{name} are not one run repeated with different seeds"):
            compare([tmp_path / name])


def test_scores_by_class_and_warnings_are_told_beside_accuracy(tmp_path):
    """Of a run with two seeds as means over these; of runs without them nothing."""
    score = {"std": 0.1, "worst5": 0.5, "best5": 0.7, "round": 2}
    for seed, auc in enumerate((0.5, 0.7)):
        scores = {"own": score | {"mean": 0.6, "balanced_accuracy": 0.5 + seed / 10, "auc": auc}}
        warnings = ["the models of all 2 clients always answer 'no'"] if seed else []
        write(tmp_path / "a" / f"seed-{seed}", "fedavg", [0.5, 0.7], seed=seed, scores=scores, warnings=warnings)
    found = compare([tmp_path / "a", write(tmp_path / "b", "local", [0.6, 0.6])])
    first, second = sorted(found.sets[0], key=lambda row: row.method)
    assert (first.scores["balanced_accuracy"], first.scores["auc"]) == (pytest.approx(0.55), pytest.approx(0.6))
    assert (second.scores.keys() & {"balanced_accuracy", "auc"}, second.warnings) == (set(), ())
    text = drawn(found)
    assert "! fedavg: seed 1: the models of all 2 clients always answer 'no'" in text
    row = next(line for line in text if line.startswith("fedavg "))
    assert "55.00" in row.split()
    assert "0.600" in row.split()
    assert all(len(line) <= 80 for line in text)
    assert not any("AUC" in line for line in drawn(compare([tmp_path / "b"])))


def test_means_over_some_of_the_clients_say_so(tmp_path):
    score = {"mean": 0.6, "std": 0.1, "worst5": 0.5, "best5": 0.7, "round": 2, "balanced_accuracy": 0.5, "auc": 0.5}
    for name, several in (("fedavg", 1), ("local", 2)):
        counts = {"balanced_accuracy_clients": several, "auc_clients": several}
        write(tmp_path / name, name, [0.5, 0.7], scores={"own": score | counts})
    some = "balanced, AUC: 1 of 2 clients, the others are tested on one class"
    assert some in drawn(compare([tmp_path / "fedavg", tmp_path / "local"]))
    assert not any("tested on one class" in line for line in drawn(compare([tmp_path / "local"])))


def selected(folder, method, values, by, own):
    """A run that was selected by another score, of which its clients have these test scores."""
    return write(folder, method, values, selected_by=by, clients_selected={"own": own, "mixed": own})


@pytest.mark.parametrize(("by", "sign", "said"), [("balanced_accuracy", 1, "balanced accuracy"), ("loss", -1, "loss")])
def test_runs_are_ranked_and_clients_counted_by_the_score_that_selected_them_all(tmp_path, by, sign, said):
    always = selected(tmp_path / "a", "local", [0.9, 0.9, 0.9], by, [sign * 0.5, sign * 0.5, None])
    finds = selected(tmp_path / "b", "fedavg", [0.8, 0.7, 0.6], by, [sign * 0.9, sign * 0.4, None])
    found = compare([always, finds])
    ((first, second),) = found.sets
    assert (first.method, first.ranked_by, first.selected) == ("fedavg", by, pytest.approx(sign * 0.65))
    assert (first.counts, second.counts) == ((1, 1, False), None)
    text = drawn(found)
    assert text[0] == f"Test scores: mnist, 3 clients, accuracy in % (ranked by {said})"
    assert ("-0.65" in text[3].split()) == (by == "loss")  # balanced accuracy has a column of its own
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["runs"][0]["ranked_by"] == by
    # Beside a run that was selected by accuracy, and one that does not tell the score, accuracy ranks all.
    for other in (write(tmp_path / "c", "fedamp", [0.1] * 3), write(tmp_path / "d", "cfl", [0.1] * 3, selected_by=by)):
        (rows,) = compare([always, finds, other]).sets
        assert [row.method for row in rows[:2]] == ["local", "fedavg"]
        assert (rows[1].ranked_by, rows[1].counts) == ("accuracy", (0, 3, False))
