"""The plans that a site's operator has agreed to, each for one run, and what that run has been answered so far."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfed.core.private.privacy import Privacy
from kinfed.errors import several
from kinfed.files import make_folder, read_json, write_json
from kinfed.runs.config import plugins
from kinfed.runs.config.experiment import Table

from ..plan import Plan, digest, hash_json
from ..wire.messages import Fields
from .drawn_rows import Withheld

AGREED, ASKED = "agreed.json", "asked.json"  # beside a site's folder, NAME.agreed.json, and what was asked for last
REPEATED = 5  # answers of a run that may be given again, as after a server's restart, all kinds together
TERMS = ("split", "seed", "most", "private", "experiment", "description", "given")  # of an agreement
PLAN_HASH = re.compile("[0-9a-f]{64}")  # as `digest` makes it
PINNED = ("agreed", "description", "covariates", "task", "shape", "outputs", "layout")  # how rows become inputs


def needs(planned: Plan) -> dict[str, int]:
    """The answers computed from rows that a run of a plan takes of a site, by kind."""
    count, every = planned.learning.rounds.count, planned.learning.rounds.evaluate_every
    scored = count // every + bool(count % every)
    unpriced = int(planned.learning.training.noise is None)  # what has no price does not leave
    return {"description": unpriced, "joining": 1, "training": count, "evaluation": scored, "verdict": unpriced}


def summary(planned: Plan) -> list[str]:
    """What a site's operator should know of a plan before agreeing to it, a line each."""
    learning, split, table = planned.learning, planned.split, planned.table
    model = {key: value for key, value in table["model"].items() if key in ("hidden", "cut")}
    length = learning.training
    steps = several(length.epochs, "epoch") if length.steps is None else several(length.steps, "step")
    settings = {
        key: value for key, value in table["method"].items() if key.endswith(("epochs", "steps", "batch")) and value
    }
    most, privacy = needs(planned), learning.training.noise
    return [
        f"method {plugins.short_name(learning.method_name)}{_tell_settings(settings)}, model "
        f"{plugins.short_name(table['model']['name'])}{_tell_settings(model)}; "
        f"{several(most['training'], 'round')} of {steps}, {several(length.batch, 'row')} a step; "
        f"{100 * split.test:g} % of rows for the test, {100 * split.validation:g} % for validation, "
        f"seed {learning.seed}",
        *(_tell_limits(most, length.privacy) if privacy is None else _tell_promise(privacy, most)),
    ]


def _tell_masks(privacy: Privacy) -> str:
    """What an operator should know of masks."""
    return (
        f"uploads are masked: the server sees sums over {privacy.members} sites or more, and no upload; descriptions, "
        "sizes and scores, where the plan has them, leave as they are"
    )


def _tell_limits(most: Mapping[str, int], privacy: Privacy | None) -> list[str]:
    """What an operator should know of answers without noise, masked or not."""
    if privacy is not None:
        return [
            _tell_masks(privacy),
            f"a run takes {several(most['training'], 'masked upload')} trained on this site's rows and as many as "
            f"{most['evaluation']:,} times its scores; the difference of two sums can show one upload, see "
            "docs/privacy.md",
        ]
    return [
        f"a run takes {several(most['training'], 'upload')} trained on this site's rows and as many as "
        f"{most['evaluation']:,} times its scores; {REPEATED} of these may be repeated, and then nothing more leaves",
        "the plan does not say which models the server sends, and crafted ones can read rows out of these answers; "
        "docs/privacy.md says how many",
    ]


