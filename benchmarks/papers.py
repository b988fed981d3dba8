"""Tables of the five papers, ours beside what is printed: python benchmarks/papers.py [PART ...] [--jobs 2]

Each part is one `kinfed reproduce`, as large as two cores allow; finished runs are kept in --keep, so the same command
again does what is left. The tables go to docs/results/METHOD-tables.md, between marks; what stands around them is kept.
Without PART, all of them.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from page import put

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PFEDGAT = "--method local,fedavg,fedprox,cfl,per-fedavg,pfedgat,pfedgat-fair"
PANACEA = "--method fedavg,fedavg-ft,per-fedavg,sfl,pfedhn,panacea"
POINTS = f"{PANACEA} --column fl60,dg60,tpt48"
TRAFFIC = f"{PANACEA} --column metr_la_subset,pems_bay_subset --scale 0.02"
PARTS = {  # a table's name, perhaps with that of a part of it: what is asked of kinfed reproduce, with one seed
    "sfl.table1": "--method fedavg,sfl,sfl-star --column metr_la_week,metr_la_subset,pems_bay_subset,pems08_partial",
    "panacea.table2-points": POINTS,
    "panacea.table3-points": POINTS,
    "pfedgat.table1-cifar10": f"{PFEDGAT} --scale 0.3 --column cifar10/iid,cifar10/pathological,cifar10/dirichlet",
    "fedcedar.table1": "--method fedavg,fedprox,per-fedavg,sfl,fedcedar --scale 0.1 "
    "--column mnist/shards,cifar10/shards",
    "sfl.table2": "--method fedavg,sfl,sfl-star --scale 0.25 --precision bf16 --column cifar10/shards2,cifar10/shards5",
    "pfedgat.table3": f"{PFEDGAT} --scale 0.2 --column cifar10/10",
    "pfedgat.table1-fashion": "--method local,fedavg,fedprox,cfl,per-fedavg,pfedgat --scale 0.1 "
    "--column fashion_mnist/iid,fashion_mnist/pathological,fashion_mnist/dirichlet",
    "panacea.table2-traffic": TRAFFIC,
    "panacea.table3-traffic": TRAFFIC,
    "fedaghn.table1": "--method local,fedavg,fedavg-ft,cfl,fedamp,fedaghn --scale 0.025 --precision bf16 "
    "--column cifar10/pathological,cifar10/dirichlet",
}
METHODS = {"sfl": "SFL", "pfedgat": "pFedGAT", "fedaghn": "FedAGHN", "fedcedar": "FedCedar", "panacea": "Panacea"}


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("part", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    asked.add_argument("--jobs", default="2", help="runs side by side")
    asked.add_argument("--keep", type=Path, default=Path("runs") / "papers", metavar="DIR")
    asked = asked.parse_args()
    failed = []
    for part in asked.part or PARTS:
        out = asked.keep / part
        table = part.partition("-")[0]
        command = ["reproduce", table, *PARTS[part].split(), "--seeds", "1", "--jobs", asked.jobs, "--out", out]
        if subprocess.run([Path(sys.executable).parent / "kinfed", *command]).returncode:
            failed.append(part)
        if (out / "table.md").exists():
            method = part.partition(".")[0]
            text = (out / "table.md").read_text().replace("# ", "## ", 1)
            put(RESULTS / f"{method}-tables.md", part, text, f"Tables of the {METHODS[method]} paper")
    if failed:
        sys.exit(f"not everything ran: {', '.join(failed)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on with what is left")
