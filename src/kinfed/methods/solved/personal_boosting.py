"""Personal boosting: trees grown from sums over all clients' rows, whose leaves each client corrects for itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...core.client import Client
from ...core.field_checks import In, NonNegative, Positive
from ...core.graph import Origin
from ...core.layout import Layout
from ...core.method import Method, Params, Roster
from ...core.metrics import positive
from ...core.mixins import Advises, Explains, Solves
from ...core.rows import put
from ...core.seeding import generator, uniform
from ...core.tasks import Classification, Counts, Forecasting, Quantiles, Regression
from ...core.trees import ModelOf, PerClient, Shared, Summed, Tree
from ...errors import UsageError
from ...models.trees import NOWHERE, Nodes, values
from .monotone_leaves import order_leaves, read_signs

CELLS = 256  # of a column, in which rows are counted to find its bins
REFINED = 3  # rounds in which cells become finer where rows are
SMALLEST, LARGEST = 0.05, 4000.0  # deviations from the mean: the first cells are even up to one, and end at the other
UNIT = 2.0**-24  # of a row's derivatives: sums of its multiples are exact, so nobody's order decides a split
NARROW, PART = 4, 64  # cells of a column that is narrow, at most, and cells that are summed at once
FLAT = 1e-3  # the least curvature of a row
STEEPEST = 0.7  # of a count's logarithm, the most by which a leaf moves it before the rate
STEEP = 20.0  # the largest logarithm of a count over the mean
TINY = 1e-12  # of what is divided by
GAIN = 1e-9  # the least that a split is worth
MEMORY = 0.02  # weight of a new tree in the running estimate of how much clients differ
NEVER = 1e30  # a penalty that leaves nothing


class Sent(NamedTuple):
    """What a client receives; the shapes say what it is to upload: with no tree that grows or ends, counts of rows."""

    theta: ModelOf[Shared]  # [d] all finished trees, and those that grow, whose leaves are still 0
    edges: Shared  # [E, f] the upper ends of cells, later of bins, but for the last
    penalty: Shared  # [T] lambda, in each tree
    cells: Shared  # [S, 1] int64 the column of each cell, see `Upload`
    growing: Shared  # [A, 2] int64 trees of which histograms are asked, and of which level; levels fall by one
    ending: Shared  # [1, 1] int64 the tree whose leaves are summed, or [0, 1]
    finished: Shared  # [] int64 how many trees have leaves
    least: Shared  # [] int64 the fewest trees that a client of the cohort has corrected


class Own(NamedTuple):
    """A client's private state."""

    corrected: Tensor  # [] int64 the trees whose leaves it has corrected
    deviation: Tensor  # [T, L, k] by which its leaves differ from those of all


class Upload(NamedTuple):
    """Sums over a client's rows, of which the server gets those over clients; what a round does not need is empty."""

    cells: Summed  # [S] rows in each cell, column by column, the last one of each being those without a value
    targets: Summed  # [2, k] known targets, and their sum
    histograms: Summed  # [k + h, J, S] derivatives and curvatures (one for all outputs, or one for each) of bins
    leaves: Summed  # [7, L, k] see `leaf_sums`


class Server(NamedTuple):
    """The server's state."""

    theta: Shared  # [d]
    edges: Shared  # [f, E]
    penalty: Shared  # [T]
    ratio: Shared  # [] the variance of clients' leaves over that of a row, as trees so far have it
    step: Shared  # [] int64
    corrected: PerClient  # [N] int64


