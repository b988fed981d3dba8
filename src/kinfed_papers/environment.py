"""What results were made with: versions and the machine, and how long it took."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from kinfed.files import replacing
from kinfed.report.tables.text_table import duration

NAME = "machines.txt"  # in the folder of a table: a line for each machine and version that trained its runs


def machine() -> str:
    """The versions and the machine of this process, in one line."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    processor = (names or [platform.processor() or platform.machine()])[0]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = f"kinfed {version('kinfed')}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}; {platform.system()}, {processor}, {os.cpu_count()} cores{gpu}"


def remember(out: Path) -> None:
    """Note in a table's folder that runs of it were trained here."""
    machines = read_machines(out)
    if (now := machine()) not in machines:
        with replacing(out / NAME) as part:
            part.write_text("\n".join([*machines, now]) + "\n", encoding="utf-8")


def read_machines(out: Path) -> list[str]:
    """What the runs of a table were trained with, as far as it was noted."""
    path = out / NAME
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def sentences(machines: Sequence[str], seconds: float) -> list[str]:
    """What a table was made with, and how long its runs have trained."""
    lines = [f"Made with {line}." for line in machines]
    took = f"Training of all runs: {duration(seconds)} by the clock, beside whatever else ran."
    return [*lines, took] if seconds else lines
