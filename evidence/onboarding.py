"""What a newcomer to a finished federation has with few examples: python evidence/onboarding.py [CASE ...] --keep DIR

Every method at its settings on rotated digits, DG-60, the METR-LA subset and one of nine federations, over
seeds 0 to 2, with a part of the clients left out; afterwards each of these joins with 0, 10 and all of its examples
(of DG-60: 0, 2 and 10). What is measured is kept in --keep, and the same command goes on; --write only
writes docs/evidence/onboarding.md, of all that is kept in --keep and its folders. DG-60 and METR-LA need KINFED_DATA;
`persons` needs --answers FILE, one row a question that a person was asked: the person first, then numbers, and the
answer, 0 or 1, last.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import sys
import textwrap
import time
import warnings
from pathlib import Path

import torch
from hidden_groups import SOURCE, TOLD, InsideGroups

import kinfed
from kinfed.methods import METHODS
from kinfed.runs.config import experiment as config
from kinfed.runs.launch import launch
from kinfed.runs.run import Run
from kinfed.serving import joining_clients
from kinfed.serving.onboarding import ALONE, BEST, SHARED, TUNED, FrozenServer, onboard
from kinfed_papers.result_pages import keep, put, version

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "onboarding.md"
DATA = Path(os.environ["KINFED_DATA"]) if "KINFED_DATA" in os.environ else None
SEEDS = (0, 1, 2)
SHOTS = (0, 10, None)
FEW = {"dg60": (0, 2, 10)}  # where learning alone makes no mistake from ten examples on
ORACLE, EXISTING = "oracle", "kin"  # whose members' models are tried on newcomers as they are
DEALT = ["federation.partition=natural", "federation.clients=0", "federation.graph=given"]
OWN = {"model.name": "mlp", "model.hidden": "[64]", "rounds": 20}  # the library's own training
CASES = {  # name: (title, source, overrides)
    "rotated-digits": ("Rotated digits", SOURCE, ["federation.newcomers=4"]),
    "dg60": (
        "DG-60",
        SOURCE,
        ["federation.dataset=dg60", *DEALT, "participation=0.1", "rounds=60", "federation.newcomers=12"],
    ),
    "metr-la": (
        "METR-LA, a subset",
        "papers/sfl/table1/metr_la_subset",
        ["federation.dataset.stride=24", "rounds=20", "evaluate_every=20", "federation.newcomers=5"],
    ),
    "persons": (
        "316 persons, 24 answers each",
        None,
        [*(f"{key}={value}" for key, value in OWN.items()), "federation.newcomers=40"],
    ),
}
INTRO = """
Clients are left out of a run, and [join it](../after-training.md) one by one when it is over. Scores are means over
these newcomers, on test examples of their own, and over three seeds, which also draw other newcomers. A column is the
number of examples that a newcomer learns from. With 0 it has the model as it was sent, otherwise that of the method's
rule. `tuned` is that model after ten rounds' worth of local epochs. *Ahead* is by how much the rule's model is better
than learning alone with as many examples, ± the standard deviation over seeds. The best existing model is of the member
whose loss on the newcomer's examples is least. For that a member's model has to leave its server. The oracle is FedAvg
inside the true groups of the members, and a newcomer knows its group.

On rotated digits and DG-60 methods have the settings of `evidence/tuned/rotated-digits.toml`, or else their defaults.
These settings were chosen on rotated digits with other seeds. Panacea and FedU need a graph, so they get the true
groups of the digits, newcomers' included. METR-LA is `papers/sfl/table1/metr_la_subset` with fewer windows and rounds.
A person has five test answers. The rules by which `kin`, CFL, FedSem and FedCedar take a newcomer in were decided with
figures on rotated digits in view. No other rule was.
"""


class Measured(FrozenServer):
    """A federation whose newcomers' training alone was measured with FedAvg, as it is the same for every method."""

    def __init__(self, saved, task, alone):
        super().__init__(saved, task)
        self.alone_scores = {(row["client"], row["examples"]): row[ALONE] for row in alone if ALONE in row}

    def trained_alone(self, newcomer, count, rounds):
        """Its score with so many examples; the key for all of them is the word."""
        return self.alone_scores[newcomer.name, "all" if count == len(newcomer.rows) else count]

    def best_existing(self, newcomer, count):
        """Only one method's is on the page, and to try every member's model is slow."""
        return super().best_existing(newcomer, count) if self.name == EXISTING else ("", 0.0)


def overrides(case, name, seed, answers):
    """The settings of one run."""
    _, _, settings = CASES[case]
    if case == "rotated-digits" and name in TOLD:
        settings = [*settings, "federation.graph=oracle"]
    if case == "persons":
        with answers.open(newline="") as file:
            head = next(csv.reader(file))
        table = {"name": "csv", "path": str(answers), "client": head[0], "target": head[-1]}
        settings = [*settings, *(f"federation.dataset.{key}={value}" for key, value in table.items())]
    return [*settings, f"seed={seed}"]