@dataclass(frozen=True)
class PersonalBoosting(Method, Explains, Advises, Solves):
    r"""$F_i = b + \eta \sum_t (v_{tl} + d_{itl})$ with $l$ the leaf of tree $t$ that $x$ reaches: gradient boosting.

    With first and second derivatives $g$ and $h$ of the loss at a row, $G_{il} = \sum g$ and $H_{il} = \sum h$ over a
    client's rows in a leaf, and $G$, $H$ over everybody's, the split of a node is that of largest gain
    $G_L^2 / (H_L + \mu) + G_R^2 / (H_R + \mu)$, from histograms that are summed over clients, and

    $v_l = G_l / (H_l + \mu)$, $d_{il} = (G_{il} - H_{il} v_l) / (H_{il} + \lambda)$,

    of which $v$ belongs to all, and $d$ never leaves its client. With $\lambda = \infty$ it is boosting on all rows
    (Chen and Guestrin 2016, doi:10.1145/2939672.2939785), with $\lambda = 0$ the leaves are each client's alone. By
    default $\lambda = \mu + \sigma^2 / \tau^2$ with the variance $\tau^2$ of clients' leaves, which sums tell as in
    DerSimonian and Laird 1986 (doi:10.1016/0197-2456(86)90046-2), as a running mean over trees.

    Every round finishes a tree: while one has its leaves summed, the next is a level less deep, and so on.
    """

    rate: Positive = 0.1  # eta
    penalty: Annotated[float, In("[0, inf]")] | None = None  # lambda; None: as the variance of clients' leaves says
    ridge: NonNegative = 1.0  # mu
    least: NonNegative = 10.0  # curvature on each side of a split: of squared errors, rows
    bins: Annotated[int, In("[2, 65)")] = 64  # of a column's histogram, beside that of missing values
    rows: Annotated[float, In("(0, 1]")] = 1.0  # share of the rows, drawn for each round, that decide about splits
    columns: Annotated[float, In("(0, 1]")] = 1.0  # share of the columns, drawn for each tree, that it may read
    origin: ClassVar[Origin] = "fixed"
    class_means: ClassVar[bool] = True  # labels in a bin follow from the first sums
    row_sums: ClassVar[bool] = True
    needs_masks: ClassVar[bool] = True  # at sites: a bin of a client may hold a single row
    takes_gradients: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = True
    weighs: ClassVar[str] = "trees and leaves are made of sums over all rows"

    @property
    def rates(self):
        return ("rate",)

    def start(self, roster):
        shapes, task = _shapes(roster.layout), roster.task
        if not isinstance(task, Classification | Counts | Forecasting | Regression):
            raise UsageError(
                f"personal boosting knows numbers, counts, labels, forecasts and quantiles, not {type(task).__name__}"
            )
        tensors = roster.layout.tensors(roster.theta)
        signs = read_signs(task, tensors)
        if signs is not None and (signs.T * tensors["head.weight"] < 0).any():
            raise UsageError("model.monotone: the linear layer that trees are added to goes the other way; set it to 0")
        like = {"dtype": torch.float64, "device": roster.theta.device}
        reach = math.asinh(LARGEST / SMALLEST)
        edges = SMALLEST * torch.linspace(-reach, reach, CELLS - 1, **like).sinh()
        fixed = NEVER if self.penalty is None else min(self.penalty, NEVER)
        none = torch.zeros((), dtype=torch.int64, device=roster.theta.device)
        return Server(
            roster.theta,
            edges.repeat(shapes["head.weight"][1], 1),
            torch.full(shapes["leaf"][:1], fixed, **like),
            torch.full((), -1.0, **like),
            none,
            none.expand(len(roster)).clone(),
        )

    def send(self, roster, server, cohort):
        tensors = roster.layout.tensors(server.theta)
        depth, trees, grown = _depth(tensors), len(tensors["leaf"]), int(server.step) - REFINED
        like = {"dtype": torch.int64, "device": server.step.device}
        growing = [(grown - level, level) for level in range(depth - 1, -1, -1) if 0 <= grown - level < trees]
        ending = [tree for tree in (grown - depth,) if 0 <= tree < trees]
        finished = torch.tensor(min(max(grown - depth, 0), trees), **like)
        counts = _spans(server.edges)[0].diff()
        cells = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        least = server.corrected[cohort].min() if len(cohort) else server.step
        wanted = torch.tensor(growing, **like).reshape(-1, 2), torch.tensor(ending, **like)[:, None]
        return Sent(server.theta, server.edges.T, server.penalty, cells[:, None], *wanted, finished, least)

    def init_client(self, client):
        leaf = client.model.layout.tensors(client.model.theta)["leaf"]
        return Own(torch.zeros_like(client.size), torch.zeros_like(leaf))

    def train(self, client, state, received):
        x, y, real = client.data
        where, real = _inputs(client, x), real.double()
        edges = received.edges.T.contiguous()
        starts, size = _spans(edges)[0], len(received.cells)
        place = _find_cells(where, edges, starts)  # [f, n]
        growing, ending, none = len(received.growing), len(received.ending), real.new_zeros(0)
        outputs, state = self._correct(client, state, received)
        if not growing and not ending:
            return state, Upload(_sums(place, real[None], size)[0], _targets(client.task, y, real), none, none)
        slope, curvature = _derivatives(client, outputs, y, real)
        tensors = client.model.layout.tensors(received.theta)
        depth, leaves, histograms = _depth(tensors), none, none
        if ending:
            at = _nodes(tensors, int(received.ending), 1).find_leaf(where, depth)[0]
            leaves = leaf_sums(slope, curvature, real, at, 1 << depth)
        if growing:
            rows = torch.cat([slope, curvature], 1) * (uniform(client.key("rows"), real) < self.rows)[:, None]
            nodes = _nodes(tensors, int(received.growing[0, 0]), growing)
            at = _at_levels(nodes, where, received.growing[:, 1].tolist())  # [A, n]
            histograms = _histograms(at, place, rows.T, starts, (1 << depth) - 1)
        return state, Upload(none, none, histograms, leaves)

    def aggregate(self, roster, server, cohort, sums):
        grown, theta = int(server.step) - REFINED, server.theta.clone()
        tensors = roster.layout.tensors(theta)
        after = server._replace(theta=theta, step=server.step + 1)
        if grown < 0:
            cells = _by_column(sums.cells, server.edges)
            if grown < -1:
                return after._replace(edges=_each_column(finer, server.edges, cells, CELLS - 1))
            tensors["head.bias"].copy_(_constant(roster.task, sums.targets))
            return after._replace(edges=_each_column(bins, server.edges, cells, self.bins - 1))
        depth, trees = _depth(tensors), len(tensors["leaf"])
        finished = server.corrected.new_full(cohort.shape, min(max(grown - depth, 0), trees))
        after = after._replace(corrected=put(server.corrected, cohort, finished))
        if sums.leaves.numel():
            slope, curvature = sums.leaves[:2]
            weight = (curvature + self.ridge).clamp(min=TINY)
            shared = _order(roster.task, tensors, grown - depth, slope / weight, weight)
            shared = _bound_leaf(roster.task, shared)
            tensors["leaf"][grown - depth] = self.rate * shared
            if self.penalty is None:
                after = _estimate_penalty(after, sums.leaves, grown - depth, self.ridge)
        if sums.histograms.numel():
            levels = [int(math.log2(j + 1)) for j in range(sums.histograms.shape[1])]
            allowed = torch.stack([self._columns(roster, grown - level, len(server.edges)) for level in levels])
            histograms = _by_column(sums.histograms.movedim(2, 0), server.edges).permute(3, 0, 1, 2)
            signs = read_signs(roster.task, tensors)
            splits = best_splits(histograms, tensors["leaf"].shape[2], self.ridge, self.least, allowed, signs)
            for j, (column, place, lost) in enumerate(torch.stack(splits, 1).tolist()):
                t = grown - levels[j]
                if 0 <= t < trees and column >= 0:
                    tensors["column"][t, j], tensors["lost"][t, j] = column, lost
                    if place < server.edges.shape[1]:  # above it is what is missing alone
                        tensors["threshold"][t, j] = server.edges[column, place]
        return after

    def personalise(self, client, state, received):
        deviation = self._correct(client, state, received)[1].deviation
        at = next(e.at for e in client.model.layout.entries if e.name == "leaf")
        theta, tensors = received.theta, client.model.layout.tensors(received.theta)
        leaf = tensors["leaf"] + deviation
        if (signs := read_signs(client.task, tensors)) is not None:  # rounding may have undone it
            leaf = order_leaves(leaf, torch.ones_like(leaf), _nodes(tensors, 0, len(leaf)), signs)
        return {"mixed": Params(torch.cat([theta[: at.start], leaf.flatten(), theta[at.stop :]]))}

    def relation(self, roster, server, cohort):
        share = roster.weights.to(roster.theta.dtype)
        return share / share.sum()

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return {"how clients differ": server.ratio.clamp(min=0).to(roster.theta.dtype)}

    def _columns(self, roster: Roster, tree: int, count: int) -> Tensor:
        """[f] bool the columns that a tree may read."""
        if self.columns == 1:
            return torch.ones(count, dtype=torch.bool, device=roster.theta.device)
        draw = torch.rand(count, generator=generator(roster.seed, "columns", max(tree, 0)))
        return (draw <= draw.sort().values[max(1, round(self.columns * count)) - 1]).to(roster.theta.device)

    def _correct(self, client: Client, state: Tree, received: Tree) -> tuple[Tensor, Own]:
        """[n, k] the outputs for the client's training rows, and its state, when all finished trees are corrected."""
        x, y, real = client.data
        tensors = client.model.layout.tensors(received.theta)
        where = _inputs(client, x)
        real = real.double()
        outputs = torch.nn.functional.linear(x.flatten(1), tensors["head.weight"], tensors["head.bias"])
        finished, leaf = int(received.finished), tensors["leaf"]
        at = _nodes(tensors, 0, finished).find_leaf(where, _depth(tensors))  # [T', n]
        least, deviations = min(int(received.least), finished), list[Tensor]()
        outputs = outputs + values((leaf + state.deviation)[:least], at[:least]).sum(0)
        for t in range(least, finished):
            slope, curvature = (
                _sums_by_leaf(rows, at[t], leaf.shape[1]) for rows in _derivatives(client, outputs, y, real)
            )
            shared = leaf[t] / self.rate
            weight = (curvature + received.penalty[t]).clamp(min=TINY)
            answer = _order(client.task, tensors, t, shared + (slope - curvature * shared) / weight, weight)
            deviation = self.rate * (_bound_leaf(client.task, answer) - shared)
            deviations.append(torch.where(state.corrected > t, state.deviation[t], deviation.to(leaf.dtype)))
            outputs = outputs + (leaf[t] + deviations[-1])[at[t]]
        after = [deviation[None] for deviation in deviations]
        deviation = torch.cat([state.deviation[:least], *after, state.deviation[finished:]])
        return outputs, Own(torch.full_like(state.corrected, finished), deviation)


