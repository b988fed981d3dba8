"""One column of a table: its cells as text and as numbers, and what most of them are."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import Fault, UsageError
from .cells import TRUTH, Formats, looks_like_date, looks_like_number
from .times import SAMPLE, moments_of
from .words import Codes, Numbers, Words, merge_names, name_of, words_of_floats

if TYPE_CHECKING:
    import polars

LARGEST = 1e30  # the largest number that float32 can hold and still scale
FEW = 20  # a target of whole numbers with at most this many different values counts as labels
EARNEST, FEWEST = 0.05, 10  # the share of words among numbers, and their number, from which cells are categories
ADVISED = 200  # cells of a column that an option must read to be advised


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a table, which knows where its cells are."""

    table: str  # for errors
    name: str
    values: "polars.Series"  # [n] as it was read
    formats: Formats  # how text is read
    row: Callable[[int], str]  # where a row is

    @property
    def is_text(self) -> bool:
        """Whether it was read as text, as all of a CSV are."""
        import polars

        return self.values.dtype == polars.String

    @property
    def unit(self) -> str:
        """The unit in which its numbers are written, "" if it names none."""
        if not self.formats.units or not self.is_text:
            return ""
        units = self.formats.units_of(self.values).drop_nulls().to_list()
        return str(units[0]) if units else ""

    def place(self, row: int) -> str:
        """Where a cell is, for an error."""
        return f"{self.row(row)}, column '{self.name}'"

    def cell(self, row: int) -> str:
        """What a cell holds, for an error."""
        return str(self.values[int(row)]).strip()

    def quote(self, row: int) -> str:
        """Where a cell is, and what it holds, for an error."""
        return f"{self.place(row)}: '{self.cell(row)}'"

    def words(self) -> Words:
        """The cells as text, without blanks around them."""
        import polars

        dated = self.values.dtype == polars.Datetime
        if self.values.dtype.is_float():
            return words_of_floats(self.values.to_numpy())
        values = self.values.dt.to_string("%Y-%m-%dT%H:%M:%S%.6f") if dated else self.values
        cells = values.cast(polars.String).fill_null("")
        names = cells.unique(maintain_order=True)
        codes = cells.cast(polars.Enum(names)).to_physical().to_numpy().astype(np.int64)
        return merge_names([name_of(text.strip()) for text in names.to_list()], codes)

    def text(self) -> Words:
        """The cells as text; raises UsageError where there is no value."""
        texts = self.words()
        self._check_filled(texts.empty)
        return texts

    def _check_filled(self, empty: NDArray[np.bool_]) -> None:
        """Raise UsageError for the first of the cells [n] that are `empty`."""
        if empty.any():
            raise UsageError(f"{self.place(int(empty.argmax()))}: there is no value; fill it in", Fault.MISSING)

    @cached_property
    def as_numbers(self) -> Numbers:
        """[n] the cells as numbers, NaN where there is none and infinity for anything else."""
        import polars

        if self.is_text:
            return self.formats.parse_numbers(self.values)
        if self.values.dtype == polars.Datetime:
            return np.full(len(self.values), np.inf)
        return self.values.cast(polars.Float64).fill_null(math.nan).to_numpy()

    def kind(self) -> str:
        """What most cells are: "numbers" (or truth values alone), "dates", "text" or "empty"."""
        import polars

        if not self.is_text:
            if self.values.null_count() == len(self.values):
                return "empty"
            return "dates" if self.values.dtype == polars.Datetime else "numbers"
        rest = self._rest()
        plain = int(np.isfinite(self.as_numbers).sum())
        if self.name in self.formats.text and (plain or len(rest)):
            return "text"
        if not len(rest):
            return "numbers" if plain else "empty"
        if not plain and self.are_truths():
            return "numbers"
        # Those in another format count too, so that `numbers` says which.
        like = int(looks_like_number(rest).sum())
        if plain + like >= len(rest) - like:
            return "text" if self._are_categories(rest, plain) else "numbers"
        sample = rest.head(SAMPLE)
        dates = np.isfinite(moments_of(sample, self.formats)) | looks_like_date(sample).to_numpy()
        return "dates" if dates.sum() > len(sample) / 2 else "text"

    def _are_categories(self, texts: "polars.Series", numbers: int) -> bool:
        """Whether numbers and words are categories, as 0, 1, 2 and 3+ are: few different cells, and words in earnest.

        A warning says so. `texts` are the cells that are no numbers.
        """
        texts = texts.filter(~looks_like_number(texts))
        if len(texts) < max(FEWEST, EARNEST * (len(texts) + numbers)) or len(self.words().names) > FEW:
            return False
        what = f"column '{self.name}' has few different cells, some of them words such as '{texts[0]}'"
        warnings.warn(f"{self.table}: {what}, so its cells are categories", stacklevel=5)
        return True

    def are_truths(self) -> bool:
        """Whether text holds true and false, and nothing else."""
        if not self.is_text or np.isfinite(self.as_numbers).any():
            return False
        rest = self._rest().str.to_lowercase()
        return bool(len(rest)) and bool(rest.is_in([*TRUTH]).all())

    def _rest(self) -> "polars.Series":
        """The cells of text that are no numbers and not missing, without blanks around them."""
        return self.values.filter(np.isinf(self.as_numbers)).str.strip_chars()

    def numbers(self) -> Numbers:
        """[n] the cells as numbers, NaN where there is none; raises UsageError for anything else."""
        values, truths = self.as_numbers, self.formats.truths  # those of training
        if self.is_text:
            if self.are_truths() if truths is None else self.name in truths:
                values = values.copy()
                cells = self._rest().str.to_lowercase().to_list()
                values[np.isinf(values)] = [TRUTH.get(cell, np.inf) for cell in cells]
            self._check_units()
        if (bad := np.flatnonzero(np.abs(values) > LARGEST)).size:
            raise UsageError(self.describe_odd(bad, bool(np.isinf(values[bad[0]]))), Fault.NUMBER)
        return values

    def filled_numbers(self) -> Numbers:
        """[n] the cells as numbers; raises UsageError where there is none."""
        values = self.numbers()
        self._check_filled(np.isnan(values))
        return values

    def weights(self) -> Numbers:
        """[n] the cells as weights, as how many rows each row counts; raises UsageError for anything else."""
        values = self.as_numbers
        if (bad := np.flatnonzero(~((values >= 0) & (values <= LARGEST)))).size:
            missing = np.isnan(values[bad[0]])
            what = f"{self.place(bad[0])}: there is" if missing else f"{self.quote(bad[0])} is"
            more = f" ({len(bad) - 1:,} more like this)" if len(bad) > 1 else ""
            text = f"{what} no weight, a finite number from 0{more}"
            raise UsageError(f"{text}; correct it, or write 0 to leave the row out", Fault.WEIGHT)
        return values

    def _check_units(self) -> None:
        """Raise UsageError for a cell in another unit than those above it."""
        units = self.formats.units_of(self.values) if self.formats.units else self.values.head(0)
        if len(different := units.drop_nulls().unique(maintain_order=True)) > 1:
            former, unit = different.to_list()[:2]
            row = int((units == unit).fill_null(False).arg_max() or 0)
            what = f"{self.quote(row)} is in {unit}, but others are in {former}"
            raise UsageError(f"{what}; convert them, or leave the column out with ignore", Fault.WRITTEN)

    def describe_odd(self, bad: Codes, infinite: bool) -> str:
        """What to say of cells that are no numbers, of which those of the rows `bad` are the first."""
        more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
        cell = self.cell(bad[0])
        what = "not a finite" if "inf" in cell.lower() else "not a"
        what = what if infinite else "too large a"
        text = f"{self.quote(bad[0])} is {what} number{more}"
        if infinite and self.formats.truths is not None and self.name in self.formats.truths:
            return f"{self.quote(bad[0])} is neither true nor false{more}, as all were in training"
        if infinite and (advice := self.advise(cell, dated=False)):
            return f"{text}; {advice}"
        return f"{text}; {self.correction}"

    @property
    def correction(self) -> str:
        """What to do about a cell that no option reads."""
        names = f', or say text=["{self.name}"] if its cells are names' if self.formats.truths is None else ""
        return f"correct it, leave it empty if it is missing, or leave the column out with ignore{names}"

    def advise(self, cell: str, dated: bool) -> str:
        """The options that would read a cell and those like it in its column, "" if none would."""
        if not self.is_text:
            return ""
        advise, like = self.formats.number_advice, looks_like_number
        if dated:
            advise, like = self.formats.date_advice, looks_like_date
        cells = self.values.drop_nulls().str.strip_chars().unique(maintain_order=True)
        cells = cells.filter(np.isinf(moments_of(cells, self.formats))) if dated else cells
        advice = advise(cell, cells.filter(like(cells)).head(ADVISED).to_list())
        other = "" if advice else advise(cell)
        return f"{other}, but others of the column are written otherwise; write all in one way" if other else advice
