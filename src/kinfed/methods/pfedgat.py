"""pFedGAT: graph attention over clients' models, trained on held-out loss (Zhou et al., 2025, Equations 2 to 10)."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch

from ..core.method import Method, Params
from ..core.optimiser import SGD, OptState
from ..core.seeding import key
from ..core.settings import Positive
from ..core.tables import put, take
from ..core.trees import Like, PerClient, Shared, Tree, rows_replaced
from ..ops.mixing import mix_freely
from .parts.attention import Attention, DynamicAttention
from .parts.feedback import Channel, Delta, Exact, Mixtures, Replies, Sent, Upload, begin
from .parts.hedge import Hedge
from .parts.learned_graph import LearnedGraph, Lesson, Logits, Projected
from .parts.short_feedback import Sketch, Spsa


class Server(NamedTuple):
    """The server's state."""

    network: Tree  # the graph network's parameters
    opt_state: Annotated[OptState, Like("network")]
    uploads: PerClient  # [N, d] the models as last trained
    change: PerClient  # [N, d] the change by that training; [N, 0] unless the network uses it
    theta: PerClient  # [N, d] the models as last mixed, from which clients start
    present: PerClient  # [N] bool, in the cohort that was mixed last
    seen: PerClient  # [N] bool, has taken part
    key: Shared  # [] int64 of the random draws about the last mixtures
    step: Shared  # [] how far the network moved in the last round


@dataclass(frozen=True)
class PFedGAT(Method):
    r"""$\theta_i \leftarrow \sum_j R_{ij} \theta_j$ over the cohort, with weights $R$ that a `graph` learns.

    Other clients keep their models, and one that has never taken part starts from the mean. What the graph learns from
    is $G_{ij} = \partial L_i / \partial R_{ij} = \langle \nabla L_i, \theta_j \rangle$, where $L_i$ is the loss of the
    mixed model on its feedback examples. The paper's scalar losses do not determine that gradient: `channel` does.
    """

    graph: Attention | DynamicAttention | Projected | Logits | Hedge | LearnedGraph = Hedge()  # what computes R
    lr: Positive = 2.0  # learning rate of the graph
    channel: Exact | Delta | Sketch | Spsa | Channel = Exact()  # how the server obtains or estimates G
    feedback: Literal["validation", "held-out", "train", "test"] = "validation"  # examples of L_i; test leaks
    origin = "learned"
    mixes = "uploads"

    def __post_init__(self):
        super().__post_init__()
        self.channel.check(feedback=self.feedback)

    def start(self, roster):
        self.channel.check(optimiser=roster.training.optimiser)
        theta, network = roster.copies(), self.graph.draw(roster)
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        change = torch.zeros_like(theta) if self.graph.sees_updates else theta.new_zeros(len(roster), 0)
        draw, still = key(roster.seed, "pfedgat", roster.round, device=theta.device), theta.new_zeros(())
        return Server(network, SGD(self.lr).init(network), theta, change, theta, nobody, nobody, draw, still)

    def send(self, roster, server, cohort):
        return Sent(begin(server, cohort), self.channel.ask(Mixtures.of(roster, server, cohort)))

    def train(self, client, state, received):
        answer = self.channel.answer(client, received.theta, received.request)
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, answer)

    def join(self, roster, server, newcomers, uploads):
        """A newcomer's model is mixed with the last ones of all who have taken part."""
        heard = server.seen.index_fill(0, newcomers, True).nonzero().squeeze(1)
        after = self.aggregate(roster, server._replace(present=server.seen), newcomers, uploads, heard)
        return rows_replaced(server, newcomers, after)

    def aggregate(self, roster, server, cohort, uploads, heard=None):
        """The uploads of the cohort: [K] are kept, and the models of heard: [M], the cohort if None, mixed anew."""
        heard = cohort if heard is None else heard
        read = self.graph.sees_updates or self.graph.learns_from_updates or self.channel == Delta()
        change = uploads.theta - begin(server, cohort) if read else uploads.theta.new_zeros(len(cohort), 0)
        server = self._learn(roster, server, cohort, uploads.answer, change)._replace(
            uploads=put(server.uploads, cohort, uploads.theta),
            change=put(server.change, cohort, change) if self.graph.sees_updates else server.change,
            present=torch.zeros_like(server.present).index_fill(0, heard, True),
            seen=server.seen.index_fill(0, cohort, True),
            key=key(roster.seed, "pfedgat", roster.round, device=roster.tags.device),
        )
        weights, theta = self.graph.weights(server.network, roster, server, heard), take(server.uploads, heard)
        return server._replace(theta=put(server.theta, heard, mix_freely(weights, theta, roster.layout)))

    def _learn(self, roster, server, cohort, answers, change):
        """What the network learns from the last mixtures, of the clients that received one."""
        if not len(judging := server.present[cohort].nonzero().squeeze(1)):
            return server._replace(step=torch.zeros_like(server.step))
        mix = Mixtures.of(roster, server, cohort[judging])
        replies = Replies(take(answers, judging), take(change, judging))
        gradient, rows = self.channel.gradient(mix, replies), torch.searchsorted(mix.mixed, cohort[judging])
        network, opt_state = self.graph.learn(roster, server, Lesson(gradient, rows, mix, replies.change), self.lr)
        moved = sum((new - old).square().sum() for new, old in zip(network, server.network, strict=True)).sqrt()
        return server._replace(network=network, opt_state=opt_state, step=moved)

    def add_clients(self, roster, server, newcomers):
        wide = super().add_clients(roster, server, newcomers)
        return wide._replace(network=self.graph.add_clients(roster, server.network, wide.network, newcomers))

    def relation(self, roster, server, cohort):
        weights = self.graph.weights(server.network, roster, server, cohort)
        rows = torch.eye(len(roster), dtype=weights.dtype, device=weights.device)
        if server.seen.any():
            rows[~server.seen] = server.seen.to(rows) / server.seen.sum()
        return put(rows, cohort, torch.zeros_like(rows[cohort]).index_copy(1, cohort, weights))

    def compared(self, roster, server):
        return self.graph.compared(server.network, roster, server)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        weights = self.graph.weights(server.network, roster, server, cohort)
        return super().diagnostics(roster, server, cohort, sent, uploads) | {
            "entropy": roster.note(cohort, torch.special.entr(weights.clamp(min=0)).sum(1)),
            "from uniform": roster.note(cohort, (weights - 1 / len(cohort)).abs().sum(1) / 2),  # total variation
            "network step": server.step,
        }

    def init_client(self, client):
        return Params(client.model.theta)

    def personalise(self, client, state, received):
        return {"mixed": Params(received.theta), "own": state}
