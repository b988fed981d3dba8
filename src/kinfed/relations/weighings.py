"""How weights follow from similarities: each receiver's row sums to one."""

import warnings
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from ..core.field_checks import In, NonNegative, Positive, Settings, Share
from ..ops.sparsify import project_simplex


class Weighing(Protocol):
    """A part of `kinfed.Mixture`: weights by similarities."""

    def weigh(self, similarity: Tensor, mass: Tensor, itself: Tensor, counts: Tensor) -> Tensor:
        """[L, K, M] rows that sum to one, of similarity: [L, K, M].

        mass: [K, M] is how much the other counts, its training examples, and 0 of one that must get no weight;
        itself: [K, M] bool is where a receiver is its own other. counts: [K, M] is how many clients a column stands
        for: 1, and more where it is one of a few for all that are not on a list, whose mass it then has.
        """


@dataclass(frozen=True)
class Softmax(Settings):
    r"""$w_{ij} \propto n_j e^{s_{ij} / \tau}$; with `self_weight` $w_{ii}$ is that, and the others share the rest."""

    temperature: Annotated[float, In("[1e-30, inf]")] = 0.1  # tau: the smaller, the more weight has who is more alike
    self_weight: Share | None = None  # a client's weight for its own model; left out: by its similarity with itself

    def weigh(self, similarity: Tensor, mass: Tensor, itself: Tensor, counts: Tensor) -> Tensor:
        logits = similarity * (1 / self.temperature) + mass.log()
        if self.self_weight is None:
            return logits.softmax(-1)
        others = logits.masked_fill(itself, -torch.inf).softmax(-1).nan_to_num()
        share = torch.full_like(others[..., :1], self.self_weight).masked_fill(~others.any(-1, keepdim=True), 1.0)
        return torch.where(itself, share, (1 - share) * others)


@dataclass(frozen=True)
class Kernel(Settings):
    r"""$w_{ij} = \frac{\alpha}{\sigma} e^{s_{ij} / \sigma}$, the rest a client's own: FedAMP's weights by `distance`.

    It is $\alpha A'(-s_{ij})$ with $A(x) = 1 - e^{-x / \sigma}$ (Huang et al., 2021, Algorithm 1). A client with
    many near others may have a negative weight for its own model.
    """

    alpha: NonNegative = 1.0  # length of the step towards the others
    sigma: Positive = 1.0  # squared distance over which weights fade

    def weigh(self, similarity: Tensor, mass: Tensor, itself: Tensor, counts: Tensor) -> Tensor:
        rows = self.alpha / self.sigma * torch.exp(similarity / self.sigma) * counts
        rows = rows.masked_fill(itself | (mass <= 0), 0)
        own_weight = 1 - rows.sum(-1, keepdim=True)
        if (own_weight < 0).any():
            warnings.warn(
                "kernel: a client resembles so many others that its own weight is negative; alpha up to "
                f"sigma / (N - 1), of a sigma of {self.sigma:g} and N clients a round, keeps weights positive",
                stacklevel=2,
            )
        return torch.where(itself, own_weight, rows)


@dataclass(frozen=True)
class Simplex(Settings):
    r"""The weights of a mean that are nearest to $p_j + s_{ij} / 2 \alpha$, $p$ being shares of examples: pFedGraph's.

    Its quadratic programme is that of Ye et al., 2023, of cosines of movements.
    """

    alpha: Positive = 0.8  # how near weights are to the shares of examples; large: one mean for all

    def weigh(self, similarity: Tensor, mass: Tensor, itself: Tensor, counts: Tensor) -> Tensor:
        shares = mass / mass.sum(-1, keepdim=True) / counts.clamp(min=1)
        rows = (shares + similarity / (2 * self.alpha)).masked_fill(mass <= 0, -torch.inf)
        return project_simplex(rows, counts)
