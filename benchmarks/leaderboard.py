"""docs/results/leaderboard.md, from the tables that other programs have committed: python benchmarks/leaderboard.py"""

import csv
import re
from pathlib import Path
from statistics import mean

from page import put

from kinfed.methods import FAMILIES

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGE = RESULTS / "leaderboard.md"
STRANGERS = (  # short names of the nine, in the order of their numbers
    "opposite customers",
    "customers alike",
    "digits, alike",
    "digits, rotated",
    "digits, renamed",
    "digits, noisy labels",
    "digits, rotated, uneven",
    "digits, half the classes",
    "316 persons",
)
SETS = {"rotated-digits": "rotated digits", "rotated-mnist": "rotated MNIST"}
GROUPS = "cifar10-groups"
SCORES = {"accuracy_pct": "accuracy, %", "mean_accuracy_pct": "accuracy, %", "MAE": "MAE", "mse_1e-3": "1,000 MSE"}
LEAKS = {"oracle"}  # what no method could know


def main():
    """Write the two tables of the page."""
    put(PAGE, "defaults", "\n".join(board()), "Leaderboard")
    put(PAGE, "published", "\n".join(published()), "Leaderboard")


def rows_of(text):
    """The cells of each line of the tables in a text."""
    lines = (line for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def part(page, name):
    """A part of a page, between its marks."""
    return re.search(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", (RESULTS / page).read_text(), re.DOTALL)[1]


def number(cell):
    """The number that a cell begins with; None without one."""
    found = re.match(r"[+-]?\d+(\.\d+)?", cell.strip("* "))
    return float(found[0]) if found else None


def strangers():
    """Gains over the better of Local and FedAvg in points: {data: {method: gain}}, under the library's own training."""
    own = part("strangers.md", "now").split("\n### ")[2]
    found = {name: {} for name in STRANGERS}
    for method, _, _, *cells in rows_of(own):
        for name, cell in zip(STRANGERS, cells, strict=False):
            if method not in LEAKS and "," not in method and number(cell) is not None and cell != "---:":
                found[name][method] = number(cell)
    for name, gains in found.items():
        gains.pop("method", None)
        assert {"local", "fedavg"} <= set(gains), name
    return found


def compared(name):
    """Gains on one of the comparison set, paired by seed, over Local, which is the better there; and what to note."""
    text = part("comparison-set.md", name)
    few = dict(re.findall(r"([\w-]+) \((\d)\)", text.partition("Of fewer seeds")[2]))
    gains, tuned = {}, set()
    for cells in rows_of(text):
        if (named := re.match(r"`([\w-]+)`(\*?),", cells[0])) and named[1] not in LEAKS:
            gains[named[1]] = number(cells[2])
            tuned |= {named[1]} if named[2] else set()
    assert gains["fedavg"] < 0, name
    return gains, tuned, few


def groups():
    """Gains on CIFAR-10 in groups at the methods' defaults."""
    scores = {cells[0]: number(cells[1]) for cells in rows_of(part("strangers.md", GROUPS)) if number(cells[1])}
    better = max(scores["local"], scores["fedavg"])
    return {name.strip("*"): round(score - better, 1) for name, score in scores.items()}


def board():
    """The table of all methods over the data sets."""
    data = strangers()
    nine = {method: [gains[method] for gains in data.values() if method in gains] for method in data[STRANGERS[0]]}
    notes = {}
    for name, title in SETS.items():
        gains, tuned, few = compared(name)
        data[title] = gains
        notes |= {(title, method): f" ({n})" for method, n in few.items()}
        notes |= {(title, method): notes.get((title, method), "") + "*" for method in tuned}
    data["CIFAR-10 in groups"] = groups()
    methods = ["choose", *(name for family in FAMILIES.values() for name in family)]
    place = places({name: gains for name, gains in data.items() if name in STRANGERS}, methods)
    yield "Computed by `python benchmarks/leaderboard.py` from the committed tables of the pages named above.\n"
    yield "| method | mean of nine | worst of nine | mean rank | " + " | ".join(data) + " |"
    yield "| --- |" + " ---: |" * (3 + len(data))
    for method in sorted(methods, key=lambda one: -mean(nine[one])):
        cells = [
            "" if method not in gains else f"{gains[method]:+.1f}{notes.get((name, method), '')}"
            for name, gains in data.items()
        ]
        ours = nine[method]
        yield f"| `{method}` | **{mean(ours):+.1f}** | {min(ours):+.1f} | {place[method]:.1f} | {' | '.join(cells)} |"


def places(data, methods):
    """The mean rank of each method over data sets, 1 being best; equals share theirs."""
    ranks = {method: [] for method in methods}
    for gains in data.values():
        for method in methods:
            ahead = sum(gains[other] > gains[method] for other in methods)
            equal = sum(gains[other] == gains[method] for other in methods)
            ranks[method].append(ahead + (equal + 1) / 2)
    return {method: mean(each) for method, each in ranks.items()}


def published():
    """Of each column of the published tables: who is best here, and who in print."""
    yield "Computed by `python benchmarks/leaderboard.py` from `docs/results/tables`.\n"
    yield "| data set | setting | score | Local | FedAvg | best here | its score | best in print | seeds | remarks |"
    yield "| --- | --- | --- | ---: | ---: | --- | ---: | --- | ---: | --- |"
    for file in sorted((RESULTS / "tables").glob("*/table.csv")):
        page = f"{file.parent.name.partition('.')[0]}-tables.md"
        columns = {}
        for row in csv.DictReader(file.open()):
            columns.setdefault((row["column"], row["metric"]), []).append(row)
        for (column, metric), rows in columns.items():
            yield from best(column, metric, [row for row in rows if row["ours"]], page)


def best(column, metric, rows, page):
    """The line of one column, if enough of it was run to compare."""
    if len(rows) < 3 or metric not in SCORES:
        return
    top = max if "accuracy" in metric else min
    firsts = foremost(rows, "ours", top)
    first = firsts[0]
    printed = [row for row in rows if row["paper"]]
    known = {row["method"]: f"{float(row['ours']):.2f}" for row in rows}
    every = set.intersection(*(flags(row) for row in rows)) | flags(first)
    cells = [first["dataset"], f"[{first['setting'] or 'as printed'}]({page}) `{column}`", SCORES[metric]]
    cells += [known.get("local", ""), known.get("fedavg", ""), named(firsts), f"{float(first['ours']):.2f}"]
    cells += [named(foremost(printed, "paper", top)) if printed else ""]
    yield "| " + " | ".join([*cells, min(row["seeds"] for row in firsts), ", ".join(sorted(every))]) + " |"


def foremost(rows, number, top):
    """The rows with the best of their numbers, which several may share."""
    best = top(float(row[number]) for row in rows)
    return [row for row in rows if float(row[number]) == best]


def named(rows):
    return ", ".join(dict.fromkeys(row["printed"] for row in rows))


def flags(row):
    """What a table says of one number, such as that it is of a subset."""
    return {flag.strip() for flag in row["flags"].split(";")} - {""}


if __name__ == "__main__":
    main()
