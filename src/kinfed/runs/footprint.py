"""Footprint: the bytes that a method's server needs at its peak, which are known before the first round.

Private states and the models that are kept are not counted: above a limit they are in files.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..core import engine
from ..core.layout import Layout
from ..core.method import Method
from ..core.mixins import Lists
from ..errors import UsageError
from ..simulation.devices import free_memory

NUMBER = 4  # bytes of a number in a table over pairs of clients
FEWER = "use fewer clients, or a method that compares no clients with each other, such as 'fedavg'"


class Holds(NamedTuple):
    """How many tables of each kind a server has in memory at its peak: often when all clients' models are made."""

    models: float = 0.0  # [N, d]
    uploads: float = 0.0  # [K, d]; at least two: those of a round, and of the one before until these have come
    pairs: float = 0.0  # [N, N], or lists in their place
    evidence: float = 0.0  # [N, N], whatever lists there are
    layer_pairs: float = 0.0  # [L, N, N]
    cohort_pairs: float = 0.0  # [K, K]
    graphs: float = 0.0  # [N, N] that are kept of each evaluated round
    layer_graphs: float = 0.0  # [L, N, N] that are


HOLDS = {  # of kinfed's methods and of their parts: measured, as tests/runs/test_footprint.py does
    "Method": Holds(uploads=2),
    "Local": Holds(graphs=1),
    "Scaffold": Holds(uploads=4),
    "GraphMethod": Holds(models=3, uploads=1, graphs=1),
    "Kin": Holds(models=4.2, uploads=0.2, layer_pairs=4.6, layer_graphs=1),
    "Mixture": Holds(models=3.8, uploads=0.2, layer_pairs=5.8, layer_graphs=1),
    "FedAMP": Holds(models=3.6, uploads=0.6, pairs=9, graphs=1),
    "HeurFedAMP": Holds(models=4.6, uploads=0.7, pairs=9, graphs=1),
    "PFedGraph": Holds(models=5, uploads=1, pairs=8, graphs=1),
    "FedAGHN": Holds(models=5.6, uploads=0.5, layer_pairs=5.7, layer_graphs=1),
    "FedFomo": Holds(models=11, uploads=4.5, pairs=10, graphs=1),
    "DPFL": Holds(models=21, uploads=9, pairs=10, graphs=1),
    "FedPAC": Holds(models=3, uploads=2, pairs=2, cohort_pairs=11, layer_graphs=1),
    "FedCedar": Holds(uploads=5.2, cohort_pairs=8, graphs=1),
    "CFL": Holds(models=3, uploads=5, cohort_pairs=10, graphs=1),
    "IFCA": Holds(uploads=8.6, graphs=1),
    "FedEM": Holds(uploads=6),
    "FedSem": Holds(uploads=6, cohort_pairs=8, graphs=1),
    "SFL": Holds(models=3.2, uploads=1.9, graphs=1),
    "Known": Holds(pairs=8),
    "Similarity": Holds(pairs=12),
    "PFedGAT": Holds(models=5, cohort_pairs=30, graphs=1),
    "Dynamic": Holds(models=5, cohort_pairs=260, graphs=1),
    "FedU": Holds(models=3.5, pairs=1, cohort_pairs=1.5, graphs=1),
    "Hedge": Holds(models=5, uploads=0.2, evidence=3, layer_pairs=5, layer_graphs=1),
    "Logits": Holds(models=5, pairs=4, cohort_pairs=3, graphs=1),
    "Projected": Holds(models=5, pairs=7, cohort_pairs=3, graphs=1),
}


LISTS = "set method.neighbours=20"
SELDOM = "have fewer clients take part in a round, such as participation=0.05"
NEAREST = "set method.among.name=nearest"
INSTEAD = {
    "Mixture": NEAREST,
    "Kin": LISTS,
    "FedAMP": LISTS,
    "HeurFedAMP": LISTS,
    "PFedGraph": LISTS,
    "FedAGHN": LISTS,
    "PFedGAT": SELDOM,
    "Dynamic": SELDOM,
}


class Part(NamedTuple):
    """Tables of one kind."""

    bytes: int
    what: str
    instead: str  # what needs less


def footprint(
    method: Method, layout: Layout, clients: int, share: float, rounds: engine.Rounds, number: int = NUMBER
) -> list[Part]:
    """The parts of what a server needs for N clients, of whom a share takes part in a round.

    `method` is as it was given to `fit`; `layout` is of what travels, d numbers of `number` bytes each.
    """
    cohort = max(1, round(share * clients))
    evaluations = -(-rounds.last // rounds.evaluate_every)
    names, row = list(_names(method)), number * layout.size
    holds = Holds(*map(sum, zip(*(HOLDS[name] for name in names), strict=True)))
    layers = len(layout.layers) if getattr(method, "by_layer", True) else 1
    pairs = (holds.pairs + layers * holds.layer_pairs) * clients**2 + holds.cohort_pairs * cohort**2
    if neighbours := getattr(method, "neighbours", 0):  # lists in their place
        pairs *= min(1, (neighbours + 1) / clients)
    pairs += holds.evidence * clients**2
    lists, tables = Lists.from_method(method), holds.models * clients * row
    if lists.sparse and lists.keeps_lists(clients):  # who has never taken part has no row
        tables = holds.models * min(clients, rounds.last * cohort) * row + min(engine.SENT, clients * row)
    kept = (holds.graphs + layers * holds.layer_graphs) * evaluations if clients <= engine.RELATED else 0
    one_model = (
        "freeze a part of the model or keep it personal (method.frozen, method.personal), or use a method whose server "
        "has one model for all, such as 'fedavg'"
    )
    few = "have fewer clients take part in a round, such as participation=0.1"
    return [
        Part(int(tables), "models of all clients", one_model),
        Part(int(row * holds.uploads * cohort), "uploads of a round", few),
        Part(int(NUMBER * pairs), "tables over pairs of clients", find_cheaper(method)),
        Part(int(NUMBER * kept * clients**2), "relations of evaluated rounds", "set evaluate_every=10 or higher"),
    ]


def find_cheaper(method: Method) -> str:
    """What makes a server compare fewer clients with each other."""
    return next((INSTEAD[name] for name in _names(method) if name in INSTEAD), FEWER)


def _names(method: Method) -> Iterator[str]:
    """The method's class, or the nearest above it of which it is known what it holds, and the same of its parts."""
    for thing in (method, *vars(method).values()):
        kinds = (kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith("kinfed."))
        yield from list(kind for kind in kinds if kind in HOLDS)[:1]


def check(parts: list[Part], clients: int, device: torch.device) -> None:
    """Raise UsageError, with what needs less, if a server needs more bytes than are free on a device."""
    free = free_memory(device)
    total, largest = sum(part.bytes for part in parts), max(parts)
    if free is not None and total > free:
        raise UsageError(
            f"for {clients:,} clients the server needs {total / 1e9:.3g} GB of memory, {largest.bytes / 1e9:.3g} GB of "
            f"it for {largest.what}, and {free / 1e9:.3g} GB are free; {largest.instead}"
        )
