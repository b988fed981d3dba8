"""What a page begins with that shows the runs of a published table: our numbers beside the paper's, and its claims."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kinfed.errors import UsageError, several
from kinfed.report.page.overview import NONE, Front, Lines, Part
from kinfed.report.tables.text_table import Grid, of_markdown
from kinfed.runs.run_folder import RunFolder

from . import claim_verdicts, coverage, published_table
from .reproduction import FLAGS, MEASURES

WIDE = 6  # columns beside each other


def overview(path: Path, lines: Lines) -> Front:
    """A folder of `kinfed papers run`: the table, what becomes of the paper's claims, statistics, and each column."""
    name, title, source = _read_title(path)
    measured = [line for line in lines if line["measured"]]
    if not measured:
        raise UsageError(f"{path} holds a published table of which no run is finished yet")
    # Several of our columns may stand for one of the paper's, on all its data and on a part of them.
    printed, both = ({_figure(line) for line in some if line["paper"]} for some in (lines, measured))
    seeds = Counter(int(line["seeds"] or 0) for line in measured)
    lead = f"{several(len(measured), 'number')} measured here, beside {len(both)} of the {len(printed)} in the paper; "
    lead += ", ".join(f"{count} with {several(size, 'seed')}" for size, count in sorted(seeds.items()))
    statistics = path / "statistics" / "statistics.md"
    grids = of_markdown(statistics.read_text(encoding="utf-8")) if statistics.is_file() else []
    over = [grid for grid in grids if "mean rank" in grid.headings]
    flags = dict.fromkeys(flag for line in measured for flag in line["flags"].split("; ") if flag)
    is_scaled = any(flag.startswith("scaled") for flag in flags)
    ranks = path / "statistics" / "ranks.png"
    return Front(
        about=source,
        headline=f"{name}: {title}" if title else name,
        lead=f"{lead}.",
        tables=[*_matrices(lines), *_claims(name, path, flags), *(_spell_letters(grid, grids) for grid in over)],
        folded=[grid for grid in grids if grid not in over],
        cautions=[("Scaled", "Fewer rounds and examples than in the paper.")] if is_scaled else [],
        notes=[f"{flag}: {FLAGS[flag]}" for flag in flags if flag in FLAGS],
        parts=list(_columns(path, name, measured)),
        picture=ranks if ranks.is_file() else None,
        described="Mean ranks of the methods over columns; those that a bar joins do not differ.",
    )


def _figure(line: Mapping[str, str]) -> tuple[str, ...]:
    """What tells a printed number from others: its row and its column in the paper."""
    return tuple(line[key] for key in ("printed", "dataset", "setting", "metric", "paper"))


def _read_title(path: Path) -> tuple[str, str, str]:
    """The table's name, title and source, by the first line of table.md."""
    page = path / "table.md"
    first = page.read_text(encoding="utf-8").partition("\n")[0] if page.is_file() else ""
    name, _, title = first.removeprefix("# ").partition(": ")
    try:
        return name, title, published_table.load(name).source
    except UsageError:  # of another version
        return name or path.name, title, ""


def _matrices(lines: Lines) -> list[Grid]:
    """A table a metric, or several with very many columns: methods are rows, columns columns."""
    metrics = dict.fromkeys(line["metric"] for line in lines if line["measured"])
    grids = []
    for metric in metrics:
        mine = [line for line in lines if line["metric"] == metric]
        columns = list(dict.fromkeys(line["column"] for line in mine if line["measured"]))
        label = MEASURES[metric].label if metric in MEASURES else metric
        for first in range(0, len(columns), WIDE):
            grids.append(_matrix(mine, columns[first : first + WIDE], f"Measured beside the paper: {label}"))
    note = "measured, ± over seeds where there are several; below, what the paper prints; ★ is the best in a column"
    return [*grids[:-1], replace(grids[-1], notes=(note,))]


def _matrix(lines: Lines, columns: Sequence[str], title: str) -> Grid:
    """Our number of one metric with its deviation over seeds, and the printed one below."""
    heading = {line["column"]: f"{line['dataset']}, {line['setting']}\n{line['column']}" for line in lines}
    twice = Counter((line["printed"], line["column"]) for line in lines)
    measure = MEASURES.get(lines[0]["metric"])
    digits, better = (2, 0) if measure is None else (measure.digits, measure.better)
    measured = [line for line in lines if line["measured"]]
    best = {
        at: max((better * float(line["measured"]) for line in measured if line["column"] == at), default=0.0)
        for at in columns
    }
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        at = line["column"]
        if at not in columns or not (line["measured"] or line["paper"]):
            continue
        same = twice[line["printed"], at] > 1
        ours = f"{float(line['measured']):.{digits}f}" if line["measured"] else NONE
        ours += f" ± {float(line['over_seeds']):.{digits}f}" if line["over_seeds"] else ""
        ours += " ★" if line["measured"] and better and better * float(line["measured"]) == best[at] else ""
        cell = f"{ours}\nprinted {float(line['paper']):.{digits}f}" if line["paper"] else ours
        method = f"{line['printed']} ({line['method']})" if same else line["printed"]
        rows.setdefault(method, {})[at] = cell
    cells = [[name, *(row.get(at, "") for at in columns)] for name, row in rows.items()]
    return Grid("table", title, ("method", *(heading[at] for at in columns)), [cells])


def _spell_letters(ranks: Grid, grids: Sequence[Grid]) -> Grid:
    """Mean ranks, with what the letters stand for."""
    titles = [grid.title.partition(": Means over clients, and their spread: ") for grid in grids]
    letters = "; ".join(f"{letter} is {what}" for letter, _, what in titles if what)
    return replace(ranks, notes=(*ranks.notes, letters))


def _claims(name: str, path: Path, flags: Mapping[str, None]) -> list[Grid]:
    """What becomes of the paper's claims; nothing with another network than the paper's."""
    try:
        protocol = published_table.load(name)
    except UsageError:
        return []
    figures = claim_verdicts.of_csv(path / "table.csv")
    verdicts = [] if "own model" in flags else claim_verdicts.verdicts(protocol, figures, coverage.floors(name))
    rows = [[verdict.claim.says, verdict.answer, verdict.text] for verdict in verdicts]
    if not rows:
        return []
    return [Grid("claims", "What the paper claims", ("claim", "here", "by how much"), [rows], text_columns=3)]


def _columns(path: Path, name: str, measured: Lines) -> list[Part]:
    """The runs of each column; the paper's own method is judged."""
    method, parts = name.partition(".")[0], []
    at = {line["column"]: line for line in measured}
    for column, line in at.items():
        cells = [cell for cell in sorted((path / "runs" / column).glob("*")) if RunFolder(cell).seeds()]
        printed = {entry["method"]: entry["printed"] for entry in measured if entry["column"] == column}
        labels = {str(cell): printed.get(cell.name, cell.name) for cell in cells}
        again = Counter(labels.values())
        labels = {cell: label if again[label] == 1 else Path(cell).name for cell, label in labels.items()}
        if cells:  # else it reads the runs of another column
            note = (
                "Scores are those of the model that validation prefers, in the task's own metric; the table scores the "
                "model and the metric that the paper does."
            )
            mine = path / "runs" / column / method
            judged = str(mine) if mine in cells else ""
            called = f"{line['dataset']}, {line['setting']} ({column})"
            parts.append(Part(called, cells, labels, judged, (note,), same_data=True))
    return parts
