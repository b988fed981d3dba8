"""Secret sharing: secrets that enough members can put together (Shamir 1979, doi:10.1145/359168.359176).

A share is the value at its place of a random polynomial modulo a prime, whose value at 0 is the secret. Python's own
whole numbers take a tenth of the time that a field of 128 bits without machine code does.
"""

import secrets
import struct
from collections.abc import Sequence

from kinfed.errors import UsageError

SECRET = 16  # bytes
PRIME = 2**130 - 5  # the least above all secrets whose form makes plain that nobody has chosen it
WIDTH = 17  # bytes of a number below it
SHARE = 2 + WIDTH  # bytes: the place, and the value there
WRONG = "a site has sent what is no share of a secret"


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret of 16 bytes, of which `threshold` give it and fewer say nothing."""
    if len(secret) != SECRET or not 0 < threshold <= count < 1 << 16:
        raise ValueError(f"{len(secret)} bytes cannot be shared among {count}, of whom {threshold} are to be enough")
    coefficients = [*(secrets.randbelow(PRIME) for _ in range(threshold - 1)), int.from_bytes(secret, "big")]
    shares = []
    for place in range(1, count + 1):
        value = 0
        for coefficient in coefficients:
            value = (value * place + coefficient) % PRIME
        shares.append(struct.pack("<H", place) + value.to_bytes(WIDTH, "big"))
    return shares


def join(shares: Sequence[bytes]) -> bytes:
    """The secret of these shares, each of a place of its own; raises UsageError for what are none."""
    if any(len(share) != SHARE for share in shares):
        raise UsageError(WRONG)
    values = {struct.unpack("<H", share[:2])[0]: int.from_bytes(share[2:], "big") for share in shares}
    if len(values) < len(shares) or 0 in values or max(values.values(), default=PRIME) >= PRIME:
        raise UsageError(WRONG)
    secret = 0
    for place, value in values.items():  # Lagrange's polynomials at 0
        above = below = 1
        for other in values:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        secret += value * above * pow(below, -1, PRIME)
    secret %= PRIME
    if secret >> (8 * SECRET):
        raise UsageError(WRONG)
    return secret.to_bytes(SECRET, "big")
