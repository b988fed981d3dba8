"""Experiments that decide what a page may say of a cause: python evidence/deciding.py [NAME ...] [--seeds 0,1,2]

Each is a few `kinfed run`s that differ in one setting, at the scale of the page's table. Runs are kept in --keep, and
the test scores of finished ones go to docs/papers/deciding/NAME.csv, so the same command again does what is left and
adds further seeds. From that file the experiment's part of its page is written, between marks: the table
and the numbers in the sentence below it; --write does that alone. Without NAME, all of them.
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch

import kinfed
from kinfed.files import replacing
from kinfed.runs.config import experiment
from kinfed_papers.result_pages import put

RESULTS = Path(__file__).parents[1] / "docs" / "papers"
FIELDS = ("setting", "model", "metric", "seed", "score", "rounds", "seconds", "version")
SCORES = {"accuracy": "accuracy, %", "mae@12": "MAE an hour ahead, mph", "nmse": "MSE in deviations, 1e-3"}
CHOOSING = 100  # the seed of runs that only choose a setting
FASHION = "papers/pfedgat/table1/fashion_mnist/pathological"
SHORT = "rounds=5 federation.split.share=0.1"
MNIST, TENTH = "papers/fedcedar/table1/mnist/shards", "rounds=10 evaluate_every=10"
WEEK = "papers/sfl/table1/metr_la_week"


class Deciding(NamedTuple):
    """One question: runs of one experiment that differ in a setting, or facts of its data."""

    page: str  # docs/evidence/PAGE.md
    asks: str
    source: str  # the experiment
    common: str  # overrides of all settings
    settings: dict[str, str]  # name: further overrides
    says: str = ""  # the answer; {setting/model} or {setting/model/metric} is a mean over seeds
    metric: str = "accuracy"
    times: float = 100.0  # by which scores are multiplied in tables and sentences
    options: str = ""  # of kinfed run
    notes: tuple[str, ...] = ()  # diagnostics to show: means over clients in the last round
    among: tuple[str, ...] = ()  # settings whose models are scored among a client's own classes too
    labels: bool = False  # facts about labels and their graph in place of runs
    tuned: dict[str, str] | None = None  # method: settings from which validation chooses, in place of `settings`


ASKED = {
    "pfedgat-feedback": Deciding(
        "pfedgat-tables",
        "What lets pFedGAT's graph learn: its form, its rate or its feedback?",
        FASHION,
        SHORT,
        {
            "attention-0.1-train": "method.lr=0.1 method.feedback=train",
            "projected-0.01-test": 'method={name="kinfed_papers.pfedgat.graphs:Projected",lr=0.01,feedback="test"}',
            "attention-0.01-test": "",
            "projected-0.1-train": 'method={name="kinfed_papers.pfedgat.graphs:Projected",lr=0.1,feedback="train"}',
        },
        "Here it is the form. With attention, the rate and the feedback of the other variant are not enough. The mixed "
        "model has {attention-0.1-train/mixed} %, and the client's own after local training {attention-0.1-train/own} "
        "%. Without attention the table's rate and feedback are enough. The models have "
        "{projected-0.01-test/mixed} and {projected-0.01-test/own} %.",
        notes=("from uniform",),
    ),
    "pfedgat-averages": Deciding(
        "pfedgat-tables",
        "What gives FedAvg 96 % where a client has two classes?",
        FASHION,
        SHORT,
        {"fedavg": "method=fedavg", "fedavg-ft": "method=fedavg-ft method.length=1"},
        "FedAvg's shared model has {fedavg/shared} %. If it may only answer with a class that the client has, it has "
        "{fedavg/among its classes} %. After a round's local epochs it has {fedavg-ft/tuned} %. So the paper may have "
        "scored either of the two.",
        among=("fedavg",),
    ),
    "fedcedar-graph": Deciding(
        "fedcedar-tables",
        "Is FedCedar ahead of FedAvg with the same local epochs after it?",
        MNIST,
        TENTH,
        {"fedavg-ft": "method=fedavg-ft method.length=1", "fedcedar": ""},
        "FedAvg's shared model has {fedavg-ft/shared} %, and {fedavg-ft/tuned} % after a round's local epochs. What "
        "FedCedar sends has {fedcedar/received} %, and {fedcedar/tuned} % after these epochs.",
        notes=("spread",),
    ),
    "sfl-week": Deciding(
        "sfl-tables",
        "Is SFL ahead of FedAvg on a week of METR-LA, and by what?",
        WEEK,
        "",
        {
            "fedavg": "method=fedavg",
            "sfl": "",
            "local": "method=local",
            "fedavg-ft": "method=fedavg-ft method.length=1",
        },
        "An hour ahead FedAvg is off by {fedavg/shared} mph, and by {fedavg-ft/tuned} after a round of local training. "
        "SFL is off by {sfl/mixed} as the table scores it, and by {sfl/own} after local training. Local is off by "
        "{local/own}.",
        metric="mae@12",
        times=1.0,
    ),
    "sfl-labels-2": Deciding(
        "sfl-tables",
        "What would be right without looking at an image, with two shards a client?",
        "papers/sfl/table2/cifar10/shards2",
        "",
        {},
        "Always the commonest label of a client's training images is right for {labels//accuracy of the commonest "
        "label} % of its test images. Of the clients {labels//clients with one label} % have one label only.",
        labels=True,
    ),
    "sfl-labels-5": Deciding(
        "sfl-tables",
        "And with five shards a client, and does their graph tell clients apart?",
        "papers/sfl/table2/cifar10/shards5",
        "",
        {},
        "The commonest label is right for {labels//accuracy of the commonest label} % of a client's test images. Of "
        "the pairs of clients {labels//linked pairs} % share a label and are linked. A client's weights for the "
        "others differ from the mean client's by {labels//distance of P's rows from their mean} % in total "
        "variation. With the three propagation steps of the released code they differ by {labels//distance of P^3's "
        "rows from their mean} %.",
        labels=True,
    ),
    "sfl-shards": Deciding(
        "sfl-tables",
        "Is SFL's gain on shards more than what each client has alone?",
        "papers/sfl/table2/cifar10/shards5",
        "rounds=5 evaluate_every=5",
        {"local": "method=local", "fedavg": "method=fedavg", "sfl": ""},
        "Local has {local/own} %, and FedAvg {fedavg/shared} %. SFL has {sfl/own} % after local training, and "
        "{sfl/mixed} % as the table scores it.",
        options="how.precision=bf16",
    ),
    **{
        f"panacea-sfl-{points}": Deciding(
            "panacea-tables",
            f"Which of SFL's models has the printed 73.3 % on {points.upper()}?",
            f"papers/panacea/table2/{points}",
            "",
            {"sfl": "method=sfl"},
        )
        for points in ("dg60", "fl60")
    },
    "panacea-tuned": Deciding(
        "panacea-tables",
        "Who is best on TPT-48, Per-FedAvg aside (an hour a run), if validation chooses among four settings of each?",
        "papers/panacea/table2/tpt48",
        "",
        {},
        metric="nmse",
        times=1000.0,
        tuned={
            "fedavg": "training.optimiser.lr=0.01,0.03,0.1,0.3",
            "fedavg-ft": "training.optimiser.lr=0.01,0.03,0.1,0.3",
            "sfl": "training.optimiser.lr=0.03,0.1 methods.sfl.pull=0.1,0.3",
            "pfedhn": "training.optimiser.lr=0.03,0.1 methods.pfedhn.optimiser.lr=0.01,0.03",
            "panacea": "training.optimiser.lr=0.03,0.1 methods.panacea.optimiser.lr=0.03,0.1",
        },
    ),
    "fedaghn-sign": Deciding(
        "fedaghn-tables",
        "Does the printed sign keep FedAGHN from a gain?",
        "papers/fedaghn/table1/cifar10/pathological",
        "rounds=5 evaluate_every=1",
        {"printed": "", "descent": "method=fedaghn"},
        "After local training the printed sign has {printed/own} %, the other {descent/own} %. Before it they have "
        "{printed/mixed} and {descent/mixed} %. So after five rounds, with one seed, the sign is not what keeps "
        "FedAGHN behind Local.",
        options="how.precision=bf16",
    ),
}


def train(name, seeds, keep):
    """Do what is left of an experiment's runs; whether all of them ended well."""
    question, well = ASKED[name], True
    done = {(row["setting"], row["seed"]) for row in read(name) if not row["metric"].startswith("validation")}
    settings = {setting: f"{question.common} {more}".split() for setting, more in question.settings.items()}
    for method, grid in (question.tuned or {}).items():
        well &= not kinfed_does(
            "sweep",
            question.source,
            *grid.split(),
            f"seed={CHOOSING}",
            "--method",
            method,
            "--jobs",
            "1",
            "--out",
            keep / name / "sweep" / method,
        )
        tried = dict(read_validation(question, keep / name / "sweep" / method / "runs" / method))
        collect(name, tried.values())
        if tried:  # else all of them diverged
            best = min(tried, key=lambda setting: tried[setting]["score"])
            settings[best] = best.split()
    for seed in seeds:
        if question.labels:
            collect(name, facts(question, seed))
        for setting, more in settings.items():
            out = keep / name / setting.replace(" ", ",") / f"seed-{seed}"
            if (setting, str(seed)) in done:
                continue
            if not (out / "summary.json").exists():
                print(name, setting, "seed", seed, flush=True)
                begun = (out / "config.toml").exists()
                how = ["run", question.source, *more, f"seed={seed}", "--beside", "none", *question.options.split()]
                how = ["resume", out] if begun else [*how, "--out", out]
                well &= not kinfed_does(*how, "how.workers=1")
            if (out / "summary.json").exists():
                collect(name, scores(question, setting, out))
    return well


