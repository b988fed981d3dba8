"""What methods are worth at their defaults, on nine federations: python benchmarks/strangers.py [--answers FILE]

Every method at its defaults, and `choose`, on nine kinds of federations that users bring, beside the better of Local
and FedAvg, with two kinds of training: `plain` (SGD 0.2, batch 8, two local epochs, 20 rounds) and `own`, the
library's default training for as many rounds. Writes docs/results/strangers.md. A run that diverges counts as the last
place of its case, and is named. `oracle` is FedAvg inside the true groups. With --json the same command goes on, and
other methods join the table. The ninth case needs a file of answers, one row a question that a person was asked: the
person first, then numbers, and the answer, 0 or 1, last; without it the case is left out, and the page says so.
"""

import argparse
import json
import platform
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import page
import torch
from hidden_groups import InsideGroups
from sklearn.datasets import load_digits

import kinfed
from kinfed.methods import FAMILIES, METHODS

PAGE = Path(__file__).parents[1] / "docs" / "results" / "strangers.md"
BASES = ("local", "fedavg", "oracle")
TRAINING = {"plain": kinfed.Training(epochs=2, batch=8, optimiser=kinfed.SGD(lr=0.2)), "own": kinfed.Training()}
ROUNDS = 20
DIGITS = load_digits()
X, Y = (DIGITS.data / 16).astype(np.float32), DIGITS.target.astype(np.int64)


def cases(seed, answers=None):
    """(name, x: [n, ...], y: [n], client: [n], classes, group: [N] of each client or None) of each federation."""
    rng = np.random.default_rng(seed)
    even = [len(X) // 20] * 20
    opposite = [[1, -1, 1, 1], [-1, 1, -1, -1], [0.5, 1, -1, 2]]
    yield "shops with opposite customers", *joined(planes(rng, 15, 120, opposite, 0.1)), 2, [c % 3 for c in range(15)]
    yield "small shops, customers alike", *joined(planes(rng, 15, 30, [[1, -1, 0.5, 2]], 0.3)), 2, [0] * 15
    yield "digits, everyone alike", *joined([(X[i], Y[i]) for i in deal(rng, even)]), 10, [0] * 20
    four = [c % 4 for c in range(20)]
    parts = [(turned(X[i], c % 4), Y[i]) for c, i in enumerate(deal(rng, even))]
    yield "digits, four rotations", *joined(parts), 10, four
    names = [rng.permutation(10) for _ in even]
    parts = [(X[i], names[c][Y[i]]) for c, i in enumerate(deal(rng, even))]
    yield "digits, everyone names them differently", *joined(parts), 10, list(range(20))
    parts = [(X[i], rng.integers(0, 10, len(i)) if c % 3 == 0 else Y[i]) for c, i in enumerate(deal(rng, even))]
    noisy = [c + 1 if c % 3 == 0 else 0 for c in range(20)]  # each a group of its own
    yield "digits, a third has random labels", *joined(parts), 10, noisy
    uneven = [int(size) for size in np.linspace(25, 150, 20)]
    parts = [(turned(X[i], c % 4), Y[i]) for c, i in enumerate(deal(rng, uneven))]
    yield "digits, four rotations, 25 to 150 each", *joined(parts), 10, four
    groups, parts = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 2, 4, 6, 8], [1, 3, 5, 7, 9]], []
    for c in range(20):
        i = rng.choice(np.flatnonzero(np.isin(Y, groups[c % 4])), 60, replace=False)
        parts.append((X[i], Y[i]))
    yield "digits, groups see half of them", *joined(parts), 10, four
    if answers is not None:
        table = np.genfromtxt(answers, delimiter=",", skip_header=1, dtype=str)
        x = table[:, 1:-1].astype(np.float32)
        x[:, 0] = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
        person = np.unique(table[:, 0], return_inverse=True)[1]
        yield "316 persons, 24 answers each", x, table[:, -1].astype(np.int64), person, 2, None


def turned(x, quarter_turns):
    """Digits: [n, 64], turned."""
    return np.rot90(x.reshape(-1, 8, 8), quarter_turns, (1, 2)).reshape(-1, 64)


def deal(rng, sizes):
    """Rows of the digits for clients of these sizes."""
    order, ends = rng.permutation(len(X)), np.cumsum([0, *sizes])
    return [order[a:b] for a, b in pairwise(ends)]


def joined(parts):
    """One x, y and client for all rows of clients, (x, y) each."""
    x = np.concatenate([x for x, _ in parts]).astype(np.float32)
    y = np.concatenate([y for _, y in parts]).astype(np.int64)
    return x, y, np.concatenate([np.full(len(y), c) for c, (_, y) in enumerate(parts)])


