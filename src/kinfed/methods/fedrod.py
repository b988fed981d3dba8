"""FedRoD: a generic head trained on balanced classes, and a personal one on top of it (Chen and Chao, 2022).

Differs: the personal head is a layer, as in the paper's plain form; the form in which a hypernetwork writes it from a
client's shares of classes is not offered.
"""

from dataclasses import dataclass

from torch import nn
from torch.nn.functional import cross_entropy

from ..core.copies import duplicate
from ..core.method import AveragedParams, Params
from ..core.mixins import Extends
from .bases import Averaging
from .parts.classes import check_head, members


class TwoHeads(nn.Module):
    """The generic head's outputs in training, where an objective adds the personal head's; the sum in evaluation."""

    def __init__(self, generic):
        super().__init__()
        self.generic, self.personal_head = generic, duplicate(generic)

    def forward(self, z):
        return self.generic(z) if self.training else self.generic(z) + self.personal_head(z)


@dataclass(frozen=True)
class FedRoD(Averaging, Extends):
    r"""Features $z$ and generic head $g$ are trained with balanced softmax, and averaged; $h_i$ stays with its client.

    Balanced softmax adds $\log n_{ic}$, of the client's examples of each class, to $g(z)$. The personal head is trained
    alone, with cross-entropy on $g(z) + h_i(z)$, which is the client's prediction.
    """

    keeps = ("*.personal_head.*",)

    def extend(self, module, head):
        parent, _, name = check_head(module, head, "fedrod").rpartition(".")
        setattr(module.get_submodule(parent), name, TwoHeads(module.get_submodule(head)))
        return module

    def train(self, client, state, received):
        model, counts = client.for_whole_model.model, members(client, "fedrod").sum(0)

        def objective(outputs, batch, features):
            heads = model.module.get_submodule(model.head_name.removesuffix(".generic"))
            personal = heads.personal_head(features().detach())
            balanced = cross_entropy(outputs + counts.log(), batch.y, reduction="none")
            return balanced + cross_entropy(outputs.detach() + personal, batch.y, reduction="none")

        return (), AveragedParams(client.descend(received.theta, objective=objective))

    def personalise(self, client, state, received):
        theta, layout = client.whole(received.theta), client.for_whole_model.model.layout
        added = layout.index(layout.match(self.keeps), theta.device)
        return {"both": Params(theta), "generic": Params(theta.index_fill(0, added, 0.0))}
