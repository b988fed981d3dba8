"""Unmasking: what the server does to open the sum of masked uploads, and nothing but the sum."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from kinfed.errors import UsageError

from . import key_agreement
from .fixed_point import Whole
from .key_agreement import PublicKeys, expand


def unmask(
    masked: Mapping[str, Whole],
    revealed: Sequence[Mapping[str, bytes]],
    members: Sequence[str],
    keys: Mapping[str, PublicKeys],
    context: bytes,
) -> Whole:
    """[m] the sum of masked uploads: [m] by member, from the shares that enough members have revealed.

    `members` are those whose shares all have got, `keys` those of all that were listed. Raises UsageError for shares
    that do not give what a member has shown of its secrets.
    """
    transcript = key_agreement.transcribe(context, keys)
    total: Whole = np.stack([*masked.values()]).sum(0)
    size = len(total)
    for name in members:
        secret = key_agreement.join([shares[name] for shares in revealed])
        if name in masked:
            if hashlib.sha256(secret).digest() != keys[name].seal:
                raise UsageError(f"the shares that sites have revealed do not give the mask of {name}")
            total = total - expand(key_agreement.derive(secret, "own", transcript), size)
            continue
        private = key_agreement.make_key(secret, "mask")
        if key_agreement.write_public(private) != keys[name].mask:
            raise UsageError(f"the shares that sites have revealed do not give the key of {name}")
        for other in masked:  # each has added its mask with the one that vanished, or taken it away
            purpose = key_agreement.name_pair(other, name)
            mask = expand(key_agreement.agree_on(private, keys[other].mask, purpose, transcript), size)
            total = total - mask if other < name else total + mask
    return total
