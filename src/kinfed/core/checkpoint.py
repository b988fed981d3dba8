"""Checkpoints: everything that a run needs to resume as if it had never stopped, in one file."""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import RunError
from ..files import replacing
from . import trees
from .history import History
from .rows import Part, Table, pieces, zeros
from .trees import Tree

TYPES = {  # the format's names
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
# Errors from reading a file that is not a checkpoint.
FOREIGN = (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)


LARGE, FEW = 1 << 28, 2  # bytes of a table of which rows of zeros are not written, and of how many at least one
ROWS, COUNTS = "@rows", "counts"  # of an array the places of its rows; in the metadata how many there are with zeros


class Progress(NamedTuple):
    """Where a run stands between two rounds."""

    done: int  # rounds
    server: Tree
    state: Tree  # the clients' private states, [N, ...]
    seconds: float
    how: dict[str, Any] | None = None  # the fleet's settings that decide about rounding


def save(path: Path, progress: Progress, history: History) -> None:
    """Replace the former checkpoint; if writing fails it is left as it was."""
    arrays, text = history.pack()
    arrays |= trees.pack(progress.server, "server.") | trees.pack(progress.state, "state.")
    arrays, counts = drop_zeros(arrays)
    metadata = {"history": text, "done": progress.done, "seconds": progress.seconds, "how": json.dumps(progress.how)}
    write(arrays, path, {name: str(word) for name, word in metadata.items()} | counts)


def load(path: Path, server: Tree, state: Tree, history: History) -> Progress:
    """Read a checkpoint; `server` and `state` have the structure of what was saved. Fills `history`."""
    try:
        with safe_open(path, "pt") as file:
            text = file.metadata()
            large = {name for name, leaf in trees.pack(state, "state.").items() if isinstance(leaf, Part)}
            # Copies: in the file a tensor may lie at an address for which products are rounded differently.
            arrays = {
                name: file.get_slice(name) if name in large else file.get_tensor(name).clone()
                for name in file.keys()  # noqa: SIM118
            }
        arrays = fill_zeros(arrays, text)
        history.restore(arrays, text["history"])
        kept = {name: t.table if isinstance(t, Part) else t for name, t in history.kept.arrays.items()}
        broken = [name for name, t in kept.items() if t.is_floating_point() and not t.isfinite().all()]
        if broken:
            raise ValueError(f"its model {broken[0]} holds NaN or infinity")
        return Progress(
            int(text["done"]),
            trees.unpack(arrays, server, "server."),
            trees.unpack(arrays, state, "state."),
            float(text["seconds"]),
            json.loads(text["how"]),
        )
    except FOREIGN as problem:
        raise _not_ours(path, problem) from None


def read_scores(path: Path, history: History) -> None:
    """Fill `history` with the scores of the run that a checkpoint is of, without its models; raises RunError."""
    try:
        with safe_open(path, "pt") as file:
            wanted = [name for name in file.keys() if name.startswith(("score.", "note."))]  # noqa: SIM118
            history.restore({name: file.get_tensor(name) for name in wanted}, file.metadata()["history"])
    except FOREIGN as problem:
        raise _not_ours(path, problem) from None


def how(path: Path) -> dict[str, Any]:
    """The settings of the fleet that wrote a checkpoint."""
    try:
        with safe_open(path, "pt") as file:
            return dict(json.loads(file.metadata()["how"]) or {})
    except FOREIGN as problem:
        raise _not_ours(path, problem) from None


class ForeignError(RunError):
    """A checkpoint is of another run or of another version of kinfed, or is broken."""


def _not_ours(path: Path, problem: Exception) -> ForeignError:
    return ForeignError(
        f"{path} is not a checkpoint of this run and this version of kinfed ({problem!s:.300}); delete it to start over"
    )


def write(arrays: Mapping[str, Table], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write named arrays as safetensors, piece by piece, replacing the file.

    The safetensors library's own writer holds three copies of the arrays in memory.
    """
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, array in ordered:
        begin, end = end, end + math.prod(array.shape) * array.dtype.itemsize
        header[name] = {"dtype": TYPES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with replacing(path) as part, part.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, array in ordered:
            for piece in _pieces(array):
                file.write(trees.raw(piece))


def drop_zeros(arrays: Mapping[str, Table]) -> tuple[dict[str, Table], dict[str, str]]:
    """The arrays, and metadata, in which a large table of few clients has their rows alone: [M, ...] and [M] int64.

    The other rows are zeros, bit by bit, as those are of clients that have never taken part.
    """
    short, counts = dict(arrays), dict[str, int]()
    for name, table in arrays.items():
        if isinstance(table, Tensor) and table.ndim > 1 and table.nbytes > LARGE:
            ids = _find_rows(table)
            if FEW * len(ids) < len(table):
                short[name], short[name + ROWS], counts[name] = Part(table, ids), ids, len(table)
    return short, {COUNTS: json.dumps(counts)} if counts else {}


def fill_zeros(arrays: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The arrays from which `drop_zeros` has made these; rows of zeros take no memory."""
    for name, count in json.loads(metadata.get(COUNTS, "{}")).items():
        if name in arrays:
            rows, ids = arrays[name], arrays.pop(name + ROWS)
            arrays[name] = zeros(count, rows.new_zeros(rows.shape[1:])).index_copy_(0, ids, rows)
    return arrays


def _find_rows(table: Tensor) -> Tensor:
    """[M] int64 which rows of a table: [N, ...] have a bit that is set."""
    bits, size = f"u{table.element_size()}", table[:1].nbytes
    used = [np.frombuffer(trees.raw(table[at]), bits).reshape(len(table[at]), -1) for at in pieces(len(table), size)]
    return torch.from_numpy(np.concatenate([rows.max(1) > 0 for rows in used])).nonzero().squeeze(1)


def checksums(arrays: Mapping[str, Tensor]) -> str:
    """The CRC-32 of each array as eight digits, in the order of their names."""
    return "".join(f"{zlib.crc32(trees.raw(array)):08x}" for _, array in sorted(arrays.items()))


def _pieces(array: Table) -> Iterator[Tensor]:
    if not array.shape:
        yield cast(Tensor, array)
        return
    size = math.prod(array.shape[1:]) * array.dtype.itemsize
    yield from (array[at] for at in pieces(array.shape[0], size))
