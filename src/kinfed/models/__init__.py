"""The models, by the name that a config or the command line uses: each is called with one example's shape and C."""

from collections.abc import Callable

from torch import nn

from .cnn import cnn
from .cnn_bn import cnn_bn
from .gru import gru
from .linear import linear
from .mlp import mlp
from .resnet9 import resnet9
from .resnet18 import resnet18
from .rnn import rnn
from .vgg import vgg

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "cnn-bn": cnn_bn,
    "vgg": vgg,
    "resnet9": resnet9,
    "resnet18": resnet18,
    "rnn": rnn,
    "gru": gru,
}

__all__ = ["MODELS"]
