"""Partial pooling: linear models solved from sums over rows, each client's as near to all clients' as the rows say."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ...core.client import Client
from ...core.field_checks import Count, NonNegative, Positive
from ...core.graph import Origin
from ...core.layout import Layout
from ...core.method import Method, Params
from ...core.mixins import Advises, Explains, Solves
from ...core.rows import put
from ...core.tasks import Classification, Counts, Forecasting, Quantiles, Regression
from ...core.trees import Pairwise, PerClient, Shared, Tree
from ...errors import UsageError
from ...models.changes import Since
from ...models.log_linear import Exponential
from .own_ridge import About, lean

LEAST, MOST = 1e-8, 1e8  # bounds of variances and of penalties, in squared standard deviations
GROWS = 2  # rounds after the first, each of four times the steps of the one before, if data bring nothing new
ROUNDING = 1e-9  # of a matrix's largest eigenvalue, the least that is told from 0
FARTHEST = 30.0  # steps that a leap takes at once
SETTLED = 1e-3  # a change of coefficients that is none
DRAWN = 3  # rounds in which the kin of clients are found; then these stay as they are, and the rest is solved
SAME = 1e-5  # of a column that is the same in all rows of every client, in place of its variance
FAR = 10.0  # how much farther a step of Newton's method may move an output than it has come
STEEP = 20.0  # the largest logarithm of a count over the mean
USUAL = 0.5  # clients of the usual variance, the geometric mean of all columns, that are added where one is estimated
PAST = 0.5  # of the slope with which a step of Newton's method began, the largest with which it may climb at its end
SHORTEST = 0.1  # of a step that went too far, the least that is taken
TOGETHER = 256  # clients whose own ridges are solved at once
NUMBERS = 1 << 27  # of all clients' sums, the most that a server keeps: 1 GiB


class Sums(NamedTuple):
    """Sums over a client's training rows at the coefficients that it was sent: f inputs of the head, k outputs.

    They are those of least squares: curvature c - slope is the gradient of the loss at coefficients c: [f, k].
    """

    curvature: PerClient  # [h, f, f] of each output, or with h = 1 the same of all
    slope: PerClient  # [f, k]
    square: PerClient  # [k] of targets; for counts, Pearson's statistic
    rows: PerClient  # [k] known targets
    inputs: PerClient  # [2, f] of inputs, and of their squares


class Server(NamedTuple):
    """The server's state: what is common to the clients, and what each is."""

    body: Shared  # [d] the initial model, whose head is replaced
    centre: Shared  # [f, k] the mean of the clients' coefficients
    spread: Shared  # [f, k] the variance of the clients' coefficients about it
    noise: PerClient  # [N, k] the variance of a client's targets about their predictions
    penalty: Shared  # [k] of the centre: the inverse of its coefficients' variance
    kin: PerClient  # [N, f, k] how far a client's kin are from the centre
    weights: Pairwise  # [N, N] of the others among a client's kin; () without kin
    coefficients: PerClient  # [N, f, k]
    sums: Sums  # the last that each client has sent, 0 of one that has not
    at: PerClient  # [N, f, k] the coefficients at which these sums are, in the units in which they are compared
    centre_at: Shared  # [f, k] the centre with them
    moved: Shared  # [] the largest change of a coefficient in the last round


