"""Tables from databases: SQLite, and a PostgreSQL server that the tests start and stop."""

import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import polars
import pytest

import kinfed
from kinfed import UsageError
from kinfed.cli import main
from kinfed.data.tables import databases
from kinfed.data.tables.databases import text_of
from kinfed.data.tables.moments import read_seconds
from kinfed.data.tables.open_table import frame_of, open_table
from kinfed.errors import DataError

PASSWORD = "geheim-Xq7"
COLUMNS = ["--client", "shop", "--target", "buys"]
ROWS = [
    (
        f"S{i % 4}",
        i,
        None if i % 10 == 3 else round(1.5 * i % 7, 2),
        f"2025-01-{1 + i % 28:02}",
        ["no", "yes"][i * i % 3 > 0],
    )
    for i in range(80)
]


def needs_postgres(test):
    for mark in (pytest.mark.xdist_group("postgres"), pytest.mark.needs("pg_createcluster", "postgresql")):
        test = mark(test)
    return test


@pytest.fixture
def sqlite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shops.db")) as made:
        made.execute("CREATE TABLE sales (shop TEXT, number INT, price REAL, day TEXT, buys TEXT)")
        made.executemany("INSERT INTO sales VALUES (?, ?, ?, ?, ?)", ROWS)
        made.commit()
    Path("site.sql").write_text("-- what shops sold\nSELECT shop, price, day, buys FROM sales;\n")
    return "sqlite:///shops.db"


def programs():
    """The folder of PostgreSQL's programs, which Debian keeps off the path."""
    return sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]


@pytest.fixture(scope="module")
def server():
    """The address of a database on a socket that no other machine reaches; passwords are asked for."""
    folder = Path(
        tempfile.mkdtemp(prefix="kinfed-sql-")
    )  # the paths of sockets are short, and tmp_path is root's alone
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    if user:
        shutil.chown(folder, "postgres", "postgres")
    (folder / "password").write_text(PASSWORD)
    os.chmod(folder / "password", 0o644)
    quiet = {"check": True, "capture_output": True, "cwd": folder, **user}
    options = ["--auth=scram-sha-256", f"--pwfile={folder}/password", "--username=ada", "--no-sync", "--encoding=UTF8"]
    subprocess.run([programs() / "initdb", "-D", folder / "data", *options], **quiet)
    settings = [f"-cunix_socket_directories={folder}", "-clisten_addresses=", "-cfsync=off"]
    with subprocess.Popen(
        [programs() / "postgres", "-D", folder / "data", *settings],
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        **user,
    ) as running:
        while "ready to accept connections" not in running.stderr.readline():
            assert running.poll() is None
        drain = threading.Thread(target=running.stderr.read, daemon=True)
        drain.start()
        yield f"postgresql://ada@/postgres?host={folder}"
        running.send_signal(signal.SIGQUIT)  # at once, as nothing is kept
        drain.join()
    shutil.rmtree(folder)


@pytest.fixture
def postgres(server, sqlite, monkeypatch):
    """The same table in PostgreSQL, with the password in the environment."""
    psycopg = pytest.importorskip("psycopg")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setattr(databases, "WAIT", 0)
    with psycopg.connect(server) as made:
        made.execute("DROP TABLE IF EXISTS sales")
        made.execute("CREATE TABLE sales (shop text, number int, price numeric(6, 2), day date, buys text)")
        made.cursor().executemany("INSERT INTO sales VALUES (%s, %s, %s, %s, %s)", ROWS)
    return server


def trained(capsys, address, out, *more):
    code = main(
        ["run", address, "--query", "site.sql", *COLUMNS, "--method", "fedavg", "rounds=1", "--out", out, *more]
    )
    return code, capsys.readouterr().err


def test_a_query_trains_as_the_file_does(sqlite, capsys):
    lines = [
        ",".join("" if cell is None else str(cell) for cell in (row[0], *row[2:])) for row in sorted(ROWS, key=str)
    ]
    code, said = trained(capsys, sqlite, "a")
    assert code == 0
    assert "clients   4, named by `shop`: 20 rows each" in said
    table = open_table(sqlite, "site.sql")
    Path("site.csv").write_text("shop,price,day,buys\n" + "\n".join(lines))
    file = open_table("site.csv")
    assert table.columns == file.columns
    for name in ("shop", "buys"):
        assert sorted(table[name].words().counts.items()) == sorted(file[name].words().counts.items())
    np.testing.assert_array_equal(np.sort(table["price"].numbers()), np.sort(file["price"].numbers()))
    assert np.isnan(table["price"].numbers()).sum() == 8
    assert kinfed.from_sql(sqlite, "site.sql", client="shop", target="buys").columns.inputs[0].missing > 0


def test_the_order_of_rows_does_not_matter(sqlite, capsys):
    """A database may give them in any; errors still count them as it gave them."""
    with closing(sqlite3.connect("shops.db")) as made:
        made.executescript("CREATE TABLE other AS SELECT * FROM sales ORDER BY random(); DROP TABLE sales;")
        made.executescript("ALTER TABLE other RENAME TO sales")
    frame = open_table(sqlite, "SELECT * FROM sales ORDER BY number DESC")
    assert frame["shop"].words().names == ["S0", "S1", "S2", "S3"]
    row = int(np.flatnonzero(frame["number"].numbers() == 77)[0])
    assert frame["price"].place(row) == f"{sqlite}, the query, row 3, column 'price'"


