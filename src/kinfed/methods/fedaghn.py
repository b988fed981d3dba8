"""FedAGHN: each client learns, layer by layer, whom to listen to (Song et al., 2025, Algorithm 1)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from ..errors import UsageError
from ..graph import cosine, inner_by_layer, put
from ..method import GraphMethod, Params


class Server(NamedTuple):
    """What the server remembers."""

    theta: Tensor  # [N, d] each client's latest model
    change: Tensor  # [N, d] what its last local training changed
    seen: Tensor  # [N] bool, has taken part
    home: Tensor  # [N, L] how much it keeps of itself: the paper's p
    sharpness: Tensor  # [N, L] how choosy it is among the others: the paper's q


class Upload(NamedTuple):
    """What a client sends back."""

    theta: Tensor  # [d] its trained model
    uphill: Tensor  # [d] the gradient on held-out examples at the model it received; [0] if training is the feedback


@dataclass(frozen=True)
class FedAGHN(GraphMethod):
    r"""$w_{ij} = \mathrm{softmax}_{j \ne i}(q_i \cos(\Delta_i, \Delta_j)) / (1 + p_i)$, $w_{ii} = p_i / (1 + p_i)$.

    One $p$ and $q$ a client and layer, moved each round along the derivative of the mixed model contracted with the
    client's feedback (Equations 4 to 6 and A1). `sign="descent"` lowers the loss; the paper prints, and its released
    code runs, the opposite: `sign="paper"`.
    """

    home: float = 0.03  # initial p
    sharpness: float = 0.5  # initial q
    lr: float = 0.005  # of p and q
    feedback: str = "val"  # "val": held-out gradient; "train": what local training changed, as in the paper
    sign: str = "descent"

    def __post_init__(self):
        if self.home < 0 or self.lr < 0:
            raise UsageError(f"fedaghn: home and lr must be zero or more; got {self.home} and {self.lr}")
        if self.sign not in ("descent", "paper"):
            raise UsageError(f"fedaghn: sign must be 'descent' or 'paper'; got '{self.sign}'")
        if self.feedback not in ("val", "train", "test"):
            raise UsageError(f"fedaghn: feedback must be 'val', 'train' or 'test'; got '{self.feedback}'")

    def start(self, roster):
        theta = roster.copies()
        ones = theta.new_ones(len(roster), len(roster.layout.layers))
        nobody = torch.zeros(len(roster), dtype=torch.bool, device=theta.device)
        return Server(theta, torch.ones_like(theta), nobody, self.home * ones, self.sharpness * ones)

    def graph(self, roster, server, cohort):
        return self._graph(roster, server, server.home, server.sharpness)[:, cohort]

    def _graph(self, roster, server, home, sharpness):
        """[L, N, N]; who has not taken part yet is not listened to and listens to all others alike."""
        alike = cosine(inner_by_layer(server.change, server.change, roster.layout))
        heard = server.seen | ~server.seen.any()
        deaf = torch.eye(len(roster), dtype=torch.bool, device=heard.device) | ~heard
        scores = torch.where(heard[:, None], sharpness.T[..., None] * alike, torch.zeros_like(alike))
        others = scores.masked_fill(deaf, -torch.inf).softmax(-1)
        alone = deaf.all(1)  # nobody else to listen to
        others = torch.where(alone[:, None], torch.zeros_like(others), others)
        keeps = torch.where(alone, 1.0, home.T * heard)  # [L, N]
        return (others + torch.diag_embed(keeps)) / (others.sum(-1) + keeps)[..., None]

    def aggregate(self, roster, server, cohort, uploads):
        sent = self.send(roster, server, cohort).theta
        change = uploads.theta - sent
        uphill = uploads.uphill if self.feedback != "train" else -change
        # d loss / d w_ij is the inner product of client i's slope with client j's model, layer by layer.
        slope = inner_by_layer(uphill, server.theta, roster.layout)  # [L, K, N]
        _, pull_back = vjp(
            lambda home, sharpness: self._graph(roster, server, home, sharpness)[:, cohort],
            server.home,
            server.sharpness,
        )
        rate = self.lr if self.sign == "descent" else -self.lr
        slope_home, slope_sharpness = pull_back(slope)
        return Server(
            theta=put(server.theta, cohort, uploads.theta),
            change=put(server.change, cohort, change),
            seen=put(server.seen, cohort, torch.ones_like(cohort, dtype=torch.bool)),
            home=(server.home - rate * slope_home).clamp(min=0),
            sharpness=server.sharpness - rate * slope_sharpness,
        )

    def train(self, client, state, received):
        theta = self._with_own_statistics(client, state, received)
        uphill = theta[:0] if self.feedback == "train" else client.gradient(theta, client.held_out)
        theta = client.descend(theta)
        return Params(theta), Upload(theta, uphill)

    def personalise(self, client, state, received):
        return {"own": state, "mixed": Params(self._with_own_statistics(client, state, received))}

    def _with_own_statistics(self, client, state, received):
        """[d] the received model; running statistics never travel."""
        return torch.where(client.model.layout.trainable.to(state.theta.device), received.theta, state.theta)
