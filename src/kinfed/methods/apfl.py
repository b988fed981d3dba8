"""APFL: each client's answer is a mixture of its own model and the shared one (Deng et al., 2020, Algorithm 1).

Differs: alpha is one half for all clients, the first value of the released code; if it is learned it moves once a
round, at the first local step, as in that code, which also draws it to zero. The mean is by numbers of examples.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..core.field_checks import Share
from ..core.method import AveragedParams, Params
from ..core.mixins import Advises
from ..core.optimiser import SGD
from ..core.trees import ModelOf, PerClient
from ..errors import UsageError
from .bases import Averaging


class Own(NamedTuple):
    """What a client keeps."""

    theta: ModelOf[PerClient]  # [d] v_i
    alpha: PerClient  # [] its weight in the mixture


@dataclass(frozen=True)
class APFL(Averaging, Advises):
    r"""$\bar v_i = \alpha_i v_i + (1 - \alpha_i) w_i$; on each batch $w_i \leftarrow w_i - \eta \nabla F_i(w_i)$ and
    $v_i \leftarrow v_i - \eta \alpha_i \nabla F_i(\bar v_i)$.

    The server averages the $w_i$, as in FedAvg; the client uses $\bar v_i$. With `adaptive`,
    $\alpha_i \leftarrow \alpha_i - \eta \langle v_i - w_i, \nabla F_i(\bar v_i) \rangle$ once a round, kept in 0..1
    (Equation 10).
    """

    alpha: Share = 0.5  # a client's weight for its own model, at first; 0 is FedAvg, 1 Local
    adaptive: bool = False  # whether each client learns its alpha

    grid: ClassVar = {"alpha": (0.25, 0.5, 0.75)}

    def start(self, roster):
        if roster.training.optimiser != SGD(roster.training.optimiser.lr):
            raise UsageError("apfl needs plain SGD: set training.optimiser to sgd without momentum or decay")
        return super().start(roster)

    def init_client(self, client):
        theta = client.model.theta
        return Own(theta, theta.new_full((), self.alpha))

    def train(self, client, state, received):
        whole_client, lr = client.for_whole_model, client.training.optimiser.lr
        layout, alpha = whole_client.model.layout, state.alpha
        personal, shared = client.whole(state.theta), client.whole(received.theta)
        for number, batch in enumerate(client.batches()):
            mixed = torch.lerp(shared, personal, alpha)
            slope, mine = whole_client.gradient(shared, batch), whole_client.gradient(mixed, batch)
            statistics = whole_client.pass_over(shared, batch), whole_client.pass_over(mixed, batch)
            if self.adaptive and number == 0:
                alpha = (alpha - lr * (personal - shared) @ mine).clamp(0, 1)
            steps = (shared - lr * slope, personal - lr * alpha * mine)
            after = [layout.flatten(layout.tensors(theta) | new) for theta, new in zip(steps, statistics, strict=True)]
            shared, personal = batch.keep(shared, after[0]), batch.keep(personal, after[1])
        upload = AveragedParams(client.part(shared))
        return Own(client.part(personal), alpha), upload  # a part of the model that stays is the personal model's

    def personalise(self, client, state, received):
        return {"mixed": Params(torch.lerp(received.theta, state.theta, state.alpha)), "shared": received}
