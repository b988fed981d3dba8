"""Run the commands that stand on pages and put what each prints below it: python evidence/replay.py PAGE.md ...

A command is a ```console block that begins with `$ kinfed`, not between a program's marks; what an earlier run put
below it is replaced. If the command draws a picture and one is shown before the next block, that file is replaced too.
Finished runs are kept in --keep, so the same command again does what is left.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from kinfed_papers.result_pages import PART

BLOCK = re.compile(r"^```console\n(\$ kinfed (?:.*\\\n)*.*\n)[^`]*```\n", re.MULTILINE)
SHOWN = re.compile(r"!\[[^\]]*\]\(([^)]+\.png)\)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE.md")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "replay", metavar="DIR")
    args = parser.parse_args()
    for page in args.pages:
        replay(page, args.keep / page.stem)


def replay(page, keep):
    text = page.read_text()
    marked = [part.span() for part in PART.finditer(text)]

    def is_marked(place):
        return any(start < place < end for start, end in marked)

    blocks = [block for block in BLOCK.finditer(text) if not is_marked(block.start())]
    if not blocks:
        sys.exit(f"{page}: no ```console block begins with `$ kinfed`")
    if crowded := [b.group() for b in blocks if b.group().count("\n$ ") > 1]:
        sys.exit(f"{page}: a block may have one command; this one has more:\n{crowded[0]}")
    for at, block in reversed(list(enumerate(blocks))):  # from the end, so that earlier places stay valid
        typed = block.group(1)
        out = keep / hashlib.sha256(typed.encode()).hexdigest()[:8]
        until = blocks[at + 1].start() if at + 1 < len(blocks) else len(text)
        shown = SHOWN.search(text, block.end(), until)
        text = f"{text[: block.start()]}```console\n{typed}{output(typed, out)}```\n{text[block.end() :]}"
        page.write_text(text)
        drawn = list(out.glob("*.png"))
        if shown and len(drawn) == 1:
            shutil.copyfile(drawn[0], page.parent / shown.group(1))


def output(typed, out):
    """What a command prints, without its last line: where on this machine its files are."""
    arguments = [*shlex.split(typed.replace("\\\n", " ").removeprefix("$ kinfed")), "--out", out]
    if arguments[0] == "run" and (out / "config.toml").exists():  # the other commands go on by themselves
        arguments = ["resume", out]
    done = subprocess.run(
        [Path(sys.executable).parent / "kinfed", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nthis command failed: {typed}")
    lines = [line.rstrip() for line in done.stdout.splitlines() if str(out) not in line]
    return "\n".join(lines).strip("\n") + "\n"


if __name__ == "__main__":
    main()
