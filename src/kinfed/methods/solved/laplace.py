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

    def predict(self, design: Tensor, u: Tensor) -> Tensor:
        """[..., n] the linear predictor by u: [..., q] of columns design: [n, q]."""
        return u @ design.T

    def derive(self, design: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """[q] the derivative of the log-density by u at eta: [n], and [q, q] the precision of u, with that before."""
        expected, weight = self.expect(eta)
        return design.T @ (self.real * (self.y - expected)), precision_of(self, design, weight)

    def constant(self) -> Tensor:
        """[] the part of the log-density that no coefficient changes."""
        if not self.mean:
            return 0 * self.real.sum()
        return (self.real * (self.y * math.log(self.mean) - torch.lgamma(self.y + 1))).sum()

    def measure_saturated(self) -> Tensor:
        """[] the log-density of counts of which each is expected as it is, less `constant`."""
        return (self.real * (torch.xlogy(self.y, self.y / self.mean) - self.y)).sum()


class Labels(NamedTuple):
    r"""A client's labels of C classes, by a softmax of $B \eta$, in which c = C - 1 linear predictors are contrasts.

    Coefficients [f, c] are flattened; of two classes all is as of `Rows`.
    """

    x: Tensor  # [n, f] inputs of the last layer, with its 1
    y: Tensor  # [n, C] 1 of a row's class
    real: Tensor  # [n] as how many rows each counts
    contrasts: Tensor  # [C, c], B

    @classmethod
    def read(cls, client: Client, received: Tree) -> "Labels":
        """Those of a client's training rows."""
        _, y, real = client.data
        inputs, task = inputs_of(client, received)[0], client.task
        assert isinstance(task, Classification)
        labels = torch.nn.functional.one_hot(y, task.classes).double()
        return cls(inputs, labels, real.double(), contrast_classes(task.classes).to(inputs))

    def log_density(self, eta: Tensor) -> Tensor:
        """[...] the sum over rows at eta: [..., n, c]."""
        logs = (eta @ self.contrasts.T).log_softmax(-1)
        return (self.real * (self.y * logs).sum(-1)).sum(-1)

    def predict(self, design: Tensor, u: Tensor) -> Tensor:
        """[..., n, c] linear predictors by u: [..., q c] of columns design: [n, q]."""
        return design @ u.unflatten(-1, (design.shape[1], -1))

    def derive(self, design: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """[q c] the derivative of the log-density by u at eta: [n, c], and [q c, q c] as of `Rows`."""
        share = (eta @ self.contrasts.T).softmax(-1)  # [n, C]
        error = (self.y - share) * self.real[:, None]
        mean, blocks = share @ self.contrasts, list[Tensor]()  # [n, c]
        for column in range(self.contrasts.shape[1]):  # not at once, which takes c times the memory
            products = (share * self.contrasts[:, column]) @ self.contrasts - mean[:, column, None] * mean  # [n, c]
            weighted = (self.real[:, None] * products)[:, None] * design[:, :, None]  # [n, q, c]
            blocks.append(torch.einsum("nq,nrc->qrc", design, weighted))
        size = design.shape[1] * len(blocks)
        within = torch.stack(blocks, 1).reshape(size, size)  # of [q, c, q, c]
        return (design.T @ error @ self.contrasts).flatten(), within + torch.eye(size).to(within)


def takes(task: Any) -> bool:
    """Whether targets of this task have such densities: labels, and counts."""
    return isinstance(task, Counts | Classification)


def read_rows(client: Client, received: Tree) -> Rows | Labels:
    """A client's training rows, where its task has such densities."""
    task = client.task
    several = isinstance(task, Classification) and task.classes > 2
    return Labels.read(client, received) if several else Rows.read(client, received)


def check_task(task: Any, outputs: int, method: str, two_classes: bool = True) -> None:
    """Raise UsageError unless a method solves such targets and outputs, and labels of `two_classes` alone."""
    labels, classes = isinstance(task, Classification), task.classes if isinstance(task, Classification) else 1
    if labels and two_classes and classes != 2:
        raise UsageError(f"{method} solves labels of two classes; there are {classes}; use 'partial-pooling'")
    if not takes(task) and (not isinstance(task, Regression) or task.names[1:]):
        which = "labels of two classes" if two_classes else "labels"
        raise UsageError(f"{method} solves a single number, {which}, or counts; for others use 'partial-pooling'")
    if outputs != classes:
        wants = f"{classes} outputs, one for each class," if labels else "one number for each row,"
        raise UsageError(f"{method} solves {wants} and this model gives {outputs} outputs")


def contrast_classes(classes: int) -> Tensor:
    """[C, C - 1] columns that say how outputs of classes differ: each adds up to 0, and has the squared length 1 / 2.

    So the log odds of two classes have the variance of a coefficient, whichever two. Of two classes it is (-1, 1) / 2.
    """
    after = torch.arange(1, classes, dtype=torch.float64)
    columns = torch.diag(after, -1)[:, :-1] - torch.ones(classes, classes - 1).double().triu()
    return columns / (2 * after * (after + 1)).sqrt()


def to_outputs(task: Any, coefficients: Tensor) -> Tensor:
    """[..., f, k] coefficients of the last layer's outputs, of those of linear predictors: [..., f c]."""
    if isinstance(task, Classification):
        contrasts = contrast_classes(task.classes).to(coefficients)
        return coefficients.unflatten(-1, (-1, task.classes - 1)) @ contrasts.T
    return coefficients[..., None]


def from_outputs(task: Any, coefficients: Tensor) -> Tensor:
    """[f] the coefficients of the linear predictor, of those of the last layer's outputs: [f, k]."""
    if isinstance(task, Classification):
        return coefficients[:, 1] - coefficients[:, 0]
    return coefficients[:, 0]


def find_mode(rows: Rows | Labels, offset: Tensor, design: Tensor) -> Tensor:
    """[q c] the likeliest u, which is standard normal before rows: eta: [n, (c)] is offset + design: [n, q] times u."""
    lengths = 0.5 ** torch.arange(LENGTHS, device=offset.device).double()[:, None]
    u = 0 * rows.derive(design, offset)[0]
    for _ in range(STEPS):
        step = step_to_mode(rows, offset, design, u) - u
        farthest = rows.predict(rows.real.sign()[:, None] * design, step).abs().amax()
        step = step * (FARTHEST / farthest.clamp(min=FARTHEST))
        trials = u + lengths * step  # [LENGTHS, q c]
        values = rows.log_density(offset + rows.predict(design, trials)) - trials.square().sum(1) / 2
        u = trials.index_select(0, values.nan_to_num(-torch.inf).argmax()[None])[0]
    return u


def step_to_mode(rows: Rows | Labels, offset: Tensor, design: Tensor, u: Tensor) -> Tensor:
    """[q c] u after a step of Newton's method."""
    eta = offset + rows.predict(design, u)
    slope, precision = rows.derive(design, eta)
    # Not torch.linalg.solve, whose second derivatives are wrong in torch 2.13 where forward mode is mixed with vmap.
    factor = torch.linalg.cholesky_ex(precision)[0]
    return u + torch.cholesky_solve((slope - u)[:, None], factor)[:, 0]


def precision_of(rows: Rows, design: Tensor, weight: Tensor) -> Tensor:
    """[q, q] of u by rows with variances weight: [n], and before rows."""
    return design.T @ ((rows.real * weight)[:, None] * design) + torch.eye(design.shape[1]).to(design)


def log_marginal(rows: Rows | Labels, offset: Tensor, design: Tensor, u: Tensor) -> Tensor:
    """[] the logarithm of the density of targets, u integrated out by Laplace's approximation at its mode: [q c]."""
    eta = offset + rows.predict(design, u)
    factor = torch.linalg.cholesky_ex(rows.derive(design, eta)[1])[0]
    return rows.log_density(eta) - u @ u / 2 - factor.diagonal().log().sum()
