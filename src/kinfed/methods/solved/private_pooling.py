"""Private pooling: a mixed model by EM, of which clients upload steps of a known length."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ...core.graph import Origin
from ...core.method import Method, Params, Roster
from ...core.mixins import Averages, Explains, Solves
from ...core.private.private_sums import find_noise
from ...core.tasks import Classification
from ...core.trees import Averaged, ModelOf, Shared
from ...errors import UsageError
from .laplace import Labels, Rows, check_task, find_mode, log_marginal, read_rows, takes, to_outputs
from .mixed_model import Products, moments_of
from .own_ridge import DIFFER, About, lean, place_about
from .partial_pooling import coefficients_of, head_of, model_of

LEAST, MOST = 1e-3, 1e4  # bounds of variances, of targets whose variance is 1
CONSTANTS, SLOPES = (1.0, 3.0), (0.03, 0.1, 0.3, 1.0)  # deviations that the same may have, of labels and counts
EXCESS = (0, 2, 5)  # powers of 10 by which a client's counts may vary more than those of all, and how many
LARGEST = 4.0  # of a client's squared errors over the noise
SHRINKS, GROWS = (0.05, 0.2), (8.0, 4.0)  # how far variances of coefficients, and the noise, change in a round
SETTLED = 1e-4  # a step that is none
WIDEST = 600  # coefficients of a client's labels of three and more classes, whose covariance it works out
FEWEST = 0.2  # of the share that each of several centres would have of all clients, what it has at least


class Sent(NamedTuple):
    """What every client receives."""

    theta: ModelOf[Shared]  # [d] the model with the mean of the centres
    centres: Shared  # [K, f c]
    shares: Shared  # [K] of clients about each centre
    spread: Shared  # [f] the variances of clients' coefficients about their centre, the same of all c
    noise: Shared  # [] the variance of targets about their predictions
    sharpness: Shared  # [] how far likelihoods count for where a client belongs


class Step(NamedTuple):
    """How a client would move what all share; the server gets the mean over clients."""

    # [K f c + f + 1] of the centres, the variances and the noise, in units of `reach`; and [K] shares, if K is above 1
    step: Averaged


class Server(NamedTuple):
    """The server's state."""

    body: Shared  # [d] the initial model, whose head is replaced
    centres: Shared  # [K, f c] with c = 1, or of C classes c = C - 1 linear predictors
    shares: Shared  # [K]
    spread: Shared  # [f]
    noise: Shared  # []
    moved: Shared  # [] the largest entry of the last step

    @property
    def centre(self) -> Tensor:
        """[f c] the mean over clients of their centres."""
        return self.shares @ self.centres


class Placed(NamedTuple):
    """A client beside each of the centres."""

    away: Tensor  # [K, f c] how far its coefficients are from the centre, by its rows and the variances
    covariance: Tensor  # [K, f c, f c] of its coefficients
    density: Tensor  # [K] the logarithm of the density of its targets, less a constant


