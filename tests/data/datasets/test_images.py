import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kinfed.data.datasets import DATASETS
from kinfed.data.datasets.files import IMAGES
from kinfed.errors import UsageError


def write(folder, name, **changed):
    """NAME.npz with three training and two test images; a change to None leaves an array out."""
    classes, shape = IMAGES[name]
    random = np.random.default_rng(0)
    arrays = {
        "x_train": random.integers(0, 256, (3, *shape), dtype=np.uint8),
        "y_train": np.array([0, classes - 1, 1]),
        "x_test": random.integers(0, 256, (2, *shape), dtype=np.uint8),
        "y_test": np.array([2, 0]),
    } | changed
    np.savez(folder / f"{name}.npz", **{key: value for key, value in arrays.items() if value is not None})
    return arrays


@pytest.mark.parametrize("name", IMAGES)
def test_training_and_test_images_are_pooled_and_scaled(tmp_path, name):
    arrays = write(tmp_path, name)
    found = DATASETS[name](tmp_path)
    assert found.x.shape == (5, *IMAGES[name].shape)
    assert found.x.dtype == torch.float32
    pixels = np.concatenate([arrays["x_train"], arrays["x_test"]])
    np.testing.assert_allclose(found.x.numpy(), (pixels / 255 - 0.5) / 0.5, rtol=0, atol=1e-6)
    assert found.y.tolist() == [0, IMAGES[name].classes - 1, 1, 2, 0]
    assert found.task.classes == IMAGES[name].classes
    assert found.classes == ()
    found.task.check(found.y)


def test_scale_by_hand(tmp_path):
    images = np.zeros((3, 1, 28, 28), dtype=np.uint8)
    images[0], images[1] = 255, 51
    write(tmp_path, "mnist", x_train=images)
    x = DATASETS["mnist"](tmp_path).x[:3, 0, 0, 0]
    torch.testing.assert_close(x, torch.tensor([1.0, -0.6, -1.0]), rtol=0, atol=1e-7)


def test_class_names_come_along(tmp_path):
    names = [f"kind {i}" for i in range(10)]
    write(tmp_path, "svhn", class_names=np.array(names))
    assert DATASETS["svhn"](tmp_path).classes == tuple(names)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y_test": None}, r"lacks the array y_test; it holds x_test, x_train, y_train"),
        ({"x_train": np.zeros((3, 32, 32, 3), np.uint8)}, r"x_train must be uint8 \[n, 3, 32, 32\].*\[3, 32, 32, 3\]"),
        ({"x_test": np.zeros((2, 3, 32, 32))}, r"x_test must be uint8 .*got float64 \[2, 3, 32, 32\]"),
        ({"x_test": np.zeros((0, 3, 32, 32), np.uint8)}, r"x_test must be .* with an image or more; got uint8 \[0,"),
        ({"x_train": np.uint8(3)}, r"x_train must be uint8 .*got uint8 \[\]"),
        ({"y_train": np.array([0, 1])}, r"y_train must be integers \[3\].*got int64 \[2\]"),
        ({"y_test": np.array([0.0, 1.0])}, r"y_test must be integers \[2\].*got float64 \[2\]"),
        ({"y_train": np.array([0, 10, 1])}, r"y_train must lie in 0\.\.9; 1 of 3 do not, first entry 1, which is 10"),
        ({"class_names": np.array(["a", "b"])}, r"class_names must be text \[10\]; got <U1 \[2\]"),
        ({"class_names": np.arange(10)}, r"class_names must be text \[10\]; got int64 \[10\]"),
    ],
)
def test_a_file_in_another_form_is_an_error(tmp_path, changed, message):
    write(tmp_path, "cifar10", **changed)
    with pytest.raises(UsageError, match=r"cifar10\.npz:? " + message):
        DATASETS["cifar10"](tmp_path)


# Mean and standard deviation of the training images on the scale 0 to 1, as commonly used to normalise them.
MOMENTS = {
    "mnist": ([0.1307], [0.3081]),
    "fashion_mnist": ([0.2860], [0.3530]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_real_images_have_the_known_moments(name):
    folder = os.environ.get("KINFED_DATA")
    if not folder or not (Path(folder) / f"{name}.npz").is_file():
        pytest.skip(f"needs {name}.npz in the folder named by KINFED_DATA")
    found = DATASETS[name]()
    classes, (channels, _, _) = IMAGES[name]
    assert (len(found.x) - 10_000) in (50_000, 60_000)
    if name != "mnist":
        assert torch.bincount(found.y).tolist() == [len(found.x) // classes] * classes
    mean, deviation = MOMENTS[name]
    for channel in range(channels):
        values = found.x[:-10_000, channel] / 2 + 0.5
        spread, centre = torch.std_mean(values)
        # Four printed digits; Fashion-MNIST's file may divide training and test images in another way.
        assert float(centre) == pytest.approx(mean[channel], abs=5e-4)
        assert float(spread) == pytest.approx(deviation[channel], abs=5e-4)
