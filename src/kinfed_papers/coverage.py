"""How many of the papers' printed figures are measured, and why the others are not.

Measured ones are counted from the tables in a checkout: docs/papers/tables/TABLE/table.csv, as `kinfed papers run`
writes them; a part of a table is in TABLE-PART.
"""

import csv
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from kinfed.errors import UsageError

from . import published_table
from .claim_verdicts import BEHIND, Figure, Floors, Verdict, is_ahead, of_csv, verdicts
from .published_table import Column, Protocol, Row
from .reproduction import MEASURES

COMMITTED = Path(__file__).parents[2] / "docs" / "papers" / "tables"
SHORT = ("scaled", "own model")  # flags of what is less than the paper's training
PARTLY = (*SHORT, "subset", "generated")  # or than its experiment
WEIGHTS = "run, but weights are no scores"
NOT_RUN, ON_SUBSET = "not run", "not run, and only on a subset"
MANY = 3  # seeds

Key = tuple[str, str, str, str]  # data set, setting, method and metric, as printed


class Covered(NamedTuple):
    """One printed table."""

    name: str
    printed: int  # figures
    run: int
    measured: int  # of these ahead of what needs no network
    trained: int  # of these with all rounds, on whatever data are at hand
    complete: int  # of these with all rounds, on all of the paper's own data
    seeded: int  # of these with three seeds or more
    gaps: Mapping[str, int]  # figures by the reason why they are not measured


def read_committed_tables(folder: Path = COMMITTED) -> dict[str, tuple[str, list[Figure]]]:
    """The tables in a folder: by its name the table's, and the figures; raises UsageError if it is not there."""
    if not folder.is_dir():
        raise UsageError(f"there is no {folder}: measured tables are in a checkout of kinfed, not in an installed one")
    figures = {}
    for path in sorted(folder.glob("*/table.csv")):
        name = path.parent.name
        names = [table for table in published_table.tables() if name == table or name.startswith(f"{table}-")]
        if names:
            figures[name] = max(names, key=len), of_csv(path)
    return figures


CONTROLS = "-controls"  # the end of the name of a folder with what needs no network


def floors(table: str, folder: Path = COMMITTED) -> Floors:
    """The best score of what needs no network, by column and metric; empty where nothing is committed."""
    best: dict[tuple[str, str], float] = {}
    for path in sorted(folder.glob(f"{table}*{CONTROLS}/table.csv")):
        name = path.parent.name.removesuffix(CONTROLS)
        if name == table or name.startswith(f"{table}-"):
            for figure in of_csv(path):
                at, mean = (figure.column, figure.metric), fmean(figure.by_seed.values())
                better = MEASURES[figure.metric].better
                best[at] = better * max(better * mean, better * best.get(at, mean))
    return best


def _is_measured(figure: Figure, best: Floors) -> bool:
    return is_ahead(figure.dataset, figure.metric, figure.by_seed, best.get((figure.column, figure.metric)))


def coverage(at_hand: Collection[str], folder: Path = COMMITTED) -> list[Covered]:
    """Every printed table, in order; `at_hand` are the names of the data sets that are here."""
    figures: dict[str, list[Figure]] = {}
    for table, mine in read_committed_tables(folder).values():
        figures.setdefault(table, []).extend(mine)
    result: list[Covered] = []
    seen: set[str] = set()
    for name in published_table.tables():
        paper = name.partition(".")[0]
        if paper not in seen:
            seen.add(paper)
            result += _elsewhere(paper)
        result.append(_cover_table(published_table.load(name), figures.get(name, []), at_hand, floors(name, folder)))
    return result


def _cover_table(table: Protocol, figures: Sequence[Figure], at_hand: Collection[str], best: Floors) -> Covered:
    by_key: dict[Key, list[Figure]] = {}
    for figure in figures:
        by_key.setdefault((figure.dataset, figure.setting, figure.printed, figure.metric), []).append(figure)
    ran = {key: by_key[key] for key in table.numbers if key in by_key}
    weights = {key for key in ran if not MEASURES[key[3]].better}
    ahead = {key: [figure for figure in ran[key] if _is_measured(figure, best)] for key in ran if key not in weights}
    measured = {key: ours for key, ours in ahead.items() if ours}
    trained, complete, seeded = 0, 0, 0
    for ours in measured.values():
        trained += not all(_has(figure, SHORT) for figure in ours)
        complete += not all(_is_partial(table, figure) for figure in ours)
        seeded += max(len(figure.by_seed) for figure in ours) >= MANY
    gaps = Counter(_reason(table, key, at_hand) for key in table.numbers if key not in ran)
    gaps.update(BEHIND for key in ahead if key not in measured)
    gaps.update({WEIGHTS: len(weights)} if weights else {})
    counts = (len(table.numbers), len(ran), len(measured), trained, complete, seeded)
    return Covered(table.name, *counts, dict(gaps.most_common()))


