"""What the registry says of where a method is from is what its own file says."""

import ast
import re
from pathlib import Path

from kinfed import methods
from kinfed.methods import FAMILIES, METHODS

FOLDER = Path(methods.__file__).parent
ALL = {name: listed for family in FAMILIES.values() for name, listed in family.items()}
# What papers compare with and none of them proposed.
OF_NO_PAPER = {"local", "fedavg-ft", "fedprox-ft", "kin", "hedge", "attention", "mixture", "private-clusters"}


def test_every_method_is_in_one_family():
    assert list(METHODS) == [name for family in FAMILIES.values() for name in family]
    assert len({listed.place for listed in ALL.values()}) == len(ALL)
    assert {name for name, listed in ALL.items() if not listed.title} == OF_NO_PAPER


def test_authors_and_year_are_those_of_the_methods_file():
    for name, listed in ALL.items():
        file = FOLDER / f"{listed.place.partition(':')[0]}.py"
        said = re.search(r"\((\D+), (\d{4})", ast.get_docstring(ast.parse(file.read_text())).splitlines()[0])
        assert (listed.authors, listed.year) == ((said[1], int(said[2])) if said else ("", None)), name
