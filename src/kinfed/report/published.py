"""A published table with our numbers beside it: as Markdown, CSV and LaTeX, and for the terminal."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from ..data.split import LEAST
from ..experiments.config import Experiment
from ..experiments.reproduction import FLAGS, MEASURES, Line, Reproduction
from ..papers.published_table import LEAST_ROUNDS

HEADINGS = ("method", "paper", "ours", "difference", "remarks")
SCALED = (
    f"scaled {{0:g}}: rounds x {{0:g}}, rounded up, at least {LEAST_ROUNDS}; a client uses that share of its examples, "
    f"at least {LEAST:,} or all that it has; clients and local epochs as in the paper"
)


class Sheet(NamedTuple):
    """The contents of a table, for every format."""

    title: str
    source: str
    protocol: list[str]
    groups: list[tuple[str, list[tuple[str, ...]]]]  # heading, and a row for each method
    legend: list[str]


def sheet(made: Reproduction, lines: Sequence[Line]) -> Sheet:
    """The contents of a table, as text."""
    twice = Counter(row.printed for row in made.protocol.rows.values())
    notes: dict[str, int] = {}

    def remarks(line: Line) -> str:
        status, _, why = line.status.partition("failed: ")
        parts = [status + "failed" if why else status, *line.flags]
        own = (line.row.note, line.column.note) if line.by_seed else ()
        for note in (why, *own, line.paper.note if line.paper else ""):
            if note:
                parts.append(f"[{notes.setdefault(note, len(notes) + 1)}]")
        return ", ".join(filter(None, parts))

    groups: dict[str, list[tuple[str, ...]]] = {}
    for line in sorted(lines, key=lambda line: _place(lines, line)):
        measure, column = MEASURES[line.metric], line.column
        heading = f"{column.dataset}, {column.setting}: {measure.label} ({column.name})"
        method = line.row.printed + (f" ({line.row.name})" if twice[line.row.printed] > 1 else "")
        digits = measure.digits
        groups.setdefault(heading, []).append(
            (
                method,
                _number(line.paper.mean, line.paper.std, digits) if line.paper else "",
                _number(line.mean, line.std, digits),
                "" if line.difference is None else f"{line.difference:+.{digits}f}",
                remarks(line),
            )
        )
    over = "over seeds" if made.protocol.spread == "seeds" else "over clients in print, over seeds of ours"
    legend = [f"± is a standard deviation {over}. Difference: ours less the paper's."]
    used = {flag for line in lines for flag in line.flags}
    legend += [f"{flag}: {what}." for flag, what in FLAGS.items() if flag in used]
    legend += [f"{SCALED.format(made.scale)}."] if made.scale < 1 else []
    legend += [f"[{number}] {note}." for note, number in notes.items()]
    return Sheet(
        f"{made.protocol.name}: {made.protocol.title}",
        made.protocol.source,
        [*_protocols(made, lines), *made.protocol.notes],
        list(groups.items()),
        legend,
    )


def markdown(shown: Sheet, command: str) -> str:
    """The table as a page, with the command that makes it."""
    out = [f"# {shown.title}", "", f"{shown.source}.", "", "```console", f"$ {command}", "```", ""]
    out += [f"- {line}" for line in shown.protocol]
    for heading, rows in shown.groups:
        out += ["", f"**{heading}**", "", f"| {' | '.join(HEADINGS)} |", "| --- | ---: | ---: | ---: | --- |"]
        out += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([*out, "", *(f"{line}\\" for line in shown.legend[:-1]), shown.legend[-1], ""])


def latex(shown: Sheet, command: str) -> str:
    """The table as a tabular of booktabs."""
    out = [f"% {command}", f"% {shown.source}", r"\begin{tabular}{lrrrl}", r"\toprule"]
    out.append(" & ".join(HEADINGS) + r" \\")
    for heading, rows in shown.groups:
        out += [r"\midrule", rf"\multicolumn{{5}}{{l}}{{{_tex(heading)}}} \\", r"\midrule"]
        out += [" & ".join(map(_tex, cells)) + r" \\" for cells in rows]
    out += [r"\bottomrule", r"\end{tabular}", "", *(rf"% {line}" for line in [*shown.protocol, *shown.legend]), ""]
    return "\n".join(out)


def table_csv(lines: Sequence[Line]) -> str:
    """The table as CSV, one line per number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    statistics = ("paper", "paper_std", "ours", "over_seeds", "over_clients", "difference")
    writer.writerow(
        ["column", "dataset", "setting", "method", "printed", "metric", *statistics, "seeds", "flags", "status"]
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
            ]
        )
    return out.getvalue()


def terminal(shown: Sheet) -> Iterator[Table | Text]:
    """The table for the terminal."""
    yield Text(shown.title, style="bold")
    for heading, rows in shown.groups:
        yield Text(f"\n{heading}", style="italic")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in HEADINGS:
            number = name in ("paper", "ours", "difference")
            table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
        for cells in rows:
            table.add_row(*map(Text, cells))
        yield table
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
            by_description.setdefault(_described(cell.experiment), []).append(column)
    return [f"{', '.join(columns)}: {description}." for description, columns in by_description.items()]


def _described(experiment: Experiment) -> str:
    training, split, clients = experiment.table["training"], experiment.split, experiment.clients
    optimiser = ", ".join(f"{key} {value:g}" for key, value in training["optimiser"].items() if key != "name" and value)
    unit = "steps" if training.get("steps") else "epochs"
    work = f"{training[unit]} {unit if training[unit] > 1 else unit.removesuffix('s')}"
    share, rounds, every = experiment.participation.share, experiment.rounds.count, experiment.rounds.evaluate_every
    clients_text = f"{clients} clients" if clients else "the data's own clients"
    return (
        f"{clients_text}, {'all' if share == 1 else f'a share of {share:g}'} in a round; {rounds} rounds of {work}, "
        f"batch {training['batch']}, {training['optimiser']['name']} ({optimiser}); model {experiment.model_name}; "
        f"validation {split.validation:g}, test {split.test:g}; "
        f"evaluated every {f'{every} rounds' if every > 1 else 'round'}"
    )


def _place(lines: Sequence[Line], line: Line) -> tuple[int, int]:
    """A line's position: by column, then by metric."""
    columns = list(dict.fromkeys(one.column.name for one in lines))
    return columns.index(line.column.name), list(MEASURES).index(line.metric)


def _number(mean: float | None, std: float | None, digits: int) -> str:
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")


def _tex(text: str) -> str:
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    return text.replace("±", r"$\pm$").replace("~", r"\textasciitilde{}")
