"""Verdicts on claims, by numbers worked out by hand, and what becomes of them in the papers' own print."""

import importlib
import math
import re
import statistics

import pytest

from kinfed import UsageError
from kinfed_papers import claim_verdicts as report, published_table
from kinfed_papers.claim_verdicts import Figure, of_csv, verdicts
from kinfed_papers.claims import Claim, answered_claims, claims, deviation
from kinfed_papers.comparison import against, compare
from kinfed_papers.coverage import COMMITTED, coverage, lines, read_committed_tables, text as narrow
from kinfed_papers.published_table import Column, Number, Protocol, Row
from kinfed_papers.result_pages import is_written


def table(**numbers):
    printed = {("D", "S", name, "accuracy_pct"): Number(value, None, "") for name, value in numbers.items()}
    rows = {name: Row(name, name) for name in numbers}
    return Protocol("made.table", "", "", 3, "seeds", rows, {"c": Column("c", "D", "S")}, [], {}, printed)


def figures(flags=(), **by_seed):
    return [
        Figure("c", "D", "S", name, "accuracy_pct", dict(enumerate(values)), flags) for name, values in by_seed.items()
    ]


def answer(monkeypatch, claim, printed, ours, flags=()):
    monkeypatch.setattr(report, "claims", lambda: (Claim("made.table", "A is best", "Table 9", "A", **claim),))
    (found,) = verdicts(table(**printed), figures(flags, **ours))
    return found


PRINT = {"A": 70.0, "B": 69.0, "C": 60.0}


@pytest.mark.parametrize(
    ("ours", "said", "why"),
    [
        ({"A": [3, 4, 5], "B": [1, 2, 3.1], "C": [0, 1, 2]}, "yes", ""),  # 2, 2, 1.9: clearly above 0
        ({"A": [3, 4, 5], "B": [1, 6, 3], "C": [0, 1, 2]}, "cannot tell", "too near to tell"),  # 2, -2, 2
        ({"A": [3, 4, 5], "B": [5, 6, 7.1], "C": [0, 1, 2]}, "no", ""),
        ({"A": [9], "B": [1], "C": [0]}, "cannot tell", "too near to tell"),  # one seed, and no deviation is known
        ({"A": [3, 4, 5], "B": [1, 2, 3.1]}, "cannot tell", "a part of it not run"),  # C is missing
        ({"A": [3, 4, 5], "B": [5, 6, 7.1]}, "no", ""),  # and is not needed to refute it
        ({"A": [5, 5, 5], "B": [5, 5, 5], "C": [5, 5, 5]}, "cannot tell", "too near to tell"),  # equal: neither
        ({}, "cannot tell", "not run"),
    ],
)
def test_a_claim_is_decided_by_intervals_over_seeds(monkeypatch, ours, said, why):
    found = answer(monkeypatch, {}, PRINT, ours)
    assert (found.answer, found.why) == (said, why)


def test_the_interval_is_students(monkeypatch):
    found = answer(monkeypatch, {"against": ["B"]}, PRINT, {"A": [3, 4, 5], "B": [1, 6, 3]})
    # 2, -2 and 2: mean 0.67, deviation 2.31, t(0.975, 2) = 4.303: half a width of 5.74
    assert (
        "of 1 comparison 1 within the error; least in favour: B on c (+0.67, -5.07 to +6.40 over 3 seeds)" in found.text
    )


def test_seeds_that_only_one_has_are_left_out(monkeypatch):
    found = answer(monkeypatch, {"against": ["B"]}, PRINT, {"A": [3, 4, 5], "B": [1]})
    assert found.text.endswith("least in favour: B on c (+2.00); seeds that only one side has are left out.")


def test_one_seed_counts_where_no_seed_could_move_the_difference():
    """Over four times sqrt(2) times the deviation of a score: 11.31 where that is 2."""
    near, far, behind = (
        compare("", "accuracy_pct", {0: mine}, {0: 50.0}, deviation=(2.0, False)) for mine in (61.3, 61.4, 38.6)
    )
    assert near.p == 1.0
    assert far.p == pytest.approx(2 * 0.5 * math.erfc(11.4 / 8**0.5 / 2**0.5))  # two-sided, 4.03 standard errors
    assert far.speaks_for
    assert not near.speaks_for
    assert against([near, far, behind]) == [behind]


def test_a_deviation_of_an_error_is_a_share_of_it():
    """3 % of the mean of 5 and 15, times sqrt(2): 0.424."""
    found = compare("", "MAE", {0: 5.0}, {0: 15.0}, sign=-1, deviation=(0.03, True))
    assert found.error == pytest.approx(0.424, abs=5e-4)
    assert found.speaks_for


