"""Gather: from the folders that somebody names to the runs that a report shows side by side."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import UsageError, some
from ...runs.reference_runs import BASES
from ...runs.run_folder import CANDIDATES, RunFolder
from ...search.study import score
from ..tables.compare import compare, is_unfinished
from ..tables.run_rows import Row, setting_of

UNDER = ("*", "*/*", "runs/*/*")  # where folders of many runs have them: a column of a table, a sweep, a whole table


@dataclass(frozen=True)
class Gathered:
    """The runs of a report, best first: a row each, with its label, and which is the one that is judged."""

    rows: tuple[Row, ...]
    labels: tuple[str, ...]
    main: int
    candidates: int  # from which the judged one was chosen by the page
    notes: list[str] = field(default_factory=list)

    def find_method(self, method: str) -> int | None:
        """The position of the best run of a method; None if there is none."""
        return next((i for i, row in enumerate(self.rows) if row.method == method), None)


def gather(
    paths: Sequence[Path], labels: Mapping[str, str] | None = None, judged: str = "", same_data: bool = False
) -> Gathered:
    """The runs in these folders; Local and FedAvg are taken from beside them where they are not named.

    A folder may be that of a run, of a choice, or of many runs, such as a sweep's, of which the best setting of each
    method is taken, by validation. `labels` are names by folder, `judged` is the folder of the run that the verdict is
    on, and `same_data` says that their data are known to be the same. Raises UsageError for a folder without a finished
    run, and for runs of different data, naming what differs.
    """
    if not paths:
        raise UsageError("nothing to report: name the folders of finished runs")
    notes: list[str] = []
    folders = [folder for path in paths for folder in _runs_in(path, notes)]
    folders = list(dict.fromkeys(folders))
    named = compare(folders, same_data)
    if len(named.sets) > 1:
        first = [rows[0] for rows in named.sets[:4]]
        described = [(row.folder, row.summary.data) for row in first]
        sides = "; ".join(f"{folder} ({data.dataset}, {data.clients} clients)" for folder, data in described)
        raise UsageError(
            f"runs of different data cannot stand side by side: they differ in {named.differing}: {sides}; name fewer"
        )
    mine = named.sets[0]
    beside = [reference for base in BASES if (reference := _find_reference_run(mine, base)) is not None]
    with_references = compare([*(row.folder.path for row in mine), *beside], same_data) if beside else named
    setting = setting_of(mine[0].summary)
    rows = next(rows for rows in with_references.sets if setting_of(rows[0].summary) == setting)
    at = [i for i, row in enumerate(rows) if str(row.folder) == judged]
    main, candidates = (at[0], 1) if at else _main(rows, {str(row.folder) for row in mine})
    warnings = [warning for warning in with_references.warnings if not warning.startswith("Local is not")]
    return Gathered(rows, _labels(rows, labels or {}), main, candidates, [*notes, *warnings])


def _is_run(path: Path) -> bool:
    return path.is_dir() and (
        any((path / name).exists() for name in ("summary.json", "config.toml")) or bool(RunFolder(path).seeds())
    )


def _runs_in(path: Path, notes: list[str]) -> list[Path]:
    """The folder itself if it is a run's, or those of the runs in it: of each method the best setting."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; name the folder of a finished run, such as runs/fedaghn/digits/...")
    if _is_run(path):
        return [path]
    if (path / CANDIDATES).is_dir():
        raise UsageError(f"{path} holds a choice that is not finished; the command that began it goes on with it")
    runs_in_path = list[Path]()
    for pattern in UNDER:
        if runs_in_path := [folder for folder in sorted(path.glob(pattern)) if _is_run(folder)]:
            break
    finished = [run for run in runs_in_path if not is_unfinished(run)]
    if not finished:
        raise UsageError(
            f"{path} is not the folder of a run: it has neither summary.json nor config.toml, and no finished run in it"
        )
    if len(finished) < len(runs_in_path):
        notes.append(
            f"left out, as not finished: {some(len(runs_in_path) - len(finished), len(runs_in_path), 'run')} of {path}"
        )
    compared = compare(finished)
    if len(compared.sets) > 1:
        places = sorted({str(row.folder.path.parent) for rows in compared.sets for row in rows})
        raise UsageError(
            f"{path} holds runs of different data, which differ in {compared.differing}; "
            f"name one of {', '.join(places[:12])}"
        )
    if all(run.parent == path for run in runs_in_path):  # each was put there under a name of its own
        return finished
    return _best_settings(compared.sets[0], path, notes)


def _best_settings(rows: Sequence[Row], path: Path, notes: list[str]) -> list[Path]:
    """Of each method the run with the best validation score; a note says among how many it was chosen."""
    best = []
    for name in dict.fromkeys(row.name for row in rows):
        settings = [row for row in rows if row.name == name]
        chosen = settings[0]
        if len(settings) > 1:
            chosen = max(settings, key=_validation_score)
            name_of_best = chosen.folder.path.name
            notes.append(f"{name}: {name_of_best}, the best of {len(settings)} settings in {path} by validation score")
        best.append(chosen.folder.path)
    return best


def _validation_score(row: Row) -> float:
    return score(*(run.folder for run in row.runs)).rank


def _find_reference_run(rows: Sequence[Row], base: str) -> Path | None:
    """The run of Local or FedAvg beside the first of these that has one; None if it is one of these itself."""
    if any(row.method == base for row in rows):
        return None
    every = (row.folder.reference(base) for row in rows)
    return next((folder.path for folder in every if folder.is_finished), None)


def _labels(rows: Sequence[Row], given: Mapping[str, str]) -> tuple[str, ...]:
    """A method's name, and the folder's where two runs have the same; or the name given for its folder."""
    names = [given.get(str(row.folder), row.name) for row in rows]
    return tuple(
        f"{name}, {row.folder.path.name}" if names.count(name) > 1 else name
        for name, row in zip(names, rows, strict=True)
    )


def _main(rows: Sequence[Row], named: set[str]) -> tuple[int, int]:
    """Which run is judged, and among how many it was chosen: a choice's winner, or the best by validation."""
    mine = [i for i, row in enumerate(rows) if str(row.folder) in named]
    for i in mine:
        if (chosen := rows[i].folder.choice).exists():
            choice = json.loads(chosen.read_text(encoding="utf-8"))
            return i, int(choice["verdict"]["candidates"]) if choice["verdict"] else len(choice["ranking"])
    others = [i for i in mine if rows[i].method not in BASES] or [i for i in mine if rows[i].method != "local"] or mine
    return max(others, key=lambda i: _validation_score(rows[i])), len(others)
