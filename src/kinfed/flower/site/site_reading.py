"""How a site's operator wants its file read: which columns, under which names, and what may be told of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...core.settings import CountOrZero
from ...data.tables.formats import FORMATS, FormatSettings
from ...errors import RunError, UsageError
from ...files import replacing

NAMES = 1000  # categories of a column whose names leave a site, unless its operator says otherwise


@dataclass(frozen=True)
class Reading(FormatSettings):
    """The settings of `kinfed flower node` that say how its file is read.

    With `time` the rows are split in time order. With `past`, too, they are readings of one series, of which
    examples are windows: `past` readings are the input, the next `horizon` the target. Then all other columns are
    covariates, known until the last reading, or, of those in `future`, also in the steps that are to be forecast.
    """

    target: str = "y"  # the column to predict, by the name that the sites agreed on
    columns: Mapping[str, str] = field(default_factory=dict)  # names that the sites agreed on, by those in the file
    ignore: Sequence[str] = ()  # columns that are no inputs
    categories: CountOrZero = NAMES  # of a column of text, how many names may leave the site: the most frequent ones
    time: str = ""  # the column of times
    past: CountOrZero = 0  # readings in
    horizon: CountOrZero = 0  # readings out
    future: Sequence[str] = ()  # columns of a series that are known ahead
    static: Sequence[str] = ()  # columns of a series that are the same in all rows
    client: str = ""  # the column that names the clients of a gateway
    few_rows: bool = False  # whether gradients of few rows may leave the site, see `Disclosure`

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.past) != bool(self.horizon) or (self.past and not self.time):
            raise UsageError(
                "a series needs --time COLUMN, --past READINGS and --horizon READINGS; give all three, or --time alone "
                "for rows that are examples and split in time order, or none"
            )

        if (self.future or self.static) and not self.past:
            raise UsageError("--future and --static are for a series; give --time, --past and --horizon, too")
        if both := sorted({*self.future, *self.static} & {*self.ignore}) or sorted({*self.future} & {*self.static}):
            raise UsageError(f"column '{both[0]}' is in two of --future, --static and --ignore; leave it in one")

    def write(self, path: Path) -> None:
        """Write the settings to a file, which `read` reads."""
        with replacing(path) as part:
            part.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Reading":
        """The settings in a file; raises RunError if it is not what `write` wrote."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as problem:
            raise RunError(f"{path} cannot be read ({problem}); start the node again") from None


def formats_of(pairs: Sequence[str]) -> dict[str, Any]:
    """The settings of formats in "decimal=,", "dates=%d.%m.%Y" and the like; raises UsageError for anything else."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name not in FORMATS or not equals:
            raise UsageError(f"--format is {', '.join(FORMATS)} and a value, such as decimal=,; got '{pair}'")
        if name in ("decimal", "thousands"):
            found[name] = value
        else:
            found[name] = [*found.get(name, []), value]
    return found


def names_of(pairs: Sequence[str]) -> dict[str, str]:
    """{theirs: ours} of "theirs=ours"; raises UsageError for anything else."""
    result: dict[str, str] = {}
    for pair in pairs:
        own, equals, name = pair.rpartition("=")
        if not (equals and own and name) or own in result:
            raise UsageError(f"--column is THEIRS=OURS, each column once, such as --column Alter=age; got '{pair}'")
        result[own] = name
    return result
