"""Whether a change of the code has changed results: hashes of models, recorded before it and compared after it.

    python benchmarks/bits.py record FILE    # on the code of before
    python benchmarks/bits.py compare FILE   # on the code of now: what differs, and what is no longer there

Cases: every method and variant of the tests under every executor, and two rounds, with few examples, of every row and
column of every published table whose data are here (KINFED_DATA). Each is hashed from all clients' models, whatever
folder or version wrote them. Hashes are of one machine: never compare those of two. `--only WORD` takes the cases whose
name holds the word. Both go on where they were interrupted.
"""

import argparse
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from kinfed import SGD, Federation, Method, Training
from kinfed.errors import RunError, UsageError
from kinfed.files import replacing
from kinfed.runs.config import experiment as config
from kinfed.runs.fit import fit
from kinfed.simulation.execution import Execution
from kinfed_papers import published_table
from kinfed_papers.reproduction import Reproduction

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "methods")]

EXECUTORS = ("loop", "vmap", "fused")
ROUNDS, EXAMPLES = 2, 24  # of a published table's cell, and of each of its clients

RENAMED = {  # what a case was called before its settings became parts
    "pfedgat-sketch=5": "pfedgat-features=sketch-feature_size=5",
    "cfl-eps1=0.1": "cfl-split=Lengths(eps1=0.1, eps2=0.0)",
    "cfl-eps2=9.0": "cfl-split=Lengths(eps1=10.0, eps2=9.0)",
    "cfl-linkage=single-gamma=0.1": "cfl-split=Lengths(eps1=10.0, eps2=0.0, linkage=single, gamma=0.1)",
    "pfedhn-optimiser=SGD(lr=0.1)": "pfedhn-lr=0.1-momentum=0.0-weight_decay=0.0",
    "fedamp-alpha=0.05-sigma=2.0-pull=0.1": "fedamp-alpha=0.05-sigma=2.0",
    "fedamp-alpha=1.0-sigma=20.0-pull=0.2": "fedamp-pull=0.2",
    "fedamp-alpha=1.0-sigma=20.0-pull=0.1-neighbours=2": "fedamp-neighbours=2",
    "heurfedamp-sharpness=10.0-home=0.7-pull=1.0-neighbours=2": (
        "heurfedamp-attention=Heuristic(compare=models, share=0.0, pull=1.0)-neighbours=2"
    ),
    "pfedgraph-alpha=0.3-pull=0.0-bn=local": "pfedgraph-pull=0.0-bn=local",
    "panacea-embedding=4-encoder=GCN(layers=1, hidden=6)-decoder=FullHeads(layers=2, hidden=6, memory=1.0)": (
        "panacea-embedding=4-hidden=6-encoder_layers=1-decoder_layers=2"
    ),
    "panacea-encoder=MLP(hidden=5)-reconstruction=0.0": "panacea-aggregation=none-reconstruction=0.0",
    "panacea-optimiser=Adam(lr=0.05)": "panacea-lr=0.05-optimiser=adam",
}


def cases() -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Name and models, [N, d], of every case; equal cells of different tables come once."""
    import test_variants as variants

    for name, variant in [*((name, {}) for name in variants.METHODS), *variants.CASES]:
        for executor in EXECUTORS:
            method = variants.METHODS[name](**{**variants.BASE.get(name, {}), **variant})
            case = variants.told((name, variant))
            yield f"{RENAMED.get(case, case)} {executor}", partial(fit_small, method, variants.federation(), executor)

    folder, seen = Path(os.environ["KINFED_DATA"]), set[str]()
    for name in published_table.tables():
        table = Reproduction(published_table.load(name), Path("unused"), folder)
        for cell in table.cells():
            if cell.experiment is None:
                continue
            raw = small(cell.experiment.table)
            if (key := json.dumps(raw, sort_keys=True)) not in seen:
                seen.add(key)
                yield f"{name} {cell.row.name} on {cell.column.name}", partial(fit_cell, raw, folder)


def small(table: config.Table) -> config.Table:
    """A cell's config with two rounds and few examples; what counts rounds begins at once."""
    split = {**table["federation"]["split"], "examples": EXAMPLES}
    cell = {
        **table,
        "rounds": ROUNDS,
        "evaluate_every": 1,
        "seed": 0,
        "federation": {**table["federation"], "split": split},
    }
    if cell["participation"].get("late"):
        cell["participation"] = {**cell["participation"], "joins": 1}
    return cell


def fit_small(method: Method, federation: Federation, executor: str) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        between = nn.Linear(4, 4) if executor == "fused" else nn.BatchNorm1d(4)  # which has no fused form
        module = nn.Sequential(nn.Linear(3, 4), between, nn.Tanh(), nn.Linear(4, 3)).double()
    how = {"rounds": 3, "participation": 0.4, "seed": 5, "execution": Execution(executor, workers=1, chunk=3)}
    return fit(method, federation, module, training=Training(1, 4, SGD(lr=0.2)), **how).history.models["theta"]


def fit_cell(raw: config.Table, folder: Path) -> torch.Tensor:
    experiment = config.resolve(raw)
    federation = experiment.federation(folder, 0)
    run = fit(
        experiment.method,
        federation,
        experiment.module(federation, 0),
        rounds=ROUNDS,
        training=experiment.training,
        participation=experiment.participation,
        seed=0,
        execution=Execution("loop", workers=1),
    )
    return run.history.models["theta"]


def outcome(make: Callable[[], torch.Tensor]) -> str:
    """The hash of a case's models; where it cannot run, why."""
    try:
        return hashlib.sha256(make().contiguous().cpu().numpy().tobytes()).hexdigest()[:16]
    except (UsageError, RunError) as problem:
        return f"refused: {str(problem)[:90]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = args.file if args.action == "record" else args.file.with_suffix(".now.json")
    digests: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    names = []
    for name, make in cases():
        if args.only not in name:
            continue
        names.append(name)
        if name not in digests:
            digests[name] = outcome(make)
            with replacing(kept) as part:
                part.write_text(json.dumps(digests, indent=1))
            print(f"{len(names)} {name}: {digests[name]}", file=sys.stderr)
    if args.action == "compare":
        before = json.loads(args.file.read_text())
        gone = [name for name in before if name not in digests and args.only in name]
        differ = [name for name in names if name in before and before[name] != digests[name]]
        for name in differ:
            print(f"differs: {name}: {before[name]} before, {digests[name]} now")
        for name in gone:
            print(f"gone: {name}")
        print(
            f"{len(names)} cases: {len(names) - len(differ)} as before or new, {len(differ)} differ, {len(gone)} gone"
        )


if __name__ == "__main__":
    main()
