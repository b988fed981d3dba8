"""Every method on one experiment: what it scores, what a round costs, what is sent.

    python evidence/comparison_set.py rotated-digits --answers FILE --methods ditto,fedper

writes a part of docs/evidence/comparison-set.md. The experiment is a TOML file, in tuned or beside this program. FILE
keeps what was measured: the same command again does the rest, and other methods join the table. A seed of a method is
one run, and runs are made seed by seed, so that load on the machine meets all methods alike. All but the digits need
KINFED_DATA.
"""

import argparse
import json
import platform
import sys
import time
import tomllib
import warnings
from pathlib import Path
from statistics import mean, stdev

import torch
from hidden_groups import SETTINGS, train

from kinfed.errors import RunError, UsageError
from kinfed.methods import FAMILIES, METHODS
from kinfed_papers.result_pages import keep, put

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "comparison-set.md"
EXPERIMENTS = {name: SETTINGS / f"{name}.toml" for name in ("rotated-digits", "rotated-mnist", "cifar10-groups")}
EXPERIMENTS["cifar10-two-classes"] = Path(__file__).with_name("cifar10-two-classes.toml")
BASES = ("local", "fedavg", "oracle")  # always among them: what all others are beside
SEEDS = (0, 1, 2)


def measure(source, name, seed):
    """Of one run: scores in percent, CPU seconds of a round, numbers sent by and to a client; or its problem."""
    begun = time.process_time()
    try:
        run = train(source, name, seed)
    except (RunError, UsageError) as problem:
        return {"problem": str(problem)}
    seconds, found = time.process_time() - begun, run.summary
    numbers = 4 * found.data.clients * found.rounds  # bytes of one, in each round and for each client
    return {
        "model": found.selection.chosen,
        "mean": 100 * found.scores[found.selection.chosen]["mean"],
        "worst": 100 * found.scores[found.selection.chosen]["worst5"],
        "auroc": found.relation["auroc"] if found.relation and found.relation["origin"] == "learned" else None,
        "seconds": seconds / found.rounds,
        "down": found.cost.bytes_down / numbers,
        "up": found.cost.bytes_up / numbers,
        "about": f"{found.data.clients} clients, {found.rounds} rounds",
    }


def row(name, runs, bases, tuned):
    """A method's line of the table; `runs` by seed, as those of Local and FedAvg in `bases`."""
    if "problem" in runs[0]:
        return f"| `{name}` | {runs[0]['problem']} | | | | | | |"
    gains = [run["mean"] - alone["mean"] for run, alone in zip(runs, bases["local"], strict=False)]
    auroc = [run["auroc"] for run in runs if run["auroc"] is not None]
    model = max((run["model"] for run in runs), key=[run["model"] for run in runs].count)
    model_size = bases["fedavg"][0]["up"]
    times = mean(run["seconds"] / base["seconds"] for run, base in zip(runs, bases["fedavg"], strict=False))
    cells = (
        f"`{name}`{'*' * tuned}, {model}",
        f"{mean(run['mean'] for run in runs):.1f}",
        f"{mean(gains):+.1f}{f' ± {stdev(gains):.1f}' if len(gains) > 1 else ''}",
        f"{mean(run['worst'] for run in runs):.1f}",
        f"{mean(auroc):.2f}" if auroc else "",
        f"{times:.1f}",
        *(f"{mean(run[way] for run in runs) / model_size:.2f}" for way in ("down", "up")),
    )
    return f"| {' | '.join(cells)} |"


def lines(experiment, found, tuned):
    """The part of the page, from what was measured: `found[name]` are a method's runs by seed."""
    seeds = max(map(len, found.values()))
    about = next(run["about"] for runs in found.values() for run in runs if "about" in run)
    missing = [name for name in METHODS if name not in found]
    fewer = [f"{name} ({len(runs)})" for name, runs in found.items() if len(runs) < seeds]
    yield f"## {experiment}"
    yield ""
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    few = f" --seeds {seeds}" * (seeds < len(SEEDS))
    yield f"`python evidence/comparison_set.py {experiment}{few} --answers FILE`, PyTorch {torch.__version__},"
    yield f"Python {platform.python_version()}, {threads}, {seeds} seed{'s' * (seeds > 1)}."
    inside = " `oracle` is FedAvg inside the true groups." * ("oracle" in found)
    yield f"{about}, a model of {found['fedavg'][0]['up']:,.0f} numbers.{inside}"
    yield ""
    yield "| method, model | accuracy, % | over Local | worst 5 % | AUROC | seconds, times FedAvg | down | up |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    if "oracle" in found:
        yield row("oracle", found["oracle"], found, False)
    for family, methods in FAMILIES.items():
        ran = [name for name in methods if name in found]
        if ran:
            yield f"| **{family}** | | | | | | | |"
            yield from (row(name, found[name], found, name in tuned) for name in ran)
    yield ""
    if missing:
        yield f"Not run: {', '.join(missing)}."
    if fewer:
        yield f"Of fewer seeds, their number in brackets: {', '.join(fewer)}."


def main():
    """Measure what is asked for and write the experiment's part of the page."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--answers", type=Path, required=True, help="what was measured, as JSON")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, separated by commas (default: all)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many (default: 3)")
    asked = parser.parse_args()
    source = EXPERIMENTS[asked.experiment]
    tuned = tomllib.loads(source.read_text()).get("methods", {})
    kept = json.loads(asked.answers.read_text()) if asked.answers.exists() else {}
    found = kept.setdefault(asked.experiment, {})
    names = list(dict.fromkeys((*BASES, *asked.methods.split(","))))
    if asked.experiment == "cifar10-two-classes":
        names.remove("oracle")  # no groups are told
    train(str(source), "local", 0)  # what happens once in a process is nobody's time
    for seed in SEEDS[: asked.seeds]:
        for name in names:
            runs = found.setdefault(name, [])
            if len(runs) == seed:
                runs.append(measure(str(source), name, seed))
                print(seed, name, runs[-1], file=sys.stderr, flush=True)
                keep(asked.answers, kept)
    put(PAGE, asked.experiment, "\n".join(lines(asked.experiment, found, tuned)), "The comparison set")
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
