"""FedEM: each client's answer is its own mixture of a few models that all share (Marfoq et al., 2021, Algorithm 1).

Differs: the first models hold the numbers of one in other orders, as random starts do; a batch's shares of the models
are computed by the models as received, as the algorithm says, in evaluation mode. After training one more E-step gives
the shares by which a client answers, where the paper answers with those of the last M-step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core.field_checks import Count
from ..core.tasks import Classification
from ..core.trees import Averaged, ModelOf, PerClient, Shared
from ..errors import UsageError
from .bases import Averaging
from .parts.mixed_outputs import MixesOutputs, Mixture, split, stack
from .parts.random_starts import shuffle_models


class Server(NamedTuple):
    """What the server keeps and sends."""

    theta: ModelOf[Shared]  # [d] the first model
    others: Shared  # [M - 1, d]


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[Averaged]  # [d] the first model after local training
    others: Averaged  # [M - 1, d]


class Own(NamedTuple):
    """What a client keeps."""

    share: PerClient  # [M] pi_i: the weights of its mixture


@dataclass(frozen=True)
class FedEM(Averaging, MixesOutputs):
    r"""$q_{im}(s) \propto \pi_{im} e^{-\ell(\theta_m; s)}$ for example $s$; $\pi_{im} \leftarrow$ its mean over $s$.

    Client $i$ trains each $\theta_m$ on losses with weights $q_{im}$, and the server averages each by numbers of
    examples. The client's answer is $\sum_m \pi_{im}\, \mathrm{softmax}(\theta_m(x))$.
    """

    components: Count = 3  # M, how many models all clients share; 1 is FedAvg

    def start(self, roster):
        return Server(*split(shuffle_models(roster, self.components)))

    def send(self, roster, server, cohort):
        return server

    def aggregate(self, roster, server, cohort, uploads):
        return Server(uploads.theta, uploads.others)

    def init_client(self, client):
        return Own(client.model.theta.new_full((self.components,), 1 / self.components))

    def train(self, client, state, received):
        if not isinstance(client.task, Classification):
            raise UsageError("fedem mixes probabilities of classes, and this data has numbers to predict; use 'ifca'")
        models, whole_client = stack(received), client.for_whole_model
        fixed = [client.whole(theta) for theta in models]

        def share_of(number):
            def loss(outputs, batch, features):
                return responsible(whole_client, fixed, state.share, batch)[number] * client.losses(
                    outputs, batch, None
                )

            return loss

        share = mean_share(whole_client, fixed, state.share)
        trained = [
            client.descend(theta, objective=share_of(number), again=number > 0) for number, theta in enumerate(models)
        ]
        return Own(share), Upload(*split(torch.stack(trained)))

    def personalise(self, client, state, received):
        fixed = torch.stack([client.whole(theta) for theta in stack(received)])
        return {"mixture": Mixture(*split(fixed), mean_share(client.for_whole_model, fixed, state.share))}


def responsible(client, models, share, examples):
    """[M, B] q: for each example the weights of the models, [d] each, whose weights in the mixture are share: [M]."""
    losses = torch.stack([client.task.loss(client.model(theta, examples.x), examples.y) for theta in models])
    return (share.clamp(min=torch.finfo(share.dtype).tiny).log()[:, None] - losses).softmax(0)


def mean_share(client, models, share):
    """[M] the mean of q over the client's training examples."""
    q = responsible(client, models, share, client.data)
    return torch.stack([client.data.mean(row) for row in q])
