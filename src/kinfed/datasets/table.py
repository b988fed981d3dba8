"""Your own table: CSV or Parquet, one row an example or a reading, with a column that says whose it is."""

from collections.abc import Sequence
from pathlib import Path

from ..data.dataset import Dataset
from ..data.tables import read


def table(
    data_dir: Path | None = None,
    *,
    path: str,
    client: str,
    target: str | Sequence[str],
    features: Sequence[str] = (),
    time: str = "",
    past: int = 0,
    horizon: int = 1,
    horizons: Sequence[int] = (),
    edges: str = "",
    weights: str = "weight",
    distances: str = "distance",
    directed: bool = False,
    sigma: float | None = None,
    threshold: float = 0.1,
    drop_missing: bool = False,
    least: int = 0,
) -> Dataset:
    """Your own file of rows with a client and a target column, perhaps a time and a graph.

    `path` and `edges` are as seen from the working directory; see `kinfed.data.tables.read` for the settings.
    """
    return read(
        path,
        client=client,
        target=target,
        features=features,
        time=time,
        past=past,
        horizon=horizon,
        horizons=horizons,
        edges=edges,
        weights=weights,
        distances=distances,
        directed=directed,
        sigma=sigma,
        threshold=threshold,
        drop_missing=drop_missing,
        least=least,
    )