def derivatives(task: Any, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] downhill slopes of rows' losses at outputs: [n, k], and curvatures, [n, k], or [n, 1] for all outputs."""
    if isinstance(task, Classification):
        share = outputs.softmax(1)
        # diag(p) - pp' is at most 2 diag(p (1 - p)), with equality for two classes.
        return torch.nn.functional.one_hot(y, task.classes) - share, (2 * share * (1 - share)).clamp(min=FLAT)
    if isinstance(task, Counts):
        mean = outputs.clamp(max=STEEP).exp()
        return y.reshape(outputs.shape) / task.mean - mean, mean.clamp(min=FLAT)
    if isinstance(task, Forecasting):
        present = (~y.isnan()).to(outputs.dtype)[..., None]  # [n, H, 1]
        truth = ((torch.where(y.isnan(), task.mean, y) - task.mean) / task.deviation)[..., None]
        outputs = outputs.reshape(*y.shape, -1)  # [n, H, Q]
        error = truth - outputs
        if isinstance(task, Quantiles):
            error = outputs.new_tensor(task.quantiles) - (error < 0).to(outputs.dtype)
        elif task.error == "absolute":
            error = error.sign()
        return (error * present).flatten(1), present.expand_as(error).flatten(1)
    return task.standardise(y).reshape(outputs.shape) - outputs, torch.ones_like(outputs[:, :1])