@needs_postgres
def test_postgres_gives_what_sqlite_gives(postgres, sqlite, capsys):
    for address, out in ((sqlite, "a"), (postgres, "b")):
        assert trained(capsys, address, out)[0] == 0
    models = [Path(out, "models.safetensors").read_bytes() for out in ("a", "b")]
    assert models[0] == models[1]
    code = main(["list", postgres, "--query", "site.sql", *COLUMNS])
    out = capsys.readouterr().out
    assert code == 0
    assert "--client shop --target buys --query site.sql" in out
    assert main(["run", "b/config.toml", "--out", "c"]) == 0
    assert Path("c/models.safetensors").read_bytes() == models[0]


@needs_postgres
def test_a_site_reads_postgres_as_it_does_sqlite(postgres, sqlite, capsys):
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")
    said = []
    for address in (postgres, sqlite):
        code = main(["flower", "node", "ann", "--data", address, "--query", "site.sql", "--target", "buys", "--check"])
        assert code == 0
        out = capsys.readouterr()
        said.append([line for line in (out.out + out.err).splitlines() if not line.startswith("file ")])
    assert said[0] == said[1]
    assert "greeting  the target: buys; its classes: no, yes" in said[0]


@needs_postgres
def test_types_of_postgres(postgres, monkeypatch):
    query = """SELECT i AS whole, i / 4.0 AS part, i > 1 AS flag, timestamptz '2025-01-31 10:00+02' AS instant,
        timestamp '2025-01-31 10:00' AS moment, 'x'::varchar AS text, gen_random_uuid() AS id, NULL AS nothing,
        interval '1 day' AS span, ARRAY[1, 2] AS list, '{"a": 1}'::json AS json, '2 EUR' AS price
        FROM generate_series(1, 3) AS i"""
    monkeypatch.setattr(databases, "BATCH", 2)
    frame = open_table(postgres, query)
    assert frame["whole"].numbers().tolist() == [1, 2, 3]
    assert frame["part"].numbers().tolist() == [0.25, 0.5, 0.75]
    assert frame["flag"].words().names == ["False", "True"]
    hours = (read_seconds(frame["moment"]) - read_seconds(frame["instant"])) / 3600
    assert hours.tolist() == [2, 2, 2]
    assert [frame.kind(name) for name in ("text", "id", "nothing")] == ["text", "text", "empty"]
    for name, what in (("span", "lengths of time"), ("list", "values of another kind")):
        with pytest.raises(UsageError, match=f"column '{name}' holds {what}, not numbers, text or dates"):
            frame[name]


@needs_postgres
def test_neighbouring_large_whole_numbers_stay_different_names(tmp_path, monkeypatch):
    """9007199254740993 is no float64: such ids would be one client with the one before."""
    monkeypatch.chdir(tmp_path)
    ids = [9007199254740992, 9007199254740993, 9007199254740994]
    with closing(sqlite3.connect("large.db")) as made, made:
        made.execute("CREATE TABLE t (who)")
        made.executemany("INSERT INTO t VALUES (?)", [(one,) for one in ids])
    named = [str(one) for one in ids]
    assert sorted(open_table("sqlite:///large.db", "SELECT who FROM t")["who"].words().names) == named
    assert frame_of(polars.DataFrame({"who": [*ids, None]}))["who"].words().names == [*named, ""]


def test_nothing_is_written(postgres, sqlite):
    psycopg = pytest.importorskip("psycopg")
    for address in (postgres, sqlite):
        for query, problem in (
            ("DELETE FROM sales", "must begin with SELECT or WITH, as data are only read; got 'DELETE'"),
            ("/* a */ -- b\n drop table sales", "got 'DROP'"),
            ("", "say what to read there: --query FILE.sql"),
            ("  -- nothing", "the query is empty"),
            ("SELECT 1 AS a; DROP TABLE sales", "command|statement"),
            ("SELECT * FROM nowhere", "nowhere"),
            ("SELECT shop, shop FROM sales", "two columns are named 'shop'"),
            ("SELECT * FROM sales WHERE number < 0", "the query finds no rows"),
            ("missing.sql", "cannot read the query missing.sql"),
        ):
            with pytest.raises(UsageError, match=problem):
                open_table(address, query)
    with pytest.raises(UsageError, match="must not contain data-modifying statements"):
        open_table(postgres, "WITH gone AS (DELETE FROM sales RETURNING *) SELECT * FROM gone")
    with psycopg.connect(postgres) as connection:
        connection.execute("CREATE OR REPLACE FUNCTION sly() RETURNS int LANGUAGE sql AS 'DELETE FROM sales; SELECT 1'")
    with pytest.raises(UsageError, match="cannot execute DELETE in a read-only transaction"):
        open_table(postgres, "SELECT sly()")
    with pytest.raises(UsageError, match=r"readonly|syntax"):
        open_table(sqlite, "WITH gone AS (SELECT 1) DELETE FROM sales RETURNING *")
    with psycopg.connect(postgres) as connection:
        assert connection.execute("SELECT count(*) FROM sales").fetchone() == (80,)


