"""Which classes the models of finished runs take for which, on their clients' test examples."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from ...core.summary import list_attackers
from ...data.tables.words import known_name
from ...errors import UsageError, nearest, several
from ...runs.round_tables import read_confusion
from .compare import Comparison
from .run_rows import Row
from .run_statistics import names_of
from .text_table import Grid

Pair = tuple[str, str]  # the class of an example, and what it was taken for
WIDE, PAIRS = 12, 20  # classes up to which each has a column, and pairs of classes that are listed above that


def confusions(comparison: Comparison, client: str | None) -> list[Grid]:
    """A table for each run: rows are the classes of test examples, columns what they were taken for.

    They count the examples of all seeds and of all clients that are no attackers, or of one client. Raises UsageError
    for a run without classes, and for a client that is not there.
    """
    runs = [(name, row) for rows in comparison.sets for name, row in zip(names_of(rows), rows, strict=True)]
    return [_grid(name, row, client, i if len(runs) > 1 else None) for i, (name, row) in enumerate(runs, 1)]


def _count_answers(row: Row, client: str | None) -> Counter[Pair]:
    """The test examples of a run's seeds, of all honest clients or of one; raises UsageError, see `confusions`."""
    counts: Counter[Pair] = Counter()
    for run in row.runs:
        folder, attackers = run.folder, list_attackers(run.summary)
        honest = [name for name in run.names if name not in attackers]
        whose = honest if client is None else [known_name(client, honest)]
        if client is not None and whose[0] not in honest:
            raise UsageError(f"{folder} has no test scores of a client '{whose[0]}'; {nearest(whose[0], honest)}")
        if not folder.confusion.exists():
            why = "it was deleted; run again"
            if "classes" not in folder.read_clients():
                why = "the target has no classes, or test examples stayed at their sites"
            raise UsageError(f"{folder} has no {folder.confusion.name}: {why}")
        for tested_client, truth, predicted, examples in read_confusion(folder.confusion):
            counts[truth, predicted] += examples * (tested_client in whose)
    return counts


def _grid(name: str, row: Row, client: str | None, number: int | None) -> Grid:
    """The table of a run, the `number`-th of several."""
    counts = _count_answers(row, client)
    classes = row.runs[0].folder.read_clients().get("classes") or sorted({label for pair in counts for label in pair})
    total = sum(counts.values())
    right = sum(number for (truth, taken), number in counts.items() if truth == taken)
    who = "all clients" if client is None else f"client {known_name(client, row.runs[0].names)}"
    notes = [f"{right:,} of {several(total, 'test example')} right; rows: the class, columns: what it was taken for"]
    if len(row.runs) > 1:
        notes.append(f"examples of {len(row.runs)} seeds together")
    records = [
        {"method": name, "truth": truth, "predicted": taken, "examples": counts[truth, taken]}
        for truth, taken in product(classes, classes)
        if len(classes) <= WIDE or counts[truth, taken]
    ]
    called = "confusion" + (f"-{number}" if number is not None else "")
    title = f"{name}: classes of the test examples of {who}"
    if len(classes) > WIDE:
        return _pairs(called, title, counts, notes, records)
    lines = [[truth, *(f"{counts[truth, taken]:,}" for taken in classes)] for truth in classes]
    return Grid(called, title, ["class", *classes], [lines], notes, records)


def _pairs(
    called: str, title: str, counts: Counter[Pair], notes: Sequence[str], records: Sequence[dict[str, Any]]
) -> Grid:
    """The classes that are taken for each other most often, where a table of all would be too wide."""
    wrong = Counter({pair: number for pair, number in counts.items() if pair[0] != pair[1]}).most_common(PAIRS)
    lines = [[truth, taken, f"{number:,}"] for (truth, taken), number in wrong]
    notes = [
        notes[0].partition(";")[0],
        *notes[1:],
        f"the {len(wrong)} most frequent mistakes; --json and --out have all",
    ]
    return Grid(called, title, ["class", "taken for", "examples"], [lines], notes, records, text_columns=2)
