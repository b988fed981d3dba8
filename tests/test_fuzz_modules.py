"""A few cases of the fuzz of modules: all executors, a plain PyTorch loop, and the model that is kept and loaded."""

import importlib
import random
from pathlib import Path

import pytest

from kinfed import UsageError

SOME = (
    *(
        "batch_norms",
        "dropout",
        "recurrent",
        "own_batch_norm",
        "hooks_between_relu_and_pooling",
        "frozen",
        "tie_weights",
    ),
    *("weight_norms", "mixed_in_training", "statistics_of_its_own", "parts_of_a_sequential", "low_rank"),
)
REFUSED = ("tied_in_memory", "time_taken_for_the_batch", "other_outputs", "not_copyable", "memory_outside_of_buffers")


@pytest.fixture
def modules(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "evidence"))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("fuzz_modules")


@pytest.mark.parametrize("name", [*SOME, *REFUSED])
def test_a_module_is_the_same_function_everywhere_or_refused(name, modules):
    number = list(modules.FAMILIES).index(name)
    if name in REFUSED:
        with pytest.raises(UsageError) as raised:
            modules.check(number, random.Random(name))
        assert str(raised.value).startswith(name)
        assert "\n" not in str(raised.value)
    else:
        assert modules.check(number, random.Random(name))[0] == name