def leaf_sums(slope: Tensor, curvature: Tensor, real: Tensor, at: Tensor, count: int) -> Tensor:
    """[7, L, k] one client's sums in each leaf, of rows in leaves at: [n]; slope: [n, k], curvature: [n, h], real: [n].

    They are G, H, the sums of g^2 / h, of G^2 / H and of H^2 over clients, and the numbers of clients and of rows.
    """
    curvature = curvature.expand_as(slope)
    total, weight = _sums_by_leaf(slope, at, count), _sums_by_leaf(curvature, at, count)
    square = _sums_by_leaf(slope.square() / curvature.clamp(min=TINY), at, count)
    there = (weight > 0).double()
    rows = _sums_by_leaf(((curvature > 0) * real[:, None]).double(), at, count)
    return torch.stack([total, weight, square, total.square() / weight.clamp(min=TINY), weight.square(), there, rows])


def difference(sums: Tensor) -> float:
    """How much clients' leaves differ: the variance of g / h between clients over that of a row, by `leaf_sums`.

    NaN if no client has two rows in a leaf, so that nothing is known of the variance of rows.
    """
    total, weight, square, between, squares, clients, rows = sums
    free = float((rows - clients).sum())
    noise = float((square - between).sum()) / free if free > 0 else math.nan
    if not noise > TINY:
        return math.nan
    common = total.square() / weight.clamp(min=TINY)
    excess = (between - common - (clients - 1).clamp(min=0) * noise).sum()
    return max(0.0, float(excess / (weight - squares / weight.clamp(min=TINY)).sum().clamp(min=TINY)) / noise)


