"""What the documents tell people to type does what they say."""

import ast
import importlib
import inspect
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import kinfed
from kinfed.cli import main, table_options
from kinfed.cli.list import CITATIONS, REGISTRIES
from kinfed.cli.options import HOW
from kinfed.cli.program import COMMANDS, SHELLS, parser_of
from kinfed.data.datasets import DATASETS
from kinfed.data.datasets.sources.originals import ORIGINALS
from kinfed.data.tables.open_table import kind_of
from kinfed.methods import METHODS
from kinfed.runs.config import experiment, parts
from kinfed.search.study import Study
from kinfed.search.sweep import plan_sweep
from kinfed.simulation.execution import Execution
from kinfed_papers.analyses import ANALYSES
from kinfed_papers.cli.list import SUBJECTS
from kinfed_papers.published_table import load, tables
from kinfed_papers.result_pages import is_written, put, split_tables

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def python_block(name):
    return python_blocks(name)[0]


def python_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_readmes_example_runs_and_its_models_load(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(python_block("README.md"), found)
    assert found["run"].relation.shape == (2, 12, 12)
    loaded = kinfed.load_model("my-arrays", "3", found["net"])
    chosen = found["run"].model("3")
    assert all((a == b).all() for a, b in zip(loaded.parameters(), chosen.parameters(), strict=True))
    scores = found["run"].summary.scores
    assert scores["own"]["mean"] > 0.9  # what averaging over opposite clients could not reach
    assert scores[found["run"].history.chosen]["mean"] >= scores["own"]["mean"] - 0.02  # no bad first look
    with pytest.raises(kinfed.UsageError, match="already holds a run"):
        kinfed.save(found["run"], "my-arrays")


def test_tests_that_pages_name_are_there():
    named = [match for page in PAGES for match in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())]
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_table_of_methods_is_what_the_program_counts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "evidence"))
    table = importlib.import_module("method_table")
    assert is_written(table.PAGE, table.PART, "\n".join(table.lines())), (
        "python evidence/method_table.py writes it again"
    )
    assert all(family in table.PAGE.read_text().partition("## Lines")[0] for family in table.FAMILIES)
    assert is_written(table.PAGE, table.DIFFERS, "\n".join(table.differences()))


def test_the_page_of_every_method_has_its_equations_what_travels_when_to_use_it_and_its_settings(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "evidence"))
    table = importlib.import_module("method_table")
    for name, method in METHODS.items():
        page = table.PAGE.parent / table.find_page(name, Path(inspect.getfile(method)))
        text = page.read_text()
        for part in (r"\$\$", "## What (travels|is sent)", "## When"):
            assert re.search(part, text), f"{name}: {page.name} lacks {part}"
        named = {field.name for field in fields(method)} - table.COMMON
        unnamed = [one for one in named if not re.search(rf"`{one}`|{one}=", text)]
        assert not unnamed, f"{name}: {page.name} names no {unnamed}"


def test_parts_of_deciding_experiments_are_what_their_files_of_scores_give(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "evidence"))
    deciding = importlib.import_module("deciding")
    for name, asked in deciding.ASKED.items():
        page = deciding.RESULTS / f"{asked.page}.md"
        assert is_written(page, f"deciding: {name}", deciding.part(name)), f"python evidence/deciding.py {name} --write"
        for more in (*asked.settings.values(), *(f"method={method}" for method in asked.tuned or ())):
            experiment.resolve(experiment.read(asked.source, [*asked.common.split(), *more.split()]))


def test_what_needs_no_network_stands_beside_the_scores_that_tables_have_now(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "evidence"))
    controls = importlib.import_module("controls")
    for table, columns in controls.TABLES.items():
        part = controls.part(table, columns)
        written = is_written(controls.page(table), controls.part_name(table), part)
        assert written, f"python evidence/controls.py {table} --write"


