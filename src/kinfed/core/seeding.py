"""Random numbers from counters: every draw is a hash of (seed, purpose, ids), independent of earlier draws.

So a draw does not depend on the executor, on the order of clients or on where an interrupted run was resumed.
"""

import hashlib
import math
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_SEEDED = threading.RLock()


def _mix(x: Tensor) -> Tensor:
    # The finaliser of splitmix64; int64 multiplication wraps, and the masks make the shifts logical.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def fold(key: Tensor, value: Tensor | int) -> Tensor:
    """A new key from a key and a counter; both may carry any (broadcast) shape."""
    return _mix((key ^ value) + -7046029254386353131)


def fold_numbers(key: int, *values: int) -> int:
    """`fold` of plain numbers, once for each counter: takes a hundredth of the time of small tensors."""
    for value in values:
        x = ((key ^ value) - 7046029254386353131) & 0xFFFFFFFFFFFFFFFF
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        key = x ^ x >> 31
    return key - (key >> 63 << 64)


def key(seed: int, purpose: str, *ids: int, device: torch.device | str = "cpu") -> Tensor:
    """[] int64: the key of one purpose, further split by ids (round, client, ...)."""
    return torch.tensor(number(seed, purpose, *ids), dtype=torch.int64, device=device)


def number(seed: int, purpose: str, *ids: int) -> int:
    """`key` as a plain number."""
    return fold_numbers(zlib.crc32(purpose.encode()), seed, *ids)


def tags(names: Sequence[str]) -> Tensor:
    """[N] int64: a hash of each client's name for its random draws; its position among the clients does not matter."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return torch.tensor([int.from_bytes(d, "little") >> 1 for d in digests], dtype=torch.int64)


def uniform(key: Tensor, like: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) of the shape and type of `like`; entry i depends on (key, i) only."""
    bits = fold(key, torch.arange(like.numel(), device=key.device)) & 0x7FFFFF  # 23 bits: exact in float32
    return (bits.to(like.dtype) / 2**23).reshape(like.shape)


def normal(key: Tensor, like: Tensor) -> Tensor:
    """Standard normal numbers of the shape and type of `like` (Box and Muller); entry i depends on (key, i) only."""
    radius = (-2 * (1 - uniform(fold(key, 1), like)).log()).sqrt()
    return radius * (2 * math.pi * uniform(fold(key, 2), like)).cos()


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """A torch generator (CPU) for the server's and the partitions' draws."""
    return torch.Generator().manual_seed(number(seed, purpose, *ids) & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def seed_torch(key: Tensor) -> Iterator[None]:
    """Within this context, which one thread at a time can enter, PyTorch's own random numbers begin at a key: []."""
    with _SEEDED, torch.random.fork_rng([key.device] if key.device.type == "cuda" else []):
        torch.manual_seed(int(key))
        yield


def generators(seed: int, purpose: str, ids: Sequence[int]) -> Iterator[torch.Generator]:
    """`generator` for each of many ids. It is the same object, seeded anew: use each before taking the next."""
    draw, start = torch.Generator(), number(seed, purpose)
    for id in ids:
        yield draw.manual_seed(fold_numbers(start, id) & 0x7FFFFFFFFFFFFFFF)
