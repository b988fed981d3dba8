"""Several finished runs side by side, each compared with Local if that was run too."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UsageError, list_seeds, note_failure
from ...runs import baselines
from ...runs.reference_runs import BASES
from ...runs.run import Run, make_baseline, open_seeds
from ...runs.run_folder import RunFolder
from ...runs.test_scores import chose_otherwise
from ...verdict.verdict import Verdict
from .run_rows import Counts, Row, read, setting_of


@dataclass(frozen=True)
class Comparison:
    """`sets` of comparable runs, each sorted best first, the largest set first; and warnings for the reader."""

    sets: tuple[tuple[Row, ...], ...]
    warnings: tuple[str, ...]
    differing: str = ""  # the settings that tell several sets apart
    named: tuple[tuple[str, str], ...] = ()  # methods that are to be paired whatever they score: each with its rival
    baselines: tuple[list[dict[str, Any]], ...] = ()  # by set: standard models on the same rows, best first

    @property
    def letters(self) -> list[str]:
        """What tables call each set: A, B and so on; nothing if there is one."""
        return [chr(ord("A") + i) for i in range(len(self.sets))] if len(self.sets) > 1 else [""]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `runs`, each with the number of its set (from 1), `baselines` by set, and `warnings`."""
        runs = [{"set": i, **row.to_dict()} for i, rows in enumerate(self.sets, 1) for row in rows]
        return {"runs": runs, "baselines": list(self.baselines), "warnings": list(self.warnings)}


def compare(folders: Sequence[Path], same_data: bool = False) -> Comparison:
    """Read finished runs from their folders; one with seed-* folders is a run repeated with several seeds.

    Runs are sorted by the score that selected them if all that are compared share it, and by the metric otherwise.
    Clients that gain and lose are counted by it against the best Local run of the same data set, clients and metric
    that has all seeds of the run, client by client and seed by seed. Where runs have kept the scores of single test
    examples these decide instead (`kinfed.Verdict`), also over a Local run that was trained beside the run. Runs that
    are not finished are left out, and a warning names them. `same_data`: their data are known to be the same, whatever
    their summaries say, some of which may be of an older version. Raises UsageError for a folder that is not a run's or
    has a broken summary, and if no run is finished.
    """
    if not folders:
        raise UsageError("nothing to compare: name the folders of finished runs")
    unfinished = [folder for folder in folders if is_unfinished(folder)]
    names = f"{', '.join(map(str, unfinished[:8]))}{', ...' if len(unfinished) > 8 else ''}"
    if len(unfinished) == len(folders):
        raise UsageError(f"no run is finished: {names}; resume one: kinfed resume {unfinished[0]}")
    sets: dict[tuple[str, str, int, str], list[Row]] = {}
    finished = [folder for folder in folders if folder not in unfinished]
    data = _federation(finished[0]) if same_data else None
    for row in (read(folder, data) for folder in finished):
        sets.setdefault(setting_of(row.summary), []).append(row)
    ordered = sorted(sets.values(), key=len, reverse=True)
    warnings = [f"left out, as not finished (kinfed resume continues them): {names}"] if unfinished else []
    differing = _list_differences([rows[0] for rows in ordered]) if len(ordered) > 1 else ""
    if differing:
        warnings.append(f"runs that differ in {differing} are not comparable")
    warnings += _note_scattered_seeds(folders)
    warnings += [line for folder in finished for line in _note_lost_seeds(RunFolder(folder))]
    compared = []
    for i, ranked in enumerate(map(_rank_runs, ordered)):
        of = f"{chr(ord('A') + i)}: " if len(ordered) > 1 else ""
        local = [row for row in ranked if row.method == "local"]
        rows = []
        for row in ranked:
            reference = next((other for other in local if set(row.seeds) <= set(other.seeds)), None)
            if local and reference is None:
                seeds = ", ".join(map(str, row.seeds))
                warnings.append(
                    f"{of}{row.method} is not compared with local, which was not run with its seeds ({seeds})"
                )
            if reference is not None and len(row.seeds) < len(reference.seeds):
                seeds = list_seeds(row.seeds)
                warnings.append(f"{of}{row.method}'s gain and verdict are over {seeds} alone, which local's row is not")
            rows.append(row if row.method == "local" or reference is None else _against(row, reference))
        judged, problems = verdicts(rows)
        compared.append(tuple(judged))
        warnings += [of + problem for problem in problems]
    standard = tuple(_read_baselines(rows) for rows in compared)
    return Comparison(tuple(compared), tuple(dict.fromkeys(warnings)), differing, baselines=standard)


