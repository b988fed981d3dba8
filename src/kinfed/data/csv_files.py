"""Files of separated text: their encoding, what separates their entries, and their cells by line."""

import codecs
import csv
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import Fault, UsageError

if TYPE_CHECKING:
    import polars

SEPARATORS = (",", ";", "\t", "|")
LOOKED_AT = 50  # lines that tell what separates entries
LOOKED_IN = 1000  # bytes that tell whether a file is text


class Text(NamedTuple):
    """The text of a file."""

    path: Path
    data: bytes  # in UTF-8
    above: int  # lines above the heading, which are not in `data`
    separator: str
    told: str  # how the encoding was found, if it is not UTF-8


def read(path: Path) -> "tuple[list[str], polars.DataFrame]":
    """The names in the heading, and cells as text without lines that are blank.

    Entries are separated by commas, semicolons, tabs or bars; text is UTF-8, UTF-16 with its mark, or else
    Windows-1252, with a warning. Raises UsageError for a line that does not fit the heading.
    """
    import polars

    text = _text(path)
    if text.told:
        warnings.warn(f"{path}: {text.told}", stacklevel=5)
    heading = _heading(text)
    table = _quick(text, len(heading))
    if table is None or not _fits(text, table):
        held = [cells for _, cells in _rows(text)]
        columns = zip(*held, strict=True) if held else [()] * len(heading)
        table = polars.DataFrame([polars.Series(f"{i}", cells, polars.String) for i, cells in enumerate(columns)])
    return heading, table


def line_of(path: Path, row: int) -> int:
    """The line of the file at which a row ends, from 0, of those that `read` gives."""
    for at, (line, _) in enumerate(_rows(_text(path))):
        if at == row:
            return line
    raise UsageError(f"{path} changed while it was read; try again when nothing writes to it", Fault.CHANGED)


def _text(path: Path) -> Text:
    """A file as text; raises UsageError if it is none."""
    data, told = path.read_bytes(), ""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            data = data.decode("utf-16").encode()
        except UnicodeDecodeError:
            raise UsageError(
                f"{path}: its first bytes say UTF-16, but this is not UTF-16 text; save it as UTF-8", Fault.UNREADABLE
            ) from None
    elif b"\0" in data[:LOOKED_IN] or data.startswith(b"PK\3\4"):
        raise UsageError(
            f"{path}: this is not text, perhaps a workbook or a compressed file; save the sheet as .csv, or unpack it",
            Fault.UNREADABLE,
        )
    elif not data.isascii():
        data, told = _as_utf8(path, data.removeprefix(codecs.BOM_UTF8))
    text = Text(path, data, 0, SEPARATORS[0], told)
    if said := re.match(rb'"?sep=([,;\t|])"?\r?\n', data, re.IGNORECASE):  # a line that Excel reads
        return text._replace(data=data[said.end() :], above=1, separator=said[1].decode())
    return text._replace(separator=_separator(text))


def _as_utf8(path: Path, data: bytes) -> tuple[bytes, str]:
    """Bytes in UTF-8, and what to warn of if they were in another encoding."""
    try:
        data.decode()
    except UnicodeDecodeError as problem:
        at, line = problem.start, data.count(b"\n", 0, problem.start) + 1
    else:
        return data, ""
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        raise UsageError(f"{path}, line {line}: this is not UTF-8 text; save it as UTF-8", Fault.UNREADABLE) from None
    word = re.split(r"[,;\t|\r\n\"]", text[:at])[-1] + re.split(r"[,;\t|\r\n\"]", text[at:])[0]
    told = f"this is not UTF-8 text, so it was read as Windows-1252: '{word.strip()}' in line {line}"
    return text.encode(), f"{told}; if that is wrong, save it as UTF-8"


def _separator(text: Text) -> str:
    """What separates entries: what gives the first lines the same number of them, the most if several do."""
    widths: dict[str, list[int]] = {}
    for mark in SEPARATORS:
        widths[mark] = []
        with suppress(UsageError):  # such as a quotation mark inside an entry
            for _, row in islice(_lines(text._replace(separator=mark)), LOOKED_AT):
                widths[mark] += [len(row)] * any(cell.strip() for cell in row)
        widths[mark] = widths[mark] or [0]
    same = {mark: each for mark, each in widths.items() if len({*each}) == 1} or widths
    best = max(same, key=lambda mark: same[mark][0])
    return best if same[best][0] > 1 else max(widths, key=lambda mark: widths[mark][0])


def _quick(text: Text, width: int) -> "polars.DataFrame | None":
    """What polars makes of a file, lines of blanks left out; None if it refuses."""
    import polars

    try:
        table = polars.read_csv(text.data, separator=text.separator, infer_schema=False, empty_string_is_null=False)
    except Exception:  # the reader of single lines says what is wrong
        return None
    if table.width != width:
        return None
    if (table[:, 0].str.strip_chars() == "").any():
        table = table.filter(~polars.all_horizontal(polars.all().str.strip_chars() == ""))
    return table


def _fits(text: Text, table: "polars.DataFrame") -> bool:
    """Whether every line has as many entries as the heading: polars fills up short ones with empty cells."""
    data = text.data
    plain = b'"' not in data and data.count(b"\r") == data.count(b"\r\n")
    if plain and (table.width == 1 or (table[:, -1] != "").all()):
        return True
    if plain and data.count(text.separator.encode()) == (table.width - 1) * (table.height + 1):
        return True
    return sum(1 for _ in _rows(text)) == table.height


def _heading(text: Text) -> list[str]:
    """The names of the columns, all different."""
    heading = [name.strip() for name in next(_lines(text), (0, []))[1]]
    if text.data.strip() and not any(heading):
        raise UsageError(
            f"{text.path}, line {text.above + 1}: there are no column names; add them, separated by commas",
            Fault.UNREADABLE,
        )
    if twice := sorted({name for name in heading if name and heading.count(name) > 1}):
        raise UsageError(
            f"{text.path}: two columns are named '{twice[0]}'; rename one of them in the header", Fault.COLUMNS
        )
    return heading


def _rows(text: Text) -> Iterator[tuple[int, list[str]]]:
    """The line and the cells of every row that is not blank, below the heading."""
    lines = _lines(text)
    width = len(next(lines, (0, []))[1])
    for line, row in lines:
        if not any(cell.strip() for cell in row):  # such as the last lines of a spreadsheet
            continue
        if len(row) != width:
            raise UsageError(
                f"{text.path}, line {line}: {len(row)} entries, but the header has {width}", Fault.UNREADABLE
            )
        yield line, row


def _lines(text: Text) -> Iterator[tuple[int, list[str]]]:
    """The number of every line, and its cells."""
    file = io.TextIOWrapper(io.BytesIO(text.data), encoding="utf-8-sig", newline="")
    rows = csv.reader(file, delimiter=text.separator, strict=True)
    try:
        for row in rows:
            yield text.above + rows.line_num, row
    except csv.Error as problem:
        message = "a quotation mark is never closed" if "unexpected end" in str(problem) else str(problem)
        raise UsageError(f"{text.path}, line {text.above + rows.line_num}: {message}", Fault.UNREADABLE) from None
