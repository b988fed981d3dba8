"""The page on what is measured of the papers' tables: KINFED_DATA=DIR python evidence/coverage.py [DATASET ...]

It is written from docs/papers/tables/*/table.csv: the coverage by table, and the verdict on each claim. Which data
sets are at hand is read from KINFED_DATA, or taken from the arguments, and noted on the page.
"""

import os
import posixpath
import sys
from collections import defaultdict
from pathlib import Path

from kinfed_papers.claim_verdicts import ACCURACIES, is_at_chance
from kinfed_papers.claims import answered
from kinfed_papers.coverage import COMMITTED, claims, committed, coverage, lines
from kinfed_papers.reproduction import WITHOUT_FILE
from kinfed_papers.result_pages import put

PAGE = COMMITTED.parent / "coverage.md"
AT_HAND = "Data sets at hand: "


def parts(at_hand, folder=COMMITTED):
    """The parts of the page that the committed tables decide, by name."""
    shown = [*lines(coverage({*at_hand, *WITHOUT_FILE}, folder)), "", f"{AT_HAND}{', '.join(sorted(at_hand))}."]
    shown += [
        "",
        f"Of the measured figures {at_chance(folder)} are accuracies at chance, of runs that learned nothing.",
    ]
    verdicts = ["| table | claim | answer | numbers |", "| --- | --- | --- | --- |"]
    for table, one in claims(folder):
        verdicts.append(f"| {table} | {one.claim.says} ({one.claim.where}) | {one.told} | {one.text} |")
    pages = ["| paper | claim | answer | by |", "| --- | --- | --- | --- |"]
    for one in answered():
        link = f" [{one.page}]({posixpath.relpath(one.page, PAGE.parent.name)})"
        pages.append(f"| {one.paper} | {one.says} ({one.where}) | {one.answer} | {one.shows}{link * bool(one.page)} |")
    return {"coverage": "\n".join(shown), "claims": "\n".join(verdicts), "answered": "\n".join(pages)}


def at_chance(folder=COMMITTED):
    """How many printed accuracies have been measured by runs at chance alone."""
    found = defaultdict(list)
    for table, figures in committed(folder).values():
        for one in figures:
            if one.metric in ACCURACIES:
                chance = is_at_chance(one.dataset, one.by_seed)
                found[table, one.dataset, one.setting, one.printed].append(chance)
    return sum(all(each) for each in found.values())


def noted(page=PAGE):
    """The data sets that a page notes as at hand."""
    line = next(line for line in page.read_text().splitlines() if line.startswith(AT_HAND))
    return line.removeprefix(AT_HAND).removesuffix(".").split(", ")


if __name__ == "__main__":
    named = sys.argv[1:] or [path.stem for path in Path(os.environ["KINFED_DATA"]).glob("*.npz")]
    for name, text in parts(named).items():
        put(PAGE, name, text, "What is measured of the papers' tables")