def test_a_no_is_corrected_for_the_number_of_comparisons():
    """t = -13 and -5.196 with two degrees of freedom: p = 0.0059 and 0.0351; twice the second is above 5 %."""
    one = compare("", "accuracy_pct", {0: 1.0, 1: 2.0, 2: 3.0}, {0: 5.0, 1: 6.0, 2: 8.0})  # -4, -4, -5
    assert one.mean == pytest.approx(-13 / 3)
    slight = compare("", "accuracy_pct", {0: 1.0, 1: 1.0, 2: 1.0}, {0: 2.0, 1: 3.0, 2: 2.5})  # -1, -2, -1.5: t = -5.196
    assert slight.p == pytest.approx(0.0351, abs=5e-5)
    assert against([slight]) == [slight]
    assert against([slight, slight]) == []
    assert against([one, slight]) == [one, slight]  # 2 * 0.0059 and 0.0351


def test_equality_has_a_margin(monkeypatch):
    ours = {
        "A": [99.5, 99.6, 99.4],
        "B": [99.6, 99.8, 99.5],
        "C": [99.4, 99.5, 99.5],
    }  # -0.1, -0.2, -0.1: +0.37 +- 0.14
    assert answer(monkeypatch, {"level": 0.5}, PRINT, ours).answer == "yes"
    assert answer(monkeypatch, {"level": 0.1}, PRINT, ours).answer == "cannot tell"
    assert answer(monkeypatch, {}, PRINT, ours).answer == "cannot tell"
    assert answer(monkeypatch, {"level": 0.5}, PRINT, {name: [5, 5, 5] for name in PRINT}).answer == "yes"


def test_what_is_not_ahead_of_what_needs_no_network_is_not_trained(monkeypatch):
    made, ours = table(**PRINT), figures(A=[40, 41, 42], B=[30, 31, 31])
    monkeypatch.setattr(report, "claims", lambda: (Claim("made.table", "", "", "A", against=["B"]),))
    assert verdicts(made, ours)[0].answer == "yes"
    assert verdicts(made, ours, {("c", "accuracy_pct"): 30.0})[0].answer == "yes"
    for floor in (30.7, 50.0):  # B is behind, then both
        verdict = verdicts(made, ours, {("c", "accuracy_pct"): floor})[0]
        assert (verdict.answer, verdict.why, verdict.measured) == ("cannot tell", report.BEHIND, False)
    assert report.is_ahead("", "MAE", {0: 2.0}, 2.1)  # an error is ahead if it is smaller
    assert not report.is_ahead("", "MAE", {0: 2.1}, 2.1)
    assert report.is_ahead("", "weight_self", {0: 0.1}, 0.5)  # a weight is no score


@pytest.mark.parametrize("flag", ["other protocol", "best by test"])
def test_scores_of_another_protocol_or_chosen_by_test_examples_decide_nothing(monkeypatch, flag):
    verdict = answer(monkeypatch, {"against": ["B"]}, PRINT, {"A": [3, 4, 5], "B": [5, 6, 7.1]}, (flag,))
    assert (verdict.answer, verdict.why) == ("cannot tell", "scored by another protocol than the paper's")


def test_what_follows_from_the_settings_alone_is_no_yes(monkeypatch):
    verdict = answer(monkeypatch, {"against": ["B"], "given": "p is 0"}, PRINT, {"A": [3, 4, 5], "B": [1, 2, 3.1]})
    assert (verdict.answer, verdict.why) == ("cannot tell", "settings alone give it: p is 0")


def test_runs_at_chance_are_not_measured(monkeypatch):
    monkeypatch.setattr(report, "classes", lambda dataset: 10)
    found = answer(monkeypatch, {"against": ["B"]}, PRINT, {"A": [40, 41, 42], "B": [12.4, 12.5, 12.5]})
    assert (found.answer, found.why, found.measured) == ("cannot tell", report.BEHIND, False)
    found = answer(monkeypatch, {}, PRINT, {"A": [40, 41, 42], "B": [12.4, 12.5, 12.7], "C": [9, 11, 10]})
    assert "of 2 comparisons 1 for it, 1 not trained" in found.text


def test_what_keeps_a_claim_from_being_told(monkeypatch):
    ours = {"A": [3, 4, 5], "B": [1, 2, 3.1], "C": [0, 1, 2]}
    found = answer(monkeypatch, {"tuned": True}, PRINT, ours)
    assert found.answer_with_reason == "cannot tell (one setting of each method here, where the paper chose among many)"
    assert (
        answer(monkeypatch, {"lacks": "SVHN"}, PRINT, {"A": [3], "B": [2]}).answer_with_reason
        == "cannot tell (needs SVHN)"
    )
    assert answer(monkeypatch, {"lacks": "SVHN"}, PRINT, ours).answer_with_reason == "yes"