def test_a_password_in_the_address_is_refused_and_not_repeated(sqlite, capsys):
    for address in (
        f"postgresql://ada:{PASSWORD}@h/shops",
        f"postgresql://h/shops?user=a&password={PASSWORD}",
        f"POSTGRESQL://ada:{PASSWORD}@h/shops",
        f"postgresql+psycopg2://ada:{PASSWORD}@h/shops",
        f"mysql://ada:{PASSWORD}@h/shops",
    ):
        direct = ["run", address, "--query", "site.sql", *COLUMNS]
        by_setting = ["run", "fedavg", "federation.dataset.name=sql", f"federation.dataset.path={address}"]
        by_setting += ["federation.dataset.client=shop", "federation.dataset.target=buys"]
        Path("own.toml").write_text(
            f'method = "local"\n[federation.dataset]\nname = "sql"\npath = "{address}"\nclient = "a"\ntarget = "b"\n'
        )
        for command in (
            direct,
            ["list", *direct[1:]],
            ["choose", *direct[1:]],
            by_setting,
            ["run", "own.toml"],
        ):
            assert main(command) == 2
            out, err = capsys.readouterr()
            told = "~/.pgpass" if address.lower().startswith("postgresql:") else "and SQLite (sqlite:///FILE), not from"
            assert told in err
            assert err.count("\n") == 1
            assert PASSWORD not in out + err
    assert sorted(path.name for path in Path().iterdir()) == ["own.toml", "shops.db", "site.sql"]


@needs_postgres
def test_the_password_is_nowhere_but_where_it_was(postgres, sqlite, monkeypatch, tmp_path, capsys):
    """From ~/.pgpass, in a run whose output and files are searched."""
    monkeypatch.delenv("PGPASSWORD")
    host = postgres.partition("host=")[2]
    secret = tmp_path / "pgpass"
    secret.write_text(f"localhost:5432:postgres:ada:{PASSWORD}\n{host}:5432:postgres:ada:{PASSWORD}\n")
    secret.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(secret))
    code, said = trained(capsys, postgres, "a", "how.checkpoint_seconds=0")
    assert code == 0
    assert PASSWORD not in said
    assert not any(PASSWORD.encode() in path.read_bytes() for path in Path("a").rglob("*") if path.is_file())


@needs_postgres
def test_who_may_not_read_is_told_where_a_password_goes(postgres, sqlite, monkeypatch):
    for wrong in ("", "wrong"):
        monkeypatch.setenv("PGPASSWORD", wrong)
        with pytest.raises(UsageError, match=r"^cannot connect to .*password.*put it into ~/.pgpass"):
            open_table(postgres, "site.sql")


@needs_postgres
def test_a_lost_connection_is_tried_again(postgres):
    psycopg = pytest.importorskip("psycopg")
    killed = []

    def kill():
        with psycopg.connect(postgres, autocommit=True) as other:
            while not killed:
                killed.extend(
                    other.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kinfed' "
                        "AND query LIKE '%FETCH%'"
                    ).fetchall()
                )

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.warns(UserWarning, match=r"the connection was lost \(.*\); trying again, 2 of 3"):
        frame = open_table(postgres, "SELECT i, pg_sleep(0.02)::text AS s FROM generate_series(1, 20) AS i")
    killer.join()
    assert frame["i"].numbers().tolist() == [*range(1, 21)]


@needs_postgres
def test_a_connection_that_is_always_lost_ends_in_one_line(postgres):
    again = pytest.warns(UserWarning, match="trying again")
    with again as warned, pytest.raises(DataError, match=r"the connection was lost \(.*\), 3 times; look at"):
        open_table(postgres, "SELECT pg_terminate_backend(pg_backend_pid()) AS a")
    assert len(warned) == 2


def test_no_server(sqlite):
    with pytest.raises(UsageError, match=r"^cannot connect to postgresql://ada@/x\?host=/nowhere: "):
        open_table("postgresql://ada@/x?host=/nowhere", "SELECT 1")
    for address, problem in (
        ("sqlite:///none.db", "there is no file none.db"),
        ("sqlite://shops.db", "write sqlite:///FILE"),
        ("postgresql://[h/x", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=problem):
            open_table(address, "SELECT 1")
    Path("no.db").write_text("shop,price\n" * 200)
    with pytest.raises(UsageError, match="file is not a database"):
        open_table("sqlite:///no.db", "SELECT * FROM a")
    with pytest.raises(UsageError, match="is not a database"):
        open_table("site.sql", "SELECT 1")


@pytest.mark.parametrize(
    "query", ["select 1", "\n-- a\n/* b\nc */ (WITH a AS (SELECT 1) SELECT * FROM a);", "Select(1)"]
)
def test_queries_that_only_read(query):
    assert text_of(query)[0] == query.strip()
