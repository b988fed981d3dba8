"""What pages say of methods that their files say: python evidence/method_table.py

Lines and settings by method in docs/methods/README.md, and what differs from the papers.
"""

import argparse
import inspect
from dataclasses import fields
from pathlib import Path

from kinfed.methods import FAMILIES, METHODS
from kinfed_papers.result_pages import put

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "methods" / "README.md"
PART, DIFFERS = "lines and settings", "what differs"
COMMON = {"personal", "frozen", "bn"}  # settings that every method has


def find_page(name, file):
    """The page on a method, from docs/methods: its own, else that which lists it or names its file."""
    pages = [page for page in sorted((DOCS / "methods").glob("*.md")) if page != PAGE]
    of_its_own = [page for page in pages if page.stem == name]
    naming = [page for page in pages if f"{file.name}`" in page.read_text()]
    if not of_its_own and f"\n| `{name}` |" in (DOCS / "baselines.md").read_text():
        return "../baselines.md"
    return (of_its_own or naming)[0].name


def lines():
    """The lines of the table, a family after the other."""
    yield "| method | paper | lines | its settings |"
    yield "| --- | --- | ---: | --- |"
    for family, methods in FAMILIES.items():
        yield f"| **{family}** | | | |"
        for name, listed in methods.items():
            file = Path(inspect.getfile(METHODS[name]))
            settings = [f"`{field.name}`" for field in fields(METHODS[name]) if field.name not in COMMON]
            paper = f"{listed.authors}, {listed.year}" if listed.title else ""
            count = len(file.read_text().splitlines())
            yield f"| [`{name}`]({find_page(name, file)}) | {paper} | {count} | {', '.join(settings)} |"


def differences():
    """A table of what methods do otherwise than their papers."""
    yield "| method | differs |"
    yield "| --- | --- |"
    for name in METHODS:
        if differs := METHODS.differs(name):
            yield f"| `{name}` | {differs} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone
    put(PAGE, PART, "\n".join(lines()), "Which method for my data?")
    put(PAGE, DIFFERS, "\n".join(differences()), "Which method for my data?")
