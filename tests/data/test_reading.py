"""Tables from files, folders and frames: the cells that Python's own csv reader sees, and the place of each."""

import csv
import pickle
import random
from dataclasses import replace
from datetime import UTC, date, datetime

import numpy as np
import pandas
import polars
import pytest

import kinfed
from kinfed import UsageError
from kinfed.data.tables import csv_text, open_table as reading
from kinfed.data.tables.frame import PLAIN
from kinfed.data.tables.moments import read_seconds
from kinfed.data.tables.open_table import frame_of, kind_of, open_table
from kinfed.errors import Fault


def write(folder, text, name="t.csv"):
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def cells(frame):
    """Every row of a frame as text."""
    columns = [frame[name].words() for name in frame.columns]
    return [list(row) for row in zip(*(np.array(w.names, object)[w.codes] for w in columns), strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_cells_are_those_of_the_csv_module(tmp_path, seed):
    """Quotation marks, commas and line breaks in cells, blank lines, blanks, ends of lines, a byte order mark."""
    draw = random.Random(seed)
    some = ["1", " 2 ", "", "a", "é", 'x"y', "p,q", "two\nlines", "nan", "-1e3"] if seed % 3 else ["1", "", "2.5", " b"]
    rows = [[draw.choice(some) for _ in range(3)] for _ in range(draw.randrange(1, 40))]
    path = tmp_path / "t.csv"
    with open(path, "w", newline="", encoding="utf-8-sig" if seed % 2 else "utf-8") as file:
        table = csv.writer(
            file,
            lineterminator=["\n", "\r\n"][seed % 2],
            quoting=csv.QUOTE_ALL if seed % 5 == 0 else csv.QUOTE_MINIMAL,
        )
        table.writerows([["a", "b b", "c"], *rows])
        if seed % 4 == 0:
            file.write("\n,,\n")
    wanted = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    if not wanted:
        with pytest.raises(UsageError, match="has no rows"):
            open_table(path)
        return
    frame = open_table(path)
    assert frame.columns == ["a", "b b", "c"]
    assert cells(frame) == wanted


def test_numbers_are_those_that_python_reads(tmp_path):
    draw = np.random.default_rng(0)
    texts = [repr(float(x)) for x in draw.normal(size=500) * 10.0 ** draw.integers(-20, 20, 500)]
    texts += [f"{x:.17f}" for x in draw.normal(size=200)] + ["+1", ".5", "5.", " 7 ", "1E3", "0.1000000000000000055511"]
    frame = open_table(write(tmp_path, "x,y\n" + "".join(f"{text},1\n" for text in texts)))
    assert frame.kind("x") == "numbers"
    assert frame["x"].numbers().tolist() == [float(text) for text in texts]


EMPTY = "write a comma for each entry that is empty"
ABOVE = "if the columns' names stand below line {} ('{}'), delete it, else name every column"
HOLDS = "put an entry that holds a comma between quotation marks"
COMMA = "write a decimal point for the comma, or put the number between quotation marks"
ESCAPED = 'a quotation mark inside an entry is written as "", not as \\"'
NAMELESS = "there are no column names; write them there, separated by commas, or delete the line if they stand below it"


@pytest.mark.filterwarnings("ignore:.* above the header")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,b\n1,2\n1\n", f"t.csv, line 3: 1 entry, but the header has 2; {EMPTY}"),
        ('a,b\n"x\ny",2\n1\n', f"t.csv, line 4: 1 entry, but the header has 2; {EMPTY}"),
        ("a,b\n1,2,3\n", f"t.csv, line 2: 3 entries, but the header has 2; {ABOVE.format(1, 'a,b')}"),
        (
            "\nSales, 2024\n\na,b,c\n1,2,3\n",
            f"4: 3 entries, but the header has 2; {ABOVE.format(2, 'Sales, 2024')}",
        ),
        ("a,b,c\nx,1,2\nJohn, Doe,1,2\n", f"t.csv, line 3: 4 entries, but the header has 3; {HOLDS}"),
        ("a,b,c\nx,1,2\nJohn,1,5,2\n", f"t.csv, line 3: 4 entries, but the header has 3; {COMMA}"),
        ("a;b\nx;1\nJohn;1;2\n", f"line 3: 3 entries, but the header has 2; {HOLDS.replace('comma', 'semicolon')}"),
        (
            'a,b\n1,"2"3\n',
            f"line 2: an entry goes on behind the quotation mark that ends it; {csv_text.QUOTED}",
        ),
        ('a,b\n1,"say \\"2\\""\n', f"line 2: an entry goes on behind the quotation mark that ends it; {ESCAPED}"),
        ('a,b\n1,"2\n', f"t.csv, line 2: a quotation mark is never closed; {csv_text.QUOTED}"),
        ('a,b\n"\\"",2\n', f"t.csv, line 2: a quotation mark is never closed; {ESCAPED}"),
        ("a,b\r1,2\r3\r", f"t.csv, line 3: 1 entry, but the header has 2; {EMPTY}"),
        (" ,\n1,2\n", f"t.csv, line 1: {NAMELESS}"),
        ("# of 2024\n\n , \na,b\n1,2\n", f"t.csv, line 3: {NAMELESS}"),
        ("# of 2024\r\r\ra,b\r1\r", f"t.csv, line 5: 1 entry, but the header has 2; {ABOVE.format(4, 'a,b')}"),
        (b"a,b\n1,2\n\x81,2\n", "t.csv, line 3: this is not UTF-8 text; save it as UTF-8"),
        (
            b"PK\3\4a,b",
            "t.csv: this is not text, perhaps a workbook or a compressed file; save the sheet as .csv, or unpack it",
        ),
        (
            b"\x1f\x8b\0\0",
            "t.csv: this is not text, perhaps a workbook or a compressed file; save the sheet as .csv, or unpack it",
        ),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, text, told):
    with pytest.raises(UsageError) as found:
        open_table(write(tmp_path, text))
    assert str(found.value).endswith(told)


@pytest.mark.parametrize(
    ("above", "remarks"),
    [
        ("", 0),
        ("\n\r\n \t\n", 0),
        ("# made by a program, version 3, of 2024\n# in kg\n", 2),
        ("\n#x\n\n", 1),
        ("# 'one \"mark\n", 1),
    ],
)
def test_remarks_and_blank_lines_above_the_header_are_left_out(tmp_path, above, remarks, recwarn):
    rows = [["a b", "1.5"], ["# no remark", "2"], ["", "3"]]
    path = write(tmp_path, above + "who,x\n" + "".join(f"{','.join(row)}\n" for row in rows))
    frame = open_table(path)
    assert (frame.columns, cells(frame)) == (["who", "x"], rows)
    assert frame.row(1).endswith(f"t.csv, line {len(above.splitlines()) + 3}")
    said = [str(one.message) for one in recwarn]
    assert [one.split(": ")[1].split()[0] for one in said] == [str(remarks)] * bool(remarks)


def test_a_heading_may_begin_with_a_hash(tmp_path, recwarn):
    frame = open_table(write(tmp_path, "# by a program\n#who,x\na,1\nb,2\n"))
    assert (frame.columns, cells(frame)) == (["#who", "x"], [["a", "1"], ["b", "2"]])
    said = str(recwarn.pop(UserWarning).message)
    assert "1 line above the header that begins with # is left out; line 2 begins with # and is taken for the" in said
    frame = open_table(write(tmp_path, "#who,x\na,1"))  # the last line is not ended
    assert (frame.columns, cells(frame)) == (["#who", "x"], [["a", "1"]])
    assert open_table(write(tmp_path, '#who,x\n"a, b",1\n')).columns == ["#who", "x"]
    many = [f"c{i}" for i in range(9000)]  # the line below the heading is longer than what is read at once
    assert open_table(write(tmp_path, f"#{','.join(many)}\n{','.join(['0.123456'] * 9000)}\n")).columns[1:] == many[1:]


SHOPS = [
    ["Filiale", "Preis, netto", "Ware"],
    ["Köln", "1,5", "Brot | Käse"],
    ["Ulm", "", 'ein "Müsli"'],
    ["", "2,5", "x;y"],
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.filterwarnings("ignore:.*Windows-1252")
def test_files_of_other_separators_and_encodings(tmp_path, separator, encoding):
    path = tmp_path / "t.csv"
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=separator).writerows(SHOPS)
    frame = open_table(path)
    assert frame.columns == SHOPS[0]
    assert cells(frame) == SHOPS[1:]
    assert frame.row(2).endswith("t.csv, line 4")


def test_a_line_that_names_the_separator_as_excel_reads_it(tmp_path):
    path = write(tmp_path, "sep=;\r\na;b\r\n1,5;2\r\n1,5;bad\r\n3,5;4\r\n")
    frame = open_table(path)
    assert cells(frame)[0] == ["1,5", "2"]
    with pytest.raises(UsageError, match=r"t\.csv, line 4, column 'b': 'bad' is not"):
        frame["b"].numbers()
    with pytest.raises(UsageError, match=r"t\.csv, line 3: 1 entry, but the header has 2"):
        open_table(write(tmp_path, "sep=;\na;b\n1\n"))


def test_text_that_is_no_utf8_is_told_with_a_word_of_it(tmp_path):
    path = write(tmp_path, "who,x\na,1\nKöln am Rhein,2\n".encode("latin-1"))
    told = (
        r"t\.csv: this is not UTF-8 text, so it was read as Windows-1252: 'Köln am Rhein' in line 3; if that is wrong"
    )
    with pytest.warns(UserWarning, match=told) as found:
        place = open_table(path).row(1)
    assert place.endswith("line 3")
    assert len(found) == 1
    with pytest.raises(
        UsageError, match=r"t\.csv: its first bytes say UTF-16, but this is not UTF-16 text; save it as UTF-8"
    ):
        open_table(write(tmp_path, b"\xff\xfea\x00,"))


@pytest.mark.parametrize("quoted", [False, True])  # read by polars, or line by line
def test_columns_without_a_name_are_left_out_with_a_word(tmp_path, quoted):
    path = write(tmp_path, ",who,x,\n" + ('0,"a\nb",1,\n' if quoted else "0,a,1,\n") + "1,b,2,\n")
    told = r"t\.csv: left out columns without a name in the header, as pandas writes its index: column 1, 4; to use"
    with pytest.warns(UserWarning, match=told):
        frame = open_table(path)
    assert frame.columns == ["who", "x"]
    assert cells(frame)[1] == ["b", "2"]
    data = polars.DataFrame({"": [0, 1], "who": ["a", "b"]})
    data.write_parquet(tmp_path / "t.parquet")
    for way in (lambda: frame_of(data), lambda: open_table(tmp_path / "t.parquet")):
        with pytest.warns(UserWarning, match="without a name in the header"):
            assert way().columns == ["who"]


def test_a_place_is_the_line_in_the_file_whatever_is_above_it(tmp_path):
    path = write(tmp_path, 'a,b\n"x\ny",1\n\n,,\n'.replace(",,", ",") + "z,2\nz,bad\n" + "z,3\n" * 5)
    frame = open_table(path)
    with pytest.raises(UsageError, match=r"t\.csv, line 7, column 'b': 'bad' is not a number"):
        frame["b"].numbers()
    with pytest.raises(UsageError, match="line 7, column 'b'"):
        frame.keep(np.arange(len(frame)) > 0)["b"].numbers()


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, name):
    path = tmp_path / name
    table = polars.DataFrame({"a": [1, 2], "b": [3, 4]})
    table.write_csv(path) if name == "t.csv" else table.write_parquet(path)
    way = "read_csv" if name == "t.csv" else "read_parquet"
    read = getattr(polars, way)

    def slow(data, **how):
        with open(path, "ab") as file:
            file.write(b"5,6\n")
        return read(data, **how)

    monkeypatch.setattr(polars, way, slow)
    size = path.stat().st_size
    told = rf"{name} changed while it was read \(from {size} to {size + 4} bytes\); try again when nothing writes"
    with pytest.raises(UsageError, match=told) as problem:
        open_table(path)
    assert problem.value.fault is Fault.CHANGED
    assert pickle.loads(pickle.dumps(problem.value)).fault is Fault.CHANGED


