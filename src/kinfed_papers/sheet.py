"""A published table with our measurements beside it: as Markdown, CSV and LaTeX, and for the terminal."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from kinfed.data.split import LEAST
from kinfed.errors import several
from kinfed.report.tables.text_table import tex
from kinfed.runs.config.experiment import Experiment

from .published_table import LEAST_ROUNDS, REFERENCE, Column, Row
from .reproduction import FLAGS, MEASURES, Line, Reproduction
from .scoring import Scoring, kind_names
from .table_statistics import agreement

HEADINGS = ("method", "paper", "measured", "difference", "remarks")
RANKED = ("method", "paper", "measured", "rank, in the paper", "remarks")  # of a scaled table
SCALED = (
    f"scaled {{0:g}}: rounds x {{0:g}}, rounded up, at least {LEAST_ROUNDS}; a client uses that share of its examples, "
    f"at least {LEAST:,} or all that it has; clients and local epochs as in the paper"
)


class Group(NamedTuple):
    """One metric in one column."""

    heading: str
    rows: list[tuple[str, ...]]  # of each method
    summary: str  # what is not there, and which is best


class Sheet(NamedTuple):
    """The contents of a table, for every format."""

    title: str
    source: str
    protocol: list[str]
    headings: tuple[str, ...]
    groups: list[Group]
    claims: list[str]
    legend: list[str]


def sheet(
    made: Reproduction, lines: Sequence[Line], claims: Sequence[str] = (), made_with: Sequence[str] = ()
) -> Sheet:
    """The contents of a table, as text; `claims` and `made_with` are sentences to be added."""
    twice = Counter(row.printed for row in made.protocol.rows.values())
    notes: dict[str, int] = {}

    def remarks(line: Line) -> str:
        status, _, why = line.status.partition("failed: ")
        parts = [status + "failed" if why else status, *line.flags]
        notes_of_cell = (line.row.note, line.column.note) if line.by_seed else ()
        for note in (why, *notes_of_cell, line.paper.note if line.paper else ""):
            if note:
                parts.append(f"[{notes.setdefault(note, len(notes) + 1)}]")
        return ", ".join(filter(None, parts))

    groups: dict[tuple[str, str], list[Line]] = {}
    for line in sorted(lines, key=lambda line: _place(lines, line)):
        groups.setdefault((line.column.name, line.metric), []).append(line)
    shown = []
    for group in groups.values():
        measure, column = MEASURES[group[0].metric], group[0].column
        rows: list[tuple[str, ...]] = []
        for line in group:
            method = line.row.printed + (f" ({line.row.name})" if twice[line.row.printed] > 1 else "")
            paper = _number(line.paper.mean, line.paper.std, measure.digits) if line.paper else ""
            measured = _number(line.mean, line.std, measure.digits)
            rows.append((method, paper, measured, _compare_with_paper(line, group, made.scale < 1), remarks(line)))
        heading = f"{column.dataset}, {column.setting}: {measure.label} ({column.name})"
        shown.append(Group(heading, rows, summarise_group(made, group)))
    headings = RANKED if made.scale < 1 else HEADINGS
    if len(shown) > 1 and {tuple(cells[0] for cells in group.rows) for group in shown} == {(shown[0].rows[0][0],)}:
        headings, shown = ("figure", *headings[1:]), [_of_one_method(shown)]
    return Sheet(
        title=f"{made.protocol.name}: {made.protocol.title}",
        source=made.protocol.source,
        protocol=[*_protocols(made, lines), *describe_scoring(made.protocol.rows.values()), *made.protocol.notes],
        headings=headings,
        groups=shown,
        claims=list(claims),
        legend=[*_legend(made, lines), *made_with, *(f"[{number}] {note}." for note, number in notes.items())],
    )


def _of_one_method(groups: Sequence[Group]) -> Group:
    """Groups that all have one row, that of the same method, as one with a row for each."""
    rows = [(group.heading, *group.rows[0][1:]) for group in groups]
    return Group(groups[0].rows[0][0], rows, " ".join(dict.fromkeys(group.summary for group in groups)))


def _legend(made: Reproduction, lines: Sequence[Line]) -> list[str]:
    """What the signs of a table mean."""
    over = "over seeds" if made.protocol.spread == "seeds" else "over clients in the paper, over seeds here"
    of = "among the rows that have both numbers" if made.scale < 1 else "measured less the paper's"
    legend = [f"± is a standard deviation {over}. {'Rank' if made.scale < 1 else 'Difference'}: {of}."]
    used = {flag for line in lines for flag in line.flags}
    legend += [f"{flag}: {what}." for flag, what in FLAGS.items() if flag in used]
    return legend + ([f"{SCALED.format(made.scale)}."] if made.scale < 1 else [])


def _compare_with_paper(line: Line, group: Sequence[Line], scaled: bool) -> str:
    """Our number beside the paper's: the difference; of a scaled run, which had less training, the rank in both."""
    better = MEASURES[line.metric].better
    if line.difference is None or (scaled and not better):
        return ""
    if not scaled:
        return f"{line.difference:+.{MEASURES[line.metric].digits}f}"
    both = [(other.mean, other.paper.mean) for other in group if other.mean is not None and other.paper is not None]
    assert line.mean is not None
    assert line.paper is not None
    ours, print_ = (
        1 + sum(better * pair[i] > better * mine for pair in both)
        for i, mine in enumerate((line.mean, line.paper.mean))
    )
    return f"{ours}, {print_} of {len(both)}"


