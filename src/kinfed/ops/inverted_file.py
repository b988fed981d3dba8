"""An inverted file of vectors: one is compared with those of the cells nearest to its own alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

MANY = 1 << 12  # vectors up to which each is compared with all
POOL = 1 << 11  # vectors with which one is compared at least, and the most of one cell
TURNS, SAMPLE = 5, 16  # of Lloyd's algorithm, and vectors for each centre in them


def gather_pools(
    queries: Tensor, keys: Tensor, count: int, block: int
) -> Iterator[tuple[Tensor | slice, Tensor | slice]]:
    """Which of keys: [n, s] each of queries: [K, s] is compared with: places [k] of queries, and those [m] of keys.

    All up to `MANY`, and else those of the cells nearest to a query's own: at least `count` and `POOL`. They depend on
    the query and on keys only. Never more than `block` pairs come at once, unless a single query has so many.
    """
    if len(keys) <= max(MANY, 2 * count):
        step = max(1, block // len(keys))
        yield from ((slice(at, at + step), slice(None)) for at in range(0, len(queries), step))
        return
    centres, least = find_centres(keys), max(POOL, count)
    members = nearest(keys, centres).sort(stable=True)
    sizes = torch.bincount(members.values, minlength=len(centres))
    cells = members.indices.split(sizes.tolist())
    home = nearest(queries, centres)
    for cell in home.unique().tolist():
        order = (centres @ centres[cell] - centres.square().sum(1) / 2).argsort(descending=True, stable=True)
        enough = int((sizes[order].clamp(max=least).cumsum(0) < least).sum()) + 1
        places = torch.cat([cells[near][:least] for near in order[:enough].tolist()])
        for rows in (home == cell).nonzero().squeeze(1).split(max(1, block // len(places))):
            yield rows, places


def find_centres(keys: Tensor) -> Tensor:
    """[C, s] centres of keys: [n, s], about as many as the root of n, by Lloyd's algorithm on a sample of them."""
    count = round(len(keys) ** 0.5)
    sample = keys[:: max(1, len(keys) // (SAMPLE * count))]
    centres = sample[:: max(1, len(sample) // count)]
    for _ in range(TURNS):
        home = nearest(sample, centres)
        sizes = torch.bincount(home, minlength=len(centres)).to(keys)[:, None]
        means = torch.zeros_like(centres).index_add(0, home, sample) / sizes.clamp(min=1)
        centres = torch.where(sizes > 0, means, centres)
    return centres


def nearest(keys: Tensor, centres: Tensor) -> Tensor:
    """[n] int64 which of centres: [C, s] is nearest to each of keys: [n, s]; of equal ones the first."""
    half = centres.square().sum(1) / 2
    return torch.cat([(part @ centres.T - half).argmax(1) for part in keys.split(POOL)])
