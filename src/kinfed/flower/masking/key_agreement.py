"""Key agreement: what two members share, streams of masks, and secrets that enough members can put together.

X25519, HKDF with SHA-256, ChaCha20 and AES-256-GCM are those of `cryptography`, Shamir's shares those of pycryptodome.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...errors import UsageError
from .fixed_point import Whole

PROTOCOL = b"kinfed masks 1|"
LENGTH, HALF = 32, 16  # bytes of a secret, and of what Shamir's shares take at once
ONCE = bytes(12)  # the nonce of a key that encrypts one text


class PublicKeys(NamedTuple):
    """What a member shows of its secrets of a round."""

    mask: bytes  # public key, by which pairs agree on masks
    box: bytes  # public key, by which pairs agree on how shares travel
    seal: bytes  # hash of the seed of its own mask
    signature: bytes = b""  # by the site's long-term key

    def to_words(self) -> list[str]:
        """The keys as JSON."""
        return [part.hex() for part in self]

    @classmethod
    def of_words(cls, words: object) -> "PublicKeys":
        """The keys in JSON; raises UsageError for what are none."""
        try:
            assert isinstance(words, list)
            keys = cls(*map(bytes.fromhex, words))
        except (AssertionError, TypeError, ValueError):
            keys = cls(b"", b"", b"")
        if any(len(part) != LENGTH for part in keys[:3]) or len(keys.signature) > 512:
            raise UsageError(f"these are no keys of a masked round: {words!r:.60}")
        return keys


def transcribe(context: bytes, keys: Mapping[str, PublicKeys]) -> bytes:
    """A hash of what all members must have seen alike: the plan, the round, the model, and everybody's keys."""
    listed = [[name, *(part.hex() for part in keys[name][:3])] for name in sorted(keys)]
    return hashlib.sha256(PROTOCOL + context + json.dumps(listed).encode()).digest()


def derive(secret: bytes, purpose: str, transcript: bytes) -> bytes:
    """[32 bytes] a key for one purpose in one round."""
    return HKDF(hashes.SHA256(), LENGTH, None, PROTOCOL + purpose.encode() + b"|" + transcript).derive(secret)


def agree_on(own: X25519PrivateKey, other: bytes, purpose: str, transcript: bytes) -> bytes:
    """[32 bytes] the key for one purpose that two members have in common; raises UsageError for no public key."""
    try:
        return derive(own.exchange(X25519PublicKey.from_public_bytes(other)), purpose, transcript)
    except ValueError:
        raise UsageError("a member's public key cannot be used") from None


def name_pair(one: str, other: str) -> str:
    """The purpose of the mask of two members."""
    return "pair " + json.dumps(sorted((one, other)))


def expand(seed: bytes, count: int) -> Whole:
    """[count] a mask: the key stream of ChaCha20; each seed is used once."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), "<u8")


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret of 32 bytes, of which `threshold` give it and fewer say nothing."""
    halves = [Shamir.split(threshold, count, secret[at : at + HALF], False) for at in (0, HALF)]
    return [struct.pack("<H", place) + first + second for (place, first), (_, second) in zip(*halves, strict=True)]


def join(shares: Sequence[bytes]) -> bytes:
    """The secret of these shares, each of a place of its own; raises UsageError for what are none."""
    try:
        halves = [
            Shamir.combine([(struct.unpack("<H", share[:2])[0], share[at : at + HALF]) for share in shares], False)
            for at in (2, 2 + HALF)
        ]
    except (ValueError, struct.error):
        raise UsageError("a site has sent what is no share of a secret") from None
    return b"".join(halves)


def read_private(secret: bytes) -> X25519PrivateKey:
    """The private key of these bytes."""
    return X25519PrivateKey.from_private_bytes(secret)


def write_private(key: X25519PrivateKey) -> bytes:
    """[32 bytes] a private key."""
    raw = serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    return key.private_bytes(*raw)


def write_public(key: X25519PrivateKey) -> bytes:
    """[32 bytes] the public half of a private key."""
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def lock(key: bytes, text: bytes, transcript: bytes) -> bytes:
    """A text that only those with the key can read; each key locks one."""
    return AESGCM(key).encrypt(ONCE, text, transcript)


def unlock(key: bytes, box: bytes, transcript: bytes, sender: str) -> bytes:
    """The text in a box; raises UsageError if it is not what the sender put there, for this round."""
    try:
        return AESGCM(key).decrypt(ONCE, box, transcript)
    except (InvalidTag, ValueError):
        raise UsageError(
            f"the shares of {sender} cannot be opened: the server has shown it other keys, another plan or another "
            "model than this site, or has changed them"
        ) from None
