"""Shared by the commands that train: how to, the progress bar, the final table."""

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..core.history import KINDS, History
from ..core.sharing import Sharing
from ..core.summary import Summary, describe_privacy, find_extremes
from ..errors import list_names, list_seeds, several
from ..files import to_json
from ..report.tables import runs_table
from ..report.tables.text_table import draw, quantity, score_text
from ..runs.config import experiment
from ..runs.config.parts import call
from ..runs.run_folder import RunFolder
from ..simulation.execution import Execution
from ..verdict.statistics import is_share
from ..verdict.verdict import ALONE, ONE, plain

FEW = {f"{which}{percent}{what}" for which in ("worst", "best") for percent in (5, 10) for what in ("", "_std")}
BY_CLASS = {"balanced_accuracy": "balanced\naccuracy", "auc": "AUC"}  # columns if a run has them
COUNTS = {f"{metric}_clients" for metric in BY_CLASS}
OWN_COLUMNS = frozenset(
    ["mean", "std", *FEW, "std_seeds", "round", "validation", "pooled", *BY_CLASS, *COUNTS, "r2_clients"]
)
TWENTY = 20  # with fewer clients, 5 % are less than one client
NO_PROGRESS = Execution()
SILENCE = 60.0  # seconds after which a log is told how far a run is


def execution(args: argparse.Namespace, bar: "Bar | None" = None, workers: int | None = None) -> Execution:
    """The options as an Execution that reports to the bar, with this number of workers where they leave it open."""
    requested = experiment.override({}, args.how).get("how", {})
    reporting: dict[str, Any] = {"track": (), "progress": NO_PROGRESS.progress, "planned": NO_PROGRESS.planned}
    if bar is not None:
        reporting = {"track": tuple(getattr(args, "track", ())), "progress": bar.update, "planned": bar.plan}
    return call(Execution, requested, "how", default=Execution(workers=workers), device=args.device, **reporting)[0]


def activity_column(width: int, console: Console) -> TextColumn:
    """The current activity, cut off so that `width` characters are left for the rest of a progress bar."""
    column = Column(no_wrap=True, max_width=max(1, console.width - width))
    return TextColumn("{task.description}", markup=False, table_column=column)


class Bar:
    """The live progress bar: rounds, the headline score on validation data, time left; in a log, a line a minute."""

    def __init__(self, console: Console, quiet: bool, verbose: bool = False) -> None:
        columns = (BarColumn(30), activity_column(17, console), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._console, self._planned = console, ""
        self._tells_plan = verbose and not quiet
        self._logs = not (quiet or console.is_terminal)
        self._spoke = time.monotonic()
        self._task = self._bar.add_task("loading data and model", total=None)
        self._name = ""

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, name: str) -> None:
        """Show which of several runs comes next."""
        self._name = f"{name}, "
        self._bar.reset(self._task, total=None, description=f"{self._name}loading data and model")

    def plan(self, sharing: Sharing) -> None:
        """Say which tensors travel, stay and never move, unless all travel; once for several runs that are alike."""
        if sharing.is_divided and self._tells_plan and sharing.plan != self._planned:
            self._planned = sharing.plan
            self._console.print(f"tensors   {sharing.plan}", soft_wrap=True)

    def count(self, done: int, several: int) -> None:
        """Show how many of several parallel runs have ended."""
        self._bar.update(self._task, completed=done, total=several, description=f"{done} of {several} runs")
        self._log(f"{done} of {several} runs have ended")

    def update(self, history: History, rounds: int) -> None:
        """Show a run's progress."""
        status = f"{self._name}round {history.cost.done} of {rounds}"
        if history.rounds:
            split, metric, mean = history.tell_last()
            status += f", {split} {metric} {mean:.3f}"
        self._bar.update(self._task, completed=history.cost.done, total=rounds, description=status)
        self._log(status)

    def _log(self, status: str) -> None:
        """Where nobody sees a bar, print a status that comes a minute after the last."""
        if self._logs and time.monotonic() - self._spoke >= SILENCE:
            self._spoke = time.monotonic()
            self._console.print(status, soft_wrap=True)


def show(summary: Summary, args: argparse.Namespace, console: Console, hint: bool = False) -> None:
    """Print the final table on standard error, or JSON on standard output; the verdict comes last.

    With `hint` a run without a verdict ends with how to get one.
    """
    if args.json:
        print(to_json(summary.to_dict()))
    if not args.quiet:
        describe(summary, console, hint, args.verbose)


