"""What sites' tables and series are like, all together: their columns agreed on, their statistics merged.

No row is asked for: sites say which columns they have, then counts, sums and vocabularies of their training rows.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kinfed.core.tasks import Classification, Counts, Forecasting, Quantiles, Regression, Task
from kinfed.data.steps import calendar_names
from kinfed.data.tables import disclosure
from kinfed.data.tables.cell_warnings import describe_odd_units
from kinfed.data.tables.column import FEW
from kinfed.data.tables.column_statistics import (
    NumberStatistics,
    Statistics,
    WordStatistics,
    merge_statistics,
    take_share,
)
from kinfed.data.tables.columns import RARE, Number
from kinfed.data.tables.covariates import leads_of, names_of
from kinfed.data.tables.frame import natural
from kinfed.data.tables.moments import SHARED
from kinfed.data.tables.row_examples import CALLED, EMPTY, NAMES_ROWS
from kinfed.data.tables.schema import Description, Own, Target, describe_clients
from kinfed.data.tables.series_examples import calendar_of
from kinfed.data.tables.times import Clock
from kinfed.errors import RunError, UsageError

from .. import plan
from ..plan import Plan, clock_of, digest
from ..wire.messages import Fields, Message
from . import odd_scales, validation
from .broker import Broker, too_few
from .nodes import LARGEST


@dataclass
class Describing:
    """Agrees with sites on their columns, and describes these by what sites say of their training rows."""

    planned: Plan
    broker: Broker
    facts: Fields  # with `agreed`, once there is agreement, and `description`, once that is found
    by_site: dict[str, dict[str, Any]] = field(default_factory=dict)  # what sites said, by column

    def agree(self, greetings: Mapping[str, Fields]) -> None:
        """Agree on columns, kinds and classes, or on times, by the greetings of sites that are alike."""
        first = next(iter(greetings.values()))
        agreed = _columns(greetings, self.planned) if "table" in first else self._times(greetings)
        scaled_by_site = (
            [] if self.planned.deployment.scale != "client" else [name for name, _ in agreed.get("inputs", [])]
        )
        counted = Counter(
            unit
            for greeting in greetings.values()
            for unit in _units(greeting).items()
            if unit[0] not in scaled_by_site
        )
        agreed["units"] = dict(unit for unit, _ in reversed(counted.most_common()))
        self.facts["agreed"] = agreed
        ordered = {client for client, greeting in greetings.items() if greeting.get("table", {}).get("in_order")}
        for client in sorted(greetings.keys() - ordered) if ordered and not self.planned.split.shuffle else []:
            self.broker.log(
                f"client {client}: its rows are not split in time order, as those of others are, so its scores mean "
                "something else; if its rows have times, start its node with --time"
            )
        for client, greeting in greetings.items():
            empty = [name for name, kind in greeting.get("table", {}).get("kinds", {}).items() if kind == EMPTY]
            for name in sorted(agreed["units"].keys() - _units(greeting).keys() - {*empty}):
                self.broker.log(
                    f"client {client}: its column '{name}' names no unit, and at other sites it is in "
                    f"{agreed['units'][name]}; if it is in another unit there, correct that site's file"
                )

    def describe(self, clients: list[str], needed: int) -> list[str]:
        """Ask sites for statistics, and describe the columns by them; returns the sites that told theirs.

        Raises RunError if these are fewer than needed.
        """
        series = "times" in self.facts["agreed"]
        if series and not self.planned.split.own_times:
            self._cut(clients, needed)
        replies = self._ask(clients, needed, self._problem)
        answers: dict[str, list[NumberStatistics]] = {}
        shares = self._shares({client: reply.fields["rows"] for client, reply in sorted(replies.items())})
        for client, share in shares.items():
            reply = replies[client].fields
            columns = _statistics(reply, self.facts["agreed"])
            self.by_site[client] = {name: take_share(statistics, share) for name, statistics in columns.items()}
            if not self.facts["agreed"].get("classes"):
                answers[client] = [take_share(statistics, share) for statistics in _answers(reply)]
        self._prefer_shared_categories()
        self._complete_facts(answers)
        return list(replies)

    def describe_publicly(self, columns: Mapping[str, Any]) -> None:
        """Describe the columns by what is public of them, as under privacy no site is asked; raises UsageError."""
        agreed = self.facts["agreed"]
        if "times" in agreed:
            raise UsageError("series are scaled by their readings, which have no price under privacy; use tables")
        if self.planned.deployment.scale == "client":
            raise UsageError("flower.scale='client' takes each site's own rows, which have no price under privacy")
        targets = [] if agreed["classes"] else agreed["targets"]
        public: dict[str, Any] = disclosure.read_public(dict(agreed["inputs"]), targets, columns)
        self.facts["public"] = True
        self.by_site = {"privacy.columns": {name: public[name] for name, _ in agreed["inputs"]}}
        self._complete_facts({"privacy.columns": [public[name] for name in targets]} if targets else {})

    def add(self, clients: list[str]) -> list[str]:
        """Ask sites that join later for statistics, for scales of their own; returns those that can join."""
        if "agreed" not in self.facts or not clients or self.facts.get("public"):
            return clients
        none: Fields = {"clients": {}, "inputs": []}
        description: Fields = self.facts.get("description") or self.facts.get("covariates") or none
        owners = [{*names} for names in description["clients"].values()]
        columns = set.intersection(*owners) if owners else set()  # in which every site has its own scale
        shared = {column["name"]: column for column in description["inputs"]}
        replies = self._ask(clients, 0, self._problem)
        for client, reply in replies.items():
            statistics = _statistics(reply.fields, self.facts["agreed"]) if columns else {}
            scales = {}
            for name in columns:
                column: Any = statistics[name]
                others = Own(*(shared[name][key] for key in Own._fields))
                scales[name] = Own.from_values(
                    column.present, column.mean, column.deviation, column.median, others
                )._asdict()
            if scales:
                description["clients"][client] = scales
        return [client for client in clients if client in replies]

    def _ask(self, clients: list[str], needed: int, problem: Any) -> dict[str, Message]:
        request = {
            "agreed": self.facts["agreed"],
            "split": self.planned.table["federation"]["split"],
            "seed": self.planned.learning.seed,
            "plan": digest(self.broker.nodes.greeting["plans"][0]),
            "experiment": self.facts["experiment"],
        }
        requests = {client: Message(request, {}) for client in clients}
        replies = self.broker.request("describe", requests, needed, problem=problem)
        if len(replies) < needed:
            raise RunError(too_few(requests, replies, needed, self.broker.problems))
        return replies

    def _shares(self, rows: dict[str, int]) -> dict[str, float]:
        """The share of its claimed training rows that each site counts for."""
        bound = self.planned.deployment.size_bound
        counted = validation.bound_claims(
            rows, bound, self.broker.log, "to have {:,} training rows", "its columns count as if it had {:,}"
        )
        return {client: counted[client] / rows[client] for client in rows}

    def _prefer_shared_categories(self) -> None:
        """Count categories that one site alone names as others, where those of several sites leave no room."""
        most = self.planned.deployment.categories
        for name, kind in self.facts["agreed"]["inputs"]:
            if kind != "category":
                continue
            sites: Counter[str] = Counter(word for columns in self.by_site.values() for word in columns[name].counts)
            rows = merge_statistics([columns[name] for columns in self.by_site.values()]).counts
            alone = sorted((word for word in sites if sites[word] == 1), key=lambda word: (-rows[word], natural(word)))
            room = max(0, most - sum(sites[word] > 1 and rows[word] >= RARE for word in sites))
            surplus = {word for word in alone[room:] if rows[word] >= RARE}
            for client, columns in self.by_site.items():
                if unshared := surplus & columns[name].counts.keys():
                    counts = {word: count for word, count in columns[name].counts.items() if word not in unshared}
                    others = columns[name].others + sum(rows[word] for word in unshared)
                    unnamed = columns[name].unnamed + len(unshared)
                    columns[name] = WordStatistics(counts, columns[name].missing, others, unnamed)
                    self.broker.log(
                        f"client {client}: {len(unshared):,} of its categories of '{name}' are at no other site and "
                        f"are not told apart, as those of several sites come first (flower.categories = {most})"
                    )

    def _problem(self, client: str, reply: Message) -> str:
        """What is wrong with a site's statistics; empty if nothing is."""
        agreed, rows = self.facts["agreed"], reply.fields.get("rows")
        if type(rows) is not int or not 0 < rows < LARGEST:
            return f"it claims to have {rows!r:.20} training rows"
        try:
            columns = _statistics(reply.fields, agreed)
            if "times" not in agreed and any(_count(statistics) > rows for statistics in columns.values()):
                return f"its statistics are of more than its {rows:,} training rows"
            if not agreed.get("classes") and len(_answers(reply.fields)) != len(agreed["targets"]):
                return "it sent no statistics of its targets"
        except UsageError as problem:
            return str(problem)
        except (LookupError, TypeError):
            return "it sent no statistics"
        return ""

    def _complete_facts(self, answers: Mapping[str, list[NumberStatistics]]) -> None:
        """Complete the facts: the description, the shape of an example, the task."""
        agreed, deployment = self.facts["agreed"], self.planned.deployment
        targets, classes = agreed["targets"], agreed.get("classes")
        usual = self._without_odd(
            {client: dict(zip(targets, statistics, strict=True)) for client, statistics in answers.items()}
        )
        merged: list[NumberStatistics] = [
            merge_statistics([columns[name] for columns in usual.values()]) for name in targets if usual
        ]
        for name, statistics in zip(targets, merged, strict=False):
            if not statistics.deviation > 0:
                raise UsageError(
                    f"'{name}' is the same in all training rows of all sites, so there is nothing to learn"
                )
        if not classes:
            self._warn_of_units(usual)
        if "times" in agreed:
            self._complete_covariates()
            settings: dict[str, Any] = {"mean": merged[0].mean, "deviation": merged[0].deviation}
            settings |= {"horizons": tuple(agreed["horizons"])}
            quantiles = tuple(map(float, deployment.quantiles))
            task: Task = Quantiles(**settings, quantiles=quantiles) if quantiles else Forecasting(**settings)
            outputs = agreed["horizon"] * max(1, len(quantiles))
            self.facts |= {"outputs": outputs, "task": plan.describe_task(task)}
            return
        description = self._describe_columns()
        description.warn_of_constants("the sites' tables")
        if not description.names:
            raise UsageError("no column is left for the inputs, as training rows say nothing of any")
        if classes:
            predicted: tuple[Target, ...] = (Target(targets[0], tuple(classes)),)
            by_class = deployment.by_class
            by_class = len(classes) < 3 if by_class is None else by_class
            task = Classification(len(classes), by_class=by_class, selects="loss")  # as of a table in a simulation
        else:
            predicted = tuple(
                Target(name, (), column.mean, column.deviation) for name, column in zip(targets, merged, strict=True)
            )
            scale = tuple(column.mean for column in merged), tuple(column.deviation for column in merged)
            task = Counts(merged[0].mean) if agreed["counts"] else Regression(*scale, tuple(targets))
        description = Description(description.client, description.inputs, predicted, description.clients)
        self.facts |= {
            "description": description.to_dict(),
            "shape": [len(description.names)],
            "outputs": len(classes or targets),
            "task": plan.describe_task(task),
        }

    def _complete_covariates(self) -> None:
        """Complete the facts: the description of covariates, and the shape of a window."""
        agreed = self.facts["agreed"]
        width = 1 + len(calendar_names(agreed["calendar"]))
        if agreed["inputs"]:
            description = self._describe_columns()
            description.warn_of_constants("the sites' series")
            self.facts["covariates"] = description.to_dict()
            width += len(names_of(description, agreed["future"], leads_of(agreed["past"], agreed["horizon"])))
        self.facts["shape"] = [agreed["past"], width]

    def _describe_columns(self) -> Description:
        """The description of the columns; sites whose numbers are far from all others' have scales of their own."""
        deployment, usual = self.planned.deployment, self._without_odd(self.by_site)
        description = describe_clients("", usual, deployment.scale, deployment.categories)
        self._warn_of_units(usual)
        shared = {column.name: column for column in description.inputs if isinstance(column, Number)}
        clients = {client: dict(description.clients.get(client, {})) for client in self.by_site}
        for client, columns in self.by_site.items():
            for name in (name for name in shared if columns[name].present != usual[client][name].present):
                column, usual_column = columns[name], shared[name]
                base = Own(usual_column.mean, usual_column.deviation, usual_column.median)
                clients[client][name] = Own.from_values(
                    column.present, column.mean, column.deviation, column.median, base
                )
        return replace(description, clients=clients) if any(clients.values()) else description

    def _without_odd(self, by_site: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """What sites said, without the numbers of those that are far from all others', which are logged."""
        usual = {client: dict(columns) for client, columns in by_site.items()}
        for name in next(iter(by_site.values()), {}):
            numbers = {client: odd_scales.numbers_of(columns[name]) for client, columns in by_site.items()}
            comparable = {client: statistics for client, statistics in numbers.items() if statistics is not None}
            for client, claim in odd_scales.find_odd_sites(comparable).items():
                usual[client][name] = odd_scales.forget_numbers(by_site[client][name])
                self.broker.log(
                    f"client {client}: its '{name}' has {claim}, so it may be in another unit: write all in one; it "
                    "does not count for the scale of the others, and has its own if it is an input"
                )
        return usual

    def _warn_of_units(self, by_site: Mapping[str, Mapping[str, Any]]) -> None:
        """Log which sites' numbers are of quite another size than the others', except those that are logged as odd."""
        for name in next(iter(by_site.values()), {}):
            statistics = [columns[name] for columns in by_site.values()]
            if all(isinstance(column, NumberStatistics) for column in statistics):
                moments = [(column.mean, column.deviation) if column.present else (0.0, 0.0) for column in statistics]
                means, deviations = np.array(moments).T  # [N] each
                if line := describe_odd_units(name, [*by_site], means, deviations):
                    self.broker.log(line)

    def _times(self, greetings: Mapping[str, Fields]) -> Fields:
        """The times of all sites' series together, and how windows are cut."""
        series = {client: greeting["series"] for client, greeting in sorted(greetings.items())}
        times = {client: np.array(disclosure.expand_stretches(facts["times"])) for client, facts in series.items()}
        all_times = np.unique(np.concatenate([*times.values()]))
        all_times = all_times[np.append(True, np.diff(all_times) > 2 * disclosure.NEAR)]
        zoned = Counter(facts["zoned"] for facts in series.values())
        for client, facts in series.items():
            if len(zoned) > 1 and not facts["zoned"]:
                self.broker.log(
                    f"client {client}: its times name no time zone, as others' do, and are taken as UTC; if its clock "
                    "is another, write the zone into its file"
                )
            if len(times[client]) < SHARED * len(all_times):
                self.broker.log(
                    f"client {client}: it has rows at {100 * len(times[client]) / len(all_times):.0f} % of the times "
                    "of all sites; if clocks differ (time zones), correct its times"
                )
        first, clock = next(iter(greetings.values())), Clock.from_times(all_times)
        dated, calendar = first["series"]["dated"], self.planned.deployment.calendar
        return {
            "targets": first["columns"][:1],
            "inputs": _inputs({client: facts["kinds"] for client, facts in series.items()}),
            "future": first["series"]["future"],
            "static": first["series"]["static"],
            "calendar": list(calendar_of(calendar, dated, clock.length, first["shape"][0], "flower.calendar")),
            "dated": dated,
            "times": disclosure.stretches(all_times.tolist(), disclosure.LONGEST),
            "past": first["shape"][0],
            "horizon": first["outputs"],
            "horizons": [int(ahead) for ahead in self.planned.deployment.horizons if ahead <= first["outputs"]],
        }

    def _cut(self, clients: list[str], needed: int) -> None:
        """Find where validation and test begin, by the steps at which any site's forecasts begin."""
        agreed = self.facts["agreed"]
        last = clock_of(agreed).steps[-1]

        def problem(client: str, reply: Message) -> str:
            try:
                begins = disclosure.expand_stretches(reply.fields.get("begins"))
            except UsageError as problem:
                return str(problem)
            return "" if 0 <= begins[0] <= begins[-1] <= last else "it has windows at steps that are not there"

        replies = self._ask(clients, needed, problem)
        begins = [disclosure.expand_stretches(reply.fields["begins"]) for reply in replies.values()]
        steps = torch.tensor(sorted({round(step) for some in begins for step in some}))
        agreed["cuts"] = list(self.planned.split.cuts(steps, agreed["horizon"]))


def why_not(agreed: Fields, greeting: Fields) -> str:
    """Why a site whose columns have the right names cannot take part; empty if it can."""
    for name, unit in _units(greeting).items():
        if unit != (usual := agreed["units"].get(name, unit)):
            return (
                f"its column '{name}' is in {unit}, at other sites in {usual}; convert it, or leave it out at all sites"
            )
    table = greeting.get("table")
    for name, kind in agreed["inputs"]:
        site_kind = (table or greeting["series"])["kinds"][name]
        if site_kind not in (kind, EMPTY) and kind != "category":
            here, there = CALLED.get(site_kind, site_kind), CALLED.get(kind, kind)
            return f"its column '{name}' is {here}, at other sites {there}; correct it, or name another"
    if table is None:
        return ""
    if agreed["classes"] and (new := {*table["labels"]} - {*agreed["classes"]}):
        return f"{len(new)} of its classes are not among the {len(agreed['classes'])} of the federation"
    if bool(table["labels"]) < bool(agreed["classes"]):
        return f"its target '{agreed['targets'][0]}' is a number, at other sites it has classes"
    if agreed["classes"] is None and not all(map(is_number, table["labels"])):
        return f"its target '{agreed['targets'][0]}' is text, at other sites it is a number"
    return ""


def _units(greeting: Fields) -> dict[str, str]:
    """The units that a site's columns are written in; none of columns that name none."""
    return (greeting.get("table") or greeting.get("series") or {}).get("units", {})


def for_one(facts: Fields, client: str) -> Fields:
    """What a site is told of the columns: their description without the scales of others."""
    sent: Fields = {key: facts[key] for key in ("agreed", "description", "covariates") if key in facts}
    for key in {"description", "covariates"} & sent.keys():
        scales = {name: values for name, values in sent[key]["clients"].items() if name == client}
        sent[key] = sent[key] | {"clients": scales}
    return sent


def scale_of(facts: Fields) -> dict[str, Any] | None:
    """Mean and deviation of inputs and targets, as a run's summary has them; None of arrays, which are not scaled."""
    if "agreed" not in facts:
        return None
    if "description" not in facts:
        reading = {"reading": {key: facts["task"][key] for key in ("mean", "deviation")}}
        return {"inputs": reading, "targets": reading} | {key: facts[key] for key in ("covariates",) if key in facts}
    return Description.from_dict(facts["description"]).scale()


def _columns(greetings: Mapping[str, Fields], planned: Plan) -> Fields:
    """The columns in the order that most sites have, each of the kind that most say, and the classes."""
    tables = {client: greeting["table"] for client, greeting in sorted(greetings.items())}
    inputs = _inputs({client: table["kinds"] for client, table in tables.items()})
    labels = {label for table in tables.values() for label in table["labels"]}
    numeric = all(map(is_number, labels))
    votes = sum(1 if table["labels"] else -1 for table in tables.values())
    some_numbers = any(not table["labels"] for table in tables.values())
    targets, deployment = next(iter(tables.values()))["targets"], planned.deployment
    if deployment.counts and len(targets) > 1:
        raise UsageError(f"flower.counts: counts are one number for each row, and sites have {', '.join(targets)}")
    numbers = votes < 0 or deployment.counts
    numbers |= numeric and (some_numbers or len(labels) > FEW or not deployment.labels)
    classes = None if numbers else sorted(labels, key=natural)
    if classes is not None and len(classes) < 2:
        raise UsageError("the target is the same in all rows of all sites, so there is nothing to learn")
    if not inputs:
        raise UsageError("no column is left for the inputs: all are empty, or different in every row")
    return {"targets": targets, "inputs": inputs, "classes": classes, "counts": deployment.counts}


def _inputs(kinds_of: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """The columns of inputs in the order that most sites have, each of the kind that most say."""
    order = Counter(tuple(kinds) for _, kinds in sorted(kinds_of.items())).most_common(1)[0][0]
    inputs = []
    for name in order:
        kinds = Counter(site_kinds[name] for site_kinds in kinds_of.values())
        del kinds[EMPTY]
        names_rows = kinds.pop(NAMES_ROWS, 0)
        if kinds:
            kinds["category"] += names_rows
            inputs.append((name, max(kinds, key=lambda kind: (kinds[kind], kind == "category"))))
    return inputs


def _answers(reply: Fields) -> list[NumberStatistics]:
    """The statistics of targets that are numbers."""
    return [disclosure.from_json(target, "number", median=False) for target in reply["answers"]]


def _statistics(reply: Fields, agreed: Fields) -> dict[str, Statistics]:
    columns, median = reply["statistics"], "times" not in agreed  # of covariates numbers are not counted by value
    return {name: disclosure.from_json(columns[name], kind, median) for name, kind in agreed["inputs"]}


def _count(statistics: Any) -> int:
    """The rows that statistics are of."""
    if isinstance(statistics, WordStatistics):
        return sum(statistics.counts.values()) + statistics.missing + statistics.others
    numbers = statistics if isinstance(statistics, NumberStatistics) else statistics.years
    return int(numbers.present + numbers.missing)


def is_number(label: str) -> bool:
    """Whether a label is a number."""
    try:
        return bool(np.isfinite(float(label)))
    except ValueError:
        return False
