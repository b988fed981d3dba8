"""Mixed outputs: a client's answer is the mean of several models' probabilities, with its own weights."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...core.mixins import Predicts
from ...core.trees import ModelOf, PerClient, Tree


class Mixture(NamedTuple):
    """A client's model."""

    theta: ModelOf[PerClient]  # [d] the first model
    others: PerClient  # [M - 1, d]
    share: PerClient  # [M]


class MixesOutputs(Predicts):
    """A method whose `personalise` returns a `Mixture`."""

    def predict(self, client, personal, x):
        return mix_outputs(torch.stack([client.model(theta, x) for theta in stack(personal)]), personal.share)

    def export(self, model, personal):
        return Mixed([model.export(theta) for theta in stack(personal)], personal.share).eval()


class Mixed(nn.Module):
    """A mixture as a plain module, as it is saved."""

    share: Tensor  # [M]

    def __init__(self, parts: list[nn.Module], share: Tensor) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("share", share.clone())

    def forward(self, x: Tensor) -> Tensor:
        """[B, C] logarithms of probabilities."""
        return mix_outputs(torch.stack([part(x) for part in self.parts]), self.share)


def mix_outputs(outputs: Tensor, share: Tensor) -> Tensor:
    """[B, C] logarithms of the probabilities that share: [M] gives to models with outputs: [M, B, C]."""
    probabilities = torch.einsum("m,mbc->bc", share, outputs.softmax(-1))
    return probabilities.clamp(min=torch.finfo(outputs.dtype).tiny).log()


def split(models: Tensor) -> tuple[Tensor, Tensor]:
    """The first of models: [M, d], and the others."""
    return models[0], models[1:]


def stack(models: Tree) -> Tensor:
    """[M, d] of a message or a client's model."""
    return torch.cat([models.theta[None], models.others])
