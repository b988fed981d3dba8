"""Run the tests on kinfed as users install it: python tests/installed.py [--lowest] [WHAT PYTEST TAKES ...]

Builds the sdist, and of that the wheel; installs the wheel into an empty virtual environment, with the versions of
constraints.txt or, with --lowest, with the lowest that pyproject.toml names; makes a newcomer's first run; and runs the
tests in a folder of their own, without src/. All of that is in a folder that is deleted at the end.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("src", "tests/test_house.py", "tests/test_install.py")  # what is about the source itself
FIRST = ("kinfed", "run", "fedaghn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowest", action="store_true", help="install the lowest versions that pyproject.toml names")
    args, tests = parser.parse_known_args()  # the rest is for pytest
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built(folder)
        constraints = ROOT / "constraints.txt"
        if args.lowest:
            constraints = folder / "lowest.txt"
            constraints.write_text("\n".join(lowest()) + "\n")
            print("the lowest versions:", " ".join(lowest()), flush=True)
        python = install_wheel(folder / "venv", wheel, constraints)
        copy(folder / "elsewhere")
        where = folder / "elsewhere"
        began = time.perf_counter()
        command(python.parent / FIRST[0], *FIRST[1:], cwd=where)
        print(f"first run and verdict: {time.perf_counter() - began:.0f} s", flush=True)
        done = subprocess.run([python, "-m", "pytest", *tests], cwd=where, check=False)
    sys.exit(done.returncode)


def built(folder: Path) -> Path:
    """The wheel, built of an sdist that was built of what is tracked."""
    source = folder / "source"
    for path in list_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, source / path)
    command(sys.executable, "-m", "build", "--outdir", folder / "dist", source, stdout=subprocess.DEVNULL)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install_wheel(place: Path, wheel: Path, constraints: Path) -> Path:
    """The Python of a new virtual environment with the wheel in it."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints)
    began = time.perf_counter()
    command(*pip, wheel)
    print(f"pip install kinfed: {time.perf_counter() - began:.0f} s", flush=True)
    command(*pip, f"kinfed[dev] @ {wheel.as_uri()}")
    return python


def lowest() -> list[str]:
    """The lowest version of each package that pyproject.toml names, as constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(package for packages in extras.values() for package in packages)]
    return [re.sub(r"\[.*\]", "", package).replace(">=", "==") for package in named if re.search("[=>]=", package)]


def copy(place: Path) -> None:
    """The tests and all that they read, without the source."""
    for path in list_files():
        if not path.startswith(ELSEWHERE):
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, place / path)


def list_files() -> list[str]:
    """Every file of the checkout that is tracked, or could be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def command(*arguments: object, **how: object) -> None:
    subprocess.run([str(word) for word in arguments], check=True, **how)


if __name__ == "__main__":
    main()
