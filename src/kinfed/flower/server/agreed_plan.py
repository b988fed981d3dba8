"""What the sites of a federation agree on before round 1, and which sites fit it."""

import secrets
from collections import Counter
from typing import Any

from ...core.tasks import Classification, selected_task
from ..wire.messages import Words
from . import plan, validation
from .broker import Broker
from .plan import Plan
from .schema_negotiation import Describing, why_not


def agree(planned: Plan, broker: Broker) -> Words:
    """The facts that most sites report of their examples, once enough of them report the same.

    Tables and series are described by what sites say of their training rows; arrays are used as they are.
    """
    wanted, clients = planned.deployment.clients, broker.nodes.clients

    def overclaiming() -> dict[str, str]:
        return {} if planned.deployment.classes else validation.too_many_classes(clients)

    def majority() -> tuple[Any, int]:
        counted = Counter(validation.kind(clients[client]) for client in clients.keys() - overclaiming().keys())
        return max(counted.items(), key=lambda item: item[1]) if counted else (None, 0)

    def dismiss_others() -> None:
        """Tell sites what differs from the others' once most are alike, or all that are needed are here."""
        kind, alike = majority()
        if kind is None:  # each claims more classes than a site can have
            if len(clients) >= wanted:
                for client, why in overclaiming().items():
                    broker.dismiss(client, why)
            return
        if alike < wanted and len(clients) >= min(wanted, 2) and (2 * alike > len(clients) or len(clients) >= wanted):
            most = next(words for words in clients.values() if validation.kind(words) == kind)
            for client, words in [*clients.items()]:
                if validation.kind(words) != kind:
                    broker.dismiss(client, _other(words, most))

    def enough() -> bool:
        if not broker.nodes.silent():
            dismiss_others()
        return majority()[1] >= wanted

    broker.discover(enough, f"{wanted} site{'s' if wanted > 1 else ''} with the same columns and kind of examples")
    for client, why in overclaiming().items():
        broker.dismiss(client, why)
    kind = majority()[0]
    alike = {client: words for client, words in clients.items() if validation.kind(words) == kind}
    first = next(iter(alike.values()))
    facts = {"experiment": secrets.token_hex(8), **{key: first[key] for key in ("shape", "task", "columns")}}
    if first["columns"]:
        describing = Describing(planned, broker, facts | {"kind": kind})
        describing.agree(alike)
        described = fitting(broker, describing.facts)
        for client in set(described) - set(describing.describe(described, wanted)):
            broker.dismiss(client)
        facts, task = describing.facts, plan.read_task(describing.facts["task"])
    elif first["task"]["name"] == "Classification":
        classes = planned.deployment.classes or max(words["task"]["classes"] for words in alike.values())
        # Whether more than two classes are unbalanced is not known here: labels stay at the sites.
        by_class = planned.deployment.by_class
        task = Classification(classes, by_class=classes < 3 if by_class is None else by_class)
        facts |= {"outputs": classes, "kind": kind}
    else:
        task = plan.read_task(first["task"])
        facts |= {"outputs": first["outputs"], "kind": kind}
    if by := planned.table.get("select_by", ""):
        task = selected_task(task, by)
    return facts | {"task": plan.describe_task(task)}


def fitting(broker: Broker, facts: Words) -> list[str]:
    """Sites whose examples fit the facts; others are logged, and greeted again later."""
    sites = []
    for client, words in sorted(broker.nodes.clients.items()):
        if validation.kind(words) != facts["kind"]:
            why = _other(words, facts)
        elif "agreed" in facts:
            why = why_not(facts["agreed"], words)
        else:
            classes, most = words["task"].get("classes", 0), facts["task"].get("classes", 0)
            why = _other(words, facts) if classes > most else ""
        if why:
            broker.dismiss(client, why)
        else:
            sites.append(client)
    return sites


def _other(words: Words, facts: Words) -> str:
    """Why a site's examples do not fit."""
    mine, theirs = (_targets(one) for one in (words, facts))
    if mine and theirs and mine != theirs:
        return (
            f"its target is {mine}, at other sites {theirs}; name that with --target, or rename its own with --column "
            "THEIRS=OURS"
        )
    own, others = set(words["columns"]), set(facts["columns"])
    if own != others:
        fixes = ["rename its own with --column THEIRS=OURS"] * bool(others - own)
        fixes += ["leave out what others lack with --ignore"] * bool(own - others)
        return (
            f"these columns are not in both its table and the others': {', '.join(sorted(own ^ others))}; "
            f"{', or '.join(fixes)}"
        )
    said, known = words.get("series") or {}, facts.get("series") or facts.get("agreed", {})
    for name in ("future", "static"):
        if name in said and said[name] != known.get(name, said[name]):
            theirs = ", ".join(known[name]) or "none"
            return (
                f"its covariates of --{name} are {', '.join(said[name]) or 'none'}, at other sites {theirs}; give the "
                "same at all sites"
            )
    return f"its examples are {_examples(words)}, at other sites {_examples(facts)}"


def _targets(words: Words) -> str:
    """The columns to predict; none of arrays."""
    if "series" in words:
        return str(words["columns"][0])
    return ", ".join((words.get("table") or words.get("agreed") or {}).get("targets", []))


def _examples(words: Words) -> str:
    """What examples are, as a site or the federation says it."""
    agreed = words.get("agreed", {})
    if "series" in words or "past" in agreed:
        past, ahead = agreed.get("past", words["shape"][0]), agreed.get("horizon", words["outputs"])
        dated = agreed.get("dated", words.get("series", {}).get("dated"))
        return f"windows of {past} readings with {ahead} ahead and {'dates' if dated else 'numbers'} as times"
    task = words["task"]
    what = f"{task['classes']:,} classes" if "classes" in task else "numbers as targets"
    return f"{words['shape']} with {what}"
