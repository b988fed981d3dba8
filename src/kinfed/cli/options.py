"""Options that several commands have."""

import argparse
import os
from pathlib import Path

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
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("KINFED_DATA"),
        metavar="DIR",
        help="folder with the data sets, as NAME.npz (default: $KINFED_DATA)",
    )
    return parser


def place() -> argparse.ArgumentParser:
    """Options for where to train."""
    parser = argparse.ArgumentParser(add_help=False, parents=[data_folder()])
    parser.add_argument("--device", default="auto", help="where to train: auto, cpu, cuda or cuda:i (default: auto)")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar and no table")
    return parser


def detail() -> argparse.ArgumentParser:
    """The option to be told more of how a run was carried out."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--verbose", action="store_true", help="also print the executor, which tensors travel, seconds and bytes"
    )
    return parser


def columns() -> argparse.ArgumentParser:
    """Options that say what the columns of a table are."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group(
        "a table of yours (FILE.csv, FILE.parquet, a folder of such files, postgresql://USER@HOST/NAME or sqlite:///FILE)"
    )
    group.add_argument(
        "--client", metavar="COLUMN", default="", help="the column that names the client a row belongs to"
    )
    group.add_argument("--target", metavar="COLUMN", default="", help="the column to predict, or several, such as a,b")
    group.add_argument("--ignore", metavar="COLUMN,...", default="", help="columns that are not inputs (default: none)")
    group.add_argument("--time", metavar="COLUMN", default="", help="the column of times: rows are split in time order")
    group.add_argument(
        "--past", metavar="N", default="", help="with --time: rows are readings of series, the last N are the input"
    )
    group.add_argument("--horizon", metavar="N", default="", help="with --past: readings to forecast (default: 1)")
    group.add_argument(
        "--future", metavar="COLUMN,...", default="", help="with --past: inputs that are known ahead (default: none)"
    )
    group.add_argument(
        "--static", metavar="COLUMN,...", default="", help="with --past: inputs that never change within a client"
    )
    group.add_argument(
        "--query", metavar="FILE.sql", default="", help="for a database: the SELECT to read, as a file or as text"
    )
    return parser


def add_settings(
    parser: argparse.ArgumentParser, what: str = "settings to change, such as training.epochs=5", how: bool = True
) -> None:
    """Add the settings of an experiment, and of `how` it is carried out if the command does that."""
    help = f"{what}; {CARRIED_OUT}" if how else what
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)
    parser.set_defaults(carries_out=how)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the option to be told of the cost, and train nothing."""
    what = "train nothing: time a few seconds of it, and say how much time and memory all of it takes"
    parser.add_argument("--dry-run", action="store_true", help=what)


def add_how(parser: argparse.ArgumentParser) -> None:
    """Add settings of how to carry out what is there already, and no others."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="how.key=value", help=CARRIED_OUT)
    parser.set_defaults(only_how=True, carries_out=True)
