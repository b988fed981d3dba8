"""VGG-like CNN: blocks of 3x3 convolutions with pooling after each, then two fully connected layers."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from ..errors import UsageError


def vgg(
    shape: tuple[int, ...],
    classes: int,
    *,
    widths: Sequence[int] = (32, 64, 64),  # channels of each block
    depth: int = 1,  # convolutions in a block
    hidden: int = 128,  # width of the layer before the last
) -> nn.Module:
    """A block of `depth` convolutions for each of `widths`, layers hidden-C, [B, channels, height, width] -> [B, C].

    FedCedar's networks, whose widths the paper does not give: 3 convolutions for MNIST and SVHN (130,890 parameters for
    1x28x28, 188,810 for 3x32x32), and 6 for CIFAR-10 with widths (32, 64, 128), depth 2 and hidden 256 (814,122).
    Raises UsageError unless the shape is an image that is large enough to be pooled so often.
    """
    least = 2 ** len(widths)
    if len(shape) != 3 or min(shape[1:]) < least or shape[0] < 1:
        raise UsageError(
            f"vgg: needs images [channels, height, width] of at least {least} by {least} pixels for {len(widths)} "
            f"blocks; got shape {list(shape)}"
        )
    if depth < 1 or hidden < 1 or not widths or min(widths) < 1:
        raise UsageError(f"vgg: widths, depth and hidden must be at least 1; got {list(widths)}, {depth} and {hidden}")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, height, width = shape
    for block, after in enumerate(widths, start=1):
        for i in range(1, depth + 1):
            layers[f"conv{block}_{i}"] = nn.Conv2d(channels, after, 3, padding=1)
            layers[f"relu{block}_{i}"] = nn.ReLU()
            channels = after
        layers[f"pool{block}"] = nn.MaxPool2d(2)
        height, width = height // 2, width // 2
    layers["flat"] = nn.Flatten()
    layers["fc1"] = nn.Linear(channels * height * width, hidden)
    layers["relu"] = nn.ReLU()
    layers["head"] = nn.Linear(hidden, classes)
    return nn.Sequential(layers)
