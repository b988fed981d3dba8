"""Fronts: what a page begins with if its folder holds more than runs, such as a published table or newcomers.

Everything is read from the files that the command has written which made the folder.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ...core.registry import load
from ...core.summary import Summary
from ...errors import UsageError, several
from ...runs.openers import SITE
from ...runs.run_folder import RunFolder
from ..tables.text_table import Grid, of_markdown, quantity

Lines = list[dict[str, str]]
NONE = "\u2013"  # where there is no number
AT_SITE = "kinfed_flower.site.site_front:front"  # what stands on the page of a site's folder
PUBLISHED = "kinfed_papers.table_overview:overview"  # what stands before the runs of a published table


@dataclass(frozen=True)
class Part:
    """Runs that stand side by side on a page of several such parts."""

    name: str
    folders: Sequence[Path]
    labels: Mapping[str, str] = field(default_factory=dict)  # by folder
    judged: str = ""  # the folder of the run that is judged; else that with the best validation score
    notes: Sequence[str] = ()
    same_data: bool = False  # whether their data are known to be the same


@dataclass(frozen=True)
class Front:
    """What is said and shown before the runs; then the parts, of which a reader opens one at a time."""

    about: str
    headline: str
    lead: str
    tables: Sequence[Grid]
    folded: Sequence[Grid] = ()  # further tables, which a reader may open
    cautions: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    parts: Sequence[Part] = ()
    picture: Path | None = None
    described: str = ""  # the picture


def front_of(path: Path) -> Front | None:
    """What stands before the runs of a folder; None if it holds a run, or runs, and nothing else."""
    if (path / "onboarding.csv").is_file():
        return _newcomers(path)
    if (path / SITE).is_file():
        return load(AT_SITE)(path)
    if (path / "table.csv").is_file() and (path / "runs").is_dir():
        lines = _lines(path / "table.csv")
        if lines and {"column", "printed", "metric", "measured"} <= lines[0].keys():
            return load(PUBLISHED)(path, lines)
    return None


def tables_beside(path: Path) -> list[Grid]:
    """What a choice or a sweep has found beyond the runs that are shown side by side: all that was tried."""
    if (path / "choice.json").is_file():
        share = RunFolder(path).read_summary().metric.is_share
        return [_tabulate_candidates(json.loads((path / "choice.json").read_text(encoding="utf-8")), share)]
    if (path / "table.md").is_file():
        return of_markdown((path / "table.md").read_text(encoding="utf-8"))
    return []


def _lines(path: Path) -> Lines:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, ValueError) as problem:
        raise UsageError(f"{path} cannot be read: {problem}") from None


# ---- newcomers ----

ALONE, EVERY = "local", "all"


def _newcomers(path: Path) -> Front:
    """A folder of `kinfed onboard --out`: what newcomers have with so many examples, by where their model is from."""
    lines = _lines(path / "onboarding.csv")
    if not lines:
        raise UsageError(f"{path / 'onboarding.csv'} has no newcomer")
    summary = RunFolder(path).read_summary() if RunFolder(path).is_finished else None
    higher = summary is None or summary.metric.higher_is_better
    share = summary is not None and summary.metric.is_share
    method = summary.method if summary is not None else lines[0]["model"]
    names, clients = (list(dict.fromkeys(line[key] for line in lines)) for key in ("model", "client"))
    by_shots: dict[str, set[str]] = {}
    for line in lines:
        by_shots.setdefault(line["examples"], set()).add(line["client"])
    every = {shots for shots, who in by_shots.items() if len(who) < len(clients)}  # as many as each has
    scores: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        shots = EVERY if line["examples"] in every else line["examples"]
        scores.setdefault((line["model"], shots), []).append(float(line["score"]))
    mean = {at: fmean(values) for at, values in scores.items()}
    columns = list(dict.fromkeys(shots for _, shots in mean))
    rows = [[name, *(format_score(mean.get((name, shots)), share) for shots in columns)] for name in names]
    newcomers = [
        [line["client"], line["examples"], line["model"], format_score(float(line["score"]), share), line["whose"]]
        for line in lines
    ]
    metric = "score" if summary is None else f"test {summary.metric.name}{', %' if share else ''}"
    headline, lead = _ahead(mean, columns, method, higher, share)
    source = Path(str((summary.provenance.former or {}).get("run", ""))) if summary is not None else Path()
    headings = ("client", "examples", "model", metric, "whose")
    return Front(
        f"{several(len(clients), 'newcomer')} to a finished run of {method}",
        headline,
        lead,
        [Grid("newcomers", f"Mean {metric} over newcomers, by examples learned from", ("model", *columns), [rows])],
        [Grid("each", "Newcomer by newcomer", headings, [newcomers], text_columns=3)],
        parts=[Part("The run that they joined", [source])] if RunFolder(source).is_finished else (),
        notes=(
            f"{method}: by the method's own rule for a newcomer; local: learning alone from the same examples; tuned: "
            "trained further by the newcomer; best existing: the model of the member that fits its examples best",
        ),
    )


def _ahead(
    mean: Mapping[tuple[str, str], float], columns: Sequence[str], method: str, higher: bool, share: bool
) -> tuple[str, str]:
    """With how many examples newcomers do better by the method than alone, as a headline and its sentences."""
    both = [shots for shots in columns if (method, shots) in mean and (ALONE, shots) in mean]
    if not both:
        return "Nothing says whether joining helped", "No newcomer learned both by the method and alone."
    sign, unit = (1 if higher else -1), " %" if share else ""
    ahead = [shots for shots in both if sign * (mean[method, shots] - mean[ALONE, shots]) > 0]
    head = "Joining helped newcomers" if len(ahead) == len(both) else "Joining helped some newcomers"
    parts, best = list[str](), list[str]()
    for shots in both:
        by_method = f"{format_score(mean[method, shots], share)}{unit} with {shots} examples"
        parts.append(f"{by_method}, {format_score(mean[ALONE, shots], share)}{unit} alone")
        name = max((name for name, at in mean if at == shots), key=lambda name: sign * mean[name, shots])
        if name != method:
            best.append(f"{name} with {shots} ({format_score(mean[name, shots], share)}{unit})")
    lead = f"By {method}, on average: {'; '.join(parts)}."
    if best:
        lead += f" Better still: {', '.join(best)}."
    return head if ahead else "Learning alone did as well for newcomers", lead


def format_score(value: float | None, share: bool, unit: bool = False) -> str:
    """A score on the page, with a unit if it is a share and that is asked for."""
    if value is None or not math.isfinite(value):
        return NONE
    if not share:
        return f"{value:.4g}"
    return f"{100 * value:.1f} %" if unit else f"{100 * value:.1f}"


# ---- real sites ----


def of_sites(folder: RunFolder, summary: Summary) -> list[Grid]:
    """What a run of real sites says of each: rounds used and missed, bytes, and why it was left out."""
    path = folder.path / "status.json"
    if summary.cost.executor != "flower" or not path.is_file():
        return []
    try:
        sites: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["sites"]
        rows = [
            [
                name,
                *(str(site.get(key, "")) for key in ("rounds", "missed")),
                *(quantity(float(site.get(way, 0)), "B") for way in ("down", "up")),
                str(site.get("left_out", "")),
            ]
            for name, site in sites.items()
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        raise UsageError(f"{path} cannot be read ({problem!r:.80}); delete it to do without") from None
    headings = ("site", "rounds\nused", "missed\nin a row", "down", "up", "why it was left out last")
    return [Grid("sites", "The sites", headings, [rows])]


# ---- a choice ----


def _tabulate_candidates(choice: Mapping[str, Any], share: bool) -> Grid:
    """All candidates of a choice, in its own order."""
    rows, times = [], 100 if share else 1

    def write_number(candidate: Mapping[str, Any], key: str, form: str) -> str:
        value = candidate.get(key)
        return "" if value is None else f"{times * value:{'.1f' if share else form}}"

    for candidate in choice["ranking"]:
        gain, low, high = (write_number(candidate, key, ".3g") for key in ("gain", "low", "high"))
        name = f"{candidate['candidate']} (chosen)" if candidate.get("chosen") else candidate["candidate"]
        between = f"{low} to {high}" if low else ""
        rows.append(
            [
                name,
                str(candidate["rounds"]),
                write_number(candidate, "validation", ".4g"),
                gain,
                between,
                candidate.get("problem", ""),
            ]
        )
    score = f"validation\nscore{', %' if share else ''}"
    headings = ("candidate", "rounds", score, "over the better of\nLocal and FedAvg", "95 % interval", "")
    notes = [f"{several(choice['training_rounds'], 'training round')} in all; test examples were used once, at the end"]
    for base, key in (("Local", "keep_own_model"), ("FedAvg", "keep_fedavg_model")):
        if kept := choice.get(key):
            notes.append(f"{several(len(kept), 'client')} {'keeps' if len(kept) == 1 else 'keep'} the model of {base}")
    return Grid("tried", "What was tried", headings, [rows], notes)
