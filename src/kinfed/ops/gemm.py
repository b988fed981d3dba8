"""Faster float32 matrix products on CPUs that PyTorch's default library serves badly.

PyTorch hands float32 products on a CPU to MKL, which leaves half of AVX-512 unused on processors that are not Intel's.
Its other library, oneDNN, takes them over where it is allowed to round to bfloat16, and then computes in float32 all
the same wherever the processor has no bfloat16 tiles (AMX). Which of them computes decides about rounding, so no clock
picks it, but a rule on the processor and the product's size: docs/results/choosing.md sets it beside measurements.
"""

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

SMALL = 1 << 20  # multiplications, below which oneDNN takes longer to begin than it saves
WORSE = 4.0  # times the default's error; sums in another order differ by less, bfloat16 by ten thousand

Product = tuple[int, int, int]  # [M, K] @ [K, N]

_lock = threading.RLock()
_inside = 0  # how many `fast_gemm` have switched and not yet left, in all threads
_former = "none"


@contextmanager
def fast_gemm(mode: Literal["auto", "on", "off"] = "auto", product: Product = (256, 256, 256)) -> Iterator[None]:
    """Send float32 products on the CPU to oneDNN, process-wide, until the last of all that asked for it has left.

    "auto" does so where `suits` says so of `product`, which should be like those that take the time; "on" without
    asking, even where it means rounding to bfloat16; "off" never. GPUs are not touched.
    """
    if mode == "off" or (mode == "auto" and not suits(product)) or _setting() is None:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def suits(product: Product) -> bool:
    """Whether oneDNN computes products like this one faster on this processor, and as accurately."""
    m, k, n = product
    return m * k * n >= SMALL and not objection()


@cache
def objection() -> str:
    """Why no product goes to oneDNN on this processor; empty if large ones do."""
    if _setting() is None:
        return "this PyTorch cannot send products to oneDNN"
    if has_amx():
        return "oneDNN would round to bfloat16 (AMX)"
    if not torch.backends.mkl.is_available():
        return "PyTorch's default library is not MKL here"
    capability = torch.backends.cpu.get_cpu_capability()
    if _vendor() != "AuthenticAMD" or capability != "AVX512":
        return f"MKL is slow on AMD's processors with AVX512; this one is {_vendor() or 'unknown'} with {capability}"
    exact, default, other = _compare()
    if other > WORSE * default:
        return f"oneDNN rounds: its error is {other:.1g}, the default's {default:.1g}, of {exact:.3g}"
    return ""


def _compare() -> tuple[float, float, float]:
    """The largest entry of a product in float64, and the largest error of either library's in float32."""
    draw, setting = torch.Generator().manual_seed(0), _setting()
    a, b = (torch.randn(128, 128, generator=draw) for _ in range(2))
    exact, found = a.double() @ b.double(), list[Tensor]()
    with _lock:
        before = setting.fp32_precision
        try:
            for precision in ("ieee", "bf16"):
                setting.fp32_precision = precision
                found.append(torch.mm(a, b))
        finally:
            setting.fp32_precision = before
    default, other = (float((product.double() - exact).abs().max()) for product in found)
    return float(exact.abs().max()), default, other


def _vendor() -> str:
    """Who made the processor, in its own words; empty if nothing says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"vendor_id: {platform.processor().rpartition(', ')[2]}"]  # Windows names it last
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _enter() -> None:
    global _inside, _former
    with _lock:
        setting = _setting()
        if not _inside:
            _former = setting.fp32_precision
            setting.fp32_precision = "bf16"
        _inside += 1


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if not _inside:
            _setting().fp32_precision = _former


def _setting() -> Any:
    """What decides for products on the CPU alone (PyTorch 2.9); torch.set_float32_matmul_precision reaches GPUs too."""
    return getattr(torch.backends.mkldnn, "matmul", None) if torch.backends.mkldnn.is_available() else None


def has_amx() -> bool:
    """Whether oneDNN, where it is allowed to, does round to bfloat16 on this processor."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
