"""When a cluster of clients splits in two, and where."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.layout import Layout
from ...core.settings import In, NonNegative, Settings
from ...ops.mixing import weighted_mean
from ...ops.similarity import cosine, gram, inner_by_layer

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cosines(Settings):
    """By cosines of the members' updates, each client's summed over rounds: these say the same at every scale.

    Members with next to nothing in common part, and so do two halves that agree within themselves only.
    """

    low: Annotated[float, In("[-1, 1]")] = 0.2  # a cluster splits where the mean cosine of two members is below this
    gap: NonNegative = 0.2  # or where it is larger within the halves than across the cut by more than this

    def remember(self, before: Tensor, change: Tensor) -> Tensor:
        """[K, d] what is kept of the updates of a cohort: [K, d], and of what was kept before."""
        return before + change

    def cut(self, kept: Tensor, layout: Layout) -> Tensor | None:
        """[K] bool one half of a cluster of which kept: [K, d] is known; None: it stays whole."""
        alike = cosines(kept, layout).cpu().numpy()
        first = _halves(alike, "average")
        pairs = ~np.eye(len(alike), dtype=bool)
        inside = first[:, None] == first
        within, across = alike[inside & pairs], alike[~inside]
        # A client that leaves alone has nobody to agree with.
        clear = 1 < first.sum() < len(first) - 1 and within.mean() - across.mean() > self.gap
        return torch.from_numpy(first) if clear or alike[pairs].mean() < self.low else None


@dataclass(frozen=True)
class Lengths(Settings):
    r"""As in the paper: $\|\mathrm{mean}\,\Delta_i\| < \varepsilon_1$ and $\max \|\Delta_i\| > \varepsilon_2$.

    Both depend on the model and on local training. `linkage="complete"` is what public codes run; "single" gives the
    paper's split, which minimises the largest cosine across the cut.
    """

    eps1: NonNegative = 0.4  # a cluster may split if its mean update is shorter than this
    eps2: NonNegative = 1.6  # and one member's update is longer than this
    linkage: Literal["complete", "single"] = "complete"  # how clusters of clients are merged before the cut into two
    gamma: NonNegative = 0.0  # a split needs sqrt((1 - largest cosine across the cut) / 2) above this

    def remember(self, before: Tensor, change: Tensor) -> Tensor:
        """[K, d] what is kept of the updates of a cohort: [K, d], and of what was kept before."""
        return change

    def cut(self, kept: Tensor, layout: Layout) -> Tensor | None:
        """[K] bool one half of a cluster of which kept: [K, d] is known; None: it stays whole."""
        mean = weighted_mean(kept, torch.ones(len(kept), device=kept.device))
        if mean[layout.trainable_on(kept.device)].norm() >= self.eps1:
            return None
        inner = gram(kept[:, layer.trainable] for layer in layout.layers).inner
        if inner.diagonal().max().sqrt() <= self.eps2:
            return None
        alike = cosine(inner).cpu().numpy()
        first = _halves(alike, self.linkage)
        across = alike[np.ix_(first, ~first)].max()
        return torch.from_numpy(first) if np.sqrt(max(0.0, 1 - across) / 2) > self.gamma else None


def cosines(change: Tensor, layout: Layout) -> Tensor:
    """[K, K] of clients' updates: [K, d]; 0 with one that has none."""
    return cosine(gram(change[:, layer.trainable] for layer in layout.layers).inner, eps=0.0)


def likest(own: Tensor, kept: Tensor, layout: Layout, label: Tensor | None = None) -> Tensor:
    """[M] int64 the cluster whose members' updates, kept: [N, d], have the largest mean cosine with own: [M, d].

    label: [N] int64 is each member's cluster, -1 for one that does not count; None: each is a cluster of its own.
    """
    label = torch.arange(len(kept), device=kept.device) if label is None else label
    member = torch.nn.functional.one_hot(label.clamp(min=0)).to(kept.dtype) * (label >= 0)[:, None]  # [N, C]
    alike = inner_by_layer(own, kept, layout).sum(0)
    rows, columns = (t[:, layout.trainable_on(t.device)].norm(dim=1) for t in (own, kept))
    mean = cosine(alike, rows, columns, eps=0.0).to(kept.dtype) @ member / member.sum(0).clamp(min=1)
    return mean.masked_fill(member.sum(0) == 0, -torch.inf).argmax(1)


def _halves(alike: Floats, linkage: str) -> Bools:
    """[K] bool one of the two groups that hierarchical clustering by cosines: [K, K] merges last."""
    from scipy.cluster import hierarchy  # here, as it would add to every start
    from scipy.spatial.distance import squareform

    tree = hierarchy.linkage(squareform(1 - alike, checks=False), linkage)
    first: Bools = hierarchy.cut_tree(tree, 2)[:, 0] == 0
    return first