def summarise_group(made: Reproduction, group: Sequence[Line]) -> str:
    """A sentence on one metric of a column: how many of the printed rows it has, why not the others; which is best."""
    metric, column = group[0].metric, group[0].column
    printed = {
        method: number
        for (*where, method, name), number in made.protocol.numbers.items()
        if name == metric and tuple(where) == (column.dataset, column.setting)
    }
    ours = [line for line in group if line.mean is not None]
    measured = {line.row.printed for line in ours} & set(printed)
    parts = [f"{len(measured)} of {len(printed)} printed rows" if printed else "not printed"]
    why: dict[str, list[str]] = {}
    for method in printed:
        if method not in measured:
            why.setdefault(_reason(made, method, column), []).append(method)
    parts += [f"{reason}: {', '.join(methods)}" for reason, methods in why.items()]
    measure = MEASURES[metric]
    if measure.better:
        central = {row.printed for row in made.protocol.rows.values() if row.kind == REFERENCE} & set(printed)
        federated = {method: number.mean for method, number in printed.items() if method not in central}
        what = "best in the paper, centralised ones apart" if central else "best in the paper"
        parts += _best(what, federated, measure.better, measure.digits)
        twice = Counter(line.row.printed for line in ours)
        here = {line.row.name if twice[line.row.printed] > 1 else line.row.printed: line.mean for line in ours}
        measured_here = {name: value for name, value in here.items() if value is not None}
        parts += _best("best here", measured_here, measure.better, measure.digits)
        parts += [tau] if (tau := agreement(group)) else []
    return "; ".join(parts) + "."


def _reason(made: Reproduction, method: str, column: Column) -> str:
    """Why a printed row is not measured in a column."""
    rows: list[Row] = [row for row in made.protocol.rows.values() if row.printed == method]
    problems = [made.cell(row, column).problem for row in rows]
    return problems[0] or "not run" if problems else "not in kinfed"


def _best(what: str, values: dict[str, float], better: int, digits: int) -> list[str]:
    """Which is best, as text; those that are level at these digits are named together, nothing if all are."""
    if not values:
        return []
    top = round(max(better * value for value in values.values()), digits)
    level = [name for name, value in values.items() if round(better * value, digits) == top]
    if len(level) == len(values) > 1:
        return [f"{what}: all level ({better * top:.{digits}f})"]
    return [f"{what}: {', '.join(level)} ({better * top:.{digits}f})"]


def markdown(shown: Sheet, command: str) -> str:
    """The table as a page, with the command that makes it."""
    out = [f"# {shown.title}", "", f"{shown.source}.", "", "```console", f"$ {command}", "```", ""]
    out += [f"- {line}" for line in shown.protocol]
    for group in shown.groups:
        out += ["", f"**{group.heading}**", "", f"| {' | '.join(shown.headings)} |"]
        out += ["| --- | ---: | ---: | ---: | --- |", *(f"| {' | '.join(cells)} |" for cells in group.rows)]
        out += ["", group.summary]
    out += ["", "**What the paper claims**", "", *(f"- {claim}" for claim in shown.claims)] if shown.claims else []
    return "\n".join([*out, "", *(f"{line}\\" for line in shown.legend[:-1]), shown.legend[-1], ""])


def latex(shown: Sheet, command: str) -> str:
    """The table as a tabular of booktabs."""
    out = [f"% {command}", f"% {shown.source}", r"\begin{tabular}{lrrrl}", r"\toprule"]
    out.append(" & ".join(shown.headings) + r" \\")
    for group in shown.groups:
        out += [r"\midrule", rf"\multicolumn{{5}}{{l}}{{{tex(group.heading)}}} \\", r"\midrule"]
        out += [" & ".join(map(tex, cells)) + r" \\" for cells in group.rows]
        out += [rf"\multicolumn{{5}}{{p{{\linewidth}}}}{{\footnotesize {tex(group.summary)}}} \\"]
    comments = [*shown.protocol, *shown.claims, *shown.legend]
    out += [r"\bottomrule", r"\end{tabular}", "", *(rf"% {line}" for line in comments), ""]
    return "\n".join(out)


