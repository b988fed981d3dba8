"""kin and hedge with 8 to 1,000 clients, and where few take part in a round: python evidence/many_clients.py

Thirty federations beside Local, FedAvg, FedAvg with fine-tuning and pFedGraph, with SGD at rate 0.2, batches of 8 and
two local epochs. `oracle` is FedAvg inside the true groups, which no server knows; three federations have no groups.
On the first half the defaults of kin and hedge were chosen. The second half was measured once they had been.
`ablations` measures kin on the first half with one part of its rule changed at a time. `fresh` scores clients of eight
rows, who have two for the test, on 1,000 rows of their own that nobody has seen.

    python evidence/many_clients.py measure [--seeds 3]     # needs Fashion-MNIST in $KINFED_DATA
    python evidence/many_clients.py ablations [--seeds 1]
    python evidence/many_clients.py fresh [--seeds 6]
    python evidence/many_clients.py write

The first three add to docs/evidence/many-clients.json what it lacks, and `write` makes the page of it.
"""

import argparse
import itertools
import json
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from federations import RESULTS, TRAINING, X, Y, deal, join_clients, key, measure, planes, prepare, turn_digits
from sklearn.datasets import load_breast_cancer, load_wine
from tune_federations import networks, rows, standardise

import kinfed
from kinfed.core.method import Params
from kinfed.core.trees import PerClient
from kinfed.methods import METHODS as METHODS_BY_NAME, Kin
from kinfed_papers import result_pages as page

PAGE, KEPT = RESULTS / "many-clients.md", RESULTS / "many-clients.json"
METHODS = ("local", "fedavg", "oracle", "fedavg-ft", "pfedgraph", "kin", "hedge")


def chosen_on(seed):
    """(name, share of clients in a round, rounds, x, y, client, classes, groups) where defaults were chosen.

    Clients are dealt in turn to so many groups; 1 if all need the same model, and None if there are no groups.
    """
    rng = np.random.default_rng(7000 + seed)
    w = rng.normal(size=(4, 6))
    yield "planes alike, 60 x 8", 1.0, 20, *join_clients(planes(rng, 60, 8, [[1, -1, 0.5, 2]], 0.1)), 2, 1
    yield "planes alike, 30 x 8", 1.0, 20, *join_clients(planes(rng, 30, 8, [[2, 1, -1, 1]], 0.1)), 2, 1
    yield "planes, 3 groups, 120 x 12", 1.0, 20, *join_clients(planes(rng, 120, 12, list(w[:3]), 0.1)), 2, 3
    yield "planes, 3 groups, 1,000 x 10, a tenth", 0.1, 20, *join_clients(planes(rng, 1000, 10, list(w[:3]), 0.1)), 2, 3
    yield "digits alike, 100 x 17", 1.0, 20, *join_clients(digits(rng, [17] * 100)), 10, 1
    yield "digits, 4 rotations, 100 x 17", 1.0, 20, *join_clients(digits(rng, [17] * 100, 4)), 10, 4
    yield "digits, 4 rotations, 20 x 80, a tenth", 0.1, 40, *join_clients(digits(rng, [80] * 20, 4)), 10, 4
    yield "digits alike, 20 x 80, a tenth", 0.1, 40, *join_clients(digits(rng, [80] * 20)), 10, 1
    yield "digits, 2 rotations, 40 x 40, three tenths", 0.3, 20, *join_clients(digits(rng, [40] * 40, 2)), 10, 2
    parts = [(X[i], rng.permutation(10)[Y[i]]) for i in deal(rng, [80] * 20)]
    yield "digits, everyone names them differently, 20 x 80", 1.0, 20, *join_clients(parts), 10, 20
    parts = [(X[i], rng.permutation(10)[Y[i]]) for i in deal(rng, [80] * 20)]
    yield "the same, three tenths", 0.3, 30, *join_clients(parts), 10, 20
    yield (
        "persons with a level of their own, 200 x 15, three tenths",
        0.3,
        20,
        *join_clients(persons(rng, 200, 15)),
        2,
        None,
    )
    yield "networks alike, 300 x 10", 1.0, 20, *join_clients(networks(rng, 1, 300, 10)), 4, 1
    yield (
        "digits, 2 rotations, 8 x 20 to 300",
        1.0,
        20,
        *join_clients(digits(rng, np.geomspace(20, 300, 8).astype(int), 2)),
        10,
        2,
    )
    yield (
        "digits, labels Dirichlet 0.3, 60 x 30, a tenth",
        0.1,
        40,
        *join_clients([draw_skewed(rng, 30) for _ in range(60)]),
        10,
        1,
    )


