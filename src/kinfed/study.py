"""Study: the runs that an analysis or a table of a paper is made of, each in a folder of its own and done once."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from . import config, runs
from .config import Table
from .runs import Machine

Row = dict[str, str | int | float]


@dataclass(frozen=True)
class Study:
    """An experiment's raw config, the machine, and the folder that runs, tables and pictures go to."""

    table: Table
    machine: Machine
    out: Path

    def run(self, name: str, overrides: Sequence[str] = ()) -> Path:
        """The folder, out/runs/NAME, of the experiment with overrides: run, taken up, or left as it is if finished.

        Raises UsageError if the folder holds another experiment than the one asked for.
        """
        table = config.override(deepcopy(self.table), list(overrides))
        return runs.once(config.resolve(table), self.out / "runs" / name, self.machine)


@dataclass
class Finding:
    """What an analysis found: a table, one dict a row, all with the same keys; and its pictures."""

    title: str
    rows: list[Row]
    pictures: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader must know, one line each
