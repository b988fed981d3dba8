"""Sweep: every combination of settings, for every method and seed, and the setting with the best validation score."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..core.method import Method
from ..core.mixins import Advises
from ..errors import UsageError, list_seeds, several
from ..methods import METHODS
from ..runs.config import plugins
from ..runs.config.experiment import Experiment
from ..runs.config.parts import plain, take
from ..runs.run_folder import RunFolder
from .study import Finding, Row, Score, Study, score

OVER = {"seeds": "Student's over seeds", "clients": "bootstrapped over clients, as there is one seed"}
LONGEST = 120  # characters of a folder's name


class Setting(NamedTuple):
    """A method and the values of what is swept, as overrides: dotted key to text."""

    method: str
    values: dict[str, str]

    @property
    def name(self) -> str:
        """Two levels of folders. The same setting has the same name in any sweep over the same keys."""
        text = ",".join(f"{key}={value}" for key, value in sorted(self.values.items())) or "as-configured"
        plain = re.sub(r"[^\w.,=+-]", "_", text)
        if plain != text or len(text) > LONGEST:  # another setting may give the same name
            plain = f"{plain[:LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return f"{plugins.short_name(self.method)}/{plain}"


class Outcome(NamedTuple):
    """What came of a setting: its score, or how many of its runs failed."""

    setting: Setting
    score: Score | None
    failed: int
    wins: bool = False  # whether it is its method's best


@dataclass(frozen=True)
class Sweep:
    """What is swept: `grid` has keys and their values, for every method, or for one if a key is methods.NAME.KEY."""

    study: Study
    methods: Sequence[str]
    grid: Mapping[str, Sequence[str]]
    seeds: Sequence[int]

    @cached_property
    def methods_by_name(self) -> dict[str, Method]:
        """The methods as the config and the settings with a single value have them, by name."""
        fixed = {key: values[0] for key, values in self.grid.items() if len(values) == 1}
        return {name: self._experiment(name, self._overrides(name, fixed)).method for name in self.methods}

    def settings(self) -> list[Setting]:
        """Every combination of the settings that affect a method, method by method."""
        swept = {key: values for key, values in self.grid.items() if len(values) > 1}
        settings = []
        for method in self.methods:
            relevant = {key: values for key, values in swept.items() if self._concerns(key, method)}
            combinations = itertools.product(*relevant.values())
            settings += [Setting(method, dict(zip(relevant, values, strict=True))) for values in combinations]
        return settings

    def runs(self) -> dict[str, list[str]]:
        """The overrides of every run, by its name: METHOD/SETTING/seed-SEED."""
        fixed = {key: values[0] for key, values in self.grid.items() if len(values) == 1}
        runs = {}
        for setting in self.settings():
            overrides = self._overrides(setting.method, fixed | setting.values)
            for seed in self.seeds:
                runs[f"{setting.name}/seed-{seed}"] = [*overrides, f"seed={seed}", "seeds=1"]
        return runs

    def experiments(self) -> dict[str, Experiment]:
        """What every setting runs, with the first seed, by its name: METHOD/SETTING."""
        first, runs = f"/seed-{self.seeds[0]}", self.runs()
        return {
            setting.name: self._experiment(setting.method, runs[setting.name + first]) for setting in self.settings()
        }

    def check(self) -> list[str]:
        """The cost, one line per method. Raises UsageError if a config is wrong or has no validation data."""
        if len(self.grid.get("select_by", ())) > 1:
            raise UsageError("a sweep chooses by one validation score; give select_by one value")
        cost: dict[str, tuple[int, int]] = {}
        for name, overrides in self.runs().items():
            method = name.partition("/")[0]
            experiment = self._experiment(method, overrides)
            if not experiment.split.validation:
                raise UsageError("a sweep chooses on validation data; set federation.split.validation above 0")
            count, rounds = cost.get(method, (0, 0))
            cost[method] = count + 1, rounds + experiment.rounds.count
        seeds = len(self.seeds)
        for method, (key, values) in itertools.product(self.methods, self.grid.items()):
            if not key.startswith("methods.") and not self._concerns(key, method):
                for value in values:  # which the method ignores, but must be valid
                    self._experiment(method, [f'method.name="{method}"', f"{key}={value}"])
        lines = [
            f"{method}: {several(count // seeds, 'setting')} x {several(seeds, 'seed')} "
            f"= {several(count, 'run')}, {rounds:,} training rounds"
            for method, (count, rounds) in cost.items()
        ]
        if len(set(cost.values())) > 1:
            lines.append("NOT AN EQUAL BUDGET: more settings or rounds give a method more chances to look good")
        return lines

    def _concerns(self, key: str, method: str) -> bool:
        """Whether a key affects a method: without an effect, all its values would give the same run."""
        if key.startswith("methods."):
            return _owner(key) == plugins.short_name(method)
        return not (key.startswith("training.optimiser") and Advises.from_method(self.methods_by_name[method]).rates)

    def _overrides(self, method: str, values: Mapping[str, str]) -> list[str]:
        """The method's name and these values, which override the config's of this method in either of their places."""
        prefix = f"methods.{plugins.short_name(method)}."
        return [
            f'method.name="{method}"',
            *(f"{key.replace(prefix, 'method.')}={value}" for key, value in values.items()),
        ]

    def _experiment(self, method: str, overrides: Sequence[str]) -> Experiment:
        try:
            return self.study.experiment(overrides)
        except UsageError as problem:
            if len(self.methods) > 1 and any(key.startswith("method.") for key in self.grid):
                hint = "a setting of one method alone is written methods.NAME.KEY=..."
                raise UsageError(f"{method}: {problem} ({hint})") from None
            raise

    def score_settings(self, failed: Collection[str]) -> list[Outcome]:
        """What came of every setting after all have run, method by method, the best first; `failed` names failed runs.

        A method's winner has the best mean validation score over seeds among the settings without a failed run, the
        first one if several are equal. Test scores are not used.
        """
        outcomes = []
        for setting in self.settings():
            names = [f"{setting.name}/seed-{seed}" for seed in self.seeds]
            lost = sum(name in failed for name in names)
            result = None if lost else score(*(RunFolder(self.study.folder(name)) for name in names))
            outcomes.append(Outcome(setting, result, lost))
        ordered = []
        for method in self.methods:
            mine = [outcome for outcome in outcomes if outcome.setting.method == method]
            best, *others = sorted(mine, key=lambda outcome: -outcome.score.rank if outcome.score else math.inf)
            ordered += [best._replace(wins=best.score is not None), *others]
        return ordered

    def winners(self, outcomes: Sequence[Outcome]) -> list[RunFolder]:
        """The folder of each method's best setting, if one has run without a failure."""
        return [RunFolder(self.study.folder(outcome.setting.name)) for outcome in outcomes if outcome.wins]

    def tabulate(self, outcomes: Sequence[Outcome]) -> Finding:
        """The table of all settings, in this order."""
        keys = dict.fromkeys(key for outcome in outcomes for key in outcome.setting.values)
        last = {key: key.rpartition(".")[2] for key in keys}
        headings = {key: key if [*last.values()].count(name) > 1 else name for key, name in last.items()}
        rows, winners = list[Row](), list[str]()
        for outcome in outcomes:
            method = plugins.short_name(outcome.setting.method)
            values: Row = {heading: _bare(outcome.setting.values.get(key)) for key, heading in headings.items()}
            row: Row = {"method": method, "winner": "*" if outcome.wins else None, **values}
            if outcome.score is None:
                row["failed"] = f"{outcome.failed} of {len(self.seeds)}"
            else:
                row |= outcome.score.row() | outcome.score.bounds()
            if outcome.wins:
                described = " ".join(f"{heading}={value}" for heading, value in values.items() if value is not None)
                winners.append(f"* {method}: {described or 'as configured'}")
            rows.append(row)
        columns = dict.fromkeys(key for row in rows for key in row)
        scores = [outcome.score for outcome in outcomes if outcome.score is not None]
        over = {result.interval["over"] for result in scores if result.interval.get("low") is not None}
        cautions = dict.fromkeys(caution for result in scores for caution in result.cautions)
        return Finding(
            f"{several(len(rows), 'setting')}, means over {list_seeds(self.seeds)}",
            [{key: row.get(key) for key in columns} for row in rows],
            notes=[
                "* has its method's best validation score; test scores were not used to choose",
                *self.check(),
                *winners,
                *(f"95 %: interval of the mean test score, {OVER[kind]}" for kind in sorted(over)),
                *(f"LEAKING: {caution}; these scores are not a fair estimate" for caution in cautions),
            ],
        )


