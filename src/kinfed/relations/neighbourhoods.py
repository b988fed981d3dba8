"""Among whom a client's mixture is made.

`Everyone`, `Nearest` and `Linked` are parts of `kinfed.Mixture`. `Drawn` is kin's, which draws a list by its weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ..core.field_checks import Count, CountOrZero, Positive, Settings
from ..core.method import Roster
from ..core.rows import active, put, take, zeros
from ..core.seeding import fold, key, normal
from ..core.trees import PerClient, Tree
from ..errors import UsageError
from ..ops.inverted_file import Cells, renew_cells, start_cells
from ..ops.sketch import SIZE, SPARE, candidates, draw_others, nearest, sketch_models


class Sketches(NamedTuple):
    """Sketches of what a server compares, which it keeps, and the cells in which those near a client are found."""

    rows: PerClient  # [N, s]
    cells: Cells | None  # None: they are sorted when they are asked for


class Others(NamedTuple):
    """Whom each of K receivers may learn from: lists of M of the N clients, or a link to each."""

    near: Tensor | None = None  # [K, M] int64, the receiver first; None: all N clients, in their order
    linked: Tensor | None = None  # [K, N] bool; None: all of them
    kept: int = 0  # how many of a list are kept beside the receiver, those most alike


@dataclass(frozen=True)
class Everyone(Settings):
    """All clients that have taken part."""

    def find(self, roster: Roster, sketch: Tree, cohort: Tensor, heard: Tensor) -> Others:
        """Whom the cohort: [K] may learn from, by `Sketches` of what is compared; heard: [N] bool counts at all."""
        return Others()


@dataclass(frozen=True)
class Nearest(Settings):
    """The few most alike, and a sample of the rest, without a table [N, N].

    Distances of sketches propose them, and what is compared ranks them.
    """

    count: Count = 20  # how many others

    def find(self, roster: Roster, sketch: Tree, cohort: Tensor, heard: Tensor) -> Others:
        if self.count >= len(roster) - 1:
            return Others()
        return Others(nearest(sketch.rows, cohort, SPARE * self.count, heard, sketch.cells), kept=self.count)


@dataclass(frozen=True)
class Linked(Settings):
    """The neighbours in the clients' known graph; raises UsageError where there is none."""

    def find(self, roster: Roster, sketch: Tree, cohort: Tensor, heard: Tensor) -> Others:
        if roster.graph is None:
            raise UsageError(
                "among=linked needs a known graph of the clients, and there is none; set federation.graph, or "
                "among=everyone"
            )
        weights = roster.graph.weights
        links = (weights if weights.ndim == 2 else weights.sum(0)).to(cohort.device) != 0
        itself = torch.eye(len(roster), dtype=torch.bool, device=cohort.device)
        return Others(linked=(links | itself)[cohort])


@dataclass(frozen=True)
class Drawn(Settings):
    r"""A few drawn by $a_{ij} = n_j e^{\hat c_{ij} / \tau}$, as the most alike would be those of the luckiest noise.

    By priority sampling (Duffield, Lund and Thorup, 2007) sums over a list, in which each counts
    $\max(1, z_i / a_{ij})$ times, are unbiased for sums over all. $z_i$ belongs to the first that was not taken, and
    $\hat c$ are cosines of sketches.
    """

    count: CountOrZero = 20  # how many others; 0: all
    temperature: Positive = 0.1  # tau

    def find(
        self, roster: Roster, sketch: Tree, mass: Tensor, turns: Tensor, receivers: Tensor, senders: Tensor
    ) -> tuple[Tensor | None, Tensor | float]:
        """[K, M] int64 whom of the senders: [N] receivers: [K] mix, and [K, M] logarithms of how often each counts.

        `Sketches` are of what is compared, mass: [N] is n. Draws change with a client's turns: [N]. A receiver is
        the first in its list if the senders are everyone. None and 0 if all are mixed.
        """
        if not 0 < self.count < len(senders) - 1:
            return None, 0.0
        lots = fold(key(roster.seed, "kin.lists", device=mass.device), roster.tags[receivers])
        lots = fold(lots, turns[receivers])
        everyone = len(senders) == len(roster)
        itself, cells = (receivers, sketch.cells) if everyone else (None, None)
        keys, base, tags = take(sketch.rows, senders), mass.log()[senders], roster.tags[senders]
        queries, turn = sketch.rows[receivers], turns.sum()
        others, often = draw_others(queries, keys, base, self.count, lots, tags, turn, self.temperature, itself, cells)
        if itself is None:
            return others, often
        return torch.cat([receivers[:, None], others], 1), F.pad(often, (1, 0))


def start_sketches(roster: Roster) -> Sketches:
    """The sketches of a server's first state, which nobody has."""
    rows = zeros(len(roster), roster.theta.new_zeros(min(SIZE, len(roster.theta))))
    return Sketches(rows, start_cells(rows))


def sketch_rows(roster: Roster, vectors: Tensor) -> Tensor:
    """[K, s] sketches of what is compared: [K, d]; the same in all rounds, as a server keeps old ones."""
    return sketch_models(vectors, key(roster.seed, "relations.sketch", device=vectors.device), roster.layout)


def renew(roster: Roster, sketch: Sketches, ids: Tensor, vectors: Tensor) -> Sketches:
    """A server's `Sketches` with those of ids: [K], whose vectors: [K, d] are new."""
    return _renew(sketch, ids, sketch_rows(roster, vectors))


def renew_directions(roster: Roster, sketch: Tree, ids: Tensor, vectors: Tensor) -> Tree:
    """The same of vectors whose lengths say nothing: sketches of length 1; () if it keeps none."""
    return _renew(sketch, ids, _directions(sketch_rows(roster, vectors))) if isinstance(sketch, Sketches) else ()


def renew_by_cosine(roster: Roster, sketch: Sketches, ids: Tensor, vectors: Tensor, in_cells: bool) -> Sketches:
    """The same where the nearest are those of the largest cosines; all stay in their cells unless `in_cells`."""
    rows = sketch_rows(roster, vectors)
    return _renew(sketch, ids, rows, by_cosine=True) if in_cells else sketch._replace(rows=put(sketch.rows, ids, rows))


def _renew(sketch: Sketches, ids: Tensor, rows: Tensor, by_cosine: bool = False) -> Sketches:
    keys = put(sketch.rows, ids, rows)
    return Sketches(keys, None if sketch.cells is None else renew_cells(sketch.cells, keys, ids, by_cosine))


def _directions(sketch: Tensor) -> Tensor:
    return F.normalize(sketch, eps=torch.finfo(sketch.dtype).tiny)


def list_alike(roster: Roster, sketch: Tree, seen: Tensor, cohort: Tensor, count: int) -> Tensor | None:
    """[K, M] int64 each of the cohort, and then up to `count` others of most similar sketch: [N, s]; None for everyone.

    These are FedAGHN's lists, which are mixed alone, so no sample stands for the rest. A client without an update of
    its own, by seen: [N] bool, is listed others at random.
    """
    if not isinstance(sketch, Sketches):
        return None
    draw = fold(key(roster.seed, "fedaghn.look", roster.round, device=roster.tags.device), roster.tags[cohort])
    random_direction = vmap(lambda client_key: normal(client_key, sketch.rows[0]))(draw)
    like = torch.where(seen[cohort, None], sketch.rows[cohort], random_direction)
    others = candidates(like, sketch.rows, cohort, count, active(seen), sketch.cells)
    return torch.cat([cohort[:, None], others], 1)