def kinfed_does(*arguments):
    """The exit code of a command, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "kinfed", *arguments, "--quiet"], env=environment).returncode


def read_validation(question, runs):
    """A row for each setting of a sweep, the settings named by what `kinfed run` takes: the best validation error."""
    for out in sorted(runs.glob(f"*/seed-{CHOOSING}")):
        if (out / "summary.json").exists():  # else it diverged
            summary = json.loads((out / "summary.json").read_text())
            setting = f"method={runs.name} {out.parent.name.replace(',', ' ')}"
            best = summary["scores"][summary["selection"]["chosen"]]["validation"]
            of = {
                "setting": setting,
                "model": "",
                "metric": f"validation {summary['metric']['name']}",
                "seed": CHOOSING,
            }
            yield setting, of | {"score": best, "rounds": summary["rounds"], "version": kinfed.__version__}


def scores(question, setting, out):
    """The rows of a finished run: its models' test scores, and the diagnostics that are asked for."""
    summary = json.loads((out / "summary.json").read_text())
    of = {"setting": setting, "seed": summary["seeds"][0], "rounds": summary["rounds"]}
    of |= {"seconds": round(summary["cost"]["seconds"]), "version": kinfed.__version__}
    for model, score in summary["scores"].items():
        value = score["mean"] if question.metric == summary["metric"]["name"] else score[question.metric]
        yield of | {"model": model, "metric": question.metric, "score": value}
    if question.notes:
        with (out / "diagnostics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["round"]) == summary["rounds"]]
        for note in question.notes:
            if values := [float(row["value"]) for row in rows if row["note"] == note]:
                yield of | {"model": "", "metric": note, "score": statistics.mean(values)}
    if setting in question.among:
        yield of | {"model": "among its classes", "metric": question.metric, "score": score_among_classes(out, summary)}


def score_among_classes(out, summary):
    """Mean test accuracy over clients of the saved models if each may only answer with a class of its client."""
    asked_for = experiment.resolve(experiment.read(str(out / "config.toml"), []))
    federation = asked_for.federation(data_dir(), summary["seeds"][0])
    rights = []
    for client, (training_rows, test_rows) in enumerate(
        zip(federation.rows["train"], federation.rows["test"], strict=True)
    ):
        with torch.no_grad():
            logits = kinfed.load_model(out, client)(federation.x[test_rows].float())
        absent = torch.ones(logits.shape[1], dtype=torch.bool)
        absent[federation.y[training_rows].unique()] = False
        right = logits.masked_fill(absent, -torch.inf).argmax(1) == federation.y[test_rows]
        rights.append(right.double().mean().item())
    return statistics.mean(rights)


def facts(question, seed):
    """What a client's commonest training label scores on its test examples; how far the graph tells clients apart."""
    federation = experiment.resolve(experiment.read(question.source, [])).federation(data_dir(), seed)
    rows = zip(federation.rows["train"], federation.rows["test"], strict=True)
    right = [(federation.y[b] == federation.y[a].mode().values).double().mean().item() for a, b in rows]
    alone = [len(federation.y[a].unique()) == 1 for a in federation.rows["train"]]
    links = federation.graph.weights.double().fill_diagonal_(1)
    rows = links / links.sum(1, keepdim=True)  # [N, N] SFL's P
    for metric, score in (
        ("accuracy of the commonest label", statistics.mean(right)),
        ("clients with one label", statistics.mean(alone)),
        ("linked pairs", (links.sum() - len(links)).item() / (len(links) ** 2 - len(links))),
        ("distance of P's rows from their mean", distance(rows)),
        ("distance of P^3's rows from their mean", distance(torch.linalg.matrix_power(rows, 3))),
    ):
        yield {"setting": "labels", "model": "", "metric": metric, "seed": seed, "score": score, "rounds": 0}


def distance(rows):
    """The mean total variation of rows: [N, N] from their mean, 0 if all are alike and at most 1."""
    return (rows - rows.mean(0)).abs().sum(1).mean().item() / 2


def data_dir():
    return Path(os.environ["KINFED_DATA"]) if "KINFED_DATA" in os.environ else None


def path_of(name):
    return RESULTS / "deciding" / f"{name}.csv"


def read(name):
    if not path_of(name).exists():
        return []
    with path_of(name).open(newline="") as file:
        return [*csv.DictReader(file)]


def collect(name, new_rows):
    """Add rows to an experiment's file, in place of those of the same run."""
    kept = {tuple(str(row[key]) for key in FIELDS[:4]): row for row in (*read(name), *new_rows)}
    path_of(name).parent.mkdir(exist_ok=True)
    with replacing(path_of(name)) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[key] for key in sorted(kept))