def describe(summary: Summary, console: Console, hint: bool = False, verbose: bool = False) -> None:
    """Print the final table and the verdict on standard error, see `show`."""
    console.print(
        f"{summary.method} on {summary.data.dataset}: {several(summary.data.clients, 'client')}, "
        f"{several(summary.rounds, 'round')}, {summary.cost.parameters:,} parameters, {_seeds(summary)}"
    )
    if summary.sites is not None and summary.privacy is not None:
        console.print("scores stayed at the sites, which show their own (node.log)")
    else:
        console.print(_scores(summary))
    for line in (*_notes(summary), *(_carried_out(summary) if verbose else ())):
        console.print(line)
    if summary.baselines:
        metric = summary.metric
        console.print(runs_table.baselines(summary.baselines, metric.name, metric.unit), crop=False)
    console.print(f"everything is in {summary.out}", soft_wrap=True)
    if summary.verdict is not None:
        for line in (summary.verdict["sentence"], *summary.verdict.get("notes", [])):
            console.print(line)
    elif hint and summary.method not in ("local", "standard"):
        console.print("not compared with learning alone, as training that too is not cheap here; to do so:")
        console.print(f"kinfed resume {summary.out} --beside local,fedavg", soft_wrap=True)


def _seeds(summary: Summary) -> str:
    """The seeds of a run: all those of a range, or some where others have failed."""
    seeds = summary.seeds
    if len(seeds) > 1 and seeds == [*range(seeds[0], seeds[-1] + 1)]:
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return list_seeds(seeds)


def _scores(summary: Summary) -> Table:
    """One row per model: its test scores over clients; then those of learning alone and of one model for all."""
    unit = summary.metric.unit
    test = f"test {summary.metric.name}, {unit}" if unit else f"test {summary.metric.name}"
    scored = set[str]().union(*summary.scores.values())
    extra = {metric: heading for metric, heading in BY_CLASS.items() if metric in scored}
    compared = _read_references(summary)
    few = summary.data.clients < TWENTY
    spread = ["over clients", *(f"{which} {'client' if few else '5 %'}" for which in ("worst", "best"))]
    last = "best round" if _is_selected(summary) else "last round"
    if summary.by_client is None:
        last = "over seeds"
    if extra or compared:  # shorter headings, as there are more or longer names
        test, last = (heading.replace(" ", "\n", 1) for heading in (test, last))
    if extra:
        spread = [heading.replace(" ", "\n", 1) for heading in spread]
    headings = ["model", test, *extra.values(), *spread, last]
    marks = {summary.selection.chosen: " *"} if len(summary.scores) > 1 else {}
    rows = [[name + marks.get(name, ""), *_cells(summary, scores, extra)] for name, scores in summary.scores.items()]
    rows += [[name, *_cells(reference, reference.chosen_scores, extra)] for name, reference in compared.items()]
    return draw(headings, rows, vertical="bottom")


def _cells(summary: Summary, scores: dict[str, float], extra: Iterable[str]) -> list[str]:
    """A model's test scores as a row of the table; `extra` are the metrics that have a column too."""
    keys = ("mean", "std", "worst5", "best5", "std_seeds")
    mean, std, worst, best, over_seeds = (score_text(scores.get(key, 0), summary.metric.is_share) for key in keys)
    more = [score_text(scores[metric], is_share(metric)) if metric in scores else "" for metric in extra]
    last = f"± {over_seeds}" if summary.by_client is None else f"{scores['round']:g}"
    return [mean, *more, f"± {std}", worst, best, last]


def _read_references(summary: Summary) -> dict[str, Summary]:
    """The runs of Local and FedAvg that the verdict compares a run with, as the verdict calls them."""
    if summary.verdict is None:
        return {}
    both = {ALONE: "local", ONE: "fedavg"}
    references = {name: RunFolder(Path(summary.out)).reference(method) for name, method in both.items()}
    return {name: folder.read_summary() for name, folder in references.items() if folder.is_finished}


def _is_selected(summary: Summary) -> bool:
    return summary.privacy is None and any("validation" in score for score in summary.scores.values())


