"""What methods are worth, on federations of the kinds that users bring: python evidence/federations.py

Three blocks beside the better of Local and FedAvg: kinfed's own methods and `choose`, methods of papers at their
defaults, and those again, each with the best of five settings by validation (`settings_of` says which five). Two
kinds of training: `plain` (SGD 0.2, batch 8, two local epochs, 20 rounds) and `own`, the library's default training
for as many rounds. The defaults of kinfed's own methods were checked on nine federations; three more, whose data no
default has seen, need Fashion-MNIST in $KINFED_DATA. A run that diverges counts as the last place of its case, and is
named. `oracle` is FedAvg inside the true groups.

    python evidence/federations.py measure --answers FILE [--methods kin,hedge --seeds 3 --training own --tuned]
    python evidence/federations.py floor --answers FILE
    python evidence/federations.py write

`measure` adds to docs/evidence/federations.json what it lacks, and measures again what has other settings now; `write`
makes the page of it. `floor` adds the best that clients do without others and the best that pooling does, chosen as for
every verdict, under the library's own training; the leaderboard counts from the former. The ninth case needs a file of
answers, one row a question that a person was asked: the person first, then numbers, and the answer, 0 or 1, last.
"""

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hidden_groups import InsideGroups
from sklearn.datasets import load_digits

import kinfed
from kinfed.core.method import Method
from kinfed.methods import FAMILIES, METHODS
from kinfed.runs import baselines
from kinfed.runs.config.parts import make
from kinfed.runs.run import make_baseline
from kinfed_papers import result_pages as page

RESULTS = Path(__file__).parents[1] / "docs" / "evidence"
PAGE, KEPT = RESULTS / "federations.md", RESULTS / "federations.json"
TRAINING = {"plain": kinfed.Training(epochs=2, batch=8, optimiser=kinfed.SGD(lr=0.2)), "own": kinfed.Training()}
ROUNDS, SETTINGS = 20, 5
OWN = "kinfed's own"
FORMS = {  # of attention, of which each lacks something that `attention` has
    "attention with Equation 5": {"name": "kinfed_papers.pfedgat.graphs:Static"},
    "attention with one step of SGD": {"name": "kinfed.methods.attention:Dynamic"},
}
GRIDS = {  # of methods whose papers print none
    "fedavg-ft": {"length": (1, 3, 30, 100)},
    "fedprox-ft": {"mu": (0.001, 0.1, 1.0, 10.0)},
    "per-fedavg": {"alpha": (0.001, 0.03, 0.1, 0.3)},
    "fedatt": {"step": (0.3, 0.6, 0.9, 1.5)},
    "pfedme": {"pull": (1.0, 5.0, 10.0, 30.0)},
    "fedrep": {"head_epochs": (1, 2, 5, 20)},
    "fedah": {"rate": (0.1, 0.3, 3.0, 10.0)},
    "fedala": {"rate": (0.1, 0.3, 3.0, 10.0)},
    "fedpac": {"pull": (0.1, 0.3, 3.0, 10.0)},
    "fedcp": {"pull": (0.1, 1.0, 5.0, 10.0)},
    "fedfomo": {"explore": (0.0, 0.1, 0.5, 0.9)},
    "dpfl": {"budget": (1, 2, 3, 8)},
    "knn-per": {"neighbours": (3, 5, 20, 30)},
    "cfl": {"eps1": (0.2, 0.4, 0.8), "eps2": (0.8, 1.6, 3.2)},
    "ifca": {"clusters": (2, 3, 6, 8)},
    "fedsem": {"clusters": (2, 3, 4, 8)},
    "sfl": {"pull": (0.01, 0.03, 0.1, 1.0)},
    "fedcedar": {"clusters": (2, 3, 10), "steps": (1, 2)},
    "fedamp": {"pull": (0.01, 0.03, 0.3, 1.0)},
    "heurfedamp": {"home": (0.1, 0.3, 0.7, 0.9)},
    "pfedgraph": {"alpha": (0.1, 0.3, 2.0, 5.0)},
    "pfedgat": {"lr": (0.001, 0.003, 0.03, 0.1)},
    "pfedhn": {"optimiser.lr": (0.001, 0.003, 0.03, 0.1)},
    "pfedla": {"optimiser.lr": (0.001, 0.003, 0.03, 0.1)},
}
BASES = ({"name": "local"}, {"name": "fedavg"}, {"name": "oracle"})
PERSONS = "316 persons, 24 answers each"
DIGITS = load_digits()
X, Y = (DIGITS.data / 16).astype(np.float32), DIGITS.target.astype(np.int64)