@dataclass(frozen=True)
class PartialPooling(Method, Explains, Advises, Solves):
    r"""$c_i \sim N(\bar c + \gamma \sum_j w_{ij} (c_j - \bar c), D)$, $y = c_i^\top x + \epsilon_i$: a mixed model.

    Clients send sums over their rows, of which the server makes every client's coefficients, their mean $\bar c$, and
    by empirical Bayes the variances $D$ (a diagonal) and $\sigma_i^2$: those of a column by which clients do not differ
    become small, and of one by which each is different, large. So it lies between one model for all and learning alone,
    column by column, as the rows say. Where few rows say it, a variance is near the geometric mean of all columns'. A
    client whose targets are noisier counts less: its $\sigma_i^2$ is drawn to that of all as by `common` rows more.
    Linear mixed models: Laird and Ware 1982 (doi:10.2307/2529876); the fixed point of the variances: MacKay 1992
    (doi:10.1162/neco.1992.4.3.415), Equations 20 to 22. For labels and counts each round is a step of Newton's method
    on the same sums (Breslow and Clayton 1993, doi:10.2307/2290687). A step that went past the least of the penalised
    loss is taken back, as far as the slopes at its ends say.

    With `units="client"` coefficients are compared in units of the client's own rows: inputs, and targets that are
    numbers, less their mean, over their deviation, which is drawn to the geometric mean of all as by `common` rows. The
    mean takes one of the rows, so that the others estimate the noise.

    With `alone` above 0 a client has the mean of these coefficients and of ridges of its own, as far as its rows are
    likely by either, see `own_ridge`. It helps where a client is unlike all others, such as one that is far larger.

    Quantiles of forecasts are a forecast and those of the client's errors in training, which stay at the client.

    By the posterior's mode and curvature alone, variances of labels come out too small where clients have few rows
    (Breslow and Lin 1995, doi:10.1093/biomet/82.1.81). `widen` above 1 makes up for it.

    With `kin` (gamma) above 0 clients are also drawn to those whose coefficients deviate from the mean as theirs do.
    The model's last layer is solved; the layers before it stay as they begin, the same for all.
    """

    steps: Count = 3  # of the fixed point, in a round
    common: NonNegative = 5.0  # rows of all clients that are added to a client's where its noise is estimated
    units: Literal["all", "client"] = "all"  # whose means and deviations coefficients are in when they are compared
    alone: NonNegative = 0.0  # how many times as likely as the centre a client's own ridges are before its rows count
    widen: Positive = 1.0  # factor of the variances between clients in a step, which few rows of labels understate
    kin: NonNegative = 0.0  # how far clients are drawn to their kin; 0: to the mean of all alone
    sharpness: NonNegative = 8.0  # of the softmax over cosines that weighs a client's kin
    origin: ClassVar[Origin] = "learned"
    solves: ClassVar[bool] = True
    takes_gradients: ClassVar[bool] = False
    class_means: ClassVar[bool] = True  # follow from the sums of labels' rows
    weighs: ClassVar[str] = "coefficients are drawn to the mean of all, as far as the rows say"

    @property
    def rates(self):
        return ("steps",)

    def start(self, roster):
        layout, n = roster.layout, len(roster)
        f, k = coefficients_of(layout, roster.theta).shape
        k //= count_levels(roster.task)
        if n * f * f > NUMBERS:
            raise UsageError(
                f"partial pooling keeps {f} x {f} sums for each of {n:,} clients, which is too much; use a model with "
                "fewer inputs to its last layer, or another method, such as 'fedavg'"
            )
        if (self.units == "client" or self.alone) and head_of(layout)[1] is None:
            setting, other = ("alone", "alone=0") if self.alone else ("units=client", "units=all")
            raise UsageError(f"{setting} needs a last layer with a bias, and this model's has none; use {other}")
        if isinstance(roster.task, Quantiles) and head_of(layout)[1] is None:
            raise UsageError("partial pooling forecasts quantiles by a last layer with a bias; this model's has none")
        if self.alone and (self.units == "client" or isinstance(roster.task, Classification | Counts)):
            raise UsageError("partial pooling: alone is of numbers, with units=all; use alone=0")
        like = {"dtype": torch.float64, "device": roster.theta.device}
        none = torch.zeros(n, f, k, **like)
        centre = torch.zeros(f, k, **like)
        curvatures = k if isinstance(roster.task, Classification | Counts | Forecasting) else 1
        inputs = torch.zeros(n, 2, f, **like)
        sums = Sums(torch.zeros(n, curvatures, f, f, **like), none, none[:, 0], none[:, 0], inputs)
        ones = torch.ones(k, **like)
        noise = torch.ones(n, k, **like)
        weights = torch.zeros(n, n, **like) if self.kin else ()
        spread, moved = torch.full_like(centre, 0.1), torch.tensor(MOST, **like)
        return Server(roster.theta, centre, spread, noise, ones, none, weights, none, sums, none, centre, moved)

    def send(self, roster, server, cohort):
        if self.alone:
            coefficients = self._lean_on_own(server, cohort)
        elif self.units == "client":
            units = Units.from_sums(server.sums, roster.task, self.common)
            coefficients = units.from_units(server.coefficients)[cohort]
        else:
            coefficients = server.coefficients[cohort]
        coefficients = coefficients.repeat_interleave(count_levels(roster.task), -1)
        return Params(model_of(roster.layout, server.body, coefficients))

    def _lean_on_own(self, server: Server, cohort: Tensor) -> Tensor:
        """[K, f, k] the means of clients' coefficients and of ridges of their own."""
        sums, outputs = Sums(*(table[cohort] for table in server.sums)), list[Tensor]()
        products, rows = _products(sums), sums.rows
        for k in range(rows.shape[1]):
            centres = server.centre[:, k] + server.kin[cohort, :, k]
            about = About(centres[:, None], torch.ones_like(centres[:, :1]), server.spread[:, k].expand_as(centres))
            solve = vmap(partial(lean, usual=server.noise[:, k].median(), odds=self.alone), chunk_size=TOGETHER)
            outputs.append(solve(products[:, k], rows[:, k], [about]))
        return torch.stack(outputs, -1)

    def train(self, client, state, received):
        _, y, real = client.data
        inputs, coefficients, link = inputs_of(client, received)
        return (), sums(client.task, inputs, y, real.double(), coefficients, link)

    def row_weights(self, client: Client, state: Tree, received: Tree) -> Tensor:
        """[m, n] by how much each row counts in m of the sums that `train` gives, so that a site can refuse some."""
        _, y, real = client.data
        inputs, coefficients, _ = inputs_of(client, received)
        if not isinstance(client.task, Classification | Counts):
            return real.double()[None]
        weight, outputs, error, _ = _derivatives(client.task, inputs, y, real.double(), coefficients)
        return torch.cat([weight, weight * outputs - error], 1).T

    def aggregate(self, roster, server, cohort, uploads):
        sums = Sums(*(put(table, cohort, new) for table, new in zip(server.sums, uploads, strict=True)))
        squared = not isinstance(roster.task, Classification | Counts)
        units = Units.from_sums(sums, roster.task, self.common) if self.units == "client" else None
        begin, centre = server.coefficients, server.centre
        if not squared:
            pair = server.sums, sums
            before, after = pair if units is None else map(units.to_units, pair)
            if (length := step_length(server, before, after, cohort)) < 1:
                return step_back(server, length)
            server = server._replace(at=put(server.at, cohort, begin[cohort]), centre_at=server.centre)
        server = server._replace(sums=sums if units is None else units.to_units(sums))
        identified = 1 - 1 / server.centre.shape[1] if isinstance(roster.task, Classification) else 1.0
        steps = self.steps << 2 * min(roster.round, GROWS) if squared else self.steps
        posterior_of = choose_posterior(server.sums)
        improve = partial(
            step,
            squared=squared,
            common=self.common,
            identified=identified,
            posterior_of=posterior_of,
            widen=self.widen,
        )
        server = settle(server, improve, steps)
        if not squared:
            server = _shorten_step(server, begin, centre)
        server = server._replace(sums=sums, moved=(server.coefficients - begin).abs().max())
        if self.kin and (roster.round < DRAWN or not _is_complete(server)):
            return self._draw_to_kin(server)._replace(moved=torch.full_like(server.moved, MOST))
        return server

    def is_solved(self, server):
        return bool(server.moved < SETTLED) and _is_complete(server)

    def _draw_to_kin(self, server: Server) -> Server:
        """The server with the mean of each client's kin, those whose deviations from the centre are like its own."""
        deviation = server.coefficients - server.centre  # [N, f, k]
        variance = deviation.square().mean(0)  # [f, k]
        learned = (variance / server.spread).clamp(0, 1)  # how much of a coefficient's deviation the rows say
        length = variance.sqrt().clamp(min=LEAST)
        direction = torch.nn.functional.normalize((deviation / length * learned.sqrt()).flatten(1), dim=1)
        likeness = (self.sharpness * direction @ direction.T).fill_diagonal_(-math.inf)
        weights = torch.nan_to_num(likeness.softmax(1)) if len(deviation) > 1 else torch.zeros_like(likeness)
        return server._replace(kin=self.kin * torch.einsum("ij,jfk->ifk", weights, deviation), weights=weights)

    def relation(self, roster, server, cohort):
        return server.weights.to(roster.theta.dtype) if self.kin else None

    def own_weights(self, roster, server):
        """How far rows determine coefficients: one less their variance with rows over that without; mean over outputs.

        It is MacKay's gamma, coefficient by coefficient: 1 where a client learns alone, 0 where all share it.
        """
        sums = server.sums
        if self.units == "client":
            sums = Units.from_sums(sums, roster.task, self.common).to_units(sums)
        posterior_of, outputs = choose_posterior(sums), range(server.centre.shape[1])
        learned = [posterior_of(server.spread[:, k], server.noise[:, k], k).learned for k in outputs]
        return torch.stack(learned, -1).clamp(0, 1).mean(-1)

    def personalise(self, client, state, received):
        task = client.task
        return {"mixed": add_errors(client, task, received) if isinstance(task, Quantiles) else received}

    def add_clients(self, roster, server, newcomers):
        """The server's state with newcomers, of whom the mean of all is known to be the best guess."""
        wide = super().add_clients(roster, server, newcomers)
        guess = server.centre.expand(len(newcomers), -1, -1)
        return wide._replace(coefficients=put(wide.coefficients, newcomers, guess))

    def diagnostics(self, roster, server, cohort, sent, uploads):
        away = (server.coefficients - server.centre).square().sum((1, 2)).sqrt()
        noise = server.noise.mean(1)
        return {"from the mean": away.to(roster.theta.dtype), "noise": noise.to(roster.theta.dtype)}


