"""How numbers and dates are written in a column of text, decided over the whole of it: 12 %, € 1,200.50, 31.01.2025."""

import math
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import polars

MISSING = {"na", "n/a", "n.a.", "#n/a", "<na>", "null", "?", "-", "--"}  # among numbers and dates
SAMPLE = 1_000  # cells that tell whether a column may be in a form at all
UNIT = r"%|€|\$|£|¥|₹|(?:EUR|USD|GBP|CHF|JPY|CNY|INR|AUD|CAD|SEK|NOK|DKK|PLN|CZK|BRL|MXN|ZAR)\b"
MEASURE = r"kg|mg|lbs?|oz|km/h|mph|km|cm|mm|mi|ft|ml|cl|km²|m²|m³|kWh|MWh|Wh|kW|MW|hPa|bar|°C|°F|min|ms|ppm|k?Hz|[kMG]B"
LETTER = r"[gtmslh]"  # units only after a blank, as 5m may be a name
NAMED = {"€": "EUR", "$": "USD", "£": "GBP", "¥": "JPY", "₹": "INR", "lbs": "lb"}  # other names of the same unit
SIGN = r"+\x{2212}-"  # a minus sign of typography, too
SPACE = r" '\x{2019}\x{a0}\x{202f}"  # between thousands
POWER = r"(?:[eE][+-]?\d+)?"
AMOUNT = rf"^(?P<sign>[{SIGN}]?)\s*(?P<before>{UNIT})?\s*(?P<sign2>[{SIGN}]?)"
AMOUNT += rf"(?P<body>\d[\d.,{SPACE}]*?{POWER})(?:\s*(?P<after>{UNIT}|{MEASURE})|\s+(?P<letter>{LETTER})|\s*)$"
POINT = rf"^(\d+|[1-9]\d{{0,2}}(,\d{{3}})+|\d{{1,3}}([{SPACE}]\d{{3}})+)(\.\d+)?{POWER}$"
COMMA = rf"^(\d+|[1-9]\d{{0,2}}(\.\d{{3}})+|\d{{1,3}}([{SPACE}]\d{{3}})+)(,\d+)?{POWER}$"
DAYS = (
    *("%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%Y", "%Y/%m/%d", "%Y.%m.%d"),
    *("%d %B %Y", "%d-%B-%Y", "%B %d, %Y", "%B %d %Y"),  # %B is a month's name, also a short one
)
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S%.f", " %I:%M %p", " %I:%M:%S %p")
LIKE_DATE = (
    r"^(\d{1,4}[./-]\d{1,2}[./-]\d{1,4}|\d{1,2}[ -][A-Za-z]{3,9}[ -]\d{4}|[A-Za-z]{3,9} \d{1,2},? \d{4})($|,? \d)"
)
EXAMPLE = date(2025, 1, 31)
SHORT_YEAR = r"^(?P<one>\d{1,2})(?P<mark>[./-])(?P<two>\d{1,2})(?P<next>[./-])(?P<three>\d{2})(?P<clock>|,? \d.*)$"
PIVOT = 69  # years of two digits are of 1969 to 2068, as POSIX has them


class Unclear(Exception):
    """What a cell says is not decided by its column."""

    def __init__(self, row: int, told: str) -> None:
        super().__init__(told)
        self.row = row


@dataclass(frozen=True)
class Written:
    """How a column writes its numbers or dates; new cells of the column are read in the same way."""

    # plain: as 1200.5 or 2025-01-31; truth: as true and false; typed: not as text
    kind: Literal["plain", "amount", "date", "truth", "typed"] = "plain"
    unit: str = ""  # of amounts
    comma: bool | None = False  # whether amounts have a comma before fractions; None: no cell says so
    day: str = ""  # the parts of a date, as in strptime; %y: years of two digits
    zoned: bool | None = None  # whether times have a time zone; None: not known

    @property
    def example(self) -> str:
        """A cell that is written so."""
        if self.kind == "date":
            return f"{EXAMPLE:{self.day}}"
        if self.kind == "amount":
            return f"{'1.200,5' if self.comma else '1,200.5'} {self.unit}".strip()
        return "1200.5"


class Form(NamedTuple):
    """A column as numbers, by the form in which it is written."""

    values: NDArray[np.float64]  # [n] NaN for what is no number
    note: str  # what one cell was read as
    written: Written


