"""A method of your own, in one file.

    python examples/own_method.py
    kinfed run examples/own_method.py:StayHome method.share=0.3

Its server averages all models, as FedAvg's does. A client trains from a point between its own model and the mean.
"""

from dataclasses import dataclass

import torch

import kinfed
from kinfed import Params, UsageError
from kinfed.methods import AveragedParams, Averaging


@dataclass(frozen=True)
class StayHome(Averaging):
    r"""Stay-Home: client $i$ trains from $(1 - s)\,\theta_i + s\,\theta$, where $\theta$ is the mean of all models."""

    share: float = 0.5  # s: 0 is Local, 1 is FedAvg

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise UsageError(f"stay-home: share must lie in [0, 1]; got {self.share}")

    def init_client(self, client):
        return Params(client.model.theta)

    def train(self, client, state, received):
        theta = client.descend(self._between(state, received))
        return Params(theta), AveragedParams(theta)

    def personalise(self, client, state, received):
        return {"between": Params(self._between(state, received)), "own": state}

    def _between(self, state, received):
        return state.theta + self.share * (received.theta - state.theta)


def main(rounds: int = 20) -> None:
    """Train with three values of its setting."""
    torch.manual_seed(0)
    x, client = torch.randn(1200, 16), torch.arange(1200) % 20
    own = 0.5 * torch.randn(20, 16)[client]  # what is each client's own of the law; the rest is the same for all
    y = ((x * (1.0 + own)).sum(1) > 0).long()
    federation = kinfed.Federation.from_arrays(x, y, client)
    for share in (0.0, 0.5, 1.0):
        run = kinfed.fit(StayHome(share), federation, torch.nn.Linear(16, 2), rounds=rounds)
        print(f"share {share}: {run.history.test('between').mean():.3f}")


if __name__ == "__main__":
    main()