def _is_complete(server: Server) -> bool:
    """Whether every client has sent sums."""
    return bool((server.sums.rows > 0).any(1).all())


def sums(
    task: Any, x: Tensor, y: Tensor, real: Tensor, coefficients: Tensor, link: Callable[[Tensor], Tensor] | None = None
) -> Sums:
    """The sums of one client's rows x: [n, f], each of which counts as real: [n] of them, at coefficients: [f, k].

    A head's `link` is the function of its outputs that is linear in x, where they are not themselves.
    """
    inputs = torch.stack([real @ x, real @ x.square()])
    if isinstance(task, Classification | Counts):
        weight, outputs, error, square = _derivatives(task, x, y, real, coefficients)
        curvature = torch.einsum("nk,nf,ng->kfg", weight, x, x)
        slope = x.T @ (weight * outputs - error)
        return Sums(curvature, slope, square, real.sum().expand(weight.shape[1]), inputs)
    if isinstance(task, Forecasting):
        target, present = _readings(task, y, real, link)
        curvature = torch.einsum("nk,nf,ng->kfg", present, x, x)
        return Sums(curvature, x.T @ (present * target), (present * target.square()).sum(0), present.sum(0), inputs)
    if isinstance(task, Regression):
        target = task.standardise(y.double()).reshape(len(x), coefficients.shape[1])
        target = target if link is None else link(target)
        counted, rows = x * real[:, None], real.sum().expand(target.shape[1])
        return Sums((counted.T @ x)[None], counted.T @ target, real @ target.square(), rows, inputs)
    raise UsageError(f"partial pooling solves regression, counts, labels and forecasts, not {type(task).__name__}")