def cases(seed, answers=None):
    """(name, x: [n, ...], y: [n], client: [n], classes, group: [N] of each client or None) of each federation."""
    rng = np.random.default_rng(seed)
    even = [len(X) // 20] * 20
    opposite = [[1, -1, 1, 1], [-1, 1, -1, -1], [0.5, 1, -1, 2]]
    yield (
        "shops with opposite customers",
        *join_clients(planes(rng, 15, 120, opposite, 0.1)),
        2,
        [c % 3 for c in range(15)],
    )
    yield "small shops, customers alike", *join_clients(planes(rng, 15, 30, [[1, -1, 0.5, 2]], 0.3)), 2, [0] * 15
    yield "digits, everyone alike", *join_clients([(X[i], Y[i]) for i in deal(rng, even)]), 10, [0] * 20
    four = [c % 4 for c in range(20)]
    parts = [(turn_digits(X[i], c % 4), Y[i]) for c, i in enumerate(deal(rng, even))]
    yield "digits, four rotations", *join_clients(parts), 10, four
    names = [rng.permutation(10) for _ in even]
    parts = [(X[i], names[c][Y[i]]) for c, i in enumerate(deal(rng, even))]
    yield "digits, everyone names them differently", *join_clients(parts), 10, list(range(20))
    parts = [(X[i], rng.integers(0, 10, len(i)) if c % 3 == 0 else Y[i]) for c, i in enumerate(deal(rng, even))]
    noisy = [c + 1 if c % 3 == 0 else 0 for c in range(20)]  # each a group of its own
    yield "digits, a third has random labels", *join_clients(parts), 10, noisy
    uneven = [int(size) for size in np.linspace(25, 150, 20)]
    parts = [(turn_digits(X[i], c % 4), Y[i]) for c, i in enumerate(deal(rng, uneven))]
    yield "digits, four rotations, 25 to 150 each", *join_clients(parts), 10, four
    groups, parts = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 2, 4, 6, 8], [1, 3, 5, 7, 9]], []
    for c in range(20):
        i = rng.choice(np.flatnonzero(np.isin(Y, groups[c % 4])), 60, replace=False)
        parts.append((X[i], Y[i]))
    yield "digits, groups see half of them", *join_clients(parts), 10, four
    if answers is not None:
        table = np.genfromtxt(answers, delimiter=",", skip_header=1, dtype=str)
        x = table[:, 1:-1].astype(np.float32)
        x[:, 0] = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
        person = np.unique(table[:, 0], return_inverse=True)[1]
        yield PERSONS, x, table[:, -1].astype(np.int64), person, 2, None
    if "KINFED_DATA" in os.environ:
        with np.load(Path(os.environ["KINFED_DATA"]) / "fashion_mnist.npz") as clothes:
            yield from unseen(rng, clothes["x_train"], clothes["y_train"])


def unseen(rng, images, labels):
    """The same of three federations of clothes, which no default has seen."""
    images = images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196).astype(np.float32) / 255
    labels = labels.astype(np.int64)
    even = rng.permutation(len(images))[: 20 * 80].reshape(20, 80)
    yield "clothes, everyone alike", *join_clients([(images[i], labels[i]) for i in even]), 10, [0] * 20
    three = [c % 3 for c in range(20)]
    names = [rng.permutation(10) for _ in range(3)]
    parts = [(images[i], names[c % 3][labels[i]]) for c, i in enumerate(even)]
    yield "clothes, three groups name them differently", *join_clients(parts), 10, three
    ends = np.cumsum([0, *np.geomspace(20, 240, 20).astype(int)])
    order = rng.permutation(len(images))
    parts = [(images[order[a:b]], labels[order[a:b]]) for a, b in pairwise(ends)]
    parts = [(1 - x, y) if c % 2 else (x, y) for c, (x, y) in enumerate(parts)]
    yield "clothes, half in negative, 20 to 240 each", *join_clients(parts), 10, [c % 2 for c in range(20)]


def turn_digits(x, quarter_turns):
    """Digits: [n, 64], turned."""
    return np.rot90(x.reshape(-1, 8, 8), quarter_turns, (1, 2)).reshape(-1, 64)


def deal(rng, sizes):
    """Rows of the digits for clients of these sizes."""
    order, ends = rng.permutation(len(X)), np.cumsum([0, *sizes])
    return [order[a:b] for a, b in pairwise(ends)]