def test_long_tables_stand_beside_their_page(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A\n\n## Errors\n\n<!-- x -->\n<!-- end of x -->\nB\n")
    short, long = ("| who | n \\| m | 1 |\n| --- | ---: | ---: |\n" + "| `a`, b | 2 | |\n" * rows for rows in (8, 9))
    put(page, "x", f"{short}\n```\n{long}```\n\n{long}\n**Of C (d)**\n\n{long}", "")
    links = "[Errors (who; n | m)](a/x.csv)\n\n[Of C (d)](a/x-of-c-d.csv)"
    whole = f"# A\n\n## Errors\n\n<!-- x -->\n{short}\n```\n{long}```\n\n{links}\n<!-- end of x -->\nB\n"
    assert page.read_text() == whole
    assert (tmp_path / "a" / "x.csv").read_text() == "who,n | m,1\n" + '"`a`, b",2,\n' * 9
    put(page, "x", f"## D\n\n{long}\n{long}", "")  # tables that are gone leave no file
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["x-d-2.csv", "x-d.csv"]
    assert is_written(page, "x", f"## D\n\n{long}\n{long}")
    assert not is_written(page, "x", f"## D\n\n{long}\n{long.replace('2', '3')}")
    assert split_tables(page, short, rows=7)[1].keys() == {tmp_path / "a" / "a.csv"}


def test_the_numbers_in_sentences_on_pages_of_results_are_printed_by_commands(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "evidence"))
    pages = importlib.import_module("campaign_pages")
    found = [line for page in pages.result_pages(pages.RESULTS) for line in pages.find_unprinted(page)]
    assert not found, "\n".join(found)


FIGURE = re.compile(r"(?<![\w.`/-])[+-]?(\d[\d,]*\.\d+)(?![\w.]*\d)")


def test_a_figure_in_a_sentence_of_a_product_page_stands_in_a_committed_file():
    """A decimal, outside of code, formulas, tables and lines that a command has printed."""
    written = [p for folder in ("evidence", "papers", "methods") for p in (ROOT / "docs" / folder).rglob("*")]
    texts = [
        p.read_text()
        for p in written
        if p.suffix in (".csv", ".json") or ("methods" not in p.parts and p.suffix == ".md")
    ]
    figures = set(re.findall(r"\d[\d,]*\.\d+", " ".join(texts)))
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "methods").glob("*.md")]
    missing, count = [], 0
    for page in pages:
        prose = re.sub(r"`[^`]*`|\$[^$]*\$", "", FENCED.sub("", page.read_text()))
        for line in prose.splitlines():
            shown = [] if line.startswith(("|", " ")) else FIGURE.findall(line)
            count += len(shown)
            missing += [f"{page.name}: {figure}: {line}" for figure in shown if figure not in figures]
    assert count > 40
    assert not missing, "\n".join(missing)


