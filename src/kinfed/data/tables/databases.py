"""Tables from databases: what a query finds in PostgreSQL or SQLite, in a transaction that can only read."""

import re
import sqlite3
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ...errors import DataError, UsageError, several
from .frame import series_of

if TYPE_CHECKING:
    import polars

SCHEMES = ("postgresql://", "postgres://", "sqlite://")
ATTEMPTS = 3  # of a query whose connection is lost
WAIT = 1.0  # seconds before another
BATCH = 50_000  # rows that are fetched at a time
CONNECTING = 10  # seconds that a server has to answer
# Columns by PostgreSQL's names of types. All others are as their cells are: enumerations have names of their own.
TYPES = dict.fromkeys(("int2", "int4", "int8", "oid"), "Int64") | dict.fromkeys(("float4", "float8"), "Float64")
TYPES |= {"numeric": "Float64", "bool": "Boolean", "date": "Datetime", "timestamp": "Datetime"}
TYPES |= dict.fromkeys(("text", "varchar", "bpchar", "name", "char", "uuid", "money", "unknown"), "String")
WHERE = "put it into ~/.pgpass (a line host:port:database:user:password, chmod 600) or the variable PGPASSWORD"


def is_address(source: str | Path) -> bool:
    """Whether this is an address, not a file; `check_address` says whether it is that of a database."""
    return isinstance(source, str) and bool(re.match(r"\s*[a-z][a-z0-9+.-]+://", source, re.IGNORECASE))


def check_address(address: str) -> None:
    """Raise UsageError, which does not repeat it, for an address with a password, or one that is no address."""
    try:
        parts = urlsplit(address)
        secret = parts.password is not None or any("password" in key.lower() for key, _ in parse_qsl(parts.query))
    except ValueError:
        raise UsageError(
            "the address of the database cannot be read; write postgresql://USER@HOST:PORT/DATABASE, and special "
            "characters as in %40 for @"
        ) from None
    if not address.lower().startswith(SCHEMES):  # it is not repeated: what is wrong may hide a password
        raise UsageError(
            "tables are read from files, PostgreSQL (postgresql://USER@HOST/DATABASE) and SQLite (sqlite:///FILE), not "
            "from other addresses; save what is there as .csv or .parquet, or pass a frame of it to kinfed.from_frame"
        )
    if secret:
        raise UsageError(
            "the address of the database has a password in it, which configs, logs and lists of processes would show; "
            f"{WHERE}, and write postgresql://USER@HOST/DATABASE"
        )
    if parts.scheme == "sqlite" and (parts.netloc or len(parts.path) < 2):
        raise UsageError(f"{address}: write sqlite:///FILE, or sqlite:////FOLDER/FILE for one that is elsewhere")


def text_of(query: str) -> tuple[str, str]:
    """The text of a query, or of the file FILE.sql that it names, and what to call it.

    Raises UsageError for a file that cannot be read, and a query that does not begin with SELECT or WITH.
    """
    name = "the query"
    if query.strip().lower().endswith(".sql"):
        name = query.strip()
        try:
            query = Path(name).read_text(encoding="utf-8-sig")
        except OSError as problem:
            raise UsageError(f"cannot read the query {name}: {problem.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{name} is not UTF-8 text; save it as UTF-8") from None
    rest = re.sub(r"\A(\s|\(|--[^\n]*(\n|\Z)|/\*.*?\*/)+", "", query, flags=re.DOTALL)
    first = (re.match(r"\w*", rest) or [""])[0].upper()
    if not rest:
        raise UsageError(f"{name} is empty; write SELECT ... FROM ...")
    if first not in ("SELECT", "WITH"):
        raise UsageError(f"{name} must begin with SELECT or WITH, as data are only read; got '{first or rest[:20]}'")
    return query.strip(), name


def fetch(address: str, query: str) -> "tuple[str, polars.DataFrame]":
    """What a query finds, and a name for errors; `query` is SQL, or a file FILE.sql.

    Raises UsageError for an address or query that cannot be used, or that finds no row, and DataError if the
    connection is lost again in each of `ATTEMPTS`.
    """
    check_address(address)
    if not query:
        raise UsageError(f"{address} is a database; say what to read there: --query FILE.sql")
    text, called = text_of(query)
    name = f"{address}, {called}"
    table = _sqlite(address, name, text) if address.lower().startswith("sqlite:") else _postgres(address, name, text)
    if not table.height:
        raise UsageError(f"{name}: the query finds no rows")
    return name, table


