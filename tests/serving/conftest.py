"""What tests of what is made of a finished run share."""

import pytest
import shops as table

from kinfed.cli import main


@pytest.fixture(scope="session")
def shops(tmp_path_factory):
    """The folder of a table of shops, shops.csv, and of a run of kNN-Per on it, run."""
    return table.train(tmp_path_factory.mktemp("shops"))


@pytest.fixture(scope="session")
def exported(shops):
    """The folder of that run's models as ONNX, with their cards."""
    out = shops / "onnx"
    assert main(["export", str(shops / "run"), "--format", "onnx", "--out", str(out), "--licence", "CC0"]) == 0
    return out
