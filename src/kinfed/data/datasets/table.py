"""Your own table: a file, a folder or a database, one row an example or a reading, with a column that says whose."""

from dataclasses import dataclass
from pathlib import Path

from ..dataset import Dataset
from ..tables.databases import check_address, is_address
from ..tables.table_reader import TableReader


@dataclass(frozen=True, kw_only=True)
class Table(TableReader):
    """Your own file of rows with a client and a target column, perhaps a time and a graph.

    `path` and `edges` are as seen from the working directory.
    """

    # the file, .csv or .parquet, a folder of such files, or a database: sqlite:///FILE, postgresql://HOST/NAME
    path: str
    query: str = ""  # what to read in a database: SQL, or a file FILE.sql

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_address(self.path):
            check_address(self.path)  # here, before it is written into any config

    def __call__(self, data_dir: Path | None = None) -> Dataset:
        """The data set; it is not in the data directory."""
        return self.read(self.path, self.query)