def experiment_of(case, name, seed, answers):
    """The experiment of one run of a case."""
    source, settings = CASES[case][1], overrides(case, name, seed, answers)
    if source is not None:
        return config.resolve(config.read(source, [f"method.name={name}", *settings]))
    return config.resolve(config.read(name, settings))


def measure(case, name, seed, answers, folder, shared):
    """Scores of every newcomer by number of examples and source of its model; or why there are none.

    `shared` is where FedAvg's run is and what was found with it; None if this is that run.
    """
    begun = time.process_time()
    try:
        experiment = experiment_of(case, name, seed, answers)
        shutil.rmtree(folder, ignore_errors=True)
        launch(experiment, folder, data_dir=DATA)
        if shared is not None:
            (folder / "beside").mkdir()
            (folder / "beside" / "fedavg").symlink_to(shared[0].resolve())
        saved = Run.open(folder)
        newcomers = joining_clients.of_run(saved, DATA)
        task = newcomers[0].task
        frozen = FrozenServer(saved, task) if shared is None else Measured(saved, task, shared[1]["rows"])
        rows = []
        for newcomer in newcomers:
            for count in FEW.get(case, SHOTS):
                if count is None or count <= len(newcomer.rows):
                    scores = onboard(frozen, newcomer, len(newcomer.rows) if count is None else count).scores
                    if name != EXISTING:
                        scores.pop(BEST, None)
                    rows.append({"client": newcomer.name, "examples": "all" if count is None else count, **scores})
    except (kinfed.RunError, kinfed.UsageError) as problem:
        return {"problem": str(problem).replace(str(folder), "the run")}
    return {"rows": rows, "metric": saved.summary.metric.name, "seconds": time.process_time() - begun}


def oracle(case, seed, answers):
    """The score of FedAvg inside the true groups, which a newcomer is told; None if there are no groups."""
    experiment = experiment_of(case, "fedavg", seed, answers)
    federation_of_all, new = experiment.everyone(DATA, seed)
    if federation_of_all.groups is None:
        return {"problem": "no groups are known"}
    members = [i for i in range(len(federation_of_all)) if i not in new]
    federation = federation_of_all.part(torch.tensor(members))
    run = kinfed.fit(
        InsideGroups(tuple(federation.groups.tolist())),
        federation,
        experiment.module(federation, seed),
        rounds=experiment.rounds,
        training=experiment.training,
        participation=experiment.participation,
        seed=seed,
    )
    rows = []
    for i in new:
        kin = next(
            (k for k, m in enumerate(members) if federation_of_all.groups[m] == federation_of_all.groups[i]), None
        )
        if kin is None:
            continue
        at = federation_of_all.rows["test"][i]
        with torch.no_grad():
            outputs = run.model(position=kin)(federation_of_all.x[at])
        score = federation_of_all.task.score(outputs, federation_of_all.y[at], torch.ones(len(at)))[
            federation_of_all.task.metric
        ]
        rows.append({"client": federation_of_all.names[i], "examples": 0, ORACLE: float(score)})
    return {"rows": rows, "metric": federation_of_all.task.metric}


def means(kept, case, name, source, examples):
    """[S] means over newcomers of one source of models, by seed; accuracies in percent."""
    result = []
    for seed in SEEDS:
        result_of_seed = kept.get(f"{case}/{name}/{seed}", {})
        values = [
            row[source] for row in result_of_seed.get("rows", ()) if row["examples"] == examples and source in row
        ]
        if values:
            result.append(statistics.mean(values) * (100 if result_of_seed["metric"] == "accuracy" else 1))
    return result


def find_measured(results, case):
    """The methods that were measured with every seed, and the names of the others; those that refuse are neither."""
    joined = [name for name in METHODS if not getattr(METHODS[name], "refuses", "")]
    kept = {name: [results.get(f"{case}/{name}/{seed}", {}) for seed in SEEDS] for name in joined}
    names, others = [], []
    for name, by_seed in kept.items():
        if not any("problem" in result for result in by_seed):
            is_whole = all("rows" in result for result in by_seed)
            (names if is_whole else others).append(name)
    return names, others


def gains(results, case, scores):
    """By how much the scores with few examples, one a seed, are ahead of learning alone with as many: by seed."""
    lower = any(result.get("metric") in ("mae", "mse") for key, result in results.items() if key.startswith(f"{case}/"))
    alone = means(results, case, SHARED, ALONE, FEW.get(case, SHOTS)[1])
    pairs = zip(scores, alone, strict=True)
    return [round(theirs - mine if lower else mine - theirs, 6) for mine, theirs in pairs]  # what is equal is not ahead


