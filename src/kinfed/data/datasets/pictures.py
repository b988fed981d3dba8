"""Pictures in files of the usual kinds, decoded to one size."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import UsageError, reason_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
Source = Path | bytes  # a file, or what is in one


def pixels(names: Sequence[str], sources: Sequence[Source], size: int, grey: bool | None) -> Tensor:
    """[n, channels, height, width] float32 in [-1, 1]: one channel if `grey`, or if it is None and none has colours.

    With a size above 0 every picture is scaled to that height and width. Raises UsageError that names the first picture
    that cannot be read, or is of another size than the first.
    """
    decoded = [_decode(name, source, size) for name, source in zip(names, sources, strict=True)]
    if grey is None:
        grey = all(picture.mode in ("1", "L") for picture in decoded)
    decoded = [picture.convert("L" if grey else "RGB") for picture in decoded]
    first = decoded[0].size
    for name, picture in zip(names, decoded, strict=True):
        if picture.size != first:
            raise UsageError(
                f"{name} has {picture.size[0]} by {picture.size[1]} pixels, but {names[0]} has {first[0]} by "
                f"{first[1]}; scale all to one size with federation.dataset.size=32"
            )
    stacked = np.stack([np.asarray(picture) for picture in decoded])
    x = torch.from_numpy(stacked).reshape(len(decoded), first[1], first[0], -1).permute(0, 3, 1, 2).contiguous()
    return x.float().div_(127.5).sub_(1)


def _decode(name: str, source: Source, size: int) -> Any:
    """A picture of Pillow, whose file is closed."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(source if isinstance(source, Path) else io.BytesIO(source)) as opened:
                picture: Image.Image = opened
                if picture.mode[0] in "IF":
                    raise UsageError(f"{name} has more than 8 bits a channel; save it with 8")
                if picture.mode not in ("1", "L", "RGB"):  # of a palette, with transparency or of another kind
                    picture = picture.convert("L" if picture.mode in ("LA", "La") else "RGB")
                return picture.resize((size, size)) if size else picture.copy()
    except UsageError:
        raise
    except Exception as problem:  # whatever a decoder raises for a file that is damaged or no picture
        raise UsageError(f"{name} cannot be read as a picture ({reason_of(problem)}); replace or remove it") from None