def kept_apart(seed):
    """The same of the federations that were measured once."""
    rng = np.random.default_rng(8000 + seed)
    cancer, wine = standardise(load_breast_cancer()), standardise(load_wine())
    images, labels = clothes()
    w = rng.normal(size=(5, 8))
    yield "planes alike, 500 x 8", 1.0, 20, *join_clients(planes(rng, 500, 8, [[1, 2, -1, 0.5, 1]], 0.1)), 2, 1
    yield "planes, 2 groups, 12 x 20", 1.0, 20, *join_clients(planes(rng, 12, 20, list(w[:2, :5]), 0.1)), 2, 2
    yield "planes, 5 groups, 200 x 15, a tenth", 0.1, 30, *join_clients(planes(rng, 200, 15, list(w), 0.1)), 2, 5
    ring = [[3 * np.cos(a), 3 * np.sin(a), 1.0] for a in 2 * np.pi * np.arange(80) / 80]
    yield "planes on a ring, 80 x 20", 1.0, 20, *join_clients(planes(rng, 80, 20, ring, 0.0, 0.5)), 2, None
    order = rng.permutation(len(images))
    parts = [(images[i], labels[i]) for i in order[: 1000 * 16].reshape(1000, 16)]
    yield "clothes alike, 1,000 x 16, a tenth", 0.1, 20, *join_clients(parts), 10, 1
    parts = [(1 - images[i] if c % 2 else images[i], labels[i]) for c, i in enumerate(order[: 60 * 30].reshape(60, 30))]
    yield "clothes, half in negative, 60 x 30", 1.0, 20, *join_clients(parts), 10, 2
    parts = [(1 - images[i] if c % 2 else images[i], labels[i]) for c, i in enumerate(order[: 30 * 60].reshape(30, 60))]
    yield "clothes, half in negative, 30 x 60, a tenth", 0.1, 40, *join_clients(parts), 10, 2
    names = [rng.permutation(10) for _ in range(3)]
    parts = [(images[i], names[c % 3][labels[i]]) for c, i in enumerate(order[: 45 * 40].reshape(45, 40))]
    yield "clothes, 3 groups name them differently, 45 x 40, three tenths", 0.3, 30, *join_clients(parts), 10, 3
    parts = [(images[i], rng.permutation(10)[labels[i]]) for i in order[: 40 * 50].reshape(40, 50)]
    yield "clothes, everyone names them differently, 40 x 50", 1.0, 20, *join_clients(parts), 10, 40
    order = rng.permutation(len(cancer[0]))[:560]
    yield "tumours alike, 40 x 14", 1.0, 20, *join_clients([rows(cancer, i) for i in np.array_split(order, 40)]), 2, 1
    order = rng.permutation(len(wine[0]))
    yield "wines, 8 x 22, three tenths", 0.3, 30, *join_clients([rows(wine, i) for i in np.array_split(order, 8)]), 3, 1
    yield "networks, 3 groups, 90 x 30, three tenths", 0.3, 30, *join_clients(networks(rng, 3, 90, 30)), 4, 3
    parts = [(X[i], Y[i] if c % 3 else rng.integers(0, 10, len(i))) for c, i in enumerate(deal(rng, [25] * 70))]
    yield (
        "digits, a third has random labels, 70 x 25",
        1.0,
        20,
        *join_clients(parts),
        10,
        [0 if c % 3 else c + 1 for c in range(70)],
    )
    halves, parts = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 2, 4, 6, 8], [1, 3, 5, 7, 9]], []
    for c in range(60):
        i = rng.choice(np.flatnonzero(np.isin(Y, halves[c % 4])), 25, replace=False)
        parts.append((X[i], Y[i]))
    yield "digits, groups see half of them, 60 x 25, a tenth", 0.1, 40, *join_clients(parts), 10, 4
    yield "persons with a level of their own, 400 x 12", 1.0, 20, *join_clients(persons(rng, 400, 12)), 2, None