def join_clients(parts):
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


def measure(settings, case, training, seed, alone, rounds=ROUNDS, participation=1.0):
    """One run by a method's settings: its score and validation score in percent, CPU seconds, and who was hurt.

    alone: [N] the clients' accuracies with Local, None if this is it. A run that ended early has only its `problem`.
    """
    groups = case[-1]
    federation, net = prepare(case, seed)
    begun, more = time.process_time(), {}
    try:
        if settings == {"name": "choose"}:
            clients, more = choose_for_clients(federation, net, training, seed)
        else:
            method = InsideGroups(tuple(groups)) if settings == {"name": "oracle"} else method_of(settings)
            how = {"rounds": rounds, "training": training, "participation": participation}
            run = kinfed.fit(method, federation, net, seed=seed, **how)
            clients = run.summary.clients.scores[run.history.chosen]
            at, metric = run.history.place(), run.history.selector.score
            validated = run.history.curve(run.history.chosen, "validation", metric)[at]
            more = {"validation": round(100 * float(validated.double().nanmean()), 3)}
    except (kinfed.RunError, kinfed.UsageError) as problem:
        return {"problem": str(problem)}
    seconds = round(time.process_time() - begun, 2)
    clients = [round(score, 5) for score in clients]
    tests = [len(rows) for rows in federation.rows["test"]]
    result = {"mean": round(100 * float(np.mean(clients)), 3), "seconds": seconds, **more}
    return result | ({"clients": clients} if alone is None else {"hurt": hurt(clients, alone, tests)})


def prepare(case, seed):
    """The federation of a case, and the model that is trained on it."""
    _, x, y, client, classes, _ = case
    federation = kinfed.Federation.from_arrays(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(client))
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, classes))
    return federation, net


def baselines_of(case, training, seed):
    """Local, FedAvg and the standard models of a case, as the verdict's baselines."""
    federation, net = prepare(case, seed)
    models, _ = baselines.standard_baselines(federation)
    for name in ("local", "fedavg"):
        run = kinfed.fit(METHODS[name](), federation, net, rounds=ROUNDS, training=training, seed=seed)
        models.append(make_baseline(run, name == "fedavg"))
    return models


def measure_floor(args):
    """Keep, by case, the best baseline without others and the best pooled one, with each seed's mean test score."""
    kept = json.loads(KEPT.read_text())
    by_case = {}
    for seed in range(args.seeds):
        for case in cases(seed, args.answers):
            by_case.setdefault(case[0], []).append(baselines_of(case, TRAINING["own"], seed))
            print(seed, case[0], file=sys.stderr, flush=True)
    for name, by_seed in by_case.items():
        best_of = baselines.floor(by_seed, higher_is_better=True)
        kept.setdefault("floor", {})[name] = {
            kind: {
                "name": best.name,
                "means": [round(100 * float(np.nanmean(list(tested.means.values()))), 3) for tested in best.tested],
            }
            for kind, best in (("alone", best_of.alone), ("pooled", best_of.pooled))
        }
    page.keep(KEPT, kept)


def choose_for_clients(federation, net, training, seed):
    """What each client has with `kinfed.choose`, from the model that it keeps; what was chosen; who keeps another."""
    choice = kinfed.choose(federation, net, rounds=ROUNDS, training=training, seed=seed)
    runs = {**choice.runs, "kin": choice.run}
    tests = {kind: run.history.test(run.history.chosen).tolist() for kind, run in runs.items()}
    scores = [tests[kind][i] for i, kind in enumerate(choice.answers.values())]
    others = sum(kind != "kin" for kind in choice.answers.values())
    return scores, {"chosen": choice.winner.candidate.name, "others": others}


def hurt(clients, alone, tests):
    """The share of clients whose accuracy is below Local's by more than two standard errors of a difference."""
    p, q, n = (np.array(values) for values in (clients, alone, tests))
    return round(float((q - p > 2 * np.sqrt((p * (1 - p) + q * (1 - q)) / n)).mean()), 4)


def method_of(settings):
    """The method of a table of settings, such as {"name": "fedprox", "mu": 0.1}; a method is itself."""
    return settings if isinstance(settings, Method) else make(METHODS, settings, "method")[0]


