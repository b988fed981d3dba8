"""What kinfed uses of Flower is listed in one file, and is there."""

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import UsageError
from kinfed_flower.wire import flower_names

FOLDER = Path(flower_names.__file__).parent


@pytest.mark.parametrize("part", flower_names.PARTS)
def test_the_installed_flower_has_all_that_kinfed_needs(part):
    found = vars(flower_names.load(part))
    assert len(found) == sum(map(len, flower_names.PARTS[part].values()))


def test_what_is_missing_is_named_in_a_line(monkeypatch):
    names = {"flwr.superlink.main": {"create_app": "config colour"}}
    monkeypatch.setitem(flower_names.PARTS, "server", names)
    with pytest.raises(UsageError, match=r"flwr\.superlink\.main\.create_app of Flower .* has no colour, which"):
        flower_names.load("server")
    for module, name in (("flwr.superlink.main", "make_app"), ("flwr.gone", "x")):
        monkeypatch.setitem(flower_names.PARTS, "server", {module: {name: ""}})
        with pytest.raises(UsageError, match=rf"has no {re.escape(module)}\.{name}, which kinfed needs; install"):
            flower_names.load("server")


@pytest.mark.parametrize("version", ["1.39.0", "1.43.0", "2.0"])
def test_a_version_that_was_not_tried_is_refused(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert f"found {version}: pip install 'flwr>={flower_names.VERSIONS[0]}," in flower_names.unusable()


def test_nothing_else_of_flower_is_imported_and_nothing_is_replaced():
    assert len(Path(flower_names.__file__).read_text().splitlines()) <= 150
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"__init__ = |setattr\(flwr", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not any(one.name.startswith("flwr") for one in node.names), path
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
                assert node.module in ("flwr.app", "flwr.clientapp", "flwr.serverapp"), path