def _known(column: "polars.Series") -> "polars.DataFrame":
    """The cells of a column of text that have a value, without blanks around them, and their rows."""
    import polars

    cells = polars.DataFrame({"row": np.arange(len(column)), "text": column.str.strip_chars()})
    missing = polars.col("text").str.to_lowercase().is_in(["", "nan", "nat", *MISSING])
    return cells.filter(~missing.fill_null(True))


def amounts(column: "polars.Series", known: Written | None = None) -> Form | None:
    """Amounts with a unit or separators between thousands; None if most cells are none.

    Raises Unclear where cells have different units, or where nothing decides whether a comma is a decimal one. Cells of
    a column that is `known` are read as it is written, or all with the other decimal mark if they have a unit and can
    be read so alone; raises Unclear for the first that is written otherwise.
    """
    import polars

    if known is not None and known.kind != "amount":
        return None
    odd = column.filter(column.cast(polars.Float64, strict=False).is_null()).str.strip_chars()
    odd = odd.filter(odd != "").head(SAMPLE)
    if known is None and 4 * odd.str.contains(AMOUNT).sum() <= len(odd):
        return None
    cells = _known(column)
    cells = cells.with_columns(polars.col("text").str.extract_groups(AMOUNT).alias("parts")).unnest("parts")
    cells = cells.with_columns(polars.coalesce("before", "after", "letter").alias("unit"))
    read = cells.filter(polars.col("body").is_not_null())
    if known is not None:
        comma = _mark_of(read, known)
        _check_amounts(read, known, comma)
        values = _numbers(read, comma, len(column))
        return Form(values, "" if comma == bool(known.comma) else _note(read, comma, values), known)
    if 2 * len(read) <= len(cells):
        return None
    unit = _unit(read)
    way = _separated(read, unit)
    if not way:
        return None
    values = _numbers(read, way == COMMA, len(column))
    said = way == COMMA if read["body"].str.contains("[.,]").any() else None
    return Form(values, _note(read, way == COMMA, values), Written("amount", unit or "", said))


def _note(read: "polars.DataFrame", comma: bool, values: NDArray[np.float64]) -> str:
    """What one of the amounts was read as, that is not written as a plain number."""
    shown = int((read["text"] != _plain(read, comma)).to_numpy().argmax())
    return f"'{read['text'][shown]}' is read as {values[read['row'][shown]]:g}"


def _mark_of(read: "polars.DataFrame", known: Written) -> bool:
    """Whether a comma is before fractions: as is known, or as these cells show where that is not, or cannot be.

    Cells without a unit are read as is known: the plain numbers of another program are no such amounts.
    Raises Unclear where it is not known, and these cells do not show it.
    """
    if known.comma is None:
        return _separated(read, known.unit or None) == COMMA
    point, comma = (bool(read["body"].str.contains(way).all()) for way in (POINT, COMMA))
    fits, other = (comma, point) if known.comma else (point, comma)
    return not known.comma if other and not fits and known.unit else known.comma


def _plain(read: "polars.DataFrame", comma: bool) -> "polars.Series":
    """Amounts without a sign and unit, as 1200.5."""
    drop, mark = (rf"[.{SPACE}]", ",") if comma else (rf"[,{SPACE}]", ".")
    return read["body"].str.replace_all(drop, "").str.replace(mark, ".", literal=True)


def _numbers(read: "polars.DataFrame", comma: bool, count: int) -> NDArray[np.float64]:
    """[count] the amounts that were read, NaN for other rows."""
    import polars

    negative = (read["sign"] + read["sign2"]).str.contains(r"[\x{2212}-]").to_numpy()
    values = np.full(count, math.nan)
    values[read["row"].to_numpy()] = _plain(read, comma).cast(polars.Float64).to_numpy() * np.where(negative, -1.0, 1.0)
    return values


def _check_amounts(read: "polars.DataFrame", known: Written, comma: bool) -> None:
    """Raise Unclear for the first amount that is not written as is known."""
    import polars

    unit, zero = polars.col("unit").fill_null(""), ~polars.col("body").str.contains("[1-9]")
    fits = polars.col("body").str.contains(COMMA if comma else POINT)
    fits &= (unit == known.unit) | ((unit == "") & zero)
    if len(other := read.filter(~fits)):
        raise _unlike(other["row"][0], other["text"][0], known)


def _unlike(row: int, text: str, known: Written) -> Unclear:
    return Unclear(row, f"'{text}' is not written as in training, such as {known.example}; write it so")


