"""The data directory: one NAME.npz per data set, with plain arrays and never a pickle."""

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, UsageError, reason_of
from .sources.originals import ORIGINALS


def read(
    data_dir: Path | None, name: str, required: Sequence[str], optional: Sequence[str] = ()
) -> tuple[Path, dict[str, NDArray[Any]]]:
    """The file of a data set and its arrays, including those of `optional` that it has.

    `data_dir=None` means the folder named by the environment variable KINFED_DATA. Raises UsageError when there is no
    such folder, file or array, and DataError when the file is cut short or damaged: every byte is checked.
    """
    folder = data_dir or os.environ.get("KINFED_DATA")
    if not folder:
        raise UsageError(
            f"data set '{name}' is read from a data directory, and none was given; "
            f"set KINFED_DATA or --data-dir to the folder that holds {name}.npz"
        )
    path = Path(folder) / f"{name}.npz"
    if not path.parent.is_dir():
        raise UsageError(
            f"there is no data directory {path.parent}; set KINFED_DATA or --data-dir to an existing folder"
        )
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.npz")))
        way = f"get it with 'kinfed list datasets --fetch {name}'" if name in ORIGINALS else f"add {name}.npz"
        raise UsageError(
            f"data set '{name}' is not in the data directory: there is no {path}; "
            f"data sets there: {there or 'none'}; {way} or choose one of these"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            keys = [member.removesuffix(".npy") for member in archive.namelist()]
            arrays = {key: _array(archive, key) for key in (*required, *optional) if key in keys}
    except Exception as problem:  # damage can surface in any layer: zip, compression, array header, checksum
        raise DataError(
            f"{path} cannot be read ({reason_of(problem)}); it must be a complete .npz file of plain arrays: copy or "
            "write it again"
        ) from problem
    missing = [key for key in required if key not in arrays]
    if missing:
        raise UsageError(
            f"{path} lacks the array {', '.join(missing)}; it holds {', '.join(sorted(keys)) or 'nothing'}; "
            f"a data set '{name}' needs {', '.join(required)}"
        )
    return path, arrays


def labels(path: Path, key: str, values: NDArray[Any], count: int, classes: int) -> NDArray[np.int64]:
    """[count] int64 labels in 0..classes-1, or UsageError naming the file and the first bad entry."""
    if values.dtype.kind not in "iu" or values.shape != (count,):
        raise UsageError(
            f"{path}: {key} must be integers [{count}], one for each example; got {values.dtype} {list(values.shape)}"
        )
    bad = np.flatnonzero((values < 0) | (values >= classes))
    if len(bad):
        raise UsageError(
            f"{path}: {key} must lie in 0..{classes - 1}; {len(bad)} of {count} do not, "
            f"first entry {bad[0]}, which is {values[bad[0]]}; write the file again with these corrected"
        )
    return values.astype(np.int64)


def _array(archive: zipfile.ZipFile, key: str) -> NDArray[Any]:
    # zipfile compares a member's checksum only when it is read to its last byte.
    with archive.open(f"{key}.npy") as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise ValueError(f"array {key} is followed by more bytes than its header says")
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # PyTorch accepts only this machine's byte order
