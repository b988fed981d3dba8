"""What a site takes part in, whatever a server sends: the file that its operator wrote, and the plans agreed to."""

import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.field_checks import Count, Settings
from ...data.tables import disclosure
from ...errors import RunError, UsageError
from ...files import make_folder, write_json
from ...runs.config import parts, plugins
from ...runs.config.experiment import Table
from ..server.plan import Plan
from ..wire.messages import Words
from .drawn_rows import STEP, TRAINING, Withheld

AGREED = "agreed.json"  # in a site's folder: hashes of plans


@dataclass(frozen=True)
class Policy(Settings):
    """A site's rules; its file is TOML of these names. By default only plans that the operator has agreed to run."""

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
        found: Policy = parts.call(cls, table, "policy")[0]
        return found

    def check(self, planned: Plan, table: Table, parameters: int, folder: Path, experiment: str) -> None:
        """Raise Withheld unless the site's rules allow an experiment; `table` is the plan as the server sent it."""
        learning = planned.learning
        method, model = plugins.called(learning.method_name), plugins.called(table["model"]["name"])
        for kind, name, allowed in (("method", method, self.methods), ("model", model, self.models)):
            if allowed and name not in allowed:
                raise Withheld(f"its policy allows the {kind}s {', '.join(allowed)}, not {name}")
        wanted = {
            "rounds": (learning.rounds.count, self.rounds),
            "epochs": (learning.training.epochs or 0, self.epochs),
            "parameters": (parameters, self.parameters),
        }
        for name, (asked, most) in wanted.items():
            if asked > most:
                raise Withheld(f"its policy allows {most:,} {name}, and the plan has {asked:,}")
        if not (folder / experiment).exists() and len([*folder.glob("*/join.safetensors")]) >= self.experiments:
            raise Withheld(f"its policy keeps {self.experiments:,} experiments; its operator may delete old ones")
        if self.runs == "agreed" and digest(table) not in {one["plan"] for one in agreed(folder)}:
            raise Withheld(
                f"its operator has not agreed to this plan (kinfed flower agree {folder.name} plan.toml); its hash is "
                f"{digest(table)[:16]}"
            )

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

    def coarser(self, said: Words) -> Words:
        """A description as it may leave: its numbers of so many rows or more, its categories' names too."""
        if self.statistic_rows <= disclosure.FEWEST:
            return said
        rows, kept = self.statistic_rows, dict(said)
        for part in ("statistics", "answers"):
            whole = said.get(part, {})
            each = {
                name: disclosure.coarse(
                    disclosure.from_json(one, one["kind"], median=part != "answers"), None, rows, rows
                )
                for name, one in (whole.items() if isinstance(whole, dict) else enumerate(whole))
            }
            told = {name: disclosure.to_json(one) for name, one in each.items()}
            kept |= {part: told if isinstance(whole, dict) else [*told.values()]} if part in said else {}
        return kept

    def check_description(self, split: Table, seed: int, folder: Path) -> None:
        """Raise Withheld unless the operator has agreed to a plan that divides the rows so."""
        known = [[one["split"], one["seed"]] for one in agreed(folder)]
        if self.runs == "agreed" and [split, seed] not in known:
            fix = f"kinfed flower agree {folder.name} plan.toml"
            raise Withheld(f"its operator has agreed to no plan of this split and seed ({fix})")


def digest(table: Table) -> str:
    """The hash of a plan: of all that decides what a site computes, without the server's own settings."""
    kept = {key: value for key, value in table.items() if key != "flower"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def agreed(folder: Path) -> list[Table]:
    """The plans to which the operator of a site's folder has agreed: each its hash, its split and its seed."""
    path = folder / AGREED
    try:
        return list(json.loads(path.read_text())) if path.exists() else []
    except (OSError, ValueError) as problem:
        raise RunError(f"{path} cannot be read: {problem}") from None


def agree(plans: Sequence[Plan], folder: Path) -> str:
    """Remember that plans are agreed to; returns the hash of the first."""
    known = agreed(folder)
    for planned in plans:
        table = plugins.for_sites(planned.table)
        one = {"plan": digest(table), "split": table["federation"]["split"], "seed": planned.learning.seed}
        known += [one] if one not in known else []
    make_folder(folder)
    write_json(folder / AGREED, known)
    return digest(plugins.for_sites(plans[0].table))
