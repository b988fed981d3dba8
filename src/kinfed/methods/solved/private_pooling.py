"""Private pooling: a mixed model by EM, of which clients upload steps of a known length."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...core.client import Client
from ...core.graph import Origin
from ...core.method import Method, Params, Roster
from ...core.mixins import Averages, Explains, Solves
from ...core.tasks import Regression
from ...core.trees import Averaged, ModelOf, Shared, Tree
from ...errors import UsageError
from .mixed_model import Products, moments_of
from .partial_pooling import coefficients_of, head_of, model_of

REACH = 1.5  # the unit of a step's length, over the root of the number of inputs: a usual step is 0.8 of it
LEAST, MOST = 1e-3, 1e4  # bounds of variances, of targets whose variance is 1
FREE = 10.0  # how many times as far as others the constant may lie from 0, in a ridge of a client's own
LARGEST = 4.0  # of a client's squared errors over the noise
SHRINKS, GROWS = (0.05, 0.2), (8.0, 4.0)  # how far variances of coefficients, and the noise, change in a round
SETTLED = 1e-4  # a step that is none


class Sent(NamedTuple):
    """What every client receives."""

    theta: ModelOf[Shared]  # [d] the model with the centre
    spread: Shared  # [f] the variances of clients' coefficients
    noise: Shared  # [] the variance of targets about their predictions


class Step(NamedTuple):
    """How a client would move what all share; the server gets the mean over clients."""

    step: Averaged  # [2 f + 1] of the centre, of the variances, and of the noise, in units of REACH


class Server(NamedTuple):
    """The server's state."""

    body: Shared  # [d] the initial model, whose head is replaced
    centre: Shared  # [f]
    spread: Shared  # [f]
    noise: Shared  # []
    moved: Shared  # [] the largest entry of the last step


