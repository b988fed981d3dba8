"""An inverted file of vectors: one is compared with those of the cells nearest to its own alone."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.rows import put
from ..core.trees import Derived, PerClient, Shared

MANY = 1 << 12  # vectors up to which each is compared with all
POOL = 1 << 11  # vectors with which one is compared at least, and the most of one cell
TURNS, SAMPLE = 5, 16  # of Lloyd's algorithm, and vectors for each centre in them


class Cells(NamedTuple):
    """In which cell each of N vectors lies.

    A vector enters the cell of the nearest centre whenever it is renewed. Centres are found anew once more than `MANY`
    vectors have come, and then whenever as many have been renewed as there were the last time.
    """

    centres: Derived[Shared]  # [C, s]; a single one until more than `MANY` vectors have come
    home: Derived[PerClient]  # [N] int64 the cell of each vector; -1 until it has come
    due: Derived[Shared]  # [] int64 how many are renewed until centres are found anew


def start_cells(keys: Tensor) -> Cells:
    """The cells of keys: [N, s] of which none has come."""
    home = torch.full((len(keys),), -1, device=keys.device)
    return Cells(torch.zeros_like(keys[:1]), home, home.new_zeros(()))


def renew_cells(cells: Cells, keys: Tensor, ids: Tensor, by_cosine: bool = False) -> Cells:
    """The cells once those of keys: [N, s] with ids: [K] are new; `by_cosine`, lengths of keys do not count."""
    home = cells.home
    if (home < 0).all():  # at first, or in a state of before there were cells
        home = keys.any(1).long() - 1
    home = put(home, ids, nearest(take_keys(keys, ids, by_cosine), cells.centres))
    due, come = cells.due - len(ids), (home >= 0).nonzero().squeeze(1)
    if due > 0 or len(come) <= MANY:
        return Cells(cells.centres, home, due.clamp(min=0))
    centres, places = sort_keys(keys, come, by_cosine)
    return Cells(centres, put(home, come, places), due.new_tensor(len(come)))


def take_keys(keys: Tensor, ids: Tensor, by_cosine: bool, into: Tensor | None = None) -> Tensor:
    """[m, s] a copy of the rows ids: [m] of keys: [N, s], of length 1 `by_cosine`; into: [m or more, s] if given."""
    rows = torch.index_select(keys, 0, ids, out=None if into is None else into[: len(ids)])
    return rows.div_(rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)) if by_cosine else rows


def gather_pools(
    queries: Tensor,
    keys: Tensor,
    ids: Tensor,
    count: int,
    block: int,
    cells: Cells | None = None,
    by_cosine: bool = False,
) -> Iterator[tuple[Tensor | slice, Tensor, Tensor]]:
    """Which of keys: [N, s] with ids: [n] each of queries: [K, s] is compared with.

    That is places [k] of queries, ids [m], and a copy of their keys: [m, s], which may be written into. They are all
    up to `MANY`, and else those of the cells nearest to a query's own: at least `count` and `POOL`. They depend on
    the query, keys and cells only. Never more than `block` pairs come at once, unless a single query has so many.
    Without cells that have all keys, keys are sorted here.
    """
    if len(ids) <= max(MANY, 2 * count):
        step = max(1, block // len(ids))
        yield from ((slice(at, at + step), ids, take_keys(keys, ids, by_cosine)) for at in range(0, len(queries), step))
        return
    least = max(POOL, count)
    if cells is not None and len(cells.centres) > 1 and (places := cells.home[ids]).min() >= 0:
        centres = cells.centres
    else:
        centres, places = sort_keys(keys, ids, by_cosine)
    members = places.sort(stable=True)
    sizes = torch.bincount(members.values, minlength=len(centres))
    lists = ids[members.indices].split(sizes.tolist())
    home, memory = nearest(queries, centres), keys.new_empty(2 * least, keys.shape[1])
    for cell in home.unique().tolist():
        order = (centres @ centres[cell] - centres.square().sum(1) / 2).argsort(descending=True, stable=True)
        enough = int((sizes[order].clamp(max=least).cumsum(0) < least).sum()) + 1
        pool = torch.cat([lists[near][:least] for near in order[:enough].tolist()])
        for rows in (home == cell).nonzero().squeeze(1).split(max(1, block // len(pool))):
            yield rows, pool, take_keys(keys, pool, by_cosine, memory)


def sort_keys(keys: Tensor, ids: Tensor, by_cosine: bool) -> tuple[Tensor, Tensor]:
    """[C, s] centres of keys: [N, s] with ids: [n], and [n] int64 which is nearest to each."""
    centres = find_centres(keys, ids, by_cosine)
    return centres, torch.cat([nearest(take_keys(keys, part, by_cosine), centres) for part in ids.split(POOL)])


def find_centres(keys: Tensor, ids: Tensor, by_cosine: bool) -> Tensor:
    """[C, s] centres of keys: [N, s] with ids: [n], about the root of n, by Lloyd's algorithm on a sample of them."""
    count = round(len(ids) ** 0.5)
    sample = take_keys(keys, ids[:: max(1, len(ids) // (SAMPLE * count))], by_cosine)
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
