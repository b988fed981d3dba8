"""Columns as text: what is in them, each once, and where."""

import csv
import math
import re
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Codes = NDArray[np.int64]
TRUTH = re.compile("true|false", re.IGNORECASE)
UNQUOTED = {*"'\"\\{}"}
SPECIAL = re.compile(r'[,"\r\n]|^\s|\s$|^$')  # for which a name is in quotes, in a line of CSV
WHOLE = re.compile(r"(-?[1-9]\d*|0)\.0+")  # as whole numbers beside missing ones are written


class Words(NamedTuple):
    """A column as text."""

    names: list[str]  # what is in it, each once; "" where there is no value
    codes: Codes  # [n] each cell's place in names

    def find_places(self, names: Sequence[str]) -> Codes:
        """[n] each cell's place in these names, -1 where it is none of them."""
        index = {name: i for i, name in enumerate(names)}
        return np.array([index.get(name, -1) for name in self.names], np.int64)[self.codes]

    @property
    def empty(self) -> NDArray[np.bool_]:
        """[n] where there is no value."""
        blank = np.array([not name for name in self.names], bool)
        return np.asarray(blank[self.codes], bool)

    @property
    def counts(self) -> dict[str, int]:
        counts = np.bincount(self.codes, minlength=len(self.names)).tolist()
        return {name: count for name, count in zip(self.names, counts, strict=True) if name and count}


def name_of(text: str) -> str:
    """What a cell is called, whatever else is in its column and file: 1.0 is 1, and true is True."""
    if TRUTH.fullmatch(text):
        return text.capitalize()
    return WHOLE.sub(r"\1", text) if WHOLE.fullmatch(text) and text != "-0.0" else text


def is_quotable(name: str) -> bool:
    """Whether programs that PyTorch writes can hold the name."""
    return name.isprintable() and not {*name} & UNQUOTED


def known_name(name: str, names: Container[str]) -> str:
    """A name as it is among others that come from cells: 1 for 1.0, unless 1.0 is there itself."""
    return name if name in names else name_of(name)


def words_of_floats(values: Numbers) -> Words:
    """A column of numbers as text; whole numbers with missing ones among them are floats."""
    different, codes = np.unique(values, return_inverse=True)
    return merge_names([_write_float(number) for number in different.tolist()], codes)


def _write_float(number: float) -> str:
    if math.isnan(number):
        return ""
    return str(int(number)) if math.isfinite(number) and number == round(number) else str(number)


def join_names(names: Sequence[str]) -> str:
    """Names as a line of CSV, such as `Ulm,3b`, which `split_names` reads back."""
    return ",".join('"' + name.replace('"', '""') + '"' if SPECIAL.search(name) else name for name in names)


def split_names(line: str) -> list[str]:
    """The names in a line of CSV, without blanks before them; a line that is none is one name."""
    try:
        return next(csv.reader([line], skipinitialspace=True, strict=True), [])
    except csv.Error:
        return [line]


def merge_names(names: Sequence[str], codes: Codes) -> Words:
    """Words of which several may have got one name."""
    index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    if len(index) == len(names):
        return Words([*names], codes)
    return Words([*index], np.array([index[name] for name in names])[codes])
