"""Unmasking: what the server does to open the sum of masked uploads, and nothing but the sum."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from kinfed.errors import UsageError

from . import key_agreement
from .fixed_point import Whole
from .key_agreement import PublicKeys, add_mask


def unmask(
    masked: Mapping[str, Whole],
    seeds: Mapping[str, bytes],
    revealed: Sequence[Mapping[str, bytes]],
    members: Sequence[str],
    keys: Mapping[str, PublicKeys],
    context: bytes,
) -> Whole:
    """[m] the sum of masked uploads: [m] by member, from the seeds and shares that enough members have revealed.

    `seeds` are those of members that revealed their own, `members` those whose shares all have got, `keys` those of all
    that were listed. Raises UsageError for shares that do not give what a member has shown of its secrets.
    """
    transcript = key_agreement.transcribe(context, keys)
    uploads = iter(masked.values())
    total: Whole = next(uploads).copy()
    for upload in uploads:
        np.add(total, upload, out=total)
    for name in members:
        if name in masked:
            seed = seeds.get(name, b"")
            if not _is_sealed(seed, keys[name]):
                seed = key_agreement.join([shares[name] for shares in revealed])
            if not _is_sealed(seed, keys[name]):
                raise UsageError(f"the shares that sites have revealed do not give the mask of {name}")
            add_mask(total, key_agreement.derive(seed, "own", transcript), taken_away=True)
            continue
        private = key_agreement.make_key(key_agreement.join([shares[name] for shares in revealed]))
        if key_agreement.write_public(private) != keys[name].mask:
            raise UsageError(f"the shares that sites have revealed do not give the key of {name}")
        for other in masked:  # each has added its mask with the one that vanished, or taken it away
            purpose = key_agreement.name_pair(other, name)
            pair = key_agreement.agree_on(private, keys[other].mask, purpose, transcript)
            add_mask(total, pair, taken_away=other < name)
    return total


def _is_sealed(seed: bytes, keys: PublicKeys) -> bool:
    """Whether a seed is the one whose hash a member has shown."""
    return hashlib.sha256(seed).digest() == keys.seal