def parse(texts: Sequence[str]) -> dict[str, list[str]]:
    """Keys and values of key=a,b,c. A range is 0..2, a list is one value in brackets; raises UsageError."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"'{text}' is not a setting; write key=a,b,c, such as training.epochs=1,5 or seed=0..2")
        if key in grid:
            raise UsageError(f"{key} is given twice; write all of its values after one {key}=")
        values = [value for part in _split(value) for value in _range(part, text)]
        if len(values) > 1 and "" in values:
            raise UsageError(f"'{text}' has an empty value; write key=a,b,c")
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise UsageError(f"'{text}' has the value {twice} twice")
        grid[key] = values
    return grid


def paper_grid(methods: Sequence[str]) -> dict[str, list[str]]:
    """The settings that each method's paper tries and their values, in the form of `parse`; UsageError without any."""
    grids = {name: getattr(take(METHODS, name, "--method"), "grid", {}) for name in methods}
    if without := [name for name, grid in grids.items() if not grid]:
        having = ", ".join(name for name in METHODS if getattr(METHODS[name], "grid", {}))
        raise UsageError(f"grid=paper: no grid is printed for {', '.join(without)}; there is one for {having}")
    return {
        f"methods.{plugins.short_name(name)}.{key}": [json.dumps(plain(value)) for value in values]
        for name, grid in grids.items()
        for key, values in grid.items()
    }


