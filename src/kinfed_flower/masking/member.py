"""A member of one masked round: its secrets, and the five answers that it gives, each once."""

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Mapping, Sequence

from kinfed.errors import UsageError

from . import key_agreement
from .fixed_point import Whole
from .key_agreement import LENGTH, MOST, SECRET, BoxKey, PublicKeys, add_mask

SHARE = 2 + SECRET  # bytes
Sign = Callable[[bytes], bytes]
Check = Callable[[str, bytes, bytes], str]  # why a name's signature of a text is none; empty if it is one


def find_threshold(least: int, members: int) -> int:
    """How many must reveal shares: more than half, as two halves could each reveal another secret of one member."""
    return max(least, members // 2 + 1)


def text_to_sign(context: bytes, name: str, keys: PublicKeys) -> bytes:
    """What a member signs of its keys of a round."""
    return key_agreement.PROTOCOL + context + name.encode() + b"|" + b"".join(keys[:3])


class Member:
    """A site in one round, by Bonawitz et al. (2017) with double masks.

    Of each member that uploads the seed of its own mask is revealed, by itself or by shares, of each that vanishes the
    key of its masks with others; never both. Before, members confirm to each other who has uploaded, so that no two of
    them reveal for different sums. The secrets are in memory alone.
    """

    def __init__(
        self, name: str, least: int, context: bytes, sign: Sign = lambda text: b"", box: BoxKey | None = None
    ) -> None:
        """`least` members must be in the sum; `context` is a hash of the plan, the round and the model received."""
        self.name, self.least, self.context, self._box = name, least, context, box or BoxKey()
        self._seed, self._key_seed = os.urandom(SECRET), os.urandom(SECRET)
        self._mask_key = key_agreement.make_key(self._key_seed)
        mask = key_agreement.write_public(self._mask_key)
        keys = PublicKeys(mask, self._box.public, hashlib.sha256(self._seed).digest())
        self.keys = keys._replace(signature=sign(text_to_sign(context, name, keys)))
        self._listed: dict[str, PublicKeys] = {}
        self._transcript = b""
        self._shares: dict[str, bytes] = {}  # of others' secrets, once the upload is masked
        self._common: dict[str, bytes] = {}  # keys with each other member
        self._confirmed = b""  # who has uploaded, as this member has confirmed it
        self._is_masked = self._is_revealed = False

    @property
    def count(self) -> int:
        """How many members the server has listed; 0 before it has."""
        return len(self._listed)

    @property
    def threshold(self) -> int:
        """How many must upload, and reveal."""
        return find_threshold(self.least, self.count)

    def share(
        self, listed: Mapping[str, PublicKeys], check: Check = lambda name, text, signature: ""
    ) -> dict[str, bytes]:
        """For each member on the list, shares of this one's secrets that it alone can open; raises UsageError."""
        if self._listed:
            raise UsageError("this site has shared its secrets of this round already, with other members")
        if listed.get(self.name) != self.keys:
            raise UsageError("the server's list has other keys of this site than its own")
        if not self.least <= len(listed) <= MOST:
            raise UsageError(f"the server lists {len(listed):,} members; the plan has at least {self.least:,}")
        shown = [part for keys in listed.values() for part in keys[:3]]
        if len({*shown}) < len(shown):
            raise UsageError("the server lists the same key twice")
        for name, keys in sorted(listed.items()):
            if why := check(name, text_to_sign(self.context, name, keys), keys.signature):
                raise UsageError(why)
        self._listed = dict(sorted(listed.items()))
        self._transcript = key_agreement.transcribe(self.context, self._listed)
        shares = [key_agreement.split(secret, self.threshold, self.count) for secret in (self._seed, self._key_seed)]
        return {
            name: key_agreement.lock(self._key("box", self.name, name), first + second, self._transcript)
            for name, first, second in zip(self._listed, *shares, strict=True)
        }

    def _key(self, purpose: str, sender: str, receiver: str) -> bytes:
        """The key for one purpose, "box" or "confirm", between this member and another, one way."""
        other = receiver if sender == self.name else sender
        if other not in self._common:
            common = self._box.exchange(self._listed[other].box)
            pair = key_agreement.name_pair(sender, receiver, "box")
            self._common[other] = key_agreement.derive(common, pair, self._transcript, 4)
        place = LENGTH * (2 * (purpose == "confirm") + (sender > receiver))
        return self._common[other][place : place + LENGTH]

    def open(self, boxes: Mapping[str, bytes]) -> None:
        """Take the others' shares, by who sent them; these are the members that the upload is masked against."""
        if not self._listed or self._shares:
            raise UsageError("this site's upload of this round is masked already, or nobody has its shares yet")
        if self.name not in boxes or not boxes.keys() <= self._listed.keys():
            raise UsageError("the server has sent shares of others than the members that it listed")
        if len(boxes) < self.threshold:
            raise UsageError(f"shares of {len(boxes):,} members have come, fewer than {self.threshold:,}")
        self._shares = {
            name: key_agreement.unlock(self._key("box", name, self.name), box, self._transcript, name)
            for name, box in sorted(boxes.items())
        }

    def mask(self, upload: Whole) -> Whole:
        """[m] the upload under this member's own mask and those with the others; each member masks one upload."""
        if not self._shares or self._is_masked:
            raise UsageError("a site masks one upload in a round, once it has the others' shares")
        self._is_masked, masked = True, upload.copy()
        add_mask(masked, key_agreement.derive(self._seed, "own", self._transcript))
        for name in self._shares:
            if name == self.name:
                continue
            purpose = key_agreement.name_pair(self.name, name)
            seed = key_agreement.agree_on(self._mask_key, self._listed[name].mask, purpose, self._transcript)
            add_mask(masked, seed, taken_away=self.name > name)
        return masked

    def confirm(self, uploaded: Sequence[str]) -> dict[str, bytes]:
        """For each other member that has uploaded, a tag of the list of these. Once."""
        here = {*uploaded}
        if not self._is_masked or self._confirmed:
            raise UsageError("this site confirms once in a round who has uploaded, after its own upload")
        if self.name not in here or not here <= self._shares.keys() or len(here) < self.threshold:
            raise UsageError(
                f"the server names {len(here):,} members that have uploaded; at least {self.threshold:,} must have, "
                "this site among them"
            )
        self._confirmed = json.dumps(sorted(here)).encode()
        return {name: self._tag(self.name, name) for name in sorted(here - {self.name})}

    def _tag(self, sender: str, receiver: str) -> bytes:
        """What a member sends another to show that it has confirmed the same as this one."""
        return key_agreement.tag(self._key("confirm", sender, receiver), self._confirmed)

    def reveal(self, tags: Mapping[str, bytes]) -> tuple[bytes, dict[str, bytes]]:
        """This member's seed, and shares: of seeds of those that uploaded, of keys of those that vanished. Once.

        `tags` are those that others have sent this one, by sender. Raises UsageError unless enough have confirmed the
        same as this one.
        """
        if not self._confirmed or self._is_revealed:
            raise UsageError("this site reveals shares once in a round, after it has confirmed who has uploaded")
        here = {*json.loads(self._confirmed)} - {self.name}
        good = [name for name in here & tags.keys() if hmac.compare_digest(tags[name], self._tag(name, self.name))]
        if len(good) + 1 < self.threshold:
            raise UsageError(
                f"{len(good) + 1:,} members have confirmed the same list of uploads as this one; at least "
                f"{self.threshold:,} must have"
            )
        self._is_revealed = True
        shares = {
            name: share[:SHARE] if name in here | {self.name} else share[SHARE:] for name, share in self._shares.items()
        }
        return self._seed, shares