def best_splits(
    histograms: Tensor, k: int, ridge: float, least: float, allowed: Tensor, signs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """[J] the column of each node's best split, -1 for none, the last bin that goes left, and 1 if missing goes right.

    histograms: [J, f, B + 1, k + h] are derivatives and curvatures in bins, the last one of what is missing; allowed:
    [J, f] says which columns a node may read, and signs: [f, k] in which order its sides' values must be.
    """
    left, missing = histograms[:, :, :-1].cumsum(2), histograms[:, :, -1:]
    total = left[:, :, -1:] + missing
    sides = torch.stack([torch.stack([left + missing, left]), torch.stack([total - left - missing, total - left])])

    def worth(sums: Tensor) -> Tensor:
        return (sums[..., :k].square() / (sums[..., k:] + ridge).clamp(min=TINY)).sum(-1)

    enough = (sides[..., k:].mean(-1) >= least).all(0) & allowed[:, :, None]  # [2, J, f, B]
    if signs is not None:
        leaf = sides[..., :k] / (sides[..., k:] + ridge).clamp(min=TINY)
        ordered = ((leaf[1] - leaf[0]) * signs[:, None] >= 0).all(-1)
        ordered[..., -1] = True  # what is missing has no order
        enough &= ordered
    gain = torch.where(enough, worth(sides).sum(0) - worth(total), -1.0).movedim(0, -1)  # [J, f, B, 2]
    best, at = gain.flatten(1).max(1)
    column, place = at // gain[0, 0].numel(), at // 2 % gain.shape[2]
    return torch.where(best > GAIN, column, -1), place, at % 2


def finer(edges: Tensor, counts: Tensor, most: int) -> Tensor:
    """At most `most` upper ends of cells, of which there are more where rows are: counts: [len(edges) + 1].

    Half of them part the cells with rows from each other, the fullest ones if these are many; the others lie within
    cells, as evenly over rows as if those of a cell were evenly spread.
    """
    kept = bins(edges, counts, most // 2)
    inner = counts[1:-1]
    total = inner.cumsum(0)
    if not len(total) or total[-1] == 0:
        return kept
    level = (torch.arange(most - len(kept)).to(edges) + 0.5) * total[-1] / (most - len(kept))
    at = torch.searchsorted(total, level).clamp(max=len(inner) - 1)
    share = (level - (total[at] - inner[at])) / inner[at]
    within = edges[at] + share * (edges[at + 1] - edges[at])
    return torch.cat([kept, within]).sort().values


def _find_cells(where: Tensor, edges: Tensor, starts: Tensor) -> Tensor:
    """[f, n] the cell of each of the inputs where: [f, n] among those of all columns, whose begins are starts: [f + 1].

    A column's last cell is of missing values.
    """
    place = starts[:-1, None] + torch.searchsorted(edges, where.double().contiguous())
    place = torch.minimum(place, starts[1:, None] - 2)  # beyond `NOWHERE`, too
    return torch.where(where.isnan(), starts[1:, None] - 1, place)


def bins(edges: Tensor, counts: Tensor, most: int) -> Tensor:
    """At most `most` ends of bins with about as many rows each, midway between cells with rows; see `finer`."""
    full = counts.nonzero().squeeze(1)
    if len(full) < 2:
        return edges[:0]
    middle = (edges[full[:-1]] + edges[full[1:] - 1]) / 2
    if len(middle) <= most:
        return middle
    share = counts[full].cumsum(0)[:-1] / counts.sum()
    level = (torch.arange(most).to(edges) + 1) / (most + 1)
    chosen: Tensor = torch.searchsorted(share, level).clamp(max=len(middle) - 1).unique()
    return middle[chosen]


def _spans(edges: Tensor) -> tuple[Tensor, int]:
    """[f + 1] where the cells of each column begin among all S cells, and S; edges: [f, E]."""
    counts = (edges < NOWHERE).sum(1) + 2
    ends = counts.cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]), int(ends[-1])


