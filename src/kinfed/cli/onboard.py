"""kinfed onboard."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..data.tables.words import name_of, split_names
from ..errors import RunError, UsageError, log_failure, several
from ..files import to_json
from ..report.tables.text_table import draw, score_text
from ..runs.run import Run
from ..runs.run_folder import RunFolder
from ..serving import joining_clients
from ..serving.onboarding import ALONE, BEST, FrozenServer, Outcome, onboard, write
from .options import add_how, count, place
from .training import Bar, execution

ALL = "all"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "onboard",
        parents=[place(), common],
        description="Give new clients models from a finished run, by the method's own rule. The run does not change. "
        "Each new model is compared with learning alone, FedAvg and the best existing model.",
        epilog="examples: kinfed onboard my-run --data ulm.csv --shots 0,10,50; for clients that "
        "federation.newcomers=4 left out of a run: kinfed onboard my-run",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the folder of a finished run, or that of a real federation's server"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="the newcomers' rows, with the columns of the run's table; one newcomer if there is no column of clients "
        "(default: the clients that were left out of the run's own data)",
    )
    add_how(parser)
    parser.add_argument("--edges", type=Path, metavar="FILE", help="links between newcomers and clients of the run")
    parser.add_argument(
        "--shots",
        default=f"0,10,50,{ALL}",
        metavar="N,...",
        help="how many examples a newcomer learns from, each number in turn (default: 0,10,50,all); a fixed share is "
        "kept for the test",
    )
    parser.add_argument(
        "--client",
        default="",
        metavar="NAME,...",
        help='onboard only these newcomers (default: all); a name with a comma in "quotes"',
    )
    parser.add_argument(
        "--rounds", type=count, metavar="N", help="rounds of a newcomer's training (default: as in the run)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="save the newcomers' models here, as a run's folder (default: not saved)",
    )
    parser.set_defaults(command=_onboard)


def _onboard(args: argparse.Namespace, console: Console) -> None:
    shots = shots_of(args.shots)
    if args.out is not None and args.out.exists() and any(args.out.iterdir()):
        raise UsageError(f"{args.out} is not empty; choose another folder")
    saved = Run(RunFolder(args.run))
    wanted = [name.strip() for name in split_names(args.client) if name.strip()]
    if args.data is None:
        if args.edges is not None:
            raise UsageError("--edges goes with --data; the run's own data have its graph")
        newcomers = joining_clients.of_run(saved, args.data_dir, wanted)
    else:
        newcomers = joining_clients.of_table(saved, args.data, args.edges)
        newcomers = [newcomer for newcomer in newcomers if not wanted or newcomer.name in map(name_of, wanted)]
    if not newcomers:
        raise UsageError(f"none of these is in {args.data}: {args.client}")
    with Bar(console, args.quiet) as bar:
        frozen = FrozenServer(saved, newcomers[0].task, execution(args, bar))
        if args.edges is not None and frozen.roster.graph is None:
            raise UsageError(f"--edges: {args.run} was trained without a graph, so links say nothing; leave it out")
        outcomes, failed = list[Outcome](), dict[str, Exception]()
        for newcomer in newcomers:
            bar.begin(newcomer.name)
            try:
                outcomes += [
                    onboard(frozen, newcomer, number, args.rounds) for number in counts(shots, len(newcomer.rows))
                ]
            except Exception as problem:  # of this newcomer alone
                failed[newcomer.name] = problem
    if len(failed) == len(newcomers):
        raise failed[newcomers[0].name]
    if args.out is not None:
        write(frozen, outcomes, RunFolder(args.out))
    if args.json:
        print(to_json([{"client": o.client, "examples": o.shots, "scores": o.scores} for o in outcomes]))
    if not args.quiet:
        show(frozen, outcomes, shots, console)
        if args.out is not None:
            command = shlex.join(["kinfed", "predict", str(args.out), "new.csv", "--client", outcomes[0].client])
            console.print(f"the newcomers' models are in {args.out}, which answers new rows: {command}", soft_wrap=True)
    for name, why in failed.items():
        console.print(f"kinfed: newcomer {name}: {log_failure(why)}", soft_wrap=True)
    if failed:
        raise RunError(f"{len(failed)} of {several(len(newcomers), 'newcomer')} failed; the others are onboarded")


def shots_of(text: str) -> list[int | None]:
    """Numbers of examples, in order; None stands for all."""
    parts = [part.strip() for part in text.split(",")]
    if bad := [part for part in parts if part != ALL and not part.isdecimal()]:
        raise UsageError(f"--shots are numbers of examples, such as 0,10,{ALL}; got '{bad[0]}'")
    numbers = sorted({int(part) for part in parts if part != ALL})
    return [*numbers, None] if ALL in parts else [*numbers]


def counts(shots: Sequence[int | None], have: int) -> list[int]:
    """How many examples a newcomer with so many learns from, each number once."""
    return sorted({have if number is None else number for number in shots if number is None or number <= have})


def show(frozen: FrozenServer, outcomes: Sequence[Outcome], shots: Sequence[int | None], console: Console) -> None:
    """Print means over newcomers, by number of examples; only those that have so many count."""
    summary = frozen.saved.summary
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.scores))
    clients = list(dict.fromkeys(outcome.client for outcome in outcomes))
    most = {name: max(outcome.shots for outcome in outcomes if outcome.client == name) for name in clients}
    rows = []
    means: dict[str, dict[str, float]] = {}
    for number in shots:
        mine = [
            outcome for outcome in outcomes if outcome.shots == (most[outcome.client] if number is None else number)
        ]
        label = ALL if number is None else str(number)
        by_model = {name: [outcome.scores[name] for outcome in mine if name in outcome.scores] for name in names}
        means[label] = {name: sum(values) / len(values) for name, values in by_model.items() if values}
        cells = (score_text(means[label][n], summary.metric.is_share) if n in means[label] else "" for n in names)
        if mine:
            rows.append([label, str(len(mine)), *cells])
    unit = ", %" if summary.metric.is_share else ""
    console.print(f"{several(len(clients), 'newcomer')} to {frozen.saved.folder}: test {summary.metric.name}{unit}")
    console.print(draw(("examples", "newcomers", *names), rows, wrapped=range(2 + len(names))))
    if frozen.saved.summary.sites is not None:
        console.print(f"the members' models stayed at their sites, so none is tried as the {BEST} model")
    if without := [label for label, by_model in means.items() if label == "0" and not by_model]:
        console.print(f"{frozen.name} makes a newcomer's model of its examples, so there is none with {without[0]}")
    if many := [label for label, by_model in means.items() if not by_model and label not in without]:
        console.print(f"no newcomer has so many examples to learn from: {', '.join(many)}")
    console.print(sentence(means, frozen.name, summary.metric.higher_is_better, summary.metric.is_share))


def sentence(means: dict[str, dict[str, float]], method: str, higher: bool, share: bool) -> str:
    """With how many examples newcomers do better by the method than alone."""
    both = {label: by_model for label, by_model in means.items() if {method, ALONE} <= by_model.keys()}
    if not both:
        return "nobody can learn alone from no examples; to compare with that, ask for some, such as --shots 10,all"
    parts = []
    for label, by_model in both.items():
        ahead = by_model[method] > by_model[ALONE] if higher else by_model[method] < by_model[ALONE]
        word = "ahead of" if ahead else "not ahead of"
        parts.append(
            f"{label}: {score_text(by_model[method], share)}, {word} {score_text(by_model[ALONE], share)} alone"
        )
    return f"by {method}, with so many examples: {'; '.join(parts)}"
