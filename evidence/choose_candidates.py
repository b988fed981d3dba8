"""Which methods should choose try? python evidence/choose_candidates.py --keep DIR

On the sixteen federations of tune_federations.py every candidate, at every rate, is trained to the end; then the
successive halving of `kinfed choose` is run among some of the methods, from the scores that it would have seen. Points
of test accuracy over the better of Local and FedAvg at the configured rate, and the CPU seconds of what was trained
beside FedAvg's. The runs are kept in DIR: the same command again does the rest. Writes a part of docs/choose.md.
"""

import argparse
import json
import shutil
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from tune_federations import cases

import kinfed
from kinfed.files import replacing
from kinfed.search import successive_halving
from kinfed.search.arena import Arena
from kinfed.search.choose import TRIED, candidates, find_entrant
from kinfed_papers import result_pages as page

PAGE = Path(__file__).parents[1] / "docs" / "choose.md"
ROUNDS = 20
MORE = (
    *("fedper", "fedsem", "fedamp", "pfedgraph", "ditto", "sfl"),
    *("heurfedamp", "fedavg-ft", "fedrod", "fedala"),
)


def train(case, place):
    """Every candidate of a case trained to the end: {name: [validation scores by round, test score, CPU seconds]}."""
    file = place / "found.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    _, x, y, client, classes = case
    federation = kinfed.Federation.from_arrays(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(client))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, classes))
    arena = Arena(federation, lambda seed: net, place, rounds=kinfed.Rounds(ROUNDS))
    for candidate in make_candidates(TRIED + MORE):
        if candidate.name in results:
            continue
        shutil.rmtree(arena.place(candidate, 0), ignore_errors=True)  # a run that goes on would seem to take less time
        begun = time.process_time()
        history = arena.train(candidate, 0, ROUNDS).history
        seconds = time.process_time() - begun
        seen = [successive_halving.read_validation(history, until).tolist() for until in range(1, ROUNDS + 1)]
        results[candidate.name] = [seen, 100 * float(history.test(history.preference).nanmean()), seconds]
        with replacing(file) as part:
            part.write_text(json.dumps(results))
    return results


def make_candidates(methods):
    """The candidates of these methods."""
    return candidates([find_entrant(name) for name in methods], kinfed.Training())


def worth(methods, everything):
    """What successive halving among these methods gains in each case, and its mean cost in runs of FedAvg."""
    some, first, gains, costs = make_candidates(methods), make_candidates(TRIED)[:2], [], []
    plan = successive_halving.rungs(ROUNDS, 1, len(some), 1, 9 * ROUNDS)
    for results in everything:
        standings = successive_halving.run(
            some,
            plan,
            1,
            lambda entries, until: {},
            lambda entry, until, results=results: np.array(results[entry.candidate.name][0][until - 1]),
        )
        base = max(results[candidate.name][1] for candidate in first)
        gains.append(results[successive_halving.winner(standings).candidate.name][1] - base)
        cost = sum(results[standing.candidate.name][2] * standing.rounds / ROUNDS for standing in standings)
        costs.append(cost / results[first[1].name][2])
    return gains, np.mean(costs)


def lines(everything):
    """The table's lines: the methods of now, then others beside them, without one of them, and all."""
    yield f"| methods | mean | worst of {len(everything)} | times FedAvg |"
    yield "| --- | ---: | ---: | ---: |"
    sets = {f"the default seven: {', '.join(TRIED)}": TRIED}
    sets |= {f"the default seven plus {name}": (*TRIED, name) for name in MORE}
    sets |= {
        f"the default seven without {name}": tuple(method for method in TRIED if method != name) for name in TRIED[2:]
    }
    sets["the default seven plus all of the above"] = TRIED + MORE
    for label, methods in sets.items():
        gains, cost = worth(methods, everything)
        yield f"| {label} | {np.mean(gains):+.1f} | {np.min(gains):+.1f} | {cost:.1f} |"


def main():
    """Train what is missing and write the page's part."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, required=True, metavar="DIR", help="the folder of the runs")
    args = parser.parse_args()
    everything = []
    for i, case in enumerate(cases(0)):
        everything.append(train(case, args.keep / str(i)))
        print(case[0], file=sys.stderr, flush=True)
    head = f"`python evidence/choose_candidates.py --keep DIR`, PyTorch {torch.__version__}."
    page.put(PAGE, "candidates", "\n".join([head, "", *lines(everything)]), "Choosing")


if __name__ == "__main__":
    main()