def _by_column(sums: Tensor, edges: Tensor) -> Tensor:
    """[f, E + 2, ...] the sums of cells: [S, ...] by column, 0 in cells that it does not have, what is missing last."""
    starts, size = _spans(edges)
    place = starts[:-1, None] + torch.arange(edges.shape[1] + 1, device=edges.device)
    place = torch.where(place < starts[1:, None] - 1, place, size)
    padded = torch.cat([sums, torch.zeros_like(sums[:1])])
    return padded[torch.cat([place, starts[1:, None] - 1], 1)]


def _each_column(place: Callable[[Tensor, Tensor, int], Tensor], edges: Tensor, cells: Tensor, most: int) -> Tensor:
    """[f, most] the edges of each column by `finer` or `bins`; the last ones have nothing above them."""
    columns = edges.new_full((len(edges), most), NOWHERE)
    for column, before, counts in zip(columns, edges, cells, strict=True):
        ends = before[before < NOWHERE]
        new = place(ends, counts[: len(ends) + 1], most)
        column[: len(new)] = new
    return columns


def _constant(task: Any, targets: Tensor) -> Tensor:
    """[k] the outputs that suit the sums of all targets best."""
    mean = targets[1] / positive(targets[0])
    if isinstance(task, Classification | Counts):
        return mean.clamp(min=FLAT).log()
    return mean


def _targets(task: Any, y: Tensor, real: Tensor) -> Tensor:
    """[2, k] how many targets there are, and their sum, both for `_constant`."""
    if isinstance(task, Classification):
        target = torch.nn.functional.one_hot(y, task.classes).double()
    elif isinstance(task, Counts):
        target = y.double().reshape(len(y), 1) / task.mean
    elif isinstance(task, Forecasting):
        target = ((y.double() - task.mean) / task.deviation).repeat_interleave(_quantiles(task), 1)
    else:
        target = task.standardise(y.double()).reshape(len(y), -1)
    present = (~target.isnan()).double() * real[:, None]
    return torch.stack([present.sum(0), (target.nan_to_num() * present).sum(0)])


def _quantiles(task: Forecasting) -> int:
    """How many outputs there are for a reading."""
    return len(task.quantiles) if isinstance(task, Quantiles) else 1


def _estimate_penalty(server: Server, sums: Tensor, tree: int, ridge: float) -> Server:
    """The server with the penalty of a tree, by a running mean of how much clients differ."""
    new, ratio = difference(sums), float(server.ratio)
    if ratio < 0:  # of the first tree
        ratio = new
    elif not math.isnan(new):
        ratio += MEMORY * (new - ratio)
    penalty = server.penalty.clone()
    penalty[tree] = min(NEVER, ridge + 1 / ratio) if ratio > 0 else NEVER
    return server._replace(ratio=torch.full_like(server.ratio, -1.0 if math.isnan(ratio) else ratio), penalty=penalty)


