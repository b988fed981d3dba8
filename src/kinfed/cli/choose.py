"""kinfed choose."""

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..core.summary import Summary
from ..data.federation import Federation
from ..errors import UsageError, several
from ..files import to_json
from ..report.tables.text_table import draw, score_text
from ..runs.config import plugins
from ..search.budget import DRAWS
from ..search.choice_folder import Chosen, Request, choose_in
from ..search.choose import CLOSE, LEFT_OUT, TRIED, WITH_GRAPH
from ..search.successive_halving import Entry
from ..search.sweep import parse
from ..simulation import distributed
from ..verdict.statistics import is_share
from ..verdict.verdict import plain
from . import table_options
from .estimate import candidates, dry_run
from .options import add_dry_run, add_settings, columns, detail, place
from .training import Bar, describe, execution

SHOWN = 10  # candidates in the table


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    choosing = commands.add_parser(
        "choose",
        parents=[place(), detail(), columns(), common],
        description="Find the method and the learning rate that suit your clients: candidates are compared on "
        "validation examples, and the worst are dropped at a quarter and half of the rounds. The winner replaces Local "
        "and FedAvg only if it is clearly better. Test examples are used once, at the end. The same command with the "
        "same --out continues after an interruption.",
        epilog="examples: kinfed choose my-run/config.toml --budget 5m --out choice; "
        "kinfed choose shops.csv --client shop --target buys",
    )
    what = "a config, whose method is ignored, or a table of yours"
    choosing.add_argument("source", metavar="FILE.toml|FILE.csv", help=what)
    what = (
        "settings to change; seeds=3 trains each candidate three times, with other examples for validation each time; "
        "methods.NAME.KEY=a,b tries both values"
    )
    add_settings(choosing, what)
    choosing.add_argument(
        "--budget",
        metavar="ROUNDS|TIME",
        help="the most training rounds of all candidates together, or a time such as 5m (default: nine times the "
        "rounds of one run, and what solving linear models takes)",
    )
    choosing.add_argument(
        "--method",
        metavar="A,B",
        default="",
        help=f"candidates (default: {','.join(TRIED)}, and {','.join(WITH_GRAPH)} where the graph is known)",
    )
    usual = "as many as there are cores where they are small, otherwise 1"
    choosing.add_argument("--jobs", type=int, metavar="N", help=f"candidates in parallel (default: {usual})")
    choosing.add_argument("--out", type=Path, metavar="DIR", help="the folder of the choice (default: choices/TIME)")
    add_dry_run(choosing)
    choosing.set_defaults(command=_choose)


def _choose(args: argparse.Namespace, console: Console) -> None:
    methods = tuple(name for name in args.method.split(",") if name)
    grid = parse([override for override in args.overrides if override.startswith("methods.")])
    grid = {key: values for key, values in grid.items() if len(values) > 1}
    for key in grid:
        if key.split(".")[1] not in map(plugins.short_name, methods or TRIED + WITH_GRAPH):
            raise UsageError(f"{key} is a setting of a method that is no candidate; name it with --method")
    args.overrides = [override for override in args.overrides if override.partition("=")[0] not in grid]
    request = Request(
        table=table_options.read(args.source, args),
        out=args.out or Path("choices") / time.strftime("%Y-%m-%d-%H%M%S"),
        data_dir=args.data_dir,
        budget=args.budget,
        methods=methods,
        jobs=args.jobs,
        grid=grid,
        **table_options.door(args),
    )
    choose_for(request, args, console)


def choose_for(
    request: Request, args: argparse.Namespace, console: Console, federation: Federation | None = None
) -> None:
    """Choose, showing which candidates are left and what is chosen; or say what choosing would take."""
    if args.dry_run:
        request.check()
        arena = request.arena(execution(args), federation)
        return dry_run(candidates(request, arena), args, console, request.jobs or 1, federation=arena.federation)
    with distributed.group(), Bar(console, args.quiet) as bar:
        remaining = ""

        def on_rung(rung: int, left: Any) -> None:
            nonlocal remaining
            remaining = f"{len(left)} candidates left"
            if not args.quiet and rung:
                console.print(f"candidates left: {'; '.join(candidate.name for candidate in left)}", soft_wrap=True)

        def on_begin(entry: Entry) -> None:
            bar.begin(f"{remaining}: {entry.candidate.name}")

        how = replace(execution(args), progress=bar.update)  # parts that stay at clients are told of the winner alone
        chosen = choose_in(request, how, on_rung, on_begin, federation)
    _show_choice(chosen, args, console)


