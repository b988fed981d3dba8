"""By what FedCedar compares clients: vectors that a server makes of their models."""

from typing import Literal

import torch
from torch import Tensor

from ...core.method import Roster
from ...ops.similarity import Gram, gram
from .answers import Answers
from .model_attention import called

Feature = Literal["moved", "params", "centred"] | Answers


def described(feature: Feature, roster: Roster, theta: Tensor) -> Gram:
    """Inner products of the vectors that stand for models theta: [K, d]."""
    if isinstance(feature, Answers):
        return gram((feature.describe(roster, theta),), torch.float64)
    theta = theta - roster.theta if feature == "moved" else theta
    parts = (theta[:, layer.trainable] for layer in roster.layout.layers)
    if feature != "centred":
        return gram(parts, torch.float64)
    vectors = gram((part.double() - part.mean(0, dtype=torch.float64) for part in parts), torch.float64)
    return vectors._replace(lean=torch.zeros_like(vectors.lean), square=torch.zeros_like(vectors.square))


def named(feature: Feature) -> str:
    """What cosines are taken of, in words."""
    return "cosine of models minus their mean" if feature == "centred" else called(feature)
