"""Digits: the small images of handwritten digits that come with scikit-learn, so no data directory is needed."""

from pathlib import Path

import torch

from ..core.tasks import Classification
from ..data.dataset import Dataset


def digits(data_dir: Path | None = None) -> Dataset:
    """1,797 images x: [1797, 1, 8, 8] in [0, 1] with labels y: [1797] of 10 classes.

    Source: the test set of the UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998).
    """
    from sklearn.datasets import load_digits  # here, as it would add a second to every start

    images, target = load_digits(return_X_y=True)
    x = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 8, 8) / 16
    return Dataset(x, torch.from_numpy(target).to(torch.int64), Classification(10), tuple("0123456789"))
