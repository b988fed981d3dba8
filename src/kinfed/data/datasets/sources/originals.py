"""The originals of data sets: where they are published, and how their files become one NAME.npz of plain arrays."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....errors import RunError, UsageError, nearest, reason_of
from ....files import read_json, replacing, write_json
from .cars import compcars
from .climate import tpt48
from .download import Progress, Source, check_original, fetch
from .images import CLOTHES, cifar10, cifar100, mnist, svhn, tiny_imagenet
from .roads import flows, speeds

RECORDED = "checksums.json"  # in the data directory

Arrays = dict[str, NDArray[Any]]
Files = dict[str, Path]  # by name; a folder that the user has comes as `folder`


class Original(NamedTuple):
    """The published files of a data set, and their converter to arrays; without files it reads the user's folder."""

    sources: tuple[Source, ...]
    convert: Callable[[Files], Arrays]


def _list_sources(base: str, *files: tuple[str, str | None]) -> tuple[Source, ...]:
    return tuple(Source(f"{base}/{name}", checksum) for name, checksum in files)


_DCRNN = "https://raw.githubusercontent.com/liyaguang/DCRNN/602afd9d767d3aa1c9b3eac51710d6aeee12c227/data/sensor_graph"
_SPEEDS = "https://zenodo.org/records/5724362/files"
_FLOWS = "https://zenodo.org/records/7816008/files"
_IDX = [
    f"{part}-ubyte.gz" for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
]

