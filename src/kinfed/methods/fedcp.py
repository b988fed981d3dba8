"""FedCP: a policy splits each example's features between a personal and a shared head (Zhang et al., 2023).

Differs: noise of the policy is for training only, and the first context is that of the initial head, where the released
code draws both at random; lambda is 0 as released, and a table's value is set by pull.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..core.copies import duplicate
from ..core.field_checks import NonNegative
from ..core.layers import PASS
from ..core.method import AveragedParams, Params
from ..core.metrics import positive
from ..core.mixins import Extends
from ..core.seeding import fold, uniform
from ..errors import UsageError
from .bases import Averaging
from .parts.classes import check_head

WIDTHS = (10.0, 15.0, 20.0, 50.0)  # of the kernels that compare features


class Split(nn.Module):
    """The sum of both heads on the features that the policy gives to each: shares that sum to one, by feature."""

    def __init__(self, head):
        super().__init__()
        self.generic, self.personal_head = duplicate(head), duplicate(head)
        width, kind = head.in_features, {"dtype": head.weight.dtype}
        self.policy = nn.Sequential(nn.Linear(width, 2 * width, **kind), nn.LayerNorm(2 * width, **kind), nn.ReLU())
        self.register_buffer("context", torch.ones(width, **kind))  # [f] the client, as its head saw it on receipt

    def forward(self, z):
        scores = self.policy(z * self.context).unflatten(-1, (2, -1))  # [B, 2, f]
        if self.training:  # Gumbel's noise: the same in every executor
            key = torch.zeros((), dtype=torch.int64, device=z.device) if PASS.key is None else PASS.key
            scores = scores - (-(uniform(fold(key, -2), scores) + 2**-24).log()).log()
        mine, common = scores.softmax(-2).unbind(-2)
        return self.personal_head(mine * z) + self.generic(common * z)


def discrepancy(x, y, weight):
    """[] the squared maximum mean discrepancy of x: [B, f] and y: [B, f], whose rows have weights: [B]."""
    weight = weight / positive(weight.sum())

    def mean(a, b):
        distance = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
        kernel = torch.stack([(distance / (-2 * width)).exp() for width in WIDTHS]).sum(0)
        return weight @ kernel @ weight

    return mean(x, x) + mean(y, y) - 2 * mean(x, y)


@dataclass(frozen=True)
class FedCP(Averaging, Extends):
    r"""$h_i(r \odot z) + g(s \odot z)$ with $(r, s)$ a softmax of the policy on $z \odot v_i$, and $v_i$ from $h_i$.

    A client trains the base, the policy and $h_i$, which stays; the shared head $g$ is the mean of $\frac12 (h_i + g)$.
    """

    pull: NonNegative = 0.0  # lambda: of the discrepancy between features of the base in training and of that received
    keeps = ("*.personal_head.*", "*.context")

    def extend(self, module, head):
        parent, _, name = check_head(module, head, "fedcp").rpartition(".")
        layer = module.get_submodule(head)
        if type(layer) is not nn.Linear:  # one that does more than a linear layer would be split wrongly
            raise UsageError(
                f"fedcp: the head '{head}' must be a plain nn.Linear, as that of model.name=mlp is; got a "
                f"{type(layer).__name__}"
            )
        setattr(module.get_submodule(parent), name, Split(layer))
        return module

    def _add_context(self, client, theta):
        """[d] the whole model with the context that the client's head gives it."""
        model, theta = client.for_whole_model.model, client.whole(theta)
        tensors = model.layout.tensors(theta)
        context = tensors[f"{model.head_name}.personal_head.weight"].sum(0)
        context = context / context.norm().clamp(min=torch.finfo(context.dtype).tiny)
        return model.layout.flatten(tensors | {f"{model.head_name}.context": context})

    def train(self, client, state, received):
        model, head = client.for_whole_model.model, client.for_whole_model.model.head_name
        theta = self._add_context(client, received.theta)

        def objective(outputs, batch, features):
            loss = batch.mean(client.losses(outputs, batch, None))
            if not self.pull:
                return loss
            z = features()
            weight = torch.ones_like(z[:, 0]) if batch.weight is None else batch.weight
            weight = weight if batch.importance is None else weight * batch.importance
            return loss + self.pull * discrepancy(z, model.features(theta, batch.x), weight)

        generic = {name for name in model.layout.names if name.startswith(f"{head}.generic.")}
        trained = client.whole(
            client.descend(client.part(theta), objective=objective, only=model.layout.names - generic)
        )
        tensors = model.layout.tensors(trained)
        mixed = {n: (tensors[n] + tensors[n.replace(".generic.", ".personal_head.")]) / 2 for n in generic}
        return (), AveragedParams(client.part(model.layout.flatten(tensors | mixed)))

    def personalise(self, client, state, received):
        return {"split": Params(self._add_context(client, received.theta))}
