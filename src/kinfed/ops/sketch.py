"""Approximate nearest clients without a table [N, N]: count sketches propose them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.layout import Layout
from ..core.rows import take
from ..core.seeding import fold
from .inverted_file import Cells, gather_pools, take_keys
from .similarity import PANEL

SIZE = 509  # numbers in a sketch: estimated cosines are off by 1 / sqrt(509) = 0.04; a prime, so that a weight
#             matrix's columns do not meet in one place
SPARE = 2  # candidates that are compared for each that is kept
BLOCK = 1 << 24  # estimates in memory at once
REST = 1 << 8  # clients that stand for all that a list is not drawn from


def count_sketch(theta: Tensor, key: Tensor, size: int) -> Tensor:
    """[..., size] numbers whose inner products estimate those of theta: [..., d] without bias (Charikar et al., 2002).

    Each entry is added, with a random sign, to a random place; places and signs depend on (key, entry) only.
    """
    entry = torch.arange(theta.shape[-1], device=theta.device)
    place = fold(fold(key, 1), entry) % size
    sign = (1 - 2 * (fold(fold(key, 2), entry) & 1)).to(theta)
    sketch = theta.new_zeros(*theta.shape[:-1], size)
    if theta.ndim == 1:
        return sketch.scatter_add(-1, place, theta * sign)
    count = max(1, PANEL // max(1, theta.shape[-1]))
    for rows, into in zip(theta.split(count), sketch.split(count), strict=True):
        into.scatter_add_(-1, place.expand_as(rows), rows * sign)
    return sketch


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


def candidates(
    queries: Tensor, keys: Tensor, cohort: Tensor, count: int, present: Tensor, cells: Cells | None = None
) -> Tensor:
    """[K, M] int64 clients: for each of the cohort: [K] the others whose keys have the largest products with its query.

    queries: [K, s], keys: [N, s]; M is `count`, or N - 1 if that is less. Clients with present: [N] False come last,
    and are looked at only if there are too few others. Of very many keys those are looked at that lie in the cells near
    a query's own, see `gather_pools`.
    """
    ids = _audible(present, count)
    chosen = ids.new_empty(len(queries), min(count, len(ids) - 1))
    for rows, at, pool in gather_pools(queries, keys, ids, count + 2, BLOCK, cells):
        chosen[rows] = _choose(queries[rows] @ pool.T, at, cohort[rows], chosen.shape[1], present)
    return chosen


def draw_others(
    queries: Tensor,
    keys: Tensor,
    base: Tensor,
    count: int,
    lots: Tensor,
    tags: Tensor,
    turn: Tensor,
    temperature: float,
    itself: Tensor | None = None,
    cells: Cells | None = None,
) -> tuple[Tensor, Tensor]:
    """[K, M] int64 keys drawn for each query by its weight, and [K, M] logarithms of for how many each of them counts.

    The logarithm of a weight is the cosine of queries: [K, s] and keys: [N, s] over a temperature, and base: [N].
    Priority sampling (Duffield, Lund and Thorup, 2007): sums over those that are drawn, each as many times, are
    unbiased for sums over all keys. Draws depend on lots: [K] and tags: [N], and on turn: []. itself: [K], if given, is
    the key that is left out of a row. M is `count`, which is less than the number of the other keys. A key with a base
    of minus infinity is drawn last. Of very many keys those are looked at that lie in the cells near a query's own, see
    `gather_pools`, and `REST` others, the same for all queries of a turn, which count for those that nobody looks at.
    """
    queries = F.normalize(queries, eps=torch.finfo(queries.dtype).tiny)
    ids = _audible(base > -torch.inf, count)
    chosen, counts = ids.new_empty(len(queries), count), base.new_empty(len(queries), count)
    sample = ids[fold(tags[ids], turn).argsort()[:REST]]
    of_sample = (queries / temperature) @ take_keys(keys, sample, by_cosine=True).T
    for rows, at, pool in gather_pools(queries, keys, ids, count + 2, BLOCK // 8, cells, by_cosine=True):  # of 8 bytes
        more, logits = torch.zeros_like(base[at]), (queries[rows] / temperature) @ pool.T
        if len(at) < len(ids):
            left = torch.ones_like(base, dtype=torch.bool).index_fill(0, at, False)[sample]
            times = base.new_tensor((len(ids) - len(at)) / int(left.sum())).log()
            at, more = torch.cat([at, sample[left]]), torch.cat([more, times.expand(int(left.sum()))])
            logits = torch.cat([logits, of_sample[rows][:, left]], 1)
        logits = (logits + (base[at] + more)).clamp(min=torch.finfo(keys.dtype).min)
        if itself is not None:
            logits.masked_fill_(itself[rows, None] == at, -torch.inf)
        chance = ((fold(lots[rows, None], tags[at]) >> 12 & (1 << 51) - 1).to(torch.float64) + 1) / 2**51  # in (0, 1]
        priority, order = (logits - chance.log().to(logits)).topk(count + 1, dim=1)
        order, least = order[:, :-1], priority[:, -1:]
        chosen[rows] = at[order]
        counts[rows] = (least - logits.gather(1, order)).nan_to_num(0.0).clamp(min=0) + more[order]
    return chosen, counts


def _audible(present: Tensor, count: int) -> Tensor:
    """[m] ids of those present: [N] bool, in order, with absent ones up to `count` + 2, as lists have one length."""
    absent = (~present).nonzero().squeeze(1)
    spare = absent[: max(0, count + 2 - (len(present) - len(absent)))]
    return present.index_fill(0, spare, True).nonzero().squeeze(1)


def nearest(sketch: Tensor, cohort: Tensor, count: int, present: Tensor, cells: Cells | None = None) -> Tensor:
    """[K, M] int64 clients: each of the cohort: [K], and then those whose sketches are nearest, of sketch: [N, s].

    M is `count` + 1, or N if that is less. Clients with present: [N] False come last, and are looked at only if there
    are too few others.
    """
    ids, queries = _audible(present, count), take(sketch, cohort)
    chosen = ids.new_empty(len(queries), min(count, len(ids) - 1))
    for rows, at, keys in gather_pools(queries, sketch, ids, count + 2, BLOCK, cells):
        middle = keys.mean(0)  # nearby models far from the origin would lose all digits
        keys -= middle
        scores = (queries[rows] - middle) @ keys.T
        scores -= keys.square().sum(1) / 2  # a b - b^2 / 2 is largest where (a - b)^2 is least
        chosen[rows] = _choose(scores, at, cohort[rows], chosen.shape[1], present)
    return torch.cat([cohort[:, None], chosen], 1)


def _choose(scores: Tensor, ids: Tensor, cohort: Tensor, count: int, present: Tensor) -> Tensor:
    """[k, M] int64 those of ids: [m] with the largest scores: [k, m] for each of the cohort: [k], but not itself.

    Those that are not present: [N] bool come last.
    """
    scores.masked_fill_(~present[ids], torch.finfo(scores.dtype).min)
    scores.masked_fill_(cohort[:, None] == ids, -torch.inf)
    return ids[scores.topk(count, dim=1).indices]
