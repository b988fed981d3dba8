"""How much a client's own rows weigh in a solved model: kinfed explain, and the report page."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from kinfed.cli import main
from kinfed.report.page.html_page import page


@pytest.mark.parametrize(("model", "columns"), [("linear", 8), ("additive", 8), ("mlp", 0)])
def test_of_a_solved_model_the_weight_of_own_rows_is_shown_by_column(model, columns, tmp_path, capsys):
    """In shops.csv basket, distance, hour and queue differ in sign between two kinds of towns, nothing else."""
    table = Path(__file__).parents[2] / "examples" / "shops.csv"
    asked = ["run", str(table), "--client", "shop", "--target", "buys", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*asked, "--method", "partial-pooling", "--beside", "none", f"model={model}", "rounds=3"]) == 0
    assert main(["explain", str(tmp_path / "run"), "shop 7", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)["own_rows"]
    assert len(own) == columns + 2  # the constant, and all columns
    assert all(0 <= one <= 1 for one in own.values())
    if columns:
        names = list(own)[:8]
        assert min(own[name] for name in names[1::2]) > 2 * max(own[name] for name in names[::2])
    assert main(["explain", str(tmp_path / "run"), "shop 7"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown[2:-2])) <= 80
    assert shown[2].split()[:2] == ["own", "rows"]
    assert main(["explain", str(tmp_path / "run"), "shop 99"]) == 2
    assert main(["explain", str(tmp_path / "run"), "shop 7", "shop 9"]) == 2
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page([tmp_path / "run"]), re.DOTALL)
    told = json.loads(text.group(1))["methods"][0]["columns"]
    found = np.frombuffer(base64.b64decode(told["weights"]), "<f4").reshape(30, -1)
    at = json.loads((tmp_path / "run" / "clients.json").read_text())["names"].index("shop 7")
    np.testing.assert_allclose(found[at], list(own.values()), atol=1e-6)
    assert told["names"] == list(own)


def test_of_trees_the_columns_that_move_answers_are_shown(tmp_path, capsys):
    """In shops.csv basket, distance, hour and queue decide, with opposite signs in two kinds of towns."""
    table = Path(__file__).parents[2] / "examples" / "shops.csv"
    asked = ["run", str(table), "--client", "shop", "--target", "buys", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*asked, "--method", "personal-boosting", "--beside", "none", "model=trees", "rounds=27"]) == 0
    assert main(["explain", str(tmp_path / "run"), "shop 7", "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["columns"]
    assert list(shares["mean"]) == list(shares["client"]) == sorted(shares["mean"], key=shares["mean"].get)[::-1]
    assert [sum(values.values()) for values in shares.values()] == pytest.approx([1, 1])
    assert main(["explain", str(tmp_path / "run"), "shop 7"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[2:])) <= 80
    assert main(["explain", str(tmp_path / "run"), "shop 99"]) == 2
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page([tmp_path / "run"]), re.DOTALL)
    shown = json.loads(text.group(1))["methods"][0]["columns"]
    of_all = np.frombuffer(base64.b64decode(shown["weights"]), "<f4").reshape(30, -1)
    at = json.loads((tmp_path / "run" / "clients.json").read_text())["names"].index("shop 7")
    np.testing.assert_allclose(of_all[at], list(shares["client"].values()), atol=1e-6)
    assert shown["names"] == list(shares["mean"])
