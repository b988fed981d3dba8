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


def words(reference, dataset, asked):
    """What `kinfed` is given for one of them."""
    short = [f"reference.epochs={asked.epochs[dataset]}"] * (asked.epochs[dataset] != ALL)
    short += [f"federation.dataset.stride={asked.stride[dataset]}"] * (asked.stride[dataset] > 1)
    return ["papers", "reference", reference, f"papers/sfl/table1/{dataset}", *short]


def train(asked):
    """Do what is left; whether all of it ended well."""
    well = True
    write(asked)
    for dataset in asked.epochs:
        for reference in PRINTED:
            out = folder(reference, dataset, asked)
            if not out.is_finished:
                command = [sys.executable, "-m", "kinfed", *words(reference, dataset, asked), "--out", out.path]
                print(" ".join(map(str, command[2:])), flush=True)
                well &= not subprocess.run([*command, "--quiet"]).returncode
                write(asked)
    return well


def folder(reference, dataset, asked):
    return RunFolder(asked.keep / f"{asked.epochs[dataset]}-{asked.stride[dataset]}" / dataset / reference)


def figures(run):
    """The mean over sensors of each printed metric at the round that validation selects."""
    found = run.read_summary()
    chosen = found.scores[found.selection.chosen]
    for name in METRICS:
        rounds, tests = run.read_scores(found.selection.chosen, MEASURES[name].score)
        yield statistics.fmean(tests[rounds == int(chosen["round"])][0].tolist())


def cells(asked):
    """A line of table.csv for every metric of a finished run."""
    table = published_table.load("sfl.table1")
    for dataset in asked.epochs:
        column = next(one for one in table.columns.values() if one.name == dataset)
        for reference, printed in PRINTED.items():
            run, epochs = folder(reference, dataset, asked), REFERENCES[reference].epochs
            if not run.is_finished:
                continue
            done = epochs if asked.epochs[dataset] == ALL else int(asked.epochs[dataset])
            done /= epochs * asked.stride[dataset]
            flags = ["subset"] * column.subset + [f"scaled {done:.2g}"] * (done < 1)
            for name, ours in zip(METRICS, figures(run), strict=True):
                paper = table.numbers.get((column.dataset, column.setting, printed, name))
                yield {
                    **{"column": dataset, "dataset": column.dataset, "setting": column.setting},
                    **{"method": reference, "printed": printed, "metric": name},
                    **{"paper": "" if paper is None else f"{paper.mean:g}", "measured": f"{ours:.6g}"},
                    **{"flags": "; ".join(flags), "by_seed": f"0:{ours:.6g}"},
                    "seconds": round(run.read_summary().cost.seconds),
                }


def part(asked, cells):
    """The page's table of what is finished, as text."""
    labels = " | ".join(MEASURES[name].label for name in METRICS)
    lines = [f"| data | reference | epochs | windows | {labels} | seconds |"]
    lines += ["| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    for at in range(0, len(cells), len(METRICS)):
        group = cells[at : at + len(METRICS)]
        dataset, reference = group[0]["column"], group[0]["method"]
        passes = f"{asked.epochs[dataset]} of {REFERENCES[reference].epochs}".removeprefix(f"{ALL} of ")
        scores = [f"{float(one['measured']):.2f}" + f" ({one['paper']})" * bool(one["paper"]) for one in group]
        windows = f"every {asked.stride[dataset]} steps" if asked.stride[dataset] > 1 else "all"
        shown = [dataset, group[0]["printed"], passes, windows, *scores, str(group[0]["seconds"])]
        lines.append(f"| {' | '.join(shown)} |")
    given = " ".join(asked.datasets)
    told = [f"`KINFED_DATA=DIR python evidence/references.py {given}`,", f"{page.version()}, one seed."]
    told += ["An hour ahead, means over sensors; in brackets what SFL's Table 1 prints for the whole data set."]
    return "\n".join([*told, "", *lines])


def write(asked):
    """Put the finished runs on the page and in the table."""
    if found := list(cells(asked)):
        page.put(PAGE, "references", part(asked, found), "Centralised references on traffic")
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        with TABLE.open("w", newline="") as file:
            lines = csv.DictWriter(file, list(found[0]), lineterminator="\n")
            lines.writeheader()
            lines.writerows(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", default=DATASETS, metavar=f"DATASET{SHORT}", help=", ".join(DATASETS))
    parser.add_argument("--keep", type=Path, default=Path("runs") / "references", metavar="DIR")
    args = parser.parse_args()
    named = [re.fullmatch(r"(\w+)(?:=(\d+)(?:/(\d+))?)?", one) for one in args.datasets]
    if None in named:
        sys.exit(
            f"what is asked for is DATASET, DATASET=EPOCHS or DATASET=EPOCHS/STRIDE; got {' '.join(args.datasets)}"
        )
    args.epochs = {one[1]: one[2] or ALL for one in named}
    args.stride = {one[1]: int(one[3] or 1) for one in named}
    if unknown := sorted(set(args.epochs) - set(DATASETS)):
        sys.exit(f"no subset '{unknown[0]}' of SFL's Table 1; known: {', '.join(DATASETS)}")
    sys.exit(not train(args))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command begins the unfinished run again")