def settings_of(name):
    """The five settings among which validation chooses: a method's defaults first, then others of its grid.

    The grid is the paper's where one is printed, else that of `GRIDS`; of a larger one so many are drawn, always the
    same. Empty for a method without any setting to tune.
    """
    grid = getattr(METHODS[name], "grid", {}) or GRIDS.get(name, {})
    tables = []
    for values in itertools.product(*grid.values()):
        settings = {"name": name}
        for key, value in zip(grid, values, strict=True):
            at = settings
            for part in key.split(".")[:-1]:
                at = at.setdefault(part, {})
            at[key.split(".")[-1]] = value
        tables.append(settings)
    others = [table for table in tables if method_of(table) != METHODS[name]()]
    draw = np.random.default_rng(0).permutation(len(others))[: SETTINGS - 1]
    return [{"name": name}, *(others[i] for i in sorted(draw))] if grid else []


def blocks():
    """The three blocks of the page: title, and by name of a row the tables of settings among which it chooses."""
    printed = [name for family, members in FAMILIES.items() if family != OWN for name in members]
    ours = {"choose": {"name": "choose"}, **{name: {"name": name} for name in FAMILIES.get(OWN, ())}, **FORMS}
    yield "kinfed's own", {name: [settings] for name, settings in ours.items()}
    yield "Methods of papers", {name: [{"name": name}] for name in printed}
    tuned = {name: settings_of(name) for name in printed}
    yield (
        "The same, each with the best of five settings by validation",
        {f"{name}, tuned": settings for name, settings in tuned.items() if settings},
    )


def row(kept_runs, settings):
    """The runs of a row by seed, each the one of its settings with the best validation score; None if one lacks."""
    by_setting = [kept_runs.get(key(setting), {}) for setting in settings]
    seeds = sorted(set.intersection(*(set(runs) for runs in by_setting))) if by_setting else []
    return [max((runs[seed] for runs in by_setting), key=lambda run: run.get("validation", -1.0)) for seed in seeds]


def key(settings):
    """The name under which runs of settings are kept: other defaults of a method make another."""
    if isinstance(settings, Method):
        return repr(settings)
    if settings["name"] in ("oracle", "choose"):
        return settings["name"]
    return f"{settings['name']}: {method_of(settings)!r}"


def table(results, rows):
    """Lines of the table of one block and training: a row a method, a column a case.

    results: by case what is kept; rows: by name the settings of a row.
    """
    yield f"| method | mean | worst | {' | '.join(str(i + 1) for i in range(len(results)))} | hurt, % | times FedAvg |"
    yield f"| --- |{' ---: |' * (len(results) + 4)}"
    base = {
        case: {name: row(kept_runs, [{"name": name}]) for name in ("local", "fedavg")}
        for case, kept_runs in results.items()
    }
    for name in ("local", "fedavg"):
        cells = [f"{average(runs[name], case):.1f}" for case, runs in base.items()]
        yield f"| {name}, % | | | {' | '.join(cells)} | | |"
    for name, settings in rows.items():
        gains, cells, hurts, seconds, theirs = [], [], [], 0.0, 0.0
        for case, kept_runs in results.items():
            runs = row(kept_runs, settings)
            if not runs:
                cells.append("")
                continue
            alone, shared = (base[case][kind][: len(runs)] for kind in ("local", "fedavg"))
            better = max(average(alone, case), average(shared, case))
            least = min(run["mean"] for kept in kept_runs.values() for run in kept.values() if "mean" in run)
            means = np.array([run.get("mean", least) for run in runs])
            gains.append(means.mean() - better)
            few = f" ({len(runs)})" if len(runs) < len(base[case]["local"]) else ""
            cells.append(f"{gains[-1]:+.1f}{few}")
            hurts += [100 * run["hurt"] for run in runs if "hurt" in run]
            seconds += sum(run.get("seconds", 0.0) for run in runs) * len(settings)
            theirs += sum(run["seconds"] for run in shared)
        if gains:
            few = "" if len(gains) == len(results) else f" of {len(gains)}"
            cells += [f"{np.mean(hurts):.1f}" if hurts else "", f"{seconds / theirs:.1f}"]
            yield f"| {name} | **{np.mean(gains):+.1f}**{few} | **{np.min(gains):+.1f}** | {' | '.join(cells)} |"


def has_score(runs):
    """Whether a run has a score."""
    return any("mean" in run for run in runs)


def average(runs, case):
    """The mean over seeds of runs that must be there."""
    if not runs or any("mean" not in run for run in runs):
        raise SystemExit(f"{case}: Local or FedAvg is not measured or has ended early")
    return float(np.mean([run["mean"] for run in runs]))


