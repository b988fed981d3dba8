"""Small files in the forms of the originals."""

import gzip
import io
import struct
import tarfile
import zipfile

import numpy as np
from PIL import Image
from scipy.io import savemat


def idx(array):
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def archive(members):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return held.getvalue()


def jpeg(shade, mode="RGB", size=64):
    held = io.BytesIO()
    Image.new(mode, (size, size), shade if mode == "L" else (shade, 0, 0)).save(held, "JPEG", quality=95)
    return held.getvalue()


def images(count, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def grey():
    files = {}
    for prefix, count in (("train", 3), ("t10k", 2)):
        files[f"{prefix}-images-idx3-ubyte.gz"] = idx(images(count, 28, 28))
        files[f"{prefix}-labels-idx1-ubyte.gz"] = idx(np.arange(count, dtype=np.uint8))
    return files


def numbers():
    files = {}
    for part, labels in (("train", [10, 1, 9]), ("test", [2, 10])):
        held = io.BytesIO()
        savemat(held, {"X": images(len(labels), 32, 32, 3).transpose(1, 2, 3, 0), "y": np.array(labels)[:, None]})
        files[f"{part}_32x32.mat"] = held.getvalue()
    return files


def records(labels, pixels):
    return b"".join(bytes(mine) + image.tobytes() for mine, image in zip(labels, pixels, strict=True))


def ten():
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    members = {"cifar-10-batches-bin/batches.meta.txt": ("\n".join(names) + "\n").encode()}
    for i in range(1, 6):
        members[f"cifar-10-batches-bin/data_batch_{i}.bin"] = records([[i], [0]], images(2, 3072, seed=i))
    members["cifar-10-batches-bin/test_batch.bin"] = records([[7]], images(1, 3072, seed=9))
    return {"cifar-10-binary.tar.gz": archive(members)}


def hundred():
    members = {
        "cifar-100-binary/fine_label_names.txt": "\n".join(f"fine{i}" for i in range(100)).encode(),
        "cifar-100-binary/coarse_label_names.txt": "\n".join(f"coarse{i}" for i in range(20)).encode(),
        "cifar-100-binary/train.bin": records([[3, 42], [19, 0]], images(2, 3072)),
        "cifar-100-binary/test.bin": records([[3, 42]], images(1, 3072, seed=1)),
    }
    return {"cifar-100-binary.tar.gz": archive(members)}


def tiny():
    held = io.BytesIO()
    root = "tiny-imagenet-200"
    with zipfile.ZipFile(held, "w") as made:
        classes = [f"n{i:02d}" for i in range(1, 201)]
        made.writestr(f"{root}/wnids.txt", "\n".join(reversed(classes)))
        words = {name: f"thing {name}" for name in classes} | {"n01": "fish, swimmer", "n02": "dog", "n999": "unused"}
        made.writestr(f"{root}/words.txt", "\n".join(f"{name}\t{word}" for name, word in words.items()))
        made.writestr(f"{root}/train/n01/images/n01_0.JPEG", jpeg(250))
        made.writestr(f"{root}/train/n02/images/n02_0.JPEG", jpeg(100, "L"))
        made.writestr(f"{root}/train/n02/n02_boxes.txt", "n02_0.JPEG\t0\t0\t62\t62\n")
        made.writestr(f"{root}/val/images/val_0.JPEG", jpeg(30))
        made.writestr(f"{root}/val/val_annotations.txt", "val_0.JPEG\tn02\t0\t32\t44\t62\n")
    return {"tiny-imagenet-200.zip": held.getvalue()}


def speeds(first):
    rows = [f"2012-03-01 00:{5 * t:02d}:00,{60 + t}.5,{t},{7 * t}.0" for t in range(4)]
    return "\n".join([f",{first},767541,767542", *rows, "2012-03-01 01:20:00,1.0,2.0,3.0", ""]).encode()


def flows():
    held = io.BytesIO()
    np.savez(held, data=np.arange(24.0).reshape(4, 2, 3))
    return held.getvalue()


def weather():
    lines = []
    for state in range(1, 49):
        for year in (2007, *range(2008, 2020)):
            values = [state + (year - 2008) * 12 + month for month in range(12)]
            lines.append(f"{state:03d}002{year}" + "".join(f"{v:7.2f}" for v in values))
        lines.append(f"{state:03d}0012015" + "".join(f"{99:7.2f}" for _ in range(12)))  # rain, not warmth
    return {"climdiv-tmpcst-v1.0.0-20200106": "\n".join(lines).encode()}


DISTANCES = """\
773869,773869,0.0
773869,767541,1000.0
767541,767541,0.0
767541,767542,3000.0
767542,767542,0.0
767541,999,7.0
"""
SMALL = {
    "mnist": grey,
    "fashion_mnist": grey,
    "svhn": numbers,
    "cifar10": ten,
    "cifar100": hundred,
    "tiny_imagenet": tiny,
    "metr_la": lambda: {
        "METR-LA.csv": speeds("773869"),
        "distances_la_2012.csv": ("from,to,cost\n" + DISTANCES).encode(),
    },
    "pems_bay": lambda: {"PEMS-BAY.csv": speeds("773869"), "distances_bay_2017.csv": DISTANCES.encode()},
    "pems04": lambda: {"PEMS04.npz": flows(), "PEMS04.csv": b"from,to,cost\n0,1,310.6\n"},
    "pems08": lambda: {"PEMS08.npz": flows(), "PEMS08.csv": b"from,to,cost\n1,0,310.6\n1,0,310.6\n"},
    "tpt48": weather,
}