def _readings(
    task: Forecasting, y: Tensor, real: Tensor, link: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """[n, H] readings y: [n, H] in the units of a head's linear part, and as how many each counts, 0 of one missing."""
    target = (torch.where(y.isnan(), task.mean, y.double()) - task.mean) / task.deviation
    return target if link is None else link(target), (~y.isnan()).double() * real[:, None]


def count_levels(task: Any) -> int:
    """How many outputs a model has for each target."""
    return len(task.quantiles) if isinstance(task, Quantiles) else 1


def add_errors(client: Client, task: Quantiles, received: Tree) -> Params:
    """The model with quantiles of the client's own training errors added to its forecasts, all of a step alike."""
    _, y, real = client.data
    inputs, coefficients, link = inputs_of(client, received)
    levels, layout = count_levels(task), client.model.layout
    target, present = _readings(task, y, real.double(), link)
    errors = target - (inputs @ coefficients)[:, ::levels]  # [n, H]
    wider = widen_levels(errors.new_tensor(task.quantiles)[:, None], present.sum(0).clamp(min=1))  # [Q, H]
    shift = weighted_quantiles(errors, present, wider).T.flatten()  # [H * Q]
    coefficients = torch.cat([coefficients[:-1], coefficients[-1:] + shift])
    return Params(model_of(layout, received.theta, coefficients[None])[0])


def widen_levels(levels: Any, count: Any) -> Any:
    """Levels: [...] of quantiles of so many errors below which a new one, of count + 1, lies as often as they say.

    They are the ranks of split-conformal prediction (Lei et al. 2018, doi:10.1080/01621459.2017.1307116, Section 2.2).
    """
    return (0.5 + (levels - 0.5) * (1 + 1 / count)).clip(0, 1)


def weighted_quantiles(values: Tensor, weights: Tensor, levels: Tensor) -> Tensor:
    """[Q, H] the least of values: [n, H] up to which at least shares levels: [Q, H] of weights: [n, H] lie.

    It is 0 where nothing has a weight.
    """
    ordered, order = values.masked_fill(weights == 0, torch.inf).sort(0)
    share = weights.gather(0, order).cumsum(0)
    below = share < levels[:, None] * share[-1] * (1 - ROUNDING)  # [Q, n, H]
    quantiles = ordered.gather(0, below.sum(1).clamp(max=len(values) - 1))
    return torch.where(share[-1] > 0, quantiles, 0.0)


def _derivatives(
    task: Any, x: Tensor, y: Tensor, real: Tensor, coefficients: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of labels or counts: second derivatives of the loss, outputs, derivatives: [n, k]; Pearson's statistic: [k]."""
    outputs = x @ coefficients
    if isinstance(task, Classification):
        share = outputs.softmax(1)
        error = (share - torch.nn.functional.one_hot(y, outputs.shape[1])) * real[:, None]
        weight = bound_curvature(share).clamp(min=1e-6) * real[:, None]
        return weight, outputs, error, torch.zeros_like(share[0])
    count = y.double().reshape(outputs.shape)
    # At first from halfway between the mean and the count: a step from the mean alone leaps too far.
    logs = torch.where(coefficients.any(), outputs.clamp(max=STEEP), ((1 + count / task.mean) / 2).log())
    mean = (logs.exp() * task.mean).clamp(min=1e-6)
    error = mean - count
    return mean * real[:, None], logs, error * real[:, None], real @ (error.square() / mean)


def bound_curvature(share: Tensor) -> Tensor:
    """[n, C] the diagonal of the least sum that bounds diag(p) - pp', the curvature of a softmax of shares p: [n, C].

    So each class is solved by itself. It is 2 m p, and 2 (1 - m) m of the largest share, with m the largest share or
    1/2, whichever is more. It is exact for two classes. Its sum is the least: where m is above 1/2, the bound less the
    curvature is 0 along (1, -1, ..., -1), and else along unit vectors whose mean by shares is 0.
    """
    most = share.amax(1, keepdim=True).clamp(min=0.5)
    return 2 * share * torch.where(share == most, 1 - most, most)


def inputs_of(client: Client, received: Tree) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]:
    """[n, f] the head's inputs of a client's rows, the coefficients [f, k] that it was sent, and the head's link."""
    inputs = client.model.features(received.theta, client.data[0]).flatten(1)
    head = client.model.module.get_submodule(client.model.head_name or "")
    link = head.link if isinstance(head, Exponential) else None
    if isinstance(head, Since):
        starts = inputs[:, -head.starts :].double()
        inputs, link = inputs[:, : -head.starts], partial(torch.sub, other=starts)
    if client.model.layout.head and head_of(client.model.layout)[1]:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    return inputs.double(), coefficients_of(client.model.layout, received.theta), link


class Units(NamedTuple):
    """Means and deviations of clients' own rows: of the head's inputs, with its 1, and last of the targets."""

    mean: Tensor  # [N, k, f + 1], 0 of the 1
    deviation: Tensor  # [N, k, f + 1], 1 of the 1

    @classmethod
    def from_sums(cls, sums: Sums, task: Any, common: float) -> "Units":
        """Those that the sums say, see `PartialPooling`; labels and counts have none."""
        labels = isinstance(task, Classification | Counts)
        if labels:  # rows weigh otherwise in each round's curvature, but not here
            rows = sums.rows[:, :1, None].clamp(min=LEAST)  # [N, 1, 1]
            none = torch.zeros_like(rows)
            total, squares = (torch.cat([part[:, None], none], 2) for part in sums.inputs.unbind(1))  # [N, 1, f + 1]
        else:
            products = _products(sums)
            rows = products[..., -2, -2, None].clamp(min=LEAST)  # [N, k, 1]
            total, squares = products[..., -2], torch.diagonal(products, dim1=2, dim2=3)
        mean = total / rows
        deviation = _deviations(squares - rows * mean.square(), rows, common)
        mean[..., -2], deviation[..., -2] = 0.0, 1.0
        if labels:
            deviation[..., -1] = 1.0
        return cls(mean, deviation)

    def to_units(self, sums: Sums) -> Sums:
        """The sums of rows in these units, with SAME times the rows on the diagonal: a constant column has a ridge.

        They are of one row fewer, as a client's mean is taken from its rows.
        """
        transform = torch.diag_embed(1 / self.deviation)
        transform[..., -2] -= self.mean / self.deviation
        products = transform @ _products(sums) @ transform.mT  # [N, k, f + 1, f + 1]
        inputs = products[..., :-1, :-1]
        same = torch.eye(inputs.shape[-1]).to(inputs) * SAME * inputs[..., -1:, -1:]
        mean, deviation = self.mean[:, 0, :-1], self.deviation[:, 0, :-1]
        rows, (total, squares) = sums.rows[:, :1], sums.inputs.unbind(1)
        total, squares = total - rows * mean, squares - 2 * total * mean + rows * mean.square()
        moments = torch.stack([total / deviation, squares / deviation.square()], 1)
        return Sums(
            inputs + same, products[..., :-1, -1].mT, products[..., -1, -1], (sums.rows - 1).clamp(min=0), moments
        )

    def from_units(self, coefficients: Tensor) -> Tensor:
        """[N, f, k] coefficients of the rows as they are, of those in these units."""
        raw = coefficients * (self.deviation[..., -1:] / self.deviation[..., :-1]).mT
        raw[:, -1] += self.mean[..., -1] - (raw * self.mean[..., :-1].mT).sum(1)
        return raw


def _products(sums: Sums) -> Tensor:
    """[N, k, f + 1, f + 1] sums of products of inputs and, last, targets."""
    slope = sums.slope.mT
    inputs = torch.cat([sums.curvature.expand(-1, slope.shape[1], -1, -1), slope[..., None]], 3)
    return torch.cat([inputs, torch.cat([slope, sums.square[..., None]], 2)[:, :, None]], 2)


def _deviations(squares: Tensor, rows: Tensor, common: float) -> Tensor:
    """Clients' deviations by sums of squares about their means, drawn to the geometric mean as by `common` rows."""
    variance = (squares / rows).clamp(min=0)
    varies = variance > SAME * variance.amax(0)
    logs = torch.where(varies, variance.clamp(min=LEAST).log(), 0.0)
    usual = (logs.sum(0) / varies.sum(0).clamp(min=1)).exp()
    return torch.where(rows > LEAST, (variance * rows + common * usual) / (rows + common), usual).sqrt()


class Posterior(NamedTuple):
    """What a step asks of clients' posteriors P = (X'X / s + D^-1)^-1, with noise s and D = diag(spread)."""

    times: Callable[[Tensor], Tensor]  # [N, f] of P with each client's vector: [N, f]
    information: Tensor  # [f, f] the sum over clients of X'V^-1 X, with V = X D X' + s I
    learned: Tensor  # [N, f] the diagonal of 1 - P D^-1


def choose_posterior(sums: Sums) -> Callable[[Tensor, Tensor, int], Posterior]:
    """A function of spread: [f], noise: [N] and an output, that suits how many rows clients have.

    Where all have fewer rows than half of the inputs, it works with roots of X'X of so many columns.
    """
    if 2 * float(sums.rows.max()) >= sums.curvature.shape[-1]:
        return partial(_posterior_of_many, sums)
    return partial(_posterior_of_few, _find_roots(sums.curvature))


def _posterior_of_many(sums: Sums, spread: Tensor, noise: Tensor, k: int) -> Posterior:
    precise = 1 / spread
    curvature = _curvature(sums, k) / noise[:, None, None]
    matrices = inverse(curvature + torch.diag(precise))
    # X'V^-1 X is X'X P D^-1 / s.
    information = torch.einsum("nfg,ngh->fh", curvature, matrices) * precise
    learned = 1 - torch.diagonal(matrices, dim1=1, dim2=2) * precise
    return Posterior(partial(_times, matrices), (information + information.T) / 2, learned)


def _find_roots(curvature: Tensor) -> Tensor:
    """[N, k, f, r] roots B with B B' = X'X: [N, k, f, f], of so many columns as the largest rank."""
    values, vectors = torch.linalg.eigh(curvature)  # in ascending order
    least = torch.finfo(values.dtype).eps * values.shape[-1] * values[..., -1:]
    rank = max(1, int((values > least).sum(-1).max()))
    return vectors[..., -rank:] * values[..., None, -rank:].clamp(min=0).sqrt()


def _posterior_of_few(roots: Tensor, spread: Tensor, noise: Tensor, k: int) -> Posterior:
    """By Woodbury's identity: P = D - D W'W D, with W'W = B (s I + B'D B)^-1 B', which is X'V^-1 X."""
    root = roots[:, k if roots.shape[1] > 1 else 0]  # [N, f, r]
    inner = root.mT @ (spread[:, None] * root) + noise[:, None, None] * torch.eye(root.shape[-1]).to(root)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), root.mT, upper=False)  # W: [N, r, f]

    def times(vectors: Tensor) -> Tensor:
        scaled = spread * vectors
        return scaled - spread * _times(half.mT, _times(half, scaled))

    stacked = half.flatten(0, 1)  # [N r, f]
    return Posterior(times, stacked.T @ stacked, half.square().sum(1) * spread)


