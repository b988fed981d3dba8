"""Files of separated text: their encoding, what separates their entries, and their cells by line."""

import codecs
import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import Fault, UsageError, several

if TYPE_CHECKING:
    import polars

SEPARATORS = (",", ";", "\t", "|")
MARKS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
LOOKED_AT = 50  # lines that tell what separates entries
LOOKED_IN = 1000  # bytes that tell whether a file is text
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
FILLED = re.compile(rb"[^\r\n]*[^\s][^\r\n]*")  # a line that is not blank
QUOTED = "a quotation mark inside an entry is written twice, and the entry stands between quotation marks"


class Text(NamedTuple):
    """The text of a file."""

    path: Path
    data: bytes  # in UTF-8
    above: int  # lines above the heading, which are not in `data`
    separator: str
    warnings: tuple[str, ...]  # what to warn of: an encoding that is not UTF-8, lines that are left out


def read(path: Path) -> "tuple[list[str], polars.DataFrame]":
    """The names in the heading, and cells as text without lines that are blank.

    Entries are separated by commas, semicolons, tabs or bars; text is UTF-8, UTF-16 with its mark, or else
    Windows-1252, with a warning. Raises UsageError for a line that does not fit the heading.
    """
    import polars

    text = _text(path)
    for warning in text.warnings:
        warnings.warn(f"{path}: {warning}", stacklevel=5)
    heading = _heading(text)
    table = _read_quickly(text, len(heading))
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
    data, encoding_warning = path.read_bytes(), ""
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
        data, encoding_warning = _as_utf8(path, data.removeprefix(codecs.BOM_UTF8))
    data, above, remarks = _without_remarks(data)
    text = Text(path, data, above, SEPARATORS[0], tuple(filter(None, (encoding_warning, remarks))))
    if declaration := re.match(rb'"?sep=([,;\t|])"?\r?\n', data, re.IGNORECASE):  # a line that Excel reads
        return text._replace(data=data[declaration.end() :], above=above + 1, separator=declaration[1].decode())
    return text._replace(separator=_separator(text))


def _without_remarks(data: bytes) -> tuple[bytes, int, str]:
    """The data from its heading on; how many lines stand above that: blank ones, and remarks, which begin with #; and
    what to warn of if there are such lines.

    A line with # is the heading if the first line that is none has as many entries.
    """
    above, begin, remarks = 0, 0, 0
    below = next((line[0].strip() for line in FILLED.finditer(data) if not line[0].lstrip().startswith(b"#")), b"")
    for match in LINE.finditer(data):
        line = match[0].strip()
        kept = line.startswith(b"#") and any(_width(line, mark) == _width(below, mark) > 1 for mark in SEPARATORS)
        if kept or (line and not line.startswith(b"#")):
            break
        above, begin, remarks = above + 1, match.end(), remarks + bool(line)
    notes = []
    if remarks:
        verbs = ("begin", "are") if remarks > 1 else ("begins", "is")
        notes.append(f"{several(remarks, 'line')} above the header that {verbs[0]} with # {verbs[1]} left out")
    if data.startswith(b"#", begin):
        notes.append(f"line {above + 1} begins with # and is taken for the header; if it is a remark, delete it")
    return data[begin:], above, "; ".join(notes)


def _width(line: bytes, separator: str) -> int:
    """How many entries a line has."""
    return len(next(csv.reader([line.decode()], delimiter=separator), ()))


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
    what = f"this is not UTF-8 text, so it was read as Windows-1252: '{word.strip()}' in line {line}"
    return text.encode(), f"{what}; if that is wrong, save it as UTF-8"


def _separator(text: Text) -> str:
    """What separates entries: what gives the first lines the same number of them, the most if several do."""
    widths: dict[str, list[int]] = {}
    for mark in SEPARATORS:
        widths[mark] = []
        with suppress(UsageError):  # such as a quotation mark inside an entry
            for _, row in islice(_lines(text._replace(separator=mark)), LOOKED_AT):
                if any(cell.strip() for cell in row):
                    widths[mark].append(len(row))
        widths[mark] = widths[mark] or [0]
    same = {mark: counts for mark, counts in widths.items() if len({*counts}) == 1} or widths
    best = max(same, key=lambda mark: same[mark][0])
    return best if same[best][0] > 1 else max(widths, key=lambda mark: widths[mark][0])


def _read_quickly(text: Text, width: int) -> "polars.DataFrame | None":
    """What polars makes of a file, lines of blanks left out; None if it refuses."""
    import polars

    try:
        table = polars.read_csv(text.data, separator=text.separator, infer_schema=False, empty_string_is_null=False)
    except Exception:  # the reader of single lines says what is wrong
        return None
    if table.width != width:
        return None
    table.columns = [f"{i}" for i in range(width)]  # polars takes names such as ^a$ and * for patterns of names
    if (table[:, 0].str.strip_chars() == "").any():
        table = table.filter(~polars.all_horizontal(polars.all().str.strip_chars() == ""))
    return table