def _derivatives(client: Client, outputs: Tensor, y: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """`derivatives` times real: [n], as how many rows each counts, in multiples of `UNIT`; 0 of those that fill up."""
    weight = real if client.class_weights is None else real * client.class_weights[y]
    slope, curvature = derivatives(client.task, outputs, y)
    return _round(slope.double() * weight[:, None]), _round(curvature.double() * weight[:, None])


def _round(values: Tensor) -> Tensor:
    return (values / UNIT).round() * UNIT


def _histograms(at: Tensor, place: Tensor, rows: Tensor, starts: Tensor, nodes: int) -> Tensor:
    """[c, nodes, S] sums of rows: [c, n] by nodes at: [A, n] and cells place: [f, n], which begin at starts: [f + 1].

    Those by columns of few cells, as indicators of categories have, are matrix products, which take less time. The bits
    are the same, because sums of multiples of `UNIT` are exact.
    """
    size, counts = int(starts[-1]), starts.diff()
    wide = (counts > NARROW).nonzero().flatten()
    sums = _sums(at[:, None] * size + place[wide], rows, nodes * size).reshape(len(rows), nodes, size)
    if len(wide) == len(counts):
        return sums
    every = torch.arange(size, device=starts.device)
    column = torch.arange(len(counts), device=starts.device).repeat_interleave(counts)
    narrow = every[counts[column] <= NARROW]
    reached = (at == torch.arange(nodes, device=at.device)[:, None, None]).any(1)  # [nodes, n]
    lanes = (rows[:, None] * reached).flatten(0, 1)
    parts = [lanes @ (place[column[cells]] == cells[:, None]).to(lanes).T for cells in narrow.split(PART)]
    products = torch.cat(parts, 1).reshape(len(rows), nodes, -1)
    return torch.cat([sums, products], 2)[..., every.scatter(0, narrow, size + every[: len(narrow)])]


def _sums(at: Tensor, rows: Tensor, size: int) -> Tensor:
    """[c, size] sums of rows: [c, n] by places at: [a, f, n] or [f, n]."""
    places, none = at.flatten(), rows.new_zeros(size)
    return torch.stack([none.scatter_add(0, places, row.expand(at.shape).flatten()) for row in rows])


def _sums_by_leaf(rows: Tensor, at: Tensor, count: int) -> Tensor:
    """[L, c] sums of rows: [n, c] by leaves at: [n]."""
    return rows.new_zeros(count, rows.shape[1]).scatter_add(0, at[:, None].expand_as(rows), rows)


def _inputs(client: Client, x: Tensor) -> Tensor:
    """[f, n] inputs of rows x: [n, ...], NaN where a number is missing."""
    module: Any = client.model.module
    return module.with_holes(x.flatten(1)).T


def _at_levels(nodes: Nodes, where: Tensor, levels: list[int]) -> Tensor:
    """[T, n] the node of each tree, at the level of that tree, that inputs where: [f, n] reach; levels fall by one."""
    reached = nodes.walk(where, levels[0])
    return torch.stack([reached[level][place] for place, level in enumerate(levels)])


def _nodes(tensors: dict[str, Tensor], begin: int, count: int) -> Nodes:
    """The inner nodes of so many trees, fewer where there are none."""
    at = slice(max(0, begin), max(0, begin + count))
    return Nodes(tensors["column"][at], tensors["threshold"][at], tensors["lost"][at])


def _order(task: Any, tensors: dict[str, Tensor], tree: int, leaf: Tensor, weight: Tensor) -> Tensor:
    """[L, k] the values of a tree's leaves, leaf: [L, k] with weight: [L, k] or [L, 1], as columns order them."""
    if (signs := read_signs(task, tensors)) is None:
        return leaf
    return order_leaves(leaf[None], weight[None], _nodes(tensors, tree, 1), signs)[0]


def _depth(tensors: dict[str, Tensor]) -> int:
    return int(math.log2(tensors["leaf"].shape[1]))


def _shapes(layout: Layout) -> dict[str, torch.Size]:
    """The shapes of the tensors of `Trees`; raises UsageError if one does not travel."""
    shapes = {entry.name: entry.shape for entry in layout.entries}
    if not {"column", "threshold", "lost", "leaf", "head.weight", "head.bias"} <= shapes.keys():
        raise UsageError("personal boosting grows the model 'trees', all of which travels; set model.name=trees")
    return shapes


def _bound_leaf(task: Any, leaf: Tensor) -> Tensor:
    return leaf.clamp(-STEEPEST, STEEPEST) if isinstance(task, Counts) else leaf
