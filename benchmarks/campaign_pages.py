"""What the campaign writes: a table's part of its page, and its scores as small files."""

import csv
import io
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from page import PART, put

from kinfed import UsageError
from kinfed.cli import reproduce
from kinfed.experiments.reproduction import MEASURES
from kinfed.files import replacing
from kinfed.papers import published_table

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WHOLE = re.compile(r"(?:Written|Measured) by `python benchmarks/.*", re.DOTALL)  # a program writes all that follows
ASIDE = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\d+ (?:January|February|March|April|May|June|July|August|September|October|November|"
    r"December) \d{4}|commit \w+|(?:et al\.,|Section|Table|Figure) [\d.]+"
)  # quoted, addresses, dates, references
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
STATED = re.compile(r"(?<![\w.\-/=\[])(\d+(?:,\d{3})*(?:\.\d+)?)(?!\w|\.\d)(?:<!-- (?:= ([^>]+)|\$ ([^>]+)) -->)?")
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def publish(part, works, asked):
    """Write what is finished of a part; returns what was done, in words."""
    ended = [one for one in works if one.state in ("done", "failed")]
    if not any(one.folder.is_finished for one in ended):
        return "nothing is finished yet"
    page, kept = asked.results / f"{part.partition('.')[0]}-tables.md", asked.results / "tables" / part
    if not page.exists() or f"<!-- end of {part} -->" not in page.read_text():
        marks = f"<!-- {part} -->, and on the next line <!-- end of {part} -->"
        raise UsageError(f"{page} has no place for it; write where it belongs {marks}")
    made = requested(works, ended, asked)
    tables = reproduce.write_statistics(made)
    reproduce._write(made, {str(one.folder): one.failed for one in ended if one.failed})
    before, now = worth(kept / "table.csv"), worth(made.out / "table.csv")
    if less := [number for number, known in before.items() if known > now.get(number, (0, 0))]:
        return f"left as it is: {len(less)} of its {len(before)} numbers have fewer rounds or seeds in {made.out}"
    kept.mkdir(parents=True, exist_ok=True)
    written = {"table.csv": (made.out / "table.csv").read_text(), "history.csv": history(made)}
    if tables:
        written["statistics.md"] = f"# {part}: statistics\n\n{(made.out / reproduce.STATISTICS).read_text()}"
    for name, text in written.items():
        with replacing(kept / name) as file:
            file.write_text(text)
    shown = (made.out / "table.md").read_text().replace("# ", "## ", 1)
    put(page, part, shown.replace(f"({reproduce.STATISTICS})", f"(tables/{part}/statistics.md)"), page.stem)
    return f"{len(now)} numbers in {page.name}"


def requested(works, ended, asked):
    """The reproduction of the methods and columns that have ended runs, and of means over such columns."""
    entries = dict.fromkeys(one.entry for one in works)
    entry = replace(works[0].entry, seeds=max(one.seeds for one in entries))
    protocol = entry.made(asked.keep, asked.data_dir).protocol
    wanted = list(dict.fromkeys(name for one in entries for name in one.column.split() if name in protocol.columns))
    first = {}  # of the columns that read the same runs
    for name, column in protocol.columns.items():
        first[name] = next(key for key, other in protocol.columns.items() if other.changes == column.changes)
    there = {first[one.column] for one in ended}
    held = [name for name in wanted if not protocol.columns[name].mean_of and first[name] in there]
    held += [name for name in wanted if (of := protocol.columns[name].mean_of) and set(of) <= set(held)]
    methods = list(dict.fromkeys(one.method for one in ended))
    return entry.made(asked.keep, asked.data_dir, methods, held)


def worth(path):
    """By column, method and metric, how much a number of ours is worth: its scale, and how many seeds it has."""
    if not path.exists():
        return {}
    found = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            scaled = re.search(r"scaled ([\d.]+)", line["flags"])
            if line["ours"]:
                number = line["column"], line["method"], line["metric"]
                found[number] = float(scaled.group(1)) if scaled else 1.0, int(line["seeds"])
    return found


def history(made):
    """Test scores by round as CSV: means over clients and seeds, a line for each cell, scored model and score."""
    found = {}  # by cell, model and score: by round, a score for each seed
    for column in made.protocol.columns.values():
        scores = {MEASURES[metric].score for metric in made.protocol.metrics(column)}
        for row in made.protocol.rows.values():
            home = made.folder(row, column)
            for seed, folder in made.finished(made.cell(row, column)).items():
                for (model, score, at), mean in means(folder.history, scores).items():
                    key = (home.parent.relative_to(made.out / "runs").as_posix(), row.name, model, score)
                    found.setdefault(key, defaultdict(dict))[at][seed] = mean
    rounds = sorted({at for one in found.values() for at in one})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["column", "method", "model", "score", "seeds", *rounds])
    for key, one in found.items():
        seeds = max(len(values) for values in one.values())
        writer.writerow(
            [*key, seeds, *(f"{statistics.fmean(one[at].values()):.4g}" if at in one else "" for at in rounds)]
        )
    return out.getvalue()


def means(path, scores):
    """The mean test scores over clients in a run's history, by model, score and round."""
    found = defaultdict(list)
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["split"] == "test" and line["metric"] in scores:
                found[line["model"], line["metric"], int(line["round"])].append(float(line["value"]))
    return {key: statistics.fmean(values) for key, values in found.items()}


def unprinted(page):
    """The numbers in a page's sentences that no command has printed, in words.

    Printed is what stands between marks, below a command or, outside of marks, after the name of the program that
    writes the page; of a paper's page also the scores in tables/ and deciding/, and the paper's own numbers and
    settings. A sentence may round it. Counts up to twelve need nothing. A number that follows from others
    says how, 5.9<!-- = 65.1 - 59.2 -->, and one that is printed elsewhere by what, 7.4<!-- $ kinfed data inspect x -->.
    """
    text, known = page.read_text(), []
    if paper := page.stem.removesuffix("-tables") if page.stem.endswith("-tables") else "":
        for path in (*page.parent.glob(f"tables/{paper}.*/*.csv"), *page.parent.glob("deciding/*.csv")):
            known += [times * value for value in numbers_in(path.read_text()) for times in (1, 100)]
        for path in (published_table.PAPERS / paper).glob("*.*"):
            known += numbers_in(path.read_text())
    for aside in (PART, FENCED, WHOLE, ASIDE):
        if aside is not ASIDE:
            known += [number for match in aside.finditer(text) for number in numbers_in(match.group())]
        text = aside.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    known, found = np.unique(known), []
    for place, line in enumerate(text.splitlines(), 1):
        for stated, total, command in STATED.findall(line):
            if not (command or is_printed(stated, total, known)):
                found.append(
                    f"{page.name}, line {place}: {stated}{f', said to be {total},' * bool(total)} in: {line:.100}"
                )
    return found


def numbers_in(text):
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def is_printed(stated, total, known):
    """Whether known numbers have this one, or those of a sum, which makes it; all as they are rounded there."""
    if not total:
        return near(stated, known)
    if not re.fullmatch(r"[\d., +*/()-]+", total):
        return False
    return all(near(one, known) for one in NUMBER.findall(total)) and near(stated, [eval(total.replace(",", ""))])


def near(stated, known):
    """Whether one of the known numbers is rounded to this text; small counts always are."""
    plain = stated.replace(",", "")
    digits = len(plain.partition(".")[2])
    value = float(plain)
    return (not digits and value <= 12) or bool(np.any(np.abs(np.asarray(known) - value) <= 0.5 * 10**-digits + 1e-9))
