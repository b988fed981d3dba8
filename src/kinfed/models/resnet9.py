"""ResNet-9 as in SFL's image experiments: eight convolutions with BatchNorm, two residual blocks, scaled outputs."""

from collections import OrderedDict

from torch import Tensor, nn

from ..errors import UsageError


def resnet9(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Images [B, channels, height, width] -> [B, classes]; 2,440,256 parameters for 3x32x32 and 10 classes.

    Narrower than the usual network of this name, whose last layers have 512 channels. Raises UsageError unless the
    shape is an image of 8x8 or more.
    """
    if len(shape) != 3 or min(shape[1:]) < 8 or shape[0] < 1:
        raise UsageError(
            f"resnet9: needs images [channels, height, width] of at least 8 by 8 pixels; got shape {list(shape)}"
        )
    return nn.Sequential(
        OrderedDict(
            prepare=_convolution(shape[0], 64),
            layer1=nn.Sequential(_convolution(64, 128), nn.MaxPool2d(2), _Residual(128)),
            layer2=nn.Sequential(_convolution(128, 256), nn.MaxPool2d(2), _Residual(256)),
            layer3=nn.Sequential(_convolution(256, 256), nn.MaxPool2d(2)),
            pool=_GlobalMax(),
            head=_Scaled(256, classes, bias=False),
        )
    )


def _convolution(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class _Residual(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(_convolution(width, width), _convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class _GlobalMax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax((2, 3))


class _Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.2 * super().forward(x)