def _sqlite(address: str, name: str, query: str) -> "polars.DataFrame":
    import polars

    path = Path(unquote(urlsplit(address).path)[1:])
    if not path.is_file():
        raise UsageError(f"{address}: there is no file {path} (in {Path.cwd()})")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            cursor = connection.execute(query)
            columns = _names(name, [entry[0] for entry in cursor.description])
            cells = list(zip(*cursor, strict=True)) or [()] * len(columns)
    except sqlite3.Error as problem:
        raise UsageError(f"{name}: {problem}") from None
    return polars.DataFrame([series_of(column, held) for column, held in zip(columns, cells, strict=True)])


def _postgres(address: str, name: str, query: str) -> "polars.DataFrame":
    """What a query finds in PostgreSQL; a lost connection is made again."""
    try:
        import psycopg
    except ImportError:
        raise UsageError("reading from PostgreSQL needs psycopg; install it: pip install 'kinfed[sql]'") from None
    options: dict[str, Any] = {"connect_timeout": CONNECTING, "application_name": "kinfed", "client_encoding": "UTF8"}
    given = {key for key, _ in parse_qsl(urlsplit(address).query)}
    options = {key: value for key, value in options.items() if key not in given}
    for attempt in range(1, ATTEMPTS + 1):
        connected = False
        try:
            with psycopg.connect(address, **options) as connection:
                connected = True
                return _run_query(connection, name, query)
        except psycopg.Error as problem:
            if not _is_lost(problem, connected or attempt > 1):
                raise UsageError(_explain_error(address, name, problem, connected)) from None
            reason = _reason(problem)
        lost = f"{name}: the connection was lost ({reason})"
        if attempt < ATTEMPTS:
            warnings.warn(f"{lost}; trying again, {attempt + 1} of {ATTEMPTS}", stacklevel=4)
            time.sleep(WAIT)
    raise DataError(f"{lost}, {several(ATTEMPTS, 'time')}; look at the server and the network, then try again")


def _run_query(connection: Any, name: str, query: str) -> "polars.DataFrame":
    """The answer to a query in one transaction, fetched in batches."""
    import polars
    from psycopg.types.numeric import FloatLoader
    from psycopg.types.string import TextLoader

    connection.read_only = True
    connection.execute("SET LOCAL timezone = 'UTC'")
    with connection.cursor("kinfed") as cursor:
        cursor.adapters.register_loader("numeric", FloatLoader)
        cursor.adapters.register_loader("uuid", TextLoader)
        cursor.execute(query)  # as a prepared statement, which holds one command alone
        description = cursor.description or []
        columns = _names(name, [entry.name for entry in description])
        types = [cursor.adapters.types.get(entry.type_code) for entry in description]
        # An array is known by the type of its items.
        codes = zip(types, (entry.type_code for entry in description), strict=True)
        kinds = [kind.name if kind and kind.oid == code else None for kind, code in codes]
        parts = []
        while rows := cursor.fetchmany(BATCH):
            cells = zip(columns, kinds, zip(*rows, strict=True), strict=True)
            series = [
                polars.Series(column, held, getattr(polars, TYPES[kind])) if kind in TYPES else series_of(column, held)
                for column, kind, held in cells
            ]
            parts.append(polars.DataFrame(series))
    return polars.concat(parts, how="vertical_relaxed") if parts else polars.DataFrame()


def _names(name: str, columns: list[str]) -> list[str]:
    """The names of columns; raises UsageError unless all are different."""
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise UsageError(f"{name}: two columns are named '{twice[0]}'; rename one with AS")
    return columns


def _is_lost(problem: Any, connected: bool) -> bool:
    """Whether an error of psycopg says that a connection that was there is lost."""
    import psycopg

    state = problem.sqlstate or ""
    # 57P: the server shuts down or ended the connection; 08: a failure of the connection
    return isinstance(problem, psycopg.OperationalError) and connected and (not state or state[:3] in ("57P", "080"))


def _explain_error(address: str, name: str, problem: Any, connected: bool) -> str:
    reason = _reason(problem)
    if connected:
        return f"{name}: {reason}"
    fix = f"; a password: {WHERE}" if "password" in reason or "authentication" in reason else ""
    return f"cannot connect to {address}: {reason}{fix}"


def _reason(problem: Any) -> str:
    """An error of psycopg in a line."""
    text = problem.diag.message_primary or str(problem)
    lines = [line.strip() for line in text.splitlines() if line.strip() and "Is the server running" not in line]
    lines = lines or [type(problem).__name__]
    return (f"{lines[0]}; {problem.diag.message_hint}" if problem.diag.message_hint else lines[-1]).rstrip(".")
