"""Digits: the small images of handwritten digits that come with scikit-learn, so no data directory is needed."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ...core.tasks import Classification
from ...errors import DataError
from ..dataset import Dataset


def digits(data_dir: Path | None = None) -> Dataset:
    """1,797 images x: [1797, 1, 8, 8] in [0, 1] with labels y: [1797] of 10 classes.

    Source: the test set of the UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998). Raises
    DataError if scikit-learn, which is not imported as that would take longer than a short run, is not as it should be.
    """
    package = find_spec("sklearn")
    folder = Path(package.origin).parent if package and package.origin else Path("sklearn")
    path = folder / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt") as file:
            rows = np.array([line.split(",") for line in file], dtype=np.float32)  # [1797, 65] 64 pixels, label
    except (OSError, EOFError, ValueError) as problem:
        raise DataError(f"{path} cannot be read ({problem}); install scikit-learn again") from None
    if rows.shape != (1797, 65):
        raise DataError(f"{path} must hold 1797 rows of 65 numbers; got {list(rows.shape)}; install scikit-learn again")
    pixels, labels = torch.from_numpy(rows).split([64, 1], 1)
    x = pixels.reshape(-1, 1, 8, 8) / 16
    return Dataset(x, labels[:, 0].to(torch.int64), Classification(10), tuple("0123456789"))