@dataclass(frozen=True)
class PrivatePooling(Method, Averages, Explains, Solves):
    r"""$c_i \sim N(\mu, D)$, $y = c_i^\top x + \epsilon$, $\epsilon \sim N(0, \sigma^2)$, by EM from bounded steps.

    A client solves its own $c_i$ and their covariance $P_i$ at home by its exact rows and what all share. It uploads
    $a_i / \sqrt{D}$ with $a_i = c_i - \mu$, $((a_i^2 + \mathrm{diag} P_i) / D - 1) / 2$, and its squared errors over
    $\sigma^2$, less 1. The mean of this vector over clients is the step of EM (Laird and Ware 1982,
    doi:10.2307/2529876) in units of what is already known. So it is of the same length whatever the rows, and a client
    with many counts as much as others. Under `privacy.unit="client"` it is cut to `privacy.clip`, and the mean is
    noised. $c_i$ never leaves.
    """

    origin: ClassVar[Origin] = "fixed"
    solves: ClassVar[bool] = True
    weighs: ClassVar[str] = "clients share a centre and variances, and no client learns from another"

    def start(self, roster: Roster) -> Tree:
        if not isinstance(roster.task, Regression) or roster.task.names[1:]:
            raise UsageError("private-pooling solves a single number; for labels or counts use 'partial-pooling'")
        coefficients = coefficients_of(roster.layout, roster.theta)  # [f, k]
        if head_of(roster.layout)[1] is None or coefficients.shape[1] > 1:
            raise UsageError("private-pooling needs a last layer with one output and a bias; use model.name=linear")
        like: dict[str, Any] = {"dtype": torch.float64, "device": roster.theta.device}
        ones = torch.ones(len(coefficients), **like)
        return Server(roster.theta, 0 * ones, ones, ones[0], torch.tensor(math.inf, **like))

    def weights(self, roster: Roster, cohort: Tensor) -> Tensor:
        """[K] the same of all."""
        return torch.ones_like(roster.weights[cohort])

    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        theta = model_of(roster.layout, server.body, server.centre[None, :, None])[0]
        return Sent(theta, server.spread, server.noise)

    def init_client(self, client: Client) -> Tree:
        return Products.empty(client)

    def train(self, client: Client, state: Tree, received: Tree) -> tuple[Tree, Tree]:
        moments, centre = moments_of(client, received), coefficients_of(client.model.layout, received.theta)[:, 0]
        away, covariance = self.solve(moments, received, centre)
        inputs, slope = moments.products[:-1, :-1], moments.products[:-1, -1]
        own = centre + away
        squares = moments.products[-1, -1] - 2 * own @ slope + own @ inputs @ own + (inputs * covariance).sum()
        error = (squares / moments.rows.clamp(min=1) / received.noise).clamp(0, LARGEST)
        wider = ((away.square() + covariance.diagonal()) / received.spread - 1) / 2
        step = torch.cat([away / received.spread.sqrt(), wider, (error - 1)[None]])
        return moments, Step((step / (REACH * math.sqrt(len(away)))).to(received.theta.dtype))

    def solve(self, moments: Products, received: Sent, centre: Tensor) -> tuple[Tensor, Tensor]:
        """[f] how far a client's coefficients are from the centre: [f], and their covariance: [f, f]."""
        inputs, slope = moments.products[:-1, :-1], moments.products[:-1, -1]
        root = received.spread.sqrt()
        inside = root[:, None] * inputs * root / received.noise + torch.eye(len(root)).to(root)
        covariance = root[:, None] * torch.linalg.inv(inside) * root
        return covariance @ (slope - inputs @ centre) / received.noise, covariance

    def choose_coefficients(self, moments: Products, received: Sent, centre: Tensor) -> Tensor:
        """[f] a client's coefficients: the mean of those by what all share, and of a ridge of its own, as rows say.

        Each has the weight of its density of the client's targets, coefficients integrated out (Hoeting et al. 1999,
        doi:10.1214/ss/1009212519, Equations 1 to 3), so no row is held back for it and nothing leaves. The ridge's two
        numbers are fitted to the rows, and pay for it as in BIC.
        """
        rows, inputs, slope = moments.rows, moments.products[:-1, :-1], moments.products[:-1, -1]
        away, _ = self.solve(moments, received, centre)
        root = received.spread.sqrt()
        inside = torch.eye(len(root)).to(root) + root[:, None] * inputs * root / received.noise
        squares = moments.products[-1, -1] - 2 * centre @ slope + centre @ inputs @ centre
        left = (squares - away @ (slope - inputs @ centre)) / received.noise
        together = -(rows * received.noise.log() + torch.logdet(inside) + left) / 2
        alone, coefficients = _solve_alone(moments)
        share = (together - alone + rows.clamp(min=1).log()).sigmoid()
        return share * (centre + away) + (1 - share) * coefficients

    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        f = len(server.centre)
        step = uploads.step.double() * REACH * math.sqrt(f)
        shift, wider, error = step[:f], step[f : 2 * f], step[-1]
        # Wider is about the former centre: what the centre moves explains a part of it.
        spread = server.spread * (1 + 2 * wider - shift.square()).clamp(SHRINKS[0], GROWS[0])
        noise = server.noise * (1 + error).clamp(SHRINKS[1], GROWS[1])
        centre = server.centre + shift * server.spread.sqrt()
        return Server(server.body, centre, spread.clamp(LEAST, MOST), noise.clamp(LEAST, MOST), step.abs().max())

    def is_solved(self, server: Tree) -> bool:
        return bool(server.moved < SETTLED)

    def personalise(self, client: Client, state: Tree, received: Tree) -> dict[str, Tree]:
        layout = client.model.layout
        own = self.choose_coefficients(state, received, coefficients_of(layout, received.theta)[:, 0])
        return {
            "mixed": Params(model_of(layout, received.theta, own[None, :, None])[0]),
            "shared": Params(received.theta),
        }

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        return None

    def diagnostics(self, roster: Roster, server: Tree, cohort: Tensor, sent: Tree, uploads: Tree) -> dict[str, Tensor]:
        return {"noise": server.noise, "moved": server.moved}


def _solve_alone(moments: Products) -> tuple[Tensor, Tensor]:
    """[] the logarithm of the density of a client's targets under the ridge that makes it largest, and its [f]."""
    rows, inputs, slope = moments.rows.clamp(min=1), moments.products[:-1, :-1], moments.products[:-1, -1]
    penalties = torch.logspace(-3, 4, 15).to(inputs)
    root = torch.ones_like(slope).index_fill(0, torch.tensor([len(slope) - 1]), FREE)
    inside = root[:, None] * inputs * root / penalties[:, None, None] + torch.eye(len(root)).to(root)
    right = (root * slope).expand(len(penalties), -1)[..., None]
    coefficients = root * torch.linalg.solve(inside, right)[..., 0] / penalties[:, None]  # [P, f]
    left = (moments.products[-1, -1] - coefficients @ slope).clamp(min=LEAST * rows)
    density = -(rows * (left / rows).log() + torch.logdet(inside) + rows) / 2
    best = density.argmax()
    return density.gather(0, best[None])[0], coefficients.gather(0, best.expand(1, len(slope)))[0]