def planes(rng, clients, rows, centres, spread, noise=0.3):
    """Two classes on the two sides of a plane: one a group of clients, and each client a little off its group's."""
    parts = []
    for c in range(clients):
        w = np.asarray(centres[c % len(centres)]) + spread * rng.normal(size=len(centres[0]))
        x = rng.normal(size=(rows, len(w)))
        parts.append((x, x @ w + noise * rng.normal(size=rows) > 0))
    return parts


def measure(name, case, training, seed):
    """Scores of one run: the mean over clients in percent, each client's, CPU seconds; or why there is none."""
    _, x, y, client, classes, *known = case
    groups = known[0] if known else None
    federation = kinfed.Federation.from_arrays(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(client))
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, classes))
    begun = time.process_time()
    if name == "choose":
        return chosen(federation, net, training, seed)
    if name == "oracle" and groups is None:
        return {"unknown": "no groups are known"}
    try:
        method = InsideGroups(tuple(groups)) if name == "oracle" else METHODS[name]()
        run = kinfed.fit(method, federation, net, rounds=ROUNDS, seed=seed, training=training)
    except (kinfed.RunError, kinfed.UsageError) as problem:
        return {"problem": str(problem)}
    summary, seconds = run.summary(), time.process_time() - begun
    scores = summary.of_clients[summary.chosen]
    tests = [len(rows) for rows in federation.rows["test"]]
    return {"mean": 100 * summary.scores[summary.chosen]["mean"], "clients": scores, "tests": tests, "seconds": seconds}


def chosen(federation, net, training, seed):
    """The same of `kinfed.choose`, each client with the model that it keeps; and what was chosen."""
    begun = time.process_time()
    choice = kinfed.choose(federation, net, rounds=ROUNDS, training=training, seed=seed)
    seconds, runs = time.process_time() - begun, {"kin": choice.run, "local": choice.local, "fedavg": choice.fedavg}
    tests = {kind: run.history.test(run.history.chosen).tolist() for kind, run in runs.items()}
    scores = [tests[kind][i] for i, kind in enumerate(choice.answers.values())]
    return {
        "mean": 100 * float(np.mean(scores)),
        "clients": scores,
        "tests": [len(rows) for rows in federation.rows["test"]],
        "seconds": seconds,
        "chosen": choice.winner.candidate.name,
        "own": sum(kind != "kin" for kind in choice.answers.values()),
    }


def worse(mine, base):
    """The share of clients whose score is below the base's by more than two standard errors of a difference."""
    p, q, n = (np.array(values) for values in (mine["clients"], base["clients"], base["tests"]))
    return float((q - p > 2 * np.sqrt((p * (1 - p) + q * (1 - q)) / n)).mean())


def table(results, names):
    """Lines of the table of one kind of training: a row a method, a column a case."""
    ended = last_places(results)
    mean = {case: {name: average(found[name]) for name in names} for case, found in results.items()}
    gains = {name: [one[name] - max(one["local"], one["fedavg"]) for one in mean.values()] for name in names}
    yield f"| method | mean | worst | {' | '.join(str(i + 1) for i in range(len(results)))} | hurt, % | times FedAvg |"
    yield f"| --- |{' ---: |' * (len(results) + 4)}"
    for name in ("local", "fedavg"):
        cells = [f"{one[name]:.1f}" for one in mean.values()]
        yield f"| {name}, % | | | {' | '.join(cells)} | | |"
    families = {"": ("oracle", "choose"), **FAMILIES}
    for family, members in families.items():
        ran = [name for name in members if name in names]
        if ran and family:
            yield f"| **{family}** |{' |' * (len(results) + 4)}"
        for name in ran:
            known = [gain for gain in gains[name] if not np.isnan(gain)]
            cells = [
                "" if np.isnan(gain) else f"{gain:+.1f}{error(found, name)}"
                for gain, found in zip(gains[name], results.values(), strict=True)
            ]
            yield (
                f"| {name} | **{np.mean(known):+.1f}** | **{np.min(known):+.1f}** | {' | '.join(cells)} | "
                f"{hurt(results, name):.1f} | {times(results, name):.1f} |"
            )
    yield ""
    yield "; ".join(f"{i + 1}: {case}" for i, case in enumerate(results)) + "."
    if "choose" in names:
        yield ""
        yield from choices(results)
    if ended:
        yield ""
        yield "Runs that ended without a result count as the last place of their case:"
        yield ""
        count = {case: len(found["local"]) for case, found in results.items()}
        yield from (f"- {problem}: {where_all(where, count)}" for problem, where in ended.items())


