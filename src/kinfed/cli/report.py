"""kinfed report."""

import argparse
import os
import sys
import webbrowser
from pathlib import Path
from typing import Any

from rich.console import Console

from ..files import to_json


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    report = commands.add_parser(
        "report",
        parents=[common],
        description="Write one HTML page, which needs no network, about finished runs: the verdict, methods side by "
        "side, who learns from whom, every client, curves and settings.",
        epilog="examples: kinfed report my-run; kinfed report runs/fedaghn runs/local -o both.html; "
        "kinfed report choice --open",
    )
    report.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folder of a run, a choice, a sweep or a column of a published table; several are shown side by side",
    )
    report.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="file to write (default: report.html in the first folder)"
    )
    report.add_argument("--open", action="store_true", help="also open it in a browser, where there is a display")
    report.set_defaults(command=_report)


def _report(args: argparse.Namespace, console: Console) -> None:
    out = write_page(args.folders, args.out)
    if args.json:
        print(to_json({"out": str(out)}))
    else:
        console.print(f"the report is in {out}", soft_wrap=True)
    if args.open:
        show_page(out, console)


def write_page(folders: list[Path], out: Path | None = None) -> Path:
    """Write the page on these runs, by default into the first one's folder, and return its path."""
    from ..report.page.html_page import write
    from ..runs.openers import experiment_at  # it imports PyTorch

    place = folders[0] / "report.html" if out is None else out
    write([experiment_at(folder) or folder for folder in folders], place)
    return place


def show_page(path: Path, console: Console) -> None:
    """Open a page in a browser; where that cannot be, say so."""
    display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not (display and webbrowser.open(path.resolve().as_uri())):
        why = "no browser could be started" if display else "there is no display"
        console.print(f"it was not opened, as {why} here: open {path} in a browser", soft_wrap=True)
