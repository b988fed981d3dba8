"""Key agreement: what two members share, streams of masks, and secrets that enough members can put together.

X25519, HKDF with SHA-256, ChaCha20 and AES-256-GCM are those of `cryptography`, Shamir's shares those of pycryptodome.
"""

import hashlib
import hmac
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

from kinfed.errors import UsageError

from .fixed_point import Whole

PROTOCOL = b"kinfed masks 2|"
LENGTH, SECRET = 32, 16  # bytes of a key, and of a secret that is shared: Shamir's shares take so many at once
MOST = 4096  # members of a round
ONCE = bytes(12)  # the nonce of a key that encrypts one text
AT_ONCE = 16384  # numbers of a mask that are made and added while they are in a processor's cache
ZEROS = memoryview(bytes(8 * AT_ONCE))


class PublicKeys(NamedTuple):
    """What a member shows of its secrets of a round."""

    mask: bytes  # public key, by which pairs agree on masks
    box: bytes  # public key, by which pairs agree on how shares travel
    seal: bytes  # hash of the seed of its own mask
    signature: bytes = b""  # by the site's long-term key

    def to_json(self) -> list[str]:
        """The keys as JSON."""
        return [part.hex() for part in self]

    @classmethod
    def from_json(cls, keys_as_json: object) -> "PublicKeys":
        """The keys in JSON; raises UsageError for what are none."""
        try:
            assert isinstance(keys_as_json, list)
            keys = cls(*map(bytes.fromhex, keys_as_json))
        except (AssertionError, TypeError, ValueError):
            keys = cls(b"", b"", b"")
        if any(len(part) != LENGTH for part in keys[:3]) or len(keys.signature) > 512:
            raise UsageError(f"these are no keys of a masked round: {keys_as_json!r:.60}")
        return keys


def transcribe(context: bytes, keys: Mapping[str, PublicKeys]) -> bytes:
    """A hash of what all members must have seen alike: the plan, the round, the model, and everybody's keys."""
    listed = [[name, *(part.hex() for part in keys[name][:3])] for name in sorted(keys)]
    return hashlib.sha256(PROTOCOL + context + json.dumps(listed).encode()).digest()


def derive(secret: bytes, purpose: str, transcript: bytes, count: int = 1) -> bytes:
    """[32 * count bytes] keys for one purpose in one round."""
    return HKDF(hashes.SHA256(), count * LENGTH, None, PROTOCOL + purpose.encode() + b"|" + transcript).derive(secret)


def tag(key: bytes, text: bytes) -> bytes:
    """[32 bytes] what shows that a text is from one of the two who have the key."""
    return hmac.digest(key, text, "sha256")


def exchange(private: X25519PrivateKey, public: bytes) -> bytes:
    """[32 bytes] what two members have in common; raises UsageError for no public key."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise UsageError("a member's public key cannot be used") from None


class BoxKey:
    """A key by which shares travel, while a site's program runs; what is locked has keys of its own in each round."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = write_public(self._private)
        self._common: dict[bytes, bytes] = {}

    def exchange(self, public: bytes) -> bytes:
        """[32 bytes] what its owner and another have in common; raises UsageError for no public key."""
        if public not in self._common:
            if len(self._common) > MOST:
                self._common.clear()
            self._common[public] = exchange(self._private, public)
        return self._common[public]


def agree_on(private: X25519PrivateKey, public: bytes, purpose: str, transcript: bytes) -> bytes:
    """[32 bytes] the key for one purpose that two members have in common; raises UsageError for no public key."""
    return derive(exchange(private, public), purpose, transcript)


def name_pair(first: str, second: str, kind: str = "pair") -> str:
    """The purpose of what two members have in common: of their mask, or of another kind of key."""
    return f"{kind} {json.dumps(sorted((first, second)))}"


def add_mask(total: Whole, seed: bytes, *, taken_away: bool = False) -> None:
    """Add a mask to, or take it from, numbers in place: [m] the key stream of ChaCha20; each seed is used once."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), None).encryptor()
    mask = np.empty(AT_ONCE, "<u8")
    change = np.subtract if taken_away else np.add
    for begin in range(0, len(total), AT_ONCE):
        part = total[begin : begin + AT_ONCE]
        stream.update_into(ZEROS[: part.nbytes], mask.data.cast("B"))
        change(part, mask[: len(part)], out=part)


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret of 16 bytes, of which `threshold` give it and fewer say nothing."""
    return [struct.pack("<H", place) + share for place, share in Shamir.split(threshold, count, secret, False)]


def join(shares: Sequence[bytes]) -> bytes:
    """The secret of these shares, each of a place of its own; raises UsageError for what are none."""
    try:
        pairs = [(struct.unpack("<H", share[:2])[0], share[2:]) for share in shares]
        secret: bytes = Shamir.combine(pairs, False)
    except (ValueError, struct.error):
        raise UsageError("a site has sent what is no share of a secret") from None
    return secret


def make_key(secret: bytes) -> X25519PrivateKey:
    """The private key of masks that a secret stands for."""
    return X25519PrivateKey.from_private_bytes(derive(secret, "mask", b""))


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
