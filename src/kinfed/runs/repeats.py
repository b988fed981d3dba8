"""One experiment with several seeds: a folder for each, and what they have in common."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.history import over_seeds
from ..core.round_selection import select_model
from ..core.summary import Summary
from ..verdict.statistics import interval

# What a summary says of one run, others with every seed.
DATA: Any = dict.fromkeys(("shape", "outputs", "classes", "scale"))
COST: Any = dict.fromkeys(("reason", "workers", "chunk", "onednn", "precision", "device"))


def intervals_over(summaries: Sequence[Summary]) -> dict[str, dict[str, Any]]:
    """The interval over seeds of each named model's mean."""
    means = {name: [[one.honest_scores[name]["mean"]] for one in summaries] for name in summaries[0].scores}
    share = summaries[0].metric.is_share
    return {name: interval(each, share=share).to_dict() for name, each in means.items() if np.isfinite(each).all()}


def run_seeds(summaries: Sequence[Summary], out: str) -> Summary:
    """One summary of several: means over seeds, and the spread over seeds beside the one over clients."""
    first, costs = summaries[0], [one.cost for one in summaries]
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
        by_client=None,
        recall=None,
        data=replace(first.data, **DATA),
        cost=replace(
            first.cost,
            **COST,
            seconds=sum(one.seconds for one in costs),
            bytes_up=sum(one.bytes_up for one in costs),
            bytes_down=sum(one.bytes_down for one in costs),
        ),
        intervals=intervals_over(summaries),
        attack=attack,
        warnings=[f"seed {one.seed}: {warning}" for one in summaries for warning in one.warnings],
        seeds=[one.seed for one in summaries],
        scores=scores,
        selection=replace(first.selection, chosen=select_model(scores, first.selection.higher_is_better)),
        relation=relation,
        out=out,
    )
