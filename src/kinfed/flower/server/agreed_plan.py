"""What the sites of a federation agree on before round 1, and which sites fit it."""

from collections import Counter

from ...core.tasks import Classification, selected_task
from ..wire.messages import Words
from . import plan, validation
from .broker import Broker
from .plan import Plan
from .schema_negotiation import Describing, why_not


class Majority:
    """What most sites say of their examples, those that claim more classes than there can be left out."""

    def __init__(self, broker: Broker, wanted: int, classes: int) -> None:
        """`wanted` is how many sites must be alike, and `classes` how many there are, 0 if the sites say so."""
        self._broker, self._wanted, self._classes = broker, wanted, classes

    def find(self) -> tuple[str, int]:
        """The kind that most sites have, and how many these are; "" and 0 if there are none."""
        sites = self._broker.nodes.clients
        counted = Counter(validation.kind(sites[name]) for name in sites.keys() - self._overclaiming().keys())
        return max(counted.items(), key=lambda item: item[1]) if counted else ("", 0)

    def is_found(self) -> bool:
        """Whether as many sites as are wanted are alike; once all have answered, others are told what differs."""
        if not self._broker.nodes.silent():
            self._dismiss_others()
        return self.find()[1] >= self._wanted

    def dismiss_overclaiming(self) -> None:
        """Tell the sites that claim too many classes so."""
        for client, why in self._overclaiming().items():
            self._broker.dismiss(client, why)

    def _overclaiming(self) -> dict[str, str]:
        return {} if self._classes else validation.too_many_classes(self._broker.nodes.clients)

    def _dismiss_others(self) -> None:
        """Tell sites what differs from the others' once most are alike, or all that are needed are here."""
        sites, (kind, alike) = self._broker.nodes.clients, self.find()
        all_here, most_alike = len(sites) >= self._wanted, 2 * alike > len(sites)
        if all_here and not kind:
            self.dismiss_overclaiming()
        elif alike < self._wanted and len(sites) >= min(self._wanted, 2) and (most_alike or all_here):
            most = next(words for words in sites.values() if validation.kind(words) == kind)
            for client, words in [*sites.items()]:
                if validation.kind(words) != kind:
                    self._broker.dismiss(client, _other(words, most))


def agree(planned: Plan, broker: Broker) -> Words:
    """The facts that most sites report of their examples, once enough of them report the same.

    Tables and series are described by what sites say of their training rows; arrays are used as they are.
    """
    wanted, clients = planned.deployment.clients, broker.nodes.clients
    majority = Majority(broker, wanted, planned.deployment.classes)
    what = f"{wanted} site{'s' if wanted > 1 else ''} with the same columns and kind of examples"
    broker.discover(majority.is_found, what)
    majority.dismiss_overclaiming()
    kind = majority.find()[0]
    alike = {client: words for client, words in clients.items() if validation.kind(words) == kind}
    first = next(iter(alike.values()))
    facts = {"experiment": broker.greeting["experiment"], **{key: first[key] for key in ("shape", "task", "columns")}}
    privacy = planned.learning.training.noised
    if first["columns"] and privacy is not None:
        describing = Describing(planned, broker, facts | {"kind": kind})
        describing.agree(alike)
        describing.describe_publicly(privacy.columns or {})
        facts, task = describing.facts, plan.read_task(describing.facts["task"])
    elif first["columns"]:
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
                f"its setting {name}= lists the columns {', '.join(said[name]) or 'none'}, at other sites {theirs}; "
                "give the same at all sites"
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