def _tell_promise(privacy: Privacy, most: Mapping[str, int]) -> list[str]:
    """What an operator should know of answers with noise."""
    if privacy.unit == "client":
        return [
            _tell_masks(privacy),
            f"a run takes {several(most['training'], 'masked upload')}: epsilon {privacy.limit:g} at delta "
            f"{privacy.delta:g} for all of this site, in sums to which {privacy.members} honest sites add noise",
            "scores and statistics of columns stay here; how many rows there are, the names of columns and classes, "
            "and why a file cannot be used, are not covered",
        ]
    return [
        *([_tell_masks(privacy)] if privacy.masked else []),
        f"a run takes {several(most['training'], 'upload')} trained on this site's rows, with this site's own noise: "
        f"epsilon {privacy.limit:g} at delta {privacy.delta:g} for each row, whatever the server sends or asks",
        "scores and statistics of columns stay here; how many rows there are, the names of columns and classes, and "
        "why a file cannot be used, are not covered",
    ]


def agree(plans: Sequence[Plan], folder: Path, again: bool = True) -> str:
    """Remember that plans are agreed to, each for one run; returns the hash of the first.

    `again`: plans that were agreed to before are agreed to for another run.
    """
    made = {}
    for planned in plans:
        table = plugins.for_sites(planned.table)
        made[digest(table)] = _make_entry(planned, table)
    make_folder(folder.parent)
    agreed = read_json(locate(folder, AGREED))
    write_json(locate(folder, AGREED), agreed | made if again else made | agreed)
    return next(iter(made))


def read_asked(folder: Path) -> list[Table]:
    """The plans that a server asked this site for last."""
    return read_json(locate(folder, ASKED)).get("plans", [])


