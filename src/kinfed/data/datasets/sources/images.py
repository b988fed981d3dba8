"""Originals of image sets: idx, MATLAB and CIFAR binary files, and a zip of JPEG files. None of them is a pickle."""

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import RunError

Arrays = dict[str, NDArray[Any]]
Files = dict[str, Path]

CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
DIGITS = tuple("0123456789")


def mnist(files: Files, names: tuple[str, ...] = DIGITS) -> Arrays:
    """Four gzipped idx files: images and labels of both parts; Fashion-MNIST's are like these, of `CLOTHES`."""
    arrays: Arrays = {"class_names": np.array(names)}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        arrays[f"x_{part}"] = _idx(files[f"{prefix}-images-idx3-ubyte.gz"])[:, None]
        arrays[f"y_{part}"] = _idx(files[f"{prefix}-labels-idx1-ubyte.gz"]).astype(np.int64)
    return arrays


def svhn(files: Files) -> Arrays:
    """Two MATLAB files: X [32, 32, 3, n] and y [n, 1], in which 10 means the digit 0."""
    from scipy.io import loadmat

    arrays: Arrays = {"class_names": np.array(DIGITS)}
    for part in ("train", "test"):
        content = loadmat(files[f"{part}_32x32.mat"])
        arrays[f"x_{part}"] = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
        arrays[f"y_{part}"] = content["y"].reshape(-1).astype(np.int64) % 10
    return arrays


def cifar10(files: Files) -> Arrays:
    """Records of one label and 3,072 pixels, five files for training and one for testing."""
    with tarfile.open(files["cifar-10-binary.tar.gz"]) as archive:
        folder = "cifar-10-batches-bin"
        names = _member(archive, f"{folder}/batches.meta.txt").decode().split()
        train = b"".join(_member(archive, f"{folder}/data_batch_{i}.bin") for i in range(1, 6))
        parts = {"train": train, "test": _member(archive, f"{folder}/test_batch.bin")}
    arrays: Arrays = {"class_names": np.array(names)}
    for part, records in parts.items():
        labels, arrays[f"x_{part}"] = _records(records, 1)
        arrays[f"y_{part}"] = labels[:, 0].astype(np.int64)
    return arrays


def cifar100(files: Files) -> Arrays:
    """Records of a coarse label, a fine label and 3,072 pixels; `superclass: [100]` is a fine label's coarse one."""
    with tarfile.open(files["cifar-100-binary.tar.gz"]) as archive:
        folder = "cifar-100-binary"
        fine, coarse = (
            _member(archive, f"{folder}/{kind}_label_names.txt").decode().split() for kind in ("fine", "coarse")
        )
        parts = {part: _member(archive, f"{folder}/{part}.bin") for part in ("train", "test")}
    arrays: Arrays = {"class_names": np.array(fine), "superclass_names": np.array(coarse)}
    superclass = np.zeros(len(fine), np.int64)
    for part, records in parts.items():
        labels, arrays[f"x_{part}"] = _records(records, 2)
        superclass[labels[:, 1]] = labels[:, 0]
        arrays[f"y_{part}"] = labels[:, 1].astype(np.int64)
    return arrays | {"superclass": superclass}


def tiny_imagenet(files: Files) -> Arrays:
    """A zip of JPEG files, training images in a folder a class; its labelled validation images are the test images."""
    from PIL import Image

    with zipfile.ZipFile(files["tiny-imagenet-200.zip"]) as archive:
        root = "tiny-imagenet-200"
        classes = sorted(archive.read(f"{root}/wnids.txt").decode().split())
        class_names = dict(line.split("\t", 1) for line in archive.read(f"{root}/words.txt").decode().splitlines())
        label = {name: i for i, name in enumerate(classes)}
        train = sorted(m for m in archive.namelist() if m.startswith(f"{root}/train/") and m.endswith(".JPEG"))
        rows = [row.split("\t")[:2] for row in archive.read(f"{root}/val/val_annotations.txt").decode().splitlines()]
        test = [(f"{root}/val/images/{name}", label[of]) for name, of in sorted(rows)]

        def images(members: list[str]) -> NDArray[np.uint8]:
            pixels = np.empty((len(members), 3, 64, 64), np.uint8)
            for i, member in enumerate(members):
                with Image.open(io.BytesIO(archive.read(member))) as image:
                    pixels[i] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            return pixels

        return {
            "x_train": images(train),
            "y_train": np.array([label[m.split("/")[2]] for m in train]),
            "x_test": images([member for member, _ in test]),
            "y_test": np.array([of for _, of in test]),
            "class_names": np.array([class_names.get(name, name).split(",")[0] for name in classes]),
        }


def _idx(path: Path) -> NDArray[np.uint8]:
    """An idx file: two zeros, type 8 (bytes), the number of axes, their lengths, the numbers."""
    with gzip.open(path) as file:
        content = file.read()
    zero, kind, axes = struct.unpack(">HBB", content[:4])
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    if zero or kind != 8 or len(content) != 4 + 4 * axes + int(np.prod(shape)):
        raise RunError(f"{path} is not an idx file of bytes, or it is cut short")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _records(data: bytes, labels: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Labels [n, labels] and pixels [n, 3, 32, 32] of CIFAR's binary records."""
    if len(data) % (labels + 3072):
        raise RunError(
            f"CIFAR's records have {labels + 3072} bytes each; got {len(data):,} bytes, so they are cut short"
        )
    table = np.frombuffer(data, np.uint8).reshape(-1, labels + 3072)
    return table[:, :labels], np.ascontiguousarray(table[:, labels:]).reshape(-1, 3, 32, 32)


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise RunError(f"{archive.name!s} has no file {name}; is it the binary version?")
    return file.read()
