"""Figures of the code's structure and of its start-up.

    python benchmarks/house.py [CHECKOUT] [--seconds]

Everything is read from the syntax, so that any checkout can be measured, older ones included. `--seconds` also times
commands: the best of five runs each. Beside other work only the time of the processors says something.
"""

import argparse
import ast
import io
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

DENSEST = 8  # tokens that a line of a file may have on average
RUN = 6  # lines that must be equal, blank ones and comments apart, to count as a run of duplicated lines
COMMON = {"personal", "frozen", "bn", "feedback"}  # settings of every method
# Forms that nobody else in this field writes: names of locals and arguments, and functions without a verb.
NAMES = {"one", "each", "found", "known", "told", "said", "words", "alike", "apart", "whole", "own", "asked"}
PREPOSITIONS = {"of", "by", "at", "on", "in", "for", "with", "from_", "over", "under", "after", "before"}
PREPOSITIONS |= {"beside", "within", "without", "between", "among", "along", "near", "alone", "apart", "around"}
IRREGULAR = {"begun", "bought", "chosen", "done", "drawn", "found", "given", "heard", "held", "kept", "known", "left"}
IRREGULAR |= {"lost", "made", "meant", "said", "seen", "sent", "shown", "spent", "taken", "told", "worn", "written"}
NOT_PARTICIPLES = {"seed", "embed", "need", "feed", "speed", "proceed", "exceed", "shed", "bed", "red"}
ARE_TRUTH = {"bool", "any", "all", "isinstance", "hasattr", "startswith", "endswith", "exists", "is_dir", "is_file"}
# Words for which the field has others: baseline, warning, and candidates or leaderboard.
WORDS = re.compile(r"(?<![a-zA-Z])(opponent|outsider|doubt|race|raced|racing)(s|ful)?(?![a-zA-Z])", re.IGNORECASE)
LOOPS = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
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
    trees = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return trees


def circles(root: Path, trees: dict[str, ast.Module]) -> int:
    """How many imports lead back to a module that is being imported, lazy ones included."""
    arrows: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        package = (root / Path(*name.split("."), "__init__.py")).exists() if name else True
        base = name.split(".") if name else []
        base = base if package else base[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and name:
                start = [*base[: len(base) - node.level + 1], *(node.module.split(".") if node.module else [])]
                for alias in node.names:
                    module = ".".join([*start, alias.name])
                    arrows[name].add(module if module in trees else ".".join(start))
        arrows[name] -= {name, ""}
    state: dict[str, int] = {}

    def visit(name: str) -> int:
        state[name], count = 1, 0
        for other in arrows.get(name, ()):
            if state.get(other) == 1:
                count += 1
            elif other not in state:
                count += visit(other)
        state[name] = 2
        return count

    return sum(visit(name) for name in arrows if name not in state)


def imported_names(trees: dict[str, ast.Module]) -> set[str]:
    """Every name of kinfed that another package imports by its dotted place."""
    statements = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    inside = [node for node in statements if not node.level and (node.module or "").partition(".")[0] == "kinfed"]
    return {f"{node.module}.{alias.name}" for node in inside for alias in node.names}


def functions(trees: dict[str, ast.Module]) -> list[tuple[int, int, str]]:
    """Lines of the body, arguments (self apart) and the name of every function."""
    measured = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([arg for arg in given if arg.arg not in ("self", "cls")])
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                measured.append((lines, count, f"{name}.{node.name}"))
    return measured


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
    measured = []
    for path in sorted((root / "methods").glob("*.py")):
        text = path.read_text()
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and is_dataclass(node)]
        if path.stem in ("__init__", "bases") or not classes:
            continue
        settings = [
            item.target.id
            for item in classes[-1].body
            if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
        ]
        measured.append((path.stem, len(text.splitlines()), len(set(settings) - COMMON)))
    return measured


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether a class is written as a dataclass."""
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def refused_forms(path: Path) -> Iterator[tuple[str, int, str]]:
    """The form, line and text of everything in a file that no text or name should be."""
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        for match in () if line.startswith("WORDS = ") else WORDS.finditer(line):
            yield "words of other fields", number, match[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield "names", node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield "names", node.lineno, node.arg
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for text, factor in ((node.left, node.right), (node.right, node.left)):
                if is_text(text) and is_truth(factor):
                    yield "texts times a truth value", node.lineno, ast.unparse(node)
        elif isinstance(node, ast.IfExp) and any(isinstance(p, ast.IfExp) for p in (node.body, node.test, node.orelse)):
            yield "nested conditionals", node.lineno, ast.unparse(node)
        elif isinstance(node, LOOPS) and any(
            isinstance(inner, LOOPS)
            for loop in node.generators
            for part in (loop.iter, *loop.ifs)
            for inner in ast.walk(part)
        ):
            yield "nested generators", node.lineno, ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name.strip("_")
            if name in PREPOSITIONS | IRREGULAR or (re.fullmatch(r"[a-z]+ed", name) and name not in NOT_PARTICIPLES):
                yield "functions without a verb", node.lineno, node.name


def refused_counts(checkout: Path) -> Counter[str]:
    """How often each refused form stands in the code of a checkout, and how many files are too dense to read."""
    counts: Counter[str] = Counter()
    for folder in ("src", "evidence", "benchmarks"):
        for path in (checkout / folder).rglob("*.py"):
            counts.update(form for form, _, _ in refused_forms(path))
            code, lines = count_tokens(path)
            counts[f"files above {DENSEST} tokens a line"] += lines > 20 and code > DENSEST * lines
            if path.name == "__init__.py":
                counts["lines of functions and classes in __init__.py"] += count_defined(path)
    return counts


def count_defined(path: Path) -> int:
    """Lines of the functions and classes of a file; what it imports and lists are no part of them."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
    return sum(node.end_lineno - node.lineno + 1 for node in nodes)