def write(name):
    """Write an experiment's part of its page."""
    put(RESULTS / f"{ASKED[name].page}.md", f"deciding: {name}", part(name), "")


def part(name):
    """What a page says of an experiment: its question, and if it was run its table, its answer and its command."""
    question, rows = ASKED[name], read(name)
    if not rows:
        return wrap(f"*{question.asks}* This is open. `python evidence/deciding.py {name}` would answer it.")
    means, seeds = spread(question, rows), seeds_of(rows)
    last = f"`python evidence/deciding.py {name}`, {f'seeds {seeds}' if ',' in seeds else 'one seed'}."
    last += f" Scores by seed are in [{name}.csv](deciding/{name}.csv)."
    parts = [
        f"*{question.asks}*",
        "" if question.labels else table(question, rows, means),
        fill_answer(question, means),
        last,
    ]
    return "\n\n".join(part if "\n" in part else wrap(part) for part in parts if part)


def wrap(text):
    return textwrap.fill(text, 122, break_on_hyphens=False, break_long_words=False)


def seeds_of(rows):
    return ", ".join(sorted({row["seed"] for row in rows if int(row["seed"]) != CHOOSING}, key=int))


def spread(question, rows):
    """Mean ± standard deviation over seeds as text, by (setting, model, metric)."""
    by_key = {}
    for row in rows:
        by_key.setdefault((row["setting"], row["model"], row["metric"]), []).append(float(row["score"]))
    texts = {}
    for key, values in by_key.items():
        as_scored = key[2] in question.notes or key[2].startswith("validation")
        times = 1.0 if as_scored else question.times
        mean, several = statistics.mean(values) * times, len(values) > 1
        digits = 1 if mean >= 10 or (times == 100 and mean >= 1) else 2
        digits = 3 if as_scored else digits
        texts[key] = f"{mean:.{digits}f}" + (f" ± {statistics.stdev(values) * times:.{digits}f}" if several else "")
    return texts


