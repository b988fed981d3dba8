import torch

from kinfed.datasets import DATASETS


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