def step(
    server: Server,
    squared: bool,
    common: float,
    posterior_of: Callable[[Tensor, Tensor, int], Posterior],
    identified: float = 1.0,
    widen: float = 1.0,
) -> Server:
    """Everybody's coefficients by the variances so far, and `widen` times the variances by these coefficients.

    Of `squared` errors the noise is estimated too, with `common` rows of all clients added to each client's.
    `identified` is the share of directions of which rows can say anything: of a softmax of C outputs not that in which
    all are alike. `posterior_of` is what `choose_posterior` gives for these sums.
    """
    outputs = [
        _step_output(server, k, posterior_of(server.spread[:, k], server.noise[:, k], k), squared, common, identified)
        for k in range(server.centre.shape[1])
    ]
    centre, spread, noise, penalty, coefficients = (torch.stack(parts, -1) for parts in zip(*outputs, strict=True))
    spread = (spread * widen).clamp(LEAST, MOST)
    return server._replace(centre=centre, spread=spread, noise=noise, penalty=penalty, coefficients=coefficients)


def settle(server: Server, step: Callable[[Server], Server], steps: int) -> Server:
    """The server after so many steps, or fewer once coefficients no longer change: of three, the last after a leap.

    The leap is SQUAREM's (Varadhan and Roland 2008, doi:10.1111/j.1467-9469.2007.00585.x, Equation 7 with the step
    length S3), of the logarithms of variances and penalties, for each output by itself.
    """
    past = [server]
    for _ in range(steps):
        if len(past) == 3:
            past = [_leap(*past)]
        past.append(step(past[-1]))
        if float((past[-1].coefficients - past[-2].coefficients).abs().max()) < SETTLED:
            break
    return past[-1]


