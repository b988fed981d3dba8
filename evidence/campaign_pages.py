"""What the campaign writes: a table's part of its page, and its scores as small files."""

import csv
import io
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from kinfed import UsageError
from kinfed.files import replacing
from kinfed.report.tables.text_table import of_markdown
from kinfed_papers import published_table
from kinfed_papers.claim_verdicts import seeds_of
from kinfed_papers.cli import run as reproduce
from kinfed_papers.environment import read_machines, sentences
from kinfed_papers.reproduction import MEASURES, OTHER_PROTOCOL
from kinfed_papers.result_pages import PART, place_table, put, split_tables, write
from kinfed_papers.sheet import table_csv

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WHOLE = re.compile(
    r"(?:Written|Measured) by `python (?:benchmarks|evidence)/.*", re.DOTALL
)  # what a program writes to the end
ASIDE = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\d+ (?:January|February|March|April|May|June|July|August|September|October|November|"
    r"December) \d{4}|commit \w+|(?:et al\.,|Section|Table|Figure) [\d.]+"
)  # quoted, addresses, dates, references
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
STATED = re.compile(r"(?<![\w.\-/=\[])(\d+(?:,\d{3})*(?:\.\d+)?)(?!\w|\.\d)(?:<!-- (?:= ([^>]+)|\$ ([^>]+)) -->)?")
MADE_WITH = re.compile(r"Made with (.+)\.")
NOTES = "Settings and remarks"
SETTINGS, REMARKS = "settings", "remarks"  # of a table, as its notes name them
TITLE = re.compile(r"(?:([A-Z]): )?([^:]+)(?:: (.+))?")  # of a table of statistics: its set, its kind, its runs
HISTORY = ("column", "method", "model", "score", "seeds")
GUIDES = ("analyses", "public-codes", "reproduce")  # pages beside the results, whose numbers are settings
COUNTED = re.compile(r"^Of (\d+) runs: ", re.MULTILINE)
RESULTS = Path(__file__).parents[1] / "docs" / "papers"


def publish(part, works, args):
    """Write what is finished of a part, with the committed numbers whose runs are not here; returns what was done."""
    page = args.results / f"{part.partition('.')[0]}-tables.md"
    kept = args.results / "tables" / part
    ended = [work for work in works if work.state in ("done", "failed")]
    published = read_committed(kept / "table.csv")
    if not published and not any(work.folder.is_finished for work in ended):
        return "nothing is finished yet"
    parts = {match.group(1): match.group() for match in PART.finditer(page.read_text())} if page.exists() else {}
    if part not in parts:
        marks = f"<!-- {part} -->, and on the next line <!-- end of {part} -->"
        raise UsageError(f"{page} has no place for it; write where it belongs {marks}")
    made = make_requested(works, ended, published, args)
    new_lines = made.lines({str(work.folder): work.failure for work in ended if work.failure})
    lines, gone = join_numbers(
        made, new_lines, {key: row for key, row in published.items() if scale(row["flags"]) == made.scale}
    )
    now = {number(line): (scale("; ".join(line.flags)), len(line.by_seed)) for line in lines if line.by_seed}
    before = {key: (scale(row["flags"]), int(row["seeds"])) for key, row in published.items()}
    if less := [key for key, worth in before.items() if worth > now.get(key, (0, 0))]:
        return f"left as it is: {len(less)} of its {len(published)} numbers have fewer rounds or seeds in {made.out}"
    earlier_notes = read_notes(page, part)
    machines = dict.fromkeys(match[1] for _, note in earlier_notes if (match := MADE_WITH.fullmatch(note)))
    machines |= dict.fromkeys(read_machines(made.out))
    shown = reproduce.contents(made, lines, sentences(machines, sum_seconds(made, lines)))
    if not any(work.folder.is_finished for work in ended):  # nothing is new but the form
        shown = shown._replace(protocol=[note for of, note in earlier_notes if of == SETTINGS])
    if gone and (other := list_settings(earlier_notes) - list_settings(notes_of(shown))):
        return f"left as it is: {gone} of its numbers have no run here, and were made by other settings: {min(other)}"
    text = compose(shown, reproduce.command(made, lines))
    kept.mkdir(parents=True, exist_ok=True)
    text += statistics_of(made, lines, published, kept / "statistics.md")
    written = {"table.csv": numbers(lines, published), "history.csv": history(made, kept / "history.csv")}
    for name, contents in written.items():
        if contents:
            with replacing(kept / name) as file:
                file.write_text(contents)
    put(page, part, text, page.stem, rows=0)
    without = f", {gone} of them without a run here" if gone else ""
    return f"{len(now)} numbers in {page.name}{without}"


