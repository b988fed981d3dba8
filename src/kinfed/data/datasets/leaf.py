"""LEAF's JSON from local files (Caldas et al., 2018): `users` and `user_data`, every user a client."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.field_checks import CountOrZero, Settings
from ...core.tasks import Classification
from ...errors import UsageError, several, some
from ..dataset import Dataset
from ..tables.frame import natural

IMAGE = 784  # numbers of an image of FEMNIST, 28 by 28
PARTS = 1000  # steps of time that a client's text has

User = tuple[list[Any], list[Any], Path]  # examples, answers, and the file that has them first


@dataclass(frozen=True, kw_only=True)
class Leaf(Settings):
    """Numbers of LEAF's users and their labels, such as FEMNIST's images [n, 1, 28, 28], from JSON files."""

    path: str  # a file .json, or a folder that holds some, perhaps in train/ and test/, which are taken together
    least: CountOrZero = 10  # examples that a user must have

    def __call__(self, data_dir: Path | None = None) -> Dataset:
        """x: [n, ...] as the file has it and y: [n], the places of labels; it is not in the data directory.

        Raises UsageError that names the file and the user of what cannot be used.
        """
        users = _users(Path(self.path), self.least)
        for name, (x, _, file) in users.items():
            if isinstance(x[0], str):
                raise UsageError(f"{file}, user '{name}': these are texts; use the data set leaf_text")
        try:
            arrays = [np.asarray(x, np.float32) for x, _, _ in users.values()]
            shapes = {array.shape[1:] for array in arrays}
        except (TypeError, ValueError, OverflowError):
            shapes = set()
        if len(shapes) != 1 or not all(np.isfinite(array).all() for array in arrays):
            raise UsageError(f"{self.path}: the examples (x) must be lists of finite numbers, all of one length")
        examples = torch.from_numpy(np.concatenate(arrays))
        if examples.shape[1:] == (IMAGE,):
            examples = examples.view(-1, 1, 28, 28)
        classes = sorted({str(answer) for _, y, _ in users.values() for answer in y}, key=natural)
        return _dataset(users, examples, classes, self.path)


@dataclass(frozen=True, kw_only=True)
class LeafText(Leaf):
    """Text of LEAF's users and the character that follows, as Shakespeare's, from JSON files; for the model `text`."""

    def __call__(self, data_dir: Path | None = None) -> Dataset:
        """x: [n, length] the places of characters among all that occur, y: [n] that of the next one.

        Each user's examples are split in their order in the file. It is not in the data directory. Raises UsageError
        that names the file and the user of what cannot be used.
        """
        users = _users(Path(self.path), self.least)
        length = 0
        for name, (x, y, file) in users.items():
            for text, following in zip(x, y, strict=True):
                if not isinstance(text, str) or not isinstance(following, str) or len(following) != 1:
                    raise UsageError(f"{file}, user '{name}': x must be texts and y the character that follows each")
                length = length or len(text)
                if len(text) != length or length < 2:
                    lengths = f"{len(text)}, and {length}"
                    raise UsageError(f"{file}, user '{name}': texts must have one length of 2 or more; got {lengths}")
        classes = sorted(set().union(*("".join((*x, *y)) for x, y, _ in users.values())))
        written = "".join(text for x, _, _ in users.values() for text in x)
        both = ("".join(part).encode("utf-32-le", "surrogatepass") for part in (classes, written))
        letters, codes = (np.frombuffer(part, np.uint32) for part in both)
        places = torch.from_numpy(np.searchsorted(letters, codes)).view(-1, length).to(torch.get_default_dtype())
        parts = [torch.arange(len(x)) * PARTS // len(x) for x, _, _ in users.values()]
        return _dataset(users, places, classes, self.path, torch.cat(parts))


def _dataset(users: dict[str, User], x: Tensor, classes: list[str], path: str, time: Tensor | None = None) -> Dataset:
    """The data set whose labels are the users' answers."""
    if len(classes) < 2:
        raise UsageError(f"{path}: all labels are '{classes[0]}', so there is nothing to learn")
    index = {name: i for i, name in enumerate(classes)}
    counts = torch.tensor([len(y) for _, y, _ in users.values()])
    return Dataset(
        x,
        torch.tensor([index[str(answer)] for _, y, _ in users.values() for answer in y]),
        Classification(len(classes)),
        tuple(classes),
        torch.arange(len(users)).repeat_interleave(counts),
        owners=tuple(users),
        time=time,
        stratify=time is None,
    )


def _users(path: Path, least: int) -> dict[str, User]:
    """The users of all files, by name, in order; raises UsageError for what is not LEAF's."""
    users: dict[str, User] = {}
    for file in _files(path):
        for name, x, y in _of_file(file):
            held = users.setdefault(name, ([], [], file))
            held[0].extend(x)
            held[1].extend(y)
    kept = {name: user for name, user in users.items() if len(user[0]) >= max(least, 1)}
    if len(kept) < 2:
        raise UsageError(
            f"{path}: {some(len(kept), len(users), 'user')} {several(max(least, 1), 'example')} or more, but at "
            "least two clients are needed; lower least"
        )
    if out := [name for name in users if name not in kept]:
        problem = f"{some(len(out), len(users), 'user')} fewer than {least} examples (federation.dataset.least)"
        warnings.warn(
            f"{path}: {problem}, such as '{out[0]}', and {'was' if len(out) == 1 else 'were'} left out", stacklevel=4
        )
    return {name: kept[name] for name in sorted(kept, key=natural)}


def _files(path: Path) -> list[Path]:
    """A file, or the files of a folder or of those for training and testing in it, those for the test last.

    LEAF's scripts leave copies of the same examples beside these. Raises UsageError unless it is clear which to take.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no file or folder {path} (in {Path.cwd()})")
    parts = [path / part for part in ("train", "test") if any((path / part).glob("*.json"))]
    files = [file for part in parts or [path] for file in sorted(part.rglob("*.json"))]
    if not files:
        raise UsageError(f"{path} holds no .json; LEAF's scripts write them to data/train and data/test")
    if len(places := sorted({str(file.parent) for file in files})) > max(len(parts), 1):
        raise UsageError(
            f"{path} holds .json in several folders, as {places[0]} and {places[1]}, which may have the same examples; "
            "name the one that holds train and test"
        )
    return files


def _of_file(file: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """The name, the examples and the answers of every user of a file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(f"cannot read {file}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{file} is not valid JSON ({problem!s:.80}); copy it again") from None
    data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(data, dict) or not isinstance(content.get("users"), list):
        raise UsageError(f"{file} is not LEAF's: it needs 'users', a list, and 'user_data', an object with theirs")
    for name in map(str, content["users"]):
        user = data.get(name)
        x, y = (user.get(key) for key in "xy") if isinstance(user, dict) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise UsageError(f"{file}, user '{name}': user_data must have x and y, lists of one length")
        if not all(isinstance(answer, str | int) for answer in y):
            raise UsageError(f"{file}, user '{name}': labels (y) must be whole numbers or text")
        yield name, x, y
