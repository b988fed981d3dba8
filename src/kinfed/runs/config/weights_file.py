"""A file of tensors from which a run's model starts, such as weights of a network that was trained on other data."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...core.layout import head_of
from ...errors import UsageError


def load_weights(module: nn.Module, path: Path) -> None:
    """Copy a .safetensors file's tensors into the module's parameters and buffers of the same names.

    The head, the last nn.Linear, keeps its initial numbers if the file has none of its name and shape, as a network for
    other classes has not; what else the file has is left aside. Raises UsageError if it lacks another tensor of the
    module, or has one of another shape.
    """
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        why = "there is no such file" if not path.exists() else f"it is not a .safetensors file ({problem})"
        raise UsageError(f"model.weights: {path}: {why}; save one by safetensors.torch.save_file") from None
    head = head_of(module)
    for name, own in module.state_dict().items():
        given = found.get(name)
        if given is not None and given.shape == own.shape:
            with torch.no_grad():
                own.copy_(given)
        elif (head is None or name.rpartition(".")[0] != head) and not name.endswith("num_batches_tracked"):
            has = "nothing" if given is None else list(given.shape)
            raise UsageError(
                f"model.weights: {path} has {has} for the model's '{name}', which is {list(own.shape)}; name a file "
                "of the same model, whose head alone may differ"
            )