def make_requested(works, ended, published, args):
    """The reproduction of methods and columns that have ended runs or committed numbers, and of means over these."""
    entries = dict.fromkeys(work.entry for work in works)
    entry = replace(works[0].entry, seeds=max(entry_.seeds for entry_ in entries))
    protocol = entry.make_reproduction(args.keep, args.data_dir).protocol
    there = {column for column, *_ in published} | {work.column for work in ended}
    queued = {name for entry_ in entries for name in entry_.column.split()}
    wanted = [name for name in protocol.columns if name in queued | there]
    first = {}  # of the columns that read the same runs
    for name, column in protocol.columns.items():
        first[name] = next(key for key, other in protocol.columns.items() if other.changes == column.changes)
    there = {first[name] for name in there}
    held = [name for name in wanted if not protocol.columns[name].mean_of and first[name] in there]
    held += [name for name in wanted if (of := protocol.columns[name].mean_of) and set(of) <= set(held)]
    methods = list(dict.fromkeys([*(work.method for work in ended), *(method for _, method, _ in published)]))
    return entry.make_reproduction(args.keep, args.data_dir, methods, held)


def read_committed(path):
    """The rows of a committed table.csv that have a measured number, by column, method and metric.

    Those of another protocol than the table's are left out: they are to be measured again.
    """
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["measured"] and OTHER_PROTOCOL not in row["flags"]]
    return {(row["column"], row["method"], row["metric"]): row for row in rows}


def published_seeds(folder, share):
    """By column and method, the seeds of which all numbers are committed, at this share of the rounds."""
    seeds_by_cell = {}
    for (column, method, _), row in read_committed(folder / "table.csv").items():
        seeds = set(seeds_of(row)) if scale(row["flags"]) == share else set()
        seeds_by_cell[column, method] = seeds_by_cell.get((column, method), seeds) & seeds
    return seeds_by_cell


def number(line):
    return line.column.name, line.row.name, line.metric


def scale(flags):
    """Which share of the rounds a number has, by its flags."""
    scaled = re.search(r"scaled ([\d.]+)", flags)
    return float(scaled.group(1)) if scaled else 1.0


def join_numbers(made, lines, published):
    """A table's lines, with the seeds of committed numbers that they lack; and how many numbers have such seeds."""
    by_number, gone = {}, 0
    for line in sorted(lines, key=lambda line: bool(line.column.mean_of)):  # means last, of what they are means of
        by_seed, flags, over_clients, seconds, status = line.by_seed, [], line.over_clients, line.seconds, line.status
        if parts := [by_number[name, line.row.name, line.metric] for name in line.column.mean_of]:
            shared = set.intersection(*(set(part.by_seed) for part in parts))
            seeds = [seed for seed in parts[0].by_seed if seed in shared]
            by_seed = {seed: statistics.fmean(part.by_seed[seed] for part in parts) for seed in seeds}
            flags = [flag for part in parts for flag in part.flags]
            status = next((part.status for part in parts if part.status), "")
        elif row := published.get(number(line)):
            lost = {seed: value for seed, value in seeds_of(row).items() if seed not in by_seed}
            if lost:
                gone, counts, flags = gone + 1, (len(by_seed), len(lost)), row["flags"].split("; ")
                over_clients = weigh_means((over_clients, row["over_clients"]), counts)
                seconds = weigh_means((seconds, row.get("seconds")), counts)
                by_seed = dict(sorted({**by_seed, **lost}.items()))
                if not status.startswith("failed"):
                    some = f"{len(by_seed)} of {made.count} seeds" if len(by_seed) < made.count else ""
                    status = row["status"] if row["status"].startswith("failed") else some
        flags = tuple(flag for flag in dict.fromkeys([*flags, *line.flags]) if flag)
        by_number[number(line)] = line._replace(
            by_seed=by_seed, over_clients=over_clients, flags=flags, status=status, seconds=seconds
        )
    return [by_number[number(line)] for line in lines], gone