def test_a_file_that_is_deleted_while_it_is_read_is_told_as_gone(tmp_path, monkeypatch):
    path = write(tmp_path, "a,b\n1,2\n")
    read = polars.read_csv
    monkeypatch.setattr(polars, "read_csv", lambda data, **how: path.unlink() or read(data, **how))
    with pytest.raises(UsageError, match=r"t\.csv was deleted while it was read; put it back") as problem:
        open_table(path)
    assert problem.value.fault is Fault.GONE


def test_the_files_of_a_folder_are_one_table_in_any_order_of_columns(tmp_path):
    write(tmp_path, "who,x,y\nA,1,2\nA,2,3\n", "1.csv")
    write(tmp_path, "y,who,x\n5,B,4\n6,B,bad\n7,B,8\n", "2.csv")
    write(tmp_path, "not a table", "notes.txt")
    frame = open_table(tmp_path)
    assert frame.columns == ["who", "x", "y", "file"]
    assert cells(frame)[2] == ["B", "4", "5", "2"]
    assert kind_of(tmp_path) == "csv"
    with pytest.raises(UsageError, match=r"2\.csv, line 3, column 'x': 'bad' is not a number"):
        frame["x"].numbers()
    write(tmp_path, "who,x\nC,1\n", "3.csv")
    with pytest.raises(UsageError, match=r"3\.csv has no column 'y', which 1\.csv has"):
        open_table(tmp_path)
    write(tmp_path, "who,x,y,z\nC,1,2,3\n", "3.csv")
    with pytest.raises(UsageError, match=r"3\.csv has a column 'z', which 1\.csv lacks"):
        open_table(tmp_path)
    polars.DataFrame({"who": [1]}).write_parquet(tmp_path / "4.parquet")
    with pytest.raises(UsageError, match=r"holds \.csv and \.parquet; keep one kind there"):
        open_table(tmp_path)
    write(tmp_path, "", "config.toml")
    assert kind_of(tmp_path) == ""  # a run's folder


