"""Wide: a linear layer that reads the inputs themselves and, beside them, hidden units (Cheng et al., 2016)."""

import math

import torch
from torch import Tensor, nn

from ..errors import UsageError

CUT = 3.0  # deviations from the mean, beyond which answers go on as lines


class Wide(nn.Module):
    """The head reads the flat inputs and `hidden` units, relu(Wx + b) of the inputs cut at `CUT`."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.flat, self.hidden = nn.Flatten(), nn.Linear(inputs, hidden)
        self.head = nn.Linear(inputs + hidden, outputs)
        nn.init.normal_(self.hidden.weight, std=inputs**-0.5)  # of inputs of deviation 1, units of deviation 1
        nn.init.uniform_(self.hidden.bias, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, ...] inputs to [B, outputs]."""
        x = self.flat(x)
        units = self.hidden(x.clamp(-CUT, CUT)).relu()
        outputs: Tensor = self.head(torch.cat([x, units], 1))
        return outputs


def wide(
    shape: tuple[int, ...],
    classes: int,
    *,
    hidden: int = 64,  # hidden units beside the inputs
) -> nn.Module:
    """A linear layer over the inputs and hidden units of them, [B, *shape] -> [B, classes].

    Where only the head is solved (`partial-pooling`) the units are random features (Rahimi and Recht, 2008): the model
    is linear in its coefficients, but not in the inputs. Raises UsageError for a shape without axes or a width below 1.
    """
    if not shape or min(shape) < 1 or hidden < 1:
        raise UsageError(f"wide: inputs and hidden units must be at least 1; got shape {list(shape)}, hidden={hidden}")
    return Wide(math.prod(shape), hidden, classes)
