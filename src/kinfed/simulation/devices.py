"""Which device trains."""

import torch

from ..errors import UsageError, several


def pick_device(name: str, what: str = "") -> torch.device:
    """The device named auto, cpu, cuda or cuda:i; raises UsageError if this machine does not have it.

    `what` describes the device in that error, if it was not requested by name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(f"device must be auto, cpu, cuda or cuda:NUMBER; got {name!r:.80}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise UsageError(f"device must be auto, cpu, cuda or cuda:NUMBER; got '{name}'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        problem = f"device '{name}'{what and f', {what},'} is not here"
        raise UsageError(
            f"{problem}: this machine has {several(torch.cuda.device_count(), 'CUDA device')}; use auto or cpu"
        )
    return device