def notes(results, rows):
    """What `choose` chose, and why runs ended early."""
    chosen = []
    if "choose" in rows:
        for case, kept_runs in results.items():
            runs = row(kept_runs, rows["choose"])
            others = sum(run.get("others", 0) for run in runs)
            kept = f"; {others} clients keep another model" if others else ""
            if runs:
                chosen.append(f"| {case} | {', '.join(run.get('chosen', 'nothing') for run in runs)}{kept} |")
    if chosen:
        yield "\n".join(["| federation | chosen by `choose`, seed by seed |", "| --- | --- |", *chosen, ""])
    ended = {}
    for name, settings in rows.items():
        for case, kept_runs in results.items():
            for run in row(kept_runs, settings):
                if "problem" in run:
                    ended.setdefault(f"{name}: {run['problem']}", []).append(case)
    for problem, where in ended.items():
        count = {case: where.count(case) for case in dict.fromkeys(where)}
        yield "\n".join(
            [
                f"Ended without a result: {problem}. These are:",
                "",
                *(f"- {case} ({many})" for case, many in count.items()),
            ]
        )


def measure_all(args):
    """Run what is asked for and not yet kept."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    wanted = [*BASES]
    for title, rows in blocks():
        if title.startswith("The same") and not args.tuned:
            continue
        for name, settings in rows.items():
            if not args.methods or name.removesuffix(", tuned").split(" ")[0] in args.methods.split(","):
                wanted += settings
    for kind, seed in itertools.product(args.training.split(","), range(args.seeds)):
        for case in cases(seed, args.answers):
            kept_runs, alone = kept.setdefault(kind, {}).setdefault(case[0], {}), None
            for settings in wanted:
                if settings == {"name": "oracle"} and case[5] is None:
                    continue
                runs = kept_runs.setdefault(key(settings), {})
                if str(seed) not in runs:
                    runs[str(seed)] = measure(settings, case, TRAINING[kind], seed, alone)
                    page.keep(KEPT, kept)
                if settings == {"name": "local"}:
                    alone = runs[str(seed)]["clients"]
            print(kind, seed, case[0], file=sys.stderr, flush=True)


def write():
    """Make the page of what is kept, with the settings that methods have now."""
    kept, lines = json.loads(KEPT.read_text()), []
    names = [case[0] for case in cases(0, None)]
    seen = [*names[:8], PERSONS]
    for kind, how in TRAINING.items():
        results = kept[kind]
        training_text = (
            f"SGD at rate {how.optimiser.lr:g}, batches of {how.batch}, {how.epochs} local epochs, {ROUNDS} rounds"
        )
        lines += [f"## {training_text}", ""]
        for group, cases_of in (
            ("the nine", {c: kept_runs for c, kept_runs in results.items() if c in seen}),
            ("the three that no default has seen", {c: kept_runs for c, kept_runs in results.items() if c not in seen}),
        ):
            if not cases_of:
                continue
            seeds = {case: len(row(kept_runs, [BASES[0]])) for case, kept_runs in cases_of.items()}
            lines += [f"The columns of {group}, with their seeds in brackets:", ""]
            lines += [*(f"{i + 1}. {case} ({seeds[case]})" for i, case in enumerate(cases_of)), ""]
            for number, (title, rows) in enumerate(blocks()):
                rows = rows if number else {"oracle": [{"name": "oracle"}], **rows}
                ran = {}
                for name, settings in rows.items():
                    if any(has_score(row(kept_runs, settings)) for kept_runs in cases_of.values()):
                        ran[name] = settings
                if ran:
                    lines += [f"### {title}, {group}", "", *table(cases_of, ran), "", *notes(cases_of, rows), ""]
    head = f"`python evidence/federations.py measure --answers FILE`, then `write`, by {page.version()}."
    page.put(PAGE, "now", "\n".join([head, "", *lines]), "Twelve federations")


def main():
    """Measure, or write the page."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["measure", "floor", "write"])
    parser.add_argument("--answers", type=Path, help="the file of answers, for the ninth case")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default="", help="methods, separated by commas (default: all, and choose)")
    parser.add_argument("--training", default="plain,own", help="plain, own or both")
    parser.add_argument("--tuned", action="store_true", help="also papers' methods with the best of five settings")
    args = parser.parse_args()
    {"measure": measure_all, "floor": measure_floor, "write": lambda _: write()}[args.what](args)


if __name__ == "__main__":
    main()
