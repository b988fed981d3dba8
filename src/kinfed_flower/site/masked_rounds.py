"""A site's part in masked rounds: the secrets of the round in progress, which no file holds.

A site that is started anew has forgotten them, and sits out that round. It never masks a second upload of a round.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from kinfed.core.private.privacy import Privacy
from kinfed.runs.config import parts

from ..masking.fixed_point import FixedPoint
from ..masking.key_agreement import BoxKey, PublicKeys
from ..masking.member import Member
from ..masking.signatures import check_signature, read_members, sign
from ..masking.upload_numbers import Numbers
from ..wire import messages
from ..wire.messages import Fields, Message
from .drawn_rows import Withheld
from .site_files import ExperimentFolder

LOST = "it has no keys of this round, as it was started anew or asked for another since; it takes part in the next"


class MaskedRun(NamedTuple):
    """What rounds of a run with masks need of the message by which the site joined it."""

    stamp: tuple[int, int]  # of the file with that message
    table: dict[str, Any]
    privacy: Privacy
    digest: str


class _Begun(NamedTuple):
    """A round in progress."""

    experiment: str
    round: int
    member: Member
    replies: dict[str, tuple[Fields, Message]]  # by kind, what was answered, and how: alike when it comes again


class MaskedRounds:
    """The masked rounds of one client; one is in progress at a time."""

    def __init__(self, name: str, key: Path | None = None, members: str = "") -> None:
        """`key` is the file by which its keys of a round are signed; `members` has the keys that its operator trusts.

        Raises UsageError for a file of members that is none.
        """
        self._name, self._key = name, key
        self._trusted = read_members(Path(members)) if members else None
        self._box = BoxKey()
        self._begun: _Begun | None = None
        self._run: MaskedRun | None = None  # the last, as its first model is long to read and to hash

    def find_run(self, folder: ExperimentFolder) -> MaskedRun:
        """The run of this folder, which the site has joined; raises Withheld for one without masks."""
        if self._run is None or self._run.stamp != folder.stamp:
            invitation = folder.invitation()
            assert invitation is not None
            table = invitation.fields["table"]
            settings = table.get("privacy", {})
            if not settings.get("masked"):
                raise Withheld("the plan has no masks, so it makes no keys for them")
            privacy: Privacy = parts.call(Privacy, settings, "privacy")[0]
            self._run = MaskedRun(folder.stamp, table, privacy, messages.run_digest(invitation))
        return self._run

    def offer_keys(self, privacy: Privacy, context: bytes, fields: Fields) -> Message:
        """New keys for a round; those of the same round if the server asks again."""
        experiment, round = fields["experiment"], messages.round_of(fields, "round")
        now = self._begun
        if now is None or (now.experiment, now.round, now.member.context) != (experiment, round, context):
            member = Member(self._name, privacy.members, context, self._sign, self._box)
            self._begun = now = _Begun(experiment, round, member, {})
        return self._reply(now, keys=now.member.keys.to_json())

    def _sign(self, text: bytes) -> bytes:
        return b"" if self._key is None else sign(text, self._key)

    def answer(self, kind: str, fields: Fields) -> Message:
        """The reply to one of the requests around a round; the same again if the very same request comes again.

        "share": shares of its secrets for each member on the server's list, each locked for that one. "confirm": tags
        for the others of the list of those that have uploaded. "reveal": what the server needs of this site to open the
        sum, once others have confirmed the same list.
        """
        now = self._find(fields)
        earlier, reply = now.replies.get(kind, ({}, None))
        if reply is None or earlier != fields:
            actions = {"share": self._share, "confirm": _confirm, "reveal": _reveal}
            reply = self._reply(now, **actions[kind](now.member, fields))
            now.replies[kind] = fields, reply
        return reply

    def _share(self, member: Member, fields: Fields) -> Fields:
        trusted = self._trusted
        listed = {str(name): PublicKeys.from_json(keys) for name, keys in fields["keys"].items()}
        if trusted is None:
            boxes = member.share(listed)
        else:
            boxes = member.share(listed, lambda *signed: check_signature(trusted, *signed))
        return {"boxes": {name: box.hex() for name, box in boxes.items()}}

    def open_shares(self, fields: Fields, context: bytes) -> int:
        """Take the others' shares that come with the model; returns how many members are listed.

        Raises UsageError unless all are of this very round.
        """
        now = self._find(fields)
        if now.member.context != context:
            raise Withheld("the server has sent another model than the one whose hash it had all members agree to")
        now.member.open(_read_bytes(fields, "boxes"))
        return now.member.count

    def mask(self, fields: Fields, reply: Fields, numbers: Numbers, largest: float) -> Message:
        """The reply to a round with the numbers under this site's masks, `masked`: [m] int64.

        It is in memory alone, as the round is over for a site that is started anew.
        """
        now = self._find(fields)
        masked = now.member.mask(FixedPoint(largest, now.member.count).encode(numbers))
        message = Message(reply, {"masked": torch.from_numpy(masked.view("<i8"))})
        now.replies["round"] = fields, message
        return message

    def repeat(self, fields: Fields) -> Message:
        """The reply to a round that was answered before; raises Withheld if the site was started anew since."""
        _, reply = self._find(fields).replies.get("round", (fields, None))
        if reply is None:
            raise Withheld(LOST)
        return reply

    def _find(self, fields: Fields) -> _Begun:
        now = self._begun
        if now is None or (now.experiment, now.round) != (fields["experiment"], messages.round_of(fields, "round")):
            raise Withheld(LOST)
        return now

    def _reply(self, now: _Begun, **fields: object) -> Message:
        return Message({"client": self._name, "round": now.round, **fields}, {})


def _confirm(member: Member, fields: Fields) -> Fields:
    tags = member.confirm([str(name) for name in fields["uploaded"]])
    return {"tags": {name: tag.hex() for name, tag in tags.items()}}


def _reveal(member: Member, fields: Fields) -> Fields:
    seed, shares = member.reveal(_read_bytes(fields, "tags"))
    return {"seed": seed.hex(), "shares": {name: share.hex() for name, share in shares.items()}}


def _read_bytes(fields: Fields, name: str) -> dict[str, bytes]:
    """By member, the bytes that a message holds as text; raises Withheld for what are none."""
    try:
        return {str(member): bytes.fromhex(text) for member, text in fields[name].items()}
    except (LookupError, TypeError, ValueError, AttributeError):
        raise Withheld(f"the server's {name} must be bytes by member") from None
