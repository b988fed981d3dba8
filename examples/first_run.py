"""A first run: who learns from whom, and what it is worth.

    python examples/first_run.py     # which is what `make demo` runs

Twenty clients hold handwritten digits, turned by 0, 90, 180 or 270 degrees; nobody tells the methods which. Ten methods
are trained, in about a minute and without a network, and compared in a table and on one HTML page. Each step is a
command that you can type, too. If interrupted, the same command continues.
"""

import sys
from pathlib import Path

from kinfed.cli import main as kinfed

OUT = Path("runs/demo")
METHODS = ("local", "fedavg", "fedavg-ft", "kin", "hedge", "sfl", "fedcedar", "fedaghn", "pfedgat", "pfedgraph")
WHY = (
    "sfl, fedcedar, fedaghn, pfedgat and pfedgraph run at their papers' values, for other data and more rounds. Tuned "
    "on validation examples, sfl and fedaghn are ahead of local here in twenty rounds, too; fedcedar and pfedgat "
    "are not (docs/evidence/rotated-digits.md). The time is the clock's, whatever else the machine does."
)


def command(*words: object) -> None:
    """Run `kinfed WORDS`; ends the program if it fails."""
    print("$ kinfed", *words, flush=True)
    if code := kinfed([*map(str, words)]):
        sys.exit(code)


def main(out: Path = OUT, settings: tuple[str, ...] = ()) -> None:
    """Train all methods, each into a folder of its own in `out`, and compare them."""
    folders = [out / method for method in METHODS]
    for method, folder in zip(METHODS, folders, strict=True):
        if (folder / "summary.json").exists():
            continue
        if (folder / "config.toml").exists():
            command("resume", folder)
        else:
            command("run", method, *settings, "--beside", "none", "--out", folder)
    command("compare", *folders)
    print(WHY)
    command("report", *folders, "--out", out / "report.html")
    print(
        f"the graph that kin has learned is {out / 'kin' / 'relation.png'}, a block for each of the four hidden groups"
    )


if __name__ == "__main__":
    main()