@pytest.mark.skipif(not COMMITTED.exists(), reason="measured tables are in a checkout, not in an installed kinfed")
def test_deviations_are_those_of_the_committed_tables():
    largest = {}
    for table, group in read_committed_tables().values():
        for one in group:
            if len(one.by_seed) > 1 and "average" not in one.setting and "control" not in one.flags:
                paper, values = table.partition(".")[0], [*one.by_seed.values()]
                share = deviation(table, one.metric)[1]
                found = statistics.stdev(values) / (abs(statistics.mean(values)) if share else 1)
                largest[paper, one.metric] = max(largest.get((paper, one.metric), 0.0), found)
    for (paper, metric), value in largest.items():
        assert deviation(f"{paper}.table1", metric)[0] == pytest.approx(value, rel=1e-3), (paper, metric)


def test_scaled_runs_answer_for_their_scale(monkeypatch):
    ours = {"A": [3, 4, 5], "B": [1, 2, 3], "C": [0, 1, 2]}
    found = answer(monkeypatch, {}, PRINT, ours, ("scaled 0.3", "control"))
    assert found.answer == "yes at this scale"
    assert "Here (scaled 0.3): of 2 comparisons 2 for it" in found.text


def test_other_kinds_of_claims(monkeypatch):
    ours = {"A": [3.0, 3.0], "B": [2.5, 2.5], "C": [4.0, 4.0]}
    for claim, printed, said in (
        (
            {"by": 0.19, "against": ["B"]},
            "In the paper 1 of 1 comparison against it, most of all B on D, S (-12.11)",
            "yes",
        ),
        ({"by": 0.21, "against": ["B"]}, "In the paper 1 of 1", "no"),  # 3 is 20 % above 2.5
        ({"worst": True, "except_for": ["B"]}, "In the paper 1 of 1", "yes"),
        ({"worst": True}, "In the paper 2 of 2", "no"),
        ({"least": 2.9}, "In the paper it holds (1 comparison)", "yes"),
        ({"least": 3.1}, "In the paper it holds", "no"),
    ):
        found = answer(monkeypatch, claim, PRINT, ours)
        assert found.answer == said, claim
        assert found.text.startswith(printed), found.text


def test_falling_numbers_and_weights(monkeypatch):
    columns = {name: Column(name, "D", name) for name in ("x/1", "x/2", "x/3")}
    numbers = {
        ("D", f"x/{i}", "A", metric): Number(value, None, "")
        for i, pair in ((1, (0.3, 0.1)), (2, (0.2, 0.1)), (3, (0.25, 0.1)))
        for metric, value in zip(("weight_self", "weight_other"), pair, strict=True)
    }
    protocol = Protocol("made.table", "", "", 1, "seeds", {"a": Row("a", "A")}, columns, [], {}, numbers)
    for settings, more, said in (
        ({"falling": ["x/1", "x/2|x/3"]}, {}, "In the paper it holds (2 comparisons)."),
        ({"falling": ["x/1", "x/2", "x/3"]}, {}, "In the paper 1 of 2 comparisons against it, most of all from x/2"),
        ({"than": "weight_other"}, {}, "In the paper it holds (3 comparisons)."),
    ):
        claim = Claim("made.table", "", "", "A", metrics=["weight_self"], **settings, **more)
        monkeypatch.setattr(report, "claims", lambda claim=claim: (claim,))
        assert verdicts(protocol, [])[0].text.startswith(said)


@pytest.mark.parametrize("claim", claims(), ids=lambda one: f"{one.table} {one.says}"[:60])
def test_claims_speak_of_what_is_printed(claim):
    protocol = published_table.load(claim.table)
    printed = {row.printed for row in protocol.rows.values()}
    assert {claim.method, *claim.against, *claim.except_for} <= printed
    places = {(data, at) for data, at, _, _ in protocol.numbers}
    assert {*claim.datasets} <= {data for data, _ in places}
    steps = [at for step in claim.falling for at in step.split("|")]
    assert {*claim.settings, *steps} <= {at for _, at in places}
    assert {tuple(pair) for pair in claim.but} <= places
    assert ({*claim.metrics, claim.than} - {""}) <= {metric for *_, metric in protocol.numbers}
    (found,) = [one for one in verdicts(protocol, []) if one.claim == claim]
    assert found.answer == "cannot tell"
    if claim.table != "fedcedar.figure4":  # of which one number is printed
        assert "comparison" in found.text


def test_claims_in_the_papers_own_print():
    """Counted by hand in the printed tables: CFL, Local, FedRoD and Per-FedAvg are above pFedGAT somewhere."""
    said = {one.claim.says: one.text for one in verdicts(published_table.load("pfedgat.table1"), [])}
    first, second, _ = said.values()
    assert first.startswith(
        "In the paper 6 of 108 comparisons against it, most of all CFL on CIFAR-100, pathological (-0.83)."
    )
    assert second.startswith("In the paper it holds (36 comparisons).")


