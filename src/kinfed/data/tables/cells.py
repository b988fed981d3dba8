"""How a table writes its numbers and dates: plain numbers and ISO dates, or as whoever reads it says."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.field_checks import Settings
from ...errors import UsageError

if TYPE_CHECKING:
    import polars

MISSING = {"na", "n/a", "n.a.", "#n/a", "<na>", "null", "?", "-", "--", "."}  # among numbers and dates
TRUTH = {"true": 1.0, "false": 0.0}
SPACE = r" \x{a0}\x{202f}"  # a blank, and those of typography, between thousands
UNIT = r"%|€|\$|£|¥|₹|(?:EUR|USD|GBP|CHF|JPY|CNY|INR|AUD|CAD|SEK|NOK|DKK|PLN|CZK|BRL|MXN|ZAR)\b"
UNIT += r"|kg|mg|lbs?|oz|km/h|mph|km|cm|mm|mi|ft|ml|cl|km²|m²|m³|kWh|MWh|Wh|kW|MW|hPa|bar|°C|°F"
UNIT += r"|min|ms|ppm|k?Hz|[kMG]B"
# What a number looks like in some format: digits with points, commas, blanks or apostrophes, perhaps beside a unit.
AMOUNT = rf"^[+\x{{2212}}-]?\s*(?P<before>(?:{UNIT})?)\s*[+\x{{2212}}-]?"
AMOUNT += rf"(?:\d+|\d{{1,3}}(?:[.,'\x{{2019}}{SPACE}]\d{{3}})*)(?:[.,]\d+)?(?:[eE][+-]?\d+)?"
AMOUNT += rf"\s*(?P<after>(?:{UNIT}|\s[gtmslh])?)$"
INFINITE = r"(?i)^[+-]?inf(inity)?$"
MARKS = ((".", ""), (",", ""), (".", ","), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'"))
DAY_FORMATS = (
    *("%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%Y", "%Y/%m/%d", "%Y.%m.%d"),
    *("%d/%m/%y", "%m/%d/%y", "%y/%m/%d", "%d-%m-%y", "%m-%d-%y", "%y-%m-%d", "%d.%m.%y", "%y.%m.%d"),
    *("%d %B %Y", "%d-%B-%Y", "%B %d, %Y", "%B %d %Y", "%d %b %Y", "%d-%b-%Y", "%b %d, %Y", "%b %d %Y"),
)
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
DATE = r"^(\d{1,2}[./-]\d{1,2}[./-](\d{2}|\d{4})|(\d{2}|\d{4})[./-]\d{1,2}[./-]\d{1,2}"
DATE += r"|\d{1,2}[ -][A-Za-z]{3,9}[ -]\d{4}|[A-Za-z]{3,9} \d{1,2},? \d{4})($|,? \d)"
EXAMPLE = datetime(2025, 1, 31, 13, 5, 9)
ISO_DAY = "2025-01-02"


@dataclass(frozen=True)
class Formats:
    """How text in a table is read; new rows are read as training rows were, and nothing is guessed from cells."""

    decimal: str = "."  # the mark before fractions
    thousands: str = ""  # the mark between thousands; a blank stands for those of typography, too
    dates: Sequence[str] = ()  # as strptime has them, such as %d.%m.%Y, beside ISO's
    units: Sequence[str] = ()  # signs before or after numbers, which are left out, such as % or kg
    text: Sequence[str] = ()  # columns whose cells are names, whatever they look like
    truths: Sequence[str] | None = None  # the columns that hold true and false; None: any that hold nothing else
    zoned: Mapping[str, bool] = field(default_factory=dict)  # of columns of times, whether they name a time zone

    def rename(self, names: Mapping[str, str]) -> "Formats":
        """The same of a table whose columns have other names."""
        text, truths = (
            tuple(names.get(name, name) for name in names_of_kind or ()) for names_of_kind in (self.text, self.truths)
        )
        zoned = {names.get(name, name): zone for name, zone in self.zoned.items()}
        return replace(self, text=text, truths=None if self.truths is None else truths, zoned=zoned)

    def parse_numbers(self, column: "polars.Series") -> NDArray[np.float64]:
        """[n] text as numbers, NaN where there is none, infinity for anything else."""
        import polars

        plain = self.decimal == "." and not self.thousands and not self.units
        values = (column if plain else polars.repeat(None, len(column), dtype=polars.String, eager=True)).cast(
            polars.Float64, strict=False
        )
        left = values.is_null().to_numpy()
        if not left.any():
            return values.to_numpy()
        result = values.to_numpy(writable=True)
        rest = column.filter(left).fill_null("").str.strip_chars()
        numbers = self._normalise_numbers(rest).cast(polars.Float64, strict=False).fill_null(np.inf)
        none = rest.str.to_lowercase().is_in(["", "nan", *MISSING])
        result[left] = numbers.set(none, np.nan).to_numpy()
        return result

    def _normalise_numbers(self, text: "polars.Series") -> "polars.Series":
        """Numbers in these formats as 1200.5; null for anything else."""
        between = {" ": SPACE, "'": r"'\x{2019}"}.get(self.thousands, re.escape(self.thousands))
        integer = rf"\d+|\d{{1,3}}(?:[{between}]\d{{3}})+" if self.thousands else r"\d+"
        unit = "|".join(re.escape(unit_of_amount).replace("\\ ", " ") for unit_of_amount in self.units)
        sign, mark = r"[+\x{2212}-]?", re.escape(self.decimal)
        number = rf"^({sign})\s*(?:{unit})?\s*({sign})((?:{integer})?)((?:{mark}\d*)?(?:[eE][+-]?\d+)?)\s*(?:{unit})?$"
        parts = text.str.extract_groups(number).struct.unnest().rename(dict(zip("1234", "abcd", strict=True)))
        digits = parts["c"].str.replace_all(r"[^\d]", "") + parts["d"].str.replace(",", ".", literal=True)
        return (parts["a"] + parts["b"]).str.replace("\u2212", "-", literal=True) + digits

    def units_of(self, column: "polars.Series") -> "polars.Series":
        """[n] the unit that each cell of a column of text has, null for none."""
        units = "|".join(re.escape(unit) for unit in sorted(self.units, key=len, reverse=True))
        return column.str.extract(f"({units or '$^'})")

    def parse_dates(self, column: "polars.Series") -> NDArray[np.float64]:
        """[n] text that is a date in one of the formats that are said as seconds since 1970, NaN for anything else."""
        import polars

        moments = polars.repeat(None, len(column), dtype=polars.Datetime("us"), eager=True)
        text = column.str.strip_chars()
        for form in self.dates:
            parsed = text.str.to_datetime(form, strict=False, time_unit="us")
            moments = polars.select(polars.coalesce([moments, parsed.dt.replace_time_zone(None)])).to_series()
        return (moments.dt.timestamp("us").cast(polars.Float64) / 1e6).fill_null(np.nan).to_numpy()

    @property
    def hides_iso(self) -> bool:
        """Whether a date such as 2025-01-02 may be meant otherwise than ISO has it."""
        return any(_parse_date(ISO_DAY, form) for form in self.dates)

    def number_advice(self, cell: str, others: Sequence[str] = ()) -> str:
        """The options that would read a cell and all `others` of its column as numbers, "" if none would."""
        import polars

        in_python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: re.escape(chr(int(code[1], 16))), AMOUNT)
        parts = re.fullmatch(in_python, cell)
        if parts is None:
            return ""
        unit = parts["before"] or parts["after"].strip()
        units = [*self.units, unit] if unit and unit not in self.units else [*self.units]
        cells, options_by_value = polars.Series([cell, *others]), dict[float, str]()
        for decimal, thousands in sorted(MARKS, key=lambda marks: (marks[0] != self.decimal) + (marks[1] != "")):
            values = replace(self, decimal=decimal, thousands=thousands, units=units).parse_numbers(cells)
            if np.isinf(values).any() or values[0] in options_by_value:
                continue
            options = [f'decimal="{decimal}"'] if decimal != self.decimal else []
            options += [f'thousands="{thousands}"'] if thousands != self.thousands else []
            options += [f"units={_quoted_list(units)}"] if units != [*self.units] else []
            options_by_value[values[0]] = f"{' '.join(options)} would read it as {values[0]:.10g}"
        return ", ".join([*options_by_value.values()][:2])

    def date_advice(self, cell: str, others: Sequence[str] = ()) -> str:
        """The options that would read a cell and all `others` of its column as dates, "" if none would."""
        options_by_form: dict[str, str] = {}
        for form in (day + clock for clock in CLOCKS for day in DAY_FORMATS):
            day_read, short = _parse_date(cell, form), form.replace("%B", "%b")
            if day_read is None or short in options_by_form or not all(_parse_date(other, form) for other in others):
                continue
            both = _quoted_list([*self.dates, form]) if self.dates else f'"{form}"'
            options_by_form[short] = f"dates={both} would read it as {day_read:%d %B %Y}"
        return ", ".join([*options_by_form.values()][:3])


@dataclass(frozen=True, kw_only=True)
class FormatSettings(Settings):
    """What is said of how a table is written; plain numbers and dates such as 2025-01-31 need none of it."""

    decimal: str = "."  # the mark before fractions
    thousands: str = ""  # the mark between thousands
    dates: str | Sequence[str] = ()  # how dates are written beside 2025-01-31, such as %d.%m.%Y
    units: str | Sequence[str] = ()  # signs beside numbers that are left out, such as %
    text: str | Sequence[str] = ()  # columns whose cells are names, whatever they look like

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decimal not in (".", ","):
            raise UsageError(f"decimal is the mark before fractions, '.' or ','; got {self.decimal!r:.80}")
        if self.thousands not in ("", ".", ",", " ", "'"):
            raise UsageError(f"thousands is a point, a comma, a blank or an apostrophe; got {self.thousands!r:.80}")
        if self.thousands == self.decimal:
            raise UsageError(f"decimal and thousands are both '{self.decimal}'; set the other one too")
        for form in self.formats.dates:
            if not _is_readable(form):
                raise UsageError(
                    f"dates are written as in strptime, such as %d.%m.%Y or %m/%d/%y %H:%M; got {form!r:.80}"
                )

    @property
    def formats(self) -> Formats:
        dates, units, text = (
            (value,) if isinstance(value, str) else tuple(value) for value in (self.dates, self.units, self.text)
        )
        return Formats(self.decimal, self.thousands, dates, units, text)


FORMATS = tuple(setting.name for setting in fields(FormatSettings))


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of JSON as a dataclass has them: tuples for lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def looks_like_number(text: "polars.Series") -> "polars.Series":
    """[n] which cells, without blanks around them, would be numbers in some format."""
    return text.str.contains(AMOUNT) | text.str.contains(INFINITE)


def looks_like_date(text: "polars.Series") -> "polars.Series":
    """[n] which cells, without blanks around them, would be dates in some format."""
    return text.str.contains(DATE)


def _quoted_list(texts: Sequence[str]) -> str:
    """As TOML has a list of strings."""
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"


def _parse_date(cell: str, form: str) -> datetime | None:
    """A cell as a date, None if it is none in this format."""
    try:
        return datetime.strptime(cell, form)
    except ValueError:
        return None


def _is_readable(form: str) -> bool:
    """Whether what a format writes is read by it, to the day at least."""
    import polars

    try:
        text = polars.Series([f"{EXAMPLE.astimezone():{form}}"])
        day_read = text.str.to_datetime(form, strict=False, time_unit="us").dt.date()[0]
    except (ValueError, polars.exceptions.PolarsError):
        return False
    return bool(day_read == EXAMPLE.date())
