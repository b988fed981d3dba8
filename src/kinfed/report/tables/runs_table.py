"""Compared runs as a table for the terminal, with remarks below and verdicts last."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ...core.metrics import BY_CLASS
from .compare import Comparison
from .run_rows import Row, decimals
from .text_table import draw, score_text

ORIGINS = ("learned", "given", "oracle")  # of relations


def terminal(comparison: Comparison) -> Iterator[Table | Text]:
    """One row per run for a terminal of 80 columns, accuracies in percent; with notes below.

    To be printed with soft_wrap: folders may be longer than a line, and differ only at their end.
    """
    several = len(comparison.sets) > 1
    # Runs are numbered only where their method does not tell them apart.
    twins = any(len({row.name for row in rows}) < len(rows) for rows in comparison.sets)
    lines: list[dict[str, str]] = []
    sentences: list[str] = []
    notes = [f"! {warning}" for warning in comparison.warnings]
    for letter, rows in zip(comparison.letters, comparison.sets, strict=True):
        if lines:
            lines.append(dict.fromkeys(lines[0], ""))
        if several:
            notes.append(f"{letter}: {rows[0].describe()}")
        for number, row in enumerate(rows, 1):
            name = letter + (str(number) if twins else "")
            lines.append({"run": name} | _cells(row, decimals(rows)))
            if twins:
                notes.append(f"{name}: {row.folder}")
            label = name if twins else f"{name} {row.name}".strip()
            notes += [f"! {label}: {warning}" for warning in row.warnings]
            if row.verdict is not None:
                sentences.append(f"{label}: {row.verdict['sentence']}")
    every = [row for rows in comparison.sets for row in rows]
    counts = [(row.summary.data.clients, row.scores.get("balanced_accuracy_clients")) for row in every]
    if few := [(count, clients) for clients, count in counts if count is not None and count < clients]:
        count, clients = min(few)
        notes.append(f"balanced, AUC: {count:.0f} of {clients} clients, the others are tested on one class")
    if any(row.counts is not None and row.counts.paired for row in every):
        notes.append("gain, lose: clients whose gain or loss over Local is beyond noise, by paired test examples")
    if any(row.ranked_by != row.metric.name and row.counts is not None and not row.counts.paired for row in every):
        notes.append("gain, lose: by the score that ranks, which selected the runs")
    if any(row.leaking for row in every):
        notes.append("* leaking: its test examples are not new to it, so its scores are not a fair estimate")
    if any(row.attack for row in every):
        notes.append("under an attack, by the share of clients that is named, scores are of the honest clients")
    yield Text("Test scores" if several else f"Test scores: {comparison.sets[0][0].describe()}", style="bold")
    filled = {heading for line in lines for heading, cell in line.items() if cell}
    shown = [heading for heading in lines[0] if heading in filled]
    text_columns = range(sum(heading in ("run", "method", "model") for heading in shown))
    yield draw(shown, ([line[heading] for heading in shown] for line in lines), text_columns, text_columns, 1, "bottom")
    for letter, rows, beside in zip(comparison.letters, comparison.sets, comparison.baselines, strict=False):
        if beside:
            yield baselines(beside, rows[0].metric.name, rows[0].metric.unit, f"{letter}: " if several else "")
    named = {origin: dict.fromkeys(row.name for row in every if row.origin == origin) for origin in ORIGINS}
    if origins := [f"{origin}: {', '.join(names)}" for origin, names in named.items() if names]:
        notes.append(f"relations {'; '.join(origins)}")
    yield from map(Text, notes + sentences)


def baselines(rows: Sequence[Mapping[str, Any]], metric: str, unit: str | None, of: str = "") -> Table:
    """What standard models do on the same test rows."""
    headings = (f"{of}standard models", f"test\n{metric}, {unit}" if unit else f"test {metric}", "")
    lines = [(row["name"], score_text(row["mean"], unit == "%"), f"needs {row['needs']}") for row in rows]
    return draw(headings, lines, text_columns=(0, 2), vertical="bottom")


def _cells(row: Row, decimals: int) -> dict[str, str]:
    """Headings and cells; a cell without a value is empty."""
    percent, scores = 100 if row.metric.is_share else 1, row.scores
    score = {
        "mean": row.mean,
        "balanced": scores.get("balanced_accuracy"),
        "± over\nclients": scores["std"],
        "worst\n5 %": scores["worst5"],
        "best\n5 %": scores["best5"],
        "± over\nseeds": row.over_seeds,
    }
    return {
        "method": f"{row.name} *" if row.leaking else row.name,
        "model": row.model,
        **{heading: "" if value is None else f"{percent * value:.{decimals}f}" for heading, value in score.items()},
        "AUC": f"{scores['auc']:.3f}" if "auc" in scores else "",
        "ranked\nby": "" if row.ranked_by in (row.metric.name, *BY_CLASS) else f"{row.selected:.4g}",
        "gain\n/lose": "" if row.counts is None else f"{row.counts.helped:.0f}/{row.counts.hurt:.0f}",
        "edge\nAUROC": "" if row.auroc is None else f"{row.auroc:.3f}",
        "time\n(s)": f"{row.seconds:.0f}",
    }