def _show_choice(chosen: Chosen, args: argparse.Namespace, console: Console) -> None:
    """Print the ranking, the winner's scores and the verdict on standard error, or JSON on standard output."""
    choice, summary, earlier = chosen
    if args.json:
        print(to_json(choice))
    if args.quiet:
        return
    if earlier:
        console.print(f"chosen earlier, read from {choice['out']}:", soft_wrap=True)
    console.print(_ranking(choice, summary))
    for line in _notes(choice, summary):
        console.print(line, soft_wrap=True)
    console.print()
    describe(summary, console, verbose=args.verbose)
    console.print(f"to train the winner again: kinfed run {choice['out']}/best.toml --out DIR", soft_wrap=True)


def _ranking(choice: dict[str, Any], summary: Summary) -> Table:
    metric, sign, share = _selected_by(summary)
    rows = []
    for row in [row for row in choice["ranking"] if "problem" not in row][:SHOWN]:
        name = f"{row['candidate']} *" if row["chosen"] else row["candidate"]
        gain = ""
        if "gain" in row:
            low, high = (row["low"], row["high"])
            between = "" if low is None else f" ({_format_signed(low, share)} to {_format_signed(high, share)})"
            gain = f"{_format_signed(row['gain'], share)}{between}"
        rows.append([name, f"{row['rounds']}", score_text(sign * row["validation"], share), gain])
    score = f"validation\n{metric}, %" if share else f"validation\n{metric}"
    return draw(["candidate", "rounds", score, "gain over the better\nof Local and FedAvg"], rows, vertical="bottom")


def _selected_by(summary: Summary) -> tuple[str, int, bool]:
    """What candidates are compared by, 1 if higher is better, else -1, and whether it is a share."""
    metric, sign = summary.selection.by, 1 if summary.selection.higher_is_better else -1
    return metric, sign, summary.metric.is_share if metric == summary.metric.name else is_share(metric)


def _format_signed(value: float, share: bool) -> str:
    return f"{100 * value:+.1f}" if share else plain(value, "+z", 3)


def _explain_draws(ranking: Sequence[dict[str, Any]], summary: Summary) -> Iterator[str]:
    """Why a solved model was chosen although others have better validation scores."""
    scored = [row for row in ranking if "validation" in row]
    chosen = next(row for row in scored if row["chosen"])
    if "validation_of_draws" in chosen and chosen["validation"] < max(row["validation"] for row in scored):
        metric, sign, share = _selected_by(summary)
        drawn = [row["validation_of_draws"] for row in scored if "validation_of_draws" in row]
        mine, best = (score_text(sign * value, share) for value in (chosen["validation_of_draws"], max(drawn)))
        draws = f"on {DRAWS} draws of validation rows, which decide between solved models"
        yield f"{draws}, its {metric} is {mine}, the best {best}"
        if mine != best:
            yield f"of those at most {100 * CLOSE:g} % behind the best, the simplest is chosen"


def _notes(choice: dict[str, Any], summary: Summary) -> Iterator[str]:
    """Remarks, one line each."""
    more = max(0, sum("problem" not in row for row in choice["ranking"]) - SHOWN)
    refit = choice.get("refit_rounds")
    again = f", and {refit:,} more to train the saved models on all rows" if refit else ""
    took = f"{choice['training_rounds']:,} of at most {choice['budget']:,} training rounds{again}"
    yield f"* chosen on validation examples; the choice took {took}"
    yield from _explain_draws(choice["ranking"], summary)
    if more > 0:
        yield f"choice.json lists {several(more, 'more candidate')}"
    problems: dict[str, list[str]] = {}
    for row in choice["ranking"]:
        if "problem" in row:
            problems.setdefault(re.sub(r" at clients? .*", "", row["problem"]), []).append(row["candidate"])
    for problem, names in problems.items():
        if problem == LEFT_OUT:
            yield f"the budget left out {several(len(names), 'candidate')}; a larger --budget admits more"
        else:
            yield f"! {'; '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}: {problem}"
    for key, kept in (("keep_own_model", "its own model"), ("keep_fedavg_model", "FedAvg's")):
        if names := choice[key]:
            yield f"validation prefers {kept} for {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
