"""Shared by the commands that train: options, the progress bar, the final table."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..core.history import History
from ..core.sharing import Sharing
from ..core.summary import Summary
from ..errors import several
from ..metrics.statistics import is_share
from ..report.grid import quantity
from ..simulation.execution import Execution
from ..simulation.precision import PRECISIONS

FEW = {f"{which}{percent}{what}" for which in ("worst", "best") for percent in (5, 10) for what in ("", "_std")}
BY_CLASS = {"balanced_accuracy": "balanced\naccuracy", "auc": "AUC"}  # columns if a run has them
COUNTS = {f"{metric}_clients" for metric in BY_CLASS}
OWN_COLUMNS = frozenset(
    ["mean", "std", *FEW, "std_seeds", "round", "validation", "pooled", *BY_CLASS, *COUNTS, "r2_clients"]
)
TWENTY = 20  # with fewer clients, 5 % are less than one client
MODELS = {  # the names that methods use for scored models
    "own": "the client's, after local training",
    "mixed": "made for the client, before local training",
    "tuned": "received, then trained locally",
    "received": "the one sent to the client",
    "shared": "the one sent to all clients",
    "adapted": "shared, after a few steps at the client",
    "cluster": "the client's cluster's",
    "generated": "written by the server's network",
    "combined": "the shared base under the client's mixture of heads",
    "both": "the shared model with the client's head added",
    "generic": "the shared model without the client's head",
    "split": "the shared model, which divides features between the shared head and the client's",
}


def place() -> argparse.ArgumentParser:
    """Options for where to train."""
    training = argparse.ArgumentParser(add_help=False)
    training.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("KINFED_DATA"),
        metavar="DIR",
        help="folder of data sets, NAME.npz each (default: $KINFED_DATA)",
    )
    training.add_argument("--device", default="auto", help="where to train: auto, cpu, cuda or cuda:i (default: auto)")
    training.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    return training


def options() -> argparse.ArgumentParser:
    """Options for where and how to run a federation: they change results only by rounding."""
    running = argparse.ArgumentParser(add_help=False, parents=[place()])
    running.add_argument(
        "--executor",
        default="auto",
        choices=["auto", "fused", "loop", "vmap"],
        help="loop: client by client; vmap: clients in batches; fused: in batches without autograd, for dense and "
        "recurrent models under plain SGD; auto: chosen by a rule on model and device (default: auto)",
    )
    running.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="cores to use; with loop each trains one client at a time (default: all)",
    )
    running.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of matrix products and convolutions in local training (default: float32, on a GPU too, where tf32 is "
        "faster)",
    )
    running.add_argument(
        "--checkpoint", type=float, default=10, metavar="SECONDS", help="minimum time between checkpoints (default: 10)"
    )
    return running


def execution(args: argparse.Namespace, bar: "Bar") -> Execution:
    """The options as an Execution that reports to the bar."""
    return replace(unwatched(args), progress=bar.update, planned=bar.plan)


def unwatched(args: argparse.Namespace, workers: int | None = None) -> Execution:
    """The options as an Execution, with this number of workers where they leave it open."""
    return Execution(
        executor=args.executor,
        workers=workers if args.workers is None else args.workers,
        precision=args.precision,
        device=args.device,
        checkpoint_seconds=args.checkpoint,
    )


def data_dir(args: argparse.Namespace) -> Path | None:
    """The folder of data sets, if one is named."""
    return Path(args.data_dir) if args.data_dir else None


def activity_column(width: int, console: Console) -> TextColumn:
    """The current activity, cut off so that `width` characters are left for the rest of a progress bar."""
    column = Column(no_wrap=True, max_width=max(1, console.width - width))
    return TextColumn("{task.description}", markup=False, table_column=column)


class Bar:
    """The live progress bar: rounds, the headline score on validation data, time left."""

    def __init__(self, console: Console, quiet: bool) -> None:
        columns = (BarColumn(30), activity_column(17, console), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._console, self._quiet, self._planned = console, quiet, ""
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
        if sharing.divided and not self._quiet and sharing.plan != self._planned:
            self._planned = sharing.plan
            self._console.print(f"tensors   {sharing.plan}", soft_wrap=True)

    def count(self, done: int, several: int) -> None:
        """Show how many of several parallel runs have ended."""
        self._bar.update(self._task, completed=done, total=several, description=f"{done} of {several} runs")

    def update(self, history: History, rounds: int) -> None:
        """Show a run's progress."""
        status = f"{self._name}round {history.done} of {rounds}"
        if history.rounds:
            metric, name = history.selects, history.headline
            split = "validation" if (name, "validation", metric) in history.scores[-1] else "test"
            status += f", {split} {metric} {history.scores[-1][name, split, metric].nanmean():.3f}"
        self._bar.update(self._task, completed=history.done, total=rounds, description=status)


