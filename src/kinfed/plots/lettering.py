"""Lettering: names of any letters in pictures, by the fonts of this machine."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def number_illegible(names: Sequence[str]) -> list[str]:
    """The names, in which letters that no font here can draw are replaced by the name's place, such as #3, from 1.

    A warning says so.
    """
    shown = [
        "".join("".join(letters) if drawn else f"#{i}" for drawn, letters in groupby(name, _is_drawn))
        for i, name in enumerate(names, 1)
    ]
    if shown != list(names):
        warnings.warn(
            "no font of this machine has some letters of your names, so pictures show the places of these clients or "
            "classes in their order, such as #3; they would show the names with a font that has them, such as Noto "
            "Sans CJK",
            stacklevel=2,
        )
    return shown


def literal(text: str) -> str:
    """Text in one line in which a dollar begins no formula, and letters that no font can draw are marks."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return re.sub(r"(?<!\\)\$", r"\\$", "".join(letter if _is_drawn(letter) else UNKNOWN for letter in line))


@contextmanager
def choose_fonts(figure: Figure) -> Iterator[None]:
    """In this block a figure can be drawn, whatever letters are in its text."""
    for text in figure.findobj(Text):
        lines = text.get_text().splitlines()
        families = dict.fromkeys(family for line in lines for letter in line if (family := _family_of(letter)))
        if families:
            text.set_fontfamily([*text.get_fontfamily(), *families])
        if any("$" in line for line in lines):
            text.set_text("\n".join(map(literal, lines)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+")  # which is drawn as an empty box
        yield


def _is_drawn(letter: str) -> bool:
    return ord(letter) < 128 or _family_of(letter) is not None


@cache
def _family_of(letter: str) -> str | None:
    """The family of a font that has this letter, "" for the font of all pictures; None if there is none."""
    usual = font_manager.findfont(FontProperties())
    if ord(letter) < 128 or ord(letter) in _letters(usual):
        return ""
    fonts = [font for font in font_manager.fontManager.ttflist if font.style == "normal" and "Resort" not in font.name]
    fonts.sort(key=lambda font: (font.weight != 400, font.name))
    return next((font.name for font in fonts if ord(letter) in _letters(font.fname)), None)


@cache
def _letters(path: str) -> frozenset[int]:
    """The letters that a font of outlines has; none of a font of pictures, as of emoji."""
    try:
        font = FT2Font(path)
        return frozenset(font.get_charmap()) if font.scalable else frozenset()
    except (OSError, RuntimeError):  # a font that cannot be read is no help
        return frozenset()
