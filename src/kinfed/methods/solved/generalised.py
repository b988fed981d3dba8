"""Generalised mixed models: those of labels and counts, by Newton's method on sums of Laplace's approximations."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacfwd

from ...core.client import Client
from ...core.method import Roster
from ...core.trees import ModelOf, PerClient, Shared, Summed, Tree
from ...errors import UsageError
from .laplace import Rows, find_mode, log_marginal, precision_of, step_to_mode, to_outputs
from .partial_pooling import coefficients_of, model_of

BEGIN = 0.5  # the first deviations of random effects
MOST = 12  # random effects, of whose factor's entries second derivatives are taken
LEAST = 1e-9  # of the largest curvature, the least that is told from 0
DAMPED = 0.1  # of the curvature, what is added to it after a step that led higher
FARTHEST = 3.0  # the length of a step, in units of the linear predictor
SETTLED = 1e-9  # a fall of the deviance that is none


class Sent(NamedTuple):
    """What every client receives."""

    theta: ModelOf[Shared]  # [d] the model with the fixed effects
    parameters: Shared  # [p] the fixed effects, and the entries of the factor of the covariance
    uncertainty: Shared  # [f, f] the covariance of the errors of the fixed effects
    at: Shared  # [q] int64 which of the inputs, of which the 1 is the last, have random effects


class Personal(NamedTuple):
    """A client's model."""

    theta: ModelOf[PerClient]  # [d]
    covariance: PerClient  # [f, f] of the errors of its coefficients


class Upload(NamedTuple):
    """What a client's rows say of the parameters; the server gets the sums over clients."""

    clients: Summed  # [] 1
    rows: Summed  # []
    deviance: Summed  # [] twice the negative log-likelihood
    slope: Summed  # [p] its derivative by the parameters
    curvature: Summed  # [p, p] the second derivative


class Server(NamedTuple):
    """The server's state."""

    body: Shared  # [d] the initial model, whose head is replaced
    parameters: Shared  # [p] to be sent next
    best: Shared  # [p] the best so far
    deviance: Shared  # [] there
    slope: Shared  # [p] there
    curvature: Shared  # [p, p] there
    damping: Shared  # [] of steps from there
    size: Shared  # [2] clients and rows
    left: Shared  # [] by how much the next step should lower the deviance
    at: Shared  # [q] int64 which of the inputs, of which the 1 is the last, have random effects


class Estimates(NamedTuple):
    """What the parameters say, and how sure that is."""

    fixed: Tensor  # [f]
    uncertainty: Tensor  # [f, f] the covariance of the errors of the fixed effects
    covariance: Tensor  # [q, q] of random effects
    spread: Tensor  # [q, q, q, q] the covariance of the errors of the entries of the covariance


