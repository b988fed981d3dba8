"""How a federation is doing, as its server's user asks.

Imports neither Flower nor PyTorch, so that it can be asked often.
"""

import time
from pathlib import Path
from typing import Any

from ..server import status_file
from ..wire import keys
from ..wire.link import PRESENCE
from . import ending, superlink
from .subprocesses import is_alive, secret

SILENT = 40.0  # seconds without a sign of life after which a site is not online; nodes give one every 21 to 27


def read(home: Path) -> dict[str, Any]:
    """The SuperLink of a folder, its sites, and its last run.

    `superlink`: its `address` and whether it is `running`. `run`: None, or `out`, `state` ("running", "finished",
    "failed" or "stopped"), and what it wrote last: `round` of `rounds`, `seconds`, `scores`, `why` it failed. `sites`:
    of each whether it is `online`, and in the run its `rounds` that were used, `missed` ones in a row, bytes `down` and
    `up`, `late` seconds that it has been waited for beyond the others, and why it was `left_out` last.
    """
    link = superlink.read_last(home)
    running = link is not None and is_alive(link.pid, superlink.PROGRAM)
    run, sites = _run(home), {}
    nodes = _members(link)  # the fingerprint of the key by which each site calls
    members = {*nodes.values()}
    if run is not None:
        sites = run.pop("sites", {})
        of_sites = {name: str(site.pop("node", "")) or nodes.get(name, "") for name, site in sites.items()}
        others = {name: node for name, node in nodes.items() if node not in of_sites.values()}  # no gateways of these
        nodes = of_sites | others
    heard = link.link.ask(PRESENCE.decode(), secret(home)) if link and running else {}
    there = {node for node, at in heard.items() if time.time() - at < SILENT and (not members or node in members)}
    online = {name: node in there for name, node in nodes.items()}
    return {
        "superlink": {"address": link.address if link else "", "running": running},
        "run": run,
        "sites": {name: {"online": online[name], **sites.get(name, {})} for name in sorted(online)},
    }


def _members(link: superlink.Started | None) -> dict[str, str]:
    """The fingerprint of each member's key."""
    if link is None or not link.ca:
        return {}
    return {name: keys.fingerprint(key) for key, name in keys.members(Path(link.ca).parent).items()}


def _run(home: Path) -> dict[str, Any] | None:
    """The run that was started last, if any."""
    out = superlink.last_run(home)
    if out is None or not (progress := status_file.read(out)):
        return None
    if progress["state"] == "running" and not ending.process(out):
        progress |= {"state": "stopped", "why": ""}
    return {"out": str(out), **progress}
