"""Downloads of files, checked against known checksums, and continued where an earlier one broke off."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ....errors import RunError, UsageError

Progress = Callable[[str, int, int], None]  # a file's name, bytes so far, bytes in all (0: unknown)

BLOCK = 1 << 18  # bytes at a time
PATIENCE = 30  # seconds without an answer


class Source(NamedTuple):
    """A file's address, and its checksum as `md5:...` or `sha256:...` where one has been published."""

    url: str
    checksum: str | None = None

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def fetch(source: Source, folder: Path, progress: Progress = lambda name, done, total: None) -> Path:
    """The file in `folder`: what is there already if its checksum is right, downloaded otherwise.

    Where a download breaks off, what has arrived is kept beside it, and the next call goes on from there if there is a
    checksum to prove the result. KINFED_MIRROR is the address of a mirror that has it as NAME/FILE, NAME being
    that of `folder`. Raises RunError, in one line, for no network, a missing file, another checksum, and a full disk.
    """
    import pooch  # here, as it would add to every start
    import requests

    mirror = os.environ.get("KINFED_MIRROR", "").rstrip("/")
    if mirror and not mirror.startswith(("http://", "https://")):
        raise UsageError(f"KINFED_MIRROR must be an address, http://... or https://...; got '{mirror}'")
    url = f"{mirror}/{folder.name}/{source.name}" if mirror else source.url
    part = folder / f"{source.name}.part"
    pooch.get_logger().setLevel(logging.ERROR)

    def download(url: str, into: str, _: object) -> None:
        have = part.stat().st_size if source.checksum and part.exists() else 0
        extra = {"Range": f"bytes={have}-"} if have else {}
        with requests.get(url, headers=extra, stream=True, timeout=PATIENCE) as answer:
            if have and answer.status_code == 416:  # all of it was there, or it is another file
                part.unlink()
                return download(url, into, _)
            answer.raise_for_status()
            have = have if answer.status_code == 206 else 0
            total = have + int(answer.headers.get("Content-Length", 0))
            with part.open("ab" if have else "wb") as file:
                for block in answer.iter_content(BLOCK):
                    file.write(block)
                    have += len(block)
                    progress(source.name, have, total)
        shutil.move(part, into)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(pooch.retrieve(url, source.checksum, source.name, folder, downloader=download))
    except requests.HTTPError as problem:
        status = str(problem).partition(" for url")[0]  # such as: 404 Client Error: Not Found
        raise RunError(
            f"{url} answers {status}; set KINFED_MIRROR to another "
            f"address that has {source.name}, or put the file into a folder and use --from"
        ) from None
    except requests.RequestException as problem:
        resumable = source.checksum and part.exists()
        kept = f"{part.stat().st_size:,} bytes are kept: run it again to continue" if resumable else "try again later"
        raise RunError(
            f"{source.name} cannot be fetched from {url.partition('://')[2].partition('/')[0]} "
            f"({_reason(problem)}); {kept}, or put the file into a folder and use --from"
        ) from None
    except ValueError:  # pooch: another checksum; nothing is kept
        raise RunError(
            f"{url} is not the expected file: its checksum differs from {source.checksum}; it was deleted; try again, "
            "or set KINFED_MIRROR to another address"
        ) from None
    except OSError as problem:
        raise RunError(f"cannot write {folder / source.name}: {problem.strerror or problem}") from None


def check_original(source: Source, folder: Path) -> Path:
    """The file in the user's folder; raises RunError if it is missing or not the expected one."""
    import pooch

    path = folder / source.name
    if not path.is_file():
        raise RunError(f"there is no {source.name} in {folder}; it is published at {source.url}")
    if source.checksum:
        kind = source.checksum.partition(":")[0]
        if pooch.file_hash(str(path), alg=kind) != source.checksum.partition(":")[2]:
            raise RunError(f"{path} is not the expected file: its {kind} differs from {source.checksum}")
    return path


def _reason(problem: Exception) -> str:
    """The last link of a chain of network errors, in few words."""
    text = str(problem)
    for phrase, short in (
        ("Name or service not known", "no such host, or no network"),
        ("Temporary failure in name resolution", "no network"),
        ("nodename nor servname", "no such host, or no network"),
        ("getaddrinfo failed", "no such host, or no network"),
        ("Connection refused", "connection refused"),
        ("timed out", "no answer in time"),
        ("IncompleteRead", "the connection broke off"),
        ("Connection broken", "the connection broke off"),
    ):
        if phrase in text:
            return short
    return type(problem).__name__
