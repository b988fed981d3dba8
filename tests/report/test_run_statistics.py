"""Statistics of compared runs: which runs are paired, which are refused, and what readers are told."""

import csv
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from kinfed.cli import main
from kinfed.core.history import Spent
from kinfed.errors import UsageError
from kinfed.report.tables import text_table
from kinfed.report.tables.compare import Comparison, compare
from kinfed.report.tables.run_statistics import names_of, ranking, statistics
from kinfed.report.tables.statistics_tables import grids
from kinfed.report.tables.target import tabulate_target
from kinfed.report.tables.text_table import quantity
from kinfed.runs.tested_examples import Tested
from kinfed.verdict import statistics as by


@pytest.fixture
def write(finished):
    """Writes a run with these scores of clients, [N] or by seed; gives its folder."""

    def one(path, method, scores, models=None, **known):
        values = [float(v) for v in scores]
        every = {"own": values} | (models or {})
        told = {name: {"mean": float(np.nanmean(each))} for name, each in every.items()}
        known = {"clients": len(values), "clients_scores": every, "dataset": "d"} | known
        return finished(path, told, method=method, **known).path

    def repeated(path, method, scores, **known):
        if not isinstance(scores, dict):
            return one(path, method, scores, **known)
        for seed, each in scores.items():
            one(path / f"seed-{seed}", method, each, seed=seed, **known)
        return path

    return repeated


