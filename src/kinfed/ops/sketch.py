"""Approximate nearest clients without a table [N, N]: count sketches propose them."""

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.seeding import fold

SIZE = 509  # numbers in a sketch: estimated cosines are off by 1 / sqrt(509) = 0.04; a prime, so that a weight
#             matrix's columns do not meet in one place
SPARE = 2  # candidates that are compared for each that is kept
BLOCK = 1 << 24  # estimates in memory at once


def count_sketch(theta: Tensor, key: Tensor, size: int) -> Tensor:
    """[..., size] numbers whose inner products estimate those of theta: [..., d] without bias (Charikar et al., 2002).

    Each entry is added, with a random sign, to a random place; places and signs depend on (key, entry) only.
    """
    entry = torch.arange(theta.shape[-1], device=theta.device)
    place = fold(fold(key, 1), entry) % size
    sign = 1 - 2 * (fold(fold(key, 2), entry) & 1)
    none = theta.new_zeros(*theta.shape[:-1], size)
    return none.scatter_add(-1, place.expand_as(theta), theta * sign)


def sketch_models(theta: Tensor, key: Tensor, layout: Layout) -> Tensor:
    """[K, s] sketches of models or updates theta: [K, d]: each entry, with a random sign, is added to its place mod s.

    That is one pass in order of memory. Inner products are estimated without bias, as by `count_sketch`, and exactly if
    theta has no more numbers than a sketch. Buffers are left out.
    """
    entry = torch.arange(theta.shape[1], device=theta.device)
    sign = (1 - 2 * (fold(key, entry) & 1)).to(theta) * layout.trainable_on(theta.device)
    sketch = theta.new_zeros(len(theta), min(SIZE, theta.shape[1]))
    for part, signs in zip(theta.split(SIZE, 1), sign.split(SIZE), strict=True):
        sketch[:, : part.shape[1]].addcmul_(part, signs)
    return sketch


def candidates(queries: Tensor, keys: Tensor, cohort: Tensor, count: int, present: Tensor | None = None) -> Tensor:
    """[K, M] int64 clients: for each of the cohort: [K] the others whose keys have the largest products with its query.

    queries: [K, s], keys: [N, s]; M is `count`, or N - 1 if that is less. Clients with present: [N] False come last,
    and are looked at only if there are too few others.
    """
    ids = None if present is None else _audible(present, count)
    keys = keys if ids is None else keys[ids]
    chosen, step = [cohort.new_empty(0, min(count, len(keys) - 1))], max(1, BLOCK // len(keys))
    for rows, itself in zip(queries.split(step), cohort.split(step), strict=True):
        scores = rows @ keys.T
        if present is None or ids is None:
            scores.scatter_(1, itself[:, None], -torch.inf)
        else:
            scores.masked_fill_(~present[ids], torch.finfo(scores.dtype).min)
            scores.masked_fill_(itself[:, None] == ids, -torch.inf)
        chosen.append(scores.topk(min(count, len(keys) - 1), dim=1).indices)
    return torch.cat(chosen) if ids is None else ids[torch.cat(chosen)]


def draw_others(
    queries: Tensor, keys: Tensor, base: Tensor, count: int, lots: Tensor, tags: Tensor, itself: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[K, M] int64 keys drawn for each query by its weight, and [K, M] logarithms of for how many each of them counts.

    The logarithm of a weight is the product of queries: [K, s] and keys: [N, s], and base: [N]. Priority sampling
    (Duffield, Lund and Thorup, 2007): sums over those that are drawn, each as many times, are unbiased for sums over
    all keys. Draws depend on lots: [K] and tags: [N] only. itself: [K], if given, is the key that is left out of a row.
    M is `count`, which is less than the number of the other keys. A key with a base of minus infinity is drawn last.
    """
    ids = _audible(base > -torch.inf, count)
    keys, base, tags = keys[ids], base[ids], tags[ids]
    chosen, counts = [ids.new_empty(0, count)], [base.new_empty(0, count)]
    step = max(1, BLOCK // 8 // len(keys))  # draws take eight bytes each
    for at in range(0, len(queries), step):
        rows = slice(at, at + step)
        logits = (queries[rows] @ keys.T + base).clamp(min=torch.finfo(keys.dtype).min)
        if itself is not None:
            logits.masked_fill_(itself[rows, None] == ids, -torch.inf)
        chance = ((fold(lots[rows, None], tags) >> 12 & (1 << 51) - 1).to(torch.float64) + 1) / 2**51  # in (0, 1]
        priority, order = (logits - chance.log().to(logits)).topk(count + 1, dim=1)
        order, least = order[:, :-1], priority[:, -1:]
        chosen.append(order)
        counts.append((least - logits.gather(1, order)).nan_to_num(0.0).clamp(min=0))
    return ids[torch.cat(chosen)], torch.cat(counts)


def _audible(present: Tensor, count: int) -> Tensor:
    """[m] ids of those present: [N] bool, in order, with absent ones up to `count` + 2, as lists have one length."""
    absent = (~present).nonzero().squeeze(1)
    spare = absent[: max(0, count + 2 - (len(present) - len(absent)))]
    return present.index_fill(0, spare, True).nonzero().squeeze(1)


def nearest(sketch: Tensor, cohort: Tensor, count: int, present: Tensor | None = None) -> Tensor:
    """[K, M] int64 clients: each of the cohort: [K], and then those whose sketches are nearest, of sketch: [N, s].

    M is `count` + 1, or N if that is less. Clients with present: [N] False come last.
    """
    sketch = sketch - sketch.mean(0)  # nearby models far from the origin would lose all digits
    keys = torch.cat([sketch, sketch.square().sum(1, keepdim=True)], 1)
    queries = torch.cat([2 * sketch[cohort], -torch.ones_like(cohort, dtype=sketch.dtype)[:, None]], 1)
    near = candidates(queries, keys, cohort, count, present)  # 2 a b - b^2 is largest where (a - b)^2 is least
    return torch.cat([cohort[:, None], near], 1)
