"""Pictures in folders: ROOT/CLIENT/CLASS/*.png, each client's in a folder of its own."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.field_checks import CountOrZero, Settings
from ...core.tasks import Classification
from ...errors import UsageError, several
from ..dataset import Dataset
from ..tables.frame import natural
from .pictures import SUFFIXES, pixels


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Settings):
    """Pictures of your own in folders ROOT/CLIENT/CLASS, as .png, .jpg or other files of the usual kinds."""

    path: str  # ROOT, as seen from the working directory
    size: CountOrZero = 0  # the height and width that all are scaled to; 0: they are of one size already
    grey: bool | None = None  # one channel in place of three; left out: if no picture has colours

    def __call__(self, data_dir: Path | None = None) -> Dataset:
        """x: [n, channels, height, width] float32 in [-1, 1] and y: [n], the places of classes in order of their names.

        It is not in the data directory. Raises UsageError that names the folder or file that cannot be used.
        """
        root = Path(self.path)
        if not root.is_dir():
            raise UsageError(f"there is no folder {root} (in {Path.cwd()}); it holds CLIENT/CLASS/*.png")
        files = [file for client in _folders(root) for kind in _folders(client) for file in _pictures(kind)]
        if not files:
            raise UsageError(f"{root} holds no pictures; they belong in {root}/CLIENT/CLASS/*.png")
        self._check(root, {file.parts[len(root.parts)] for file in files})
        clients = sorted({file.parent.parent.name for file in files}, key=natural)
        classes = sorted({file.parent.name for file in files}, key=natural)
        if len(classes) < 2:
            raise UsageError(f"{root}: all pictures are of the class '{classes[0]}', so there is nothing to learn")
        who, what = ({name: i for i, name in enumerate(names)} for names in (clients, classes))
        return Dataset(
            pixels([str(file) for file in files], files, self.size, self.grey),
            torch.tensor([what[file.parent.name] for file in files]),
            Classification(len(classes)),
            tuple(classes),
            torch.tensor([who[file.parent.parent.name] for file in files]),
            owners=tuple(clients),
            stratify=True,
        )

    def _check(self, root: Path, used: set[str]) -> None:
        """Raise UsageError for a client without pictures, and for pictures outside a class; warn of other files."""
        if empty := [folder.name for folder in _folders(root) if folder.name not in used]:
            raise UsageError(
                f"{root / empty[0]} holds no pictures; they belong in {root / empty[0]}/CLASS/*.png, or remove it"
            )
        depth, others = len(root.parts) + 3, []
        for place, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (Path(place) / name for name in names if not name.startswith(".")):
                if file.suffix.lower() not in SUFFIXES:
                    others.append(file)
                elif len(file.parts) != depth:
                    raise UsageError(f"{file} is not in a folder CLIENT/CLASS of {root}; move it to one")
        if others:
            warnings.warn(f"{root}: left out {several(len(others), 'other file')}, such as {others[0]}", stacklevel=4)


def _folders(place: Path) -> list[Path]:
    """The folders in a folder, in order of their names."""
    inside = [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(inside, key=lambda path: natural(path.name))


def _pictures(place: Path) -> list[Path]:
    """The pictures in a folder, in order of their names."""
    inside = [path for path in place.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()]
    return sorted((path for path in inside if not path.name.startswith(".")), key=lambda path: natural(path.name))
