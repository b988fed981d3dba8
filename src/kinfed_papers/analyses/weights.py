"""Weights: the weights between clients under different partitions (pFedGAT, Figure 3; FedAGHN, Table 4)."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from kinfed.core.tasks import Classification
from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.plots.drawing import Array
from kinfed.runs.run_folder import RunFolder
from kinfed.search.study import Finding, Row, Study, setting
from kinfed.verdict.graph_quality import (
    consensus,
    distance_from_uniform,
    edge_auroc,
    group_weights,
    isolation,
    label_overlap,
    row_entropy,
)

from ..plots.relations import relation_grid


def weights(
    study: Study,
    methods: Sequence[str] = ("fedamp", "cfl", "pfedgat", "fedaghn"),
    partitions: Sequence[str] = ("iid", "pathological", "label_groups"),
    overlap: float = 0.5,
) -> Finding:
    """Mean weight of a client for itself, similar clients and others, at the round that validation selects.

    Similar clients are those of one hidden group; if a partition has no groups, those whose label distributions overlap
    by `overlap` or more. A partition has the experiment's settings if the experiment names it, else its defaults.
    """
    dealt = {name: [setting("federation.partition.name", name)] for name in partitions}
    kin = {name: similar(study.federations(overrides), overlap) for name, overrides in dealt.items()}
    folders = study.runs(
        {
            f"{partition}-{method}": [*overrides, setting("method.name", method)]
            for partition, overrides in dealt.items()
            for method in methods
        }
    )
    rows: list[Row] = []
    panels: dict[tuple[str, str], Array] = {}
    for partition, (_, pairs) in kin.items():
        for method in methods:
            relations = [read_selected(run) for run in folders[f"{partition}-{method}"].repeats()]
            panels[method, partition] = relations[0].numpy()
            rows.append({"partition": partition, "method": method, **over_seeds(map(look, relations, pairs))})
    picture = study.out / "weights.png"
    relation_grid(panels, picture, {name: blocks(pairs[0]) for name, (_, pairs) in kin.items()})
    notes = [f"{name}: similar are clients {what}" for name, (what, _) in kin.items()]
    if any(row["entropy"] is None for row in rows):
        notes.append("no entropy, consensus or isolation: some weights are negative, so rows are not distributions")
    return Finding("weights between clients, at the selected round", rows, [picture], notes)


def similar(federations: Sequence[Federation], overlap: float) -> tuple[str, list[Tensor]]:
    """Which pairs of clients are similar, [N, N] bool for each federation, and in words; see `weights`.

    Raises UsageError if there are neither groups nor labels.
    """
    if not 0 < overlap <= 1:
        raise UsageError(f"analysis.overlap is a share of labels, in (0, 1]; got {overlap}")
    groups = [federation.groups for federation in federations if federation.groups is not None]
    if groups:
        return "of one hidden group", [labels[:, None] == labels[None, :] for labels in groups]
    if not isinstance(federations[0].task, Classification):
        raise UsageError(
            "these clients have neither hidden groups nor labels to find similar ones by; choose another partition"
        )
    shared = [label_overlap(federation.class_counts()) for federation in federations]
    return f"whose labels overlap by {overlap:.0%} or more", [overlaps >= overlap for overlaps in shared]


def blocks(pairs: Tensor) -> Array:
    """[N] labels by which a picture sorts clients, so that similar ones, pairs: [N, N], are next to each other."""
    return connected_components(pairs.numpy())[1]


def look(relation: Tensor, pairs: Tensor) -> dict[str, float]:
    """The numbers of one relation, [N, N] or [L, N, N], where pairs: [N, N] are similar; NaN if there are none."""
    itself, within, between = group_weights(relation, pairs)
    positive = bool((relation >= 0).all())
    return {
        "self": itself,
        "similar": within,
        "others": between,
        "entropy": float(row_entropy(relation).mean()) if positive else math.nan,
        "from uniform": float(distance_from_uniform(relation).mean()) if positive else math.nan,
        "consensus": consensus(relation) if positive else math.nan,
        "isolation": isolation(relation) if positive else math.nan,
        "AUROC": edge_auroc(relation, pairs),
    }


def over_seeds(rows: Iterable[dict[str, float]]) -> Row:
    """The means over several seeds, with None for a value that is undefined in any of them."""
    by_seed = list(rows)
    means = {key: fmean([numbers[key] for numbers in by_seed]) for key in by_seed[0]}
    return {key: None if math.isnan(value) else value for key, value in means.items()}


def read_selected(folder: RunFolder) -> Tensor:
    """[N, N] the relation of a run with one seed at the round that validation selects, a mean over layers."""
    relations = folder.read_relations()
    relation = torch.from_numpy(relations.weights[relations.selected])
    return relation.mean(0) if relation.ndim == 3 else relation