def _unit(read: "polars.DataFrame") -> str | None:
    """The one unit of all cells but zeros; raises Unclear where there are several."""
    import polars

    units = read["unit"].drop_nulls()
    if not len(units):
        return None
    most: str = units.value_counts(sort=True)["unit"][0]
    other = read.filter((polars.col("unit").fill_null("") != most) & polars.col("body").str.contains("[1-9]"))
    if len(other):
        row, text, unit = other["row"][0], other["text"][0], other["unit"][0]
        what = f"is in {unit}" if unit else "has no unit"
        raise Unclear(row, f"'{text}' {what}, but others of the column are in {most}; write all in one")
    return most


def _separated(read: "polars.DataFrame", unit: str | None) -> str:
    """How fractions and thousands are separated, POINT or COMMA; "" for numbers that are not written in such a form.

    Raises Unclear where nothing decides, or the cells differ.
    """
    body = read["body"]
    point, comma = body.str.contains(POINT), body.str.contains(COMMA)
    way, fits, _ = max(((POINT, point, 1), (COMMA, comma, 0)), key=lambda one: (one[1].sum(), one[2]))
    grouped = body.str.contains(rf"^\d{{1,3}}[.,{SPACE}]\d{{3}}([.,{SPACE}]|$)")
    if unit is None and way == POINT and not (grouped & fits).any():
        return ""  # plain numbers, with one that is none
    if not fits.all():
        at = int((~fits).to_numpy().argmax())
        other = body.filter(fits & body.str.contains("[.,]"))
        if unit is None and not len(other):
            return ""
        example = f", as '{other[0]}' is" if len(other) else ""
        raise Unclear(
            read["row"][at], f"'{read['text'][at]}' is not written as most of this column are{example}; correct it"
        )
    marks = body.str.contains("[.,]")
    if not (point & comma & marks).any() or not (point & comma).all():
        return way
    mark = "," if body.str.contains(",", literal=True).any() else "."
    if unit == "%":  # of which nobody has thousands
        return COMMA if mark == "," else POINT
    short = body.filter(~marks)
    if not len(short) or (short.str.len_chars() > 3).any():
        at = int(marks.to_numpy().argmax())
        text = read["text"][at]
        raise Unclear(
            read["row"][at],
            f"'{text}' may have thousands or a fraction behind the '{mark}', and nothing in the column decides; write "
            f"{body[at].replace(mark, '')} or {body[at].replace(mark, '.')}",
        )
    return POINT if mark == "," else COMMA


def dates(column: "polars.Series", known: Written | None = None) -> Form | None:
    """Dates that are not written as 2025-01-31, in seconds, infinity for other cells; None if most cells are none.

    Raises Unclear where nothing decides whether the day or the month is first. Cells of a column that is `known` are
    read as it is written; raises Unclear for the first that is written otherwise.
    """
    if known is not None:
        return _as_known(column, known) if known.kind == "date" else None
    if not column.head(SAMPLE).str.strip_chars().str.contains(LIKE_DATE).any():
        return None
    cells = _known(column)
    short = len(cells) > 0 and bool(cells["text"].str.contains(SHORT_YEAR).all())
    text = _of_years(_long_years(cells) if short else cells)
    sample = text.drop_nulls().head(SAMPLE)
    found = {day: _moments(text, day) for day in DAYS if _moments(sample, day).count()}
    best = max(found, key=lambda day: int(found[day].count()), default="")
    if not best:
        return None
    taken, shown = found[best], 0
    other = found.get(f"{best[3:5]}{best[2]}{best[:2]}{best[5:]}")
    if 2 * (taken.is_not_null() | (False if other is None else other.is_not_null())).sum() <= len(cells):
        return None
    if other is not None:
        shown = _decided(cells, taken, other)
    shown = shown if taken[shown] is not None else int(taken.is_not_null().to_numpy().argmax())
    if short:
        _check_year_is_last(cells, taken)
    note = f"'{cells['text'][shown]}' is read as {taken[shown]:%Y-%m-%d}"
    day = best.replace("%Y", "%y") if short else best
    return Form(_stamps(cells, taken, len(column)), note, Written("date", day=day, zoned=False))


def _long_years(cells: "polars.DataFrame", first: bool = False) -> "polars.DataFrame":
    """Dates with a year of two digits as dates with one of four; `first`: as if the year were first, in ISO's form."""
    import polars

    parts = cells.select(polars.col("text").str.extract_groups(SHORT_YEAR)).unnest("text")
    year = polars.col("one" if first else "three").str.zfill(2)
    century = polars.when(year.cast(polars.Int64) >= PIVOT).then(polars.lit("19")).otherwise(polars.lit("20"))
    whole = century + year
    if first:
        text = whole + "-" + polars.col("two").str.zfill(2) + "-" + polars.col("three")
    else:
        text = polars.concat_str("one", "mark", "two", "next", whole, "clock")
    return cells.with_columns(parts.select(text.alias("text"))["text"])


