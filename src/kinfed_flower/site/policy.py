"""What a site takes part in, whatever a server sends: the limits that its operator wrote into a file."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from kinfed.core.field_checks import Count, In, Positive, Settings
from kinfed.core.private.privacy import Privacy
from kinfed.data.tables import disclosure
from kinfed.errors import UsageError
from kinfed.runs.config import parts, plugins
from kinfed.runs.config.experiment import Learning, Table
from kinfed.runs.openers import SITE

from ..plan import Plan
from ..wire.messages import Fields
from .drawn_rows import STEP, TRAINING, Withheld

LONGEST = 1 << 16  # characters of a plan


@dataclass(frozen=True)
class Policy(Settings):
    """A site's rules; its file is TOML of these names. By default only plans that the operator has agreed to run.

    Epochs are all passes over the training rows in a round: those of steps and of a method's own parts, too.
    """

    runs: str = "agreed"  # "agreed": only these; "any": whatever is within the limits
    methods: Sequence[str] = ()  # by name; none: all
    models: Sequence[str] = ()
    rounds: Count = 1000
    epochs: Count = 100  # of local training in a round
    parameters: Count = 10_000_000  # of a model
    experiments: Count = 100  # whose folders are kept at the site
    disk: Count = 10_000  # megabytes that these may take
    training_rows: Count = TRAINING  # at least: for training
    step_rows: Count = STEP  # at least: of which a gradient may be
    statistic_rows: Count = disclosure.FEWEST  # at least: that a number, or a category's name, stands for
    scores: Sequence[str] = ()  # that leave, such as loss and accuracy; none: all
    epsilon: Positive | None = None  # what all private runs may cost a row; then only such runs; none: the plan's
    delta: Annotated[float, In("(0, 1)")] = 1e-5  # at most that of a private plan
    masked: Literal["", "required"] = ""  # "required": only plans whose server sees sums of uploads alone
    members: str = ""  # with masks, a file of lines NAME KEY: no sum has others in it; "": whom the server names

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runs not in ("agreed", "any"):
            raise UsageError(f"runs must be agreed or any; got '{self.runs}'")

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """The policy in a file; raises UsageError for an unknown name or a value that is none."""
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", problem)
            raise UsageError(f"{path} cannot be read as a policy: {why}") from None
        policy: Policy = parts.call(cls, table, "policy")[0]
        return replace(policy, members=str(path.parent / policy.members)) if policy.members else policy

    def check(self, planned: Plan, table: Table, folder: Path, experiment: str) -> None:
        """Raise Withheld unless the site's rules allow an experiment; `table` is the plan as the server sent it."""
        learning = planned.learning
        method = plugins.short_name(learning.method_name)
        model = plugins.short_name(table["model"]["name"])
        for kind, name, allowed in (("method", method, self.methods), ("model", model, self.models)):
            if allowed and name not in allowed:
                raise Withheld(f"its policy allows the {kind}s {', '.join(allowed)}, not {name}")
        self.check_limit("rounds", learning.rounds.count)
        self._check_privacy(learning.training.privacy)
        if not (folder / experiment).exists() and len([*folder.glob(f"*/{SITE}")]) >= self.experiments:
            raise Withheld(f"its policy keeps {self.experiments:,} experiments; its operator may delete old ones")

    def _check_privacy(self, privacy: Privacy | None) -> None:
        """Raise Withheld for a plan that promises less than the rules ask for."""
        if self.masked and (privacy is None or not privacy.masked):
            raise Withheld("its policy asks for masks (masked = 'required'), and the plan has no privacy.masked=true")
        if self.epsilon is None:
            return
        most = f"[privacy] with an epsilon of at most {self.epsilon:g} and a delta of at most {self.delta:g}"
        if privacy is None or privacy.epsilon is None:
            raise Withheld(f"its policy asks for {most}, and the plan has no {'epsilon' if privacy else '[privacy]'}")
        if privacy.unit == "client" and not self.masked:
            raise Withheld(
                "its policy asks for an epsilon that needs no trust in others, and under unit='client' sites share the "
                "noise; its operator may allow that with masked = 'required'"
            )
        if privacy.limit > self.epsilon or privacy.delta > self.delta:
            raise Withheld(
                f"its policy asks for {most}, and the plan has epsilon {privacy.limit:g} and delta {privacy.delta:g}"
            )

    def budget(self, privacy: Privacy) -> float:
        """What all private runs may cost a row."""
        return privacy.limit if self.epsilon is None else self.epsilon

    def check_limit(self, name: str, planned: int) -> None:
        """Raise Withheld for a plan of more rounds, epochs or parameters than the rules allow."""
        if planned > (most := getattr(self, name)):
            raise Withheld(f"a site's policy allows {most:,} {name}, and the plan has {planned:,}")

    def check_disk(self, folder: Path) -> None:
        """Raise Withheld if a site's folder takes more than its rules allow."""
        taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        if taken > self.disk:
            raise Withheld(
                f"its policy allows {self.disk:,} MB, and its folder takes {taken:,.0f}; delete old experiments"
            )

    def check_score(self, metric: str) -> None:
        """Raise Withheld unless a score may leave."""
        if not self.lets_out(metric):
            raise Withheld(f"its policy lets {', '.join(self.scores)} leave, not {metric}")

    def lets_out(self, metric: str) -> bool:
        """Whether a score may leave."""
        return not self.scores or metric in self.scores

    def coarser(self, description: Fields) -> Fields:
        """A description as it may leave: its numbers of so many rows or more, its categories' names too."""
        if self.statistic_rows <= disclosure.FEWEST:
            return description
        rows = self.statistic_rows

        def coarsen(column: Fields, median: bool) -> Fields:
            statistics = disclosure.from_json(column, column["kind"], median)
            return disclosure.to_json(disclosure.coarse(statistics, None, rows, rows))

        coarse: Fields = {}
        if "statistics" in description:
            coarse["statistics"] = {name: coarsen(column, True) for name, column in description["statistics"].items()}
        if "answers" in description:
            coarse["answers"] = [coarsen(column, False) for column in description["answers"]]
        return description | coarse


def passes(learning: Learning, rows: int) -> int:
    """Passes over so many training rows in a round, at most: those that training takes, and those of a method's own."""
    training = learning.training
    method = learning.method
    batch = min(learning.training.batch, rows)

    def of_steps(count: int, size: int) -> int:
        return math.ceil(count * min(size, rows) / max(rows, 1))

    once = training.epochs if training.steps is None else of_steps(training.steps, batch)
    epochs = {name: value for name, value in vars(method).items() if name.endswith("epochs")}
    count = epochs.pop("base_epochs", None)
    count = once if count is None else count
    count += sum(once if value is None else value for value in epochs.values())
    steps = getattr(method, "steps", None)
    if getattr(method, "steps_on_each_batch", False):
        return count * int(steps or 1)
    if hasattr(method, "adapt_steps"):  # three batches a step
        size = getattr(method, "batch", None) or batch
        return of_steps(3 * (steps or math.ceil(once * rows / batch)) + method.adapt_steps, size)
    return count
