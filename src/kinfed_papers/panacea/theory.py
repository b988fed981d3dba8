r"""What a graph is worth when some clients send nothing useful: linear graph hypernetworks in closed form.

Panacea's theory (Lin et al., 2025, Section III-C): n clients have true models $\Theta^* = W^* V^* G$: [d, n] with
$W^*$: [d, k] and client embeddings $V^*$: [k, n], one column a client; $G = \tilde G^L$ averages over neighbourhoods.
W* is known, V is fitted by gradient descent from V0 to all clients but the first m, and the risk is
$\frac1n \|\Theta^* - W^* V G\|_F^2$. The entries of W*, V* and V0 are standard normal.
"""

from typing import NamedTuple

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from kinfed.core.seeding import generator
from kinfed.errors import UsageError


class Estimate(NamedTuple):
    """A mean over draws and its standard error."""

    mean: float
    error: float


def mean_aggregation(adjacency: Tensor, layers: int = 1, printed: bool = False) -> Tensor:
    r"""G: [n, n] float64, $\tilde G = (A + I) D^{-1}$ to the power `layers`; D counts a client's neighbours and itself.

    adjacency: [n, n] of 0 and 1, symmetric. With clients in columns this takes means and its columns sum to one, as
    Properties III.1 to III.3 say. `printed=True` gives the transpose, which Definition III.5 prints and for which they
    fail. Raises UsageError if adjacency is not such a matrix.
    """
    a = adjacency.to(torch.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not torch.equal(a, a.T) or not ((a == 0) | (a == 1)).all():
        raise UsageError(f"adjacency must be a symmetric [n, n] of 0 and 1; got {list(a.shape)} {adjacency.dtype}")
    if layers < 1:
        raise UsageError(f"layers must be at least 1; got {layers}")
    a = a.clone().fill_diagonal_(1)
    step = a / a.sum(0)
    return torch.linalg.matrix_power(step.T if printed else step, layers)


def measure_residual(g: Tensor, m: int) -> float:
    r"""$r(G, m) = \|(I - P P^+) Q\|_F^2$: squared distance of the first m columns from the span of the others.

    Lemma III.4: from 0, where the others span them, to m, where the m clients have no neighbour.
    """
    return float(_residual(g, m).square().sum())


def risk_without_graph(n: int, m: int, d: int, k: int) -> float:
    r"""Theorem III.2: $2 d k m / n$, what pFedHN expects."""
    _check(n, m, d, k)
    return 2 * d * k * m / n


def risk_with_graph(g: Tensor, m: int, d: int, k: int, consistent: bool = False) -> float:
    r"""Theorem III.3: $\frac{2dk}{n} r(G, m)$, for embeddings V* drawn independently.

    The theorem also assumes $V^* G = V^*$, which no independent embeddings satisfy: it makes every row of V* constant
    on each connected component. `consistent=True` is the risk under that assumption, with one standard normal
    embedding a component: $\frac{dk}{n} (\|C (I - P P^+) Q\|_F^2 + r)$, rows of C: [components, n] being indicators.
    """
    _check(len(g), m, d, k)
    rest = _residual(g, m)
    theirs = components(g).T @ rest if consistent else rest
    return float(d * k / len(g) * (theirs.square().sum() + rest.square().sum()))


def components(g: Tensor) -> Tensor:
    """[n, c] indicators of the connected components of an aggregation [n, n]."""
    count, label = connected_components((g > 0).numpy(), directed=False)
    return torch.eye(count, dtype=torch.float64)[torch.from_numpy(label).long()]


def best_rank(theta: Tensor, g: Tensor, k: int) -> tuple[Tensor, Tensor]:
    r"""Theorem III.1: W: [d, k] and V: [k, n] for which W V G is the best approximation of theta: [d, n] of rank k.

    The product is unique if $\sigma_k > \sigma_{k+1}$. Raises UsageError if G is singular: then not every matrix of
    rank k is of this form, and the theorem does not apply.
    """
    if torch.linalg.matrix_rank(g) < len(g):
        raise UsageError("Theorem III.1 needs an aggregation of full rank; this graph's is singular")
    u, s, vh = torch.linalg.svd(theta, full_matrices=False)
    return u[:, :k] * s[:k], torch.linalg.solve(g.T, vh[:k].T).T


def simulate(g: Tensor, m: int, d: int, k: int, draws: int = 1000, seed: int = 0, consistent: bool = False) -> Estimate:
    r"""The risk on average over drawn W*, V* and V0, once gradient descent from V0 has ended.

    It ends at $V_0 + (V^* - V_0) P P^+$: it only moves in the span of the columns that it is fitted to. G = I is
    pFedHN. `consistent=True` draws one embedding a component.
    """
    _check(len(g), m, d, k)
    n, draw = len(g), generator(seed, "theory")
    normal = {"generator": draw, "dtype": torch.float64}
    w = torch.randn(draws, d, k, **normal)  # type: ignore[call-overload]
    start = torch.randn(draws, k, n, **normal)  # type: ignore[call-overload]
    if consistent:
        groups = components(g)
        true = torch.randn(draws, k, groups.shape[1], **normal) @ groups.T  # type: ignore[call-overload]
    else:
        true = torch.randn(draws, k, n, **normal)  # type: ignore[call-overload]
    seen = g[:, m:]
    fitted = start + (true - start) @ (seen @ torch.linalg.pinv(seen))
    risk = (w @ (true - fitted) @ g).square().sum((1, 2)) / n  # [draws]
    return Estimate(float(risk.mean()), float(risk.std() / draws**0.5))


def _residual(g: Tensor, m: int) -> Tensor:
    """[n, m] what of the first m columns is outside the span of the others."""
    if not 0 <= m < len(g):
        raise UsageError(f"m, the clients without useful updates, must be at least 0 and below n = {len(g)}; got {m}")
    rest, lost = g[:, m:], g[:, :m]
    return lost - rest @ (torch.linalg.pinv(rest) @ lost)


def _check(n: int, m: int, d: int, k: int) -> None:
    if not (d > n > k >= 1 and 0 <= m <= n - k):
        raise UsageError(f"the theory needs d > n > k >= 1 and 0 <= m <= n - k; got d={d}, n={n}, k={k}, m={m}")
