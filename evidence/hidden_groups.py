"""Do methods find hidden groups, and what is that worth? python evidence/hidden_groups.py EXPERIMENT

Every method on rotated-digits, rotated-mnist or cifar10-groups over seeds 0 to 2, with the settings of
evidence/tuned/EXPERIMENT.toml, beside the oracle that averages inside the true groups; writes
docs/evidence/EXPERIMENT.md. All but the digits need KINFED_DATA.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from tune_hidden_groups import tried

from kinfed import Params, fit
from kinfed.core.rows import put
from kinfed.methods import METHODS, GraphMethod
from kinfed.runs.config import experiment as config

SEEDS = (0, 1, 2)
SETTINGS = Path(__file__).with_name("tuned")
PAGES = Path(__file__).parents[1] / "docs" / "evidence"
DATA = Path(os.environ["KINFED_DATA"]) if "KINFED_DATA" in os.environ else None
MAIN = ("local", "fedavg", "fedavg-ft", "panacea", "cfl", "sfl", "fedcedar", "fedamp", "fedaghn", "pfedgat")
FIVE = ("sfl", "pfedgat", "fedaghn", "fedcedar", "panacea")


@dataclass(frozen=True)
class InsideGroups(GraphMethod):
    """FedAvg inside the true groups, which no real server knows."""

    origin = "oracle"
    groups: tuple[int, ...] = ()

    def start(self, roster):
        return Params(roster.copies())

    def graph(self, roster, server, cohort):
        groups = torch.tensor(self.groups)
        same = (groups[:, None] == groups).float() * roster.sizes
        return (same / same.sum(1, keepdim=True))[cohort]

    def aggregate(self, roster, server, cohort, uploads):
        return Params(put(server.theta, cohort, uploads.theta))

    def train(self, client, state, received):
        theta = client.descend(received.theta)
        return Params(theta), Params(theta)


def train(source, name, seed, overrides=(), change=lambda federation, seed: federation):
    """The run of one method, or of the oracle, with one seed, on the federation after a change."""
    named = "local" if name == "oracle" else name
    graph = ["federation.graph=oracle"] if name == "panacea" else []  # it needs a graph, and this data has none
    experiment = config.resolve(config.read(source, [f"method.name={named}", *graph, *overrides]))
    federation = change(experiment.federation(DATA, seed), seed)
    return fit(
        InsideGroups(tuple(federation.groups.tolist())) if name == "oracle" else experiment.method,
        federation,
        experiment.module(federation, seed),
        rounds=experiment.rounds,
        training=experiment.training,
        seed=seed,
    )


def measure(source, name, overrides=()):
    """Summaries of one method over the seeds."""
    found = [train(source, name, seed, overrides).summary for seed in SEEDS]
    print(name, {m: [f.scores[m]["mean"] for f in found] for m in found[0].scores}, file=sys.stderr, flush=True)
    return found


def others(found, experiment):
    """Which methods were not run, in a paragraph of its own."""
    left = [name for name in METHODS if name not in found]
    if left:
        ran = len(METHODS) - len(left)
        text = f"Of kinfed's {len(METHODS)} methods {ran} were run for this page; not run: {', '.join(left)}."
        if experiment != "cifar10-groups":
            text += " All are in the [comparison set](comparison-set.md)."
        yield ""
        yield from textwrap.wrap(text, 110, break_on_hyphens=False)


def rows(name, found):
    """A table row a named model."""
    for model in found[0].scores:
        means = [100 * f.scores[model]["mean"] for f in found]
        over_clients = statistics.mean(100 * f.scores[model]["std"] for f in found)
        worst = statistics.mean(100 * f.scores[model]["worst5"] for f in found)
        relation = found[0].relation
        auroc = f"{statistics.mean(f['relation']['auroc'] for f in found):.3f}" if relation else ""
        origin = relation["origin"] if relation else "none"
        yield (
            f"| {name} | {model} | {statistics.mean(means):.1f} ± {statistics.stdev(means):.1f} | {over_clients:.1f} "
            f"| {worst:.1f} | {origin} | {auroc} |"
        )


def chosen(found):
    """The mean over seeds of the model that validation prefers, and its standard error."""
    means = [100 * f.scores[f.chosen]["mean"] for f in found]
    return statistics.mean(means), statistics.stdev(means) / len(means) ** 0.5


def verdict(found):
    """How far the five methods get from the better of Local and FedAvg to the oracle, and whether they find kin."""
    score = {name: chosen(each) for name, each in found.items()}
    oracle, error = score["oracle"]
    base = max("local", "fedavg", key=lambda name: score[name])
    low = score[base][0]
    yield f"From {base} ({low:.1f}) to the oracle ({oracle:.1f}, standard error {error:.1f}), by the model that"
    yield "validation prefers; Panacea is told the groups, the other four are not:"
    yield ""
    yield "| method | accuracy, % | share of the way | within groups | between groups |"
    yield "| --- | --- | --- | --- | --- |"
    for name in FIVE:
        relation = found[name][0]["relation"]
        weights = [
            f"{statistics.mean(f['relation'][part] for f in found[name]):.4f}" if relation else ""
            for part in ("within", "between")
        ]
        mean = score[name][0]
        share = f"{(mean - low) / (oracle - low):.2f}" if oracle > low else ""
        yield f"| {name} | {mean:.1f} | {share} | {' | '.join(weights)} |"
    best = max(set(FIVE) - {"panacea"}, key=lambda name: score[name])
    yield ""
    yield f"Of the four that are not told the groups {best} is best: {score[best][0]:.1f}, the oracle {oracle:.1f}."
    yield "Differences within the ± are too small for three seeds."


def main():
    warnings.simplefilter("ignore")
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("experiment", choices=["rotated-digits", "rotated-mnist", "cifar10-groups"])
    name = asked.parse_args().experiment
    source = str(SETTINGS / f"{name}.toml")
    digits = name == "rotated-digits"
    found = {method: measure(source, method) for method in ("oracle", *(METHODS if digits else MAIN))}
    head = "| method | model | accuracy, % | over clients | worst 5 % | relation | AUROC |"
    rule = "| --- | --- | --- | --- | --- | --- | --- |"
    experiment = config.resolve(config.read(source, ["method.name=local"]))
    federation = experiment.federation(DATA, 0)
    table = experiment.table
    tuned = name.replace("cifar10-groups", "rotated-mnist")
    lines = [
        f"# {name}: what finding hidden groups is worth",
        "",
        f"Written by `python evidence/hidden_groups.py {name}`; settings are those of",
        f"`evidence/tuned/{name}.toml`, chosen on validation data of other seeds by",
        f"`python evidence/tune_hidden_groups.py {tuned}`.",
        "",
        *textwrap.wrap(tried(tuned), 110, break_on_hyphens=False),
        "",
        f"PyTorch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads, {platform.processor() or platform.machine()}.",
        "",
        f"{len(federation)} clients in {len(federation.groups.unique())} hidden groups, "
        f"{int(federation.sizes.float().mean())} training examples a client, {table['rounds']} rounds of "
        f"{table['training']['epochs']} local epochs, model {table['model']['name']}. Mean",
        "test accuracy over clients at the round that validation selects, mean ± standard deviation over seeds 0 to 2;",
        "spread over clients and worst 5 % are means over seeds. AUROC: how well the relation's off-diagonal weights",
        "tell clients of the same group from others (0.5 is chance). `oracle` averages inside the true groups; a",
        "method can do better. Panacea needs a known graph, which this data has not: it is given the true groups.",
        *others(found, name),
        "",
        head,
        rule,
        *(line for method, each in found.items() for line in rows(method, each)),
        "",
        *verdict(found),
    ]
    if digits:
        lines += ["", "The learning rate was chosen for Local, by the rule in the tuning script. FedAvg gains from a"]
        lines += ["larger one; at twice the rate:", "", head, rule]
        for method in ("oracle", "local", "fedavg", "fedaghn"):
            lines += rows(f"{method}, lr 0.4", measure(source, method, ["training.optimiser.lr=0.4"]))
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "kinfed",
                    "run",
                    "fedaghn",
                    "--beside",
                    "none",
                    "--quiet",
                    "--out",
                    f"{folder}/run",
                ],
                check=True,
            )
            seconds = time.perf_counter() - begun
        lines += [
            "",
            f"`kinfed run fedaghn --beside none` from start to end, imports and pictures included: {seconds:.1f} s.",
        ]
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / f"{name}.md").write_text("\n".join([*lines, ""]))
    print((PAGES / f"{name}.md").read_text())


if __name__ == "__main__":
    main()
