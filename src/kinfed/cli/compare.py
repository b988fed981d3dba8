"""kinfed compare."""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UsageError
from ..files import make_folder, replacing, to_json
from ..plots.ranks import critical_difference
from ..report.explain.relation_difference import TOP, diff, grids as tables_of_relations
from ..report.tables import runs_table, text_table
from ..report.tables.compare import Comparison, compare
from ..report.tables.confusion import confusions
from ..report.tables.run_statistics import ranking
from ..report.tables.statistics_tables import grids
from ..report.tables.target import tabulate_target
from ..report.tables.text_table import Grid
from ..verdict.statistics import not_apart
from .console import Literal, show
from .options import count

SELECTED = "selected"
# Files that are written for some comparisons only.
EARLIER = re.compile(r"(means|pairs|training|target)[A-Z]?\.csv|ranks\.(csv|png)|confusion(-\d+)?\.csv")


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    beside = commands.add_parser(
        "compare",
        parents=[common],
        description="Show the test scores of finished runs side by side, and what each is worth over learning alone. "
        "Runs of the same data and splits are compared with each other; a folder with several seeds is one run.",
        epilog="examples: kinfed compare runs/local runs/fedavg runs/fedaghn --statistics --target 0.8 --out tables; "
        "kinfed compare runs/fedamp runs/fedaghn --relations; kinfed compare my-run my-run --relations --rounds 1,20",
    )
    beside.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="folders of finished runs")
    beside.add_argument(
        "--statistics",
        action="store_true",
        help="intervals, paired tests against Local, FedAvg-FT and the best rival, scores before and after local "
        "training, and mean ranks over several data sets",
    )
    beside.add_argument(
        "--confusion",
        action="store_true",
        help="for classification: which classes are taken for which, on all clients' test examples together",
    )
    beside.add_argument("--client", metavar="NAME", help="with --confusion: for this client only")
    beside.add_argument(
        "--target",
        type=float,
        metavar="SCORE",
        help="rounds, bytes, examples and seconds until the mean test score is this good; an accuracy is a share: 0.8",
    )
    beside.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the tables there as Markdown, CSV and LaTeX, and a picture of mean ranks over several data sets",
    )
    relations = beside.add_argument_group("who learns from whom")
    relations.add_argument(
        "--relations",
        action="store_true",
        help="compare the relations of two runs of the same clients instead, or of one run in two rounds: edges gained "
        "and lost, weights by client and layer, how much of each client's row is unchanged, whether it collapsed",
    )
    relations.add_argument(
        "--rounds",
        default=f"{SELECTED},{SELECTED}",
        metavar="A,B",
        help="a round of each run (default: the one that validation selected)",
    )
    relations.add_argument(
        "--top", type=count, metavar="N", help="how many clients and edges to list (default: 10; all with --json)"
    )
    beside.set_defaults(command=_compare)


def _compare(args: argparse.Namespace, console: Console) -> None:
    if args.client is not None and not args.confusion:
        raise UsageError("--client goes with --confusion")
    if args.relations:
        return _compare_relations(args)
    comparison = compare(args.folders)
    with_statistics = args.statistics or (args.out is not None and args.target is None and not args.confusion)
    tables = grids(comparison) if with_statistics else []
    tables += tabulate_target(comparison, args.target) if args.target is not None else []
    tables += confusions(comparison, args.client) if args.confusion else []
    if args.json:
        more = {"tables": {table.name: table.to_dict() for table in tables}} if tables else {}
        print(to_json(comparison.to_dict() | more))
    else:
        out = Literal()
        for part in runs_table.terminal(comparison):
            out.print(part, soft_wrap=True)
        show(tables, out)
    if args.out is not None:
        write_tables(comparison, tables, args.out)
        console.print(f"tables are in {args.out}: statistics.md, statistics.tex, and a CSV file each", soft_wrap=True)


def _compare_relations(args: argparse.Namespace) -> None:
    if len(args.folders) != 2:
        raise UsageError(
            f"--relations compares two runs, or one with itself in two --rounds; got {len(args.folders)}: "
            "kinfed compare RUN RUN --relations"
        )
    before, after = args.folders
    difference = diff(before, after, read_rounds(args.rounds))
    if args.json:
        print(to_json(difference.to_dict(args.top or 0)))
        return
    show(tables_of_relations(difference, args.top or TOP), Literal(), soft_wrap=True)


def read_rounds(text: str) -> Sequence[int | None]:
    """Two rounds, from 1; None stands for the selected one."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part == SELECTED or (part.isdecimal() and int(part) > 0) for part in parts):
        raise UsageError(f"--rounds are two rounds, counted from 1, such as 1,20 or 1,{SELECTED}; got '{text}'")
    return [None if part == SELECTED else int(part) for part in parts]


def write_tables(comparison: Comparison, tables: list[Grid], out: Path) -> None:
    """Write statistics as Markdown, CSV and LaTeX, and a picture of mean ranks where there are several sets.

    Those of an earlier comparison in the folder are removed, as they would be taken for these.
    """
    make_folder(out)
    files = {f"{table.name}.csv": text_table.as_csv(table) for table in tables}
    files["statistics.md"] = "\n".join(map(text_table.markdown, tables))
    files["statistics.tex"] = "\n".join(map(text_table.latex, tables))
    for path in list(out.iterdir()) if (out / "statistics.md").exists() else []:
        if EARLIER.fullmatch(path.name) and path.name not in files:
            path.unlink()
    for name, text in files.items():
        with replacing(out / name) as part:
            part.write_text(text, encoding="utf-8")
    by_rank = ranking(comparison)
    if by_rank is not None and math.isfinite(by_rank.ranks.critical):
        groups = not_apart(by_rank.ranks.mean, by_rank.ranks.critical)
        critical_difference(by_rank.names, by_rank.ranks.mean, by_rank.ranks.critical, groups, out / "ranks.png")
