"""Every model that a method is scored with is explained, below the table of a run and on its page."""

import ast
from pathlib import Path

import kinfed.methods
from kinfed.core.history import KINDS


def test_every_scored_model_is_explained():
    """The names are the keys of what `personalise` returns, as the methods' files write it."""
    names = set()
    for path in Path(kinfed.methods.__file__).parent.glob("*.py"):
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.FunctionDef) and part.name == "personalise":
                dicts = [d for r in ast.walk(part) if isinstance(r, ast.Return) for d in ast.walk(r)]
                names |= {key.value for d in dicts if isinstance(d, ast.Dict) for key in d.keys if key}
    assert {"own", "both", "split"} < names
    assert names <= KINDS.keys(), f"no words for {sorted(names - KINDS.keys())}"
