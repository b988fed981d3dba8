"""Budget: how long a choice may take, and with which request it was begun."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import make_folder, write_json
from .arena import Arena
from .successive_halving import Candidate, Rung, rungs

FILE = "budget.json"  # in the folder of the candidates
RUNS = 9  # the default budget, in runs of all rounds
DRAWS, BEST = 3, 5  # draws of validation examples on which so many of the best solved models are compared


def whole_request(arena: Arena, tried: Sequence[Candidate], terms: dict[str, Any]) -> dict[str, Any]:
    """All that a choice that goes on must have in common with its begin."""
    return terms | {
        "rounds": repr(replace(arena.rounds, until=0)),
        "seed": arena.seed,
        "candidates": [f"{candidate.name}: {candidate.method}, {candidate.training}" for candidate in tried],
        "participation": repr(arena.participation),
        "data": arena.federation.digest(),
        "model": arena.build_model().digest(),
    }


def allowance(arena: Arena, tried: Sequence[Candidate], terms: dict[str, Any]) -> int:
    """The training rounds that a choice may take; raises UsageError if these are too few, or it was begun differently.

    The `terms` are kept in the arena's folder, and so is the number of rounds that a time has become.
    """
    request = whole_request(arena, tried, terms)
    if (begun := begun_with(arena.folder, request)) is not None:
        return begun
    allowed = allowed_rounds(arena, tried, terms)
    make_folder(arena.folder)
    write_json(arena.folder / FILE, {"terms": request, "budget": allowed})
    return allowed


def allowed_rounds(arena: Arena, tried: Sequence[Candidate], terms: dict[str, Any]) -> int:
    """The training rounds of a choice that begins; raises UsageError if these are too few.

    By default these are `RUNS` runs of all rounds, and what solving takes at most: that of every model that is solved,
    and of the best on more draws.
    """
    rounds, budget, seeds = arena.rounds.count, terms["budget"], int(terms["seeds"])
    least = 3 * rounds * seeds
    if budget is None:
        allowed = (RUNS * rounds + sum(candidate.most for candidate in tried)) * seeds + count_draws(tried)
    else:
        allowed = int(budget) if str(budget).isdecimal() else int(seconds_of(str(budget)) / arena.seconds())
    if allowed < least:
        here = f" (here {allowed})" if str(allowed) != str(budget) else ""
        raise UsageError(
            f"a budget of {budget}{here} is too short for one candidate beside Local and FedAvg: it takes {least} "
            f"training rounds, or fewer with rounds below {rounds}"
        )
    return allowed


def plan_rungs(arena: Arena, tried: Sequence[Candidate], allowed: int, seeds: int) -> list[Rung]:
    """The rungs of a choice that takes so many rounds, without what comparing solved models on more draws takes."""
    rounds, solving = arena.rounds, [candidate.most for candidate in tried]
    most = max(allowed - count_draws(tried), 3 * rounds.count * seeds)
    return rungs(rounds.count, rounds.evaluate_every, len(tried), seeds, most, solving)


def count_draws(tried: Sequence[Candidate]) -> int:
    """The most rounds that comparing the best solved models on more draws of validation examples takes."""
    return (DRAWS - 1) * sum(sorted(candidate.most for candidate in tried if candidate.is_solved)[-BEST:])


def begun_with(folder: Path, terms: dict[str, Any]) -> int | None:
    """The budget of the choice in this folder, None without one; raises UsageError if something else was asked for."""
    path = folder / FILE
    if not path.exists():
        return None
    begun = json.loads(path.read_text(encoding="utf-8"))
    for name, value in terms.items():
        before = begun["terms"].get(name)
        if before != value:
            raise UsageError(
                f"the choice in {folder} was begun with another '{_differing(name, before, value)}'; repeat that "
                "request to go on, or choose another folder"
            )
    return int(begun["budget"])


def _differing(name: str, before: Any, now: Any) -> str:
    """Where two values of a request differ, by dotted keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
        return _differing(key if name == "config" else f"{name}.{key}", before.get(key), now.get(key))
    return name


def seconds_of(text: str) -> float:
    """The seconds of a time such as 90s, 5m or 1.5h; raises UsageError."""
    units = {"s": 1, "m": 60, "h": 3600}
    time = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if time is None:
        raise UsageError(f"budget is a number of training rounds, or a time such as 90s, 5m or 1h; got {text!r:.80}")
    return float(time[1]) * units[time[2]]
