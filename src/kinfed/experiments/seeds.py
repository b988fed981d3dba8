"""One experiment with several seeds: a folder for each, and what they have in common."""

from pathlib import Path
from typing import Any

import numpy as np

from ..core.history import over_seeds, preferred, selects_highest


def run_seeds(found: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """One summary of several: means over seeds, and the spread over seeds beside the one over clients."""
    first = found[0]
    scores = over_seeds([f["scores"] for f in found])
    relation = first["relation"]
    if relation is not None:
        numbers = {
            key: float(np.mean([f["relation"][key] for f in found]))
            for key in relation
            if key != "origin" and all(key in f["relation"] for f in found)
        }
        relation = {"origin": relation["origin"], **numbers}
    kept = (
        "method",
        "dataset",
        "federation",
        "rounds",
        "clients",
        "parameters",
        "metric",
        "higher_is_better",
        "selected_by",
        "executor",
        "sharing",
        "leaking",
        "caution",
    )
    attacked = {}
    if "attack" in first:  # which clients attack is another draw with every seed
        shown = {key: value for key, value in first["attack"].items() if key != "attackers"}
        attacked["attack"] = shown | {"scores": over_seeds([f["attack"]["scores"] for f in found])}
    return {
        **{key: first[key] for key in kept},
        **attacked,
        "warnings": [f"seed {one['seed']}: {warning}" for one in found for warning in one["warnings"]],
        "seed": first["seed"],
        "seeds": [f["seed"] for f in found],
        "scores": scores,
        "chosen": preferred(scores, selects_highest(first)),
        "relation": relation,
        **{key: sum(f[key] for f in found) for key in ("seconds", "bytes_up", "bytes_down")},
        "out": str(out),
    }
