"""Your own data and your own network: any arrays, any nn.Module.

    python examples/own_data.py

Twelve shops predict whether a customer buys. In odd shops customers mean the opposite of those in even shops, so one
model for all fits nobody, and 100 rows each are few to learn from alone.
"""

import torch
from torch import nn

import kinfed


def main(rounds: int = 20) -> None:
    """Make rows as a CSV file would give them, train, look at the graph, and use one shop's model."""
    torch.manual_seed(0)
    rows = torch.randn(1200, 8)
    shop = [f"shop {i % 12}" for i in range(1200)]
    buys = (rows[:, 0] * torch.tensor([(-1) ** (i % 12) for i in range(1200)]) > 0).long()
    federation = kinfed.Federation.from_arrays(rows, buys, shop)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    training = kinfed.Training(epochs=2, batch=8, optimiser=kinfed.SGD(lr=0.2))
    for name, method in (("alone", kinfed.Local()), ("with kin", kinfed.Kin())):
        run = kinfed.fit(method, federation, network, rounds=rounds, training=training)
        print(f"{name}: {run.score():.3f}")
    at = federation.names.index("shop 3")
    others = run.relation.mean(0)[at].index_fill(0, torch.tensor(at), 0)  # the mean over layers: whom shop 3 listens to
    print("shop 3 listens to", [federation.names[i] for i in others.topk(3).indices.tolist()])
    model = run.model("shop 3")
    print("its own model says", model(rows[3:4]).argmax().item(), "of its first row, and the label is", buys[3].item())


if __name__ == "__main__":
    main()
