"""Mixed model: the linear model of statistics, by maximum likelihood, from sums over clients."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ...core.client import Client
from ...core.graph import Origin
from ...core.method import Method
from ...core.mixins import Advises, Explains, Solves
from ...core.trees import ModelOf, Shared, Summed, Tree
from ...errors import UsageError
from .generalised import Generalised, Personal
from .laplace import check_task, takes
from .partial_pooling import coefficients_of, head_of, inputs_of, model_of
from .random_effects import INTERCEPT, place_effects

BEGIN = 0.1  # the first variance of random effects, of targets whose variance is 1
NARROWEST, WIDEST = 0.1, 10.0  # how many times a variance grows in a round
MOST = 32  # random effects, whose information has their fourth power of numbers
ROUNDING = 1e-11  # of a matrix's largest eigenvalue, the least that is told from 0
LEAST = 1e-8  # of the noise, a variance that is none
SETTLED = 1e-10  # a relative change of parameters that is none


class Products(NamedTuple):
    """A client's private state: what its rows say."""

    products: Tensor  # [f + 1, f + 1] of the inputs of the last layer, with its 1, and last the target
    rows: Tensor  # []

    @classmethod
    def empty(cls, client: Client) -> "Products":
        """Those of no rows."""
        f = len(coefficients_of(client.model.layout, client.model.theta)) + 1
        none = client.model.theta.new_zeros(f, f).double()
        return cls(none, none[0, 0].clone())


class Sent(NamedTuple):
    """What every client receives."""

    theta: ModelOf[Shared]  # [d] the model with the fixed effects
    covariance: Shared  # [q, q] of random effects, D
    noise: Shared  # [] the variance of targets about their predictions
    uncertainty: Shared  # [f, f] the covariance of the errors of the fixed effects
    at: Shared  # [q] int64 which of the inputs, of which the 1 is the last, have random effects


class Upload(NamedTuple):
    """What a client's rows say of the parameters; the server gets the sums over clients."""

    clients: Summed  # [] 1
    rows: Summed  # []
    precision: Summed  # [f, f] X'V^-1 X
    slope: Summed  # [f] X'V^-1 y
    score: Summed  # [q, q] of the log-likelihood by the covariance
    score_of_noise: Summed  # []
    information: Summed  # [q, q, q, q] expected, of the covariance
    information_of_noise: Summed  # [q, q] of the covariance and the noise
    information_within: Summed  # [] of the noise
    deviance: Summed  # [] twice the negative log-likelihood, without its constant


class Server(NamedTuple):
    """The server's state."""

    body: Shared  # [d] the initial model, whose head is replaced
    fixed: Shared  # [f] the fixed effects, beta
    covariance: Shared  # [q, q]
    noise: Shared  # []
    uncertainty: Shared  # [f, f] the covariance of the fixed effects
    spread: Shared  # [q, q, q, q] the covariance of the errors of the entries of the covariance
    spread_of_noise: Shared  # [] the same of the noise
    deviance: Shared  # [] at the parameters that were sent last
    size: Shared  # [2] clients and rows
    moved: Shared  # [] the largest relative change of a parameter in the last round
    at: Shared  # [q] int64 which of the inputs, of which the 1 is the last, have random effects


