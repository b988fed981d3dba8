"""kinfed predict."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ..errors import UsageError
from ..files import make_folder, replacing, to_json

Unknown = Literal["error", "skip", "mean"]


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    predict = commands.add_parser(
        "predict",
        parents=[common],
        description="Predict new rows with the models of a finished run. They are preprocessed as the training rows "
        "were: scales, categories, missing cells, dates, windows of series. The predictions are CSV on standard "
        "output, one line per row: which client's model made it, and by which method; then the class and the "
        "probability of each class, or numbers in the target's own unit.",
        epilog="examples: kinfed predict my-run --client Ulm new.csv > out.csv; kinfed predict my-run new.csv -o "
        "out.parquet",
    )
    predict.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, a choice or a site")
    predict.add_argument(
        "rows", type=Path, metavar="FILE", help="new rows: .csv, .parquet or a folder of these; or .npz with x"
    )
    predict.add_argument(
        "--client",
        metavar="NAME",
        help="whose model to use (default: for each row that of the client that the row names)",
    )
    add_unknown(predict, "skip")
    add_interval(predict)
    predict.add_argument("-o", "--out", type=Path, metavar="FILE", help="write to this .csv or .parquet file instead")
    predict.set_defaults(command=_predict)


def _predict(args: argparse.Namespace, console: Console) -> None:
    from ..runs.run import client_index  # it imports PyTorch

    if args.out is not None and args.out.suffix.lower() not in (".csv", ".parquet"):
        raise UsageError(f"--out: answers are written as .csv or .parquet; got '{args.out.name}'")
    if args.out is not None and args.out.resolve() == args.rows.resolve():
        raise UsageError(f"--out: {args.out} is the file of the rows themselves; name another")
    predictor, _ = open_predictor(args.run, args.unknown, args.interval)
    if not of_all(args.client, predictor.names):
        predictor = predictor.of_client(predictor.names[client_index(predictor.names, args.client)])
    table = answers(predictor, args.rows)
    if args.out is not None:
        make_folder(args.out.parent)
        with replacing(args.out) as part:
            table.write_csv(part) if args.out.suffix.lower() == ".csv" else table.write_parquet(part)
        if args.json:
            print(to_json({"out": str(args.out), "rows": len(table)}))
    elif args.json:
        print(to_json(table.to_dicts(), default=str))
    else:
        sys.stdout.flush()
        table.write_csv(getattr(sys.stdout, "buffer", sys.stdout))  # that of a notebook has no buffer


def add_unknown(parser: argparse.ArgumentParser, default: Unknown) -> None:
    """The option that says what becomes of rows of clients that a run does not know."""
    parser.add_argument(
        "--unknown",
        choices=["error", "skip", "mean"],
        default=default,
        help="for rows of an unknown client, or of none: stop with an error; skip them with a warning, if other rows "
        f"remain; or answer by the mean of all clients' models (default: {default})",
    )


def add_interval(parser: argparse.ArgumentParser) -> None:
    """The option that asks for bounds beside answers that are numbers."""
    parser.add_argument(
        "--interval",
        metavar="PERCENT",
        type=float,
        help="also predict bounds for each number, which hold so many per cent of the true values, such as 90",
    )


def of_all(client: str | None, names: Sequence[str]) -> bool:
    """Whether all clients are asked for: none by name, or "all" where that is nobody's name."""
    return client is None or (client == "all" and client not in names)


def open_predictor(path: Path, unknown: Unknown = "error", percent: float | None = None) -> tuple[Any, str]:
    """The predictor of a finished run in a folder, or of a site's experiment, and its method; see `add_unknown`.

    With `percent` it gives bounds, between which so many of truths lie.
    """
    from ..runs.openers import experiment_at, predictor_at
    from ..runs.prediction_intervals import read_percent
    from ..runs.run import Run  # it imports PyTorch

    interval = None if percent is None else read_percent(percent, "--interval")
    if (experiment := experiment_at(path)) is None:
        saved = Run.open(path)
        return saved.predictor(unknown=unknown, interval=interval), saved.summary.method
    predictor = predictor_at(experiment, interval)
    return predictor, predictor.source(predictor.names[0]).method


def answers(predictor: Any, path: Path) -> Any:
    """A frame of answers to the rows in a file."""
    from ..data.datasets import directory
    from ..data.tables.open_table import open_table

    if path.suffix.lower() != ".npz":
        return predictor(open_table(path))
    if not path.is_file():
        raise UsageError(f"there is no file {path} (in {Path.cwd()})")
    arrays = directory.read(path.parent, path.stem, ("x",), ("client",))[1]
    if arrays["x"].dtype.kind not in "fiu":
        raise UsageError(f"{path}: x must be numbers; got {arrays['x'].dtype}")
    names = arrays["client"].astype(str).tolist() if "client" in arrays and predictor.client is None else None
    return predictor.arrays(arrays["x"], names)
