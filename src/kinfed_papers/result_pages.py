"""Pages of which programs write parts, between marks, and people the rest; and what was measured, between runs."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import kinfed
from kinfed.files import replacing

PART = re.compile(r"^<!-- ([^>]+) -->$.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)  # as `put` writes them


def put(page: Path, part: str, text: str, title: str) -> None:
    """Write one part of a page, and leave the others as they are; a new page begins with its title."""
    content = page.read_text() if page.exists() else f"# {title}\n"
    text = f"<!-- {part} -->\n{text.strip()}\n<!-- end of {part} -->\n"
    old = re.compile(rf"<!-- {re.escape(part)} -->.*<!-- end of {re.escape(part)} -->\n", re.DOTALL)
    with replacing(page) as file:
        file.write_text(old.sub(lambda _: text, content) if old.search(content) else f"{content}\n{text}")


def keep(path: Path, measured: Any) -> None:
    """Write what was measured so far, as JSON; a program that is killed meanwhile leaves what was there."""
    with replacing(path) as file:
        file.write_text(json.dumps(measured))


def version() -> str:
    """What was measured: kinfed's version, the commit and the day."""
    ask = ["git", "rev-parse", "--short", "HEAD"]
    named = subprocess.run(ask, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True).stdout.strip()
    day = time.gmtime()
    return f"kinfed {kinfed.__version__} of {day.tm_mday} {time.strftime('%B %Y', day)} (commit {named or 'unknown'})"
