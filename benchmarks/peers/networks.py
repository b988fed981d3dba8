"""The workloads' models in PyTorch."""

from torch import nn


def build(model, shape, classes=10):
    """cnn: two 5x5 convolutions (32, 64) with pooling and 512 units; mlp: 200-200."""
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
