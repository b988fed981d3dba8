"""What `kinfed` exports, and that every error and page names only what can be imported."""

import argparse
import ast
import builtins
import functools
import re
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

import kinfed
from kinfed import SGD, Adam
from kinfed.cli.program import COMMANDS, parser_of
from kinfed.core.tasks import TASKS
from kinfed.data.datasets import DATASETS
from kinfed.data.graphs import GRAPHS
from kinfed.data.partitions import PARTITIONS
from kinfed.methods import METHODS
from kinfed.models import MODELS
from kinfed.simulation.attacks import ATTACKS

ROOT = Path(kinfed.__file__).parent
COMMANDS_AT_MOST, OPTIONS_AT_MOST = 13, 50  # of the product, without kinfed papers
PAGES = [Path(__file__).parents[1] / name for name in ("README.md", "CONTRIBUTING.md", "docs", "examples")]
DOTTED = re.compile(r"(?<![\w./-])kinfed(?:\.[A-Za-z]\w*)+(?!\w*[:/-])")  # no address, file or place of a registry
CALLED = re.compile(r"(?<![\w.])([A-Za-z]\w*)\((?!s\))")  # "client(s)" calls nothing


@functools.cache
def trees():
    packages = ROOT, ROOT.with_name("kinfed_flower")
    paths = sorted(path for package in packages for path in package.rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def words_of(tree):
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) is str
    ]


def raised(tree):
    """Every text within a raised error."""
    return [text for node in ast.walk(tree) if isinstance(node, ast.Raise) for text in words_of(node)]


def known_names():
    """Public names, and those in registries."""
    registries = (METHODS, ATTACKS, PARTITIONS)
    parts = {name for names in kinfed.methods.parts.PARTS.values() for name in names}
    return {*kinfed.__all__, *parts, *(part.__name__ for registry in registries for part in registry.values())}


def can_be_had(dotted):
    """Whether `import kinfed` is enough, or an import of a module of it."""
    try:
        return resolve_name(dotted) is not None
    except (ImportError, AttributeError):
        return False


def test_every_public_name_is_there_and_is_declared_for_type_checkers():
    for name in kinfed.__all__:
        assert getattr(kinfed, name) is not None
    (declared,) = [node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    told = {f"{node.module or ''}.{alias.name}".strip(".") for node in declared.body for alias in node.names}
    named = {f"{module}.{name}" for module, names in kinfed._PLACES.items() for name in names}
    assert told == named | {place.removeprefix("kinfed.") for place in kinfed._REGISTRIES.values()}
    assert len(kinfed.__all__) <= 56
    assert set(kinfed.__all__) <= set(dir(kinfed))
    with pytest.raises(ImportError):
        exec("from kinfed import FedAvgg")


def options_of(parser):
    """Every long option of a command and of its actions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options_of(inner)
        yield from (option for option in action.option_strings if option.startswith("--") and option != "--help")


def test_there_are_few_commands_and_few_options():
    product = [name for name in COMMANDS if name != "papers"]
    assert len(product) <= COMMANDS_AT_MOST
    assert len(set(options_of(parser_of(*product)))) <= OPTIONS_AT_MOST


@pytest.mark.parametrize("registry", ["methods", "attacks", "partitions"])
def test_the_classes_of_a_shelf_are_on_it_by_their_own_names(registry):
    (parts,) = (one for name, one in vars(getattr(kinfed, registry)).items() if name == registry.upper())
    for part in parts.values():
        assert getattr(getattr(kinfed, registry), part.__name__) is part


def test_what_methods_are_made_of_is_beside_them_and_is_declared_for_type_checkers():
    for name in (name for names in kinfed.methods.parts.PARTS.values() for name in names):
        assert getattr(kinfed.methods, name) is not None
    (declared,) = [
        node for node in ast.parse((ROOT / "methods/parts/__init__.py").read_text()).body if isinstance(node, ast.If)
    ]
    told = {alias.name for node in declared.body for alias in node.names}
    assert told == {name for names in kinfed.methods.parts.PARTS.values() for name in names}


def test_tasks_and_optimisers_are_exported_and_the_classes_that_own_parts_derive_from():
    for part in (*TASKS.values(), SGD, Adam):
        assert getattr(kinfed, part.__name__) is part
    for registry in (METHODS, ATTACKS, PARTITIONS, GRAPHS, DATASETS, MODELS, TASKS):
        module, _, name = registry.base_name.rpartition(".")
        assert getattr(import_module(module), name) is registry.base


def test_no_error_asks_for_a_name_that_cannot_be_imported():
    """`kinfed.NAME` anywhere, and in an error also NAME(...): a user is to write it, so the package exports it."""
    own = {*known_names(), *dir(builtins), "dataclass"}  # which authors of methods import anyway
    for path, tree in trees().items():
        for line, text in words_of(tree):
            for dotted in DOTTED.findall(text):
                assert can_be_had(dotted), f"{path}, line {line}: {dotted}"
        for line, text in raised(tree):
            for called in CALLED.findall(text):
                assert called in own, f"{path}, line {line}: {called}(...)"


def test_no_error_calls_a_thing_by_a_class_that_is_not_public():
    """A user meets class names in errors; those that are no plain words must be importable."""
    classes = {node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    private = {name for name in classes - known_names() if not name.startswith("_")}
    for path, tree in trees().items():
        for line, text in raised(tree):
            named = set(re.findall(r"(?<=[a-z,:;] )[A-Z]\w+(?![\w-])", text)) & private
            assert not named, f"{path}, line {line}: {', '.join(named)}"


def test_no_page_asks_for_a_name_that_cannot_be_imported():
    for top in PAGES:
        for path in [top] if top.is_file() else [*top.rglob("*.md"), *top.rglob("*.py")]:
            for dotted in DOTTED.findall(path.read_text(encoding="utf-8")):
                assert can_be_had(dotted), f"{path}: {dotted}"
