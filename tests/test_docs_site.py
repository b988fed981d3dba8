"""The site: its navigation is whole, what it generates is in the code, its notebooks and examples run."""

import doctest
import importlib
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from docutils import nodes
from docutils.core import publish_doctree
from markdown_it.renderer import RendererHTML
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser
from numpy.typing import ArrayLike

import kinfed
from kinfed.cli import main
from kinfed.core.field_checks import sentences
from kinfed_papers.result_pages import is_written

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted(DOCS.glob("notebooks/[!R]*.md"))
FAST = [pytest.param(path, id=path.stem) for path in NOTEBOOKS if path.stem != "federation"]
ALL = [*FAST, pytest.param(DOCS / "notebooks" / "federation.md", id="federation", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def of_the_site(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "evidence"))
    monkeypatch.syspath_prepend(str(DOCS / "site"))  # first: both have a program `tables`


@pytest.mark.parametrize("path", ALL)
def test_a_notebook_runs_from_beginning_to_end(path, tmp_path, monkeypatch, capsys):
    """As a program: its cells one after the other. The site runs it as a notebook."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = re.findall(r"```\{code-cell\}[^\n]*\n(.*?)```", path.read_text(), re.DOTALL)
    assert len(cells) >= 5
    names = {"__name__": "notebook"}
    monkeypatch.setitem(sys.modules, "notebook", type(sys)("notebook"))  # where dataclasses look for their names
    try:
        for cell in cells:
            exec(compile(cell, path.name, "exec"), names)
    finally:
        names.get("end", int)()  # what the notebook started
    assert capsys.readouterr().out


def test_the_list_of_pages_has_every_page_once():
    contents = importlib.import_module("contents")
    listed = [one.page for one in contents.listed((DOCS / "README.md").read_text())]
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")} - {"README"}
    assert pages == set(listed), "list the page in docs/README.md: the site's navigation is that list"
    assert len(listed) == len(set(listed))


def test_the_navigation_keeps_the_lists_order_and_chapters():
    contents = importlib.import_module("contents")
    pages = contents.listed("## One\n\n- [A `b`](a.md): x\n  - [C](d/c.md)\n\n## Two\n\n- [E](e.md#f)\n- [G](g.md)\n")
    assert [(one.section, one.above, one.page, one.title) for one in pages] == [
        ("One", "", "a", "A b"),
        ("One", "a", "d/c", "C"),
        ("Two", "", "g", "G"),  # a link to a heading is none to a page
    ]
    assert contents.chapters("a", pages) == "\n```{toctree}\n:hidden:\n\nC </d/c>\n```\n"
    assert ":caption: Two" in contents.chapters("README", pages)


def test_links_that_leave_the_docs_lead_somewhere_on_the_site():
    contents = importlib.import_module("contents")
    text = "[a](../CONTRIBUTING.md#x) [b](../../CONTRIBUTING.md) [c](../data.md) [d](../../examples/own_data.py)"
    assert contents.inside("data", text.split()[0]) == "[a](contributing.md#x)"
    assert contents.inside("methods/sfl", " ".join(text.split()[1:])) == (
        "[b](../contributing.md) [c](../data.md) d (`examples/own_data.py` in the sources)"
    )


def test_what_only_readers_of_the_sources_need_is_not_on_the_site():
    contents = importlib.import_module("contents")
    text = "It is so.\n<!-- sources only -->The site says\nmore.<!-- end of sources only -->\nAnd so on."
    assert contents.inside("data", text) == "It is so.\nAnd so on."
    for path in DOCS.rglob("*.md"):
        text = path.read_text()
        assert "`make docs` builds" not in contents.inside(path.relative_to(DOCS).with_suffix("").as_posix(), text), (
            path
        )


def test_signatures_name_plain_types():
    generated = importlib.import_module("generated")
    made = kinfed.partitions.Dirichlet.__init__
    given = dict(made.__annotations__)
    try:
        generated._annotations(None, made, True)
        assert made.__annotations__["alpha"] is float
    finally:
        made.__annotations__.update(given)
    function = SimpleNamespace(
        __annotations__={"x": ArrayLike | torch.Tensor, "of": "NotImported", "call": Callable[[int], str]}
    )
    generated._annotations(None, function, False)
    assert function.__annotations__ == {
        "x": generated.Array | torch.Tensor,
        "of": "NotImported",
        "call": Callable[[int], str],
    }


def test_blocks_of_commands_alone_may_be_wrapped(tmp_path):
    contents = importlib.import_module("contents")
    page = nodes.section()
    for language, text in (("console", "$ a \\\n  b\n$ c"), ("console", "a"), ("console", "$ a\nb"), ("", "kinfed a")):
        page += nodes.literal_block(text, text, language=language)
    document = SimpleNamespace(findall=page.findall)
    contents._mark(None, document)
    assert [block["classes"] for block in page] == [["commands"], ["commands"], [], ["commands"]]


def test_a_link_that_shows_a_file_shows_its_title_on_the_site():
    contents = importlib.import_module("contents")
    shown = {"deploy.html#keys": "../deploy.md", "data.html": "the data", "deploy.html": "docs/README.md"}
    page = nodes.paragraph()
    for target, text in shown.items():
        page += nodes.reference("", text, refuri=f"../{target}")
    contents.titled("evidence/flower", page, {"deploy": "A federation", "data": "Data"})
    assert [link.astext() for link in page] == ["A federation", "the data", "docs/README.md"]


def test_every_setting_of_every_part_is_on_its_page():
    generated = importlib.import_module("generated")
    pages = "".join(path.read_text() for path in (DOCS / "settings").glob("*.md"))
    for registry in ("methods", "datasets", "partitions", "graphs", "models", "attacks"):
        assert f"<!-- settings: {registry} -->" in pages
    parts = "\n".join(generated.registry("methods"))
    assert all(f"### `{name}`" in parts for name in kinfed.methods.METHODS)
    sharpness = sentences(kinfed.methods.FedAGHN)["sharpness"].replace("*", r"\*")
    assert f"| `sharpness` | {sharpness} | `{kinfed.methods.FedAGHN().sharpness}` | " in parts
    epochs = "| `epochs` | passes over a client's training examples in a round | `2` | a whole number, at least 1 |"
    assert epochs in "\n".join(generated.part("Training"))


def test_every_public_name_is_on_the_page_of_names_once():
    generated = importlib.import_module("generated")
    text = (DOCS / "api.md").read_text()
    made = "\n".join(line for _, asked in generated.MARK.findall(text) for line in generated.public(asked))
    named = re.findall(r"\.\. (?:autoclass|autofunction|py:data):: kinfed\.([\w.]+)", made)
    parts = [f"methods.{name}" for names in kinfed.methods.parts.PARTS.values() for name in names]
    assert sorted(named) == sorted([*kinfed.__all__, *parts])


@pytest.mark.parametrize("formula", [r"\bar\theta_i", r"\tilde x_{1, \dots, M}", r"\overline{\|z\|^2}_{ic}"])
def test_an_index_stands_beside_a_letter_with_an_accent(formula):
    made = importlib.import_module("formulas").mathml(formula, as_block=False)
    assert "<msub>" in made
    assert "munder" not in made


def test_formulas_say_what_they_say_in_tex():
    made = importlib.import_module("formulas").mathml
    half = re.sub(r"\s", "", made(r"\tfrac12 \|x\|^2", as_block=False))
    assert "<mn>1</mn><mn>2</mn></mfrac>" in half
    assert half.count('<mostretchy="false">\u2016</mo>') == 2
    mean = made(r"\operatorname*{mean}_{i \ne j} c_{ij}", as_block=True)
    assert "<mi>mean</mi>" in mean
    assert "*" not in mean
    assert 'rspace="0.17em"' in made(r"\log p", as_block=False)
    assert "rspace" not in made(r"\log(p)", as_block=False)


def test_numbers_are_aligned_and_headings_of_groups_are_as_wide_as_their_table():
    tables = importlib.import_module("tables")
    text = """
=========  ===========  ====
method     score        note
=========  ===========  ====
**Alone**
local      72.7 ± 1.0   2
fedavg     +1,061.9     none
=========  ===========  ====
"""
    table = next(publish_doctree(text).findall(nodes.table))
    tables.align(table)
    tables.group(table)
    rows = [row.children for row in table.findall(nodes.row)]
    assert [[cell["classes"] for cell in row] for row in rows] == [
        [[], ["text-right"], []],
        [["group"]],
        [[], ["text-right"], []],
        [[], ["text-right"], []],
    ]
    assert rows[1][0]["morecols"] == 2


def test_a_link_alone_to_a_csv_file_is_that_table():
    show = importlib.import_module("tables").show
    directive = "~~~{csv-table} [A (`b`)](c/d.csv)\n:file: c/d.csv\n:header-rows: 1\n~~~"
    assert show("x\n\n[A (`b`)](c/d.csv)\n\ny") == f"x\n\n{directive}\n\ny"
    assert show("see [a](c/d.csv)\n[e](f.md)") == "see [a](c/d.csv)\n[e](f.md)"


def test_a_line_that_begins_with_a_percent_sign_is_text():
    conf = runpy.run_path(str(DOCS / "conf.py"))
    parser = create_md_parser(MdParserConfig(disable_syntax=conf["myst_disable_syntax"]), RendererHTML)
    assert "(20.5\n%) is ahead" in parser.render("and kNN-Per (20.5\n%) is ahead")


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="x">A</h1><a href="b.html#y">b</a><a href="#x">x</a><a href="https://c.d">e</a>'
    )
    (tmp_path / "b.html").write_text('<a href="gone.html">g</a><img src="https://e.f/g.png">')
    assert list(importlib.import_module("checked").broken(tmp_path)) == [
        "a.html links to b.html#y, a page without such a heading",
        "b.html links to gone.html, which is not there",
        "b.html loads https://e.f/g.png",
    ]


def test_the_leaderboard_names_all_that_are_best_and_their_seeds():
    board = importlib.import_module("leaderboard")
    rows = [
        {
            "method": name.lower(),
            "printed": name,
            "paper": paper,
            "measured": ours,
            "seeds": seeds,
            "flags": "",
            "dataset": "D",
        }
        for name, paper, ours, seeds in (("A", "90", "80", "5"), ("B", "90", "99", "1"), ("C", "", "99", "3"))
    ]
    (line,) = board.best("column", "accuracy_pct", [row | {"setting": "S"} for row in rows], "page.md")
    assert "| B, C | 99.00 | A, B | 1 |" in line


def test_the_leaderboard_is_what_the_committed_tables_give():
    board = importlib.import_module("leaderboard")
    published = board.PAPERS, "published", board.list_published()
    for page, part, lines in ((board.PAGE, "defaults", board.board()), published):
        assert is_written(page, part, "\n".join(lines)), "python evidence/leaderboard.py"


def test_ranks_are_counted_from_the_best_and_equals_share_theirs():
    board = importlib.import_module("leaderboard")
    data = [{"a": 3.0, "b": 1.0, "c": 1.0}, {"a": 0.0, "b": 2.0, "c": 1.0}]
    assert board.places(data, ["a", "b", "c"]) == {"a": 2.0, "b": 1.75, "c": 2.25}


def test_examples_in_docstrings_of_public_names_give_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finder, runner = doctest.DocTestFinder(recurse=True), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with_examples = 0
    parts = [(name, kinfed.methods) for names in kinfed.methods.parts.PARTS.values() for name in names]
    for name, place in [*((name, kinfed) for name in kinfed.__all__), *parts]:
        part = getattr(place, name)
        if not getattr(part, "__module__", "").startswith("kinfed"):
            continue
        for test in finder.find(part, name, globs={"kinfed": kinfed}):
            with_examples += bool(test.examples)
            runner.run(test, clear_globs=False)
    assert with_examples >= 10
    assert runner.failures == 0


def test_the_ten_minutes_show_what_the_commands_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "start.md").read_text()
    predict, estimators, make = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(make, {})
    Path("examples").mkdir()
    table = Path("shops.csv").rename("examples/shops.csv")
    assert table.read_bytes() == (DOCS.parent / table).read_bytes()
    assert main(["list", str(table), "--client", "shop", "--target", "buys"]) == 0
    out, err = capsys.readouterr()
    said, shown = " ".join((err + out).split()), re.search(r"```\n(clients .*?)```", page, re.DOTALL)[1]
    assert " ".join(shown.split()) in said
    run = f"run {table} --client shop --target buys --method fedcedar rounds=1 --beside none --out shops --quiet"
    assert main(run.split()) == 0
    capsys.readouterr()
    exec(predict, {})
    assert re.fullmatch(r"\[('(yes|no)'(, )?){3}\]\n", capsys.readouterr().out)
    exec(estimators.replace("rounds=20", "rounds=1"), {})