def _read_baselines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The standard models beside the first of these runs that has some, with means over its seeds."""
    for row in rows:
        by_seed = [baselines.read(run.folder) for run in row.runs]
        if lines := baselines.rows(by_seed, row.metric.higher_is_better):
            return lines
    return []


def _federation(folder: Path) -> dict[str, Any]:
    """What a finished run's summary says of its data."""
    return open_seeds(RunFolder(folder))[0].summary.data.federation


def _note_scattered_seeds(folders: Sequence[Path]) -> list[str]:
    """A line that names the folders above the seeds of one run, if several of these were given as runs of their own."""
    above = Counter(folder.parent for folder in folders if folder.name.removeprefix("seed-").isdecimal())
    scattered = [str(folder) for folder, count in above.items() if count > 1]
    if not scattered:
        return []
    return [f"each seed is compared as a run of its own; to average over seeds: kinfed compare {' '.join(scattered)}"]


def _note_lost_seeds(run: RunFolder) -> list[str]:
    """A line that names the seeds of a finished run whose scores are not there."""
    if not run.is_finished:
        return []
    present = {folder.read_summary().seeds[0] for folder in run.seeds()}
    summary = run.read_summary()
    lost = [str(seed) for seed in summary.seeds if seed not in present]
    if summary.by_client is not None or not lost:
        return []
    return [f"{run}: seed{'s' if len(lost) > 1 else ''} {', '.join(lost)} without scores: left out; run again"]


