"""FedRoD: a generic head trained on balanced classes, and a personal one on top of it (Chen & Chao, 2022)."""

import copy
from dataclasses import dataclass, field

from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from kinfed import Params, UsageError
from kinfed.core.mixins import Extends
from kinfed.methods import Averaging


class TwoHeads(nn.Module):
    """The generic head's outputs in training, where an objective adds the personal head's; the sum in evaluation."""

    def __init__(self, generic):
        super().__init__()
        self.generic, self.personal_head = generic, copy.deepcopy(generic)

    def forward(self, z):
        return self.generic(z) if self.training else self.generic(z) + self.personal_head(z)


@dataclass(frozen=True)
class FedRoD(Averaging, Extends):
    r"""Features $z$ and generic head $g$ are trained with balanced softmax, and averaged; $h_i$ stays with its client.

    Balanced softmax adds $\log n_{ic}$, of the client's examples of each class, to $g(z)$. The personal head is trained
    alone, with cross-entropy on $g(z) + h_i(z)$, which is the client's prediction.
    """

    personal: tuple[str, ...] = field(default=("*.personal_head.*",), kw_only=True)

    def extend(self, module, head):
        if not head:
            raise UsageError(
                "fedrod: the model needs a head after other layers; name it: kinfed.Model(module, head='NAME')"
            )
        parent, _, name = head.rpartition(".")
        setattr(module.get_submodule(parent), name, TwoHeads(module.get_submodule(head)))
        return module

    def train(self, client, state, received):
        data = client.data
        counts = (one_hot(data.y, client.task.classes) * data.weight[:, None]).sum(0)
        heads = client.undivided.model.head_name.removesuffix(".generic")

        def objective(outputs, batch, features):
            own = client.undivided.model.module.get_submodule(heads).personal_head(features().detach())
            balanced = cross_entropy(outputs + counts.log(), batch.y, reduction="none")
            return balanced + cross_entropy(outputs.detach() + own, batch.y, reduction="none")

        return (), Params(client.descend(received.theta, objective=objective))

    def personalise(self, client, state, received):
        return {"both": received}