def drawn(tables, width=100):
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        for table in tables:
            for part in text_table.terminal(table):
                console.print(part, soft_wrap=True)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_pairs_with_local_fedavg_ft_and_the_best_rival_by_hand(tmp_path, write):
    """Six clients, all of which gain in the same order: p is 2 / 2**6; two methods against Local: Holm doubles it."""
    local = np.array([0.5, 0.4, 0.6, 0.3, 0.7, 0.2])
    gain = np.array([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
    scores = {"local": local, "fedavg-ft": local + gain, "fedaghn": local + 3 * gain, "cfl": local + 2 * gain}
    found = statistics(compare([write(tmp_path / name, name, values) for name, values in scores.items()]).sets[0])
    families = {family: {(one.name, one.other): one for one in pairs} for family, pairs in found.families.items()}
    assert {family: list(pairs) for family, pairs in families.items()} == {
        "local": [("fedaghn", "local"), ("cfl", "local"), ("fedavg-ft", "local")],
        "fedavg-ft": [("fedaghn", "fedavg-ft"), ("cfl", "fedavg-ft")],
        "best rival": [("fedaghn", "cfl")],  # and not the other way round too
    }
    one = families["local"]["cfl", "local"]
    assert (one.comparison.mean, one.comparison.p, one.comparison.worse) == (
        pytest.approx(0.07),
        pytest.approx(2 / 64),
        0,
    )
    assert one.holm == pytest.approx(3 * 2 / 64)
    assert families["best rival"]["fedaghn", "cfl"].holm == pytest.approx(2 / 64)
    text = drawn(grids(compare([tmp_path / name for name in scores])))
    row = next(line for line in text if line.startswith("cfl") and " local " in line)
    assert row.split() == [
        "cfl",
        "local",
        "+7.00",
        "+3.07",
        "to",
        "+10.93",
        "0.031",
        "0.094",
        "0",
        "of",
        "6",
        "1",
        "of",
        "1",
    ]
    assert "interval over 6 clients (bootstrap), of one seed: of the mean of other clients like these" in text
    assert max(map(len, (line for line in text if " to " in line))) <= 80


def test_pairs_are_over_the_common_seeds_and_say_so(tmp_path, write):
    mine = {0: [0.6, 0.7, 0.9], 1: [0.5, 0.6, 0.7], 2: [0.9, 0.9, 0.8]}
    local = {1: [0.4, 0.4, 0.6], 2: [0.8, 0.8, 0.8], 3: [0.1, 0.1, 0.1]}
    comparison = compare([write(tmp_path / "a", "cfl", mine), write(tmp_path / "b", "local", local)])
    found = statistics(comparison.sets[0])
    (one,) = found.families["local"]
    assert one.seeds == (1, 2)
    assert one.comparison == by.compare_pairs([mine[1], mine[2]], [local[1], local[2]], True)
    assert found.notes == ("paired over the common seeds alone (seeds 1, 2): cfl against local",)
    (other,) = statistics(compare([tmp_path / "a", write(tmp_path / "c", "local", {7: [0.1, 0.2, 0.3]})]).sets[0]).notes
    assert other == "cfl is not paired with local: they have no seed in common (seeds 0, 1, 2; seed 7)"


def test_runs_of_other_data_splits_or_clients_are_named_and_never_paired(tmp_path, write):
    split = {"federation": {"split": {"test": 0.3}}}
    runs = [
        write(tmp_path / "a", "local", [0.5, 0.6, 0.7]),
        write(tmp_path / "b", "fedavg", [0.6, 0.7, 0.8]),
        write(tmp_path / "c", "cfl", [0.9, 0.9, 0.9], **split),
    ]
    comparison = compare(runs)
    assert [[one.name for one in statistics(rows).runs] for rows in comparison.sets] == [["fedavg", "local"], ["cfl"]]
    assert statistics(comparison.sets[1]).families == {}
    refused = "! no pairs with A, from which these differ in federation.split.test: B: cfl"
    assert drawn(grids(comparison)).count(refused) == 1
    # Of your own data a config says nothing: clients and test examples tell runs apart.
    other = write(tmp_path / "d", "fedamp", [0.9, 0.9, 0.9], names=["x", "1", "2"])
    assert (
        "fedamp is not paired with local: only one of them has client '0' with seed 0"
        in statistics(compare([runs[0], other]).sets[0]).notes
    )


def test_other_test_examples_are_refused_as_pairs(tmp_path, write):
    runs = {name: write(tmp_path / name, name, [0.5, 0.5]) for name in ("local", "cfl")}
    for name, sizes in (("local", (2, 2)), ("cfl", (4, 2))):
        scores = {str(i): np.tile([1.0, 0.0], n // 2) for i, n in enumerate(sizes)}
        blocks = {str(i): np.arange(n) for i, n in enumerate(sizes)}
        Tested({}, scores, blocks=blocks).write(runs[name] / "tested.safetensors")
    found = statistics(compare(list(runs.values())).sets[0])
    assert "cfl is not paired with local: with seed 0 they were not tested on the same examples" in found.notes
    assert found.families == {}


def test_what_is_not_defined_is_said_in_one_line_each(tmp_path, write):
    runs = [write(tmp_path / name, name, [0.5]) for name in ("local", "cfl")]
    text = drawn(grids(compare(runs)))
    assert "no interval for local, cfl: one client and one seed" in text
    assert "no test of cfl against local: one client" in text
    runs = [write(tmp_path / f"{name}-same", name, [0.5, 0.5, 0.5]) for name in ("local", "cfl")]
    text = drawn(grids(compare(runs)))
    assert "no interval for local, cfl: all clients have the same score" in text
    assert "no test of cfl against local: all differences are zero" in text
    few = [
        write(tmp_path / f"few-{name}", name, s) for name, s in (("local", [0.1, 0.2, 0.3]), ("cfl", [0.2, 0.4, 0.7]))
    ]
    assert "with 3 clients that differ p is at least 0.25, whatever they show" in drawn(grids(compare(few)))
    json.dumps([one.to_dict() for one in grids(compare(few + runs))], allow_nan=False)
    alike = [write(tmp_path / f"by-{name}", name, s) for name, s in (("local", [0.1, 0.2]), ("cfl", [0.2, 0.3]))]
    assert "no interval of cfl against local: all differences are equal" in drawn(grids(compare(alike)))


def test_no_difference_is_below_zero_by_rounding(tmp_path, write):
    scores = {"local": [0.9, 0.70001, 0.8], "cfl": [0.8, 0.9, 0.7]}  # the mean difference is 0.0003 points
    text = "\n".join(drawn(grids(compare([write(tmp_path / name, name, s) for name, s in scores.items()]))))
    assert "+0.00" in text
    assert "-0.00" not in text


def test_attackers_are_in_no_statistic(tmp_path, write):
    attack = {
        "name": "x",
        "share": 0.3,
        "attackers": ["2"],
        "scores": {"own": dict.fromkeys(("mean", "std", "worst5", "best5"), 0.6)},
    }
    run = write(tmp_path / "a", "cfl", [0.5, 0.7, 0.0], names=["0", "1", "2"], attack=attack)
    local = write(tmp_path / "b", "local", [0.4, 0.6, 0.9], names=["0", "1", "2"])
    found = statistics(compare([run, local]).sets[0])
    own = next(one for one in found.runs if one.name.startswith("cfl"))
    assert (own.clients, own.worst, own.best, own.interval.mean) == (2, 0.5, 0.7, pytest.approx(0.6))
    (one,) = found.families["local"]
    assert (one.comparison.clients, one.comparison.worse) == (2, 0)


def test_before_and_after_local_training_side_by_side(tmp_path, write):
    models = {"mixed": [0.4, 0.9, 0.5]}
    both = write(tmp_path / "a", "sfl", [0.5, 0.6, 0.7], models=models)
    own = statistics(compare([both, write(tmp_path / "b", "local", [0.5, 0.6, 0.7])]).sets[0]).runs
    (stages,) = [one.stages for one in own if one.stages is not None]
    assert (stages.before, stages.after) == ("mixed", "own")
    assert (stages.mean_before, stages.mean_after) == pytest.approx((0.6, 0.6))
    assert (stages.comparison.mean, stages.comparison.worse) == (pytest.approx(0, abs=1e-12), pytest.approx(1 / 3))


def test_mean_ranks_over_data_sets(tmp_path, write, figures):
    """cfl is first, second and first: 4/3; fedamp is on two data sets only and is left out by name."""
    scores = {"a": (0.7, 0.6, 0.5), "b": (0.5, 0.9, 0.4), "c": (0.8, 0.7, 0.6)}
    runs = [
        write(tmp_path / data / name, name, [s, s + 0.1], dataset=data)
        for data, means in scores.items()
        for name, s in zip(("cfl", "local", "fedavg"), means, strict=True)
    ]
    runs.append(write(tmp_path / "a" / "fedamp", "fedamp", [0.9, 0.9], dataset="a"))
    found = ranking(compare(runs))
    assert dict(zip(found.names, found.ranks.mean, strict=True)) == pytest.approx(
        {"cfl": 4 / 3, "local": 5 / 3, "fedavg": 3}
    )
    assert found.notes == ["without fedamp, not run once on every data set"]
    assert ranking(compare(runs[:3])) is None
    out = tmp_path / "out"
    assert main(["compare", *map(str, runs), "--out", str(out)]) == 0
    assert (out / "ranks.png").stat().st_size > 1000
    words = [text.get_text() for axes in figures[-1].axes for text in axes.texts]
    assert "cfl  1.33" in words
    assert "critical difference 1.91" in words


def test_tables_as_files_and_json_hold_the_same_numbers(tmp_path, write, capsys):
    runs = [str(write(tmp_path / n, n, s)) for n, s in (("local", [0.5, 0.4, 0.6]), ("cfl_x", [0.7, 0.8, 0.9]))]
    assert main(["compare", *runs, "--statistics", "--json", "--out", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)["tables"]["pairs"]["rows"]
    (row,) = csv.DictReader(io.StringIO((tmp_path / "out" / "pairs.csv").read_text()))
    assert (row["method"], row["against"]) == (told[0]["method"], told[0]["against"]) == ("cfl_x", "local")
    assert float(row["mean"]) == pytest.approx(told[0]["mean"]) == pytest.approx(0.3)
    assert "| cfl_x | local | +30.00 |" in (tmp_path / "out" / "statistics.md").read_text()
    assert r"cfl\_x & local & +30.00" in (tmp_path / "out" / "statistics.tex").read_text()
    assert not list((tmp_path / "out").glob("ranks.png"))
    (tmp_path / "out" / "notes.csv").touch()
    assert main(["compare", runs[0], "--out", str(tmp_path / "out")]) == 0  # nobody to be paired with
    assert {path.name for path in (tmp_path / "out").glob("*.csv")} == {"means.csv", "notes.csv"}


def write_curve(folder, rounds, means, spent):
    lines = ["round,client,model,split,metric,value"]
    lines += [
        f"{t},{i},own,test,accuracy,{m + d}"
        for t, m in zip(rounds, means, strict=True)
        for i, d in enumerate((-0.1, 0.1))
    ]
    (folder / "history.csv").write_text("\n".join(lines) + "\n")
    if spent:
        rows = [",".join(Spent._fields), *(",".join(map(str, row)) for row in spent)]
        (folder / "cost.csv").write_text("\n".join(rows) + "\n")


def test_what_a_score_costs_by_hand(tmp_path, write):
    run = write(tmp_path / "a", "cfl", {0: [0.8, 0.9], 1: [0.8, 0.9], 2: [0.6, 0.7]})
    spent = [(5, 1000, 500, 2_000_000, 1.5), (10, 2000, 1000, 4_000_000, "")]
    write_curve(run / "seed-0", (5, 10), (0.8, 0.85), spent)
    write_curve(run / "seed-1", (5, 10), (0.7, 0.80), [spent[0], (10, 2000, 1000, 4_000_000, 2.5)])
    write_curve(run / "seed-2", (5, 10), (0.6, 0.65), spent)
    (table,) = tabulate_target(compare([run]), 0.8)
    record = {k: table.records[0][k] for k in ("reached", "seeds", *Spent._fields)}
    assert record == {
        "reached": 2,
        "seeds": 3,
        "round": 7.5,
        "bytes_down": 1500,
        "bytes_up": 750,
        "examples": 3_000_000,
        "seconds": 2.0,
    }
    assert table.blocks[0][0] == ["cfl", "2 of 3", "7.5", "1.5 kB", "750 B", "3 M", "2"]
    old = write(tmp_path / "b", "local", [0.8, 0.9])
    write_curve(old, (5, 10), (0.8, 0.85), [])
    (table,) = tabulate_target(compare([old]), 0.8)
    assert table.blocks[0][0] == ["local", "1 of 1", "5", "", "", "", ""]
    assert any("no cost.csv" in note for note in table.notes)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (999.4, "999"),
        (999.5, "1 k"),
        (12_345, "12.3 k"),
        (999_499, "999 k"),
        (999_999, "1 M"),
        (2e15, "2000 T"),
    ],
)
def test_the_prefix_is_that_of_the_three_digits_shown(value, shown):
    assert quantity(value).strip() == shown


@pytest.mark.parametrize(
    ("target", "hint"), [(80, "write 0.8"), (math.nan, "between 0 and 1"), (-1, "between 0 and 1")]
)
def test_targets_that_no_score_can_have_are_refused(tmp_path, write, target, hint):
    with pytest.raises(UsageError, match=hint):
        tabulate_target(compare([write(tmp_path / "a", "cfl", [0.5, 0.6])]), target)


def test_twins_are_numbered(tmp_path, write):
    rows = compare([write(tmp_path / str(i), "cfl", [0.5, 0.6]) for i in range(2)]).sets[0]
    assert names_of(rows) == ["1 cfl", "2 cfl"]


def test_seeds_given_one_by_one_are_paired_by_seed_and_the_folder_above_is_named(tmp_path, write):
    by_seed = {0: [0.6, 0.7, 0.9], 1: [0.5, 0.6, 0.7]}
    runs = [write(tmp_path / name, name, by_seed) for name in ("cfl", "local", "fedamp")]
    comparison = compare([run / f"seed-{seed}" for run in runs for seed in by_seed])
    (named,) = [warning for warning in comparison.warnings if warning.startswith("each seed is compared")]
    assert named.endswith(f"kinfed compare {' '.join(map(str, runs))}")
    found = statistics(comparison.sets[0])
    assert found.notes == ()  # no run is tried against another seed's
    assert not any("each seed" in warning for warning in compare(runs).warnings)


def test_a_set_of_one_run_has_no_empty_block_and_is_named_where_local_lacks(tmp_path, write):
    runs = [write(tmp_path / name, name, [0.5, 0.6, 0.7]) for name in ("local", "cfl")]
    alone = write(tmp_path / "other", "fedavg", [0.5, 0.6, 0.7], dataset="e")
    comparison = compare([*runs, alone])
    assert [one.name for one in grids(comparison)] == ["meansA", "pairsA", "meansB"]
    assert any(warning.startswith("B: Local is not among these runs") for warning in comparison.warnings)
    # Where no set has a pair, the means say why.
    apart = [write(tmp_path / name, name, [0.5, 0.6], dataset=name) for name in ("f", "g")]
    (first, _) = grids(compare(apart))
    assert "! no pairs with A, from which these differ in data set: B: g" in first.notes


def test_an_interval_of_accuracies_ends_where_they_do(tmp_path, write):
    run = write(tmp_path / "a", "cfl", {0: [0.99, 0.97], 1: [0.9, 0.91]})
    (row,) = grids(compare([run]))[0].records
    assert (row["low"], row["high"]) == (pytest.approx(0.9425 - 12.7062 * 0.0375, abs=1e-5), 1.0)  # t with 1 degree
    error = {0: [0.99, 0.97], 1: [0.9, 0.91]}
    run = write(tmp_path / "b", "cfl", error, metric="mse", higher_is_better=False)
    assert grids(compare([run]))[0].records[0]["high"] > 1


def test_what_a_paper_compares_is_paired_though_it_is_not_the_best_rival(tmp_path, write):
    """By hand: 0.5 - 0.4, 0.6 - 0.3 and 0.7 - 0.5 are a mean of 0.2."""
    scores = {"sfl": [0.5, 0.6, 0.7], "cfl": [0.8, 0.9, 0.9], "fedavg": [0.4, 0.3, 0.5]}
    (rows,) = compare([write(tmp_path / name, name, values) for name, values in scores.items()]).sets
    (pair,) = statistics(rows, [("sfl", "fedavg"), ("panacea", "pfedhn")]).families["named"]
    assert (pair.name, pair.other) == ("sfl", "fedavg")
    assert pair.comparison.mean == pytest.approx(0.2)
    (grid, *_) = [one for one in grids(Comparison((rows,), (), named=(("sfl", "fedavg"),))) if one.name == "pairs"]
    assert "first block: what the paper compares" in grid.notes
