"""ResNet-18 (He et al., 2016): four stages of two residual blocks with BatchNorm."""

from collections import OrderedDict
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import relu

from ..errors import UsageError


def resnet18(
    shape: tuple[int, ...],
    classes: int,
    *,
    stem: Literal["imagenet", "cifar"] = "imagenet",  # the first layers; "cifar" is for small images
) -> nn.Module:
    """Images [B, channels, height, width] -> [B, classes]; 11,227,812 parameters for 3 channels and 100 classes.

    The stem `imagenet` is the paper's, a 7x7 convolution with stride 2 and pooling; FedAGHN uses it on 32x32 images
    too. `cifar` is one 3x3 convolution, for small images (11,220,132 parameters). Raises UsageError unless the shape is
    an image.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise UsageError(f"resnet18: needs images [channels, height, width]; got shape {list(shape)}")
    if stem not in ("imagenet", "cifar"):
        raise UsageError(f"resnet18: stem must be imagenet or cifar; got '{stem}'")
    large = stem == "imagenet"
    first = nn.Conv2d(shape[0], 64, 7, 2, 3, bias=False) if large else nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False)
    module = nn.Sequential(
        OrderedDict(
            conv1=first,
            bn1=nn.BatchNorm2d(64),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, 2, 1) if large else nn.Identity(),
            layer1=nn.Sequential(_Block(64, 64, 1), _Block(64, 64, 1)),
            layer2=nn.Sequential(_Block(64, 128, 2), _Block(128, 128, 1)),
            layer3=nn.Sequential(_Block(128, 256, 2), _Block(256, 256, 1)),
            layer4=nn.Sequential(_Block(256, 512, 2), _Block(512, 512, 1)),
            avgpool=_GlobalMean(),
            head=nn.Linear(512, classes),
        )
    )
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return module


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential()
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(out)) + self.downsample(x))


class _GlobalMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))
