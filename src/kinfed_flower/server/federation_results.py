"""What a federation's run leaves in its folder on the server."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from kinfed.core.history import History
from kinfed.core.method import Roster
from kinfed.core.mixins import leak
from kinfed.core.sharing import Sharing
from kinfed.core.summary import DataFacts, RunCost, SiteFacts, Summary, summarise_history
from kinfed.core.tasks import Classification
from kinfed.files import replacing
from kinfed.runs import results
from kinfed.runs.config import plugins
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.test_scores import intervals
from kinfed.verdict.class_counts import recall_by_class
from kinfed.verdict.verdict import Verdict

from ..plan import Plan
from ..wire.messages import Fields
from .flower_fleet import FlowerFleet
from .schema_negotiation import scale_of


def summarise(
    planned: Plan,
    facts: Fields,
    roster: Roster,
    history: History,
    fleet: FlowerFleet,
    seconds: float,
    out: RunFolder,
    verdict: Verdict | None = None,
) -> Summary:
    """Write the results of a finished run to its folder, and return its summary."""
    sharing = Sharing.from_method(planned.learning.method, roster.layout)
    caution = leak(planned.learning.method)
    traffic = {name: fleet.broker.traffic.bytes[name] for name in fleet.names}
    out.write_history(history, sharing.layers, caution)
    if _has_scores(history):
        results.draw_history(history, sharing.layers, out, caution=caution)
    _write_bytes(traffic, fleet.notes.used, out.path / "bytes.csv")
    by_site = _bytes_by_site(traffic)
    down, up = (sum(both[way] for both in by_site.values()) for way in ("down", "up"))
    count, rounds = len(by_site), history.cost.done
    claims = zip(fleet.names, fleet.state.sizes.tolist(), roster.sizes.tolist(), strict=True)
    bounded = {name: {"claimed": claimed, "counted": size} for name, claimed, size in claims if size < claimed}
    task, agreed = history.task, facts.get("agreed", {})
    classes = agreed.get("classes") or [str(c) for c in range(getattr(task, "classes", 0))]
    summary = summarise_history(
        history,
        method=plugins.short_name(planned.learning.method_name),
        seeds=[planned.learning.seed],
        intervals=intervals(history),
        relation={"origin": history.origin} if history.kept_relations else None,
        recall=recall_by_class(history, classes) if isinstance(task, Classification) and _has_scores(history) else None,
        sharing=sharing.summary(down, up, rounds),
        caution=caution,
        data=DataFacts(
            dataset="sites",
            federation=planned.table["federation"],
            clients=len(history.names),
            shape=facts["shape"],
            outputs=facts["outputs"],
            classes=agreed.get("classes") or (task.classes if isinstance(task, Classification) else None),
            scale=scale_of(facts),
            columns=facts.get("description"),
        ),
        cost=RunCost(
            parameters=roster.layout.parameters,
            seconds=round(seconds, 3),
            bytes_up=up,
            bytes_down=down,
            bytes_per_client_and_round={"down": round(down / count / rounds), "up": round(up / count / rounds)},
            executor="flower",
        ),
        sites=SiteFacts(experiment=facts["experiment"], bytes_by_client=by_site, bounded=bounded),
        verdict=None if verdict is None else verdict.to_dict(),
        privacy=_describe_privacy(planned, fleet, history.names),
        out=str(out),
    )
    results.draw_recall(summary, out)
    out.write_summary(summary)
    return summary


def _has_scores(history: History) -> bool:
    """Whether any client has one: under privacy all stay at the sites."""
    return not history.test(history.chosen).isnan().all()


def _describe_privacy(planned: Plan, fleet: FlowerFleet, names: Sequence[str]) -> dict[str, Any] | None:
    """What a summary says of privacy, by what the sites say of their ledgers; None without a limit."""
    privacy = planned.learning.training.noise
    if privacy is None:
        return None
    ledgers = [fleet.notes.spent.get(name, {}) for name in names]
    promise = {key: getattr(privacy, key) for key in ("epsilon", "delta", "clip", "unit")}
    return promise | {key: [ledger.get(key, 0.0) for ledger in ledgers] for key in ("noise", "steps", "spent")}


def count_bytes(history: History, traffic: dict[str, dict[int, list[int]]]) -> None:
    """Note at each evaluated round all bytes that sites were sent and have sent until then, in messages of any kind."""
    spent = history.cost.spent
    down, up = defaultdict[int, int](int), defaultdict[int, int](int)
    for rounds in traffic.values():
        for round, (to_site, from_site) in rounds.items():
            down[round] += to_site
            up[round] += from_site
    until = range(max((record.round for record in spent), default=0) + 2)  # a round's last messages come with the next
    all_down, all_up = (list(accumulate(way[round] for round in until)) for way in (down, up))
    history.cost.spent = [
        record._replace(bytes_down=all_down[record.round + 1], bytes_up=all_up[record.round + 1]) for record in spent
    ]


def _bytes_by_site(traffic: dict[str, dict[int, list[int]]]) -> dict[str, dict[str, int]]:
    """What each site received in all rounds, as `down`, and sent, as `up`."""
    totals = {name: map(sum, zip(*by_round.values(), strict=True)) for name, by_round in traffic.items()}
    return {name: dict(zip(("down", "up"), both, strict=True)) for name, both in totals.items()}


def _write_bytes(traffic: dict[str, dict[int, list[int]]], used: dict[str, list[int]], path: Path) -> None:
    """One tidy table: client, round, down, up, and 1 if its upload was used; what travels before round 1 is round 0."""
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["client", "round", "down", "up", "used"])
        for client, by_round in traffic.items():
            for round, both in sorted(by_round.items()):
                table.writerow([client, round, *both, int(round in used.get(client, []))])
