"""Tables from CSV and Parquet files, folders of them, databases, and frames of polars and pandas."""

import io
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import Fault, UsageError, nearest, reason_of
from . import csv_text
from .databases import fetch, is_address
from .frame import Frame, series_of

if TYPE_CHECKING:
    import polars

SUFFIXES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}  # and the names of data sets of such files
FILE = "file"  # the column, in a folder, of the names of files without their suffix, if there is none of this name
NONE = 0, 0  # the stamp of a file that is not there
Part = tuple[Path, int]  # a file, and how many rows it has


def open_table(source: str | Path, query: str = "") -> Frame:
    """Read a file, all files of a folder, or what a query finds in a database (see `databases.fetch`).

    The files of a folder are in order of their names; its rows have a column `file`, unless they have one already. A
    database's rows are in order of their cells, as it may give them in any. Raises UsageError naming the line of a CSV
    that does not fit its heading.
    """
    if is_address(source):
        return _read_database(str(source), query)
    if query:
        raise UsageError(f"{source} is not a database; leave the query out")
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise UsageError(f"there is no file {path} (in {Path.cwd()}){_suggest_tables(path)}", Fault.GONE)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: tables are read from .csv, .tsv and .parquet; {_instead(path.suffix.lower())}")
    table = _read(path)
    plain, strange = _simplify_types(table)
    return Frame(str(path), plain, partial(_place, [(path, table.height)]), strange)


def _instead(suffix: str) -> str:
    """What to do with a file of another kind."""
    if suffix in (".db", ".sqlite", ".sqlite3"):
        return "a database of SQLite is sqlite:///FILE, with --query"
    if suffix in (".gz", ".zip", ".bz2", ".xz", ".zst"):
        return "unpack it"
    if suffix in (".xlsx", ".xls", ".ods"):
        return "save it as .csv"
    return "rename it to .csv if it is such text, or save it as .csv"


def kind_of(source: str | Path) -> str:
    """ "csv" or "parquet" for a table, or a folder of tables that is no run's folder, "sql" for a database; else ""."""
    if is_address(source):
        return "sql"
    path = Path(source)
    if path.is_dir():
        tables = [] if (path / "config.toml").exists() else _tables_in(path)
        path = tables[0] if tables else path
    return SUFFIXES.get(path.suffix.lower(), "")


def frame_of(data: Any, name: str = "the frame") -> Frame:
    """A frame of polars or pandas as a table; raises UsageError for anything else. `name` is for errors."""
    import polars

    if isinstance(data, polars.LazyFrame):
        data = data.collect()
    if not isinstance(data, polars.DataFrame):
        data = convert_pandas(data)
    if not data.height or not data.width:
        raise UsageError(f"{name} has no rows")
    table, strange = _simplify_types(_name_columns(name, data.columns, data))
    return Frame(name, table, lambda row: f"{name}, row {row + 1}", strange)


def _read_database(address: str, query: str) -> Frame:
    """What a query finds, in order of the cells; a row's place is where the database gave it."""
    import polars

    name, table = fetch(address, query)
    plain, strange = _simplify_types(table)
    plain = plain.with_columns(polars.int_range(plain.height).alias(""))  # no column of a query has this name
    plain = plain.sort(polars.all())  # by name, some would be patterns
    order = plain[""]
    return Frame(name, plain.drop(""), lambda row: f"{name}, row {order[row] + 1}", strange)


def _tables_in(path: Path) -> list[Path]:
    return sorted(
        path_in_folder
        for path_in_folder in path.iterdir()
        if path_in_folder.suffix.lower() in SUFFIXES and path_in_folder.is_file()
    )


def _folder(path: Path) -> Frame:
    """The tables in a folder, one below the other."""
    import polars

    files = _tables_in(path)
    if not files:
        raise UsageError(f"{path} is a folder, not a table, and holds no .csv or .parquet", Fault.UNREADABLE)
    if len(kinds := sorted({file.suffix.lower() for file in files})) > 1:
        raise UsageError(f"{path} holds {' and '.join(kinds)}; keep one kind there", Fault.UNREADABLE)
    tables = [_read(file) for file in files]
    first = tables[0].columns
    for file, table in zip(files, tables, strict=True):
        if lacking := [name for name in first if name not in table.columns]:
            raise UsageError(f"{file} has no column '{lacking[0]}', which {files[0].name} has", Fault.COLUMNS)
        if more := [name for name in table.columns if name not in first]:
            raise UsageError(f"{file} has a column '{more[0]}', which {files[0].name} lacks", Fault.COLUMNS)
    added = [] if FILE in first else [FILE]
    if added:
        named = zip(files, tables, strict=True)
        tables = [table.with_columns(polars.lit(file.stem).alias(FILE)) for file, table in named]
    parts = [(file, table.height) for file, table in zip(files, tables, strict=True)]
    aligned = [polars.DataFrame([table[name] for name in tables[0].columns]) for table in tables]
    try:
        table, strange = _simplify_types(polars.concat(aligned, how="vertical_relaxed"))
    except polars.exceptions.PolarsError as problem:
        why = f"{path}: the files have columns of different types ({reason_of(problem)})"
        raise UsageError(why, Fault.UNREADABLE) from None
    return Frame(str(path), table, partial(_place, parts), strange, added=added)


