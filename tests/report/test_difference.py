"""kinfed compare --relations: what changed between two relations, in numbers that are known."""

import json
import math

import numpy as np
import pytest

from kinfed.cli import main
from kinfed.errors import UsageError
from kinfed.report.explain.relation_difference import diff
from kinfed.verdict.graph_quality import row_correlation, row_overlap

FIRST = [[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]
THEN = [[0.5, 0.0, 0.5], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]


@pytest.fixture
def two(run_of, tmp_path):
    """A run of two rounds, and one of the same clients in another order."""
    last = np.array(THEN)
    order = [2, 0, 1]
    scores = [[0.5, 0.6, 0.7]] * 2
    run_of(tmp_path / "a", scores, [FIRST, FIRST], names=["ann", "bob", "cid"])
    mixed = last[np.ix_(order, order)]
    run_of(tmp_path / "b", scores, [mixed, mixed], names=["cid", "ann", "bob"], method="fedamp")
    return tmp_path / "a", tmp_path / "b"


def test_edges_rows_and_collapse_by_hand(two):
    found = diff(*two)
    assert (found.methods, found.rounds, found.edge) == (("fedaghn", "fedamp"), (2, 2), 1 / 6)
    edges = {(one.client, one.learns_from): (one.before, one.after, one.what) for one in found.edges()}
    assert edges == {
        ("ann", "bob"): (0.5, 0.0, "lost"),
        ("ann", "cid"): (0.0, 0.5, "gained"),
        ("bob", "ann"): (0.25, 0.0, "lost"),
        ("bob", "cid"): (0.25, 0.5, "stronger"),
    }
    (whole,) = found.by_layer()
    assert (whole.before.edges, whole.after.edges, whole.gained, whole.lost) == (3, 2, 1, 2)
    assert whole.overlap == pytest.approx((0.5 + 0.75 + 1) / 3)
    # ann's weights for the others turned round; bob's were equal before, cid's are always: these are not defined
    assert whole.correlation == pytest.approx(-1)
    assert (whole.before.own_weight, whole.after.own_weight) == pytest.approx((2 / 3, 2 / 3))
    # rows of ann and bob have 0.75 in common, of ann and cid 0, of bob and cid 0.25; then 0.5 each
    assert whole.before.consensus == pytest.approx((0.75 + 0 + 0.25) / 3)
    assert whole.after.consensus == pytest.approx(0.5)
    assert whole.before.isolation == whole.after.isolation == pytest.approx((2 - 1) / 2)
    first, second, third = found.by_client()
    assert (first.client, first.gained, first.lost, first.overlap) == ("ann", 1, 1, 0.5)
    assert (second.client, second.gained, second.lost, second.overlap) == ("bob", 0, 1, 0.75)
    assert (third.client, third.overlap, third.own_after) == ("cid", 1, 1)
    assert math.isnan(third.correlation)


def test_a_run_does_not_differ_from_itself(two):
    found = diff(two[0], two[0], (1, 2))
    assert found.rounds == (1, 2)
    assert not found.edges()
    assert found.by_layer()[0].overlap == 1


def test_layers_are_compared_one_by_one_where_both_have_them(run_of, tmp_path):
    scores, other = [[0.5, 0.6, 0.7]], np.eye(3)
    run_of(tmp_path / "a", scores, [np.stack([FIRST, other])], layers=["0", "2"])
    run_of(tmp_path / "b", scores, [np.stack([FIRST, THEN])], layers=["0", "2"])
    run_of(tmp_path / "c", scores, [np.mean([FIRST, THEN], 0)])
    found = diff(tmp_path / "a", tmp_path / "b", edge=0.4)
    mean, first, second = found.by_layer()
    assert (mean.layer, first.layer, second.layer) == ("mean of layers", "0", "2")
    assert (first.overlap, second.overlap, second.gained) == (1, pytest.approx(2 / 3), 2)
    assert mean.gained == 0  # half of 0.5 is below the edge
    assert {one.layer for one in found.edges()} == {"2"}
    whole = diff(tmp_path / "b", tmp_path / "c")
    assert whole.layers == ["whole model"]
    assert "of other layers, so means over layers" in whole.notes[0]
    assert whole.by_layer()[0].overlap == pytest.approx(1)


def test_negative_weights_have_no_overlap_but_a_correlation(run_of, tmp_path):
    rows = [[1.5, -0.5, 0.0], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]
    for name in "ab":
        run_of(tmp_path / name, [[0.5, 0.6, 0.7]], [rows])
    found = diff(tmp_path / "a", tmp_path / "b")
    (whole,) = found.by_layer()
    assert math.isnan(whole.overlap)
    assert math.isnan(whole.before.consensus)
    assert whole.correlation == pytest.approx(1)
    assert "some weights are negative" in found.notes[0]


def test_figures_of_rows_by_another_way():
    import torch

    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.dirichlet(np.ones(6), 6)) for _ in "ab")
    apart = 1 - (a - b).abs().sum(1) / 2
    assert torch.allclose(row_overlap(a, b), apart)
    for i, found in enumerate(row_correlation(a, b).tolist()):
        rest = [j for j in range(6) if j != i]
        assert found == pytest.approx(np.corrcoef(a[i, rest], b[i, rest])[0, 1])