def _check_year_is_last(cells: "polars.DataFrame", taken: "polars.Series") -> None:
    """Raise Unclear where years of two digits may as well be first: all cells are dates so, and as many years as days.

    Days vary more than years, other than in a few rows or where each is the first of a month.
    """
    import polars

    other = _long_years(cells, first=True)["text"].str.to_date("%Y-%m-%d", strict=False)
    known = taken.drop_nulls().dt
    if other.null_count() or known.day().n_unique() > known.year().n_unique():
        return
    differ = (other != taken.cast(polars.Date)).fill_null(False).to_numpy()
    at = int(differ.argmax())
    if differ.any() and taken[at] is not None:
        raise Unclear(
            cells["row"][at],
            f"'{cells['text'][at]}' may be {taken[at]:%d %B %Y} or {other[at]:%d %B %Y}, and the column does not decide"
            "; write its year with four digits, or leave the column out with ignore",
        )


def _as_known(column: "polars.Series", known: Written) -> Form:
    """Dates that are written as is known; raises Unclear for the first cell that is not."""
    cells = _known(column)
    text = _of_years(_long_years(cells) if "%y" in known.day else cells)
    taken = _moments(text, known.day.replace("%y", "%Y"))
    if taken.null_count():
        at = int(taken.is_null().to_numpy().argmax())
        raise _unlike(cells["row"][at], cells["text"][at], known)
    return Form(_stamps(cells, taken, len(column)), "", known)


def _of_years(cells: "polars.DataFrame") -> "polars.Series":
    """Text that may be a date, with single blanks in it; null for others."""
    text = cells["text"].str.replace_all(r"\s+", " ").str.replace(r"^(\S+|.* \d{4}), (\d{1,2}:)", "$1 $2")
    return text.set(~text.str.contains(r"\d{4}"), None)


def _stamps(cells: "polars.DataFrame", taken: "polars.Series", count: int) -> NDArray[np.float64]:
    """[count] seconds of the dates that were taken, infinity for other cells and NaN for other rows."""
    import polars

    values = np.full(count, math.nan)
    seconds = taken.dt.timestamp("us").cast(polars.Float64) / 1e6
    values[cells["row"].to_numpy()] = seconds.fill_null(math.inf).to_numpy()
    return values


def _moments(text: "polars.Series", day: str) -> "polars.Series":
    """[n] dates whose days are written so, with or without a time of day; null for others."""
    import polars

    found = polars.Series([None] * len(text), dtype=polars.Datetime("us"))
    for clock in CLOCKS:
        left = found.is_null() & text.is_not_null()
        if not left.any():
            break
        each = text.set(~left, None).str.to_datetime(day + clock, strict=False, time_unit="us")
        found = polars.select(polars.coalesce([found, each])).to_series()
    return found


def _decided(cells: "polars.DataFrame", taken: "polars.Series", other: "polars.Series") -> int:
    """A cell that is no date in the `other` order of day and month, or a date that is the same in both.

    Raises Unclear where cells differ in their order, or none decides.
    """
    against, decides = (taken.is_null() & other.is_not_null()), (taken.is_not_null() & other.is_null())
    first = int(decides.to_numpy().argmax())
    if against.any() and decides.any():
        at = int(against.to_numpy().argmax())
        told = f"'{cells['text'][at]}' and '{cells['text'][first]}' have day and month in different orders"
        raise Unclear(cells["row"][at], f"{told}; write all one way, such as {other[at]:%Y-%m-%d}")
    differ = (taken != other).fill_null(False)
    if not decides.any() and differ.any():
        at = int(differ.to_numpy().argmax())
        raise Unclear(
            cells["row"][at],
            f"'{cells['text'][at]}' may be {taken[at]:%d %B} or {other[at]:%d %B}, and the column does not decide; "
            f"write {taken[at]:%Y-%m-%d} or {other[at]:%Y-%m-%d}",
        )
    return first


def short_years(column: "polars.Series") -> str:
    """A cell of a column most of which look like dates whose year has two digits; "" if there is none."""
    cells = _known(column.head(SAMPLE))["text"]
    like = cells.filter(cells.str.contains(SHORT_YEAR))
    return like[0] if 2 * len(like) > len(cells) else ""
