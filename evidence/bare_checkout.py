"""Time `make demo` on a fresh clone: python evidence/bare_checkout.py

Clones this repository into a temporary folder, so only what is committed counts. Writes docs/evidence/bare-checkout.md.
"""

import argparse
import platform
import subprocess
import tempfile
import time
from pathlib import Path

from kinfed_papers.result_pages import version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "bare-checkout.md"


def main():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", ROOT, f"{folder}/kinfed"], check=True)
        begun = time.perf_counter()
        subprocess.run(["make", ".venv/installed"], cwd=f"{folder}/kinfed", check=True)
        installed = time.perf_counter()
        demo = subprocess.run(["make", "demo"], cwd=f"{folder}/kinfed", check=True, stdout=subprocess.PIPE, text=True)
        ended = time.perf_counter()
    table = demo.stdout[demo.stdout.index("Test scores") :].partition("\n\n")[0]
    PAGE.write_text(
        "\n".join(
            [
                "# From a bare checkout",
                "",
                "Written by `python evidence/bare_checkout.py`. It makes a fresh clone, then `make demo`, on",
                f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {version()}.",
                "",
                f"To create `.venv` and install (packages downloaded) takes {installed - begun:.0f} s. The methods",
                f"below, on rotated digits, take {ended - installed:.0f} s, imports, pictures and comparison",
                "included. The end:",
                "",
                "```",
                *[line.rstrip() for line in table.splitlines()],
                "```",
                "",
            ]
        )
    )
    print(PAGE.read_text())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone
    main()