def numbers(lines, published):
    """The table as CSV; committed rows with the same scores stay, as they were computed from all digits of these."""
    rows = csv.DictReader(io.StringIO(table_csv(lines)))
    out = io.StringIO()
    writer = csv.DictWriter(out, rows.fieldnames, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        before = published.get((row["column"], row["method"], row["metric"]), {})
        same = before.get("by_seed") == row["by_seed"] and before["flags"] == row["flags"]
        writer.writerow(before | {"status": row["status"]} if same else row)
    return out.getvalue()


def weigh_means(values, counts):
    """The mean over all seeds, of means over some of them; None if one is not known."""
    terms = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    if any(value in (None, "") for value, _ in terms):
        return None
    return sum(float(value) * count for value, count in terms) / sum(counts)


def sum_seconds(made, lines):
    """Seconds that the runs of a table have trained; 0 if they are not known of all."""
    cells = {made.folder(line.row, line.column): line for line in lines if line.by_seed and not line.column.mean_of}
    if any(line.seconds is None for line in cells.values()):
        return 0
    return sum(line.seconds * len(line.by_seed) for line in cells.values())


def compose(shown, command):
    """A table's part of its page: the command, the numbers, and what is to be known of them."""
    numbers_table = tabulate(
        ("setting", *shown.headings), [(group.heading, *cells) for group in shown.groups for cells in group.rows]
    )
    head = [f"## {shown.title}", "", f"{shown.source}.", "", "```console", f"$ {command}", "```", ""]
    named = shown.title.partition(":")[0]
    head += [f"**Numbers of {named} beside the paper's**", "", *numbers_table, "", f"**{NOTES} of {named}**", ""]
    return "\n".join([*head, *tabulate(("of", "note"), notes_of(shown)), ""])


def tabulate(headings, rows):
    """Lines of a Markdown table."""
    cells = [[str(cell).replace("|", r"\|") for cell in row] for row in (headings, ["---"] * len(headings), *rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def notes_of(shown):
    """What is to be known of a table: its settings, a summary of each group, and what its remarks mean."""
    summaries = [(group.heading, group.summary) for group in shown.groups]
    return [
        *((SETTINGS, line) for line in shown.protocol),
        *summaries,
        *((REMARKS, line) for line in shown.legend),
    ]


def read_notes(page, part):
    """The notes of a committed part, as `notes_of` gives them."""
    path = place_table(page, part, NOTES)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


def list_settings(notes):
    """What the notes of a table say of its settings, without the names of columns, and of its rows."""
    above = [re.sub(r"^[\w/., -]+: ", "", note) for of, note in notes if of == SETTINGS]
    below = [note.partition("] ")[2] for of, note in notes if of == REMARKS and note.startswith("[")]
    return {line.casefold() for line in [*above, *below]}


def statistics_of(made, lines, published, path):
    """Write the statistics of the runs that are here, unless the file has those of more; a sentence that links it."""
    every_run = runs_of(made, {number(line)[:2]: line.by_seed for line in lines})
    here = runs_of(made, {(cell.column.name, cell.row.name): made.finished_runs(cell) for cell in made.cells()})
    text = path.read_text() if path.exists() and published else ""  # of numbers that are measured again it says nothing
    if text and not COUNTED.search(text):  # it is of all that was committed
        of = runs_of(made, {key[:2]: seeds_of(row) for key, row in published.items()})
        text = text.replace("\n", f"\n\n{count_runs(of)}\n", 1)
    if reproduce.write_statistics(made) and (not text or len(here) >= int(COUNTED.search(text).group(1))):
        statistics_text = (made.out / reproduce.STATISTICS).read_text()
        text = f"# {path.parent.name}: statistics\n\n{count_runs(here)}\n\n{join_grids(of_markdown(statistics_text))}"
    if not text:
        return ""
    write(path, *split_tables(path, text, rows=0))
    some = int(COUNTED.search(text).group(1))
    link = reproduce.LINK.replace(f"({reproduce.STATISTICS})", f"(tables/{path.parent.name}/statistics.md)")
    return link.replace(").\n", f"), of {some} of the {len(every_run)} runs.\n") if some < len(every_run) else link


def join_grids(grids):
    """Tables of statistics for sets of runs: a table of each kind for all sets, and one of what is noted."""
    kinds, by_note = {}, {}
    for grid in grids:
        letter, kind, runs = TITLE.fullmatch(grid.title).groups("")
        for note in filter(None, (runs, *grid.notes)):
            by_note.setdefault((kind, note), []).append(letter)
        headings = [(name, grid.headings[:place].count(name)) for place, name in enumerate(grid.headings)]
        for block in grid.blocks:
            named = [dict(zip(headings, cells, strict=True)) for cells in block]
            kinds.setdefault(kind, []).extend({("set", 0): letter} | cells for cells in named)
    notes = [(kind, ", ".join(letters), note) for (kind, note), letters in by_note.items()]
    lines = []
    for kind, rows in kinds.items():
        headings = list(dict.fromkeys(heading for row in rows for heading in row))
        cells = [[row.get(heading, "") for heading in headings] for row in rows]
        lines += [f"**{kind}**", "", *tabulate([name for name, _ in headings], cells), ""]
    return "\n".join([*lines, "**Sets and notes**", "", *tabulate(("table", "set", "note"), notes), ""])


def runs_of(made, seeds):
    """The runs of a table's cells: column, method and seed, of columns that read the same ones the first."""
    rows, columns = made.protocol.rows, made.protocol.columns
    homes = {at: made.folder(rows[at[1]], columns[at[0]]) for at in seeds if not columns[at[0]].mean_of}
    runs = {(home.parent.relative_to(made.out / "runs").as_posix(), at[1]): seeds[at] for at, home in homes.items()}
    return [(*cell, seed) for cell, some in runs.items() for seed in some]


def count_runs(runs):
    """Which runs these are, in words."""
    seeds, methods = defaultdict(list), defaultdict(list)
    for column, method, seed in runs:
        seeds[column, method].append(str(seed))
    for (column, method), some in seeds.items():
        methods[column, ", ".join(some)].append(method)
    parts = [
        f"{', '.join(names)} on {column}, {'seeds' if ',' in some else 'seed'} {some}"
        for (column, some), names in methods.items()
    ]
    return f"Of {len(runs)} runs: {'; '.join(parts)}."


def history(made, path):
    """Test scores by round as CSV: means over clients and seeds, a line for each cell, scored model and score.

    Where the file at this path has more seeds of a line, that stays. Nothing if no score of the table is a client's.
    """
    by_line = {}  # by cell, model and score: by round, a score for each seed
    for column in made.protocol.columns.values():
        scores = {MEASURES[metric].score for metric in made.protocol.metrics(column)}
        for row in made.protocol.rows.values():
            home = made.folder(row, column)
            for seed, folder in made.finished_runs(made.cell(row, column)).items():
                for (model, score, at), mean in means(folder.history, scores).items():
                    key = (home.parent.relative_to(made.out / "runs").as_posix(), row.name, model, score)
                    by_line.setdefault(key, defaultdict(dict))[at][seed] = mean
    lines = {}  # of the same: which seeds, and by round the mean
    for key, by_round in by_line.items():
        texts = {at: f"{statistics.fmean(values.values()):.4g}" for at, values in by_round.items()}
        seeds = sorted({seed for values in by_round.values() for seed in values})
        lines[key] = " ".join(map(str, seeds)), texts
    for key, line in earlier(path).items():
        if len(line[0].split()) > len(lines.get(key, ("",))[0].split()):
            lines[key] = line
    if not lines:
        return ""
    rounds = sorted({at for _, texts in lines.values() for at in texts})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*HISTORY, *rounds])
    columns, rows = list(made.protocol.columns), list(made.protocol.rows)
    for key in sorted(lines, key=lambda key: (columns.index(key[0]), rows.index(key[1]))):
        seeds, texts = lines[key]
        writer.writerow([*key, seeds, *(texts.get(at, "") for at in rounds)])
    return out.getvalue()


def earlier(path):
    """The lines of a committed history.csv: which seeds, and by round the mean, by column, method, model, score."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            tuple(row[name] for name in HISTORY[:4]): (
                row["seeds"],
                {int(at): text for at, text in row.items() if at not in HISTORY and text},
            )
            for row in csv.DictReader(file)
        }


def means(path, scores):
    """The mean test scores over clients in a run's history, by model, score and round."""
    values_by_key = defaultdict(list)
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["split"] == "test" and line["metric"] in scores:
                values_by_key[line["model"], line["metric"], int(line["round"])].append(float(line["value"]))
    return {key: statistics.fmean(values) for key, values in values_by_key.items()}


def result_pages(folder):
    """The pages of a folder that tell results."""
    return [page for page in sorted(folder.glob("*.md")) if page.stem not in GUIDES]


def find_unprinted(page):
    """The numbers in a page's sentences that no command has printed, in words.

    Printed is what stands between marks, below a command or, outside of marks, after the name of the program that
    writes the page; of a paper's page also what tables/ and deciding/ hold, and the paper's own numbers and
    settings. A sentence may round it. Counts up to twelve need nothing. A number that follows from others
    says how, 5.9<!-- = 65.1 - 59.2 -->, and one that is printed elsewhere by what, 7.4<!-- $ kinfed list x -->.
    """
    text, printed = page.read_text(), []
    for path in page.with_suffix("").glob("*.csv"):
        printed += numbers_in(path.read_text())
    if paper := page.stem.removesuffix("-tables") if page.stem.endswith("-tables") else "":
        for path in (*page.parent.glob(f"tables/{paper}.*/**/*.*"), *page.parent.glob("deciding/*.csv")):
            printed += [times * value for value in numbers_in(path.read_text()) for times in (1, 100)]
        for path in (published_table.PAPERS / paper).glob("*.*"):
            printed += numbers_in(path.read_text())
    for aside in (PART, FENCED, WHOLE, ASIDE):
        if aside is not ASIDE:
            printed += [number for match in aside.finditer(text) for number in numbers_in(match.group())]
        text = aside.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    printed, unprinted_lines = np.unique(printed), []
    for place, line in enumerate(text.splitlines(), 1):
        for stated, total, command in STATED.findall(line):
            if not (command or is_printed(stated, total, printed)):
                unprinted_lines.append(
                    f"{page.name}, line {place}: {stated}{f', said to be {total},' if total else ''} in: {line:.100}"
                )
    return unprinted_lines


def numbers_in(text):
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def is_printed(stated, total, printed):
    """Whether known numbers have this one, or those of a sum, which makes it; all as they are rounded there."""
    if not total:
        return is_near(stated, printed)
    if not re.fullmatch(r"[\d., +*/()-]+", total):
        return False
    return all(is_near(part, printed) for part in NUMBER.findall(total)) and is_near(
        stated, [eval(total.replace(",", ""))]
    )


def is_near(stated, printed):
    """Whether one of the known numbers is rounded to this text; small counts always are."""
    plain = stated.replace(",", "")
    digits = len(plain.partition(".")[2])
    value = float(plain)
    return (not digits and value <= 12) or bool(np.any(np.abs(np.asarray(printed) - value) <= 0.5 * 10**-digits + 1e-9))
