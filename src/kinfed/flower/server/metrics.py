"""What Prometheus reads of a federation: /metrics, served on this machine.

python -m kinfed.flower.server.metrics HOME PORT
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import RunError
from . import status

SITES = {  # of each site
    "online": ("site_online", "1 if the site gave a sign of life within the last 40 seconds"),
    "rounds": ("site_used_rounds", "Rounds of the run whose upload was used"),
    "missed": ("site_missed_rounds", "Rounds in a row that the site was drawn for without replying"),
    "down": ("site_down_bytes", "Bytes sent to the site in the run"),
    "up": ("site_up_bytes", "Bytes that came from the site in the run"),
    "late": ("site_late_seconds", "Seconds that the site has been waited for while others have replied"),
}
RUN = {
    "round": ("round", "Rounds that are over"),
    "rounds": ("rounds", "Rounds that the run has in all"),
    "seconds": ("run_seconds", "What the run has taken"),
    "at": ("run_written_timestamp_seconds", "When the run last wrote down how it is doing"),
}


class Federation:
    """Reads a federation's status whenever it is asked."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def collect(self) -> Iterator[Any]:
        """All metrics; their names begin with kinfed_."""
        from prometheus_client.core import GaugeMetricFamily

        def gauge(name: str, help: str, labels: tuple[str, ...], rows: Sequence[tuple[list[str], float]]) -> Any:
            family = GaugeMetricFamily(f"kinfed_{name}", help, labels=labels)
            for values, number in rows:
                family.add_metric(values, number)
            return family

        try:
            now = status.read(self._home)
        except RunError:  # Flower's database is locked, or just being made
            return
        run, sites = now["run"], now["sites"]
        yield gauge("superlink_up", "1 if the SuperLink runs", (), [([], now["superlink"]["running"])])
        for key, (name, help) in SITES.items():
            yield gauge(name, help, ("site",), [([site], facts[key]) for site, facts in sites.items() if key in facts])
        left = [([site], bool(facts.get("left_out"))) for site, facts in sites.items()]
        yield gauge("site_left_out", "1 if the site was left out when it was last asked", ("site",), left)
        if run is None:
            return
        states = [([state], state == run["state"]) for state in ("running", "finished", "failed", "stopped")]
        yield gauge("run_state", "1 for the state that the run is in", ("state",), states)
        for key, (name, help) in RUN.items():
            yield gauge(name, help, (), [([], run[key])])
        scores = [(key.split("/", 2), value) for key, value in run["scores"].get("means", {}).items()]
        yield gauge("score", "Mean over sites, after the last evaluated round", ("split", "metric", "model"), scores)


def serve(home: Path, port: int) -> None:
    """Serve until this process is ended."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(Federation(home))
    start_http_server(port, "127.0.0.1", registry)
    threading.Event().wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