def class_members(trees: dict[str, ast.Module]) -> Iterator[tuple[int, str]]:
    """The number of fields and functions of every class, functions of Python's own such as __init__ apart."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {i.name for i in node.body if isinstance(i, ast.FunctionDef | ast.AsyncFunctionDef)}
                names |= {i.target.id for i in node.body if isinstance(i, ast.AnnAssign)}
                yield len({name for name in names if not name.startswith("__")}), f"{module}.{node.name}"


def is_text(node: ast.expr) -> bool:
    """Whether an expression is written as a text, or as a list."""
    return isinstance(node, ast.JoinedStr | ast.List) or isinstance(getattr(node, "value", None), str)


def is_truth(node: ast.expr) -> bool:
    """Whether an expression is written as a truth value."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in ARE_TRUTH
    return isinstance(node, ast.Compare | ast.BoolOp) or isinstance(getattr(node, "op", None), ast.Not)


def count_tokens(path: Path) -> tuple[int, int]:
    """Tokens of code, without docstrings and comments, and lines that have any."""
    text = path.read_text()
    skip = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skip |= set(range(node.lineno, node.end_lineno + 1))
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}
    kept = [
        t.start[0]
        for t in tokenize.generate_tokens(io.StringIO(text).readline)
        if t.type not in layout and t.start[0] not in skip
    ]
    return len(kept), len(set(kept))


def sizes(checkout: Path) -> dict[str, int]:
    """Folders, names and words of a checkout; pages of results are those of docs/evidence and docs/papers."""
    root, docs = checkout / "src" / "kinfed", checkout / "docs"
    paths = sorted(root.rglob("*.py"))
    names = Counter(path.stem for path in paths if path.stem != "__init__" and path.parent.name != "cli")
    flat = Counter(path.parent for path in paths if path.parent.name != "methods")
    results = [page for page in docs.rglob("*.md") if page.relative_to(docs).parts[0] in ("evidence", "papers")]
    pages = [page for page in docs.rglob("*.md") if page not in results]
    return {
        "folders at the root": sum((path / "__init__.py").exists() for path in root.iterdir()),
        "files in the largest folder, methods apart": max(flat.values()),
        "names of files that stand in several folders": sum(count > 1 for count in names.values()),
        "pages of the product": len(pages),
        "words of these pages": sum(len(page.read_text().split()) for page in pages),
        "words of prose of papers and evidence": sum(map(count_prose, results)),
    }


def count_prose(page: Path) -> int:
    """Words of a page that stand neither in a table nor in a block of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return sum(len(line.split()) for line in text.splitlines() if not line.startswith("|"))


def seconds(checkout: Path) -> dict[str, tuple[float, float]]:
    """The shortest time of each command with the code of a checkout, and the shortest time that it kept cores busy."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(6):
            for name, command in COMMANDS.items():
                arguments = [part.format(out=Path(folder) / f"{i}") for part in command]
                begin = time.perf_counter()
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True)
                took = time.perf_counter() - begin
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                if i:  # the first fills the file system's cache
                    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    measured[name].append((took, busy))
    return {name: (min(took for took, _ in times), min(busy for _, busy in times)) for name, times in measured.items()}


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--seconds", action="store_true")
    given = parser.parse_args()
    root = given.checkout.resolve() / "src" / "kinfed"
    trees = modules(root)
    flower = {f"kinfed_flower.{name}": tree for name, tree in modules(root.with_name("kinfed_flower")).items()}
    product = trees | flower
    long = max(functions(product))
    many = max(functions(product), key=lambda function: function[1])
    for folder in ("src/kinfed", "src/kinfed_flower", "src/kinfed_papers", "tests", "evidence", "benchmarks"):
        counts = [count_tokens(path) for path in (given.checkout / folder).rglob("*.py")]
        code, lines = (sum(count) for count in zip(*counts, strict=True)) if counts else (0, 0)
        if lines:
            print(f"{folder}: {code:,} tokens of code in {lines:,} lines, {code / lines:.1f} a line")
    for form, count in sorted(refused_counts(given.checkout).items()):
        print(f"refused, {form}: {count:,}")
    members, largest = max(class_members(product))
    print(f"members of the largest class: {members} ({largest})")
    for name, size in sizes(given.checkout.resolve()).items():
        print(f"{name}: {size:,}")
    print(f"files at the root: {len(list(root.glob('*.py')))}")
    print(f"folders: {len({path.parent for path in root.rglob('*.py')} - {root})}")
    print(f"import cycles: {circles(root, trees)}")
    print(f"names of kinfed that kinfed_flower imports: {len(imported_names(flower))}")
    print(f"longest function: {long[0]} lines ({long[2]})")
    print(f"most arguments: {many[1]} ({many[2]})")
    print(f"runs of duplicated lines: {duplicates(root)}")
    for name, lines, settings in methods(root):
        print(f"methods/{name}.py: {lines} lines, {settings} settings")
    for name, (took, busy) in seconds(given.checkout.resolve()).items() if given.seconds else ():
        print(f"{name}: {took:.2f} s, of processors {busy:.2f} s")


if __name__ == "__main__":
    main()