def digits(rng, sizes, rotations=1):
    """Digits for clients of these sizes, turned by quarters from client to client."""
    return [(turn_digits(X[i], c % rotations), Y[i]) for c, i in enumerate(deal(rng, list(sizes)))]


def persons(rng, count, answers):
    """Answers that depend on a question and on how often a person says yes."""
    slopes, parts = rng.normal(size=5), []
    for _ in range(count):
        x = rng.normal(size=(answers, 5))
        parts.append((x, x @ slopes + 1.5 * rng.normal() + rng.normal(size=answers) > 0))
    return parts


def draw_skewed(rng, count, alpha=0.3):
    """Digits of one client whose labels are drawn from a Dirichlet distribution."""
    labels = rng.choice(10, count, p=rng.dirichlet([alpha] * 10))
    at = np.array([rng.choice(np.flatnonzero(label == Y)) for label in labels])
    return X[at], Y[at]


def clothes():
    """Fashion-MNIST at half its width: [n, 196], and labels: [n]."""
    with np.load(Path(os.environ["KINFED_DATA"]) / "fashion_mnist.npz") as data:
        images = data["x_train"].reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
        return images.astype(np.float32) / 255, data["y_train"].astype(np.int64)


@dataclass(frozen=True)
class OwnWeight(Kin):
    """Kin with a fixed weight for a client's own model."""

    own_weight: float = 0.3

    def weigh(self, server, logits, cohort, columns):
        itself = cohort[:, None] == columns
        others = logits.masked_fill(itself, -torch.inf).softmax(-1).nan_to_num()
        return torch.where(
            itself, 1 - (1 - self.own_weight) * others.sum(-1, keepdim=True), (1 - self.own_weight) * others
        )


@dataclass(frozen=True)
class HalfWay(Kin):
    """Kin whose clients start half-way between their own models and their mixtures."""

    def train(self, client, state, received):
        theta = client.descend(torch.lerp(state.theta, received.theta, 0.5))
        return Params(theta), Params(theta)


@dataclass(frozen=True)
class Staying(Kin):
    """Kin whose absent clients' models stay as they are."""

    def follow(self, roster, server, absent, cohort, change):
        return server.theta[absent]


@dataclass(frozen=True)
class Nearest(Kin):
    """Kin that mixes the 30 others of the largest weights, and drops everybody else."""

    def weigh(self, server, logits, cohort, columns):
        itself = cohort[:, None] == columns
        kept = logits.mean(0).masked_fill(itself, torch.inf).topk(min(31, len(columns))).indices
        dropped = torch.ones_like(itself).scatter(1, kept, False)
        return logits.masked_fill(dropped, -torch.inf).softmax(-1)


class Earlier(NamedTuple):
    """The server's state of Remembering."""

    theta: PerClient
    trained: PerClient
    sketch: tuple[()]
    earlier: PerClient  # [N, d] half of the movements of the round before


@dataclass(frozen=True)
class Remembering(Kin):
    """Kin that compares movements to which those of earlier rounds are added, each counting half as much a round on."""

    def start(self, roster):
        begun = super().start(roster)
        return Earlier(begun.theta, begun.trained, begun.sketch, torch.zeros_like(begun.theta))

    def favour(self, roster, server, cohort, origin=None):
        return super().favour(roster, server._replace(theta=server.theta + server.earlier), cohort, origin)

    def aggregate(self, roster, server, cohort, uploads):
        after = super().aggregate(roster, server, cohort, uploads)
        return after._replace(earlier=0.5 * (after.theta - roster.theta + server.earlier))


