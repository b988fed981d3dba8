"""Exported: a folder of ONNX files answers new rows as the run that they were exported from does."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.tables.columns import Category, Unused
from ..data.tables.frame import Frame
from ..data.tables.new_readings import Series
from ..data.tables.schema import Description
from ..data.tables.words import name_of
from ..errors import UsageError
from ..runs.open_run import Saved
from ..runs.predictor import KEPT, Answers, Predictor, Source, only

SHA256 = re.compile(r"^\| sha256 \| ([0-9a-f]{64}) \|$", re.MULTILINE)  # as a card has it
AGAIN = "copy the whole folder again, or export again"


def facts(saved: Saved, client: str) -> dict[str, str]:
    """What an exported file says of itself: whose model it is, and under `run` as JSON how its rows are read."""
    predictor, source = saved.predictor(client), saved.source(client)
    description, series = predictor.description, predictor.series
    run = {
        "identity": saved.summary.identity,
        "method": saved.summary.method,
        "clients": list(saved.names),
        "shape": list(predictor.shape),
        "answers": asdict(replace(predictor.answers, mean=(), deviation=(), counts=False)),  # in their own unit
        "columns": None if description is None else replace(description, clients={}).to_dict(),
        "series": None if series is None else series.to_dict(),
        "readings": predictor.readings,
    }
    return {
        "client": client,
        "method": source.method,
        "model": source.model,
        "made by": "kinfed",
        "run": json.dumps(run, sort_keys=True),
    }


def is_exported(folder: Path) -> bool:
    """Whether a folder holds files that `kinfed export` wrote."""
    return any(folder.glob("*.onnx")) or any(folder.glob("*.pt2.md")) or any(folder.glob("*.safetensors.md"))


def open_exported(folder: Path) -> tuple[Predictor, str]:
    """What answers with the ONNX files in a folder, and the run's method.

    Raises UsageError if the folder has other formats only, or if its files do not belong together.
    """
    paths = sorted(folder.glob("*.onnx"))
    if not paths:
        kinds = [kind for kind in ("pt2", "safetensors") if any(folder.glob(f"*.{kind}.md"))]
        raise UsageError(
            f"{folder} holds {' and '.join(kinds)} only, and exports answer as ONNX: kinfed export RUN --format onnx "
            "--out DIR"
        )
    try:
        import onnxruntime  # noqa: F401
    except ImportError as problem:
        raise UsageError(f"ONNX files need the package {problem.name}: pip install 'kinfed[serve]'") from None
    said = {path: _checked(path) for path in paths}
    first, text = paths[0], said[paths[0]]["run"]
    of: dict[str, Path] = {}
    for path, known in said.items():
        if known["run"] != text:
            raise UsageError(
                f"{folder}: its files do not belong together: {path.name} is of another run than {first.name}; export "
                "each run into a folder of its own"
            )
        if known["client"] in of:
            raise UsageError(f"{path} is a second model of client '{known['client']}'; {of[known['client']]} is one")
        of[known["client"]] = path
    try:
        return _predictor(json.loads(text), of, {known["client"]: known for known in said.values()})
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        raise UsageError(f"{first} does not say how rows are read ({problem!r:.80}); export again") from None


def _predictor(
    run: Mapping[str, Any], of: Mapping[str, Path], said: Mapping[str, Mapping[str, str]]
) -> tuple[Predictor, str]:
    names = [name for name in run["clients"] if name in of]
    meant: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in run["answers"].items()}
    description = None if run["columns"] is None else Description.from_dict(run["columns"])
    # The files scale readings themselves; here only the mean is taken off, by which a missing reading is 0.
    readings = None if run["readings"] is None else {"mean": run["readings"]["mean"], "deviation": 1.0}
    series = None if run["series"] is None else Series.from_dict(run["series"], readings or {})
    sources = {name: Source(one["method"], one["model"]) for name, one in said.items()}
    sessions = lru_cache(KEPT)(lambda client: _session(of[client]))
    shape, source = tuple(run["shape"]), sources.__getitem__
    client = only(names, description)
    found = Exported(names, client, shape, Answers(**meant), sessions, source, description, series, readings)
    return found, run["method"]


def _checked(path: Path) -> dict[str, str]:
    """What a file says of itself; raises UsageError unless it is the one of which the card beside it has the hash."""
    card = path.with_name(f"{path.name}.md")
    try:
        found = SHA256.search(card.read_text(encoding="utf-8"))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise UsageError(f"{path} has no card {card.name} beside it; {AGAIN}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{problem}; {AGAIN}") from None
    if found is None or found[1] != digest:
        raise UsageError(f"{path.parent}: {path.name} is not the file of which {card.name} has the SHA-256; {AGAIN}")
    known: dict[str, str] = _session(path, plain=True).get_modelmeta().custom_metadata_map
    if not {"client", "method", "model", "run"} <= known.keys():
        raise UsageError(f"{path} was made before exports said how rows are read; export again")
    return known


def _session(path: Path, plain: bool = False) -> Any:
    """What runs a file; `plain`: only to look into it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = 1  # the service answers in threads of its own, and each session would have others
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as problem:  # onnxruntime's errors have no class of their own
        raise UsageError(f"{path} cannot be read: {problem!s:.200}; {AGAIN}") from None


@dataclass(frozen=True)
class Exported(Predictor):
    """A predictor whose models are sessions of onnxruntime: a table's cells go into them as they are.

    Inputs of a table are [n, columns] float64: numbers, dates in seconds, and places of text in a column's categories,
    their count being any other text; NaN where a cell is missing.
    """

    def encoded(self, frame: Frame) -> Tensor:
        """[n, columns] a table's cells."""
        assert self.description is not None
        cells = self.description.cells(frame)
        columns = []
        for column in self.description.inputs:
            if isinstance(column, Category):
                values, words = cells[column.name]
                index = {name_of(word): i for i, word in enumerate(column.categories)}
                places = np.array([*(index.get(word, len(index)) for word in words), np.nan])
                columns.append(places[np.where(np.isnan(values), -1, values).astype(np.int64)])
            elif not isinstance(column, Unused):
                columns.append(cells[column.name].values)
        return torch.from_numpy(np.stack(columns, 1))

    def outputs_of(self, client: str, x: Tensor) -> Tensor:
        """[n, C] logarithms of probabilities, or numbers in their own unit."""
        found = torch.from_numpy(self.module(client).run(None, self._fed(x))[-1])  # the first may be the class
        return found.log() if self.answers.classes else found.flatten(1)

    def _fed(self, x: Tensor) -> dict[str, Any]:
        if self.readings is not None:
            x = torch.cat([x[..., :1] + self.readings["mean"], x[..., 1:]], -1)
        if self.description is None:
            return {"x": x.float().numpy()}
        used = [column for column in self.description.inputs if not isinstance(column, Unused)]
        fed: dict[str, Any] = {}
        for column, values in zip(used, x.numpy().T, strict=True):
            fed[column.name] = np.ascontiguousarray(values)
            if isinstance(column, Category):
                other = "".join(column.categories) + "?"  # longer than any of them
                text = np.array([*column.categories, other, ""], object)
                fed[column.name] = text[np.where(np.isnan(values), -1, values).astype(np.int64)]
        return fed
