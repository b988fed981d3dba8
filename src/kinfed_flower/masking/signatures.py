"""Signatures of a site's keys of a round, by the key with which it connects, and the members that a site trusts."""

from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kinfed.errors import UsageError

ALGORITHM = ec.ECDSA(hashes.SHA256())
Members = Mapping[str, ec.EllipticCurvePublicKey]


def sign(text: bytes, key: Path) -> bytes:
    """A site's signature of a text."""
    private = serialization.load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)  # Flower takes no others
    return private.sign(text, ALGORITHM)


def read_members(path: Path) -> Members:
    """The public keys in a file of lines NAME KEY, KEY as in key.pub; raises UsageError for what is no such file."""
    members: dict[str, ec.EllipticCurvePublicKey] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as problem:
        raise UsageError(f"{path} cannot be read: {problem}") from None
    for number, line in enumerate(lines, 1):
        name, _, text = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        try:
            key = serialization.load_ssh_public_key(text.strip().encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey) or name in members:
            raise UsageError(
                f"{path}, line {number}: expected a site's name, once, and the key in its key.pub, such as "
                "ann ecdsa-sha2-nistp384 AAAA..."
            )
        members[name] = key
    return members


def check_signature(members: Members, name: str, text: bytes, signature: bytes) -> str:
    """Why a member's signature is none, by the keys that a site trusts; empty if it is one.

    A gateway's key is that of all of its clients, whose names begin with its own.
    """
    key = members.get(name) or next((k for site, k in members.items() if name.startswith(f"{site}.")), None)
    if key is None:
        return f"the server lists {name}, which is not in this site's file of members"
    try:
        key.verify(signature, text, ALGORITHM)
    except InvalidSignature:
        return f"the keys that the server lists for {name} are not signed by its key in this site's file of members"
    return ""
