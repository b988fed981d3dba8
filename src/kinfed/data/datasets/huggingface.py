"""Hugging Face data sets on disk, as `datasets` saves them (`save_to_disk`): Arrow files, read without that library."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core.field_checks import CountOrZero
from ...core.tasks import Classification
from ...errors import UsageError, reason_of
from ..dataset import Dataset
from ..tables.frame import Frame, natural
from ..tables.open_table import frame_of
from ..tables.table_reader import TableReader
from ..tables.words import name_of
from .pictures import Source, pixels

if TYPE_CHECKING:
    import polars

INFO, STATE, SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"


@dataclass(frozen=True, kw_only=True)
class HuggingFace(TableReader):
    """A folder that `save_to_disk` wrote: pictures and their labels, or a table; all its splits are taken together.

    With a column of pictures these are the inputs, and `target` a column of labels; otherwise the columns are those of
    a table, see `csv`. Pictures without a `client` are dealt by federation.partition.
    """

    path: str  # the folder, as seen from the working directory
    client: str | Sequence[str] = ""  # column that says whose an example is, or several that do together
    size: CountOrZero = 0  # the height and width that pictures are scaled to; 0: they are of one size already
    grey: bool | None = None  # one channel in place of three; left out: if no picture has colours

    def __call__(self, data_dir: Path | None = None) -> Dataset:
        """The data set; it is not in the data directory. Raises UsageError that names what cannot be used."""
        table, features = _read_splits(Path(self.path))
        wanted = [self.client_column, *self.targets] if self.client else self.targets
        frame_of(table, self.path).with_joined(self.client_column).need(wanted)
        kinds = {name: kind for name, kind in features.items() if isinstance(kind, dict)}  # others are of lists
        labels = {name: kind.get("names") for name, kind in kinds.items() if kind.get("_type") == "ClassLabel"}
        names = {
            name: [name_of(str(label).strip()) for label in classes] for name, classes in labels.items() if classes
        }
        table = _name_classes(self.path, table, names)
        pictures = [name for name, kind in kinds.items() if kind.get("_type") == "Image"]
        if not pictures and not self.client:
            raise UsageError(
                f"{self.path} has no pictures, so its rows are a table: say whose each is by client=COLUMN; known: "
                f"{', '.join(sorted(set(table.columns) - {*self.targets}))}"
            )
        if not pictures:
            return self.read_frame(frame_of(table, self.path))
        if len(pictures) > 1:
            raise UsageError(f"{self.path} has several columns of pictures: {', '.join(pictures)}; save it with one")
        return self._of_pictures(table, pictures[0], names)

    def _of_pictures(self, table: "polars.DataFrame", column: str, names: dict[str, list[str]]) -> Dataset:
        frame = Frame(self.path, table.drop(column), lambda row: f"{self.path}, row {row + 1}")
        frame = frame.with_joined(self.client_column)
        target = self.targets[0]
        labels = frame[target].text()
        classes = [*dict.fromkeys(names.get(target, ()))] or sorted(labels.names, key=natural)
        if len(self.targets) > 1 or len(classes) < 2:
            raise UsageError(
                f"{self.path}: pictures need one target of two classes or more; got {', '.join(self.targets)}"
            )
        who, owners = None, tuple[str, ...]()
        if self.client:
            held = frame[self.client_column].text()
            owners = tuple(sorted(held.names, key=natural))
            who = torch.from_numpy(held.find_places(owners))
        sources = [self._source(row, cell) for row, cell in enumerate(table[column].to_list())]
        called = [f"{self.path}, row {row + 1}, column '{column}'" for row in range(len(sources))]
        x = pixels(called, sources, self.size, self.grey)
        y = torch.from_numpy(labels.find_places(classes))
        return Dataset(x, y, Classification(len(classes)), tuple(classes), who, owners=owners, stratify=True)

    def _source(self, row: int, cell: Any) -> Source:
        """A picture's bytes, or its file."""
        if isinstance(cell, dict) and cell.get("bytes"):
            return bytes(cell["bytes"])
        file = Path(cell["path"]) if isinstance(cell, dict) and cell.get("path") else None
        if file is None or not file.is_file():
            where = f"its file {file} is not there" if file else "it has none"
            raise UsageError(
                f"{self.path}, row {row + 1}: the picture cannot be read: {where}; save the data set again"
            )
        return file


def _read_splits(root: Path) -> "tuple[polars.DataFrame, dict[str, Any]]":
    """The rows of all splits, one below the other, and what is known of each column."""
    import polars

    if not root.is_dir():
        raise UsageError(f"there is no folder {root} (in {Path.cwd()}); it is what save_to_disk wrote")
    folders = [root]
    if (root / SPLITS).is_file():
        folders = [_inside(root, str(name), SPLITS) for name in _json(root / SPLITS, "splits", list)]
    elif not (root / STATE).is_file():
        raise UsageError(f"{root} is not a Hugging Face data set on disk: it has no {STATE} and no {SPLITS}")
    tables, features = [], []
    for folder in folders:
        features.append(_json(folder / INFO, "features", dict))
        if features[-1] != features[0]:
            raise UsageError(f"{folder} has other columns than {folders[0]}; save one split by itself")
        for entry in _json(folder / STATE, "_data_files", list):
            file = _inside(folder, str(entry["filename"]), STATE)
            try:
                tables.append(polars.read_ipc_stream(file))
            except FileNotFoundError:
                raise UsageError(
                    f"{folder} lacks {file.name}, which its {STATE} names; copy the whole folder"
                ) from None
            except Exception as problem:  # whatever the reader raises for a damaged file
                raise UsageError(f"{file} cannot be read ({reason_of(problem)}); copy the whole folder again") from None
    table = polars.concat(tables) if tables else polars.DataFrame()
    if not table.height:
        raise UsageError(f"{root} has no rows")
    return table, features[0]


def _inside(folder: Path, name: str, source: str) -> Path:
    """What a file of the folder names; raises UsageError unless that is in the folder."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise UsageError(
            f"{folder / source} names '{name}', which is not in this folder, so nothing is read; such a set is damaged "
            "or not to be trusted"
        )
    return folder / name


def _json(file: Path, key: str, kind: type) -> Any:
    """What a file of JSON has under a key; raises UsageError if it has nothing of this kind."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")).get(key)
    except OSError as problem:
        raise UsageError(f"cannot read {file}: {problem.strerror}") from None
    except (ValueError, AttributeError):
        raise UsageError(f"{file} is not what save_to_disk writes; copy the whole folder again") from None
    if not isinstance(content, kind):
        raise UsageError(f"{file} has no '{key}'; save the data set again")
    return content


def _name_classes(path: str, table: "polars.DataFrame", names: dict[str, list[str]]) -> "polars.DataFrame":
    """The table with the names of classes in place of their numbers; -1, which stands for none, is missing."""
    import polars

    for column, classes in names.items():
        numbers = table[column]
        bad = ((numbers < -1) | (numbers >= len(classes))).fill_null(False)
        if bad.any():
            at = int(bad.to_numpy().argmax())
            raise UsageError(
                f"{path}, row {at + 1}, column '{column}': {numbers[at]} is none of its {len(classes)} classes"
            )
        text = numbers.replace_strict(dict(enumerate(classes)), default=None, return_dtype=polars.String)
        table = table.with_columns(text.alias(column))
    return table