def table_csv(lines: Sequence[Line]) -> str:
    """The table as CSV, one line per number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    statistics = ("paper", "paper_std", "measured", "over_seeds", "over_clients", "difference")
    writer.writerow(
        [
            *("column", "dataset", "setting", "method", "printed", "metric", *statistics),
            *("seeds", "flags", "status", "by_seed", "seconds"),
        ]
    )
    for line in lines:
        paper = (line.paper.mean, line.paper.std) if line.paper else (None, None)
        numbers = (*paper, line.mean, line.std, line.over_clients, line.difference)
        named = (line.column.name, line.column.dataset, line.column.setting, line.row.name, line.row.printed)
        writer.writerow(
            [
                *(*named, line.metric),
                *("" if value is None else f"{value:.6g}" for value in numbers),
                *(len(line.by_seed), "; ".join(line.flags), line.status),
                " ".join(f"{seed}:{value:.6g}" for seed, value in line.by_seed.items()),
                "" if line.seconds is None else f"{line.seconds:.3f}",
            ]
        )
    return out.getvalue()


def terminal(shown: Sheet) -> Iterator[Table | Text]:
    """The table for the terminal."""
    yield Text(shown.title, style="bold")
    for group in shown.groups:
        yield Text(f"\n{group.heading}", style="italic")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for place, name in enumerate(shown.headings):
            number = 0 < place < 4
            table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
        for cells in group.rows:
            table.add_row(*map(Text, cells))
        yield table
        yield Text(group.summary)
    for claim in shown.claims:
        yield Text(f"\n{claim}")
    yield Text()
    for line in shown.legend:
        yield Text(line)


def _protocols(made: Reproduction, lines: Sequence[Line]) -> list[str]:
    """The settings that the shown columns have in common, each with the columns that have them."""
    by_description: dict[str, list[str]] = {}
    for column in dict.fromkeys(line.column.name for line in lines):
        cells = [made.cell(row, made.protocol.columns[column]) for row in made.protocol.rows.values()]
        for cell in [cell for cell in cells if cell.experiment][:1]:
            assert cell.experiment is not None
            by_description.setdefault(_describe_protocol(cell.experiment), []).append(column)
    if len(by_description) == 1:
        return [f"{description[:1].upper()}{description[1:]}." for description in by_description]
    return [f"{', '.join(columns)}: {description}." for description, columns in by_description.items()]


def describe_scoring(rows: Iterable[Row]) -> Iterator[str]:
    """Which model of which round is scored, and why: a sentence for each protocol among the rows that are printed."""
    by_rule: dict[Scoring, dict[tuple[str, ...], dict[str, None]]] = {}
    for row in rows:
        if row.kind == "" and not row.missing:
            by_models = by_rule.setdefault(replace(row.scoring, models=()), {})
            by_models.setdefault(row.scoring.models, {})[row.printed] = None
    for rule, by_models in by_rule.items():
        models = "; ".join(f"{kind_names(models)} of {', '.join(names)}" for models, names in by_models.items())
        yield f"Scored {rule.describe()}: {models}."


def _describe_protocol(experiment: Experiment) -> str:
    training = experiment.table["training"]
    split = experiment.split
    clients = experiment.clients
    optimiser = ", ".join(f"{key} {value:g}" for key, value in training["optimiser"].items() if key != "name" and value)
    unit = "steps" if training.get("steps") else "epochs"
    work = f"{training[unit]} {unit if training[unit] > 1 else unit.removesuffix('s')}"
    share = experiment.participation.share
    rounds = experiment.rounds.count
    every = experiment.rounds.evaluate_every
    clients_text = several(clients, "client") if clients else "the data's own clients"
    return (
        f"{clients_text}, {'all' if share == 1 else f'a share of {share:g}'} in a round; {rounds} rounds of {work}, "
        f"batch {training['batch']}, {training['optimiser']['name']} ({optimiser}); "
        f"model {experiment.table['model']['name']}; validation {split.validation:g}, test {split.test:g}; "
        f"evaluated every {f'{every} rounds' if every > 1 else 'round'}"
    )


def _place(lines: Sequence[Line], line: Line) -> tuple[int, int]:
    """A line's position: by column, then by metric."""
    columns = list(dict.fromkeys(entry.column.name for entry in lines))
    return columns.index(line.column.name), list(MEASURES).index(line.metric)


def _number(mean: float | None, std: float | None, digits: int) -> str:
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")