# Checksums are those of the publishers (CIFAR) or of libraries that download the same files (torchvision for MNIST,
# Fashion-MNIST and SVHN; Avalanche for Tiny-ImageNet; others for the traffic sets). None: none was found.
ORIGINALS: dict[str, Original] = {
    "mnist": Original(
        _list_sources(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            (_IDX[0], "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            (_IDX[1], "md5:d53e105ee54ea40749a09fcbcd1e9432"),
            (_IDX[2], "md5:9fb629c4189551a2d022fa330f9573f3"),
            (_IDX[3], "md5:ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        mnist,
    ),
    "fashion_mnist": Original(
        _list_sources(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            (_IDX[0], "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            (_IDX[1], "md5:25c81989df183df01b3e8a0aad5dffbe"),
            (_IDX[2], "md5:bef4ecab320f06d8554ea6380940ec79"),
            (_IDX[3], "md5:bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        partial(mnist, names=CLOTHES),
    ),
    "svhn": Original(
        _list_sources(
            "http://ufldl.stanford.edu/housenumbers",
            ("train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
            ("test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3"),
        ),
        svhn,
    ),
    "cifar10": Original(
        _list_sources(
            "https://www.cs.toronto.edu/~kriz", ("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530")
        ),
        cifar10,
    ),
    "cifar100": Original(
        _list_sources(
            "https://www.cs.toronto.edu/~kriz", ("cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8")
        ),
        cifar100,
    ),
    "tiny_imagenet": Original(
        _list_sources("http://cs231n.stanford.edu", ("tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de")),
        tiny_imagenet,
    ),
    "metr_la": Original(
        (
            *_list_sources(
                _SPEEDS, ("METR-LA.csv", "sha256:8d67a35472db1719d7d4be851f2bf64cb21d9c52577c8a6b4b873d43205af381")
            ),
            *_list_sources(
                _DCRNN,
                ("distances_la_2012.csv", "sha256:a576a2a3e28dbb959be6da22688e24dd1b246b81264595e129147c256cd53de5"),
            ),
        ),
        speeds,
    ),
    "pems_bay": Original(
        (
            *_list_sources(_SPEEDS, ("PEMS-BAY.csv", "md5:c8dea58987a5882e946217c22fdb8256")),
            *_list_sources(_DCRNN, ("distances_bay_2017.csv", None)),
        ),
        speeds,
    ),
    "pems04": Original(
        _list_sources(
            _FLOWS,
            ("PEMS04.npz", "md5:5238832691101da85fcac772a32051da"),
            ("PEMS04.csv", "md5:3990731ec980019a875a6d5723523855"),
        ),
        partial(flows, start="2018-01-01T00:00"),
    ),
    "pems08": Original(
        _list_sources(
            _FLOWS,
            ("PEMS08.npz", "md5:2a528d169c0d90294c9e24288a430132"),
            ("PEMS08.csv", "md5:5e507b2b18d9235e95b63a20221cd4c5"),
        ),
        partial(flows, start="2016-07-01T00:00"),
    ),
    "tpt48": Original(
        _list_sources(
            "https://raw.githubusercontent.com/washingtonpost/data-2C-beyond-the-limit-usa/"
            "f465a4f31affb9cb5dd19412440a159865b5ca40/data/raw",
            ("climdiv-tmpcst-v1.0.0-20200106", None),
        ),
        tpt48,
    ),
    "compcars": Original((), compcars),
}


class Obtained(NamedTuple):
    """The result of `obtain`."""

    path: Path
    notes: tuple[str, ...]  # messages for the user


def obtain(
    name: str, data_dir: Path, folder: Path | None = None, progress: Progress = lambda name, done, total: None
) -> Obtained:
    """Write `data_dir`/NAME.npz from its originals: those in `folder`, or else downloaded.

    A data set that is there already is left alone. Originals that were downloaded are deleted once they are converted;
    a checksum that nobody has published is recorded in checksums.json at the first download and checked from then on.
    Raises UsageError for a name without originals, RunError where files are missing, wrong or cannot be written.
    """
    if name not in ORIGINALS:
        raise UsageError(f"there is nothing to fetch for '{name}'; {nearest(name, ORIGINALS)}")
    path, (sources, convert) = data_dir / f"{name}.npz", ORIGINALS[name]
    if path.exists():
        return Obtained(path, ("it was there already and was left alone",))
    if not sources and folder is None:
        raise UsageError(f"'{name}' must be requested from its authors; download it, then pass its folder with --from")
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--from: there is no folder {folder}")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"cannot create the data directory {data_dir}: {problem.strerror}") from None
    store, notes = data_dir / "originals" / name, []
    recorded = _read_records(data_dir)
    files: Files = {} if sources else {"folder": folder or data_dir}
    for source in sources:
        expected = source if source.checksum else source._replace(checksum=recorded.get(source.url))
        try:
            file = check_original(expected, folder) if folder else fetch(expected, store, progress)
        except RunError:
            _remove_empty(store)
            raise
        if not expected.checksum and folder is None:
            recorded[source.url] = f"sha256:{sha256(file)}"
            notes.append(f"no checksum of {source.name} is published; that of this first download was recorded")
        files[source.name] = file
    try:
        arrays = convert(files)
    except MemoryError:
        raise
    except Exception as problem:  # damage can surface in any layer of these formats
        for source in sources if folder is None else ():
            if not source.checksum:  # it may be the wrong file: the next call downloads it again
                files[source.name].unlink()
        if isinstance(problem, UsageError | RunError):
            raise
        raise RunError(f"{name}: the originals cannot be read ({reason_of(problem)}); are they complete?") from problem
    with replacing(path) as part, part.open("wb") as total:
        np.savez(total, allow_pickle=False, **arrays)
    if recorded != _read_records(data_dir):
        write_json(data_dir / RECORDED, recorded)
    shutil.rmtree(store, ignore_errors=True)
    _remove_empty(store)
    return Obtained(path, tuple(notes))


def sha256(path: Path) -> str:
    """A file's SHA-256."""
    import pooch

    return str(pooch.file_hash(str(path)))


def _remove_empty(store: Path) -> None:
    """Remove a data set's folder of downloads, and the one around it, as far as nothing is in them."""
    for folder in (store, store.parent):
        with suppress(OSError):
            folder.rmdir()


def _read_records(data_dir: Path) -> dict[str, str]:
    return read_json(data_dir / RECORDED, "delete it, or correct it: it holds checksums by name")
