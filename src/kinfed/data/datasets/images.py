"""Image sets from the data directory: training and test images pooled, as FedAGHN's protocol has it."""

from collections.abc import Callable
from pathlib import Path

import torch

from ...core.tasks import Classification
from ...errors import UsageError
from ..dataset import Dataset
from .directory import labels, read
from .files import IMAGES


def images(name: str) -> Callable[..., Dataset]:
    """The loader of one of IMAGES: x: [n, channels, height, width] float32 in [-1, 1], training before test images.

    NAME.npz holds x_train: uint8 [n, channels, height, width], y_train: [n] integers, x_test and y_test likewise, and
    perhaps class_names: [C]. The loader raises UsageError or DataError naming the file when it is missing, damaged or
    otherwise.
    """
    form = IMAGES[name]

    def load(data_dir: Path | None = None) -> Dataset:
        path, arrays = read(data_dir, name, ("x_train", "y_train", "x_test", "y_test"), ("class_names",))
        for key in ("x_train", "x_test"):
            array = arrays[key]
            if array.dtype != "uint8" or array.shape[1:] != form.shape or not len(array):
                raise UsageError(
                    f"{path}: {key} must be uint8 [n, {', '.join(map(str, form.shape))}] with an image or more; "
                    f"got {array.dtype} {list(array.shape)}"
                )
        counts = {split: len(arrays[f"x_{split}"]) for split in ("train", "test")}
        y = [
            torch.from_numpy(labels(path, f"y_{split}", arrays[f"y_{split}"], count, form.classes))
            for split, count in counts.items()
        ]
        names = arrays.get("class_names")
        if names is not None and (names.shape != (form.classes,) or names.dtype.kind != "U"):
            raise UsageError(
                f"{path}: class_names must be text [{form.classes}]; got {names.dtype} {list(names.shape)}; "
                "correct the array or leave it out"
            )
        x = torch.empty(sum(counts.values()), *form.shape, dtype=torch.float32)
        x[: counts["train"]] = torch.from_numpy(arrays["x_train"])
        x[counts["train"] :] = torch.from_numpy(arrays["x_test"])
        x.div_(127.5).sub_(1)
        return Dataset(x, torch.cat(y), Classification(form.classes), () if names is None else tuple(map(str, names)))

    load.__doc__ = form.summary(name)
    return load