def plan_sweep(study: Study, methods: Sequence[str], texts: Sequence[str]) -> Sweep:
    """The requested sweep: `methods`, or the study's own if there are none, and key=a,b,c texts.

    With the text grid=paper, also what each method's paper tries, for settings that the texts do not name. If these
    name no seeds the config's are used. Raises UsageError.
    """
    grid, methods = parse(texts), methods or [study.method]
    by_paper = grid.pop("grid", [])
    if by_paper not in ([], ["paper"]):
        raise UsageError(f"grid=paper tries what each method's paper tries; got grid={','.join(by_paper)}")
    _check_methods(methods, grid)
    if by_paper:
        for key, values in paper_grid(methods).items():
            if f"method.{key.split('.', 2)[2]}" not in grid:  # which the texts name for every method
                grid.setdefault(key, values)
    seeds = _take_seeds(study, grid)
    return Sweep(study, methods, grid, seeds)


def _check_methods(methods: Sequence[str], grid: Mapping[str, Sequence[str]]) -> None:
    """Raise UsageError unless these are different methods, and the grid's keys are of no others."""
    for name in methods:
        take(METHODS, name, "--method")
    called = [plugins.short_name(name) for name in methods]
    if len(set(called)) < len(called):
        raise UsageError("--method names a method twice, or two classes of one name")
    for key in grid:
        if key in ("method", "method.name"):
            raise UsageError(f"methods are named by --method {','.join(grid[key])}, not by {key}=")
        if key.startswith("methods.") and _owner(key) not in called:
            raise UsageError(f"{key} is a setting of {_owner(key)}, which is not swept; name it with --method")


def _take_seeds(study: Study, grid: dict[str, list[str]]) -> list[int]:
    """The seeds that the grid names, which are taken out of it, or the config's."""
    named = {key: grid.pop(key) for key in ("seed", "seeds") if key in grid}
    if len(named.get("seeds", [])) > 1:
        raise UsageError("seeds counts runs of one setting; write which seeds, as in seed=0..2")
    if len(named.get("seed", [])) > 1:
        if "seeds" in named:
            raise UsageError("seed=... names every seed, so leave seeds out")
        return [study.experiment([f"seed={seed}"]).seed for seed in named["seed"]]
    return list(study.experiment([f"{key}={values[0]}" for key, values in named.items()]).every_seed)


def _owner(key: str) -> str:
    return key.split(".")[1]


def _split(text: str) -> list[str]:
    """The parts of a text between commas, except commas inside brackets, braces or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and not depth:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _range(part: str, text: str) -> list[str]:
    """A part as it is, or every integer of a range."""
    ends = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", part)
    if ends is None:
        return [part]
    first, last = int(ends[1]), int(ends[2])
    if first > last:
        raise UsageError(f"'{text}': a range goes upwards; write {last}..{first}")
    return [str(value) for value in range(first, last + 1)]


def _bare(text: str | None) -> str | None:
    """A value without the quotes around text."""
    return text and re.sub(r"""^(["'])([^"']*)\1$""", r"\2", text)
