"""What the rows of a site have cost in all its runs, as epsilon: no server, restart or lost file sets it back."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfed.core.private.privacy import NoisedSteps, Privacy, choose_interval, count_epsilon
from kinfed.errors import RunError
from kinfed.files import lock_folder, make_folder, read_json, write_json

from ..plan import hash_json
from .agreements import AGREED, locate
from .drawn_rows import Withheld

FILE, NOTE = "privacy.json", "ledger.json"  # beside a site's folder, NAME.privacy.json, and the note in the folder


@dataclass(frozen=True)
class Ledger:
    """The noised steps that a site has taken, by run. It lies beside the site's folder.

    Notes in two other places say that it exists and how far it went, so that a ledger that is lost, or an older copy,
    is noticed.
    """

    folder: Path  # the site's

    @property
    def path(self) -> Path:
        """Its file."""
        return locate(self.folder, FILE)

    def spend(self, run: str, steps: NoisedSteps, privacy: Privacy, budget: float) -> dict[str, Any]:
        """Count steps before they are taken; returns what they are and what all have cost.

        Raises Withheld, and counts nothing, if all would cost more than `budget`, RunError if the ledger is lost.
        """
        make_folder(self.folder)
        with lock_folder(self.folder):
            kept = self._read()
            taken = [entry for entry in kept["runs"] if not self._is_same(entry, run, steps)]
            count = sum(entry["steps"] for entry in kept["runs"] if self._is_same(entry, run, steps))
            taken.append({"run": run, **steps._replace(steps=count + steps.steps)._asdict()})
            spent = self._count(taken, privacy)
            if spent > budget:
                before = self._count(kept["runs"], privacy)
                raise Withheld(
                    f"its rows have cost epsilon {before:.3g} of {budget:g} at delta {privacy.delta:g}, and this round "
                    f"would make it {spent:.3g}; its operator may allow more in its policy (epsilon = "
                    f"{1.005 * spent:.3g})"
                )
            kept |= {"count": kept["count"] + 1, "runs": taken, "spent": spent, "budget": budget}
            write_json(self.path, seal(kept))
            self._note({"id": kept["id"], "count": kept["count"]})
        return {"noise": steps.noise, "steps": count + steps.steps, "spent": spent, "budget": budget}

    def read(self) -> dict[str, Any]:
        """What it says, empty if no private run has taken steps yet; raises RunError if it is lost or damaged."""
        return self._read() if self.path.exists() or self._notes() else {}

    def _read(self) -> dict[str, Any]:
        fix = "restore it from a backup, as this site does not know what its rows have cost"
        kept, notes = read_json(self.path, fix), self._notes()
        if not kept and not notes:
            return {"id": secrets.token_hex(8), "count": 0, "runs": []}
        if not kept:
            raise RunError(f"{self.path.name} is gone; {fix}")
        try:
            steps = self._read_steps(kept["runs"])
            is_whole = all(0 < s.rate <= 1 and 0 < s.noise < math.inf and s.steps > 0 for s in steps)
            sealed = "hash" not in kept or kept == seal(kept)  # earlier versions wrote none
            is_whole &= kept["count"] >= 1 and bool(steps) and sealed
        except (LookupError, TypeError, ValueError):
            is_whole = False
        if not is_whole:
            raise RunError(f"{self.path.name} is not what this site wrote; {fix}")
        for note in notes:
            if note.get("id") != kept["id"] or note.get("count", 0) > kept["count"]:
                raise RunError(f"{self.path.name} is another or an older copy; {fix}")
        return kept

    def _notes(self) -> list[dict[str, Any]]:
        """What was noted elsewhere of the ledger."""
        notes = [read_json(self.folder / NOTE), read_json(locate(self.folder, AGREED)).get("ledger") or {}]
        return [note for note in notes if note]

    def _note(self, note: dict[str, Any]) -> None:
        write_json(self.folder / NOTE, note)
        agreed = locate(self.folder, AGREED)
        write_json(agreed, read_json(agreed) | {"ledger": note})

    @staticmethod
    def _is_same(entry: dict[str, Any], run: str, steps: NoisedSteps) -> bool:
        return bool(entry["run"] == run and (entry["rate"], entry["noise"]) == (steps.rate, steps.noise))

    @staticmethod
    def _read_steps(runs: list[dict[str, Any]]) -> list[NoisedSteps]:
        return [NoisedSteps(float(entry["rate"]), float(entry["noise"]), int(entry["steps"])) for entry in runs]

    def _count(self, runs: list[dict[str, Any]], privacy: Privacy) -> float:
        """The epsilon of all steps together."""
        return count_epsilon(self._read_steps(runs), privacy.delta, choose_interval(privacy.limit))


def seal(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A ledger with the hash of what it says, by which a slip of the hand or a half of a copy shows."""
    return {**kept, "hash": hash_json({name: value for name, value in kept.items() if name != "hash"})}
