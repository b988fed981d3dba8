"""The page on what is measured of the papers' tables: KINFED_DATA=DIR python evidence/coverage.py [DATASET ...]

It is written from docs/papers/tables/*/table.csv: the coverage by table, and the verdict on each claim. Which data
sets are at hand is read from KINFED_DATA, or taken from the arguments, and noted on the page.
"""

import argparse
import os
import posixpath
from pathlib import Path

from kinfed_papers.claims import answered_claims
from kinfed_papers.coverage import COMMITTED, RULE, claims, coverage, lines
from kinfed_papers.reproduction import WITHOUT_FILE
from kinfed_papers.result_pages import put

PAGE = COMMITTED.parent / "coverage.md"
AT_HAND = "Data sets at hand: "


def parts(at_hand, folder=COMMITTED):
    """The parts of the page that the committed tables decide, by name."""
    shown = [*lines(coverage({*at_hand, *WITHOUT_FILE}, folder)), "", f"{AT_HAND}{', '.join(sorted(at_hand))}."]
    shown += ["", RULE]
    verdicts = ["| table | claim | answer | numbers |", "| --- | --- | --- | --- |"]
    for table, claim in claims(folder):
        verdicts.append(
            f"| {table} | {claim.claim.says} ({claim.claim.where}) | {claim.answer_with_reason} | {claim.text} |"
        )
    pages = ["| paper | claim | answer | by |", "| --- | --- | --- | --- |"]
    for answer in answered_claims():
        link = f" [{answer.page}]({posixpath.relpath(answer.page, PAGE.parent.name)})" if answer.page else ""
        pages.append(f"| {answer.paper} | {answer.says} ({answer.where}) | {answer.answer} | {answer.shows}{link} |")
    return {"coverage": "\n".join(shown), "claims": "\n".join(verdicts), "answered": "\n".join(pages)}


def read_at_hand(page=PAGE):
    """The data sets that a page notes as at hand."""
    line = next(line for line in page.read_text().splitlines() if line.startswith(AT_HAND))
    return line.removeprefix(AT_HAND).removesuffix(".").split(", ")


def write(at_hand):
    """Write the page, where these data sets are at hand."""
    for name, text in parts(at_hand).items():
        put(PAGE, name, text, "What is measured of the papers' tables")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", metavar="DATASET")
    write(parser.parse_args().datasets or [path.stem for path in Path(os.environ["KINFED_DATA"]).glob("*.npz")])
