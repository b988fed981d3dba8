"""The models, by the name that a config or the command line uses: each is called with one example's shape and C."""

from collections.abc import Callable

from torch import nn

from .cnn import cnn
from .cnn_bn import cnn_bn
from .linear import linear
from .mlp import mlp

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "cnn-bn": cnn_bn,
}

__all__ = ["MODELS"]