def verdicts(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Comparable rows with verdicts, and what is missing for others.

    A verdict needs Local among these rows or beside the run; without it, it is that with which the run ended, if any.
    """
    problems = list[str]()
    judged = [_judge(row, rows, problems) for row in rows]
    lacking = dict.fromkeys(row.name for row in judged if row.method != "local" and row.verdict is None)
    if lacking and not any(row.method == "local" for row in rows):
        problems.append(f"Local is not among these runs; method.name=local shows the worth of {', '.join(lacking)}")
    return judged, problems


def _judge(row: Row, rows: Sequence[Row], problems: list[str]) -> Row:
    """A row with its verdict, if there can be one."""
    if row.folder.choice.exists():  # its verdict knows of the choice
        return replace(row, verdict=row.folder.read_summary().verdict)
    if row.method == "local":
        return row
    local, fedavg = (_reference(row, rows, name) for name in BASES)
    if local is None:  # what the run itself found: real sites have compared themselves, and sent no scores of Local
        verdicts_of_run = [run.summary.verdict for run in row.runs]
        return replace(row, verdict=verdicts_of_run[0]) if len(verdicts_of_run) == 1 else row
    verdict = None
    with note_failure(problems, f"{row.name} has no verdict"):
        verdict = verdict_on(row, row.seeds, local, fedavg, [row, *rows])
    if verdict is None:
        return row
    if chosen := chose_otherwise([run.summary for run in row.runs], row.model):
        problems.append(
            f"{row.name}: its verdict is on the model that each seed chose ({chosen}), the scores on '{row.model}'"
        )
    by_example = all(run.folder.tested.exists() for run in (*row.runs, *local.values()))
    counts = Counts(len(verdict.gain), len(verdict.lose), paired=True) if by_example else row.counts
    return replace(row, verdict=verdict.to_dict(), counts=counts)


def verdict_on(
    row: Row,
    seeds: Sequence[int],
    local: Mapping[int, Run],
    fedavg: Mapping[int, Run] | None,
    rows: Sequence[Row],
    candidates: int = 1,
) -> Verdict | None:
    """The verdict on a row's runs, over the baselines of `floor_of`."""
    against = floor_of(row, seeds, local, fedavg, rows)
    mine = [row.by_seed[seed].by_client for seed in seeds]
    return baselines.verdict(row.method, row.metric, mine, against, candidates=candidates, saved=row.method)


def floor_of(
    row: Row,
    seeds: Sequence[int],
    local: Mapping[int, Run],
    fedavg: Mapping[int, Run] | None,
    rows: Sequence[Row],
) -> baselines.Floor:
    """The baselines of a row's runs, of these of Local and FedAvg, by seed, and the standard models beside any of rows.

    Standard models depend on the data alone, so those beside any comparable run will do.
    """
    by_seed = []
    for seed in seeds:
        runs = [make_baseline(run[seed], run is fedavg) for run in (local, fedavg) if run is not None]
        beside = (other.by_seed[seed].folder for other in rows if seed in other.by_seed)
        by_seed.append([*runs, *next(filter(None, map(baselines.read, beside)), [])])
    highest = next(iter(local.values())).summary.selection.higher_is_better
    return baselines.floor(by_seed, row.metric.higher_is_better, highest)


def _reference(row: Row, rows: Sequence[Row], method: str) -> dict[int, Run] | None:
    """The runs of a method with a row's seeds: the best such run of the same attack, or the one beside it."""
    candidates = [other for other in rows if other.method == method and set(row.seeds) <= set(other.seeds)]
    if candidates:
        same_attack = [other for other in candidates if other.attack == row.attack] or candidates
        return {seed: same_attack[0].by_seed[seed] for seed in row.seeds}
    reference = row.folder.reference(method)
    if not reference.is_finished:
        return None
    seeds = {run.summary.seeds[0]: run for run in open_seeds(reference)}
    if not set(row.seeds) <= seeds.keys():  # one of them failed
        return None
    return {seed: seeds[seed] for seed in row.seeds}


def _rank_runs(rows: list[Row]) -> list[Row]:
    shared = {row.summary.selection.by for row in rows if row.selected is not None}
    if len(shared) > 1 or any(row.selected is None for row in rows):
        shared = {rows[0].metric.name}
    (by,) = shared
    return sorted((replace(row, ranked_by=by) for row in rows), key=lambda row: -row.rank())


def is_unfinished(folder: Path) -> bool:
    """Whether a run was begun here and has not finished, with one of its seeds or all."""
    run = RunFolder(folder)
    seeds = run.seeds()
    return any(folder.is_begun for folder in (run, *seeds)) and not all(folder.is_finished for folder in seeds or [run])


def _list_differences(rows: Sequence[Row]) -> str:
    """The settings in which these runs differ, by their names in configs."""
    described = [setting_of(row.summary) for row in rows]
    configured = [_leaves(json.loads(federation), "federation") for _, federation, _, _ in described]
    outcome = [{"data set": data, "clients": clients, "metric": metric} for data, _, clients, metric in described]
    for settings in (configured, outcome):
        names = dict.fromkeys(name for settings_of_run in settings for name in settings_of_run)
        values_of = {name: [run.get(name) for run in settings] for name in names}
        differing = [name for name, values in values_of.items() if values.count(values[0]) < len(values)]
        parts = [name for name in differing if name.endswith(".name")]  # whose own settings differ with it
        differing = [name for name in differing if name in parts or f"{name.rpartition('.')[0]}.name" not in parts]
        if differing:
            break
    return ", ".join(differing)


def _leaves(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}.{key}"
        leaves |= _leaves(value, name) if isinstance(value, dict) else {name: value}
    return leaves


def _against(row: Row, local: Row) -> Row:
    """The row with the numbers of clients that do better, and worse, than under Local: means over seeds."""
    gain = np.stack([row.rank(seed) - local.rank(seed) for seed in row.seeds])  # [seeds, N]
    helped, hurt = (float(some.sum(1).mean()) for some in (gain > 0, gain < 0))
    return replace(row, counts=Counts(helped, hurt, paired=False))