ABLATIONS = {
    "kin as it is": Kin(),
    "`tau` 0.05": Kin(tau=0.05),
    "`tau` 0.2": Kin(tau=0.2),
    "`tau` 0.5": Kin(tau=0.5),
    "`credit` 0: a client's cosine with itself is 1": Kin(credit=0.0),
    "`credit` 32": Kin(credit=32.0),
    "`credit` 1e9: always that of the nearest": Kin(credit=1e9),
    "`clip` infinite": Kin(clip=np.inf),
    "`by_layer` false": Kin(by_layer=False),
    "`neighbours` 10": Kin(neighbours=10),
    "the 30 of the largest weights, others dropped": Nearest(),
    "models of those absent stay": Staying(),
    "movements of earlier rounds count as well (memory 0.5)": Remembering(),
    "a fixed weight of 0.3 for a client's own model": OwnWeight(),
    "training starts half-way to the mixture (share 0.5)": HalfWay(),
    "the kernel in pFedGraph's repository": OwnWeight(credit=0.0, clip=np.inf, by_layer=False),
}


def measure_all(halves, rows_of, seeds):
    """Run what is asked for and not yet kept: rows_of names methods, or tables of settings, by the name of a row."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for (half, cases), seed in itertools.product(halves.items(), range(seeds)):
        for name, share, rounds, *case, groups in cases(seed):
            kept_runs = kept.setdefault(half, {}).setdefault(name, {})
            if isinstance(groups, int):
                groups = [c % groups for c in range(len(np.unique(case[2])))]
            for settings in rows_of:
                if settings == {"name": "oracle"} and groups is None:
                    continue
                runs = kept_runs.setdefault(key(settings), {})
                if str(seed) not in runs:
                    run = measure(settings, (name, *case, groups), TRAINING["plain"], seed, None, rounds, share)
                    runs[str(seed)] = {"mean": run["mean"], "seconds": run["seconds"]}
                    page.keep(KEPT, kept)
            print(half, seed, name, file=sys.stderr, flush=True)


def measure_fresh(seeds):
    """Keep, by federation, method and seed, the mean accuracy on rows that were never drawn for the federation."""
    kept = json.loads(KEPT.read_text())
    of_fresh = kept.setdefault("fresh", {})
    for (count, centre), seed in itertools.product(FRESH.items(), range(seeds)):
        drawn = planes(np.random.default_rng(9000 + seed), count, 8 + UNSEEN, [centre], 0.1)
        by_method = of_fresh.setdefault(f"planes alike, {count} x 8", {})
        federation, net = prepare(("", *join_clients([(x[:8], y[:8]) for x, y in drawn]), 2, None), seed)
        for name in FRESH_METHODS:
            if str(seed) in by_method.setdefault(name, {}):
                continue
            run = kinfed.fit(METHODS_BY_NAME[name](), federation, net, rounds=20, training=TRAINING["plain"], seed=seed)
            scores = []
            for position, (x, y) in enumerate(drawn):
                with torch.no_grad():
                    answers = run.model(position=position)(torch.tensor(x[8:], dtype=torch.float32)).argmax(1)
                scores.append(float((answers.numpy() == y[8:]).mean()))
            by_method[name][str(seed)] = round(100 * float(np.mean(scores)), 3)
            page.keep(KEPT, kept)


def list_fresh(of_fresh):
    """Lines of the table of fresh rows: a row a federation, points over FedAvg."""
    yield f"| federation | seeds | {' | '.join(FRESH_METHODS)} |"
    yield f"| --- | ---: |{' ---: |' * len(FRESH_METHODS)}"
    for case, by_method in of_fresh.items():
        means = [np.mean(list(by_method[name].values())) for name in FRESH_METHODS]
        gains = [f"{mean - means[0]:+.1f}" for mean in means[1:]]
        yield f"| {case} | {len(by_method['fedavg'])} | {' | '.join([f'{means[0]:.1f}', *gains])} |"


def table(cases, names):
    """Lines of a table: a row a federation, a column a method, in points over the better of Local and FedAvg."""
    yield f"| federation | {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * len(names)}"
    over = []
    for case, kept_runs in cases.items():
        runs_of = [kept_runs.get(key({"name": name}), {}).values() for name in names]
        means = [np.mean([run["mean"] for run in runs]) if runs else np.nan for runs in runs_of]
        over.append([mean - max(means[:2]) for mean in means])
        gains = ["" if np.isnan(gain) else f"{gain:+.1f}" for gain in over[-1][2:]]
        yield f"| {case} | {' | '.join([f'{mean:.1f}' for mean in means[:2]] + gains)} |"
    differences = np.array(over)  # [cases, names]
    grouped = differences[~np.isnan(differences).any(1)]
    for title, values in (
        ("mean of all", differences.mean(0)),
        ("mean of those with an oracle", grouped.mean(0)),
        ("worst", np.nanmin(differences, 0)),
    ):
        cells = ["" if np.isnan(value) else f"**{value:+.1f}**" for value in values]
        yield f"| **{title}** | {' | '.join(cells)} |"


def write_ablations(cases):
    """Lines of the table of ablations: mean and worst over federations, over the better of Local and FedAvg."""
    yield "| rule | mean | worst | where |"
    yield "| --- | ---: | ---: | --- |"
    for title, method in ABLATIONS.items():
        over = {}
        for case, kept_runs in cases.items():
            if key(method) in kept_runs:
                seeds = kept_runs[key(method)]
                better = max(np.mean([kept_runs[key({"name": n})][s]["mean"] for s in seeds]) for n in METHODS[:2])
                over[case] = np.mean([run["mean"] for run in seeds.values()]) - better
        if over:
            worst = min(over, key=over.get)
            yield f"| {title} | {np.mean(list(over.values())):+.1f} | {over[worst]:+.1f} | {worst} |"


FRESH = {60: [1, -1, 0.5, 2], 30: [2, 1, -1, 1]}  # by how many clients, the plane that theirs are near
FRESH_METHODS = ("fedavg", "fedavg-ft", "kin", "hedge")
UNSEEN = 1000  # rows of each client
HALVES = {"chosen on": chosen_on, "kept apart": kept_apart}


def write():
    """Make the page of what is kept."""
    kept = json.loads(KEPT.read_text())
    lines = [f"`python evidence/many_clients.py measure`, `ablations`, then `write`, by {page.version()}.", ""]
    for half, title in (("chosen on", "On which defaults were chosen"), ("kept apart", "Measured once")):
        lines += [f"## {title}", "", *table(kept[half], METHODS), ""]
    if any(key(method) in kept_runs for method in ABLATIONS.values() for kept_runs in kept["chosen on"].values()):
        lines += [
            "## One part of kin changed at a time, on the first half",
            "",
            *write_ablations(kept["chosen on"]),
            "",
        ]
    if "fresh" in kept:
        lines += ["## On a thousand fresh rows a client", "", *list_fresh(kept["fresh"]), ""]
    page.put(PAGE, "now", "\n".join(lines), "Many clients, and few in a round")


def main():
    """Measure, or write the page."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["measure", "ablations", "fresh", "write"])
    parser.add_argument("--seeds", type=int, help="3 to measure, 1 of ablations, 6 of fresh rows by default")
    args = parser.parse_args()
    if args.what == "measure":
        measure_all(HALVES, [{"name": name} for name in METHODS], args.seeds or 3)
    elif args.what == "ablations":
        measure_all(
            {"chosen on": chosen_on}, [*({"name": name} for name in METHODS[:2]), *ABLATIONS.values()], args.seeds or 1
        )
    elif args.what == "fresh":
        measure_fresh(args.seeds or 6)
    else:
        write()


if __name__ == "__main__":
    main()