def where_all(where, count):
    """Cases and seeds in words; `count` has the number of seeds of every case."""
    seeds = {}
    for case, seed in where:
        seeds.setdefault(case, []).append(seed)
    if {case: len(found) for case, found in seeds.items()} == count:
        return "every case with every seed"
    return "; ".join(f"{case} (seeds {', '.join(map(str, found))})" for case, found in seeds.items())


def last_places(results):
    """Give runs that ended early the last place of their case; the cases and seeds, by the reason."""
    ended = {}
    for case, found in results.items():
        for seed in range(len(found["local"])):
            least = min(runs[seed]["mean"] for runs in found.values() if "clients" in runs[seed])
            for name, runs in found.items():
                if "problem" in runs[seed]:
                    ended.setdefault(f"{name}: {runs[seed]['problem']}", []).append((case, seed))
                    runs[seed]["mean"] = least
    return ended


def average(runs):
    """The mean over seeds; nan where the case has none."""
    return np.mean([run.get("mean", np.nan) for run in runs])


def hurt(results, name):
    """The share of clients, in percent, that a method has left worse off than Local."""
    shares = [
        worse(run, alone)
        for found in results.values()
        for run, alone in zip(found[name], found["local"], strict=True)
        if "clients" in run
    ]
    return 100 * np.mean(shares or [np.nan])


def times(results, name):
    """The CPU seconds of a method's runs beside those of FedAvg's, over the cases that both finished."""
    both = [
        (run["seconds"], base["seconds"])
        for found in results.values()
        for run, base in zip(found[name], found["fedavg"], strict=True)
        if "clients" in run
    ]
    mine, theirs = np.sum(both or [[np.nan, np.nan]], 0)
    return mine / theirs


def error(found, name):
    """For `choose`, the standard error of its gain over seeds."""
    if name != "choose" or len(found[name]) < 2:
        return ""
    gains = [
        one["mean"] - max(local["mean"], fedavg["mean"])
        for one, local, fedavg in zip(found[name], found["local"], found["fedavg"], strict=True)
    ]
    return f" ± {np.std(gains, ddof=1) / np.sqrt(len(gains)):.1f}"


def choices(results):
    """What `choose` chose by case and seed."""
    yield "`choose` chose"
    yield ""
    for case, found in results.items():
        runs = found["choose"]
        own = sum(run["own"] for run in runs)
        kept = f"; {own} clients keep another model" if own else ""
        yield f"- {case}: {', '.join(run['chosen'] for run in runs)}{kept}"


def main():
    """Run what is asked for and write the page."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--answers", type=Path, help="the file of answers, for the ninth case")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default="", help="methods, separated by commas (default: all, and choose)")
    parser.add_argument("--training", default="plain,own", help="plain, own or both")
    parser.add_argument("--part", default="now", help="the part of the page that is written")
    parser.add_argument("--json", type=Path, help="what was measured: read if it is there, and added to")
    parser.add_argument("--again", default="", help="methods that are measured again")
    args = parser.parse_args()
    asked = args.methods.split(",") if args.methods else [*METHODS, "choose"]
    names = list(dict.fromkeys((*BASES, *asked)))
    kept = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in filter(None, args.again.split(",")):
        for cases_of in kept.values():
            for found in cases_of.values():
                found.pop(name, None)
    kinds = args.training.split(",")
    for kind, seed in ((kind, seed) for kind in kinds for seed in range(args.seeds)):
        for case in cases(seed, args.answers):
            found = kept.setdefault(kind, {}).setdefault(case[0], {})
            for name in names:
                if len(found.setdefault(name, [])) == seed:
                    found[name].append(measure(name, case, TRAINING[kind], seed))
            print(kind, seed, case[0], file=sys.stderr, flush=True)
            if args.json:
                page.keep(args.json, kept)
    lines = []
    for kind in kinds:
        results = {case: {name: found[name][: args.seeds] for name in names} for case, found in kept[kind].items()}
        how = TRAINING[kind]
        words = f"SGD at rate {how.optimiser.lr:g}, batches of {how.batch}, {how.epochs} local epochs, {ROUNDS} rounds"
        lines += [f"### {words}", "", *table(results, names), ""]
    left = "" if args.answers else " Without `--answers`, so the case of 316 persons is not here."
    some = f" --methods {args.methods}" * bool(args.methods)
    command = f"python benchmarks/strangers.py --seeds {args.seeds}{some} --training {args.training}"
    head = (
        f"`{command}{' --answers FILE' if args.answers else ''}`, kinfed {kinfed.__version__}, PyTorch "
        f"{torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads.{left}"
    )
    page.put(PAGE, args.part, "\n".join([head, "", *lines]), "Nine federations")
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
