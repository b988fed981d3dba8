"""Which device trains, and how much memory it has left."""

import resource
from pathlib import Path

import torch

from ..errors import UsageError, several

# Where Linux says what the machine, this process and its control group have.
MACHINE, PROCESS, GROUP = Path("/proc/meminfo"), Path("/proc/self/status"), Path("/sys/fs/cgroup")


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


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on a device, swap included; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    limits = []
    if MACHINE.exists():
        machine = _fields(MACHINE)
        limits.append(1024 * (machine["MemAvailable"] + machine.get("SwapFree", 0)))
    if PROCESS.exists() and (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(most - 1024 * _fields(PROCESS)["VmSize"])
    if (GROUP / "memory.max").exists() and (most_of_group := (GROUP / "memory.max").read_text().strip()) != "max":
        cached = _fields(GROUP / "memory.stat").get("inactive_file", 0)  # given back when it is needed
        limits.append(int(most_of_group) - int((GROUP / "memory.current").read_text()) + cached)
    return max(0, min(limits)) if limits else None


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line of such a file, by its name."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {columns[0]: int(columns[1]) for columns in lines if len(columns) > 1 and columns[1].isdecimal()}
