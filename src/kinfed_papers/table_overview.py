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
    name, title, source = _known(path)
    measured = [line for line in lines if line["measured"]]
    if not measured:
        raise UsageError(f"{path} holds a published table of which no run is finished yet")
    # Several of our columns may stand for one of the paper's, on all its data and on a part of them.
    printed, both = ({_figure(line) for line in some if line["paper"]} for some in (lines, measured))
    seeds = Counter(int(line["seeds"] or 0) for line in measured)
    lead = f"{several(len(measured), 'number')} measured here, beside {len(both)} of the {len(printed)} in the paper; "
    lead += ", ".join(f"{count} with {several(size, 'seed')}" for size, count in sorted(seeds.items()))
    statistics = path / "statistics" / "statistics.md"
    found = of_markdown(statistics.read_text(encoding="utf-8")) if statistics.is_file() else []
    over = [one for one in found if "mean rank" in one.headings]
    flags = dict.fromkeys(flag for line in measured for flag in line["flags"].split("; ") if flag)
    ranks = path / "statistics" / "ranks.png"
    return Front(
        source,
        f"{name}: {title}" if title else name,
        f"{lead}.",
        [*_matrices(lines), *_claims(name, path, flags), *(_spelt(one, found) for one in over)],
        [one for one in found if one not in over],
        [("Scaled", "Fewer rounds and examples than in the paper.")] * any(one.startswith("scaled") for one in flags),
        [f"{flag}: {FLAGS[flag]}" for flag in flags if flag in FLAGS],
        list(_columns(path, name, measured)),
        ranks if ranks.is_file() else None,
        "Mean ranks of the methods over columns; those that a bar joins do not differ.",
    )


def _figure(line: Mapping[str, str]) -> tuple[str, ...]:
    """What tells a printed number from others: its row and its column in the paper."""
    return tuple(line[key] for key in ("printed", "dataset", "setting", "metric", "paper"))


def _known(path: Path) -> tuple[str, str, str]:
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
    found = []
    for metric in metrics:
        mine = [line for line in lines if line["metric"] == metric]
        columns = list(dict.fromkeys(line["column"] for line in mine if line["measured"]))
        label = MEASURES[metric].label if metric in MEASURES else metric
        for first in range(0, len(columns), WIDE):
            found.append(_matrix(mine, columns[first : first + WIDE], f"Measured beside the paper: {label}"))
    told = "measured, ± over seeds where there are several; below, what the paper prints; ★ is the best in a column"
    return [*found[:-1], replace(found[-1], notes=(told,))]


def _matrix(lines: Lines, columns: Sequence[str], title: str) -> Grid:
    """Our number of one metric with its deviation over seeds, and the printed one below."""
    heading = {line["column"]: f"{line['dataset']}, {line['setting']}\n{line['column']}" for line in lines}
    twice = Counter((line["printed"], line["column"]) for line in lines)
    measure = MEASURES.get(lines[0]["metric"])
    digits, better = (2, 0) if measure is None else (measure.digits, measure.better)
    known = [line for line in lines if line["measured"]]
    best = {
        at: max((better * float(line["measured"]) for line in known if line["column"] == at), default=0.0)
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
        rows.setdefault(line["printed"] + f" ({line['method']})" * same, {})[at] = cell
    cells = [[name, *(row.get(at, "") for at in columns)] for name, row in rows.items()]
    return Grid("table", title, ("method", *(heading[at] for at in columns)), [cells])


def _spelt(ranks: Grid, found: Sequence[Grid]) -> Grid:
    """Mean ranks, with what the letters stand for."""
    titles = [one.title.partition(": Means over clients, and their spread: ") for one in found]
    letters = "; ".join(f"{letter} is {what}" for letter, _, what in titles if what)
    return replace(ranks, notes=(*ranks.notes, letters))


def _claims(name: str, path: Path, flags: Mapping[str, None]) -> list[Grid]:
    """What becomes of the paper's claims; nothing with another network than the paper's."""
    try:
        protocol = published_table.load(name)
    except UsageError:
        return []
    figures = claim_verdicts.of_csv(path / "table.csv")
    found = [] if "own model" in flags else claim_verdicts.verdicts(protocol, figures, coverage.floors(name))
    rows = [[one.claim.says, one.answer, one.text] for one in found]
    return (
        [Grid("claims", "What the paper claims", ("claim", "here", "by how much"), [rows], text_columns=3)]
        if rows
        else []
    )


def _columns(path: Path, name: str, measured: Lines) -> list[Part]:
    """The runs of each column; the paper's own method is judged."""
    own, parts = name.partition(".")[0], []
    at = {line["column"]: line for line in measured}
    for column, line in at.items():
        cells = [cell for cell in sorted((path / "runs" / column).glob("*")) if RunFolder(cell).seeds()]
        printed = {one["method"]: one["printed"] for one in measured if one["column"] == column}
        labels = {str(cell): printed.get(cell.name, cell.name) for cell in cells}
        again = Counter(labels.values())
        labels = {cell: label if again[label] == 1 else Path(cell).name for cell, label in labels.items()}
        if cells:  # else it reads the runs of another column
            note = (
                "Scores are those of the model that validation prefers, in the task's own metric; the table scores the "
                "model and the metric that the paper does."
            )
            mine = path / "runs" / column / own
            judged = str(mine) if mine in cells else ""
            called = f"{line['dataset']}, {line['setting']} ({column})"
            parts.append(Part(called, cells, labels, judged, (note,), same_data=True))
    return parts
