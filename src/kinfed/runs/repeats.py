"""One experiment with several seeds: a folder for each, and what they have in common."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.history import over_seeds, preferred
from ..core.summary import Summary
from ..verdict.statistics import interval, is_share

OF_ONE: Any = dict.fromkeys(
    (  # what a summary says of one run, or of single clients, others with every seed
        *("names", "clients_scores", "clients_selected", "by_class", "clients_recall", "always", "shape", "outputs"),
        *("classes", "scale", "reason", "workers", "chunk", "onednn", "precision", "device"),
    )
)


def intervals_over(summaries: Sequence[Summary]) -> dict[str, dict[str, Any]]:
    """The interval over seeds of each named model's mean."""
    means = {name: [[one.honest_scores[name]["mean"]] for one in summaries] for name in summaries[0].scores}
    share = is_share(summaries[0].metric)
    return {name: interval(each, share=share).to_dict() for name, each in means.items() if np.isfinite(each).all()}


def run_seeds(summaries: Sequence[Summary], out: str) -> Summary:
    """One summary of several: means over seeds, and the spread over seeds beside the one over clients."""
    first = summaries[0]
    scores = over_seeds([one.scores for one in summaries])
    relation, attack = first.relation, first.attack
    relations = [one.relation or {} for one in summaries]
    if relation is not None:
        shared = [key for key in relation if key != "origin" and all(key in one for one in relations)]
        means = {key: float(np.mean([one[key] for one in relations])) for key in shared}
        relation = {"origin": relation["origin"], **means}
    if attack is not None:  # which clients attack is another draw with every seed
        shown = {key: value for key, value in attack.items() if key != "attackers"}
        attack = shown | {"scores": over_seeds([one.honest_scores for one in summaries])}
    return replace(
        first,
        **OF_ONE,
        intervals=intervals_over(summaries),
        attack=attack,
        warnings=[f"seed {one.seed}: {warning}" for one in summaries for warning in one.warnings],
        seeds=[one.seed for one in summaries],
        scores=scores,
        chosen=preferred(scores, first.selects_highest),
        relation=relation,
        seconds=sum(one.seconds for one in summaries),
        bytes_up=sum(one.bytes_up for one in summaries),
        bytes_down=sum(one.bytes_down for one in summaries),
        out=out,
    )
