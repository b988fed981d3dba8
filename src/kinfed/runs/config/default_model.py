"""The model for data of one's own that names none."""

import torch
from torch import nn

from ...core.seeding import generator
from ...data.federation import Federation
from ...models import MODELS
from .parts import make

CLIP = 5.0  # the greatest norm of a gradient on a table, whose targets may have heavy tails


def default_model(federation: Federation, name: str = "mlp", seed: int = 0) -> nn.Module:
    """A model of this name, by default a small MLP, with initial values that are fixed by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "model").initial_seed())
        part, _ = make(MODELS, name, "model", given=2)
        made: nn.Module = part(tuple(federation.x.shape[1:]), federation.outputs, columns=federation.columns)
    return made
