"""pFedGAT: a graph attention network mixes models, trained on held-out loss (Zhou et al., 2025, Equations 2 to 10).

Differs: clients judge their mixtures on examples held out from training, not on test examples, which would leak, and
answer with a gradient, as the losses that the paper uploads do not determine how the network should move. The paper
prints neither the width (here 8) nor the first values (Glorot's).
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.func import vjp

from ..core.field_checks import Count, CountOrZero, Positive
from ..core.method import Compared, Params
from ..core.optimiser import SGD, OptState
from ..core.rows import take
from ..core.seeding import key
from ..core.trees import Like, ModelOf, PerClient, Shared, Tree
from ..errors import UsageError
from ..ops.similarity import inner
from ..ops.sketch import count_sketch
from .parts.cohort_mixing import CohortMixing

GIB = 1.0  # that the network may take; a larger one is refused
PATIENCE, SLIGHT = 10, 0.05  # after so many rounds a run is told that its rows of weights differ by less than this


class Heads(NamedTuple):
    """The network: each of its H heads adds a score of the listener (who receives) and one of the speaker."""

    project: Shared  # [H, f, m] W: one projection per head, from m features of a client
    listen: Shared  # [H, f] the half of a that scores the listener
    speak: Shared  # [H, f] the half that scores the speaker


class Server(NamedTuple):
    """The server's state."""

    network: Tree  # the graph network's parameters
    opt_state: Annotated[OptState, Like("network")]
    uploads: PerClient  # [N, d] the models as last trained
    theta: PerClient  # [N, d] the models as last mixed, from which clients start
    present: PerClient  # [N] bool, in the cohort that was mixed last
    seen: PerClient  # [N] bool, has taken part
    step: Shared  # [] how far the network moved in the last round


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[PerClient]  # [d] its trained model
    answer: PerClient  # [d] the gradient on its feedback examples at the mixed model that it received


