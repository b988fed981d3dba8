"""Approximate nearest clients without a table [N, N]: count sketches propose them."""

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.seeding import fold

SIZE = 512  # numbers in a sketch: estimated cosines are off by 1 / sqrt(512) = 0.04
SPARE = 2  # candidates that are compared for each that is kept
BLOCK = 1 << 24  # estimates in memory at once
FOLD = 4093  # numbers in a folded sketch: a prime, so that a weight matrix's columns do not meet in one place


def count_sketch(theta: Tensor, key: Tensor, size: int) -> Tensor:
    """[..., size] numbers whose inner products estimate those of theta: [..., d] without bias (Charikar et al., 2002).

    Each entry is added, with a random sign, to a random place; places and signs depend on (key, entry) only.
    """
    entry = torch.arange(theta.shape[-1], device=theta.device)
    place = fold(fold(key, 1), entry) % size
    sign = 1 - 2 * (fold(fold(key, 2), entry) & 1)
    none = theta.new_zeros(*theta.shape[:-1], size)
    return none.scatter_add(-1, place.expand_as(theta), theta * sign)


def sketch_models(theta: Tensor, key: Tensor, learned: Tensor, size: int = SIZE) -> Tensor:
    """[K, size] sketches of models or updates theta: [K, d], of the entries learned: [d] only."""
    return count_sketch(theta if learned.all() else theta * learned, key, size)


def fold_models(theta: Tensor, key: Tensor, layout: Layout, size: int = FOLD) -> Tensor:
    """[K, size] sketches of theta: [K, d]: each entry, with a random sign, is added to its place modulo size.

    That is one pass in order of memory. Inner products are estimated without bias, as by `count_sketch`, and exactly if
    theta has no more numbers than a sketch. Buffers are left out.
    """
    entry = torch.arange(theta.shape[1], device=theta.device)
    sign = (1 - 2 * (fold(key, entry) & 1)).to(theta) * layout.trainable_on(theta.device)
    sketch = theta.new_zeros(len(theta), min(size, theta.shape[1]))
    for part, signs in zip(theta.split(size, 1), sign.split(size), strict=True):
        sketch[:, : part.shape[1]].addcmul_(part, signs)
    return sketch


def candidates(queries: Tensor, keys: Tensor, cohort: Tensor, count: int, present: Tensor | None = None) -> Tensor:
    """[K, M] int64 clients: for each of the cohort: [K] the others whose keys have the largest products with its query.

    queries: [K, s], keys: [N, s]; M is `count`, or N - 1 if that is less. Clients with known: [N] False come last.
    """
    chosen, step = [], max(1, BLOCK // len(keys))
    for rows, itself in zip(queries.split(step), cohort.split(step), strict=True):
        scores = rows @ keys.T
        if present is not None:
            scores.masked_fill_(~present, torch.finfo(scores.dtype).min)
        scores.scatter_(1, itself[:, None], -torch.inf)
        chosen.append(scores.topk(min(count, len(keys) - 1), dim=1).indices)
    return torch.cat(chosen)


def draw_others(
    queries: Tensor, keys: Tensor, base: Tensor, count: int, lots: Tensor, tags: Tensor, itself: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[K, M] int64 keys drawn for each query by its weight, and [K, M] logarithms of for how many each of them counts.

    The logarithm of a weight is the product of queries: [K, s] and keys: [N, s], and base: [N]. Priority sampling
    (Duffield, Lund and Thorup, 2007): sums over those that are drawn, each as many times, are unbiased for sums over
    all keys. Draws depend on lots: [K] and tags: [N] only. itself: [K], if given, is the key that is left out of a row.
    M is `count`, which is less than the number of the other keys.
    """
    chosen, counts, step = [], [], max(1, BLOCK // 8 // len(keys))  # draws take eight bytes each
    for at in range(0, len(queries), step):
        rows = slice(at, at + step)
        logits = queries[rows] @ keys.T + base
        if itself is not None:
            logits.scatter_(1, itself[rows, None], -torch.inf)
        chance = ((fold(lots[rows, None], tags) >> 12 & (1 << 51) - 1).to(torch.float64) + 1) / 2**51  # in (0, 1]
        priority, order = (logits - chance.log().to(logits)).topk(count + 1, dim=1)
        order, least = order[:, :-1], priority[:, -1:]
        chosen.append(order)
        counts.append((least - logits.gather(1, order)).nan_to_num(0.0).clamp(min=0))
    return torch.cat(chosen), torch.cat(counts)


def nearest(sketch: Tensor, cohort: Tensor, count: int) -> Tensor:
    """[K, M] int64 clients: each of the cohort: [K], and then those whose sketches are nearest, of sketch: [N, s].

    M is `count` + 1, or N if that is less.
    """
    sketch = sketch - sketch.mean(0)  # nearby models far from the origin would lose all digits
    keys = torch.cat([sketch, sketch.square().sum(1, keepdim=True)], 1)
    queries = torch.cat([2 * sketch[cohort], -torch.ones_like(cohort, dtype=sketch.dtype)[:, None]], 1)
    near = candidates(queries, keys, cohort, count)  # 2 a b - b^2 is largest where (a - b)^2 is least
    return torch.cat([cohort[:, None], near], 1)
