"""Estimator: a module whose numbers a client's own rows give at once; `standard` fits it."""

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Estimator(nn.Module, ABC):
    """A module with a `fit` of its own, in place of training in steps."""

    @abstractmethod
    def fit(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        """Set the numbers by windows x: [n, past, F], targets y: [n, H] in the units of outputs, and weights w: [n]."""

    def fit_copy(self, x: NDArray[Any], y: NDArray[Any], w: NDArray[Any] | None = None) -> "Estimator":
        """A copy in float64 that has fitted itself; without weights each window counts as one."""
        copy = deepcopy(self).double().cpu()
        copy.fit(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(np.ones(len(x)) if w is None else w))
        return copy
