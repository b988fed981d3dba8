"""Figures of the code's structure and of its start-up.

    python benchmarks/house.py [CHECKOUT] [--seconds]

Everything is read from the syntax, so that any checkout can be measured, older ones included. `--seconds` also times
commands: the best of five runs each. Beside other work only the time of the processors says something.
"""

import argparse
import ast
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

RUN = 6  # lines that must be equal, blank ones and comments apart, to count as a run of duplicated lines
COMMON = {"personal", "frozen", "bn", "feedback"}  # settings of every method
COMMANDS = {
    "kinfed --help": ["-m", "kinfed", "--help"],
    "kinfed --version": ["-m", "kinfed", "--version"],
    "kinfed list methods": ["-m", "kinfed", "list", "methods"],
    "import torch": ["-c", "import torch"],
    "import kinfed, and fit from it": ["-c", "from kinfed import fit"],
    "kinfed run fedaghn": ["-m", "kinfed", "run", "fedaghn", "--quiet", "--out", "{out}"],
}


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module's syntax by its dotted name, the package itself as ''."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def circles(root: Path, known: dict[str, ast.Module]) -> int:
    """How many imports lead back to a module that is being imported, lazy ones included."""
    arrows: dict[str, set[str]] = {name: set() for name in known}
    for name, tree in known.items():
        package = (root / Path(*name.split("."), "__init__.py")).exists() if name else True
        base = name.split(".") if name else []
        base = base if package else base[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and name:
                start = [*base[: len(base) - node.level + 1], *(node.module.split(".") if node.module else [])]
                for alias in node.names:
                    whole = ".".join([*start, alias.name])
                    arrows[name].add(whole if whole in known else ".".join(start))
        arrows[name] -= {name, ""}
    state: dict[str, int] = {}

    def visit(name: str) -> int:
        state[name], count = 1, 0
        for other in arrows.get(name, ()):
            count += 1 if state.get(other) == 1 else visit(other) if other not in state else 0
        state[name] = 2
        return count

    return sum(visit(name) for name in arrows if name not in state)


def functions(known: dict[str, ast.Module]) -> list[tuple[int, int, str]]:
    """Lines of the body, arguments (self apart) and the name of every function."""
    found = []
    for name, tree in known.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([arg for arg in given if arg.arg not in ("self", "cls")])
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                found.append((lines, count, f"{name}.{node.name}"))
    return found


def duplicates(root: Path) -> int:
    """Runs of `RUN` or more equal lines that stand in two places."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = {}
    for path in sorted(root.rglob("*.py")):
        lines = [line.strip() for line in path.read_text().splitlines()]
        lines = [line for line in lines if line and not line.startswith(("#", "from ", "import ")) and len(line) > 3]
        for i in range(len(lines) - RUN + 1):
            places.setdefault(tuple(lines[i : i + RUN]), []).append((path, i))
    twice = {where for at in places.values() if len(at) > 1 for where in at[1:]}
    return sum((path, i - 1) not in twice for path, i in twice)  # each run once, however long


def methods(root: Path) -> list[tuple[str, int, int]]:
    """The file of each method, its lines, and its own settings: the annotated fields of its last dataclass."""
    found = []
    for path in sorted((root / "methods").glob("*.py")):
        text = path.read_text()
        classes = [
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        ]
        if path.stem in ("__init__", "bases") or not classes:
            continue
        own = [
            item.target.id
            for item in classes[-1].body
            if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
        ]
        found.append((path.stem, len(text.splitlines()), len(set(own) - COMMON)))
    return found


def sizes(checkout: Path) -> dict[str, int]:
    """Lines, folders, names and words of a checkout; pages of results are those of docs/evidence and docs/papers."""
    root, docs = checkout / "src" / "kinfed", checkout / "docs"
    paths = sorted(root.rglob("*.py"))
    names = Counter(path.stem for path in paths if path.stem != "__init__" and path.parent.name != "cli")
    flat = Counter(path.parent for path in paths if path.parent.name != "methods")
    pages = [page for page in docs.rglob("*.md") if page.relative_to(docs).parts[0] not in ("evidence", "papers")]
    return {
        "lines of kinfed": sum(len(path.read_text().splitlines()) for path in paths),
        "lines of kinfed_papers": sum(
            len(path.read_text().splitlines()) for path in (root.parent / "kinfed_papers").rglob("*.py")
        ),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in (checkout / "tests").rglob("*.py")),
        "folders at the root": sum((path / "__init__.py").exists() for path in root.iterdir()),
        "files in the largest folder, methods apart": max(flat.values()),
        "names of files that stand in several folders": sum(count > 1 for count in names.values()),
        "pages of the product": len(pages),
        "words of these pages": sum(len(page.read_text().split()) for page in pages),
    }


def seconds(checkout: Path) -> dict[str, tuple[float, float]]:
    """The shortest time of each command with the code of a checkout, and the shortest time that it kept cores busy."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(6):
            for name, command in COMMANDS.items():
                words = [word.format(out=Path(folder) / f"{i}") for word in command]
                begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
                took, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
                if i:  # the first fills the file system's cache
                    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    found[name].append((took, busy))
    return {name: (min(took for took, _ in times), min(busy for _, busy in times)) for name, times in found.items()}


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--seconds", action="store_true")
    given = parser.parse_args()
    root = given.checkout.resolve() / "src" / "kinfed"
    known = modules(root)
    long, many = max(functions(known)), max(functions(known), key=lambda one: one[1])
    for name, size in sizes(given.checkout.resolve()).items():
        print(f"{name}: {size:,}")
    print(f"files at the root: {len(list(root.glob('*.py')))}")
    print(f"folders: {len({path.parent for path in root.rglob('*.py')} - {root})}")
    print(f"import cycles: {circles(root, known)}")
    print(f"longest function: {long[0]} lines ({long[2]})")
    print(f"most arguments: {many[1]} ({many[2]})")
    print(f"runs of duplicated lines: {duplicates(root)}")
    for name, lines, settings in methods(root):
        print(f"methods/{name}.py: {lines} lines, {settings} settings")
    for name, (took, busy) in seconds(given.checkout.resolve()).items() if given.seconds else ():
        print(f"{name}: {took:.2f} s, of processors {busy:.2f} s")


if __name__ == "__main__":
    main()
