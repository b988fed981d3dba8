"""What the sites of a federation agree on before round 1, and which sites fit it."""

from collections import Counter

from kinfed.core.tasks import Classification, selected_task

from .. import plan
from ..plan import Plan
from ..wire.messages import Fields
from . import validation
from .broker import Broker
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
        sites, (kind, count) = self._broker.nodes.clients, self.find()
        all_here, most_alike = len(sites) >= self._wanted, 2 * count > len(sites)
        if all_here and not kind:
            self.dismiss_overclaiming()
        elif count < self._wanted and len(sites) >= min(self._wanted, 2) and (most_alike or all_here):
            most = next(greeting for greeting in sites.values() if validation.kind(greeting) == kind)
            for client, greeting in [*sites.items()]:
                if validation.kind(greeting) != kind:
                    self._broker.dismiss(client, _explain_misfit(greeting, most))


def agree(planned: Plan, broker: Broker) -> Fields:
    """The facts that most sites report of their examples, once enough of them report the same.

    Tables and series are described by what sites say of their training rows; arrays are used as they are.
    """
    wanted, clients = planned.deployment.clients, broker.nodes.clients
    majority = Majority(broker, wanted, planned.deployment.classes)
    what = f"{wanted} site{'s' if wanted > 1 else ''} with the same columns and kind of examples"
    broker.discover(majority.is_found, what)
    majority.dismiss_overclaiming()
    kind = majority.find()[0]
    majority_greetings = {client: greeting for client, greeting in clients.items() if validation.kind(greeting) == kind}
    first = next(iter(majority_greetings.values()))
    facts = {key: first[key] for key in ("shape", "task", "columns")}
    facts["experiment"] = broker.nodes.greeting["experiment"]
    privacy = planned.learning.training.noise
    if first["columns"] and privacy is not None:
        describing = Describing(planned, broker, facts | {"kind": kind})
        describing.agree(majority_greetings)
        describing.describe_publicly(privacy.columns or {})
        facts, task = describing.facts, plan.read_task(describing.facts["task"])
    elif first["columns"]:
        describing = Describing(planned, broker, facts | {"kind": kind})
        describing.agree(majority_greetings)
        described = fitting(broker, describing.facts)
        for client in set(described) - set(describing.describe(described, wanted)):
            broker.dismiss(client)
        facts, task = describing.facts, plan.read_task(describing.facts["task"])
    elif first["task"]["name"] == "Classification":
        classes = planned.deployment.classes or max(
            greeting["task"]["classes"] for greeting in majority_greetings.values()
        )
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


def fitting(broker: Broker, facts: Fields) -> list[str]:
    """Sites whose examples fit the facts; others are logged, and greeted again later."""
    sites = []
    for client, greeting in sorted(broker.nodes.clients.items()):
        if validation.kind(greeting) != facts["kind"]:
            why = _explain_misfit(greeting, facts)
        elif "agreed" in facts:
            why = why_not(facts["agreed"], greeting)
        else:
            classes = greeting["task"].get("classes", 0)
            most = facts["task"].get("classes", 0)
            why = _explain_misfit(greeting, facts) if classes > most else ""
        if why:
            broker.dismiss(client, why)
        else:
            sites.append(client)
    return sites


def _explain_misfit(greeting: Fields, facts: Fields) -> str:
    """Why a site's examples do not fit."""
    mine, theirs = (_targets(source) for source in (greeting, facts))
    if mine and theirs and mine != theirs:
        return (
            f"its target is {mine}, at other sites {theirs}; name that with --target, or rename its own with --column "
            "THEIRS=OURS"
        )
    columns, usual = set(greeting["columns"]), set(facts["columns"])
    if columns != usual:
        fixes = ["rename its own with --column THEIRS=OURS"] if usual - columns else []
        fixes += ["leave out what others lack with --ignore"] if columns - usual else []
        return (
            f"these columns are not in both its table and the others': {', '.join(sorted(columns ^ usual))}; "
            f"{', or '.join(fixes)}"
        )
    series = greeting.get("series") or {}
    usual_series = facts.get("series") or facts.get("agreed", {})
    for name in ("future", "static"):
        if name in series and series[name] != usual_series.get(name, series[name]):
            theirs = ", ".join(usual_series[name]) or "none"
            return (
                f"its setting {name}= lists the columns {', '.join(series[name]) or 'none'}, at other sites {theirs}; "
                "give the same at all sites"
            )
    return f"its examples are {_examples(greeting)}, at other sites {_examples(facts)}"


def _targets(facts: Fields) -> str:
    """The columns to predict; none of arrays."""
    if "series" in facts:
        return str(facts["columns"][0])
    return ", ".join((facts.get("table") or facts.get("agreed") or {}).get("targets", []))


def _examples(facts: Fields) -> str:
    """What examples are, as a site or the federation says it."""
    agreed = facts.get("agreed", {})
    if "series" in facts or "past" in agreed:
        past = agreed.get("past", facts["shape"][0])
        ahead = agreed.get("horizon", facts["outputs"])
        dated = agreed.get("dated", facts.get("series", {}).get("dated"))
        return f"windows of {past} readings with {ahead} ahead and {'dates' if dated else 'numbers'} as times"
    task = facts["task"]
    what = f"{task['classes']:,} classes" if "classes" in task else "numbers as targets"
    return f"{facts['shape']} with {what}"
