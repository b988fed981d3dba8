"""pFedMe: personal models by Moreau envelopes of the clients' losses (Dinh et al., 2020, Algorithm 1).

Differs: the mean is by numbers of examples, as in the released code; the paper's is the plain one of the clients of a
round.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from ..core.field_checks import Count, In, Positive
from ..core.method import AveragedParams, Params, SharedParams
from ..core.mixins import Advises
from ..core.optimiser import SGD
from .bases import Averaging
from .parts.pulls import check_pull


@dataclass(frozen=True)
class PFedMe(Averaging, Advises):
    r"""On each batch, $\theta_i \approx \arg\min F_i(\theta) + \frac{\lambda}{2} \|\theta - w_i\|^2$ by `steps` steps.

    Then $w_i \leftarrow w_i - \eta\lambda (w_i - \theta_i)$, and after the round $w \leftarrow (1 - \beta) w + \beta
    \sum_i p_i w_i$. The client uses its last $\theta_i$, from which the steps on the next batch continue.
    """

    pull: Positive = 15.0  # lambda: of a personal model to the client's copy of the shared one
    steps: Count = 5  # K: on each batch
    lr: Positive = 0.09  # rate of these steps
    share: Annotated[float, In("(0, 1]")] = 0.075  # eta times lambda: of the way that w_i goes to the personal model
    beta: Positive = 1.0  # how far the server goes to the mean of the w_i; 1: all the way

    steps_on_each_batch: ClassVar[bool] = True
    rates = ("lr",)
    remedy = "lower method.lr, method.pull or method.beta"

    def start(self, roster):
        check_pull("pfedme", SGD(self.lr), self.pull)
        usual, rate = roster.training.optimiser, self.share / self.pull  # eta: per batch, of w along the gradient
        if isinstance(usual, SGD) and 10 * rate < usual.lr:
            warnings.warn(
                f"pfedme: the shared model goes share / pull = {rate:.2g} of a gradient on each batch, "
                f"{usual.lr / rate:.0f} times less than by training.optimiser.lr={usual.lr:g}, so it may hardly move; "
                "raise method.share, up to 1, or train for more rounds",
                stacklevel=2,
            )
        return super().start(roster)

    def aggregate(self, roster, server, cohort, uploads):
        mean = super().aggregate(roster, server, cohort, uploads).theta
        learned = roster.layout.trainable_on(mean.device)  # beyond the mean a variance could be negative
        return SharedParams(torch.where(learned, torch.lerp(server.theta, mean, self.beta), mean))

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        whole_client, layout = client.for_whole_model, client.for_whole_model.model.layout
        theta = w = client.whole(received.theta)
        pulled = torch.isin(torch.arange(layout.size), layout.index(client.model.layout.trainable_names)).to(
            theta.device
        )
        for batch in client.batches():
            before = theta
            for _ in range(self.steps):
                grad = whole_client.gradient(theta, batch) + self.pull * pulled * (theta - w)
                theta = torch.add(theta, grad, alpha=-self.lr)
            theta = layout.flatten(layout.tensors(theta) | whole_client.pass_over(theta, batch))
            theta = batch.keep(before, theta)
            w = batch.keep(w, torch.lerp(w, theta, self.share))
        upload = AveragedParams(client.part(w))
        return Params(client.part(theta)), upload  # a part of the model that stays is the personal model's

    def personalise(self, client, state, received):
        return {"own": state, "shared": received}
