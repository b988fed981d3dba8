"""What a run of sites is compared with: FedAvg by the same sites, and what each site learns alone."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from ...core.history import History
from ...core.mixins import leak
from ...core.summary import Summary
from ...core.tasks import unit_of
from ...errors import RunError, UsageError
from ...runs.config import experiment as config, plugins
from ...runs.run_folder import RunFolder
from ...verdict.verdict import Verdict, judge
from ..wire.messages import Message, Words
from . import plan
from .broker import Broker
from .plan import Plan
from .validation import read_scores

Serve = Callable[[Plan, Path, Callable[[str], Any]], Summary]  # a plan, its folder, a log


def wanted(planned: Plan) -> list[str]:
    """What a plan is compared with: of Local with nothing, of FedAvg with Local alone."""
    name = planned.learning.method_name
    return [other for other in planned.deployment.beside if name not in ("local", other)]


def fedavg_of(planned: Plan, clients: int) -> Plan:
    """The plan of FedAvg beside another, by so many sites."""
    return plan.with_method(planned, "fedavg", clients=max(1, clients))


def train(planned: Plan, clients: Collection[str], out: Path, serve: Serve, log: Callable[[str], Any]) -> Words:
    """Train FedAvg beside a run by so many of its sites, or go on; returns its summary as words, none if it fails."""
    folder = RunFolder(out).beside("fedavg")
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


def ask(broker: Broker, names: Collection[str], experiment: str, fedavg: Words, history: History) -> dict[str, float]:
    """Have each site compare its model with one that it learns alone; returns the test scores of the latter."""
    words = {"experiment": experiment} | ({"fedavg": fedavg["sites"]["experiment"]} if fedavg else {})
    key = ("alone", "test", history.task.metric)

    def read(reply: Message) -> dict[Any, float]:
        return read_scores([[*key, reply.words.get("alone")]], [key], history.task)

    def problem(client: str, reply: Message) -> str:
        try:
            read(reply)
        except (TypeError, ValueError, OverflowError):
            return "its score of learning alone cannot be read"
        return ""

    replies = broker.request("verdict", {name: Message(dict(words), {}) for name in names}, problem=problem)
    return {name: read(reply)[key] for name, reply in replies.items()}


def judged(planned: Plan, history: History, alone: dict[str, float], fedavg: Words) -> Verdict | None:
    """The verdict over all sites by their mean scores, as those of examples stay there; None without any."""
    names = history.names
    mine = dict(zip(names, history.test(history.chosen).tolist(), strict=True))
    shared = {}
    if fedavg:
        clients, chosen = fedavg["by_client"], fedavg["selection"]["chosen"]
        shared = dict(zip(clients["names"], clients["scores"][chosen], strict=True))
    both = [name for name in names if name in alone and (not fedavg or name in shared)]
    scores = [[[np.array([one[name]]) for name in both]] for one in (mine, alone, shared) if one]
    if not both or all(np.isnan(mine[name]) or np.isnan(alone[name]) for name in both):
        return None
    return judge(
        plugins.called(planned.learning.method_name),
        *scores,
        names=both,
        metric=history.task.metric,
        higher_is_better=history.task.higher_is_better,
        unit=unit_of(history.task),
        leaking=bool(leak(planned.learning.method)),
    )
