"""The server half that many methods share: averaging into one model."""

from typing import ClassVar

import torch

from ..core.field_checks import NonNegative
from ..core.method import Method, SharedParams
from ..core.mixins import Averages, Explains, take_mean
from ..core.seeding import key, normal


class Averaging(Method, Explains, Averages):
    """The server half of a method that averages into one shared vector: clients upload `AveragedParams`."""

    weighs: ClassVar[str] = "all clients are sent the same mean, whatever they have in common"
    uniform: bool = False  # all clients have the same weight, however many examples they have
    noise: NonNegative = 0.0  # standard deviation of noise that is added to each learned number of the mean

    def weights(self, roster, cohort):
        return torch.ones_like(cohort) if self.uniform else roster.weights[cohort]

    def start(self, roster):
        return SharedParams(roster.theta)

    def send(self, roster, server, cohort):
        return SharedParams(server.theta)

    def aggregate(self, roster, server, cohort, uploads):
        return SharedParams(self.add_noise(roster, take_mean(self, uploads.theta)))

    def add_noise(self, roster, theta):
        """theta: [d] with Gaussian noise of deviation `noise` in what is learned."""
        if not self.noise:
            return theta
        draw = key(roster.seed, "average.noise", roster.round, device=theta.device)
        return theta + self.noise * roster.layout.trainable_on(theta.device) * normal(draw, theta)

    def relation(self, roster, server, cohort):
        weights = self.weights(roster, cohort).to(roster.theta.dtype)
        row = torch.zeros(len(roster), dtype=weights.dtype, device=weights.device)
        return row.index_copy(0, cohort, weights / weights.sum())
