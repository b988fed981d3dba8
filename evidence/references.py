"""Figures of the centralised references beside print.

    KINFED_DATA=DIR python evidence/references.py [DATASET[=EPOCHS[/STRIDE]] ...]

STGCN and Graph WaveNet on the subsets of SFL's Table 1 that are at hand, an hour ahead, written into
docs/papers/references.md, and beside the tables of `kinfed papers run` for the page on coverage. Runs are kept in
--keep; a reference has no checkpoint, so one that was interrupted begins again. Fewer EPOCHS than the reference's own
make it short, as do windows only every STRIDE steps, and the page says so.
"""

import argparse
import csv
import re
import statistics
import subprocess
import sys
from pathlib import Path

from kinfed.runs.run_folder import RunFolder
from kinfed_papers import published_table, result_pages as page
from kinfed_papers.references import REFERENCES
from kinfed_papers.reproduction import MEASURES

PAGE = Path(__file__).parents[1] / "docs" / "papers" / "references.md"
PRINTED = {"stgcn": "STGCN", "graph-wavenet": "Graph-WaveNet"}
DATASETS = ("metr_la_week", "metr_la_subset", "pems08_partial", "pems_bay_subset")  # the quickest first
SHORT = "[=EPOCHS[/STRIDE]]"
ALL = "all"  # epochs: the reference's own number
TABLE = PAGE.parent / "tables" / "sfl.table1-references" / "table.csv"
METRICS = ("MAE", "MAPE_pct", "RMSE")


def words(reference, dataset, args):
    """What `kinfed` is given for one of them."""
    short = []
    if args.epochs[dataset] != ALL:
        short.append(f"reference.epochs={args.epochs[dataset]}")
    if args.stride[dataset] > 1:
        short.append(f"federation.dataset.stride={args.stride[dataset]}")
    return ["papers", "reference", reference, f"papers/sfl/table1/{dataset}", *short]


def train(args):
    """Do what is left; whether all of it ended well."""
    well = True
    write(args)
    for dataset in args.epochs:
        for reference in PRINTED:
            out = folder(reference, dataset, args)
            if not out.is_finished:
                command = [sys.executable, "-m", "kinfed", *words(reference, dataset, args), "--out", out.path]
                print(" ".join(map(str, command[2:])), flush=True)
                well &= not subprocess.run([*command, "--quiet"]).returncode
                write(args)
    return well


def folder(reference, dataset, args):
    return RunFolder(args.keep / f"{args.epochs[dataset]}-{args.stride[dataset]}" / dataset / reference)


def figures(run):
    """The mean over sensors of each printed metric at the round that validation selects."""
    summary = run.read_summary()
    chosen = summary.chosen_scores
    for name in METRICS:
        rounds, tests = run.read_scores(summary.selection.chosen, MEASURES[name].score)
        yield statistics.fmean(tests[rounds == int(chosen["round"])][0].tolist())


def cells(args):
    """A line of table.csv for every metric of a finished run."""
    table = published_table.load("sfl.table1")
    for dataset in args.epochs:
        column = next(candidate for candidate in table.columns.values() if candidate.name == dataset)
        for reference, printed in PRINTED.items():
            run, epochs = folder(reference, dataset, args), REFERENCES[reference].epochs
            if not run.is_finished:
                continue
            done = epochs if args.epochs[dataset] == ALL else int(args.epochs[dataset])
            done /= epochs * args.stride[dataset]
            flags = ["subset"] if column.subset else []
            if done < 1:
                flags.append(f"scaled {done:.2g}")
            for name, ours in zip(METRICS, figures(run), strict=True):
                paper = table.numbers.get((column.dataset, column.setting, printed, name))
                yield {
                    **{"column": dataset, "dataset": column.dataset, "setting": column.setting},
                    **{"method": reference, "printed": printed, "metric": name},
                    **{"paper": "" if paper is None else f"{paper.mean:g}", "measured": f"{ours:.6g}"},
                    **{"flags": "; ".join(flags), "by_seed": f"0:{ours:.6g}"},
                    "seconds": round(run.read_summary().cost.seconds),
                }


def part(args, cells):
    """The page's table of what is finished, as text."""
    labels = " | ".join(MEASURES[name].label for name in METRICS)
    lines = [f"| data | reference | epochs | windows | {labels} | seconds |"]
    lines += ["| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    for at in range(0, len(cells), len(METRICS)):
        group = cells[at : at + len(METRICS)]
        dataset, reference = group[0]["column"], group[0]["method"]
        passes = f"{args.epochs[dataset]} of {REFERENCES[reference].epochs}".removeprefix(f"{ALL} of ")
        scores = []
        for cell in group:
            paper = f" ({cell['paper']})" if cell["paper"] else ""
            scores.append(f"{float(cell['measured']):.2f}{paper}")
        windows = f"every {args.stride[dataset]} steps" if args.stride[dataset] > 1 else "all"
        shown = [dataset, group[0]["printed"], passes, windows, *scores, str(group[0]["seconds"])]
        lines.append(f"| {' | '.join(shown)} |")
    given = " ".join(args.datasets)
    caption = [f"`KINFED_DATA=DIR python evidence/references.py {given}`,", f"{page.version()}, one seed."]
    caption += ["Means over sensors, an hour ahead. In brackets is what SFL's Table 1 prints for the whole data set."]
    return "\n".join([*caption, "", *lines])


def write(args):
    """Put the finished runs on the page and in the table."""
    if rows := list(cells(args)):
        page.put(PAGE, "references", part(args, rows), "Centralised references on traffic")
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        with TABLE.open("w", newline="") as file:
            lines = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            lines.writeheader()
            lines.writerows(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", default=DATASETS, metavar=f"DATASET{SHORT}", help=", ".join(DATASETS))
    parser.add_argument("--keep", type=Path, default=Path("runs") / "references", metavar="DIR")
    args = parser.parse_args()
    named = [re.fullmatch(r"(\w+)(?:=(\d+)(?:/(\d+))?)?", text) for text in args.datasets]
    if None in named:
        sys.exit(
            f"what is asked for is DATASET, DATASET=EPOCHS or DATASET=EPOCHS/STRIDE; got {' '.join(args.datasets)}"
        )
    args.epochs = {match[1]: match[2] or ALL for match in named}
    args.stride = {match[1]: int(match[3] or 1) for match in named}
    if unknown := sorted(set(args.epochs) - set(DATASETS)):
        sys.exit(f"no subset '{unknown[0]}' of SFL's Table 1; known: {', '.join(DATASETS)}")
    sys.exit(not train(args))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command begins the unfinished run again")