def test_on_the_command_line(two, capsys):
    assert main(["compare", "--relations", *map(str, two), "--json", "--top", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (len(told["edges"]), len(told["clients"]), told["rounds"]) == (1, 3, [2, 2])
    assert told["clients"][2]["correlation"] is None
    assert main(["compare", "--relations", *map(str, two), "--rounds", "1,selected"]) == 0
    shown = capsys.readouterr().out
    assert "clients whose rows changed most" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("bob    cid")] == [
        ["bob", "cid", "whole", "model", "0.250", "0.500", "stronger"]
    ]


def test_what_cannot_be_compared_is_one_line(two, run_of, tmp_path, capsys):
    run_of(tmp_path / "other", [[0.5, 0.6, 0.7]], [FIRST], names=["ann", "bop", "cid"])
    run_of(tmp_path / "more", [[0.5] * 4], [np.eye(4)], names=["ann", "bob", "cid", "dan"])
    run_of(tmp_path / "none", [[0.5, 0.6, 0.7]], names=["ann", "bob", "cid"], method="pfedhn")
    run_of(tmp_path / "broken", [[0.5, 0.6, 0.7]], [FIRST], names=["ann", "bob", "cid"])
    (tmp_path / "broken" / "relations.npz").write_bytes(b"PK")
    run_of(tmp_path / "mixed", [[0.5, 0.6, 0.7]], [FIRST], names=["ann", "bob", "cid"])
    (tmp_path / "mixed" / "relations.npz").write_bytes((tmp_path / "more" / "relations.npz").read_bytes())
    a = two[0]
    for words, why in (
        ([a, tmp_path / "other"], "client 'bob' of .* is not in .*other \\(did you mean 'bop'"),
        ([a, tmp_path / "more"], "client 'dan' of .*more is not in"),
        ([a, tmp_path / "none"], "none: pfedhn mixes no models"),
        ([tmp_path / "no", a], "there is no folder "),
        ([a, tmp_path / "broken"], "relations.npz cannot be read"),
        ([a, tmp_path / "mixed"], "files do not belong together: relations.npz is of another run"),
        ([a, a, "--rounds", "1,9"], "keeps no relation of round 9; those it was scored in are 1 to 2"),
        ([a, a, "--rounds", "1"], "--rounds are two rounds"),
        ([a, a, a], "--relations compares two runs, .*; got 3"),
    ):
        assert main(["compare", "--relations", *map(str, words)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        with pytest.raises(UsageError, match=why):
            raise UsageError(err)