def show(summary: Summary, args: argparse.Namespace, console: Console, hint: bool = False) -> None:
    """Print the final table on standard error, or JSON on standard output; the verdict comes last.

    With `hint` a run without a verdict ends with how to get one.
    """
    if args.json:
        print(json.dumps(summary.to_dict()))
    if not args.quiet:
        describe(summary, console, hint)


def describe(summary: Summary, console: Console, hint: bool = False) -> None:
    """Print the final table and the verdict on standard error, see `show`."""
    seeds = f"seeds {summary.seeds[0]} to {summary.seeds[-1]}" if summary.seeds else f"seed {summary.seed}"
    console.print(
        f"{summary.method} on {summary.dataset}: {several(summary.clients, 'client')}, "
        f"{several(summary.rounds, 'round')}, {summary.parameters:,} parameters, {seeds}"
    )
    console.print(_scores(summary))
    for line in _notes(summary):
        console.print(line)
    console.print(f"everything is in {summary.out}", soft_wrap=True)
    if summary.verdict is not None:
        console.print(summary.verdict["sentence"])
    elif hint and summary.method != "local":
        console.print("not compared with learning alone, as training that too is not cheap here; to do so:")
        console.print(f"kinfed resume {summary.out} --beside local,fedavg", soft_wrap=True)