@dataclass(frozen=True)
class MixedModel(Method, Explains, Advises, Solves):
    r"""$y_i = X_i \beta + Z_i b_i + \epsilon_i$, $b_i \sim N(0, D)$, $\epsilon_i \sim N(0, \sigma^2 I)$.

    $X_i$ are a client's inputs to the last layer with a 1, and $Z_i$ is the 1 alone, some of them or all. With
    $V_i = Z_i D Z_i^\top + \sigma^2 I$, clients send $X_i^\top V_i^{-1} X_i$, $X_i^\top V_i^{-1} y_i$, and the score
    and the expected information of $D$ and $\sigma^2$. Their sums over clients are all that the server needs for a step
    of Fisher's scoring (Harville 1977, doi:10.1080/01621459.1977.10480998; Laird and Ware 1982, doi:10.2307/2529876).
    The server never has a client's coefficients, $\beta$ and the prediction
    $b_i = D Z_i^\top V_i^{-1} (y_i - X_i \beta)$, because the client works $b_i$ out at home.
    """

    random: str | tuple[str, ...] = INTERCEPT  # which coefficients differ from client to client: columns, or "all"
    covariance: Literal["diagonal", "full"] = "full"  # of the random effects: whether they may be correlated
    estimate: Literal["reml", "ml"] = "reml"  # restricted maximum likelihood, or maximum likelihood
    origin: ClassVar[Origin] = "fixed"
    solves: ClassVar[bool] = True
    takes_gradients: ClassVar[bool] = False
    row_sums: ClassVar[bool] = True
    weighs: ClassVar[str] = "clients share fixed effects and variances, and no client learns from another"

    def generalise(self) -> Generalised:
        """The same model of labels and counts."""
        return Generalised(self.covariance == "diagonal")

    def start(self, roster):
        check_task(roster.task, len(coefficients_of(roster.layout, roster.theta).T), "mixed-model")
        if head_of(roster.layout)[1] is None:
            raise UsageError("mixed-model needs a last layer with a bias, and this model's has none")
        at = place_effects(self.random, roster)
        if takes(roster.task):
            return self.generalise().start(roster, at)
        like = {"dtype": torch.float64, "device": roster.theta.device}
        fixed = torch.zeros(len(coefficients_of(roster.layout, roster.theta)), **like)
        f, q = len(fixed), len(at)
        if q > MOST:
            raise UsageError(
                f"mixed-model takes random effects of at most {MOST} inputs, with their 1; by method.random it has "
                f"{q}; name fewer columns, set random=intercept, or use 'partial-pooling'"
            )
        unit = torch.ones((), **like)
        return Server(
            roster.theta,
            fixed,
            BEGIN * torch.eye(q, **like),
            unit,
            torch.zeros(f, f, **like),
            torch.zeros(q, q, q, q, **like),
            0 * unit,
            math.inf * unit,
            torch.zeros(2, **like),
            math.inf * unit,
            at.to(unit.device),
        )

    def send(self, roster, server, cohort):
        if takes(roster.task):
            return self.generalise().send(roster, server)
        theta = model_of(roster.layout, server.body, server.fixed[None, :, None])[0]
        return Sent(theta, server.covariance, server.noise, server.uncertainty, server.at)

    def init_client(self, client):
        return () if takes(client.task) else Products.empty(client)

    def train(self, client, state, received):
        if takes(client.task):
            return (), self.generalise().train(client, received)
        moments = moments_of(client, received)
        return moments, self.contribute(moments, received, coefficients_of(client.model.layout, received.theta)[:, 0])

    def contribute(self, moments: Products, received: Sent, fixed: Tensor) -> Upload:
        """What a client's rows say of the parameters that it received, of which the fixed effects are: [f]."""
        noise, covariance, products, rows = received.noise, received.covariance, moments.products, moments.rows
        at, (inner, shrink) = received.at, _shrink(moments, received)
        across = products[at]  # [q, f + 1], Z'[X y]
        once = (products - across.T @ shrink @ across) / noise  # [X y]'V^-1 [X y]
        twice = (products - across.T @ (2 * shrink - shrink @ inner @ shrink) @ across) / noise.square()
        shrunk = shrink @ inner
        trace = (rows - shrunk.trace()) / noise
        trace_of_squares = (rows - 2 * shrunk.trace() + (shrunk @ shrunk).trace()) / noise.square()
        residual = torch.cat([-fixed, rows.new_ones(1)])  # [f + 1]
        within, of_inputs = once[at][:, at], once[at][:, :-1]  # Z'V^-1 Z, Z'V^-1 X
        pull = once[at] @ residual  # [q] Z'V^-1 (y - X beta)
        lost = received.uncertainty if self.estimate == "reml" else torch.zeros_like(received.uncertainty)
        score = torch.outer(pull, pull) - within + of_inputs @ lost @ of_inputs.T
        score_of_noise = residual @ twice @ residual - trace + (lost * twice[:-1, :-1]).sum()
        determinant = rows * noise.log() + torch.logdet(torch.eye(len(inner)).to(inner) + covariance @ inner / noise)
        return Upload(
            torch.ones_like(rows),
            rows,
            once[:-1, :-1],
            once[:-1, -1],
            score / 2,
            score_of_noise / 2,
            torch.einsum("ik,jl->ijkl", within, within) / 2,
            twice[at][:, at] / 2,
            trace_of_squares / 2,
            determinant + residual @ once @ residual,
        )

    def row_weights(self, client: Client, state: Tree, received: Tree) -> Tensor:
        """[m, n] by how much each row counts in m of the sums that `train` gives, so that a site can refuse some."""
        if takes(client.task):
            return self.generalise().weigh_rows(client, received)
        return client.data.weight.double()[None]

    def aggregate(self, roster, server, cohort, sums):
        if takes(roster.task):
            return self.generalise().aggregate(server, sums)
        uncertainty, determinant = invert(sums.precision)
        fixed = uncertainty @ sums.slope
        deviance = sums.deviance + (determinant if self.estimate == "reml" else 0.0)
        axes = Axes.from_covariance(server.covariance, server.noise, sums.score, self.covariance == "diagonal")
        bases = axes.bases(self.covariance == "diagonal")  # [p, q, q]
        between = torch.einsum("aij,ijkl,bkl->ab", bases, sums.information, bases)
        across = torch.einsum("aij,ij->a", bases, sums.information_of_noise)
        information = torch.cat([between, across[:, None]], 1)
        information = torch.cat([information, torch.cat([across, sums.information_within[None]])[None]])
        score = torch.cat([torch.einsum("aij,ij->a", bases, sums.score), sums.score_of_noise[None]])
        spread, _ = invert(information)
        step = spread @ score
        noise = server.noise * (1 + step[-1] / server.noise).clamp(NARROWEST, WIDEST)
        covariance = axes.advance(torch.einsum("a,aij->ij", step[:-1], bases), noise)
        moved = torch.stack([_change(fixed, server.fixed), _change(covariance, server.covariance)]).max()
        moved = torch.maximum(moved, (noise / server.noise - 1).abs())
        entries = torch.einsum("ab,aij,bkl->ijkl", spread[:-1, :-1], bases, bases)
        return Server(
            server.body,
            fixed,
            covariance,
            noise,
            uncertainty,
            entries,
            spread[-1, -1],
            deviance,
            torch.stack([sums.clients, sums.rows]),
            moved,
            server.at,
        )

    def is_solved(self, server):
        return bool(server.moved < SETTLED) if isinstance(server, Server) else self.generalise().is_solved(server)

    def personalise(self, client, state, received):
        if takes(client.task):
            return self.generalise().personalise(client, received)
        layout = client.model.layout
        coefficients, covariance = self.predict_effects(state, received, coefficients_of(layout, received.theta)[:, 0])
        mixed = model_of(layout, received.theta, coefficients[None, :, None])[0]
        fixed = received.theta
        return {
            "mixed": Personal(mixed, covariance.to(mixed.dtype)),
            "fixed": Personal(fixed, received.uncertainty.to(fixed.dtype)),
        }

    def predict_effects(self, moments: Products, received: Sent, fixed: Tensor) -> tuple[Tensor, Tensor]:
        r"""[f] a client's coefficients $\beta + b_i$ by its rows, and [f, f] the covariance of their errors.

        Given $\beta$, $b_i$ has the covariance $\sigma^2 M$. As it follows $\beta$ by $-M Z^\top X$, the uncertainty of
        $\beta$ counts by the rest. That of $D$ and $\sigma^2$ does not count.
        """
        at, identity = received.at, torch.eye(len(fixed)).to(moments.products)
        place, (_, shrink) = identity[:, at], _shrink(moments, received)
        effects = shrink @ (moments.products[at][:, -1] - moments.products[at][:, :-1] @ fixed)
        follows = identity - place @ shrink @ moments.products[at][:, :-1]
        given = place @ (received.noise * shrink) @ place.T
        covariance = follows @ received.uncertainty @ follows.T + given
        return fixed + place @ effects, covariance

    def relation(self, roster, server, cohort):
        return None

    def diagnostics(self, roster, server, cohort, sent, uploads):
        if takes(roster.task):
            return {"deviance": server.deviance, "left": server.left}
        return {"deviance": server.deviance, "noise": server.noise, "moved": server.moved}