@dataclass(frozen=True)
class PrivatePooling(Method, Averages, Explains, Solves):
    r"""$c_i \sim N(\mu, D)$, $y = c_i^\top x + \epsilon$, $\epsilon \sim N(0, \sigma^2)$, by EM from bounded steps.

    A client solves its own $c_i$ and their covariance $P_i$ at home by its exact rows and what all share. It uploads
    $a_i / \sqrt{D}$ with $a_i = c_i - \mu$, $((a_i^2 + \mathrm{diag} P_i) / D - 1) / 2$, and its squared errors over
    $\sigma^2$, less 1. The mean of this vector over clients is the step of EM (Laird and Ware 1982,
    doi:10.2307/2529876) in units of what is already known. So it is of the same length whatever the rows, and a client
    with many counts as much as others. Under `privacy.unit="client"` it is cut to `privacy.clip`, and the mean is
    noised. $c_i$ never leaves.

    Labels have no $\sigma^2$, and that of counts is their variance over Poisson's. Then $c_i$ is the mode and $P_i$
    the inverse of the curvature there, by Newton's method at home (Tierney and Kadane 1986,
    doi:10.1080/01621459.1986.10478240). Of C classes $c_i$ has C - 1 contrasts for each input, of one variance, so that
    nothing depends on the order of classes.
    """

    # The unit of a step's length, over the root of the number of inputs. A usual step is 1.2 long, so the clip makes
    # most clients' steps alike in length. That slows EM, but costs less than the noise that a longer step would need.
    reach: ClassVar[float] = 0.5
    origin: ClassVar[Origin] = "fixed"
    solves: ClassVar[bool] = True
    takes_gradients: ClassVar[bool] = False
    weighs: ClassVar[str] = "clients share a centre and variances, and no client learns from another"

    def start(self, roster):
        inputs, predictors = _count_inputs(roster)
        like = {"dtype": torch.float64, "device": roster.theta.device}
        ones, centres = torch.ones(inputs, **like), torch.zeros(1, inputs * predictors, **like)
        return Server(roster.theta, centres, ones[:1], ones, ones[0], torch.tensor(math.inf, **like))

    def weights(self, roster, cohort):
        """[K] the same of all."""
        return torch.ones_like(roster.weights[cohort])

    def send(self, roster, server, cohort):
        theta = model_of(roster.layout, server.body, to_outputs(roster.task, server.centre)[None])[0]
        sharpness = torch.full_like(server.noise, self.sharpness(roster))
        return Sent(theta, server.centres, server.shares, server.spread, server.noise, sharpness)

    def sharpness(self, roster: Roster) -> float:
        """How far likelihoods count in this round for where a client belongs."""
        return 1.0

    def init_client(self, client):
        return () if takes(client.task) else Products.empty(client)

    def train(self, client, state, received):
        rows = read_rows(client, received) if takes(client.task) else moments_of(client, received)
        away, covariance, density = place_client(rows, received.centres, received.spread, received.noise)
        belongs = (received.shares.log() + received.sharpness * density).softmax(0)  # [K]
        errors = (measure_squares(rows, received.centres + away, covariance) / received.noise).clamp(0, LARGEST)
        spread = _widen(received.spread, away)
        squares = (away.square() + covariance.diagonal(dim1=1, dim2=2)) / spread
        wider = _narrow(belongs @ squares - 1, received.spread) / 2
        shift = belongs[:, None] * away / spread.sqrt()
        step = torch.cat([shift.flatten(), wider, belongs @ errors[:, None] - 1])
        step = step / (self.reach * math.sqrt(len(spread)))
        step = step if len(belongs) == 1 else torch.cat([step, belongs])
        return () if takes(client.task) else rows, Step(step.to(received.theta.dtype))

    def choose_coefficients(self, rows: Products | Rows | Labels, received: Sent) -> Tensor:
        """[f c] a client's coefficients: the mean of those by what all share, and of a ridge of its own, as rows say.

        Each has the weight of its density of the client's targets, see `own_ridge`. Several centres have half of the
        weight beside one for all, about which coefficients vary as centres do, too. Labels and counts have regressions
        of their own in place of ridges. A client's counts may vary more than those of all, as its rows say.
        """
        centres, shares, spread, noise = received.centres, received.shares, received.spread, received.noise
        shared = [About(centres, shares, spread)]
        if len(shares) > 1:
            mean = shares @ centres
            wide = spread + _narrow(shares @ (centres - mean).square(), spread)
            half = torch.full_like(shares[:1], 0.5)
            shared = [About(centres, shares / 2, spread), About(mean[None], half, wide)]
        if isinstance(rows, Products):
            return lean(*rows, shared, noise)
        candidates, likely = list[Tensor](), list[Tensor]()
        for level, chance in zip(*find_noises(rows, noise), strict=True):
            alone, density = _regress_alone(rows, centres, level)
            candidates.append(alone)
            likely.append(density + chance)
            for about in shared:
                placed = place_client(rows, about.centres, about.spread, level)
                candidates.append(about.centres + placed.away)
                likely.append(placed.density + about.shares.log() + chance)
        return torch.cat(likely).softmax(0) @ torch.cat(candidates)

    def aggregate(self, roster, server, cohort, uploads):
        count, width = server.centres.shape
        step, f = uploads.step.double(), len(server.spread)
        shares = server.shares if count == 1 else step[-count:].clamp(min=FEWEST / count)
        step = step[: count * width + f + 1] * self.reach * math.sqrt(width)
        shift, wider, error = step[: count * width].view(count, width) / shares[:, None], step[-f - 1 : -1], step[-1]
        # Wider is about the former centres: what these move, noise left aside, explains a part of it.
        vary = self.reach**2 * width * _vary(roster, cohort)
        explained = (shift.square() - vary / shares[:, None].square()).clamp(min=0)
        grown = (1 + 2 * wider - _narrow(shares @ explained, server.spread)).clamp(SHRINKS[0], GROWS[0])
        spread = server.spread * self.limit_growth(roster, grown)
        noise = (server.noise * (1 + error).clamp(SHRINKS[1], GROWS[1])).clamp(LEAST, MOST)
        if isinstance(roster.task, Classification):
            noise = server.noise
        centres = server.centres + shift * _widen(server.spread, shift).sqrt()
        moved = step.abs().max()
        shares = shares / shares.sum()
        return Server(server.body, centres, shares, spread.clamp(LEAST, MOST), noise, moved)

    def limit_growth(self, roster: Roster, grown: Tensor) -> Tensor:
        """[f] by which variances of coefficients are multiplied in this round, where EM asks for grown: [f]."""
        return grown

    def is_solved(self, server):
        return bool(server.moved < SETTLED)

    def personalise(self, client, state, received):
        rows = read_rows(client, received) if takes(client.task) else state
        coefficients = to_outputs(client.task, self.choose_coefficients(rows, received))
        return {
            "mixed": Params(model_of(client.model.layout, received.theta, coefficients[None])[0]),
            "shared": Params(received.theta),
        }

    def relation(self, roster, server, cohort):
        return None

    def diagnostics(self, roster, server, cohort, sent, uploads):
        return {"noise": server.noise, "moved": server.moved}


