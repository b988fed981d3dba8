"""What the documents tell people to type does what they say."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import kinfed
from kinfed.cli import main
from kinfed.methods import METHODS

ROOT = Path(__file__).parents[1]


def python_block(name):
    return re.search(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL).group(1)


def test_the_readmes_example_runs_and_its_models_load(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(python_block("README.md"), found)
    assert found["run"].relation.shape == (2, 12, 12)
    loaded = kinfed.load_model("my-run", "3", found["net"])
    chosen = found["run"].load_model("3")
    assert all((a == b).all() for a, b in zip(loaded.parameters(), chosen.parameters(), strict=True))
    scores = found["run"].summary()["scores"]
    assert scores["own"]["mean"] > 0.8  # what averaging over opposite clients could not reach
    with pytest.raises(kinfed.UsageError, match="holds a run already"):
        kinfed.save(found["run"], "my-run")


def test_the_recipe_for_a_method_is_complete(tmp_path, monkeypatch, capsys):
    """The file goes beside the other methods, its line into the table; then the command line knows it."""
    package = tmp_path / "recipe"
    package.mkdir()
    code = python_block("CONTRIBUTING.md").replace("from ..", "from kinfed.")
    (package / "stay_home.py").write_text(code)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setitem(METHODS, "stay-home", importlib.import_module("stay_home").StayHome)
    out = str(tmp_path / "run")
    assert main(["run", "stay-home", "method.share=0.3", "rounds=2", "--out", out, "--quiet"]) == 0
    assert main(["list", "methods"]) == 0
    assert "Stay-Home: clients move only part of the way" in capsys.readouterr().out
    sys.modules.pop("stay_home")
