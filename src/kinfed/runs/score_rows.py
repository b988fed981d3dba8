"""Scores as rows of one table, in memory as in history.csv: a score of one client's model after one round."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..core.history import History

if TYPE_CHECKING:
    from polars import DataFrame

TEXTS = ("client", "model", "split", "metric")


def make_rows(history: History) -> "DataFrame":
    """The rows of a history: round (from 1), client, model, split, metric and value, which is NaN without a score."""
    import polars

    frames = [
        polars.DataFrame({"client": history.names, "value": values.double().numpy()}).select(
            polars.lit(round + 1, polars.Int64).alias("round"),
            "client",
            *(polars.lit(text).alias(name) for name, text in zip(TEXTS[1:], key, strict=True)),
            "value",
        )
        for round, scores in zip(history.rounds, history.scores, strict=True)
        for key, values in scores.items()
    ]
    return polars.concat(frames)


def read_rows(path: Path) -> "DataFrame":
    """The same rows of a run's history.csv; raises OSError for a file that is not there, ValueError for half of one."""
    import polars

    schema = {"round": polars.Int64, **dict.fromkeys(TEXTS, polars.String), "value": polars.Float64}
    try:
        rows = polars.read_csv(path, columns=[*schema], schema_overrides=schema, empty_string_is_null=False)
    except polars.exceptions.PolarsError as problem:
        raise ValueError(str(problem)) from None
    if rows["value"].null_count():
        raise ValueError("it ends within a line")
    return rows


def add_seed(rows: "DataFrame", seed: int) -> "DataFrame":
    """Rows with a column for the seed of their run, before the others."""
    import polars

    return rows.select(polars.lit(seed, polars.Int64).alias("seed"), *rows.columns)
