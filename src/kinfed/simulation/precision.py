"""Precision of local training: float32, TF32 products on a GPU, or bfloat16 products. All else stays in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import UsageError

PRECISIONS = ("float32", "tf32", "bf16")


def check(precision: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UsageError for a precision that this device, or data of this type, does not have."""
    if precision == "tf32" and device.type != "cuda":
        raise UsageError(f"precision 'tf32' is a GPU's, and this runs on {device.type}; use 'bf16' or 'float32'")
    if precision != "float32" and dtype != torch.float32:
        raise UsageError(f"precision '{precision}' is for float32 data; got {dtype}")


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """While this lasts a GPU's products of float32 numbers use TF32, or do not; PyTorch's convolutions would."""
    settings = _settings()
    before = [getattr(place, name) for place, name, _ in settings]
    for place, name, values in settings:
        setattr(place, name, values[allowed])
    try:
        yield
    finally:
        for (place, name, _), value in zip(settings, before, strict=True):
            setattr(place, name, value)


def _settings() -> list[tuple[Any, str, tuple[Any, Any]]]:
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):  # PyTorch 2.9
        return [(place, "fp32_precision", ("ieee", "tf32")) for place in (matmul, cudnn.conv, cudnn.rnn)]
    return [(place, "allow_tf32", (False, True)) for place in (matmul, cudnn)]