def _scores(summary: Summary) -> Table:
    """One row per model: its test scores over clients."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("model")
    share = summary.is_share
    unit = "%" if share else summary.unit
    test = f"test {summary.metric}{f', {unit}' * bool(unit)}"
    extra = {m: heading for m, heading in BY_CLASS.items() if any(m in s for s in summary.scores.values())}
    if extra:  # shorter headings, as there are more
        test = test.replace(" ", "\n", 1)
    few = summary.clients < TWENTY
    spread = ["over clients", *(f"{which} {'client' if few else '5 %'}" for which in ("worst", "best"))]
    headings = [test, *extra.values(), *(h.replace(" ", "\n", 1) if extra else h for h in spread)]
    for column in headings:
        shown.add_column(column, justify="right", vertical="bottom")
    last = "over seeds" if summary.seeds else "best round" if _is_selected(summary) else "last round"
    shown.add_column(last, justify="right")
    for name, s in summary.scores.items():
        mean, std, worst, best, seeds_std = (
            score_text(s.get(key, 0), share) for key in ("mean", "std", "worst5", "best5", "std_seeds")
        )
        mark = " *" if name == summary.chosen and len(summary.scores) > 1 else ""
        more = [score_text(s[metric], is_share(metric)) if metric in s else "" for metric in extra]
        last = f"± {seeds_std}" if summary.seeds else f"{s['round']:g}"
        shown.add_row(name + mark, mean, *more, f"± {std}", worst, best, last)
    return shown


def _is_selected(summary: Summary) -> bool:
    return any("validation" in score for score in summary.scores.values())


def _notes(summary: Summary) -> Iterator[str]:
    """Remarks on the scores, one line each."""
    if len(summary.scores) > 1:
        by = f"chosen by validation {summary.selects.replace('_', ' ').replace('auc', 'AUC')}"
        why = by if _is_selected(summary) else "the first named, as there are no validation data"
        yield f"* {why}: the models that are saved"
        yield "; ".join(f"{name}: {MODELS[name]}" for name in summary.scores if name in MODELS)
    score = summary.scores[summary.chosen]
    known = min((score[count] for count in COUNTS if count in score), default=summary.clients)
    if known < summary.clients:
        clients = f"{plain(known)} of {summary.clients} clients: the others are tested on one class"
        yield f"balanced accuracy and AUC are means of {clients}"
    if "r2_clients" in score:
        clients = f"{plain(score['r2_clients'])} of {summary.clients} clients"
        yield f"r2 is a mean of {clients}: the others' test targets are all the same, so theirs is not defined"
    if others := {k: v for k, v in score.items() if k not in OWN_COLUMNS}:
        values = (f"{key} {plain(value)}{' %' * key.startswith('mape')}" for key, value in others.items())
        yield f"{summary.chosen}: {', '.join(values)}"
    yield from (f"! {warning}" for warning in summary.warnings)
    if summary.origin is not None:
        yield _went_on(summary.origin)
    if summary.always and summary.selects == summary.metric:
        yield "  training.class_weights=balanced and select_by=balanced_accuracy may help"
    if summary.leaking:
        yield f"LEAKING: {summary.caution}; these scores are not a fair estimate"
    if summary.attack is not None:
        yield from _attacked(summary, summary.attack)
    relation = summary.relation
    if relation and {"auroc", "within", "between"} <= relation.keys() and relation["within"] != relation["between"]:
        yield (
            f"{relation['origin']} relation: finds the hidden groups with AUROC {relation['auroc']:.3f}, "
            f"mean weight {relation['within']:.4f} within and {relation['between']:.4f} between groups"
        )
    precision = f" in {summary.precision}" if summary.precision not in (None, "float32") else ""
    reason = f" ({summary.reason})" if summary.reason is not None else ""
    yield (
        f"{summary.seconds:.1f} s with executor {summary.executor}{precision}{reason}, "
        f"{quantity(summary.bytes_up, 'B')} up, {quantity(summary.bytes_down, 'B')} down"
    )
    if summary.sharing is not None:  # none without clients
        yield _shared(summary.sharing)


def _went_on(origin: dict[str, Any]) -> str:
    """From which run this one has gone on, and what it has taken over."""
    scores = (
        "and scores are taken over" if origin["scores"] else "are taken over, scores begin anew with the other data"
    )
    joined = ", ".join(origin["joined"][:8]) + ", ..." * (len(origin["joined"]) > 8)
    who = f"; {several(len(origin['joined']), 'client')} joined: {joined}" if joined else ""
    return (
        f"goes on after {several(origin['rounds'], 'round')} of {origin['run']}: server, private states {scores}{who}"
    )


def _attacked(summary: Summary, attack: dict[str, Any]) -> Iterator[str]:
    """The attackers, and the scores of the others."""
    share, named = summary.is_share, attack.get("attackers")
    unit = " %" * share
    attackers = "other clients with every seed"
    if named is not None:
        attackers = f"client{'s' * (len(named) > 1)} {', '.join(named)}" if named else "nobody"
    yield f"attack '{attack['name']}' by a share of {attack['share']:g}: {attackers}"
    for name, score in summary.honest_scores.items():
        line = f"  honest clients, {name}: {score_text(score['mean'], share)}{unit} ± {score_text(score['std'], share)}"
        if "success" in score:
            line += f"; the backdoor works on {100 * score['success']:.1f} % of their triggered test examples"
        yield line


def score_text(score: float, share: bool) -> str:
    """A score as text, in percent if it is a share, as in pictures and comparisons."""
    return f"{100 * score:.2f}" if share else plain(score)


def plain(value: float) -> str:
    """Four digits, and more where whole numbers have them."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _shared(sharing: dict[str, Any]) -> str:
    """Which tensors are shared, personal and frozen, and the bytes of a round."""
    if not sharing["bytes_down"] + sharing["bytes_up"]:
        return "nothing travels: every client trains a whole model of its own"
    lines = []
    for part in ("shared", "personal", "frozen"):
        tensors, numbers = sharing[part]["tensors"], sharing[part]["numbers"]
        if tensors or part == "shared":
            lines.append(f"{part}: {tensors} tensor{'s' * (tensors != 1)} of {numbers:,} numbers")
    down, up = (quantity(sharing[key], "B") for key in ("bytes_down", "bytes_up"))
    return f"{'; '.join(lines)}; a round takes {down} down and {up} up"