def table(results, case):
    """The table of one case, whose model gains most with few examples first."""
    kept = {key: result for key, result in results.items() if key.startswith(f"{case}/")}
    share = any(result.get("metric") == "accuracy" for result in kept.values())
    digits = 1 if share else 2
    shots = ["all" if count is None else count for count in FEW.get(case, SHOTS)]
    names, without = find_measured(results, case)

    def cell(name, source, examples):
        values = means(results, case, name, source, examples)
        return f"{statistics.mean(values):.{digits}f}" if values else ""

    def row(label, name, source, examples):
        """Its gain and its line of the table."""
        gained = gains(results, case, means(results, case, name, source, examples[1]))
        gain = f"{statistics.mean(gained):+.{digits}f} ± {statistics.stdev(gained):.{digits}f}"
        none, few, most = (cell(name, source, count) for count in examples)
        tuned = cell(name, source + TUNED, examples[1])
        return statistics.mean(gained), f"| {label} | {none} | {few} | {gain} | {tuned} | {most} |"

    metric = "accuracy, %" if share else "MAE"
    yield f"| test {metric}, by examples | 0 | {shots[1]} | ahead | {shots[1]}, tuned | {shots[2]} |"
    yield f"| --- |{' ---: |' * 5}"
    yield f"| **Local** |  | {cell(SHARED, ALONE, shots[1])} |  |  | {cell(SHARED, ALONE, shots[2])} |"
    if EXISTING in names:
        yield row(f"**best existing model of `{EXISTING}`**", EXISTING, BEST, shots)[1]
    if len(means(results, case, ORACLE, ORACLE, 0)) == len(SEEDS):
        yield row("**oracle**", ORACLE, ORACLE, (0, 0, 0))[1]
    lines = [row(f"`{name}`", name, name, shots) for name in names]
    yield from (line for _, line in sorted(lines, reverse=True))
    problems = {key.split("/")[1]: result["problem"] for key, result in kept.items() if "problem" in result}
    for name in (ORACLE, "local"):  # without groups, and nothing that a newcomer could be given
        problems.pop(name, None)
    if without:
        yield ""
        yield f"{len(without)} other methods were not run here, or not with every seed."
    if problems:
        yield ""
        yield from (f"- `{name}`: {why}" for name, why in sorted(problems.items()))


def ahead(results, case):
    """By which methods newcomers with few examples are ahead of learning alone: by the rule's model, untuned."""
    examples, names = FEW.get(case, SHOTS)[1], find_measured(results, case)[0]
    gained = {f"`{name}`": gains(results, case, means(results, case, name, name, examples)) for name in names}
    clear = [name for name, gains_by_seed in gained.items() if min(gains_by_seed) > 0]
    unclear = [
        name for name, gains_by_seed in gained.items() if name not in clear and statistics.mean(gains_by_seed) > 0
    ]
    behind = [name for name in gained if name not in clear + unclear]
    yield f"With {examples} examples {len(clear)} of {len(gained)} methods are ahead of learning alone in every seed."
    if unclear:
        yield f"On the mean, but not in every seed: {', '.join(unclear)}."
    if behind:
        yield f"Not ahead: {', '.join(behind)}."


def write(results):
    """Write the page's parts."""
    put(PAGE, "how", INTRO, "Newcomers to a finished federation")
    for case, (title, _, settings) in CASES.items():
        if find_measured(results, case)[0]:
            lines = [
                f"## {title}",
                "",
                f"`{' '.join(settings)}`, {version()}.",
                "",
                textwrap.fill(" ".join(ahead(results, case)), 118, break_on_hyphens=False),
                "",
                *table(results, case),
            ]
            put(PAGE, case, "\n".join(lines), "Newcomers to a finished federation")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="to be measured now")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    path = args.keep / "found.json"
    results = {}
    for file in sorted(args.keep.rglob("found.json")) if args.write else [path]:
        results |= json.loads(file.read_text()) if file.exists() else {}
    warnings.simplefilter("ignore")
    names = ["fedavg", *(name for name in args.methods.split(",") if name != "fedavg"), ORACLE]
    cases = [case for case in args.cases if case != "persons" or args.answers]
    for case, seed, name in ((c, s, n) for c in cases for s in args.seeds for n in names) if not args.write else ():
        key = f"{case}/{name}/{seed}"
        if key in results:
            continue
        folder, beside = (args.keep / "runs" / f"{case}-{method}-{seed}" for method in (name, "fedavg"))
        shared = None if name == "fedavg" else (beside, results[f"{case}/fedavg/{seed}"])
        results[key] = (
            oracle(case, seed, args.answers)
            if name == ORACLE
            else measure(case, name, seed, args.answers, folder, shared)
        )
        keep(path, results)
        if name != "fedavg":
            shutil.rmtree(folder, ignore_errors=True)
        print(
            key, results[key].get("problem") or f"{results[key].get('seconds', 0):.0f} s", file=sys.stderr, flush=True
        )
    write(results)


if __name__ == "__main__":
    main()
