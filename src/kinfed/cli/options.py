"""Options that several commands have."""

import argparse
import os
from pathlib import Path
from typing import Any

REPEATED: dict[str, Any] = {"action": "append", "default": []}  # of an option that may be given several times
MORE = "where it runs, and what is printed"  # a group of options, which helps have last
HOW = "how."  # settings of how a run is carried out: fields of kinfed.Execution
CARRIED_OUT = (
    "how.executor (loop: client by client; vmap: clients in batches; fused: in batches without autograd; auto), "
    "how.workers (cores), how.precision (float32, tf32, bf16) and how.checkpoint_seconds say how it is carried out"
)


def count(text: str) -> int:
    """A whole number from 1 on, as an option's `type`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1; got '{text}'")
    return number


def data_folder() -> argparse.ArgumentParser:
    """The option for where the data sets are."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument_group(MORE).add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("KINFED_DATA"),
        metavar="DIR",
        help="folder with NAME.npz files (default: $KINFED_DATA)",
    )
    return parser


def place() -> argparse.ArgumentParser:
    """Options for where to train."""
    parser = argparse.ArgumentParser(add_help=False, parents=[data_folder()])
    group = parser.add_argument_group(MORE)
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:i (default: auto)")
    group.add_argument("--quiet", action="store_true", help="show no progress bar and no table")
    return parser


def detail() -> argparse.ArgumentParser:
    """The option to be told more of how a run was carried out."""
    parser = argparse.ArgumentParser(add_help=False)
    what = "also print executor, seconds, bytes and tensors"
    parser.add_argument_group(MORE).add_argument("--verbose", action="store_true", help=what)
    return parser


def columns() -> argparse.ArgumentParser:
    """Options that say what the columns of a table are."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group(
        "a table of yours",
        "FILE.csv, FILE.parquet, a folder of these, sqlite:///FILE or postgresql://USER@HOST/NAME. Settings such as "
        "past=12 horizon=3 future=A,B forecast series. decimal=, is for numbers such as 1,5 (docs/data.md).",
    )
    group.add_argument(
        "--client", metavar="COLUMN", default="", help="which client a row belongs to; several columns as a,b"
    )
    group.add_argument("--target", metavar="COLUMN", default="", help="what to predict; several columns as a,b")
    group.add_argument("--ignore", metavar="COLUMN,...", default="", help="columns that are not inputs")
    group.add_argument("--time", metavar="COLUMN", default="", help="the time of a row; the latest rows are the test")
    what = "a person or thing that has several rows; these stay in one part of the split"
    group.add_argument("--group", metavar="COLUMN", default="", help=what)
    group.add_argument("--weight", metavar="COLUMN", default="", help="how many rows each row counts for")
    group.add_argument("--query", metavar="FILE.sql", default="", help="the SELECT for a database, as a file or text")
    return parser


def add_settings(parser: argparse.ArgumentParser, what: str, how: bool = True) -> None:
    """Add the settings of an experiment, and of `how` it is carried out if the command does that."""
    help = f"{what}; how.KEY=value, such as how.workers=2, says how it is computed" if how else what
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)
    parser.set_defaults(carries_out=how)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the option to be told of the cost, and train nothing."""
    what = "train nothing; estimate the time and memory"
    parser.add_argument("--dry-run", action="store_true", help=what)


def add_how(parser: argparse.ArgumentParser) -> None:
    """Add settings of how to carry out what is there already, and no others."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="how.key=value", help=CARRIED_OUT)
    parser.set_defaults(only_how=True, carries_out=True)
