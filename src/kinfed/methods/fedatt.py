"""FedAtt: one model, tensor by tensor drawn most to the clients farthest from it (Ji et al., 2019, Algorithm 1).

Differs: distances are of a tensor's numbers in a row, where the authors' program takes the spectral norm of a matrix;
noise is 0 unless it is set.
"""

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.field_checks import NonNegative
from ..core.method import Params
from ..core.trees import ModelOf, PerClient, Shared
from ..ops.mixing import weighted_mean
from .bases import Averaging


class Server(NamedTuple):
    """The server's state."""

    theta: ModelOf[Shared]  # [d] the shared model
    attention: PerClient  # [N, T] the weights of the last round, for each of T learned tensors


@dataclass(frozen=True)
class FedAtt(Averaging):
    r"""$w_l \leftarrow w_l - \epsilon \sum_k \alpha_{kl} (w_l - \theta_{kl})$ for each tensor $l$.

    $\alpha_{\cdot l} = \mathrm{softmax}_k \|w_l - \theta_{kl}\|_p$: the farther a client, the larger its weight.
    Running statistics are averaged by training examples.
    """

    step: NonNegative = 1.2  # epsilon: how far to the attended mean; above 1 beyond it
    norm: Literal[1, 2] = 2  # p, of the distances
    relative: bool = False  # distances are divided by their mean over the clients of a round; the paper's are not
    noise: NonNegative = 0.0  # standard deviation of noise that is added to each learned number of the mean
    origin = "learned"
    weighs = "all clients are sent the same model, tensor by tensor drawn most to the clients farthest from it"

    def start(self, roster):
        return Server(roster.theta, roster.theta.new_zeros(len(roster), len(roster.layout.trainable_names)))

    def aggregate(self, roster, server, cohort, uploads):
        theta, rows = weighted_mean(uploads.theta, roster.weights[cohort]), []
        for entry in roster.layout.entries:
            if entry.trainable:
                moved = uploads.theta[:, entry.at] - server.theta[entry.at]
                rows.append(self.attend(moved))
                theta[entry.at] = server.theta[entry.at] + self.step * rows[-1] @ moved
        weights = torch.stack(rows, 1)
        if roster.round == 0 and not self.relative:
            self._warn(weights)
        theta = self.add_noise(roster, theta)
        return Server(theta, torch.zeros_like(server.attention).index_copy(0, cohort, weights))

    def attend(self, moved):
        """[K] weights from how far a tensor moved: [K, m]."""
        distance = moved.norm(p=self.norm, dim=1)
        if self.relative:
            distance = distance / distance.mean().clamp(min=torch.finfo(distance.dtype).tiny)
        return distance.softmax(0)

    def _warn(self, weights):
        """Say so if weights: [K, T] are a single client's for some tensor, or everybody's alike for all."""
        most, least = weights.amax(0), weights.amin(0)
        alone, equal = int((most > 0.99).sum()), bool((most < 1.05 * least).all())
        if len(weights) > 1 and (alone or equal):
            what = f"{alone} of {len(most)} tensors follow one client alone" if alone else "all clients weigh alike"
            warnings.warn(
                f"fedatt: {what}, as clients' distances from the shared model differ by much "
                f"{'more' if alone else 'less'} than 1; set method.relative=true, which needs no scale",
                stacklevel=2,
            )

    def relation(self, roster, server, cohort):
        """One graph a layer, of equal rows: the mean of its tensors' weights, by their numbers."""
        entries = [e for e in roster.layout.entries if e.trainable]
        graphs = []
        for layer in roster.layout.layers:
            sizes = [e.shape.numel() * (layer.at.start <= e.at.start < layer.at.stop) for e in entries]
            graphs.append(server.attention @ torch.tensor(sizes).to(server.attention) / sum(sizes))
        rows = torch.stack(graphs)  # [L, N]
        rows = torch.where(rows.any(1, keepdim=True), rows, 1 / len(roster))
        return rows[:, None].expand(-1, len(roster), -1)

    def train(self, client, state, received):
        return (), Params(client.descend(received.theta))

    def personalise(self, client, state, received):
        return {"shared": received}
