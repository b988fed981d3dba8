"""Watch: has a run write down how it is doing, for `kinfed flower status`."""

import math
import time
from pathlib import Path
from typing import Any

from kinfed.core.history import History

from ..wire.keys import fingerprint
from . import status_file
from .broker import Broker
from .flower_fleet import FlowerFleet, Notes


class Watch:
    """Writes a run's status whenever its broker has looked at which sites are there."""

    def __init__(self, out: Path, rounds: int, broker: Broker) -> None:
        self._out, self._rounds, self._broker = out, rounds, broker
        self._fleet: FlowerFleet | None = None
        self._history: History | None = None
        self._before, self._began = 0.0, time.perf_counter()
        broker.looked = self.write

    def begin(self, fleet: FlowerFleet, history: History, seconds: float) -> None:
        """The run's parts are there, and it has taken so many seconds before."""
        self._fleet, self._history, self._before = fleet, history, seconds

    def write(self, state: str = "running", why: str = "") -> None:
        """Write the status."""
        history, fleet = self._history, self._fleet
        missed = dict.fromkeys(self._list_sites(), 0)
        if fleet is not None and fleet.names:
            missed = dict(zip(fleet.names, fleet.state.missed.tolist(), strict=False))
        progress: dict[str, Any] = {
            "state": state,
            "why": why or (f"waiting for {self._broker.waiting_for}" if self._broker.waiting_for else ""),
            "round": 0 if history is None else history.cost.done,
            "rounds": self._rounds,
            "seconds": round(self._before + time.perf_counter() - self._began, 1),
            "scores": {} if history is None else _scores(history),
            "sites": {name: self._site(name, rounds) for name, rounds in missed.items()},
        }
        status_file.write(self._out, progress)

    def _list_sites(self) -> list[str]:
        """Sites before round 1: those that were met, and those that were left out."""
        left_out = [name for name, why in self._broker.problems.items() if why]
        return [*self._broker.nodes.clients, *left_out]

    def _site(self, name: str, missed: int) -> dict[str, Any]:
        broker = self._broker
        traffic = broker.traffic.bytes.get(name, {}).values()
        notes = Notes() if self._fleet is None else self._fleet.notes
        return {
            "node": self._node(name),
            "rounds": len(notes.used.get(name, [])),
            "missed": missed,
            "down": sum(both[0] for both in traffic),
            "up": sum(both[1] for both in traffic),
            "late": broker.late(name),
            **notes.spent.get(name, {}),
            "left_out": broker.problems.get(name, ""),
        }

    def _node(self, name: str) -> str:
        """The fingerprint of the key of a site's node, empty while it is away."""
        nodes = self._broker.nodes
        node = nodes.online.get(nodes.at.get(name, -1))
        return fingerprint(node.key) if node else ""


def _scores(history: History) -> dict[str, Any]:
    """The last means over clients: by model, split and metric; and the round that they are of."""
    if not history.rounds:
        return {}
    last = {"/".join((split, metric, model)): t for (model, split, metric), t in history.scores[-1].items()}
    means = {name: float(values.double().nanmean()) for name, values in last.items()}
    return {"round": history.rounds[-1] + 1, "means": {name: v for name, v in means.items() if math.isfinite(v)}}
