"""What a run of sites is compared with: FedAvg by the same sites, and what each site learns alone."""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kinfed.core.history import History
from kinfed.core.mixins import leak
from kinfed.core.summary import Metric, Summary
from kinfed.core.tasks import Task
from kinfed.errors import RunError, UsageError
from kinfed.runs.baselines import Baseline, floor, share_names, verdict
from kinfed.runs.config import experiment as config, plugins
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.tested_examples import Tested
from kinfed.verdict.verdict import FEDAVG, LOCAL, Verdict

from .. import plan
from ..plan import Plan
from ..wire.messages import Fields, Message
from .broker import Broker
from .validation import read_scores

MOST, LONGEST = 20, 80  # baselines of a site, and letters of their names
Serve = Callable[[Plan, Path, Callable[[str], Any]], Summary]  # a plan, its folder, a log


class Score(NamedTuple):
    """What a site says of a baseline; NaN where it has no score."""

    validation: float
    test: float


def list_baselines(planned: Plan) -> list[str]:
    """What a plan is compared with: of Local with nothing, of FedAvg with Local alone; nothing where scores stay."""
    name = planned.learning.method_name
    if planned.learning.training.noise is not None:
        return []
    return [other for other in planned.deployment.beside if name not in ("local", other)]


def fedavg_of(planned: Plan, clients: int) -> Plan:
    """The plan of FedAvg beside another, by so many sites."""
    return plan.with_method(planned, "fedavg", clients=max(1, clients))


def train(planned: Plan, clients: Collection[str], out: Path, serve: Serve, log: Callable[[str], Any]) -> Fields:
    """Train FedAvg beside a run by so many of its sites, or go on; returns its summary as a table, none if it fails."""
    folder = RunFolder(out).reference("fedavg")
    if not folder.is_finished:
        log("fedavg beside it: the same sites train one model for all, to compare with")
        try:
            shared = fedavg_of(planned, len(clients))
            folder.create()
            config.write(plugins.absolute(shared.table), folder.path / "config.toml")
            serve(shared, folder.path, lambda line: log(f"fedavg beside it: {line}"))
        except (UsageError, RunError) as problem:
            log(f"fedavg beside it failed, so nothing is compared with it: {problem}")
            return {}
    return folder.read_summary().to_dict()


def ask(
    broker: Broker, names: Collection[str], experiment: str, fedavg: Fields, history: History
) -> dict[str, dict[str, Score]]:
    """Have each site compare its model with what it could do without others; returns the scores of its baselines."""
    fields = {"experiment": experiment} | ({"fedavg": fedavg["sites"]["experiment"]} if fedavg else {})

    def problem(client: str, reply: Message) -> str:
        try:
            read_baselines(reply.fields.get("baselines"), history.task)
        except (TypeError, ValueError, OverflowError):
            return "its baselines' scores cannot be read"
        return ""

    replies = broker.request("verdict", {name: Message(dict(fields), {}) for name in names}, problem=problem)
    return {name: read_baselines(reply.fields["baselines"], history.task) for name, reply in replies.items()}


def read_baselines(reply: Any, task: Task) -> dict[str, Score]:
    """A site's baselines with their scores; raises ValueError or TypeError for what is none, which may be made up."""
    if not isinstance(reply, dict) or not 0 < len(reply) <= MOST or LOCAL not in reply:
        raise ValueError("a site names Local and a few standard models")
    if any(len(name) > LONGEST or not name.isprintable() for name in reply):
        raise ValueError("a baseline has a short name")
    read = {}
    for name, (validation, test) in reply.items():
        key = (name, "test", task.metric)
        score = read_scores([[*key, math.nan if test is None else test]], [key], task)[key]
        read[name] = Score(math.nan if validation is None else float(validation), score)
    return read


def judge(planned: Plan, history: History, baselines: dict[str, dict[str, Score]], fedavg: Fields) -> Verdict | None:
    """The verdict over all sites by their mean scores, as those of examples stay there; None without any.

    A baseline that a site has not fitted is none, so that all sites have the same.
    """
    task, method = history.task, plugins.short_name(planned.learning.method_name)
    scores = dict(zip(history.names, history.test(history.chosen).tolist(), strict=True))
    of_fedavg = {}
    if fedavg:
        clients, chosen = fedavg["by_client"], fedavg["selection"]["chosen"]
        of_fedavg = dict(zip(clients["names"], clients["scores"][chosen], strict=True))
    sites = [site for site in scores if site in baselines and (not fedavg or site in of_fedavg)]
    if all(np.isnan(scores[site]) or np.isnan(baselines[site][LOCAL].test) for site in sites):  # as of no site
        return None
    fitted = []
    for name in share_names([baselines[site] for site in sites]):
        validation = {site: baselines[site][name].validation for site in sites}
        tested = Tested({site: baselines[site][name].test for site in sites})
        fitted.append(Baseline(name, False, False, validation, tested))
    if fedavg:
        fitted.append(Baseline(FEDAVG, True, False, {}, Tested({site: of_fedavg[site] for site in sites})))
    mine = Tested({site: scores[site] for site in sites}, leaking=bool(leak(planned.learning.method)))
    against = floor([fitted], task.higher_is_better, history.selector.higher_is_better)
    return verdict(method, Metric.from_task(task), [mine], against, saved=method)
