"""The house: what the code itself imports, from lower floors alone, and forms that it avoids."""

import ast
import functools
import importlib.util
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from kinfed.core.method import Method
from kinfed.methods import METHODS

ROOT = Path(__file__).parents[1] / "src" / "kinfed"
FLOWER = "kinfed_flower"  # the package of real federations, which stands on kinfed; its modules bear its name here
NAMES_OF_KINFED = Path(__file__).parent / "flower" / "kinfed_names.txt"  # whatever that package imports of kinfed
FLOORS = (  # folders import from floors below their own, never from beside or above
    ("core",),
    ("ops", "data", "ops/fused", "verdict"),
    ("plots", "data/datasets", "data/partitions", "data/graphs", "models", "relations"),
    ("methods", "simulation/attacks"),
    ("methods/solved", "simulation"),
    ("runs",),
    ("search",),
    ("report", "serving"),
    ("cli",),
    (FLOWER, f"{FLOWER}/wire", f"{FLOWER}/masking"),  # the plan, the messages, the masks
    (f"{FLOWER}/site", f"{FLOWER}/server"),
    (f"{FLOWER}/programs",),
)
LEVEL = {folder: level for level, folders in enumerate(FLOORS) for folder in folders}
AT_THE_ROOT = {"__init__", "__main__", "errors", "files", "interrupts"}
# Libraries that take long to import, or that only some have: imported where they are used.
HEAVY = {"PIL", "cryptography", "flwr", "matplotlib", "networkx", "polars", "pooch", "psycopg", "requests", "scipy"}
HEAVY |= {"dp_accounting", "mlflow", "onnx", "onnxruntime", "onnxscript", "prometheus_client", "sklearn", "starlette"}
HEAVY |= {"torch"}
HEAVY |= {"kinfed_papers", "shtab", "uvicorn", "wandb"}
# Where functions may import from kinfed itself, so that help and errors about arguments need not wait for PyTorch.
LATE = "cli/", f"{FLOWER}/programs/cli"
LONGEST, MOST_ARGUMENTS = 50, 10
METHOD_LINES, PART_LINES, METHOD_SETTINGS, REACH, HOOKS = 232, 142, 8, 314, 14
COMMON = {"personal", "frozen", "bn"}  # settings of every method, of which none is its own

# Ceilings, which only shrink: folders at the root, files in one folder (the registry of methods apart), names of files
# that stand in several folders (but for commands), fields of a record.
FOLDERS, FLAT, DOUBLED, FIELDS = 15, 29, 4, 21
MOST_NAMES = 191  # of kinfed, in the package of real federations

# What still exceeds. Each list only shrinks, and goes when it is empty.
UPWARDS = {("core", "ops/fused")}  # local training by fused steps
FAR = {
    "hedge": 470,
    "panacea": 384,
    "attention": 328,
}  # lines to read for a method: its file, and all of methods that it imports


class Arrow(NamedTuple):
    """An import of one module by another, as the path of each from the package's root."""

    by: str
    of: str
    late: bool  # inside a function


@functools.cache
def trees():
    """Every module's syntax tree, by its path without the suffix, such as core/client or kinfed_flower/site/site."""
    places = [(path, path.relative_to(ROOT)) for path in ROOT.rglob("*.py")]
    places += [(path, path.relative_to(ROOT.parent)) for path in (ROOT.parent / FLOWER).rglob("*.py")]
    return {place.with_suffix("").as_posix(): ast.parse(path.read_text()) for path, place in places}


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def named(name, node):
    """The modules of both packages that an import statement in the module `name` names, and the other packages."""
    if isinstance(node, ast.Import):
        return [], [alias.name.partition(".")[0] for alias in node.names]
    package, *parts = (node.module or "").split(".")
    if not node.level and package not in ("kinfed", FLOWER):
        return [], [package]
    if node.level:
        here = name.split("/")
        parts = [*here[: len(here) - node.level], package, *parts]
    elif package == FLOWER:
        parts = [package, *parts]
    base = "/".join(part for part in parts if part)
    known = trees()
    inside = [f"{base}/{alias.name}".lstrip("/") for alias in node.names]
    folder = f"{base}/__init__".lstrip("/")
    return [each if each in known else base if base in known else folder for each in inside], []


@functools.cache
def arrows():
    """Every import within the packages. kinfed's public names, taken when they are first asked for, are none."""
    found = set()
    for name, tree in trees().items():
        if name == "__init__":
            continue
        late = {id(node) for function in functions(tree) for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {Arrow(name, of, id(node) in late) for of in named(name, node)[0]}
    return found


def folder(name):
    """The folder of a module that has a floor: the nearest one around it."""
    around = name.rpartition("/")[0]
    while around and around not in LEVEL:
        around = around.rpartition("/")[0]
    return around or name.rpartition("/")[0]


def test_every_folder_has_a_floor_and_the_root_has_five_files():
    assert {folder(name) for name in trees()} == {"", *LEVEL}
    assert {name for name in trees() if folder(name) == FLOWER} == {f"{FLOWER}/__init__", f"{FLOWER}/plan"}
    assert {path.stem for path in ROOT.glob("*.py")} == AT_THE_ROOT


def test_imports_point_downwards_only():
    up = {
        (folder(a.by), folder(a.of))
        for a in arrows()
        if folder(a.by) and folder(a.of) not in ("", folder(a.by)) and LEVEL[folder(a.of)] >= LEVEL[folder(a.by)]
    }
    assert not up - UPWARDS
    base = {a for a in arrows() if a.by in AT_THE_ROOT - {"__main__"} and folder(a.of)}
    assert not base, "errors, files and interrupts import nothing above them"


def test_kinfed_imports_nothing_of_flower():
    """It finds commands and openers there by dotted names."""
    assert not {a for a in arrows() if a.of.startswith(FLOWER) and not a.by.startswith(FLOWER)}


def names_of_kinfed():
    """Each name that the package of real federations imports of kinfed, such as kinfed.core.tasks.Task."""
    names = set()
    for name, tree in trees().items():
        for node in ast.walk(tree) if name.startswith(FLOWER) else ():
            if isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] == "kinfed":
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_what_flower_imports_of_kinfed_is_listed():
    """A name more is a line more of that list, which a reviewer sees."""
    lines = NAMES_OF_KINFED.read_text().splitlines()
    assert lines == sorted(lines)
    assert set(lines) ^ names_of_kinfed() == set()
    assert len(lines) <= MOST_NAMES


