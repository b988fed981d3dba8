"""By which rule to choose a method: python evidence/choose_rules.py [--seeds 1]

On the sixteen federations of tune_federations.py every candidate of `kinfed choose` is trained to the end on two folds;
then rules choose from the validation scores that they would have seen. Points of test accuracy over the better of Local
and FedAvg at the configured rate, and what the candidates trained cost in runs of FedAvg. Writes a part of
docs/choose.md.
"""

import argparse
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tune_federations import cases

import kinfed
from kinfed.search import successive_halving
from kinfed.search.arena import Arena
from kinfed.search.choose import TRIED, candidates, find_entrant
from kinfed_papers import result_pages as page

PAGE = Path(__file__).parents[1] / "docs" / "choose.md"
ROUNDS, FOLDS = 20, 2
USUAL = "**successive halving; beyond a standard error**"


def train_candidates(case, seed, place):
    """Every candidate trained to the end: {(name, fold): (history, seconds)}, and the candidates."""
    _, x, y, client, classes = case
    federation = kinfed.Federation.from_arrays(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(client))
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, classes))
    arena = Arena(federation, lambda _: net, place, rounds=kinfed.Rounds(ROUNDS), seed=seed)
    runs, tried = {}, candidates([find_entrant(name) for name in TRIED], arena)
    for candidate in tried:
        for fold in range(FOLDS):
            begun = time.perf_counter()
            history = arena.train(candidate, fold, ROUNDS).history
            runs[candidate.name, fold] = history, time.perf_counter() - begun
    return runs, tried


def best(standings):
    """The best validation score of those that came as far as any."""
    last = max(standing.rounds for standing in standings)
    return max((standing for standing in standings if standing.rounds == last), key=lambda standing: standing.mean)


def look(runs, around, by, entry, until):
    """What a rule sees of an entry: validation scores, averaged over so many rounds on either side of the best."""
    complete = runs[entry.candidate.name, entry.fold][0]
    seen = sum(round < until for round in complete.rounds)
    history = replace(complete, rounds=complete.rounds[:seen], scores=complete.scores[:seen])
    history.selector.selection = complete.selector.selection._replace(by=by)
    curve = history.curve(history.preference, "validation", history.selector.score).double()
    at = history.place(history.preference)
    sign = 1 if history.selector.higher_is_better else -1
    return sign * curve[max(0, at - around) : at + around + 1].mean(0).numpy()


def rules(count):
    """(what it is, plan, folds, around, score, winner) of each rule."""
    to_the_end = [successive_halving.Rung(ROUNDS, count)]
    usual = successive_halving.rungs(ROUNDS, 1, count, 1, 10 * ROUNDS)
    narrow = [
        successive_halving.Rung(5, usual[0].enter),
        successive_halving.Rung(10, 6),
        successive_halving.Rung(ROUNDS, 3),
    ]
    yield "all to the end; the best score", to_the_end, 1, 0, "", best
    yield "all to the end; beyond a standard error", to_the_end, 1, 0, "", successive_halving.winner
    yield "successive halving; the best score", usual, 1, 0, "", best
    yield USUAL, usual, 1, 0, "", successive_halving.winner
    yield (
        "successive halving with three in the end; beyond a standard error",
        narrow,
        1,
        0,
        "",
        successive_halving.winner,
    )
    yield (
        "successive halving, scores averaged over five rounds; beyond a standard error",
        usual,
        1,
        2,
        "",
        successive_halving.winner,
    )
    yield (
        "successive halving by validation loss; beyond a standard error",
        usual,
        1,
        0,
        "loss",
        successive_halving.winner,
    )
    yield "successive halving with two folds; beyond a standard error", usual, 2, 0, "", successive_halving.winner


def sum_seconds(plan, left, runs, folds):
    """Seconds of training of the candidates that were left at each rung."""
    before, total = 0, 0.0
    for rung, names in zip(plan, left, strict=True):
        total += sum(runs[name, fold][1] for name in names for fold in range(folds)) * (rung.until - before) / ROUNDS
        before = rung.until
    return total


def judge_rules(runs, tried):
    """{rule: (points gained, cost in runs of FedAvg)} on one federation."""
    tests = {
        candidate.name: 100 * float(h.test(h.chosen).mean())
        for candidate in tried
        for h in [runs[candidate.name, 0][0]]
    }
    lr = kinfed.Training().optimiser.lr
    base = max(tests[f"local,lr={lr:g}"], tests[f"fedavg,lr={lr:g}"])
    result = {}
    for what, plan, folds, around, by, pick in rules(len(tried)):
        left = []
        standings = successive_halving.run(
            tried,
            plan,
            folds,
            lambda entries, until: {},
            partial(look, runs, around, by),
            lambda rung, here, left=left: left.append([candidate.name for candidate in here]),
        )
        cost = sum_seconds(plan, left, runs, folds) / runs[f"fedavg,lr={lr:g}", 0][1]
        result[what] = tests[pick(standings).candidate.name] - base, cost
    return result


def main():
    """Run what is asked for and write the page's part."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    gains, costs = {}, {}
    for seed in range(args.seeds):
        for case in cases(seed):
            with tempfile.TemporaryDirectory() as place:
                by_rule = judge_rules(*train_candidates(case, seed, Path(place)))
            for what, (gain, cost) in by_rule.items():
                gains.setdefault(what, {}).setdefault(case[0], []).append(gain)
                costs.setdefault(what, []).append(cost)
            print(seed, case[0], {what[:30]: f"{gain:+.1f}" for what, (gain, _) in by_rule.items()}, file=sys.stderr)
    versions = f"kinfed {kinfed.__version__}, PyTorch {torch.__version__}"
    lines = [
        f"`python evidence/choose_rules.py --seeds {args.seeds}`, {versions}.",
        "",
        "| rule | mean | worst | over the usual rule | standard error | runs of FedAvg |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    means = {what: np.array([np.mean(values) for values in by_case.values()]) for what, by_case in gains.items()}
    for what, by_case in means.items():
        ahead = by_case - means[USUAL]
        over = [f"{ahead.mean():+.1f}", f"{ahead.std(ddof=1) / len(ahead) ** 0.5:.1f}"] if what != USUAL else ["", ""]
        cells = [what, f"{by_case.mean():+.1f}", f"{by_case.min():+.1f}", *over, f"{np.mean(costs[what]):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    page.put(PAGE, "rules", "\n".join(lines), "Choosing a method")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