def table(question, rows, means):
    """The common command; a row a setting, a column a model, and one a diagnostic."""
    columns = [*dict.fromkeys((row["model"], row["metric"]) for row in rows)]
    columns = [column for column in columns if column[0]] + [column for column in columns if not column[0]]
    ran = " ".join(word for word in ("kinfed run", question.source, question.common, question.options) if word)
    lines = [wrap(f"Test {SCORES[question.metric]}, mean over clients, of `{ran}` with"), ""]
    lines += [f"| | seeds | {' | '.join(f'`{m}`' if m else metric for m, metric in columns)} |"]
    lines += ["| --- | --- |" + " ---: |" * len(columns)]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        more = question.settings.get(setting, setting)
        cells = [means.get((setting, *column), "") for column in columns]
        seeds = seeds_of(row for row in rows if row["setting"] == setting)
        lines += [f"| {f'`{more}`' if more else 'nothing else'} | {seeds} | {' | '.join(cells)} |"]
    return "\n".join(lines)


def fill_answer(question, means):
    """The answer with its numbers filled in; none while one of them is missing."""

    def number(match):
        setting, model, *metric = match.group(1).split("/")
        return means[setting, model, metric[0] if metric else question.metric]

    try:
        return re.sub(r"\{([^}]+)\}", number, question.says)
    except KeyError as missing:
        print(f"no answer yet: no score of {missing}", file=sys.stderr)
        return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", choices=[[], *ASKED], metavar="NAME", help=", ".join(ASKED))
    parser.add_argument("--seeds", default="0,1,2", help="which, separated by commas")
    parser.add_argument("--write", action="store_true", help="run nothing, write the pages from the files of scores")
    parser.add_argument("--keep", type=Path, default=Path("runs") / "deciding", metavar="DIR")
    args = parser.parse_args()
    well = True
    for name in args.name or ASKED:
        well &= args.write or train(name, [int(seed) for seed in args.seeds.split(",")], args.keep)
        write(name)
    sys.exit(not well)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on with what is left")