def test_the_product_imports_nothing_of_papers():
    by = {
        folder(name).partition("/")[0]
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and "kinfed_papers" in named(name, node)[1]
    }
    assert not by


def test_no_module_imports_itself_by_way_of_others():
    """Late imports count: they only hide a circle."""
    ahead = {}
    for arrow in arrows():
        ahead.setdefault(arrow.by, set()).add(arrow.of)
    done = set()

    def walk(name, way):
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name in done:
            return
        for other in sorted(ahead.get(name, ())):
            walk(other, [*way, name])
        done.add(name)

    for name in sorted(ahead):
        walk(name, [])


def test_only_heavy_libraries_are_imported_inside_functions():
    own = {f"{a.by}.py" for a in arrows() if a.late and not a.by.startswith(LATE)}
    assert not own
    for name, tree in trees().items():
        inside = [node for function in functions(tree) for node in ast.walk(function)]
        for node in inside:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert set(named(name, node)[1]) <= HEAVY, f"{name}.py:{node.lineno} imports late what is no burden"


def body(function):
    """Lines of a function from its first statement after the docstring."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return statements[-1].end_lineno - statements[0].lineno + 1 if statements else 0


def arguments(function):
    a = function.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(one for one in (a.vararg, a.kwarg) if one)]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


@pytest.mark.parametrize(
    ("size", "most"),
    [(body, LONGEST), (lambda f: len(arguments(f)), MOST_ARGUMENTS)],
    ids=["lines", "arguments"],
)
def test_functions_are_short(size, most):
    found = {f"{name}.py:{one.name}" for name, tree in trees().items() for one in functions(tree) if size(one) > most}
    assert not found, f"more than {most}"


def test_methods_are_as_short_as_their_papers():
    for folder, most in (("methods", METHOD_LINES), ("methods/parts", PART_LINES)):
        lines = {path.stem: len(path.read_text().splitlines()) for path in ROOT.glob(f"{folder}/*.py")}
        assert not {name for name, count in lines.items() if count > most}
    settings = {name: {f.name for f in fields(METHODS[name])} - COMMON for name in METHODS}
    assert not {name for name, own in settings.items() if len(own) > METHOD_SETTINGS}


def test_a_method_has_few_hooks():
    """Whatever a method of one's own may override: functions, settings and facts; the rest is on mixins."""
    assert len([name for name in vars(Method) if not name.startswith("_")]) <= HOOKS


def reach(name):
    """Lines of a method's file and of all in methods that it imports, directly or not."""
    ahead, seen = [name], set()
    while ahead:
        seen.add(here := ahead.pop())
        ahead += [a.of for a in arrows() if a.by == here and folder(a.of) == "methods" and a.of not in seen]
    return sum(len((ROOT / f"{one}.py").read_text().splitlines()) for one in seen - {"methods/__init__"})


def test_a_method_is_read_whole_in_a_few_pages():
    files = {module.rpartition(".")[2] for module in METHODS.attributes.values()}
    lines = {file: reach(f"methods/{file}") for file in files}
    assert not {file: count for file, count in lines.items() if count > FAR.get(file, REACH)}
    assert all(lines[file] > REACH for file in FAR), "what no longer exceeds leaves the list"


def test_code_has_no_refused_forms():
    """What `python benchmarks/house.py` counts as refused in src, evidence and benchmarks."""
    checkout = ROOT.parents[1]
    spec = importlib.util.spec_from_file_location("house", checkout / "benchmarks" / "house.py")
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    counts = {form: count for form, count in house.refused_counts(checkout).items() if count}
    assert [form for form in counts if not form.startswith("files above")] == []


def test_folders_stay_few_and_small():
    files = [name for name in trees() if not name.endswith("__init__")]
    assert len({name.partition("/")[0] for name in files if "/" in name}) <= FOLDERS
    flat = Counter(name.rpartition("/")[0] for name in trees())
    assert max(count for around, count in flat.items() if around != "methods") <= FLAT
    names = Counter(name.rpartition("/")[2] for name in files if not name.startswith("cli/"))
    assert sum(count > 1 for count in names.values()) <= DOUBLED


def test_records_have_few_fields():
    found = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (
                any("dataclass" in ast.unparse(one) for one in node.decorator_list)
                or any("NamedTuple" in ast.unparse(one) for one in node.bases)
            ):
                own = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                found[node.name] = sum("ClassVar" not in ast.unparse(one.annotation) for one in own)
    assert not {name: count for name, count in found.items() if count > FIELDS}


def test_files_of_tests_have_names_of_their_own():
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)  # pytest imports them by name