def _notes(summary: Summary) -> Iterator[str]:
    """Remarks on the scores, one line each."""
    if len(summary.scores) > 1:
        by = f"the best by validation {summary.selection.by.replace('_', ' ').replace('auc', 'AUC')}"
        blind = "there are no validation data" if summary.privacy is None else "scores choose nothing under privacy"
        why = by if _is_selected(summary) else f"the first named, as {blind}"
        yield f"* saved: {why}"
        yield "; ".join(f"{name}: {KINDS[name]}" for name in summary.scores if name in KINDS)
    score = summary.chosen_scores
    count = summary.data.clients
    fewest = min((score[key] for key in COUNTS if key in score), default=count)
    if fewest < count:
        clients = f"{plain(fewest)} of {count} clients: the others are tested on one class"
        yield f"balanced accuracy and AUC are means of {clients}"
    if "r2_clients" in score:
        clients = f"{plain(score['r2_clients'])} of {count} clients"
        yield f"r2 is a mean of {clients}: the others are tested on one row or equal targets, so it is not defined"
    if others := {k: v for k, v in score.items() if k not in OWN_COLUMNS}:
        values = (f"{key} {plain(value)}{' %' if key.startswith('mape') else ''}" for key, value in others.items())
        yield f"{summary.selection.chosen}: {', '.join(values)}"
    if summary.privacy is not None:
        yield f"privacy: {describe_privacy(summary)}"
    if summary.provenance.refit:
        yield "the scores are from before the saved models were trained once more, on all rows"
    yield from (f"! {warning}" for warning in summary.warnings)
    extremes = {name: find_extremes(reference) for name, reference in _read_references(summary).items()}
    yield from (f"! {name}: {sentence}" for name, sentence in extremes.items() if sentence)
    if summary.provenance.former is not None:
        yield _went_on(summary.provenance.former)
    balanced = summary.privacy is None  # else class weights may not follow from rows
    if balanced and summary.recall and summary.recall.always and summary.selection.by in (summary.metric.name, "loss"):
        yield "  for rare classes, training.class_weights=balanced and select_by=balanced_accuracy may help"
    if summary.selection.caution:
        yield f"LEAKING: {summary.selection.caution}; these scores are not a fair estimate"
    if summary.attack is not None:
        yield from _describe_attack(summary, summary.attack)
    relation = summary.relation
    if relation and {"auroc", "within", "between"} <= relation.keys() and relation["within"] != relation["between"]:
        yield (
            f"{relation['origin']} relation: finds the hidden groups with AUROC {relation['auroc']:.3f}, "
            f"mean weight {relation['within']:.4f} within and {relation['between']:.4f} between groups"
        )


def _carried_out(summary: Summary) -> Iterator[str]:
    """How the run was carried out: seconds, executor, bytes, tensors; one line each."""
    cost = summary.cost
    precision = f" in {cost.precision}" if cost.precision not in (None, "float32") else ""
    reason = f" ({cost.reason})" if cost.reason is not None else ""
    yield (
        f"{cost.seconds:.1f} s with executor {cost.executor}{precision}{reason}, "
        f"{quantity(cost.bytes_up, 'B')} up, {quantity(cost.bytes_down, 'B')} down"
    )
    if summary.sharing is not None:  # none without clients
        yield _describe_sharing(summary.sharing)


def _went_on(origin: dict[str, Any]) -> str:
    """From which run this one has gone on, and what it has taken over."""
    scores = "and scores are taken over" if origin["scores"] else "are taken over, and scores start again"
    joined = list_names(origin["joined"])
    who = f"; {several(len(origin['joined']), 'client')} joined: {joined}" if joined else ""
    return (
        f"goes on after {several(origin['rounds'], 'round')} of {origin['run']}: server, private states {scores}{who}"
    )


def _describe_attack(summary: Summary, attack: dict[str, Any]) -> Iterator[str]:
    """The attackers, and the scores of the others."""
    share, named = summary.metric.is_share, attack.get("attackers")
    unit = " %" if share else ""
    attackers = "other clients with every seed"
    if named is not None:
        who = "clients" if len(named) > 1 else "client"
        attackers = f"{who} {', '.join(named)}" if named else "nobody"
    yield f"attack '{attack['name']}' by a share of {attack['share']:g}: {attackers}"
    for name, score in summary.honest_scores.items():
        line = f"  honest clients, {name}: {score_text(score['mean'], share)}{unit} ± {score_text(score['std'], share)}"
        if "success" in score:
            line += f"; the backdoor works on {100 * score['success']:.1f} % of their triggered test examples"
        yield line


def _describe_sharing(sharing: dict[str, Any]) -> str:
    """Which tensors are shared, personal and frozen, and the bytes of a round."""
    if not sharing["bytes_down"] + sharing["bytes_up"]:
        return "nothing travels: every client trains a whole model of its own"
    lines = []
    for part in ("shared", "personal", "frozen"):
        tensors, numbers = sharing[part]["tensors"], sharing[part]["numbers"]
        if tensors or part == "shared":
            lines.append(f"{part}: {several(tensors, 'tensor')} of {numbers:,} numbers")
    down, up = (quantity(sharing[key], "B") for key in ("bytes_down", "bytes_up"))
    return f"{'; '.join(lines)}; a round takes {down} down and {up} up"
