"""The program: what all commands share, from its arguments to the exit code."""

import argparse
import os
import re
import sys
import traceback
import warnings
from typing import Any, NoReturn

from .. import __version__
from ..errors import explain, short
from ..interrupts import heard
from . import analyse, compare, data, estimate, flower, reference, reproduce, run, sweep
from . import list as shelves
from .console import literal

COMMANDS = (run, reproduce, estimate, sweep, analyse, compare, reference, flower, data, shelves)


class _Parser(argparse.ArgumentParser):
    """One line for what it cannot take, as for all other errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kinfed: {short(message)}; {self.prog} --help lists the options\n")


def execute(arguments: list[str] | None) -> int:
    """Run a command; returns the exit code, see `kinfed.cli.main`."""
    parser = _parser()
    asked, rest = parser.parse_known_args(arguments)
    behind = [word for word in rest if "=" in word and not word.startswith("-") and hasattr(asked, "overrides")]
    if len(behind) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if word not in behind)}")
    if behind:  # settings that stand behind an option
        asked.overrides = [*asked.overrides, *behind]
    console = literal(stderr=True)
    said = set()

    def warn(message: Warning | str, *_: Any, **__: Any) -> None:
        kind = re.sub(r"[-\d.]+", "", str(message))  # it may come every round, with other numbers
        if kind not in said:
            said.add(kind)
            print(f"kinfed: warning: {message}", file=sys.stderr)

    warnings.showwarning = warn
    try:
        with heard():
            asked.command(asked, console)
        return 0
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, Exception) as problem:
        code, text = explain(problem)
        if asked.debug:
            traceback.print_exc()
        print(f"kinfed: {text}".replace("\n", " "), file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    common.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser = _Parser(
        prog="kinfed", description="Graph-guided personalised federated learning: every client learns from its kin."
    )
    parser.add_argument("--version", action="version", version=f"kinfed {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands, common)
    return parser