def table(rows=60):
    draw = np.random.default_rng(0)
    return {
        "who": [f"{'AB'[i % 2]}" for i in range(rows)],
        "x": draw.normal(size=rows).round(3).tolist(),
        "flag": (draw.random(rows) < 0.5).tolist(),
        "fruit": [("pear", "plum", None)[i % 3] for i in range(rows)],
        "day": [date(2024, 1 + i % 12, 5) for i in range(rows)],
        "y": draw.normal(size=rows).round(3).tolist(),
    }


def test_frames_of_polars_and_pandas_are_tables_like_a_file(tmp_path):
    data, how = table(), {"client": "who", "target": "y"}
    frame = polars.DataFrame(data)
    frame.write_csv(tmp_path / "t.csv")
    wanted = kinfed.from_csv(tmp_path / "t.csv", **how)
    panda = pandas.DataFrame(data)
    typed = panda.assign(
        fruit=panda.fruit.astype("category"),
        day=pandas.to_datetime(panda.day),
        flag=panda.flag.astype("boolean"),
        who=panda.who.astype("string"),
    )
    for one in (frame, frame.lazy(), frame.with_columns(polars.col("fruit").cast(polars.Categorical)), panda, typed):
        found = kinfed.from_frame(one, **how)
        assert found.digest() == wanted.digest()
        assert replace(found.columns, formats=PLAIN) == replace(wanted.columns, formats=PLAIN)  # only text has formats


