"""CNN: the small convolutional network of MOON's and pFedGraph's experiments, after LeNet-5."""

from collections import OrderedDict

from torch import nn

from ..errors import UsageError


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions (6, 16) with pooling, layers 120-84-C, [B, channels, height, width] -> [B, classes].

    62,006 parameters for 3x32x32 and 10 classes. Raises UsageError unless the shape is an image of 16x16 or more.
    """
    channels, height, width = pooled_twice("cnn", shape)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc1=nn.Linear(16 * height * width, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            head=nn.Linear(84, classes),
        )
    )


def pooled_twice(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, and height and width after twice an unpadded 5x5 convolution and 2x2 pooling."""
    if len(shape) != 3 or min(shape[1:]) < 16 or shape[0] < 1:
        raise UsageError(
            f"{name}: needs images [channels, height, width] of at least 16 by 16 pixels; got shape {list(shape)}; "
            "use the model 'mlp' for others"
        )
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    return shape[0], height, width
