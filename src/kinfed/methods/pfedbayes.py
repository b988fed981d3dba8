"""pFedBayes: each weight is a Gaussian, and clients' ones are drawn to those that all share (Zhang et al., 2022).

Differs: sampled weights have their whole deviation, where the released code draws a thousandth of it; means begin as
the model's initial weights; the divergence counts by B / n as the objective says, where that code divides it by the
number of local iterations.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils._pytree import tree_map

from ..core.field_checks import Count, In, NonNegative, Positive
from ..core.method import AveragedParams, Params, SharedParams
from ..core.mixins import Advises, Extends
from ..core.optimiser import Adam
from ..core.seeding import fold, normal
from ..errors import UsageError
from .bases import Averaging

RHO = "_rho"  # beside each trained tensor: softplus of it are the standard deviations
DRAWS = -3  # of sampled weights in a batch have this number and lower ones, which nothing else draws with


def pulls(q, w):
    r"""The derivatives of $KL(q \| w)$ of Gaussians, given by means and rho: ([m], [m]), by those of q and of w."""
    (mean, rho), (other, other_rho) = q, w
    std, other_std = softplus(rho), softplus(other_rho)
    precision, difference = other_std.square().reciprocal(), mean - other
    wider = (std - other_std) * (std + other_std)  # zero between equals: Adam makes a step of what rounding leaves
    of_q = precision * difference, precision * wider / std * rho.sigmoid()
    return of_q, (-of_q[0], -precision * (wider + difference.square()) / other_std * other_rho.sigmoid())


@dataclass(frozen=True)
class PFedBayes(Averaging, Advises, Extends):
    r"""Client $i$ minimises $n_i E_{\theta \sim q_i}[F_i(\theta)] + \zeta\, KL(q_i \| w)$ over Gaussians $q_i$.

    On each batch `steps` steps on $q_i$, with one sample of the weights each, and one on its copy of $w$ down the same
    divergence, all by Adam. The server averages means and $\rho$. A client keeps $q_i$, whose means are its model.
    """

    zeta: NonNegative = 10.0  # weight of the divergence from the shared Gaussians; 0: each client is alone
    steps: Count = 5  # on a client's own Gaussians, on each batch
    lr: Positive = 0.001  # Adam's rate, for a client's own Gaussians and for the shared ones
    sigma: Positive = 0.048587  # standard deviation of every weight at first: rho is -3
    jitter: NonNegative = 1.0  # by how much of its standard deviation a sampled weight is off its mean; 0: no samples
    beta: Annotated[float, In("(0, 1]")] = 1.0  # how far the server goes to the mean of the clients' copies
    steps_on_each_batch: ClassVar[bool] = True
    grid: ClassVar = {"zeta": (1.0, 10.0, 100.0)}

    @property
    def rates(self):
        return ("lr",)

    @property
    def remedy(self):
        return "lower method.lr or method.zeta, or raise method.sigma"

    def extend(self, module, head):
        rho = math.log(math.expm1(self.sigma)) if self.sigma < 20 else self.sigma  # its softplus is sigma
        for path, part in list(module.named_modules()):
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
                raise UsageError(
                    f"pfedbayes: layer '{path}' ({type(part).__name__}) has running statistics, which fit no sampled "
                    "weights; use a model without them, such as one with nn.GroupNorm"
                )
            for name, tensor in list(part.named_parameters(recurse=False)):
                if tensor.requires_grad:
                    part.register_parameter(name + RHO, nn.Parameter(torch.full_like(tensor, rho)))
        return module

    def aggregate(self, roster, server, cohort, uploads):
        mean = super().aggregate(roster, server, cohort, uploads).theta
        return SharedParams(torch.lerp(server.theta, mean, self.beta))

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        whole_client, adam = client.for_whole_model, Adam(self.lr)
        layout, theta = whole_client.model.layout, whole_client.own(client.whole(received.theta))
        if counts := [entry.name for entry in layout.entries if entry.dtype]:
            raise UsageError(f"pfedbayes: training moves buffers ({', '.join(counts[:4])}): no sampled weights fit")
        means = {name for name in layout.trainable_names if name + RHO in layout.names}
        places = [layout.index(frozenset(n + end for n in means), theta.device) for end in ("", RHO)]
        moves = [layout.trainable_on(theta.device)[place] for place in places]
        q, w = ([model[place] for place in places] for model in (client.whole(state.theta), theta))
        memories = adam.init(q), adam.init(w)
        share = self.zeta / whole_client.weight.to(theta.dtype)

        def step(now, grads, memory):
            moved, memory = adam.step(now, grads, memory)
            return [torch.where(*triple) for triple in zip(moves, moved, now, strict=True)], memory

        for batch in client.batches():
            before = q, w, memories
            q_memory, w_memory = memories
            for number in range(self.steps):
                deviate = self.jitter * normal(fold(batch.key, DRAWS - number), q[0])
                sample = theta.index_copy(0, places[0], q[0] + softplus(q[1]) * deviate)
                slope = whole_client.gradient(sample, batch)[places[0]]
                pull = pulls(q, w)[0]
                slopes = slope, slope * deviate * q[1].sigmoid()  # by the mean and by rho, through the sample
                q, q_memory = step(q, [g + share * p for g, p in zip(slopes, pull, strict=True)], q_memory)
            w, w_memory = step(w, pulls(q, w)[1], w_memory)
            q, w, memories = tree_map(batch.keep, before, (q, w, (q_memory, w_memory)))

        def pack(gaussians):
            return client.part(theta.index_copy(0, places[0], gaussians[0]).index_copy(0, places[1], gaussians[1]))

        upload = AveragedParams(pack(w))
        return Params(pack(q)), upload  # q is packed last, as a personal part of the model is that of q

    def personalise(self, client, state, received):
        return {"own": state, "shared": received}
