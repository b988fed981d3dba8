"""DPFL: each client adds others to its mean of models, one by one, as long as that helps it (Kharrat et al., 2025).

Differs: of the searches in the public code this is the greedy one, without chance, and an equal loss is no gain;
candidates are what the client took before and others, as in FedFomo, where a first search among all clients finds them;
the server passes models on.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from ..core.field_checks import Count
from .fedfomo import FedFomo


@dataclass(frozen=True)
class DPFL(FedFomo):
    r"""$C_i \leftarrow C_i \cup \{\arg\min_j L_i(\bar\theta_{C_i \cup \{j\}})\}$ from $C_i = \{i\}$, up to a budget.

    $\bar\theta_C$ is the mean of the models of $C$, and $L_i$ the loss on held-out examples; a client that no other
    improves stops. The candidates are what the client is sent: the models of those that it took most often, and others.
    """

    models: Count = 10  # candidates that a client is sent
    budget: Count = 5  # how many of them it takes at most

    def mix(self, client, state, received):
        """[M] the weights of the models that were sent, and the mean of the chosen ones and the own model, [d]."""

        def loss(theta):
            return client.loss(theta, client.held_out).nan_to_num(torch.inf, torch.inf)  # or argmin would take it

        total, size, best = state.theta, 1.0, loss(state.theta)
        weight = torch.zeros_like(received.models[:, 0])
        for _ in range(min(self.budget, len(weight))):
            losses = torch.stack([loss((total + other) / (size + 1)) for other in received.models])
            losses = torch.where(received.there & (weight == 0), losses, torch.inf)
            added = one_hot(losses.argmin(), len(losses)) * (losses.min() < best)
            weight, size, best = weight + added, size + added.sum(), torch.minimum(best, losses.min())
            total = total + added.to(total.dtype) @ received.models
        return weight / size, total / size