def test_the_table_on_the_page_about_data_is_a_whole_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(
        re.search(r"```toml\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL).group(1)
    )
    rows = "".join(f"{who},{t},{t % 7 + i}.5\n" for i, who in enumerate(("Ulm", "Bonn")) for t in range(240))
    Path("levels.csv").write_text("station,when,level\n" + rows)
    Path("rivers.csv").write_text("from,to,weight\nUlm,Bonn,1\n")
    assert main(["run", "config.toml", "rounds=1", "--out", "out", "--quiet"]) == 0
    written = (tmp_path / "config.toml").read_text()
    Path("data.toml").write_text(written.partition("\n\n")[2])  # without a method
    assert main(["list", "data.toml"]) == 0
    assert "2 clients" in " ".join(capsys.readouterr().out.split())


def test_the_recipe_for_a_method_is_complete(tmp_path, monkeypatch, capsys):
    """The file goes beside the other methods, its line into the table; then the command line knows it."""
    monkeypatch.chdir(tmp_path)
    Path("stay_home.py").write_text(python_block("CONTRIBUTING.md"))
    name = "stay_home.py:StayHome"
    assert main(["run", name, "method.share=0.3", "rounds=2", "--out", "run", "--quiet"]) == 0
    assert main(["run", name, "method.share=1.3", "--quiet"]) == 2
    assert "method.share must be in [0, 1]; got 1.3" in capsys.readouterr().err
    assert main(["list", "methods", name]) == 0
    assert "share = 0.5  (a number, in [0, 1])\n        s: 0 is Local, 1 is FedAvg" in capsys.readouterr().out


def test_a_relation_is_composed_in_a_line_and_has_a_part_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, line, part = python_blocks("docs/own-parts.md")[:4]
    composed, own = {}, {}
    exec(line, composed)
    assert isinstance(composed["method"], kinfed.Mixture)
    exec(part, own)
    weights = own["Ranks"](0.5).weigh(torch.tensor([[[0.2, 0.9, 0.5]]]), torch.tensor([[1.0, 2.0, 0.0]]), None, None)
    torch.testing.assert_close(weights, torch.tensor([[[1, 2, 0]]]) / 3)  # the last has not taken part
    Path("ranks.py").write_text(part)
    settings = ["method.weigh.name=ranks.py:Ranks", "method.weigh.factor=0.3", "rounds=2", "--out", "run", "--quiet"]
    assert main(["run", "mixture", *settings]) == 0


def commands(text):
    """Every kinfed command that a page shows, in a block of code or between backticks."""
    text = text.replace("\\\n", " ")  # a line that goes on
    blocks = [block for kind, block in FENCED.findall(text) if kind not in ("python", "{code-cell}")]
    text = FENCED.sub("", text)
    blocks += re.findall(r"^    .*$", text, re.MULTILINE)
    found = [re.sub(r"^(\$ )?(\w+=\S+ )*", "", line.strip()) for block in blocks for line in block.splitlines()]
    found += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    found += re.findall(r"<!-- \$ (kinfed [^>]+?) -->", text)  # what prints the number before it
    return [re.sub(r" (&|> \S+)$", "", line) for line in found if line.startswith("kinfed ")]


def test_programs_that_pages_name_are_there():
    named = {
        name for page in PAGES for name in re.findall(r"python ((?:benchmarks|evidence)/\w+\.py)", page.read_text())
    }
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_commands_are_found_wherever_a_page_shows_them():
    page = "a `kinfed run\nx` b 5<!-- $ kinfed run v -->\n\n"
    page += "    A=1 kinfed run \\\n        y  # c\n\n```console\n$ kinfed list z\nkinfed\n```\n"
    assert [line.split() for line in commands(page)] == [
        ["kinfed", "list", "z"],
        ["kinfed", "run", "y", "#", "c"],
        ["kinfed", "run", "x"],
        ["kinfed", "run", "v"],
    ]


@each_page
def test_every_command_on_a_page_is_one_that_kinfed_takes(page, tmp_path, monkeypatch):
    """The real parser and the real config read it; nothing is run."""
    monkeypatch.chdir(tmp_path)
    Path("stay_home.py").write_text(python_block("CONTRIBUTING.md"))
    Path("mine.py").write_text(python_block("docs/own-parts.md"))
    Path("loss.py").write_text(python_blocks("docs/own-parts.md")[1])
    Path("ranks.py").write_text(python_blocks("docs/own-parts.md")[3])
    Path("config.toml").write_text('method = "local"\n' + experiment.DEFAULT.read_text())
    Path("evidence").symlink_to(ROOT / "evidence")
    Path("my-run").mkdir()
    shutil.copy("config.toml", "my-run")  # as the command above it leaves
    Path("choice").mkdir()
    shutil.copy("config.toml", "choice/best.toml")
    for command in commands(page.read_text()):
        words = shlex.split(command, comments=True)[1:]
        asked = words[1:] if words[0] == "papers" else words
        whole = len(asked) < 2 or (len(asked) == 2 and (asked[1] in ANALYSES or asked[0] == "flower"))
        named = words[0] in COMMANDS and whole
        if named or (words[-1].endswith("...") and page.parent.name != "methods"):
            continue  # spoken of, not shown
        if words[0] == "--print-completion":
            assert {*words[1:]} <= {"SHELL", *SHELLS}, command
            continue
        asked, behind = parser_of(words[0]).parse_known_args(words)
        assert not behind or hasattr(asked, "overrides"), command
        assert all("=" in one and not one.startswith("-") for one in behind), command  # settings after an option
        if hasattr(asked, "overrides"):
            asked.overrides = [one for one in (*asked.overrides, *behind) if not one.startswith(HOW)]
        if words[0] == "sweep":
            study = Study(experiment.read(asked.source, []), Execution(), tmp_path)
            plan_sweep(study, asked.method.split(",") if asked.method else [], asked.overrides).check()
        elif words[:2] == ["papers", "run"]:
            assert asked.table in tables(), command
            table = load(asked.table)
            methods = {*table.rows, *table.others, *METHODS, "mine.py:Stay", ""}
            assert {*asked.method.split(",")} <= methods, command
            assert {*asked.column.split(",")} <= {*table.columns, ""}, command
        elif words[:2] == ["papers", "list"]:
            assert asked.subject in SUBJECTS, command
        elif words[0] == "list" and asked.subject in (*REGISTRIES, CITATIONS):
            assert set(asked.fetch or ()) <= set(ORIGINALS), command
            if asked.subject == "datasets" and asked.overrides:
                parts.make(DATASETS, experiment.override({"name": asked.name}, asked.overrides), "dataset", given=1)
        elif table_options.is_table(given := getattr(asked, "source", "") or getattr(asked, "subject", "")):
            said = dict(one.split("=", 1) for one in asked.overrides)
            series = (said.get(name, "") for name in ("future", "static"))
            listed = [one for names in (asked.time, asked.weight, *series) for one in names.split(",") if one]
            more = [one for one in listed if one != "price"]
            named = asked.client.split(",")
            rows = [(*[who] * len(named), i, i % 2, *[i] * len(more)) for who in "AB" for i in range(9)]
            columns = ", ".join([*named, "price", asked.target, *more])
            if kind_of(given) == "sql":
                given = "sqlite:///shops.db"
                with closing(sqlite3.connect("shops.db")) as made, made:
                    made.execute("DROP TABLE IF EXISTS sales")
                    made.execute(f"CREATE TABLE sales ({columns})")
                    made.executemany(f"INSERT INTO sales VALUES ({', '.join('?' * len(rows[0]))})", rows)
                Path("site.sql").write_text("SELECT * FROM sales")
            else:
                Path(given).parent.mkdir(exist_ok=True)
                Path(given).write_text("\n".join([columns, *(",".join(map(str, row)) for row in rows)]))
            experiment.resolve({"method": "local"} | table_options.read(given, asked, getattr(asked, "method", "")))
        elif getattr(asked, "former", None):  # the run's own config, with settings changed
            assert all("=" in one for one in (asked.source, *asked.overrides) if one), command
        elif hasattr(asked, "source") or hasattr(asked, "subject"):
            asked.source = getattr(asked, "source", None) or asked.subject
            table = experiment.read(asked.source, asked.overrides)
            settings = table.pop("analysis", {})
            experiment.resolve(table)
            if hasattr(asked, "analysis"):
                parts.call(ANALYSES[asked.analysis], settings, "analysis", given=1)


def outputs(page):
    """What a page shows of what commands print: those commands, and lines, with "..." for what is left out.

    These are blocks of no language that follow blocks of commands.
    """
    asked = []
    for kind, block in FENCED.findall(page.read_text()):
        if kind == "console":
            asked += block.replace("\\\n", " ").splitlines()
        elif not kind and asked:
            yield asked, [line.rstrip() for line in block.splitlines()]
            asked = []


def test_what_the_tutorial_shows_is_what_its_commands_print(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = list(outputs(ROOT / "docs" / "start.md"))
    assert len(shown) >= 4
    for asked, lines in shown:
        printed = []
        for words in (shlex.split(command, comments=True) for command in asked):
            if words[:1] != ["kinfed"] or words[1:3] == ["run", "kin"]:
                continue  # to install it, and to try it
            words.remove("--open") if "--open" in words else None
            run = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=400,
            )
            assert run.returncode == 0, run.stdout
            printed += [line.rstrip() for line in run.stdout.splitlines()]
        at = 0
        for line in lines:
            if line != "...":
                assert line in printed[at:], f"{asked[-1]}: printed no more: {line}"
                at += printed[at:].index(line) + 1


# Words that readers stumbled over, each with what says it plainly.
REFUSED = {
    "in print": "in the paper",
    "campaign": "experiments",
    "made anew": "generated",
    "kin help": "learning from others helps",
    "hurt": "lose",
    "ours": "kinfed's, or measured here",
    "but for": "except",
    "aloud": "with a warning",
    "doubted": "warned about",
    "not run yet": "a figure, or nothing",
    "in the race": "left",
    "before the restructuring": "nothing",
    "wip": "nothing",
}


def refused(text):
    """The words of a text that have a plainer one; OURS in a command's help is the name of an argument."""
    return [f"{word}: say {plain}" for word, plain in REFUSED.items() if re.search(rf"\b{word}\b(?!-)", text.lower())]


def test_product_pages_say_things_plainly():
    found = {}
    for page in PAGES:
        if "evidence" not in page.parts and page.name != "CHANGELOG.md":
            text = re.sub(r"OURS|evidence/campaign", "", re.sub(r"<!--.*?-->", "", page.read_text()))
            found[str(page)] = refused(text)
    assert len(found) > 35
    assert {page: words for page, words in found.items() if words} == {}


def test_help_and_errors_say_things_plainly():
    """Every sentence in the code: help, errors, notes below tables, text on report pages."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if " " in text and (words := refused(text.replace("OURS", ""))):
                found[f"{path}:{node.lineno}"] = words
    assert found == {}


@each_page
def test_every_picture_and_page_that_is_linked_is_there(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCED.sub("", page.read_text()))
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert gone == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "methods").glob("[!R]*.md")), ids=lambda page: page.stem)
def test_every_page_of_a_method_shows_a_small_picture_and_the_command_that_made_it(page):
    text = page.read_text()
    shown = re.findall(r"!\[[^]]+\]\((\S+\.png)\)", text)
    assert shown
    for picture in shown:
        assert (page.parent / picture).stat().st_size < 150_000
        _, _, below = text.partition(f"]({picture})")
        assert commands(below.split("\n#")[0]), f"say below {picture} which command made it"