def _fits(text: Text, table: "polars.DataFrame") -> bool:
    """Whether every line has as many entries as the heading: polars fills up short ones with empty cells."""
    data = text.data
    is_plain = b'"' not in data and data.count(b"\r") == data.count(b"\r\n")  # each separator is one between entries
    if is_plain and (table.width == 1 or (table[:, -1] != "").all()):  # no line was filled up
        return True
    if is_plain and data.count(text.separator.encode()) == (table.width - 1) * (table.height + 1):
        return True
    return sum(1 for _ in _rows(text)) == table.height  # reading it line by line raises for one that does not fit


def _heading(text: Text) -> list[str]:
    """The names of the columns, all different."""
    heading = [name.strip() for name in next(_lines(text), (0, []))[1]]
    if text.data.strip() and not any(heading):
        raise UsageError(
            f"{text.path}, line {text.above + 1}: there are no column names; write them there, separated by commas, or "
            "delete the line if they stand below it",
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
    first, heading = next(lines, (0, []))
    for line, row in lines:
        if not any(cell.strip() for cell in row):  # such as the last lines of a spreadsheet
            continue
        if len(row) != len(heading):
            raise UsageError(_misfit(text, line, row, first, heading), Fault.UNREADABLE)
        yield line, row


def _misfit(text: Text, line: int, row: list[str], first: int, heading: list[str]) -> str:
    """What to say of the first line that has more or fewer entries than the heading, and which of them is wrong."""
    count = f"{len(row)} {'entry' if len(row) == 1 else 'entries'}"
    what = f"{text.path}, line {line}: {count}, but the header has {len(heading)}"
    filled = (cells for _, cells in islice(_readable(text), 1, None) if any(map(str.strip, cells)))
    good = list(islice(filled, LOOKED_AT))
    usual = Counter(map(len, good)).most_common(1)[0][0]
    surplus = len(row) - len(heading)
    whole_numbers = sum(cell.strip().lstrip("+-").isdecimal() for cell in row)
    if usual == len(row) and text.separator == "," and len(heading) > 2 and 0 < 2 * surplus <= whole_numbers:
        fix = 'if commas mark decimals too, as in 1,5, export it with semicolons between entries and set decimal=","'
    elif usual != len(heading):  # most lines are like this one
        title = text.separator.join(heading)[:40]
        fix = f"if the columns' names stand below line {first} ('{title}'), delete it, else name every column"
    elif len(row) < len(heading):
        fix = f"write a {MARKS[text.separator]} for each entry that is empty"
    elif text.separator == "," and _has_decimal_comma(row, next(cells for cells in good if len(cells) == usual)):
        fix = "write a decimal point for the comma, or put the number between quotation marks"
    else:
        fix = f"put an entry that holds a {MARKS[text.separator]} between quotation marks"
    return f"{what}; {fix}"


def _has_decimal_comma(row: list[str], other: list[str]) -> bool:
    """Whether two entries of a row are one number, so that its numbers and words stand where another row's do."""
    kinds = list(map(_is_number, other))
    for i in range(len(row) - 1):
        joined = [*row[:i], ".".join(row[i : i + 2]), *row[i + 2 :]]
        if _is_number(joined[i]) and list(map(_is_number, joined)) == kinds:
            return True
    return False


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"\s*[-+]?\d+(\.\d+)?\s*", cell) is not None


def _readable(text: Text) -> Iterator[tuple[int, list[str]]]:
    """The lines up to the first that cannot be read."""
    with suppress(UsageError):
        yield from _lines(text)


def _lines(text: Text) -> Iterator[tuple[int, list[str]]]:
    """The number of every line, and its cells."""
    file = io.TextIOWrapper(io.BytesIO(text.data), encoding="utf-8-sig", newline="")
    rows = csv.reader(file, delimiter=text.separator, strict=True)
    try:
        for row in rows:
            yield text.above + rows.line_num, row
    except csv.Error as problem:
        line, message = text.above + rows.line_num, str(problem)
        if "unexpected end" in message:
            message = f"a quotation mark is never closed; {QUOTED}"
        elif "expected after" in message:
            message = f"an entry goes on behind the quotation mark that ends it; {QUOTED}"
        if b'\\"' in text.data:
            message = message.partition(";")[0] + '; a quotation mark inside an entry is written as "", not as \\"'
        raise UsageError(f"{text.path}, line {line}: {message}", Fault.UNREADABLE) from None
