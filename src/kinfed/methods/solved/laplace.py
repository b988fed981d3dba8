"""Laplace's approximation: how likely a client's labels or counts are, its own coefficients integrated out."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.client import Client
from ...core.tasks import Classification, Counts, Regression
from ...core.trees import Tree
from ...errors import UsageError
from .partial_pooling import inputs_of

STEPS = 15  # of Newton's method to a mode
LENGTHS = 8  # of a step of Newton's method: that, half of it, a quarter, ...
FARTHEST = 4.0  # the largest change of a linear predictor by one of these


class Rows(NamedTuple):
    r"""A client's labels of two classes, or counts, with densities $\exp(y \eta - A(\eta) + c)$, $\eta = c^\top x$."""

    x: Tensor  # [n, f] inputs of the last layer, with its 1
    y: Tensor  # [n] 1 of the second class and 0 of the first, or counts
    real: Tensor  # [n] as how many rows each counts
    mean: float  # of counts, over which $e^\eta$ is expected; 0 of labels

    @classmethod
    def read(cls, client: Client, received: Tree) -> "Rows":
        """Those of a client's training rows."""
        _, y, real = client.data
        task: Any = client.task
        mean = task.mean if isinstance(task, Counts) else 0.0
        return cls(inputs_of(client, received)[0], y.double().flatten(), real.double(), mean)

    def log_density(self, eta: Tensor) -> Tensor:
        """[...] the sum over rows at eta: [..., n], less `constant`."""
        cumulant = self.mean * eta.exp() if self.mean else torch.nn.functional.softplus(eta)
        return (self.real * (self.y * eta - cumulant)).sum(-1)

    def expect(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """[n] the means of targets at eta: [n], and their variances."""
        if self.mean:
            expected = self.mean * eta.exp()
            return expected, expected
        chance = eta.sigmoid()
        return chance, chance * (1 - chance)

    def constant(self) -> Tensor:
        """[] the part of the log-density that no coefficient changes."""
        if not self.mean:
            return 0 * self.real.sum()
        return (self.real * (self.y * math.log(self.mean) - torch.lgamma(self.y + 1))).sum()


def takes(task: Any) -> bool:
    """Whether targets of this task have such densities: labels of two classes, and counts."""
    return isinstance(task, Counts) or (isinstance(task, Classification) and task.classes == 2)


def check_task(task: Any, outputs: int, method: str) -> None:
    """Raise UsageError unless a method of linear predictors, one for each row, solves such targets and outputs."""
    if isinstance(task, Classification) and task.classes != 2:
        raise UsageError(f"{method} solves labels of two classes; there are {task.classes}; use 'partial-pooling'")
    if not takes(task) and (not isinstance(task, Regression) or task.names[1:]):
        raise UsageError(
            f"{method} solves a single number, labels of two classes, or counts; for others use 'partial-pooling'"
        )
    if outputs != (2 if isinstance(task, Classification) else 1):
        raise UsageError(f"{method} solves one number for each row, and this model gives {outputs} outputs")


def to_outputs(task: Any, coefficients: Tensor) -> Tensor:
    """[..., f, k] coefficients of the last layer's outputs, of those of the linear predictor: [..., f]."""
    if isinstance(task, Classification):
        return torch.stack([-coefficients / 2, coefficients / 2], -1)
    return coefficients[..., None]


def from_outputs(task: Any, coefficients: Tensor) -> Tensor:
    """[f] the coefficients of the linear predictor, of those of the last layer's outputs: [f, k]."""
    if isinstance(task, Classification):
        return coefficients[:, 1] - coefficients[:, 0]
    return coefficients[:, 0]


def find_mode(rows: Rows, offset: Tensor, design: Tensor) -> Tensor:
    """[q] the likeliest u, of which eta is offset: [n] + design: [n, q] u, and which is standard normal before rows."""
    lengths = 0.5 ** torch.arange(LENGTHS, device=offset.device).double()[:, None]
    u = 0 * design.sum(0)
    for _ in range(STEPS):
        step = step_to_mode(rows, offset, design, u) - u
        step = step * (FARTHEST / (rows.real.sign() * (design @ step)).abs().amax().clamp(min=FARTHEST))
        trials = u + lengths * step  # [LENGTHS, q]
        values = rows.log_density(offset + trials @ design.T) - trials.square().sum(1) / 2
        u = trials.index_select(0, values.nan_to_num(-torch.inf).argmax()[None])[0]
    return u


def step_to_mode(rows: Rows, offset: Tensor, design: Tensor, u: Tensor) -> Tensor:
    """[q] u after a step of Newton's method."""
    expected, weight = rows.expect(offset + design @ u)
    slope = design.T @ (rows.real * (rows.y - expected)) - u
    # Not torch.linalg.solve, whose second derivatives are wrong in torch 2.13 where forward mode is mixed with vmap.
    factor = torch.linalg.cholesky_ex(precision_of(rows, design, weight))[0]
    return u + torch.cholesky_solve(slope[:, None], factor)[:, 0]


def precision_of(rows: Rows, design: Tensor, weight: Tensor) -> Tensor:
    """[q, q] of u by rows with variances weight: [n], and before rows."""
    return design.T @ ((rows.real * weight)[:, None] * design) + torch.eye(design.shape[1]).to(design)


def log_marginal(rows: Rows, offset: Tensor, design: Tensor, u: Tensor) -> Tensor:
    """[] the logarithm of the density of targets, u integrated out by Laplace's approximation at its mode: [q]."""
    eta = offset + design @ u
    factor = torch.linalg.cholesky_ex(precision_of(rows, design, rows.expect(eta)[1]))[0]
    return rows.log_density(eta) - u @ u / 2 - factor.diagonal().log().sum()
