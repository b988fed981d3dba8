"""What sites claim that the server cannot check, and how far it believes them: sizes, classes, scores, uploads."""

import json
import math
import sys
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from kinfed.core import trees
from kinfed.core.fleet import Key
from kinfed.core.metrics import ALWAYS
from kinfed.core.tasks import Classification, Task
from kinfed.core.trees import Tree
from kinfed.data.tables import disclosure
from kinfed.errors import UsageError

from ..wire.messages import Fields

CLASSES, TIMES = 1000, 10  # classes are believed up to so many, or so many times the median of the others'
LEDGER = ("noise", "steps", "spent", "budget")  # what a site says of its ledger of privacy
MOST = 100_000  # classes that are believed however many others have: a model for more could fill the memory


Size = TypeVar("Size", int, float)


def bound_sizes(sizes: list[Size], bound: float) -> list[Size]:
    """Numbers of examples, or sums of their weights, none above `bound` times the median of the others.

    With a bound of 0 all are as claimed.
    """
    if not bound or len(sizes) < 2:
        return sizes
    return [min(size, type(size)(bound * median(sizes[:i] + sizes[i + 1 :]))) for i, size in enumerate(sizes)]


def bound_claims(
    claimed: dict[str, Size], bound: float, log: Callable[[str], None], claim: str, effect: str
) -> dict[str, Size]:
    """By client what it claims to have as it counts, see `bound_sizes`; logs who claims what, and the effect of it.

    The texts `claim` and `effect` have braces for the number that is claimed, and for the one that counts.
    """
    sizes: list[Size] = list(claimed.values())
    counted = dict(zip(claimed, bound_sizes(sizes, bound), strict=True))
    for client, size in claimed.items():
        if counted[client] < size:
            log(
                f"client {client} claims {claim.format(size)}, more than {bound:g} times the median of the others "
                f"(flower.size_bound); {effect.format(counted[client])}"
            )
    return counted


def kind(greeting: Fields) -> str:
    """What must be the same at all sites about their examples; how many classes their labels show may differ.

    Of tables it is the names of columns, in any order, as what their examples are is still to be agreed on.
    """
    task = greeting.get("task", {})
    columns = greeting.get("columns") or []
    shape = greeting.get("shape")
    if (table := greeting.get("table")) is not None:
        return json.dumps(["table", sorted(columns), table["targets"]])
    if (series := greeting.get("series")) is not None:
        beside = [sorted(columns[1:]), series["future"], series["static"]]
        return json.dumps(["series", columns[0], beside, shape, greeting.get("outputs"), series["dated"]])
    outputs = None if task.get("name") == "Classification" else greeting.get("outputs")
    return json.dumps([shape, task.get("name"), outputs, columns])


def columns_misfit(greeting: Fields) -> str:
    """What is wrong with what a site says of its table or series, which may be made up; empty if nothing is."""
    table, series = greeting.get("table"), greeting.get("series")
    if table is not None:
        try:
            kinds, labels = table["kinds"], table["labels"]
            fits = [*kinds] == greeting["columns"] and all(isinstance(kind, str) for kind in kinds.values())
            targets = table["targets"]
            fits &= bool(targets) and all(isinstance(name, str) for name in targets)
            fits &= len({*labels}) == len(labels) <= (MOST if len(targets) == 1 else 0)
            fits &= all(isinstance(label, str) for label in labels) and _are_units(table["units"])
            fits &= len(labels) == greeting["task"].get("classes", 0) and type(table["in_order"]) is bool
        except (LookupError, TypeError, AttributeError):
            fits = False
        return "" if fits else f"its table is {table!r:.80}"
    if series is not None:
        try:
            disclosure.expand_stretches(series["times"])
            fits = type(series["dated"]) is bool and type(series["zoned"]) is bool and _are_units(series["units"])
            kinds, named = series["kinds"], [*series["future"], *series["static"]]
            fits &= [*kinds] == greeting["columns"][1:] and all(isinstance(kind, str) for kind in kinds.values())
            fits &= {*named} <= kinds.keys() and len({*named}) == len(named)
        except (UsageError, LookupError, TypeError):
            fits = False
        return "" if fits else f"its times are {series!r:.80}"
    return ""


