"""Figures of the centralised references beside print.

    KINFED_DATA=DIR python benchmarks/references.py [DATASET[=EPOCHS] ...] [--share SHARE]

STGCN and Graph WaveNet on the subsets of SFL's Table 1 that are at hand, an hour ahead, written into
docs/results/references.md, and beside the tables of `kinfed reproduce` for the page on coverage. Runs are kept in
--keep; a reference has no checkpoint, so one that was interrupted begins again. Fewer EPOCHS than the reference's own
and --share make it short, and the page says so.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from pathlib import Path

import page

from kinfed.baselines import REFERENCES
from kinfed.experiments.reproduction import MEASURES
from kinfed.experiments.run_folder import RunFolder
from kinfed.papers import published_table

PAGE = Path(__file__).parents[1] / "docs" / "results" / "references.md"
PRINTED = {"stgcn": "STGCN", "graph-wavenet": "Graph WaveNet"}
DATASETS = ("metr_la_week", "metr_la_subset", "pems08_partial", "pems_bay_subset")  # the quickest first
ALL = "all"  # epochs: the reference's own number
TABLE = PAGE.parent / "tables" / "sfl.table1-references" / "table.csv"
METRICS = ("MAE", "MAPE_pct", "RMSE")


def words(reference, dataset, asked):
    """What `kinfed` is given for one of them."""
    short = [f"reference.epochs={asked.epochs[dataset]}"] * (asked.epochs[dataset] != ALL)
    short += [f"federation.split.share={asked.share:g}"] * (asked.share < 1)
    return ["reference", reference, f"papers/sfl/table1/{dataset}", *short]


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
    return RunFolder(asked.keep / f"{asked.epochs[dataset]}-{asked.share:g}" / dataset / reference)


def figures(run):
    """The mean over sensors of each printed metric at the round that validation selects."""
    found = run.read_summary()
    chosen = found.scores[found.chosen]
    for name in METRICS:
        rounds, tests = run.read_scores(found.chosen, MEASURES[name].score)
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
            flags = ["subset"] * column.subset + [f"scaled {done / epochs:.2g}"] * (done < epochs or asked.share < 1)
            for name, ours in zip(METRICS, figures(run), strict=True):
                paper = table.numbers.get((column.dataset, column.setting, printed, name))
                yield {
                    **{"column": dataset, "dataset": column.dataset, "setting": column.setting},
                    **{"method": reference, "printed": printed, "metric": name},
                    **{"paper": "" if paper is None else f"{paper.mean:g}", "ours": f"{ours:.6g}"},
                    **{"flags": "; ".join(flags), "by_seed": f"0:{ours:.6g}"},
                    "seconds": round(run.read_summary().seconds),
                }


def part(asked, cells):
    """The page's table of what is finished, as text."""
    lines = ["| data | reference | epochs | " + " | ".join(MEASURES[name].label for name in METRICS) + " | seconds |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for at in range(0, len(cells), len(METRICS)):
        group = cells[at : at + len(METRICS)]
        dataset, reference = group[0]["column"], group[0]["method"]
        passes = f"{asked.epochs[dataset]} of {REFERENCES[reference].epochs}".removeprefix(f"{ALL} of ")
        scores = [f"{float(one['ours']):.2f}" + f" ({one['paper']})" * bool(one["paper"]) for one in group]
        shown = [dataset, group[0]["printed"], passes, *scores, str(group[0]["seconds"])]
        lines.append(f"| {' | '.join(shown)} |")
    given = " ".join(f"{one}={epochs}".removesuffix(f"={ALL}") for one, epochs in asked.epochs.items())
    share = f" --share {asked.share:g}" * (asked.share < 1)
    told = [f"`KINFED_DATA=DIR python benchmarks/references.py {given}{share}`,", f"{page.version()}, one seed."]
    if asked.share < 1:
        told += [f"Sensors have the last {asked.share:.0%} of their windows, but at least 5,000 or all."]
    told += ["An hour ahead, means over sensors; in brackets what SFL's Table 1 prints for the whole data set."]
    return "\n".join([*told, "", *lines])


def write(asked):
    """Put the finished runs on the page and in the table."""
    if found := list(cells(asked)):
        name = "all" if set(asked.epochs.values()) == {ALL} and asked.share == 1 else "short"
        page.put(PAGE, name, part(asked, found), "Centralised references on traffic")
        TABLE.parent.mkdir(exist_ok=True)
        with TABLE.open("w", newline="") as file:
            lines = csv.DictWriter(file, list(found[0]), lineterminator="\n")
            lines.writeheader()
            lines.writerows(found)


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("datasets", nargs="*", default=DATASETS, metavar="DATASET[=EPOCHS]", help=", ".join(DATASETS))
    asked.add_argument("--share", type=float, default=1.0, help="of each series, from its end: less is quicker")
    asked.add_argument("--keep", type=Path, default=Path("runs") / "references", metavar="DIR")
    asked = asked.parse_args()
    asked.epochs = {name: epochs or ALL for name, _, epochs in (one.partition("=") for one in asked.datasets)}
    if unknown := sorted(set(asked.epochs) - set(DATASETS)):
        sys.exit(f"no subset '{unknown[0]}' of SFL's Table 1; known: {', '.join(DATASETS)}")
    sys.exit(not train(asked))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command begins the unfinished run again")
