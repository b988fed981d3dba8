import gzip
import importlib.machinery

import pytest
import torch
from sklearn.datasets import load_digits

from kinfed.data.datasets import DATASETS, digits as module
from kinfed.errors import DataError


def test_digits_are_the_bundled_images():
    found = DATASETS["digits"](None)
    assert found.x.shape == (1797, 1, 8, 8)
    assert found.x.dtype == torch.float32
    assert (float(found.x.min()), float(found.x.max())) == (0.0, 1.0)
    # The first image is a zero whose top row holds 0 0 5 13 9 1 0 0 sixteenths of ink.
    assert (found.x[0, 0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert int(found.y[0]) == 0
    # How many there are of each class, from the description that comes with the data.
    assert torch.bincount(found.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert found.task.classes == len(found.classes) == 10
    found.task.check(found.y)


def test_digits_are_those_of_scikit_learn_which_is_not_imported_for_them():
    found, (images, labels) = DATASETS["digits"](None), load_digits(return_X_y=True)
    assert torch.equal(found.x.flatten(1) * 16, torch.from_numpy(images).float())
    assert torch.equal(found.y, torch.from_numpy(labels))


@pytest.mark.parametrize(
    "content",
    [None, b"no gzip", gzip.compress(b"1,2\n"), gzip.compress(b"1,x\n")],
    ids=["missing", "no gzip", "too few numbers", "no number"],  # not the bytes, which hold the time
)
def test_a_damaged_installation_is_one_line(content, tmp_path, monkeypatch):
    path = tmp_path / "datasets" / "data" / "digits.csv.gz"
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_bytes(content)
    spec = importlib.machinery.ModuleSpec("sklearn", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(module, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r"digits.csv.gz .*; install scikit-learn again"):
        module.digits(None)
