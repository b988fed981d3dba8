"""How cosines become the weights of a mean."""

from dataclasses import dataclass

from torch import Tensor

from ...core.layout import Layout
from ...core.settings import Positive, Settings
from ...ops.similarity import gram


@dataclass(frozen=True)
class Relu(Settings):
    """The cosine, or zero where that is negative, divided by the row's sum."""

    def weights(self, alike: Tensor) -> Tensor:
        """[C, C] rows summing to one from cosines: [C, C] with a diagonal of ones."""
        return _rows(alike.clamp(min=0))


@dataclass(frozen=True)
class Softmax(Settings):
    """The softmax of the cosines over a temperature."""

    tau: Positive = 0.1  # the temperature: the smaller, the more is kept of the most similar alone

    def weights(self, alike: Tensor) -> Tensor:
        """[C, C] rows summing to one from cosines: [C, C]."""
        return _rows((alike / self.tau).softmax(1))


def _rows(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True)


def spread_of(nodes: Tensor, layout: Layout) -> Tensor:
    """[] root of the summed squared distances of nodes: [N, d] to their mean, over trainable entries."""
    return gram(nodes[:, layer.trainable] for layer in layout.layers).centred.trace().sqrt().to(nodes.dtype)