def _leap(first: Server, second: Server, third: Server) -> Server:
    """The server as far along the way from the first to the third as their variances say."""

    def logs(server: Server) -> Tensor:  # [f + N + 1, k]
        return torch.cat([server.spread, server.noise, server.penalty[None]]).log()

    before, middle, after = logs(first), logs(second), logs(third)
    pace, bend = middle - before, after - 2 * middle + before
    length = (pace.norm(dim=0) / bend.norm(dim=0).clamp(min=LEAST)).clamp(1.0, FARTHEST)  # [k]
    variances = (before + 2 * length * pace + length.square() * bend).exp().clamp(LEAST, MOST)
    spread, noise, penalty = variances.split([len(first.spread), len(first.noise), 1])
    return third._replace(spread=spread, noise=noise, penalty=penalty[0])


def _step_output(
    server: Server, k: int, posterior: Posterior, squared: bool, common: float, identified: float
) -> tuple[Tensor, ...]:
    """The step for output k: its centre: [f], spread: [f], noise: [N], penalty: [] and coefficients: [N, f]."""
    sums, spread, noise, penalty = server.sums, server.spread[:, k], server.noise[:, k], server.penalty[k]
    curvature = _curvature(sums, k)
    slope, kin = sums.slope[:, :, k], server.kin[:, :, k]  # [N, f]
    n, f = slope.shape
    # Coefficients by the variances so far.
    rest = (slope - _times(curvature, kin)) / noise[:, None]  # what the centre and a client's own deviation explain
    scale = _scale(sums, k, squared)
    uncertain = inverse(posterior.information + torch.diag(penalty * scale))
    centre = uncertain @ (posterior.times(rest).sum(0) * (1 / spread))  # X'V^-1 y is D^-1 P X'y / s
    away = posterior.times(rest - _times(curvature, centre.expand(n, f)) / noise[:, None])
    coefficients = centre + kin + away
    # Variances by these coefficients.
    learned = identified * posterior.learned.clamp(min=0)  # [N, f] of each deviation
    usual = spread.log().mean().exp()
    spread = ((away.square().sum(0) + USUAL * usual) / (learned.sum(0) + USUAL)).clamp(LEAST, MOST)
    free = identified * (f - penalty * (torch.diagonal(uncertain) * scale).sum()).clamp(min=1e-3)
    penalty = (free / (centre.square() * scale).sum().clamp(min=LEAST)).clamp(LEAST, MOST)
    if squared:
        fit = (_times(curvature, coefficients) - 2 * slope) * coefficients
        left = (sums.square[:, k] + fit.sum(1)).clamp(min=0) + noise * learned.sum(1)  # [N] squares, as expected
        noise = ((left + common / (1 / noise).mean()) / (sums.rows[:, k] + common).clamp(min=1)).clamp(min=LEAST)
    elif bool(sums.square[:, k].any()):  # counts vary more than Poisson's, or as much
        more = (sums.square[:, k].sum() / sums.rows[:, k].sum().clamp(min=1)).clamp(1.0, MOST)
        noise = more.expand(n)
    return centre, spread, noise, penalty, coefficients


