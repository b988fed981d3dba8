"""Faster float32 matrix products on CPUs that PyTorch's default library serves badly.

PyTorch hands float32 products on a CPU to MKL, which runs at half speed on some processors that are not Intel's. Its
other library, oneDNN, takes them over where it is allowed to round to bfloat16, and then computes in float32 all the
same wherever the processor has no bfloat16 tiles (AMX). So a measurement decides: `probe` times a product both ways and
compares both with float64.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FASTER = 1.1  # a smaller gain is within what timings vary by
WORSE = 4.0  # times the default's error; sums in another order differ by less, bfloat16 by ten thousand
WORK, SIZE = 1 << 26, 1 << 21  # products of numbers, and numbers, in a product that is timed, at most

Product = tuple[int, int, int]  # [M, K] @ [K, N]


class Probe(NamedTuple):
    """What a processor does with one matrix product."""

    faster: float  # time by default / time by oneDNN; nan if nothing was timed
    error: float  # of the default against float64, relative to the largest entry; nan likewise
    fast_error: float  # of oneDNN
    amx: bool  # the processor has tiles, with which oneDNN does round to bfloat16
    verdict: bool  # use oneDNN
    reason: str


_lock = threading.RLock()
_inside = 0  # how many `fast_gemm` have switched and not yet left, in all threads
_former = "none"


@contextmanager
def fast_gemm(mode: Literal["auto", "on", "off"] = "auto", product: Product = (256, 256, 256)) -> Iterator[None]:
    """Send float32 products on the CPU to oneDNN, process-wide, until the last of all that asked for it has left.

    "auto" does so where `probe` finds `product`, which should be like those that take the time, faster and as accurate;
    "on" without asking, even where it means rounding to bfloat16; "off" never. GPUs are not touched.
    """
    if mode == "off" or (mode == "auto" and not probe(product).verdict) or _setting() is None:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def probe(product: Product = (256, 256, 256)) -> Probe:
    """Time [M, K] @ [K, N] both ways and compare both with float64; the longest axis of a large product is cut.

    Takes well below 0.2 s on an idle processor; known for the rest of the process, for each number of threads.
    """
    m, k, n = product
    while m * k * n > WORK or m * k + k * n + m * n > SIZE:
        m, k, n = (-(-size // 2) if size == max(m, k, n) else size for size in (m, k, n))
    with _lock:
        return _probe(m, k, n, torch.get_num_threads())


@cache
def _probe(m: int, k: int, n: int, threads: int) -> Probe:
    amx, setting = has_amx(), _setting()
    if amx or setting is None:
        why = "oneDNN would round to bfloat16 (AMX)" if amx else "this PyTorch cannot send products to oneDNN"
        return Probe(float("nan"), float("nan"), float("nan"), amx, False, why)
    draw = torch.Generator().manual_seed(0)
    # 32 columns are enough to judge rounding by, and random numbers take time.
    a, columns = torch.randn(m, k, generator=draw), torch.randn(k, 32, generator=draw)
    b, out = columns.repeat(1, -(-n // 32))[:, :n].contiguous(), torch.empty(m, n)
    exact, before = a.double() @ columns.double(), setting.fp32_precision
    errors, seconds = [0.0, 0.0], [float("inf")] * 2
    try:
        for turn in range(12):  # in turn, so that what else the processor does disturbs both
            i = turn % 2
            setting.fp32_precision = ("ieee", "bf16")[i]
            torch.mm(a, b, out=out)  # the first prepares, and small ones need the library's code in the cache
            seconds[i] = min(seconds[i], _time(lambda: torch.mm(a, b, out=out)))
            errors[i] = float((out[:, :32].double() - exact[:, :n]).abs().max() / exact.abs().max())
    finally:
        setting.fp32_precision = before
    faster, accurate = seconds[0] / seconds[1], errors[1] <= WORSE * errors[0]
    what = f"[{m}, {k}] @ [{k}, {n}] on {threads} thread{'s' if threads > 1 else ''}"
    if not accurate:
        why = f"oneDNN rounds: its error is {errors[1]:.1g}, the default's {errors[0]:.1g}; {what}"
    else:
        why = f"oneDNN takes {1 / faster:.2f} of the default's time and is as accurate; {what}"
    return Probe(faster, errors[0], errors[1], amx, accurate and faster >= FASTER, why)


def _time(run: Callable[[], Tensor]) -> float:
    """Seconds that one run takes: the least of as many as 2 ms hold."""
    least, begun = float("inf"), time.perf_counter()
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        least = min(least, now - start)
        if now - begun > 0.002:
            return least


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
