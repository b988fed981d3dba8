"""Exports: clients' models as files that need no kinfed, with a card beside each."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from ..core import checkpoint, trees
from ..errors import RunError, UsageError, log_failure, several
from ..files import replacing, together
from ..runs.run import Run
from . import onnx_file
from .card import card
from .pipeline import Whole

Format = Literal["onnx", "safetensors"]
LONGEST = 120  # bytes of a file's name
FORMATS: tuple[Format, ...] = ("onnx", "safetensors")


class Exported(NamedTuple):
    """A client's file."""

    client: str
    path: Path
    size: int  # bytes
    seconds: float
    difference: float | None  # how far onnxruntime's answers are from PyTorch's; None of other formats


def export(
    saved: Run, clients: Sequence[str], kind: Format, out: Path, licence: str = "", again: bool = False
) -> list[Exported]:
    """Write the model of each client into the folder `out`, and its card.

    ONNX takes a table's columns and gives classes, probabilities or numbers in their own unit; its answers are compared
    with PyTorch's. A file of safetensors has the tensors only, and its card says the rest. Raises UsageError for files
    that are there already, unless `again`, and for models that the format cannot hold, and leaves nothing then. A
    client whose model cannot be written for another reason is named in a RunError, once those of the
    others are written.
    """
    if kind not in FORMATS:
        raise UsageError(f"there is no format '{kind}'; known: {', '.join(FORMATS)}")
    if kind == "onnx":
        onnx_file.require_packages()
    names = [saved.name(client) for client in clients]
    paths = {name: out / f"{file_name(name)}.{kind}" for name in names}
    if (there := [path for path in paths.values() if path.exists()]) and not again:
        raise UsageError(f"{there[0]} already exists; choose another --out, or overwrite it with --force")
    forms: dict[Any, Any] = {}  # ONNX models by what they were converted from
    made, failed = list[Exported](), dict[str, Exception]()
    with together(out) as folder:
        for name, path in paths.items():
            try:
                made.append(_write_export(saved, name, kind, path, folder / path.name, licence, forms))
            except Exception as problem:
                if isinstance(problem, UsageError) or isinstance(problem.__cause__, OSError):
                    raise
                failed[name] = problem
                for part in (path.name, card_name(path)):
                    (folder / part).unlink(missing_ok=True)
    if failed:
        few = "; ".join(f"client {name}: {log_failure(problem)}" for name, problem in list(failed.items())[:3])
        raise RunError(f"{len(failed)} of {several(len(paths), 'model')} could not be written to {out}: {few}")
    return made


def _write_export(
    saved: Run, name: str, kind: Format, path: Path, written: Path, licence: str, forms: dict[Any, Any]
) -> Exported:
    """Write the model that will be at `path`, and its card; `forms` has the ONNX models of other clients."""
    begin, gap = time.perf_counter(), None
    kept = saved.find_kept_run(name)
    about = {"client": name, "method": kept.summary.method, "model": kept.summary.selection.chosen, "made by": "kinfed"}
    if kind == "safetensors":
        arrays = trees.pack(saved.personal(name))
        theta = arrays.pop("theta")
        checkpoint.write({**kept.architecture.all_tensors(theta), **arrays}, written, about)
    else:
        predictor = saved.predictor(name)
        pipeline = Whole(saved.view_model(name), predictor, name).eval()
        form = (
            kept.folder.path,
            *((key, tuple(value.shape)) for key, value in pipeline.state_dict().items()),
        )
        if form not in forms:
            forms[form] = onnx_file.convert(pipeline, predictor)
        with replacing(written) as part:
            part.write_bytes(onnx_file.fill_weights(forms[form], pipeline, about).SerializeToString())
            gap = onnx_file.measure_gap(part, pipeline, predictor)
            if not gap <= onnx_file.AGREE:
                raise RunError(
                    f"the ONNX model of client '{name}' gives answers that are {gap:.1e} from PyTorch's, "
                    f"above {onnx_file.AGREE:g}, so it was not written; use --format safetensors"
                )
    digest = hashlib.sha256(written.read_bytes()).hexdigest()
    text = card(saved, name, path, digest, licence, gap)
    with replacing(written.with_name(card_name(path))) as part:
        part.write_text(text, encoding="utf-8")
    return Exported(name, path, written.stat().st_size, time.perf_counter() - begin, gap)


def card_name(path: Path) -> str:
    """The name of the card beside a model's file."""
    return f"{path.name}.md"


def file_name(client: str) -> str:
    """A client's name as a file's: with its letters and digits, and a hash in place of the end of a long one."""
    name = "".join(c if c.isalnum() else quote(c, safe=" ()+,=@") for c in client)
    if len(name.encode()) <= LONGEST:
        return name
    return f"{name.encode()[:LONGEST].decode(errors='ignore')}-{hashlib.sha256(client.encode()).hexdigest()[:16]}"
