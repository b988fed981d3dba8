"""pFedGAT: graph attention over the clients' models, trained on held-out loss (Algorithm 1, Equations 2 to 10)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp

from ..errors import UsageError
from ..graph import put
from ..method import Method, Params
from ..optimiser import SGD, Memory


class Attention(NamedTuple):
    """The attention network: one projection and one scoring vector a head."""

    project: Tensor  # [H, f, m] the paper's W_k, m features a client
    listen: Tensor  # [H, f] the left half of a_k, for the client that mixes
    speak: Tensor  # [H, f] the right half, for the client that is mixed in


class Server(NamedTuple):
    """What the server remembers."""

    attention: Attention
    memory: Memory  # the optimiser's
    uploads: Tensor  # [N, d] the models as last trained
    change: Tensor  # [N, d] what that training changed; [N, 0] unless it is what the network sees
    theta: Tensor  # [N, d] the models as last mixed: what clients start from
    present: Tensor  # [N] bool, in the cohort that was mixed last


class Upload(NamedTuple):
    """What a client sends back."""

    theta: Tensor  # [d] its trained model
    uphill: Tensor  # [d] the gradient of its held-out loss at the model it received


@dataclass(frozen=True)
class PFedGAT(Method):
    r"""$R_{ij} = \frac1H \sum_h \mathrm{softmax}_j\, \mathrm{LeakyReLU}(a_h^\top [W_h h_i \| W_h h_j])$.

    $h_i$ is the normalised $\theta_i$ (LayerNorm), and $\theta_i \leftarrow \sum_j R_{ij} \theta_j$ over the cohort; a
    client outside it keeps its model. The network follows $\partial L / \partial R_{ij} = \langle \nabla L_i, \theta_j
    \rangle$ (the paper's scalar losses cannot give that gradient), where $L_i$ is the loss of the mixed model on
    examples set aside for it.
    """

    heads: int = 8
    width: int = 8  # f, features a head
    slope: float = 0.2  # of LeakyReLU below zero
    lr: float = 0.01  # of the attention network
    features: str = "full"  # what the network sees of a client: its "full" model, its "head", or its "delta"
    feedback: str = "val"  # which examples L_i is measured on; "test", as in the paper, leaks
    origin = "learned"

    def __post_init__(self):
        if self.heads < 1 or self.width < 1 or self.lr <= 0:
            raise UsageError(
                "pfedgat: heads and width must be at least 1, lr positive; "
                f"got heads={self.heads}, width={self.width}, lr={self.lr}"
            )
        if self.features not in ("full", "head", "delta"):
            raise UsageError(f"pfedgat: features must be 'full', 'head' or 'delta'; got '{self.features}'")
        if self.feedback not in ("val", "train", "test"):
            raise UsageError(f"pfedgat: feedback must be 'val', 'train' or 'test'; got '{self.feedback}'")

    def start(self, roster):
        draw = roster.generator("pfedgat")
        size = len(self._described(roster))
        attention = Attention(
            _xavier((self.heads, self.width, size), size, self.width, draw),
            _xavier((self.heads, self.width), 2 * self.width, 1, draw),
            _xavier((self.heads, self.width), 2 * self.width, 1, draw),
        )
        attention = Attention(*(t.to(roster.theta) for t in attention))
        theta = roster.copies()
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        change = torch.zeros_like(theta) if self.features == "delta" else theta[:, :0]
        return Server(attention, SGD(self.lr).init(attention), theta, change, theta, nobody)

    def attend(self, attention, described):
        """[K, K] rows summing to one, from described: [K, m]."""
        seen = torch.einsum("hfm,km->hkf", attention.project, F.layer_norm(described, described.shape[1:]))
        listen = torch.einsum("hkf,hf->hk", seen, attention.listen)
        speak = torch.einsum("hkf,hf->hk", seen, attention.speak)
        return F.leaky_relu(listen[:, :, None] + speak[:, None, :], self.slope).softmax(-1).mean(0)

    def send(self, roster, server, cohort):
        return Params(server.theta[cohort])

    def aggregate(self, roster, server, cohort, uploads):
        attention, memory = server.attention, server.memory
        told = server.present[cohort]  # whose feedback is about the last mix
        if told.any():
            mixed = server.present.nonzero().squeeze(1)
            slope = uploads.uphill[told] @ server.uploads[mixed].T  # [*, K'] dL_i / dR_ij
            row = torch.searchsorted(mixed, cohort[told])
            described = self._describe(roster, server)[mixed]
            _, pull_back = vjp(lambda network: self.attend(network, described)[row], attention)
            stepped, memory = SGD(self.lr).step(attention, pull_back(slope)[0], memory)
            attention = Attention(*stepped)
        change = uploads.theta - server.theta[cohort] if self.features == "delta" else uploads.theta[:, :0]
        server = server._replace(
            attention=attention,
            memory=memory,
            uploads=put(server.uploads, cohort, uploads.theta),
            change=put(server.change, cohort, change),
            present=put(torch.zeros_like(server.present), cohort, torch.ones_like(cohort, dtype=torch.bool)),
        )
        mixed = self._weights(roster, server, cohort) @ uploads.theta
        return server._replace(theta=put(server.theta, cohort, mixed))

    def relation(self, roster, server, cohort):
        weights = self._weights(roster, server, cohort)
        rows = weights.new_zeros(len(cohort), len(roster)).index_copy(1, cohort, weights)
        return put(torch.eye(len(roster), dtype=weights.dtype, device=weights.device), cohort, rows)

    def _weights(self, roster, server, cohort):
        return self.attend(server.attention, self._describe(roster, server)[cohort])

    def train(self, client, state, received):
        uphill = client.gradient(received.theta, client.held_out)
        theta = client.descend(received.theta)
        return Params(theta), Upload(theta, uphill)

    def join(self, client):
        return Params(client.model.theta)

    def personalise(self, client, state, received):
        return {"mixed": received, "own": state}

    def _described(self, roster):
        """[m] which entries of a model describe a client."""
        layout = roster.layout
        trainable = frozenset(e.name for e in layout.entries if e.trainable)
        return layout.index(layout.head if self.features == "head" else trainable).to(roster.theta.device)

    def _describe(self, roster, server):
        """[N, m] what the network sees."""
        return (server.change if self.features == "delta" else server.uploads)[:, self._described(roster)]


def _xavier(shape, fan_in, fan_out, draw):
    bound = (6 / (fan_in + fan_out)) ** 0.5
    return (2 * torch.rand(shape, generator=draw) - 1) * bound
