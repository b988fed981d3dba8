"""What --dry-run says: how much time and memory a command would take, from a few seconds of it."""

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress, TextColumn

from ..data.federation import Federation
from ..errors import RunError, UsageError, explain
from ..files import to_json
from ..report.tables.text_table import draw, duration
from ..runs import reference_runs
from ..runs.config.experiment import Experiment
from ..search import successive_halving
from ..search.arena import PRICE, Arena
from ..search.budget import allowed_rounds, count_draws, plan_rungs
from ..search.choice_folder import Request
from ..search.estimate import Cost, estimate
from .console import Literal
from .training import execution

SECONDS = 5.0  # how long each experiment is timed


class Planned(NamedTuple):
    """What a command would run: an experiment, by the name in the table, and how many times."""

    name: str
    experiment: Experiment
    times: float
    price: float = 1.0  # of one, in runs of the experiment


def candidates(request: Request, arena: Arena) -> list[Planned]:
    """The runs of a choice among networks, and of those with rounds of their own, as the choice plans them at most.

    A network's is priced as a candidate is on the mean over the methods.
    """
    if request.budget is not None and not request.budget.isdecimal():
        raise UsageError(f"--budget {request.budget} says itself how long it takes: give it in rounds, or leave it out")
    tried, seeds = request.candidates(arena), request.seeds
    allowed = allowed_rounds(arena, tried, {"budget": request.budget, "seeds": seeds})
    plan = plan_rungs(arena, tried, allowed, seeds)
    begin, end = plan[0].until, plan[-1].until
    others = [candidate for candidate in tried[: plan[0].enter] if candidate.own_rounds]
    models = {candidate.model for candidate in others}  # of each of which one stays to the end
    rounds = successive_halving.cost(plan, seeds) - seeds * (begin * len(others) + (end - begin) * len(models))
    planned = [Planned("a network", request.experiment("fedavg"), rounds / arena.rounds.count + request.refit, PRICE)]
    for method in dict.fromkeys(candidate.method_name for candidate in others):
        kind = [candidate for candidate in others if candidate.method_name == method]
        last = kind[-1]
        experiment = request.experiment(last.method_name, last.settings, model=last.model, own_rounds=last.own_rounds)
        count = seeds * len(kind) + count_draws(kind) / last.most
        name = "a solved model" if last.is_solved else "boosted trees"
        planned.append(Planned(f"{name}, at most", experiment, count))  # they end when nothing is left to gain
    return planned


def dry_run(
    planned: Sequence[Planned],
    args: argparse.Namespace,
    console: Console,
    parallel: int = 1,
    beside: str | Sequence[str] = (),
    federation: Federation | None = None,
) -> None:
    """Time each of these experiments, and print what they would take; `federation` is the first one's, if it is read.

    `beside` says which baselines are trained beside the first, as `launch` takes it. Raises UsageError if none of them
    can be started.
    """
    where = execution(args, workers=1 if len(planned) > 1 and parallel > 1 else None)
    costs: dict[str, tuple[Cost, float]] = {}
    broken: dict[str, str] = {}
    runs, note, loaded = list(planned), "", planned[0].experiment.table["federation"]
    column = TextColumn("timing {task.description}", markup=False)
    with Progress(column, console=console, transient=True, disable=args.quiet or not console.is_terminal) as bar:
        task = bar.add_task("")
        for name, experiment, count, price in runs:
            bar.update(task, description=name)
            try:
                if experiment.table["federation"] != loaded or federation is None:  # the next row often has the same
                    federation = None  # so that two are never in memory
                    federation = experiment.federation(args.data_dir, experiment.seed)
                    loaded = experiment.table["federation"]
                cost = estimate(experiment, federation, where, SECONDS)
                if price != 1:
                    cost = cost._replace(seconds=price * cost.seconds, measured=f"FedAvg's on {cost.measured}")
                costs[name] = cost, count
                if beside and not note and len(runs) == len(planned):
                    others, note = reference_runs.plan(experiment, federation, beside)
                    runs += [
                        Planned(f"{other}, beside it", companion, companion.seeds)
                        for other, companion in others.items()
                    ]
            except (UsageError, RunError) as problem:
                if len(planned) == 1 and not costs:
                    raise
                broken[name] = explain(problem)[1]
    for name, why in broken.items():
        console.print(f"kinfed: {name}: {why}", soft_wrap=True)
    if not costs:
        raise UsageError("none of the runs can be started")
    _tell(costs, parallel, args.json, note)


def _tell(costs: Mapping[str, tuple[Cost, float]], parallel: int, as_json: bool, note: str) -> None:
    """Print the cost of each experiment, and of all of them, on standard output; `note` is a line to add."""
    parallel = max(1, min(parallel, int(sum(count for _, count in costs.values()))))
    total = sum(cost.seconds * count for cost, count in costs.values()) / parallel
    each_run = [cost.memory for cost, count in costs.values() for _ in range(min(parallel, int(count)))]
    memory = sum(sorted(each_run, reverse=True)[:parallel])
    if as_json:
        by_name = {name: {**cost._asdict(), "runs": count} for name, (cost, count) in costs.items()}
        print(to_json({"runs": by_name, "seconds": total, "memory": memory, "jobs": parallel, "beside": note}))
        return
    rows = []
    for name, (cost, count) in costs.items():
        times = duration(cost.seconds), f"{count:g}", duration(cost.seconds * count)
        rows.append([name, *times, f"{cost.memory / 2**30:.1f} GiB", cost.measured])
    out = Literal()
    out.print(draw(("run", "one", "runs", "all", "memory", "measured with"), rows, (0, 5), (0, 5)))
    together = f" with {parallel} in parallel" if parallel > 1 else ""
    out.print(f"in all {duration(total)}{together}, {memory / 2**30:.1f} GiB of memory")
    if note:
        out.print(note, soft_wrap=True)
