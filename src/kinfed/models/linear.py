"""Linear: one layer, so logistic regression when the task is classification."""

from torch import nn

from .mlp import mlp


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One linear layer, [B, *shape] -> [B, classes].

    Raises UsageError for a shape without axes.
    """
    return mlp(shape, classes, hidden=())