@dataclass(frozen=True)
class Generalised:
    r"""$y \sim \exp(y \eta - A(\eta))$, $\eta = x^\top \beta + z^\top \Lambda u$, $u \sim N(0, I)$.

    $\Lambda \Lambda^\top$ is the covariance D of random effects. A client finds its mode of u at home. It sends its
    log-likelihood by Laplace's approximation about that, with first and second derivatives by $\beta$ and the entries
    of $\Lambda$ (lower triangular). These follow the mode, as two steps of Newton's method from it do. The server takes
    a step of Newton's method on the sums (Tierney and Kadane 1986, doi:10.1080/01621459.1986.10478240; the model and
    its approximation as in Bates et al. 2015, doi:10.18637/jss.v067.i01).
    """

    diagonal: bool  # whether random effects are not correlated

    def start(self, roster: Roster, at: Tensor) -> Server:
        """The first state; at: [q] are the places of random effects among inputs."""
        f, q = len(coefficients_of(roster.layout, roster.theta)), len(at)
        if q > MOST:
            raise UsageError(
                f"mixed-model of labels or counts takes random effects of at most {MOST} inputs, with their 1; by "
                f"method.random it has {q}; name fewer columns, set random=intercept, or use 'partial-pooling'"
            )
        like: dict[str, Any] = {"dtype": torch.float64, "device": roster.theta.device}
        factor = BEGIN * torch.eye(q, **like)[self._places(q)]
        parameters = torch.cat([torch.zeros(f, **like), factor])
        none, far = 0 * parameters, torch.tensor(math.inf, **like)
        curvature, at = torch.outer(none, none), at.to(far.device)
        return Server(roster.theta, parameters, parameters, far, none, curvature, 0 * none[0], none[:2], far, at)

    def _places(self, q: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of the factor's entries."""
        if self.diagonal:
            return torch.arange(q), torch.arange(q)
        first, second = torch.tril_indices(q, q)
        return first, second

    def _split(self, parameters: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """[f] the fixed effects, and [q, q] the factor of the covariance of random effects at: [q]."""
        q = len(at)
        f = len(parameters) - len(self._places(q)[0])
        return parameters[:f], parameters.new_zeros(q, q).index_put(self._places(q), parameters[f:])

    def send(self, roster: Roster, server: Server) -> Sent:
        fixed = self._split(server.parameters, server.at)[0]
        theta = model_of(roster.layout, server.body, to_outputs(roster.task, fixed)[None])[0]
        return Sent(theta, server.parameters, self.estimate(server).uncertainty, server.at)

    def _place(self, rows: Rows, parameters: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """[n] the part of linear predictors that all share, and [n, q] by what u adds to them; at: [q]."""
        fixed, factor = self._split(parameters, at)
        return rows.x @ fixed, rows.x[:, at] @ factor

    def train(self, client: Client, received: Sent) -> Upload:
        rows = Rows.read(client, received)
        mode = find_mode(rows, *self._place(rows, received.parameters, received.at))

        def deviance(parameters: Tensor) -> Tensor:
            offset, design = self._place(rows, parameters, received.at)
            u = step_to_mode(rows, offset, design, step_to_mode(rows, offset, design, mode))
            return -2 * (log_marginal(rows, offset, design, u) + rows.constant())

        slope = grad(deviance)
        count = rows.real.sum()
        return Upload(
            torch.ones_like(count),
            count,
            deviance(received.parameters),
            slope(received.parameters),
            jacfwd(slope)(received.parameters),
        )

    def weigh_rows(self, client: Client, received: Sent) -> Tensor:
        """[2, n] by how much each row counts in the curvature and in the slope."""
        rows = Rows.read(client, received)
        offset, design = self._place(rows, received.parameters, received.at)
        expected, weight = rows.expect(offset + design @ find_mode(rows, offset, design))
        return rows.real * torch.stack([weight, rows.y - expected])

    def aggregate(self, server: Server, sums: Upload) -> Server:
        size = torch.stack([sums.clients, sums.rows])
        now = server._replace(
            best=server.parameters,
            deviance=sums.deviance,
            slope=sums.slope,
            curvature=(sums.curvature + sums.curvature.T) / 2,
            size=size,
            damping=server.damping / 10 * (server.damping > 1e-4),
        )
        is_higher = not bool(sums.deviance <= server.deviance + SETTLED)
        if is_higher and bool((size == server.size).all()):  # of other clients a deviance says nothing
            now = server._replace(damping=(10 * server.damping).clamp(min=DAMPED))
        step = self._step(now)
        left = (now.slope @ step + step @ now.curvature @ step / 2).abs()
        return now._replace(parameters=now.best + step, left=left)

    def _step(self, server: Server) -> Tensor:
        """[p] towards the least deviance, as if it was as curved in directions where it curves downwards."""
        scale = server.curvature.diagonal().abs().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        values, axes = torch.linalg.eigh(server.curvature / torch.outer(scale, scale))
        values = values.abs()
        there = values > LEAST * values.amax(0)
        axes, values = axes[:, there], values[there] + server.damping
        step: Tensor = -(axes / values @ (axes.T @ (server.slope / scale))) / scale
        return step * (FARTHEST / step.norm().clamp(min=FARTHEST))

    def is_solved(self, server: Server) -> bool:
        return bool(server.left < SETTLED)

    def estimate(self, server: Server) -> Estimates:
        """The estimates so far; their errors are by the inverse of the observed information."""
        fixed, factor = self._split(server.best, server.at)
        inverse = torch.linalg.pinv(server.curvature / 2, rtol=LEAST, hermitian=True)
        f, q = len(fixed), len(factor)
        at = self._places(q)
        jacobian = torch.zeros(q, q, len(at[0])).to(factor)
        for number, (i, j) in enumerate(zip(*map(Tensor.tolist, at), strict=True)):
            jacobian[i, :, number] += factor[:, j]
            jacobian[:, i, number] += factor[:, j]
        spread = torch.einsum("ija,ab,klb->ijkl", jacobian, inverse[f:, f:], jacobian)
        return Estimates(fixed, inverse[:f, :f], factor @ factor.T, spread)

    def personalise(self, client: Client, received: Sent) -> dict[str, Tree]:
        rows = Rows.read(client, received)
        fixed, factor = self._split(received.parameters, received.at)
        at, identity = received.at, torch.eye(len(fixed)).to(fixed)
        offset, design = self._place(rows, received.parameters, received.at)
        u = find_mode(rows, offset, design)
        variance = rows.expect(offset + design @ u)[1]
        given = factor @ torch.linalg.solve(precision_of(rows, design, variance), factor.T)
        place = identity[:, at]
        follows = identity - place @ given @ rows.x[:, at].T @ ((rows.real * variance)[:, None] * rows.x)
        covariance = follows @ received.uncertainty @ follows.T + place @ given @ place.T
        coefficients = fixed + place @ factor @ u
        theta = received.theta
        mixed = model_of(client.model.layout, theta, to_outputs(client.task, coefficients)[None])[0]
        return {
            "mixed": Personal(mixed, covariance.to(theta.dtype)),
            "fixed": Personal(theta, received.uncertainty.to(theta.dtype)),
        }