def _are_units(units: Any) -> bool:
    return isinstance(units, dict) and all(isinstance(unit, str) and len(unit) < 8 for unit in units.values())


def too_many_classes(clients: dict[str, Fields]) -> dict[str, str]:
    """Clients that claim so many classes that the model for these could be too large, and why each is left out.

    More than CLASSES are believed if others of the same kind have nearly as many, whose median a few liars cannot move;
    where liars are the majority, such as two of three sites, up to MOST.
    """
    reasons = {}
    for client, greeting in clients.items():
        classes = greeting["task"].get("classes", 0)
        if classes <= CLASSES:
            continue
        others = [w["task"].get("classes", 0) for c, w in clients.items() if c != client and kind(w) == kind(greeting)]
        if classes > MOST:
            reasons[client] = (
                f"its labels show {classes:,} classes, more than {MOST:,}; if that is right, set flower.classes"
            )
        elif not others or classes > TIMES * median(others):
            reasons[client] = (
                f"its labels show {classes:,} classes, more than {CLASSES:,} and more than {TIMES} times the median of "
                f"the others' ({median(others) if others else 'there are none'}); if that is right, set flower.classes"
            )
    return reasons


def read_scores(rows: Any, keys: Iterable[Key], task: Task) -> dict[Key, float]:
    """A client's scores, as far as they are in `keys`; raises ValueError, TypeError or OverflowError if impossible."""
    scores = {(str(m), str(s), str(k)): float(v) for m, s, k, v in rows}
    for (_, _, metric), value in scores.items():
        most = sys.float_info.max
        if isinstance(task, Classification) and metric not in ("loss", "log_loss"):
            most = {ALWAYS: task.classes - 1, "brier": 2}.get(metric, 1)
        least = -most if metric.partition("@")[0] == "r2" else 0
        if not math.isnan(value) and not least <= value <= most:
            raise ValueError(f"{metric} is {value}")
    return {key: scores[key] for key in keys if key in scores}


def read_ledger(claim: Any) -> dict[str, float]:
    """What a site says of its ledger of privacy; raises LookupError, TypeError, ValueError or OverflowError if it is
    none.
    """
    ledger = {key: float(claim[key]) for key in LEDGER}
    if not all(0 <= value <= sys.float_info.max for value in ledger.values()):
        raise ValueError("a ledger has finite numbers from 0")
    return ledger


def norm(upload: Tree) -> float:
    """The Euclidean norm of all floating-point numbers of an upload."""
    floats = [t.double().flatten() for t in tree_leaves(upload) if t.is_floating_point()]
    return float(torch.cat(floats).norm()) if floats else 0.0


def movement(sent: Tree, upload: Tree) -> float:
    """The norm of what a client has changed: of floating-point numbers that have a name and shape in common with those
    that it was sent, their difference; of others themselves.
    """
    before, changed = trees.pack(sent), []
    for name, t in trees.pack(upload).items():
        if t.is_floating_point():
            comparable = name in before and before[name].shape == t.shape
            changed.append((t.double() - before[name].double() if comparable else t.double()).flatten())
    return float(torch.cat(changed).norm()) if changed else 0.0


def too_large(norms: dict[str, float], before: list[float], bound: float, what: str = "its upload") -> dict[str, str]:
    """Clients whose upload, or other `what`, has a norm above `bound` times the cohort's median, and why that is.

    In a cohort of one or two the norms `before` count as well; the first two uploads of all are compared with nothing.
    """
    compared = [*norms.values(), *(before if len(norms) < 3 else [])]
    if not bound or len(compared) < 3:
        return {}
    middle = float(torch.tensor(compared, dtype=torch.float64).median())
    return {
        client: f"the norm of {what} is {value / middle:.3g} times the median of the others', more than {bound:g}"
        for client, value in norms.items()
        if middle and value > bound * middle
    }