HEADER = "column,dataset,setting,method,printed,metric,measured,flags"


def test_committed_tables_are_counted(tmp_path):
    rows = [
        'cifar10/10,CIFAR-10,"Dir(0.1), 10 clients",local,Local,accuracy_pct,80,scaled 0.2,0:79 1:80 2:81',
        'cifar10/25,CIFAR-10,"Dir(0.1), 25 clients",local,Local,accuracy_pct,80,subset,0:80',
        'cifar10/50,CIFAR-10,"Dir(0.1), 50 clients",fedavg,FedAvg,accuracy_pct,80,,0:80',
        'cifar10/25,CIFAR-10,"Dir(0.1), 25 clients",ditto,ditto,accuracy_pct,80,unprinted,0:80',
        'cifar10/50,CIFAR-10,"Dir(0.1), 50 clients",local,Local,accuracy_pct,,,',
    ]
    folder = tmp_path / "pfedgat.table3-part"
    folder.mkdir()
    (folder / "table.csv").write_text("\n".join([f"{HEADER},by_seed", *rows]) + "\n")
    (tmp_path / "notes").mkdir()
    found = {one.name: one for one in coverage({"cifar10"}, tmp_path)}
    assert found["pfedgat.table3"] == ("pfedgat.table3", 39, 3, 3, 2, 1, 1, {"not run": 36})
    assert found["pfedgat.table2"].gaps == {"needs cifar100": 52}
    assert found["panacea, I"].printed == 10
    assert sum(one.printed for one in found.values()) == 875
    assert {one.name: one for one in coverage({"cifar100_subset"}, tmp_path)}["pfedgat.table2"].gaps == {
        "not run, and only on a subset": 52
    }
    *_, last = lines([found["pfedgat.table3"], found["pfedgat.table2"]])
    assert max(map(len, narrow(found.values(), 80))) <= 80
    assert last == "| **all** | 91 | 3 | 3 | 2 | 1 | 1 | 39 | needs cifar100: 52; not run: 36 |"
    controls = tmp_path / "pfedgat.table3-part-controls"
    controls.mkdir()
    common = (
        'cifar10/10,CIFAR-10,"Dir(0.1), 10 clients",commonest label,commonest label,accuracy_pct,80.5,control,0:80.5'
    )
    (controls / "table.csv").write_text("\n".join([f"{HEADER},by_seed", common]) + "\n")
    table3 = {entry.name: entry for entry in coverage({"cifar10"}, tmp_path)}["pfedgat.table3"]
    assert (table3.run, table3.measured, table3.gaps) == (3, 2, {"not run": 36, report.BEHIND: 1})
    assert next(one.by_seed for _, group in read_committed_tables(tmp_path).values() for one in group) == {
        0: 79,
        1: 80,
        2: 81,
    }


def test_older_and_broken_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(f"{HEADER}\nc,D,S,a,A,MAE,2.5,subset\n")
    assert of_csv(path) == [Figure("c", "D", "S", "A", "MAE", {0: 2.5}, ("subset",))]
    for text in ("a,b\n1,2\n", f"{HEADER}\nc,D,S,a,A,MAE,many,\n"):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"is not a table\.csv of kinfed papers run"):
            of_csv(path)


def test_without_a_checkout_nothing_is_said_to_be_unmeasured(tmp_path):
    with pytest.raises(UsageError, match="measured tables are in a checkout of kinfed"):
        read_committed_tables(tmp_path / "tables")


@pytest.mark.skipif(not COMMITTED.exists(), reason="measured tables are in a checkout, not in an installed kinfed")
def test_the_page_is_what_the_committed_tables_say(monkeypatch):
    monkeypatch.syspath_prepend(str(COMMITTED.parents[2] / "evidence"))
    page = importlib.import_module("coverage")
    for part, text in page.parts(page.read_at_hand()).items():
        assert is_written(page.PAGE, part, text), "KINFED_DATA=DIR python evidence/coverage.py writes it again"


@pytest.mark.skipif(not COMMITTED.exists(), reason="pages are in a checkout, not in an installed kinfed")
@pytest.mark.parametrize("one", answered_claims(), ids=lambda one: f"{one.paper} {one.says}"[:60])
def test_a_page_that_answers_a_claim_has_its_numbers(one):
    page = COMMITTED.parents[1] / one.page
    text = "".join(path.read_text(encoding="utf-8") for path in (page, *page.with_suffix("").glob("*.csv")))
    numbers = [number for number in re.findall(r"\d+\.\d+", one.shows) if number not in text]
    assert not numbers
    assert one.answer.startswith(("yes", "no", "cannot tell ("))