def _shrink(moments: Products, received: Sent) -> tuple[Tensor, Tensor]:
    """[q, q] Z'Z of a client's rows, and M, of which its random effects are M Z'(y - X beta).

    M is (sigma^2 D^-1 + Z'Z)^-1, which exists if D is singular too.
    """
    inner = moments.products[received.at][:, received.at]
    noise = received.noise * torch.eye(len(inner)).to(inner)
    return inner, torch.linalg.solve(noise + received.covariance @ inner, received.covariance)


def moments_of(client: Client, received: Tree) -> Products:
    """What a client's rows say, with the inputs to the last layer that the model it received makes of them."""
    inputs, _, link = inputs_of(client, received)
    task: Any = client.task
    _, y, real = client.data
    target = task.standardise(y.double()).reshape(len(inputs), 1)
    table = torch.cat([inputs, target if link is None else link(target)], 1)
    return Products(table.T @ (real.double()[:, None] * table), real.double().sum())


class Axes(NamedTuple):
    """The axes of a covariance: those in which it moves, and those in which it is 0 and would become negative."""

    moving: Tensor  # [q, r]
    still: Tensor  # [q, q - r]
    variances: Tensor  # [r] along those that move

    @classmethod
    def from_covariance(cls, covariance: Tensor, noise: Tensor, score: Tensor, diagonal: bool) -> "Axes":
        """Those of a covariance: [q, q], by the score of its entries."""
        if diagonal:
            values, axes = covariance.diagonal(), torch.eye(len(covariance)).to(covariance)
        else:
            values, axes = torch.linalg.eigh(covariance)
        slopes = torch.einsum("ia,ij,ja->a", axes, score, axes)
        moving = (values > 2 * LEAST * noise) | (slopes > 0)
        return cls(axes[:, moving], axes[:, ~moving], values[moving])

    def bases(self, diagonal: bool) -> Tensor:
        """[p, q, q] the directions in which the covariance moves: along its axes and, unless diagonal, turning them."""
        if diagonal:
            return torch.einsum("ia,ja->aij", self.moving, self.moving)
        r = self.moving.shape[1]
        axes = torch.cat([self.moving, self.still], 1)
        first, second = torch.triu_indices(r, axes.shape[1])
        bases = torch.einsum("ia,ja->aij", axes[:, first], axes[:, second])
        return (bases + bases.mT) / torch.where(first == second, 2.0, 1.0)[:, None, None].to(bases)

    def advance(self, step: Tensor, noise: Tensor) -> Tensor:
        """[q, q] the covariance after a step, in which no variance grows or shrinks, and no axis turns, too far."""
        root = self.variances.sqrt()
        values, axes = torch.linalg.eigh(self.moving.T @ step @ self.moving / torch.outer(root, root))
        grown = root[:, None] * axes * (1 + values).clamp(NARROWEST, WIDEST).sqrt()
        turn = self.still.T @ step @ self.moving / self.variances
        side = (self.moving + self.still @ (turn / turn.norm().clamp(min=1))) @ grown
        return side @ side.T + LEAST * noise * self.still @ self.still.T


def invert(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of a matrix: [f, f], not negative, and its log-determinant, in the directions in which it is not 0.

    There are others where columns say the same, as those of all categories and the 1 do.
    """
    scale = matrix.diagonal().sqrt().clamp(min=torch.finfo(matrix.dtype).tiny)
    values, axes = torch.linalg.eigh(matrix / torch.outer(scale, scale))
    there = values > ROUNDING * values.amax(0)
    axes, values = axes[:, there] / scale[:, None], values[there]
    return axes / values @ axes.T, values.log().sum() + 2 * scale.log().sum()


def _change(new: Tensor, old: Tensor) -> Tensor:
    """[] the largest change of a number, over the largest of the numbers."""
    return (new - old).abs().max() / new.abs().max().clamp(min=1e-300)
