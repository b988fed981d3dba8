"""Per-FedAvg: a shared model to be adapted in one step at a client (Fallah et al., 2020, Algorithm 1).

Differs: the Hessian's product is the paper's Hessian-free difference of gradients (HF), not exact; rate of local
training, steps and batches are those of the training settings.
"""

from dataclasses import dataclass

import torch

from ..core.field_checks import Count, CountOrZero, NonNegative, Positive
from ..core.method import AveragedParams, Params
from ..core.mixins import Advises
from ..core.optimiser import SGD
from ..core.training import Training
from .bases import Averaging


@dataclass(frozen=True)
class PerFedAvg(Averaging, Advises):
    r"""Local steps follow the gradient of $F_i(w - \alpha \nabla F_i(w))$, each part on a batch of its own.

    $w \leftarrow w - \beta\, (I - \alpha H(w; D''))\, g(\tilde w; D')$ with $\tilde w = w - \alpha\, g(w; D)$, where
    $H$ times a vector is a central difference of gradients. $\beta$ is the rate of the training settings if these are
    plain SGD, else 0.1, unless it is given.
    """

    alpha: NonNegative = 0.01  # rate of the step that personalises
    beta: Positive | None = None  # rate of local training; None: as in the training settings
    hessian_free: bool = True  # whether the second-order term is approximated; else it is left out: first order (FO)
    delta: Positive = 0.001  # half-width of the central difference
    steps: Count | None = None  # local steps a round; None: as many as the training settings give
    batch: Count | None = None  # examples in each of D, D', D''; None: as in the training settings
    adapt_steps: CountOrZero = 1  # steps that make the shared model a personal one

    @property
    def rates(self):
        return () if self.beta is None else ("alpha", "beta")

    def weights(self, roster, cohort):
        return torch.ones(len(cohort), device=cohort.device)

    def train(self, client, state, received):
        whole_client, w = client.for_whole_model, client.whole(received.theta)
        layout, beta = whole_client.model.layout, self.beta
        if beta is None:
            usual = client.training.optimiser
            beta = usual.lr if usual == SGD(usual.lr) else Training().optimiser.lr
        outer, inner, second = (client.batches(steps=self.steps, batch=self.batch) for _ in range(3))
        for d, d1, d2 in zip(inner, outer, second, strict=True):
            personal = w - self.alpha * whole_client.gradient(w, d)
            grad = whole_client.gradient(personal, d1)
            if self.hessian_free and self.alpha:
                ahead = whole_client.gradient(w + self.delta * grad, d2)
                behind = whole_client.gradient(w - self.delta * grad, d2)
                grad = grad - self.alpha * (ahead - behind) / (2 * self.delta)
            moved = whole_client.pass_over(personal, d1)  # of the personal model; the step that made it has none
            w = layout.flatten(layout.tensors(w - beta * grad) | moved)
        return state, AveragedParams(client.part(w))

    def personalise(self, client, state, received):
        whole_client, theta = client.for_whole_model, client.whole(received.theta)
        for batch in client.batches(steps=self.adapt_steps, batch=self.batch):
            theta = theta - self.alpha * whole_client.gradient(theta, batch)
        return {"adapted": Params(theta), "shared": received}