def _is_partial(table: Protocol, figure: Figure) -> bool:
    """Whether a figure is of less than the paper's experiment."""
    column = table.columns.get(figure.column)
    return (column is not None and (column.generated or column.stand_in)) or _has(figure, PARTLY)


def _has(figure: Figure, flags: tuple[str, ...]) -> bool:
    return any(flag.startswith(flags) for flag in figure.flags)


def _elsewhere(paper: str) -> Iterator[Covered]:
    """What is printed and no table file rebuilds."""
    with (published_table.PAPERS / paper / "printed.csv").open(newline="") as file:
        counts = Counter(line["table"] for line in csv.DictReader(file) if line["mean"])
    for table, why in published_table.elsewhere(paper).items():
        yield Covered(f"{paper}, {table}", counts[table], *(0,) * 5, {why: counts[table]})


def _reason(table: Protocol, key: Key, at_hand: Collection[str]) -> str:
    """Why a printed figure is not measured: what is lacking, or only that nobody has run it."""
    dataset, setting, method, _ = key
    rows = [row for row in table.rows.values() if row.printed == method]
    columns = [column for column in table.columns.values() if (column.dataset, column.setting) == (dataset, setting)]
    reasons = [(_lacking(table, row, column, at_hand), column.subset) for row in rows for column in columns]
    able = [subset for why, subset in reasons if not why]
    if able:
        return ON_SUBSET if all(able) else NOT_RUN
    return reasons[0][0] if reasons else "not in kinfed"


def _lacking(table: Protocol, row: Row, column: Column, at_hand: Collection[str]) -> str:
    """What a cell lacks; empty if it can be run here."""
    obstacle = row.missing or column.missing or column.lacks.get(row.name, "")
    parts = [table.columns[name] for name in column.mean_of] or [column]
    absent = sorted({published_table.dataset_of(table, part) for part in parts} - {*at_hand})
    return obstacle or (f"needs {', '.join(absent)}" if absent else "")


RULE = (
    "Measured are scores that are ahead of what needs no network, as far as that is known: each client's commonest "
    "label, the last value, a ridge with the time of day, a logistic regression, or chance."
)
HEADINGS = (
    *("table", "printed", "run", "measured", "all rounds", "all rounds, all data", "three seeds or more"),
    "can be measured",
)


def lines(covered: Sequence[Covered]) -> Iterator[str]:
    """The coverage as a table in Markdown, with a row of sums."""
    yield f"| {' | '.join(HEADINGS)} | why not |"
    yield f"| --- |{' ---: |' * (len(HEADINGS) - 1)} --- |"
    for cells, why in _rows(covered):
        yield f"| {' | '.join(map(str, cells))} | {why} |"


def text(covered: Sequence[Covered], width: int) -> Iterator[str]:
    """The same as lines of so many characters: numbers in columns, and below each table why the rest is not there."""
    rows = list(_rows(covered))
    first = max(len(str(cells[0])) for cells, _ in rows)
    parts = ("printed", "run", "measured", "rounds", "data", "seeds", "able")
    yield " ".join([" " * first, *(f"{part:>8}" for part in parts)])
    for cells, why in rows:
        name = str(cells[0]).strip("*")
        yield " ".join([f"{name:<{first}}", *(f"{number:>8}" for number in cells[1:])])
        if why:
            yield from textwrap.wrap(why, width, initial_indent="    ", subsequent_indent="    ")
    legend = [f"{part}: {heading}" for part, heading in zip(parts[3:], HEADINGS[4:], strict=True)]
    yield from textwrap.wrap(f"{RULE} {'; '.join(legend)}.", width)


def _rows(covered: Sequence[Covered]) -> Iterator[tuple[list[str | int], str]]:
    """Of each table and of all: what stands below the headings, and why the rest is not measured."""
    everything: Counter[str] = Counter()
    for table in covered:
        everything.update(table.gaps)
    counts = [table[1:7] for table in covered]
    sums = [sum(values) for values in zip(*counts, strict=True)]
    total = Covered._make(["**all**", *sums, dict(everything.most_common())])
    for table in [*covered, total]:
        why = "; ".join(f"{reason}: {count}" for reason, count in table.gaps.items())
        able = table.run + sum(table.gaps.get(reason, 0) for reason in (NOT_RUN, ON_SUBSET))
        yield [*table[:7], able], why


def claims(folder: Path = COMMITTED) -> Iterator[tuple[str, Verdict]]:
    """The verdict on every claim by each committed table that speaks to it, and which that is; else what print says."""
    tables = read_committed_tables(folder)
    for name in published_table.tables():
        protocol = published_table.load(name)
        parts = {part: figures for part, (table, figures) in tables.items() if table == name}
        best = floors(name, folder)
        by_part = {part: verdicts(protocol, figures, best) for part, figures in parts.items()}
        for place, in_print in enumerate(verdicts(protocol, [])):
            verdicts_here = [(part, mine[place]) for part, mine in by_part.items() if mine[place].text != in_print.text]
            yield from verdicts_here or [(name, in_print)]