def _read(path: Path) -> "polars.DataFrame":
    """A file as it is; raises UsageError if it cannot be read, has no rows, or changes meanwhile."""
    reader = _parquet if path.suffix.lower() == ".parquet" else _csv
    before = _stamp(path)
    try:
        table = reader(path)
    except UsageError:
        if _stamp(path) == before:
            raise
    except Exception as problem:  # whatever a reader raises for a file that is not one of its kind
        if _stamp(path) == before:
            raise UsageError(f"{path} cannot be read: {reason_of(problem)}", Fault.UNREADABLE) from None
    if (after := _stamp(path)) != before:
        raise _change_error(path, before[1], after)
    if not table.width or not table.height:
        raise UsageError(f"{path} has no rows", Fault.EMPTY)
    return table


def _change_error(path: Path, size: int, after: tuple[int, int]) -> UsageError:
    """The error for a file that had `size` bytes, and has another stamp now."""
    if after == NONE:
        return UsageError(f"{path} was deleted while it was read; put it back", Fault.GONE)
    what = f"from {size:,} to {after[1]:,} bytes" if size != after[1] else "it was written anew"
    return UsageError(f"{path} changed while it was read ({what}); try again when nothing writes to it", Fault.CHANGED)


def _stamp(path: Path) -> tuple[int, int]:
    """What changes when a file does."""
    try:
        status = path.stat()
    except OSError:
        return NONE
    return status.st_mtime_ns, status.st_size


def _suggest_tables(path: Path) -> str:
    """The nearest of the tables in the folder where a file was sought, for an error."""
    try:
        beside = [other.name for other in path.parent.iterdir() if other.suffix.lower() in SUFFIXES]
    except OSError:  # there is no such folder
        return ""
    return f"; {nearest(path.name, beside)}" if beside else ""


def _place(parts: Sequence[Part], row: int) -> str:
    """Where a row is, of the rows of these files one below the other."""
    for file, count in parts:
        path = file
        if row < count:
            break
        row -= count
    if path.suffix.lower() == ".parquet":
        return f"{path}, row {row + 1}"
    return f"{path}, line {csv_text.line_of(path, row)}"


def _csv(path: Path) -> "polars.DataFrame":
    heading, table = csv_text.read(path)
    return _name_columns(str(path), heading, table)


def _name_columns(source: str, heading: Sequence[str], table: "polars.DataFrame") -> "polars.DataFrame":
    """The columns by the names in the heading; a warning tells of those without one, which are left out."""
    kept = [i for i, name in enumerate(heading) if name.strip()]
    if without := [f"{i + 1}" for i, name in enumerate(heading) if not name.strip()]:
        warnings.warn(
            f"{source}: left out columns without a name in the header, as pandas writes its index: column "
            f"{', '.join(without)}; to use it, name it",
            stacklevel=5,
        )
    table = table[:, kept]
    table.columns = [heading[i] for i in kept]
    return table


def _parquet(path: Path) -> "polars.DataFrame":
    import polars

    try:
        table = polars.read_parquet(io.BytesIO(path.read_bytes()))
    except polars.exceptions.PanicException as problem:  # no Exception, so that few catch it
        raise UsageError(f"{path} is a damaged Parquet file ({problem!s:.200})", Fault.UNREADABLE) from None
    return _name_columns(str(path), table.columns, table)


STRANGE = {  # types of columns that no model takes, in words
    "Duration": "lengths of time",
    "Time": "times of day without a date",
    "List": "lists",
    "Array": "lists",
    "Struct": "records of several fields",
    "Binary": "bytes",
}


def _simplify_types(table: "polars.DataFrame") -> "tuple[polars.DataFrame, dict[str, str]]":
    """The columns of numbers, truth values, text and dates; and what all others hold, by name.

    Dates are in microseconds, columns of numbers with gaps in float64 or, where that would not tell them apart, text.
    """
    import polars

    columns, strange = [], {}
    for name in table.columns:
        column = table[name].alias("")  # polars takes names such as ^a$ for patterns of names
        kind = column.dtype
        if kind in (polars.Date, polars.Datetime):
            zone = "UTC" if getattr(kind, "time_zone", None) else None
            column = (column.dt.convert_time_zone(zone) if zone else column).cast(polars.Datetime("us", zone))
        elif kind == polars.Decimal:
            column = column.cast(polars.Float64)
        elif kind in (polars.Categorical, polars.Enum, polars.Null):
            column = column.cast(polars.String)
        elif kind not in (polars.String, polars.Boolean) and not kind.is_numeric():
            strange[name] = STRANGE.get(str(kind.base_type()), "values of another kind")
            continue
        columns.append(column.alias(name))
    return polars.DataFrame(columns), strange


def convert_pandas(data: Any) -> "polars.DataFrame":
    """A frame of pandas, by its columns' arrays, which need no other package."""
    import polars

    if not hasattr(data, "columns") or not hasattr(data, "iloc"):
        raise UsageError(f"a table is a frame of polars or pandas; got {type(data).__name__}")
    names = [str(name) for name in data.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"the frame: two columns are named '{twice[0]}'")
    return polars.DataFrame([_series(name, data.iloc[:, i]) for i, name in enumerate(names)])


def _series(name: str, column: Any) -> "polars.Series":
    import polars

    if (zone := getattr(column.dtype, "tz", None)) is not None and zone:
        column = column.dt.tz_convert("UTC").dt.tz_localize(None)
    values = column.to_numpy()
    if values.dtype.kind in "biuf":
        return polars.Series(name, values)
    if values.dtype.kind == "M":
        moments = polars.Series("", values.astype("datetime64[us]"))  # polars takes some names for patterns of names
        return (moments.dt.replace_time_zone("UTC") if zone else moments).alias(name)
    cells = [None if value is None or missing else value for value, missing in zip(values, column.isna(), strict=True)]
    return series_of(name, cells)
