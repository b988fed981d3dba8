"""A graph that you know: sensors on a road, each close to the next, and what that knowledge is worth.

    python examples/known_graph.py

Thirty sensors stand along a road; what they measure changes slowly from one to the next. SFL mixes each one's model
with its neighbours' on the graph that it is given: the road, the same links dealt to the wrong sensors, or none.
"""

from dataclasses import replace

import torch
from torch import nn

import kinfed
from kinfed.data.graphs import identity, shuffled_graph


def main(rounds: int = 20) -> None:
    """Train on the true graph and on two controls, and print the mean absolute error."""
    torch.manual_seed(0)
    place = torch.arange(30).repeat_interleave(12)  # 12 readings of each sensor
    angle = place * 2 * torch.pi / 30  # the law changes slowly along the road
    x = torch.randn(360, 2)
    y = x[:, :1] * angle.cos()[:, None] + x[:, 1:] * angle.sin()[:, None] + torch.randn(360, 1)
    road = (torch.arange(30)[:, None] - torch.arange(30)).abs() == 1  # [30, 30] who is next to whom
    federation = kinfed.Federation.from_arrays(x, y, place, graph=road.float())
    training = kinfed.Training(epochs=1, batch=8, optimiser=kinfed.SGD(lr=0.05))
    for name, graph in (
        ("the road", federation.graph),
        ("wrong sensors", shuffled_graph(federation, 0)),
        ("no graph", identity(federation, 0)),
    ):
        related = replace(federation, graph=graph)
        run = kinfed.fit(kinfed.methods.METHODS["sfl"](), related, nn.Linear(2, 1), rounds=rounds, training=training)
        print(f"{name}: {run.history.task.metric} {run.history.test(run.history.headline).mean():.3f}")


if __name__ == "__main__":
    main()
