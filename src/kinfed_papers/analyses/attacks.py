"""Attacks: what methods keep as more of the clients attack (Panacea, Figure 4)."""

from collections.abc import Sequence

import numpy as np

from kinfed.errors import UsageError
from kinfed.plots.drawing import Array, scale_metric
from kinfed.search.study import Finding, Row, Study, score, setting

from ..plots.scores import scores_by_share


def attacks(
    study: Study,
    methods: Sequence[str] = ("local", "fedavg", "ditto", "panacea"),
    shares: Sequence[float] = (0.0, 0.1, 0.3, 0.5),
    kinds: Sequence[str] = ("poison", "label_flip"),
) -> Finding:
    """The honest clients' test score of each of `methods` under each kind of attack, by the share of attackers.

    With a share of 0 nobody attacks; in Panacea's Figure 4 shares are 0.1 to 0.5. The model is the one that validation
    prefers.
    """
    if not all(0 <= share < 1 for share in shares) or len(set(shares)) < len(shares):
        raise UsageError(
            f"analysis.shares are different shares of clients that attack, from 0 to less than 1, as somebody must be "
            f"left to be scored; got {list(shares)}"
        )
    names = {
        (kind, share, method): f"{kind if share else 'clean'}-{share:g}-{method}"
        for kind in kinds
        for method in methods
        for share in shares
    }
    requested = {
        name: [setting("attack.name", kind), setting("attack.share", share), setting("method.name", method)]
        for (kind, share, method), name in reversed(names.items())  # the clean runs by the first kind
    }
    notes = list[str]()
    folders = study.runs(requested, failed=notes)
    scores = {name: score(folder) for name, folder in folders.items()}
    metric = next(iter(scores.values())).metric
    panels: dict[str, dict[str, Array]] = {}
    rows: list[Row] = []
    for kind in kinds:
        for method in methods:
            of = [scores.get(names[kind, share, method]) for share in shares]
            means = np.array(
                [np.nan if result is None else float(scale_metric(result.test.mean(), metric)) for result in of]
            )
            panels.setdefault(kind, {})[method] = means
            shown = [None if np.isnan(mean) else float(mean) for mean in means]
            rows.append(
                {"attack": kind, "method": method, **dict(zip([f"{at:.0%}" for at in shares], shown, strict=True))}
            )
    picture = study.out / "attacks.png"
    scores_by_share(shares, panels, f"test {metric}", picture)
    return Finding(f"test {metric} of honest clients by the share of attackers", rows, [picture], notes)
