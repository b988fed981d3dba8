"""Private sums: what clients upload in a round, clipped, added up and noised, so that no client can be told from it.

The Gaussian mechanism once a round. Two federations are neighbours if a client of one uploads only zeros in the other.
A client may take part in all rounds, so no round is made cheaper by who was drawn.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import UsageError
from ..method import Method, Roster
from ..mixins import weigh
from ..seeding import fold, key, normal
from ..sharing import find_shared_layout, unwrap
from ..training import Training
from ..trees import Axis, Reduction, Tree, axes, pack, read_reductions, unpack
from .privacy import Privacy, noise_for

ABLE = "'fedavg', 'fedrep', 'ditto' or 'fedavg-ft'"  # methods that error messages name
CLIENT = "privacy.unit='client' protects clients"
MASKED = "privacy.masked=true hides uploads"  # in sums over all


def protects_clients(training: Training) -> bool:
    """Whether whole clients are protected, and not rows."""
    return training.privacy is not None and training.privacy.unit == "client"


def find_noise(privacy: Privacy, rounds: int) -> float:
    """The deviation of a round's noise over the clip, if a client takes part in so many rounds."""
    return noise_for(privacy.limit, privacy.delta, 1.0, rounds)


def check_sums(method: Method, roster: Roster, uploads: Tree) -> None:
    """Raise UsageError if a method makes use of single uploads, or if their noised sum could be no model."""
    name = type(unwrap(method)).__name__
    _check_reductions(name, uploads, CLIENT, "unit='row'")
    if getattr(unwrap(method), "row_sums", False):
        raise UsageError(
            f"{name} uploads exact sums over rows, which no clip leaves of use, as privacy.unit='client' needs; use "
            "'private-pooling' for tables, or unit='row' with another method"
        )
    layout = find_shared_layout(method, roster.layout)
    if tree_leaves(uploads) and layout.parameters < layout.size:
        raise UsageError(
            "the model's running statistics, as BatchNorm has them, are averaged over clients, and noise may make a "
            "variance negative; set method.bn to 'local', or use GroupNorm or LayerNorm"
        )


def check_masks(method: Method, sent: Tree, uploads: Tree, statistics: Tree) -> None:
    """Raise UsageError if a method needs more than sums of uploads, or tells clients different things.

    Whoever sends each client a model of its own could choose it so that a sum shows one upload.
    """
    name = type(unwrap(method)).__name__
    _check_reductions(name, uploads, MASKED, "leave masks out")
    shared: Any = Axis.SHARED
    unshared = next((field for field, kind in pack(axes(sent)).items() if kind is not shared), "")
    if tree_leaves(uploads) and unshared:
        raise UsageError(
            f"{name} sends each client '{unshared}' of its own, by which a sum could show one upload, and {MASKED} in "
            f"sums over all; use a method that sends all the same, such as {ABLE}, or leave masks out"
        )
    if tree_leaves(statistics):
        raise UsageError(
            f"{name} has each client report statistics before the first round, and {MASKED} in sums over all; use "
            f"another method, such as {ABLE}, or leave masks out"
        )


def _check_reductions(name: str, uploads: Tree, promise: str, instead: str) -> None:
    """Raise UsageError if a method uses single uploads."""
    for field, kind in pack(read_reductions(uploads)).items():
        if kind is Reduction.NONE:  # type: ignore[comparison-overlap]
            raise UsageError(
                f"{name} uses '{field}' of each client's upload, and {promise} in sums over all; use a method that "
                f"needs the mean of uploads alone, such as {ABLE}, or {instead}"
            )


def sum_privately(method: Method, roster: Roster, cohort: Tensor, sent: Tree, uploads: Tree) -> Tree:
    """What `method.aggregate` gets of the uploads of cohort: [K], whose tensors are [K, ...]: means and sums, noised.

    Of a mean it is the difference from the tensor of the same name that all were sent, if there is one, that is clipped
    and noised. A client's differences and sums together, as one vector, are clipped to `clip`. All clients have the
    same weight. A client whose upload is not finite counts as zero.
    """
    privacy = roster.training.privacy
    assert privacy is not None
    check_sums(method, roster, uploads)
    if not tree_leaves(uploads):
        return uploads
    weights = weigh(method, roster, cohort)
    if (weights != weights[0]).any():
        raise UsageError(
            f"{type(unwrap(method)).__name__} weights clients unequally in a mean, and under privacy.unit='client' "
            "all must weigh the same; let its `weights` be ones"
        )
    tensors, begin = pack(uploads), find_origins(sent, uploads)
    totals = {name: torch.zeros_like(upload[0]) for name, upload in tensors.items()}
    for client in range(len(cohort)):  # one by one, as a table of all differences would be as large as the models
        for name, change in clip(
            {name: t[client] - begin.get(name, 0) for name, t in tensors.items()}, privacy.clip
        ).items():
            totals[name] += change
    deviation = find_noise(privacy, roster.rounds) * privacy.clip
    draw, results = key(roster.seed, "private.sum", roster.round, device=cohort.device), {}
    for number, (name, total) in enumerate(totals.items()):
        total = total + deviation * normal(fold(draw, number), total)
        results[name] = begin[name] + total / len(cohort) if name in begin else total
    return unpack(results, tree_map(lambda t: t[0], uploads))


def clip(changes: dict[str, Tensor], most: float) -> dict[str, Tensor]:
    """The changes as one vector that is no longer than `most`; zero if they are not finite."""
    norm = torch.stack([change.square().sum() for change in changes.values()]).sum().sqrt()
    share = (most / norm.clamp(min=1e-12)).clamp(max=1)
    return {name: torch.where(norm.isfinite(), share * change, 0) for name, change in changes.items()}


def find_origins(sent: Tree, uploads: Tree) -> dict[str, Tensor | float]:
    """By name, where the change of each mean begins: at the tensor of that name that all were sent, or at 0."""
    kinds, axis = pack(read_reductions(uploads)), pack(axes(sent))
    shared = {name: t for name, t in pack(sent).items() if axis[name] is Axis.SHARED}  # type: ignore[comparison-overlap]
    means = [name for name, kind in kinds.items() if kind is Reduction.MEAN]  # type: ignore[comparison-overlap]
    return {name: shared.get(name, 0.0) for name in means}
