"""The model for data of one's own that names none."""

import torch
from torch import nn

from ...core.seeding import generator
from ...data.federation import Federation
from ...models import MODELS


def default_model(federation: Federation, name: str = "mlp", seed: int = 0) -> nn.Module:
    """A model of this name, by default a small MLP, with initial values that are fixed by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "model").initial_seed())
        made: nn.Module = MODELS[name](tuple(federation.x.shape[1:]), federation.outputs)
    return made