@dataclass(frozen=True)
class Agreements:
    """The agreements of the site in `folder`. If none is `required`, each run is agreed to when it begins."""

    folder: Path
    required: bool = True

    def missing(self, plans: Sequence[Table], experiment: str) -> str:
        """Why the operator is to be asked before a run of the first of these plans begins; empty if there is no need.

        The others are of runs beside it.
        """
        if not self.required:
            return ""
        agreed = self._read_plans()
        for i, table in enumerate(plans):
            entry = agreed.get(digest(table))
            if entry is None:
                return f"its operator has not agreed to this plan yet{' (that of the run beside it)' if i else ''}"
            if not i and entry["experiment"] not in ("", experiment):
                return "its operator agreed to one run of this plan, which is another one, and not to this one yet"
        return "" if plans else "the server does not say what it plans, and its operator has agreed to nothing else"

    def keep_asked(self, plans: Sequence[Table]) -> None:
        """Write down what the server asks for, so that the operator can look at it."""
        make_folder(self.folder.parent)
        write_json(locate(self.folder, ASKED), {"plans": list(plans)})

    def allow_description(self, message: Fields) -> None:
        """Raise Withheld unless a plan is agreed to that asks for this description, and count it."""
        if not self.required:
            return
        key = str(message.get("plan"))
        agreed = self._read_plans().get(key) if PLAN_HASH.fullmatch(key) else None
        if agreed is not None and agreed.get("private"):
            raise Withheld("a description of its rows has no price under privacy, so none leaves")
        if agreed is None or [agreed["split"], agreed["seed"]] != [message["split"], message["seed"]]:
            raise self._not_agreed("it does not describe its rows")
        self._give(key, str(message.get("experiment", "")), ("description",))

    def check(self, table: Table, invitation: Fields) -> None:
        """Raise Withheld unless a run of a plan is agreed to, with this description of the rows."""
        key = self._key(table, invitation["experiment"])
        experiment = invitation["experiment"]
        entry = self._read_plans().get(key)
        if entry is None:
            if self.required:
                raise self._not_agreed(f"its hash is {key[:16]}")
            return
        self._check_run(entry, experiment)
        if entry["description"] not in ("", _hash_description(invitation)):
            raise Withheld(
                "the server's description, by which rows become inputs, is not the one that this run began with "
                f"({entry['description'][:16]}); its operator may agree to another run"
            )

    def join(self, planned: Plan, invitation: Fields) -> None:
        """Count that the site joins a run, which from now on has this description of the rows."""
        table, experiment = invitation["table"], invitation["experiment"]
        agreed = read_json(locate(self.folder, AGREED))
        key = self._key(invitation["table"], experiment)
        entry = agreed.get(key) or _make_entry(planned, table)
        entry |= {"experiment": experiment, "description": _hash_description(invitation)}
        make_folder(self.folder.parent)
        write_json(locate(self.folder, AGREED), agreed | {key: entry})
        self.give(table, experiment, ("joining",))

    def give(self, table: Table, experiment: str, kinds: Sequence[str], masked: int = -1) -> str:
        """Count answers of these kinds before they are computed; raises Withheld if the run has had them all.

        `masked` is the round whose upload is masked, if one is. Returns how many of each the run has had now.
        """
        return self._give(self._key(table, experiment), experiment, kinds, masked)

    def check_masked(self, table: Table, experiment: str, round: int) -> None:
        """Raise Withheld if an upload of this round, or of a later one, was masked: two sums could show it."""
        self._check_masked(self._read_plans().get(self._key(table, experiment), {}), round)

    def _check_masked(self, entry: Mapping[str, Any], round: int) -> None:
        if round <= (last := entry.get("masked", -1)):
            raise Withheld(f"it has masked an upload of round {last + 1}, and masks none of that or an earlier round")

    def _read_plans(self) -> dict[str, Any]:
        """By plan what was agreed to; what else lies in that file is no agreement."""
        kept = read_json(locate(self.folder, AGREED))
        return {key: entry for key, entry in kept.items() if isinstance(entry, dict) and {*TERMS} <= entry.keys()}

    def _give(self, key: str, experiment: str, kinds: Sequence[str], masked: int = -1) -> str:
        agreed = read_json(locate(self.folder, AGREED))
        if (entry := agreed.get(key)) is None:
            raise self._not_agreed(f"its hash is {key[:16]}")
        self._check_run(entry, experiment)
        most, given = entry["most"], dict(entry["given"])
        for kind in kinds:
            given[kind] = given.get(kind, 0) + 1
        if sum(max(0, count - most[kind]) for kind, count in given.items()) > REPEATED:
            raise Withheld(
                f"the run has had {_tell_counts(entry['given'], most)}, which is all that its plan needs, and "
                f"{REPEATED} repeated: this site answers it no more, unless its operator agrees again"
            )
        entry |= {"experiment": experiment, "given": given}
        if masked >= 0:
            self._check_masked(entry, masked)
            entry |= {"masked": masked}
        write_json(locate(self.folder, AGREED), agreed | {key: entry})
        return _tell_counts({kind: given[kind] for kind in kinds}, most)

    def _check_run(self, entry: Mapping[str, Any], experiment: str) -> None:
        if entry["experiment"] not in ("", experiment):
            raise self._not_agreed("it agreed to one run of this plan, which was another one")

    def _key(self, table: Table, experiment: str) -> str:
        return digest(table) if self.required else f"run {experiment}"  # which is no hash

    def _not_agreed(self, more: str) -> Withheld:
        return Withheld(f"its operator has not agreed to this plan (kinfed flower agree {self.folder.name}): {more}")


def _make_entry(planned: Plan, table: Table) -> dict[str, Any]:
    """What is written down of a plan that is agreed to, and of which nothing was answered yet."""
    private = planned.learning.training.noise is not None
    terms = {"split": table["federation"]["split"], "seed": planned.learning.seed, "most": needs(planned)}
    return {**terms, "private": private, "experiment": "", "description": "", "given": {}}


def _hash_description(invitation: Fields) -> str:
    """The hash of how a site's rows become inputs."""
    return hash_json({name: invitation.get(name) for name in PINNED})


def locate(folder: Path, name: str) -> Path:
    """A file of a site beside a site's folder, which may be deleted."""
    return folder.parent / f"{folder.name}.{name}"


def _tell_counts(given: Mapping[str, int], most: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count:,} of {most[kind]:,}" for kind, count in given.items())


def _tell_settings(settings: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{key} {value}' for key, value in settings.items())})" if settings else ""