def _curvature(sums: Sums, k: int) -> Tensor:
    """[N, f, f] of one output."""
    return sums.curvature[:, k if sums.curvature.shape[1] > 1 else 0]


def _scale(sums: Sums, k: int, squared: bool) -> Tensor:
    """[f] the mean squares of inputs, by which a penalty of the centre does not depend on their units."""
    squares = torch.diagonal(_curvature(sums, k), dim1=1, dim2=2) if squared else sums.inputs[:, 1]
    return (squares.sum(0) / sums.rows[:, k].sum().clamp(min=LEAST)).clamp(min=LEAST)


def _scales(sums: Sums) -> Tensor:
    """[f, k] the same of all outputs of labels or counts."""
    return torch.stack([_scale(sums, k, squared=False) for k in range(sums.rows.shape[1])], 1)


def step_length(server: Server, before: Sums, after: Sums, cohort: Tensor) -> float:
    """How much of the last step of Newton's method is taken: 1, or less if the penalised loss climbs at its end.

    Its slope along the step follows from gradients, which `before` has at the begin and `after` at the end. As the loss
    is convex, it lies lower at an end where it still falls. Otherwise its least is about where the line through the two
    slopes is 0 (Nocedal and Wright 2006, doi:10.1007/978-0-387-40065-5, Section 3.5).
    """
    cohort = cohort[before.rows[cohort].any(1) & server.at[cohort].flatten(1).any(1)]
    ends = (before, server.at, server.centre_at), (after, server.coefficients, server.centre)
    scale = _scales(after)
    move = (server.coefficients - server.at)[cohort]
    shift = server.centre - server.centre_at
    slopes = []
    for sums, coefficients, centre in ends:
        away = (coefficients - centre - server.kin)[cohort] / server.spread
        gradient = torch.einsum("nkfg,ngk->nfk", sums.curvature[cohort], coefficients[cohort]) - sums.slope[cohort]
        gradient = gradient / server.noise[cohort, None] + away
        common = server.penalty * scale * centre - away.sum(0)
        slopes.append(float((gradient * move).sum() + (common * shift).sum()))
    begin, end = slopes
    return max(SHORTEST, begin / (begin - end)) if 0 < -PAST * begin < end else 1.0


