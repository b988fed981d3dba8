"""What the sites of a federation agree on before round 1, and which sites fit it."""

import secrets
from collections import Counter
from typing import Any

from ..core.tasks import Classification, Task, selected_task
from . import claims, plan
from .broker import Broker
from .messages import Words
from .plan import Plan


def agree(planned: Plan, broker: Broker) -> Words:
    """The facts that most sites report of their examples, once enough of them report the same."""
    wanted, clients = planned.deployment.clients, broker.nodes.clients

    def overclaiming() -> dict[str, str]:
        return {} if planned.deployment.classes else claims.too_many_classes(clients)

    def majority() -> tuple[Any, int]:
        counted = Counter(claims.kind(clients[client]) for client in clients.keys() - overclaiming().keys())
        return max(counted.items(), key=lambda item: item[1]) if counted else (None, 0)

    broker.discover(lambda: majority()[1] >= wanted, f"{wanted} site{'s' if wanted > 1 else ''}")
    for client, why in overclaiming().items():
        broker.dismiss(client, why)
    kind = majority()[0]
    alike = {client: words for client, words in clients.items() if claims.kind(words) == kind}
    first = next(iter(alike.values()))
    facts = {"experiment": secrets.token_hex(8), **{key: first[key] for key in ("shape", "task", "columns")}}
    if first["task"]["name"] == "Classification":
        classes = planned.deployment.classes or max(words["task"]["classes"] for words in alike.values())
        # Whether more than two classes are unbalanced is not known here: labels stay at the sites.
        by_class = planned.deployment.by_class
        task: Task = Classification(classes, by_class=classes < 3 if by_class is None else by_class)
        facts["outputs"] = classes
    else:
        task, facts["outputs"] = plan.read_task(first["task"]), first["outputs"]
    if by := planned.table.get("select_by", ""):
        task = selected_task(task, by)
    return facts | {"task": plan.describe_task(task)}


def fitting(broker: Broker, facts: Words) -> list[str]:
    """Sites whose examples fit the facts; others are logged, and greeted again later."""
    sites, agreed = [], claims.kind(facts)
    for client, words in sorted(broker.nodes.clients.items()):
        classes = words["task"].get("classes", 0)
        if claims.kind(words) == agreed and classes <= facts["task"].get("classes", 0):
            sites.append(client)
            continue
        why = (
            f"its examples are {words.get('shape')} with {words.get('task')}, those of the federation "
            f"{facts['shape']} with {facts['task']}"
        )
        if other := set(words["columns"]) ^ set(facts["columns"]):
            why = f"these columns are not in both its table and the others': {', '.join(sorted(other))}"
        broker.dismiss(client, why)
    return sites
