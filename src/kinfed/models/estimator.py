"""Estimator: a module whose numbers a client's own rows give at once; `standard` fits it."""

from torch import Tensor, nn


class Estimator(nn.Module):
    """A module with a `fit` of its own, in place of training in steps."""

    def fit(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        """Set the numbers by windows x: [n, past, F], targets y: [n, H] in the units of outputs, and weights w: [n]."""
        raise NotImplementedError