def _shorten_step(server: Server, begin: Tensor, centre: Tensor) -> Server:
    """The server with no client's output moved much farther in one step than it had come: see `FAR`.

    Outputs are of inputs of usual size, and begin: [N, f, k] and centre: [f, k] are the coefficients before the step.
    Where rows separate labels their curvature vanishes, and Newton's method leaps far beyond what they say.
    """
    scale = _scales(server.sums)

    def measure(coefficients: Tensor) -> Tensor:
        return (coefficients.square() * scale).sum(-2, keepdim=True).sqrt()

    def shorten(before: Tensor, after: Tensor) -> Tensor:
        farthest, move = FAR + measure(before), after - before
        size = measure(move)
        return torch.where(size > farthest, before + move * (farthest / size.clamp(min=FAR)), after)

    return server._replace(coefficients=shorten(begin, server.coefficients), centre=shorten(centre, server.centre))


def step_back(server: Server, length: float) -> Server:
    """The server with so much of its last step taken; its sums stay those at the step's begin."""
    coefficients = server.at + length * (server.coefficients - server.at)
    centre = server.centre_at + length * (server.centre - server.centre_at)
    moved = (server.coefficients - coefficients).abs().max()
    return server._replace(coefficients=coefficients, centre=centre, moved=moved)


def inverse(matrix: Tensor) -> Tensor:
    """Of positive definite [..., f, f]; without the directions in which rounding has made it none."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    wrong = info > 0
    if not wrong.any():
        return torch.cholesky_inverse(factor)
    factor[wrong] = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)  # it may have zeros
    inverse = torch.cholesky_inverse(factor)
    inverse[wrong] = torch.linalg.pinv(matrix[wrong], rtol=ROUNDING, hermitian=True)
    return inverse


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """[N, f] the product of each of [N, f, g] with its vector: [N, g]."""
    return torch.einsum("nfg,ng->nf", matrices, vectors)


def head_of(layout: Layout) -> tuple[Any, Any]:
    """The entries of the head's weight [k, f] and of its bias, None without one."""
    entries = {e.name: e for e in layout.entries if e.name in layout.head}
    weight = next((e for e in entries.values() if len(e.shape) == 2), None)
    if weight is None or len(entries) > 2:
        raise UsageError("partial pooling solves a linear last layer that travels; this model has none")
    return weight, next((e for e in entries.values() if e is not weight), None)


def coefficients_of(layout: Layout, theta: Tensor) -> Tensor:
    """[f, k] float64 of a model: [d]."""
    weight, bias = head_of(layout)
    coefficients = theta[weight.at].reshape(weight.shape).T
    return (coefficients if bias is None else torch.cat([coefficients, theta[bias.at][None]])).double()


def model_of(layout: Layout, body: Tensor, coefficients: Tensor) -> Tensor:
    """[K, d] the initial model: [d] with these coefficients: [K, f, k] in place of its head."""
    weight, bias = head_of(layout)
    theta = body.expand(len(coefficients), -1)
    inputs = weight.shape[1]
    solved = coefficients[:, :inputs].transpose(1, 2).flatten(1).to(theta.dtype)
    theta = torch.slice_scatter(theta, solved, 1, weight.at.start, weight.at.stop)
    if bias is not None:
        theta = torch.slice_scatter(theta, coefficients[:, inputs].to(theta.dtype), 1, bias.at.start, bias.at.stop)
    return theta
