"""Faster float32 matrix products on CPUs that PyTorch's default library serves badly.

PyTorch computes float32 products on a CPU with MKL, which leaves half of AVX-512 unused on processors other than
Intel's. Its other library, oneDNN, is used if it is allowed to round to bfloat16, and then still computes in float32
unless the processor has bfloat16 tiles (AMX). The library decides how results are rounded, so it is not chosen by
timing but by a rule on the processor and the product's size: docs/evidence/choosing.md compares it with measurements.
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

SMALL = 1 << 20  # multiplications below which starting oneDNN takes longer than it saves
WORSE = 4.0  # times the default's error: sums in another order stay below, bfloat16 is ten thousand times worse

Product = tuple[int, int, int]  # [M, K] @ [K, N]

_lock = threading.RLock()
_inside = 0  # how many `fast_gemm` contexts are active, in all threads
_former = "none"


@contextmanager
def fast_gemm(mode: Literal["auto", "on", "off"] = "auto", product: Product = (256, 256, 256)) -> Iterator[None]:
    """Send float32 products on the CPU to oneDNN, process-wide, until the last such context has ended.

    "auto" does so if `suits(product)`, where `product` should be like those that take most of the time; "on" does so
    always, even if it means rounding to bfloat16; "off" never. GPUs are not affected.
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
    exact, products = a.double() @ b.double(), list[Tensor]()
    with _lock:
        before = setting.fp32_precision
        try:
            for precision in ("ieee", "bf16"):
                setting.fp32_precision = precision
                products.append(torch.mm(a, b))
        finally:
            setting.fp32_precision = before
    default, other = (float((product.double() - exact).abs().max()) for product in products)
    return float(exact.abs().max()), default, other


def _vendor() -> str:
    """The processor's vendor string; empty if unknown."""
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
    """The setting for products on the CPU only (PyTorch 2.9); torch.set_float32_matmul_precision affects GPUs too."""
    return getattr(torch.backends.mkldnn, "matmul", None) if torch.backends.mkldnn.is_available() else None


def has_amx() -> bool:
    """Whether oneDNN, if it is allowed to, rounds to bfloat16 on this processor."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