def test_zones_and_holes_of_pandas():
    times = pandas.to_datetime(["2024-01-01T12:00+02:00", None])
    frame = frame_of(pandas.DataFrame({"t": times, "n": pandas.array([1, None], "Int64"), "s": ["a", float("nan")]}))
    assert read_seconds(frame["t"])[0] == datetime(2024, 1, 1, 10, tzinfo=UTC).timestamp()
    assert np.isnan(read_seconds(frame["t"])[1])
    assert frame["n"].numbers()[0] == 1
    assert np.isnan(frame["n"].numbers()[1])
    assert frame["s"].words().empty.tolist() == [False, True]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([[1, 2]], "a table is a frame of polars or pandas; got list"),
        (polars.DataFrame(), "the frame has no rows"),
        (polars.DataFrame({"who": ["a", "b"], "x": [1.0, np.inf], "y": [0.5, 1.5]}), "the frame, row 2, column 'x': "),
        (pandas.DataFrame([[1, 2, 3]], columns=["who", "x", "x"]), "the frame: two columns are named 'x'"),
        (
            polars.DataFrame({"who": ["a"], "x": [[1]], "y": [1.5]}),
            "the frame: no column is left for the inputs; ignore",
        ),
        (pandas.DataFrame({"who": ["a"], "x": [1], "y": [{}]}), "the frame: column 'y' holds values of another kind"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*left out of the inputs")
def test_frames_that_cannot_be_used(data, told):
    with pytest.raises(UsageError) as found:
        kinfed.from_frame(data, client="who", target="y")
    assert str(found.value).startswith(told)


def test_long_columns_of_dates_are_read_as_short_ones_are(tmp_path, monkeypatch):
    texts = [f"2024-0{1 + i % 9}-{1 + i % 28:02d}T{i % 24:02d}:30" for i in range(50)]
    frame = open_table(write(tmp_path, "t,x\n" + "".join(f"{text},1\n" for text in texts)))
    before = read_seconds(frame["t"])
    monkeypatch.setattr("kinfed.data.tables.column.SAMPLE", 10)
    assert read_seconds(frame["t"]).tolist() == before.tolist()
    assert reading.FILE not in frame.columns


def test_a_file_whose_commas_are_decimal_marks_too_is_explained(tmp_path):
    path = tmp_path / "comma.csv"
    path.write_text("shop,size,y\n" + "".join(f"s{i % 2},1,{i % 10},2,{i % 7}\n" for i in range(40)))
    with pytest.raises(
        UsageError, match=r'if commas mark decimals too, as in 1,5, export it with semicolons .* decimal=","'
    ):
        kinfed.from_csv(path, client="shop", target="y")