def _count_inputs(roster: Roster) -> tuple[int, int]:
    """The inputs of the head, with its 1, and its linear predictors; raises UsageError unless they can be solved."""
    f, outputs = coefficients_of(roster.layout, roster.theta).shape
    check_task(roster.task, outputs, "private pooling", two_classes=False)
    if head_of(roster.layout)[1] is None:
        raise UsageError("private pooling needs a last layer with a bias; use model.name=linear")
    predictors = max(1, outputs - 1)
    if predictors > 1 and f * predictors > WIDEST:
        raise UsageError(
            f"private pooling of {outputs} classes solves {f} inputs, with their 1, times {predictors} coefficients, "
            f"and takes at most {WIDEST}; use fewer columns or classes, or another method, such as 'fedavg'"
        )
    return f, predictors


def _widen(spread: Tensor, coefficients: Tensor) -> Tensor:
    """[f c] the variance of each of coefficients: [..., f c], of those of inputs: [f]."""
    return spread.repeat_interleave(coefficients.shape[-1] // len(spread))


def _narrow(values: Tensor, spread: Tensor) -> Tensor:
    """[f] the means of values: [f c] over an input's coefficients, of which there are as many as spread: [f] says."""
    return values.unflatten(0, (len(spread), -1)).mean(1)


def place_client(rows: Products | Rows | Labels, centres: Tensor, spread: Tensor, noise: Tensor) -> Placed:
    """A client beside centres: [K, f c], about which coefficients have the variances spread: [f]."""
    if not isinstance(rows, Products):
        return Placed(*vmap(partial(_place_rows, rows._replace(real=rows.real / noise), spread.sqrt()))(centres))
    away, covariance, density = place_about(*rows, centres, spread, noise)
    return Placed(away, covariance.expand(len(centres), -1, -1), density)


def _place_rows(rows: Rows | Labels, root: Tensor, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[f c], [f c, f c], [] of `Placed` beside one centre: [f c], with the deviations root: [f]."""
    offset, design = rows.predict(rows.x, centre), rows.x * root
    u = find_mode(rows, offset, design)
    covariance = torch.linalg.inv(rows.derive(design, offset + rows.predict(design, u))[1])
    wide = _widen(root, centre)
    return wide * u, wide[:, None] * covariance * wide, log_marginal(rows, offset, design, u)


def measure_squares(rows: Products | Rows | Labels, coefficients: Tensor, covariance: Tensor) -> Tensor:
    """[K] a client's mean squared error by coefficients: [K, f c] with errors of covariance: [K, f c, f c].

    That of counts is over the variance that Poisson's would have, and that of labels is 1.
    """
    if isinstance(rows, Products):
        inputs, slope = rows.products[:-1, :-1], rows.products[:-1, -1]
        squares = rows.products[-1, -1] - 2 * coefficients @ slope
        squares = squares + torch.einsum("kf,fg,kg->k", coefficients, inputs, coefficients)
        total: Tensor = squares + (inputs * covariance).sum((1, 2))
        return total / rows.rows.clamp(min=1)
    if isinstance(rows, Labels) or not rows.mean:
        return torch.ones_like(coefficients[:, 0])
    expected = rows.expect(coefficients @ rows.x.T)[0].clamp(min=LEAST)  # [K, n]
    uncertain = torch.einsum("nf,kfg,ng->kn", rows.x, covariance, rows.x)
    squares = (rows.y - expected).square() / expected + expected * uncertain
    return squares @ rows.real / rows.real.sum().clamp(min=1)


def _vary(roster: Roster, cohort: Tensor) -> float:
    """The variance of the noise of an entry of the mean step."""
    privacy = roster.training.noise
    if privacy is None:
        return 0.0
    return (privacy.clip * find_noise(privacy, roster.rounds) / len(cohort)) ** 2


def find_noises(rows: Rows | Labels, usual: Tensor) -> tuple[Tensor, Tensor]:
    """[M] variances that a client's counts may have, over Poisson's, and [M] what each adds to log-densities.

    Those of all clients, usual: [], are the least. Each adds how likely it was before rows count, and the terms of the
    extended quasi-likelihood in which it stands alone (Nelder and Pregibon 1987, doi:10.1093/biomet/74.2.221, Equation
    1). Labels have the usual one.
    """
    if isinstance(rows, Labels) or not rows.mean:
        return usual[None], torch.zeros_like(usual)[None]
    # None is below the usual one, because a client of zeros alone would have the least.
    factors = torch.logspace(*EXCESS, dtype=usual.dtype, device=usual.device)
    before = -(factors.log() / DIFFER).square() / 2
    return factors * usual, before - rows.real.sum() * factors.log() / 2 - rows.measure_saturated() / (factors * usual)


def _regress_alone(rows: Rows | Labels, centres: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """[P, f c] coefficients of regressions of a client's own labels or counts, as many as of centres: [K, f c].

    P penalties are as likely, and [P] are the logarithms of densities with them. Counts vary by the noise: [].
    """
    slopes, constants = torch.tensor(SLOPES).to(rows.x), torch.tensor(CONSTANTS).to(rows.x)
    others = slopes.repeat(len(constants))[:, None].expand(-1, rows.x.shape[1] - 1)
    root = torch.cat([others, constants.repeat_interleave(len(slopes))[:, None]], 1)  # [P, f]
    place = partial(_place_rows, rows._replace(real=rows.real / noise))
    coefficients, _, density = vmap(place)(root, torch.zeros_like(centres[0]).expand(len(root), -1))
    density = torch.where(rows.real.sum() > 0, density - math.log(len(root)), -torch.inf)
    return coefficients, density