@dataclass(frozen=True)
class PFedGAT(CohortMixing):
    r"""$\theta_i \leftarrow \sum_j R_{ij} \theta_j$ over the cohort, with weights $R$ that a graph network computes.

    $R_{ij} = \frac1H \sum_h \mathrm{softmax}_j\, \mathrm{LeakyReLU}(a_h^\top [W_h h_i \| W_h h_j])$, where $h_i$ is the
    normalised $\theta_i$ (Equations 3 to 8). $W$ and $a$ take a step against the gradient of $\sum_i L_i$ by way of
    $\partial L_i / \partial R_{ij} = \langle \nabla L_i, \theta_j \rangle$, where $L_i$ is the loss of the mixed model
    on client $i$'s feedback examples (Equations 9 and 10). Other clients than the cohort keep their models; one that
    has never taken part starts from the mean.
    """

    heads: Count = 8  # H, how many heads are averaged
    width: Count = 8  # f, how many numbers a head makes of a client's model: not printed
    slope: float = 0.2  # of LeakyReLU below zero
    lr: Positive = 0.01  # learning rate of the network
    feedback: Literal["held-out", "validation", "train", "test"] = "held-out"  # examples of L_i; test leaks
    sketch: CountOrZero = 0  # the network sees a count sketch of so many numbers, for large models; 0: the model
    projections: ClassVar[int] = 1  # per head
    steps = 1  # of the network in a round

    @property
    def rule(self):
        """How the network steps."""
        return SGD(self.lr)

    def start(self, roster):
        theta, network = roster.copies(), self.draw(roster)
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        return Server(network, self.rule.init(network), theta, theta, nobody, nobody, theta.new_zeros(()))

    def draw(self, roster):
        """The first network, after Glorot and Bengio (2010)."""
        size, generator = self.sketch or roster.layout.parameters, roster.generator("pfedgat")
        gib = self.projections * self.heads * self.width * size * roster.theta.element_size() / 2**30
        if gib > GIB:
            raise UsageError(
                f"pfedgat: a network of {self.heads} heads of width {self.width} over {size:,} features would take "
                f"{gib:.3g} GiB, more than {GIB:g}; set method.sketch=4096, or fewer heads"
            )

        def glorot(fans, *shape):
            """[H, f, ...] numbers."""
            uniform = 2 * torch.rand(self.heads, self.width, *shape, generator=generator) - 1
            return uniform.mul_((6 / fans) ** 0.5).to(roster.theta)

        return self.network(glorot, size)

    def network(self, glorot, size):
        """The first network for so many features of a client."""
        fans = 2 * self.width + 1
        return Heads(glorot(size + self.width, size), glorot(fans), glorot(fans))

    def features(self, roster, server, cohort):
        """[K, m] h: what the network sees of the cohort, normalised (Equation 3)."""
        rows = take(server.uploads, cohort)
        learned = roster.layout.trainable_on(rows.device)
        rows = rows if learned.all() else rows[:, learned]
        if self.sketch:
            rows = count_sketch(rows, key(roster.seed, "pfedgat.features", device=rows.device), self.sketch)
        return F.layer_norm(rows, rows.shape[1:])

    def scores(self, network, features):
        """[H, K, K] each head's scores of speakers (columns) for listeners; features: [K, m] (Equations 4 and 5)."""
        projected = torch.einsum("hfm,km->hkf", network.project, features)
        listen = torch.einsum("hkf,hf->hk", projected, network.listen)
        speak = torch.einsum("hkf,hf->hk", projected, network.speak)
        return F.leaky_relu(listen[:, :, None] + speak[:, None, :], self.slope)

    def weights(self, network, roster, server, cohort):
        """[K, K] R, the weights of the mixture for each of the cohort; rows sum to one (Equations 6 and 7)."""
        return self.scores(network, self.features(roster, server, cohort)).softmax(-1).mean(0)

    def graph(self, roster, server, cohort):
        """[K, K] the weights, which all functions of a round share."""
        made_of = self, roster.seed, *server.network, server.uploads, cohort
        return roster.memo.once("pfedgat", made_of, lambda: self.weights(server.network, roster, server, cohort))

    def train(self, client, state, received):
        answer, theta = self.answer(client, received), client.descend(received.theta)
        return Params(theta), Upload(theta, answer)

    def mix(self, roster, server, cohort, uploads, heard):
        server = super().mix(roster, server, cohort, uploads, heard)
        weights = self.graph(roster, server, heard)
        if roster.round + 1 == PATIENCE and len(heard) > 1 and total_variation(weights, weights.mean(0)).max() < SLIGHT:
            warnings.warn(
                f"pfedgat: after {PATIENCE} rounds its attention is the same for all clients, who are sent nearly one "
                "mean, as by FedAvg; raise method.lr, or use the method kin",
                stacklevel=2,
            )
        return server

    def learn(self, roster, server, cohort, uploads):
        """What the network learns from the last mixtures, of the clients that received one (Equations 9 and 10)."""
        if not len(judging := server.present[cohort].nonzero().squeeze(1)):
            return server._replace(step=torch.zeros_like(server.step))
        mixed = server.present.nonzero().squeeze(1)
        slopes = self.slopes(roster, server, cohort[judging], mixed, Upload(*(take(t, judging) for t in uploads)))
        rows = torch.searchsorted(mixed, cohort[judging])
        network, opt_state = server.network, server.opt_state
        for _ in range(self.steps):
            pull_back = vjp(lambda network: self.weights(network, roster, server, mixed)[rows], network)[1]
            stepped, opt_state = self.rule.step(network, pull_back(slopes)[0], opt_state)
            network = type(network)(*stepped)
        moved = sum((new - old).square().sum() for new, old in zip(network, server.network, strict=True)).sqrt()
        return server._replace(network=network, opt_state=opt_state, step=moved)

    def answer(self, client, received):
        """[...] what one client says of the mixture that it was sent: its gradient."""
        return client.gradient(received.theta, client.held_out)

    def slopes(self, roster, server, cohort, mixed, uploads):
        """[J, M] the derivatives of the cohort's losses by the weights of the models that were mixed: [M]."""
        return inner(uploads.answer, take(server.uploads, mixed))

    def similarity(self, roster, server):
        scores = self.scores(server.network, self.features(roster, server, roster.everyone))
        return Compared("attention score, mean over heads", scores.mean(0))

    def diagnostics(self, roster, server, cohort, sent, uploads):
        weights = self.graph(roster, server, cohort)
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
            "entropy": roster.note(cohort, torch.special.entr(weights.clamp(min=0)).sum(1)),
            "from uniform": roster.note(cohort, total_variation(weights, 1 / len(cohort))),
            "network step": server.step,
        }


def total_variation(weights, row):
    """[K] how far rows of weights: [K, K] are from this one, in total variation."""
    return (weights - row).abs().sum(1) / 2
