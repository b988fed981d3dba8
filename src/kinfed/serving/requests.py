"""Bodies of requests as tables and arrays, with one clear error for each that is neither."""

import json
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..data.tables.frame import Frame, series_of
from ..data.tables.open_table import frame_of, open_table
from ..errors import UsageError
from ..runs.predictor import Predictor

CSV, JSON = "text/csv", "application/json"
WIDEST = 10_000  # columns of a request
Cell = str | int | float | bool | None


class Refused(Exception):
    """A request that gets an HTTP error; the message says what was wrong and what was expected."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class _Collected(threading.local):
    """What was warned of since the request that this thread answers has come; None between requests."""

    lines: list[str] | None = None


_collected = _Collected()


@contextmanager
def collect_warnings() -> Iterator[None]:
    """Warnings that come up while a request is answered are for its sender, in whichever thread that is."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def keep(message: Warning | str, *rest: Any, **more: Any) -> None:
            if _collected.lines is None:
                show(message, *rest, **more)
            else:
                _collected.lines.append(str(message))

        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = keep
        yield


def answer(predictor: Predictor, body: bytes, kind: str) -> tuple[Any, list[str], list[str]]:
    """The answers to a request's rows, as a frame of polars, which columns the run was not trained with, and what was
    warned of, if `collect_warnings`; raises Refused.
    """
    _collected.lines = []
    try:
        if kind == CSV:
            frame, ignored = _of_csv(predictor, body)
        elif predictor.description is None and predictor.series is None:
            frame, ignored = _of_arrays(predictor, _json(body)), []
        else:
            document = _json(body)
            rows = document.get("rows")
            if not isinstance(rows, list) or not rows or set(document) - {"rows"}:
                raise Refused(422, 'the request must be {"rows": [{"COLUMN": value, ...}, ...]} with one row or more')
            frame, ignored = _predict_rows(predictor, frame_of(_table(rows)))
        return frame, ignored, [line.replace("the frame", "the request") for line in _collected.lines]
    except UsageError as problem:
        raise Refused(422, str(problem).replace("the frame", "the request")) from None
    except UnicodeEncodeError:  # of what JSON can write and Unicode has not
        raise Refused(400, "the request has half of a surrogate pair, such as \\ud800, in a text; correct it") from None
    finally:
        _collected.lines = None


def _predict_rows(predictor: Predictor, frame: Frame) -> tuple[Any, list[str]]:
    return predictor.answer_rows(frame)[0], predictor.strangers(frame)


def _of_csv(predictor: Predictor, body: bytes) -> tuple[Any, list[str]]:
    head = body[: body.find(b"\n") + 1] or body
    _check_width(max(map(head.count, (b",", b";", b"\t"))))
    with tempfile.TemporaryDirectory(prefix="kinfed-") as folder:
        path = Path(folder) / "request.csv"
        path.write_bytes(body)
        try:
            return _predict_rows(predictor, open_table(path))
        except UsageError as problem:
            raise UsageError(str(problem).replace(str(path), "the request")) from None
        finally:
            _collected.lines = [line.replace(str(path), "the request") for line in _collected.lines or ()]


def _check_width(columns: int) -> None:
    """Raise Refused for a table so wide that reading it would keep others waiting."""
    if columns > WIDEST:
        raise Refused(
            422, f"the request has {columns:,} columns, and {WIDEST:,} are read at most; send those of the run"
        )


def _json(body: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise Refused(400, f"{constant} is no JSON; write null for a missing value")

    try:
        document = json.loads(body, parse_constant=refuse)
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise Refused(400, f"the request is not JSON: {problem!s:.200}") from None
    except (ValueError, RecursionError):
        raise Refused(400, "the request holds a number of thousands of digits, or lists nested too deeply") from None
    if not isinstance(document, dict):
        raise Refused(422, "the request must be a JSON object")
    return document


def _table(rows: list[Any]) -> Any:
    import polars

    first = rows[0]
    _check_width(len(first) if isinstance(first, dict) else 0)
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != first.keys():
            got = "has other columns than row 1" if isinstance(row, dict) else "is not an object"
            raise Refused(422, f"row {i + 1} {got}; give every row every column, null where a value is missing")
    columns = []
    for name in first:
        cells = [row[name] for row in rows]
        kinds = {type(cell) for cell in cells} - {type(None)}
        if bad := kinds - {str, int, float, bool}:
            got = "an object" if dict in bad else "a list"
            raise Refused(422, f"column '{name}' holds {got}; values are text, numbers, true, false or null")
        if {str, float} <= kinds:  # whose text might be read with another decimal mark
            raise Refused(422, f"column '{name}' holds text and numbers; send all its values as one of these")
        if str in kinds:
            cells = [None if cell is None else str(cell) for cell in cells]
        elif kinds - {bool}:
            try:
                columns.append(series_of(name, cells))
            except OverflowError:
                raise Refused(422, f"column '{name}' holds too large a number") from None
            continue
        columns.append(polars.Series(name, cells, polars.Boolean if kinds == {bool} else polars.String))
    return polars.DataFrame(columns)


def _of_arrays(predictor: Predictor, document: dict[str, Any]) -> Any:
    if "x" not in document or set(document) - {"x", "clients"}:
        shape = list(predictor.shape)
        raise Refused(422, f'the request must be {{"x": [...]}}, examples of shape {shape}, and perhaps "clients"')
    try:
        x = np.array(document["x"], np.float32)
    except (ValueError, TypeError, OverflowError):
        raise Refused(422, f"x must be numbers, examples of shape {list(predictor.shape)} each") from None
    clients = document.get("clients")
    if clients is not None and not (isinstance(clients, list) and all(isinstance(client, str) for client in clients)):
        raise Refused(422, "clients must be a list of names")
    return predictor.arrays(x, clients)
