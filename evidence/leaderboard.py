"""Who is best, from the tables that other programs have committed: python evidence/leaderboard.py

Methods at their defaults in docs/results.md, columns of published tables in docs/papers/reproduce.md.
"""

import argparse
import csv
import json
from pathlib import Path
from statistics import mean

import federations

from kinfed_papers.result_pages import put

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "results.md"
PAPERS = DOCS / "papers" / "reproduce.md"
FEDERATIONS = {  # short names
    "shops with opposite customers": "opposite customers",
    "small shops, customers alike": "customers alike",
    "digits, everyone alike": "digits, alike",
    "digits, four rotations": "digits, rotated",
    "digits, everyone names them differently": "digits, renamed",
    "digits, a third has random labels": "digits, noisy labels",
    "digits, four rotations, 25 to 150 each": "digits, rotated, uneven",
    "digits, groups see half of them": "digits, half the classes",
    "316 persons, 24 answers each": "316 persons",
    "clothes, everyone alike": "clothes, alike",
    "clothes, three groups name them differently": "clothes, renamed",
    "clothes, half in negative, 20 to 240 each": "clothes, negatives",
}
SCORES = {"accuracy_pct": "accuracy, %", "mean_accuracy_pct": "accuracy, %", "MAE": "MAE", "mse_1e-3": "1,000 MSE"}
POOLED = "the best pooled baseline"
LEAKS = {"oracle"}  # what no method could know


def main():
    """Write a table into each of the two pages."""
    put(PAGE, "defaults", "\n".join(board()), "Leaderboard")
    put(PAPERS, "published", "\n".join(list_published()), "Published tables")


def gains_of(rows):
    """Points over the best baseline without others, mean over seeds, under the library's own training, by data and row.

    rows: by name the settings of each, as `federations.blocks` has them. The best pooled baseline is a row, too.
    """
    kept = json.loads(federations.KEPT.read_text())
    data = {}
    for case, title in FEDERATIONS.items():
        alone, pooled = (kept["floor"][case][kind]["means"] for kind in ("alone", "pooled"))
        data[title] = {POOLED: mean(pooled) - mean(alone)}
        for name, settings in rows.items():
            runs = federations.row(kept["own"][case], settings)
            if runs and all("mean" in run for run in runs):
                data[title][name] = federations.average(runs, case) - mean(alone[: len(runs)])
    return data


def board():
    """A table of the methods over the data sets for each block: kinfed's own, as printed, and tuned."""
    yield "Computed by `python evidence/leaderboard.py` from the tables of the pages named above."
    blocks = {"Baselines": {POOLED: [], "fedavg": [{"name": "fedavg"}], "local": [{"name": "local"}]}}
    for title, rows in federations.blocks():
        blocks[title] = {name: settings for name, settings in rows.items() if name not in blocks["Baselines"]}
    data = gains_of({name: settings for rows in blocks.values() for name, settings in rows.items()})
    nine = [gains for case, gains in data.items() if not case.startswith("clothes")]
    place = places(nine, sorted(set.intersection(*(set(gains) for gains in nine))))
    for title, rows in blocks.items():
        measured = set().union(*data.values())
        ran = [name for name in rows if name in measured]
        if not ran:
            continue
        yield f"\n## {title}\n"
        yield "| method | mean of nine | worst of nine | mean rank | " + " | ".join(data) + " |"
        yield "| --- |" + " ---: |" * (3 + len(data))
        of = {name: [gains[name] for gains in nine if name in gains] for name in ran}
        for name in sorted(ran, key=lambda method: (method not in place, -mean(of[method] or [-100]))):
            cells = [f"{gains[name]:+.1f}" if name in gains else "" for gains in data.values()]
            summary_cells = ["", "", ""]  # of some of the nine alone: no mean to compare
            if name in place:
                summary_cells = [f"**{mean(of[name]):+.1f}**", f"{min(of[name]):+.1f}", f"{place[name]:.1f}"]
            yield f"| `{name}` | {' | '.join([*summary_cells, *cells])} |"


def places(data, methods):
    """The mean rank of each method over data sets: 1 is the best, and equals share theirs."""
    ranks = {method: [] for method in methods}
    for gains in data:
        for method in methods:
            ahead = sum(gains[other] > gains[method] for other in methods)
            equal = sum(gains[other] == gains[method] for other in methods)
            ranks[method].append(ahead + (equal + 1) / 2)
    return {method: mean(ranks_of_method) for method, ranks_of_method in ranks.items()}


def list_published():
    """Of each column of the published tables: who is best here, and who in the paper."""
    yield "Computed by `python evidence/leaderboard.py` from `docs/papers/tables`.\n"
    yield "| data set | setting | score | Local | FedAvg | best here | its score | in the paper | seeds | remarks |"
    yield "| --- | --- | --- | ---: | ---: | --- | ---: | --- | ---: | --- |"
    files = sorted((DOCS / "papers" / "tables").glob("*/table.csv"))
    for file in (
        table for table in files if not table.parent.name.endswith("-controls")
    ):  # those are not of the papers
        page = f"{file.parent.name.partition('.')[0]}-tables.md"
        columns = {}
        for row in csv.DictReader(file.open()):
            columns.setdefault((row["column"], row["metric"]), []).append(row)
        for (column, metric), rows in columns.items():
            yield from best(column, metric, [row for row in rows if row["measured"]], page)


def best(column, metric, rows, page):
    """The line of one column, if enough of it was run to compare."""
    if len(rows) < 3 or metric not in SCORES:
        return
    top = max if "accuracy" in metric else min
    firsts = foremost(rows, "measured", top)
    first = firsts[0]
    printed = [row for row in rows if row["paper"]]
    scores = {row["method"]: f"{float(row['measured']):.2f}" for row in rows}
    every = set.intersection(*(flags(row) for row in rows)) | flags(first)
    cells = [first["dataset"], f"[{first['setting'] or 'as printed'}]({page}) `{column}`", SCORES[metric]]
    cells += [scores.get("local", ""), scores.get("fedavg", ""), list_names(firsts), f"{float(first['measured']):.2f}"]
    cells += [list_names(foremost(printed, "paper", top)) if printed else ""]
    yield "| " + " | ".join([*cells, min(row["seeds"] for row in firsts), ", ".join(sorted(every))]) + " |"


def foremost(rows, number, top):
    """The rows with the best of their numbers, which several may share."""
    best = top(float(row[number]) for row in rows)
    return [row for row in rows if float(row[number]) == best]


def list_names(rows):
    return ", ".join(dict.fromkeys(row["printed"] for row in rows))


def flags(row):
    """What a table says of one number, such as that it is of a subset."""
    return {flag.strip() for flag in row["flags"].split(";")} - {""}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone
    main()
