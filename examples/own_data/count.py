"""From a raw file to a verdict: commands, edits, errors and seconds for each story, as a table.

    python examples/own_data/count.py

Each story's file is made, then the page's first `kinfed run` is given to it as it is. An error is a command that ends
with another code than 0; an edit is a file that differs after the commands from what it was before. Seconds are those
of computing, of all cores together.
"""

import hashlib
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
STORIES = ("shops", "sensors", "patients")
VERDICT = re.compile(r"^(learning from others (?:helps|does not help)|one model for all|cannot tell)", re.M)


class Count(NamedTuple):
    """What a story took."""

    story: str
    commands: int
    edits: int
    errors: int
    seconds: float
    verdict: str


def command_of(story: str) -> list[str]:
    """The first `kinfed run` of a story's page."""
    page = (HERE / story / "README.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("$ kinfed run "))
    return shlex.split(line.removeprefix("$ kinfed "))


def count(story: str, folder: Path, more: list[str]) -> Count:
    """Make a story's file in a folder and run its command; `more` are arguments beside the page's."""
    subprocess.run([sys.executable, HERE / story / "make.py"], check=True, cwd=folder)
    before = _digests(folder)
    begin = _computed()
    command, *arguments = command_of(story)
    done = subprocess.run(
        [sys.executable, "-m", "kinfed", command, arguments[0], *more, *arguments[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = _computed() - begin
    found = VERDICT.search(done.stdout) or VERDICT.search(done.stderr)
    edits = sum(_digests(folder)[name] != digest for name, digest in before.items())
    return Count(story, 1, edits, int(done.returncode != 0), seconds, found.group(1) if found else "none")


def _computed() -> float:
    """Seconds of computing by all programs that have ended, of all cores together."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.csv")}


def main(more: list[str]) -> None:
    """Print the table."""
    print("| data | commands | edits | errors | seconds | verdict |\n| --- | --- | --- | --- | --- | --- |")
    for story in STORIES:
        with tempfile.TemporaryDirectory() as folder:
            one = count(story, Path(folder), more)
        print(
            f"| {one.story} | {one.commands} | {one.edits} | {one.errors} | {one.seconds:.0f} | {one.verdict} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
