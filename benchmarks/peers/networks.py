"""The workloads' models in PyTorch, how they are trained and how they are scored."""

import torch
import torch.nn.functional as F
from torch import nn


class Forecaster(nn.Module):
    """Encoder and decoder of width 100: reads windows [B, L, 2] of value and time of day, says the next steps."""

    def __init__(self, ahead):
        super().__init__()
        self.ahead = ahead
        self.encoder = nn.GRU(2, 100, batch_first=True)
        self.decoder = nn.GRUCell(2, 100)
        self.head = nn.Linear(100, 1)

    def forward(self, x):
        state, seen = self.encoder(x)[1][0], x[:, -1]
        tick = seen[:, 1] - x[:, -2, 1]
        outputs = []
        for _ in range(self.ahead):
            state = self.decoder(seen, state)
            outputs.append(self.head(state)[:, 0])
            seen = torch.stack([outputs[-1], (seen[:, 1] + tick) % 1], 1)
        return torch.stack(outputs, 1)


def build(model, shape, classes=10, ahead=12):
    """cnn: two 5x5 convolutions (32, 64) with pooling and 512 units; mlp: 200-200; gru: a forecaster."""
    if model == "gru":
        return Forecaster(ahead)
    if model == "mlp":
        inputs = shape[0] * shape[1] * shape[2]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, classes)
        )
    side = ((shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side * side, 512), nn.ReLU(), nn.Linear(512, classes),
    )  # fmt: skip


def loss(model):
    """What the model is trained by: of outputs and targets."""
    return F.mse_loss if model == "gru" else F.cross_entropy


@torch.no_grad()
def score(model, outputs, y):
    """The accuracy, or a forecast's mean squared error: how good outputs are on the average."""
    return F.mse_loss(outputs, y).item() if model == "gru" else (outputs.argmax(1) == y).float().mean().item()
