"""CNN with BatchNorm: the network of FedAGHN's experiments (two convolutions, two fully connected layers)."""

from collections import OrderedDict

from torch import nn

from .cnn import pooled_twice


def cnn_bn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions (32, 64) with BatchNorm and pooling, layers 512-C, [B, channels, height, width] -> [B, C].

    878,730 parameters for 3x32x32 and 10 classes. Raises UsageError unless the shape is an image of 16x16 or more.
    """
    channels, height, width = pooled_twice("cnn-bn", shape)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5),
            bn1=nn.BatchNorm2d(32),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            bn2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc1=nn.Linear(64 * height * width, 512),
            relu3=nn.ReLU(),
            head=nn.Linear(512, classes),
        )
    )
