"""A masked round, as the server leads it: five requests, by which it learns the sum of uploads and no upload."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kinfed.core.fleet import Reduced
from kinfed.core.private.privacy import Privacy
from kinfed.core.trees import Tree
from kinfed.errors import UsageError

from ..masking.fixed_point import FixedPoint, Whole
from ..masking.key_agreement import PublicKeys
from ..masking.member import find_threshold
from ..masking.unmasking import unmask
from ..masking.upload_numbers import count_numbers, find_largest, read_sum
from ..wire import messages
from ..wire.messages import Fields, Message
from .broker import Check

# Sends requests of a kind, at least so many of which must be answered, and returns the good replies.
Ask = Callable[[str, dict[str, Message], int, Check], dict[str, Message]]


class TooFew(UsageError):
    """A round that too few members have gone through, so that its sum stays closed."""


class Opened(NamedTuple):
    """What a masked round has given."""

    names: list[str]  # of those whose uploads are in the sum
    uploads: Reduced


@dataclass(frozen=True)
class MaskedRound:
    """A round of a plan with masks; `rounds` are all that the plan has, `quorum` the share of sites that must reply."""

    privacy: Privacy
    rounds: int
    quorum: float

    def open_sum(
        self, round: int, invitation: Message, requests: dict[str, Message], sent: Tree, like: Tree, ask: Ask
    ) -> Opened:
        """The means and sums of what clients upload in reply to `requests`, training messages that all start alike.

        `ask` sends the training messages with whatever else the others are to be told. Raises TooFew if too few
        reply, or if what they reply is not what it must be.
        """
        model = messages.model_digest(next(iter(requests.values())))
        head: Fields = {"experiment": invitation.fields["experiment"], "round": round}
        needed = max(self.privacy.members, math.ceil(self.quorum * len(requests)))
        offers = {name: Message(head | {"model": model}, {}) for name in requests}
        offered = _require(ask, "keys", "offer", offers, needed, _check_keys)
        keys = {name: PublicKeys.from_json(reply.fields["keys"]) for name, reply in offered.items()}
        threshold = find_threshold(self.privacy.members, len(keys))
        listed = {name: public.to_json() for name, public in keys.items()}
        shares = {name: Message(head | {"keys": listed}, {}) for name in keys}
        dealt = _require(ask, "shares", "share", shares, threshold, _checks("boxes", keys))
        boxes = {name: dict(reply.fields["boxes"]) for name, reply in dealt.items()}
        train = {name: requests[name] for name in boxes}
        for name, request in train.items():
            request.fields["boxes"] = {sender: locked[name] for sender, locked in boxes.items()}
        uploaded = _require(ask, "uploads", "round", train, threshold, _check_upload(round, like))
        masked: dict[str, Whole] = {
            name: reply.arrays["masked"].numpy().view(np.uint64) for name, reply in uploaded.items()
        }
        confirm = {name: Message(head | {"uploaded": [*masked]}, {}) for name in masked}
        confirmed = _require(ask, "confirmed", "confirm", confirm, threshold, _check_tags(masked))
        tags = {sender: reply.fields["tags"] for sender, reply in confirmed.items()}
        reveal = {
            name: Message(head | {"tags": {sender: by[name] for sender, by in tags.items() if sender != name}}, {})
            for name in tags
        }
        revealed = _require(ask, "revealed", "reveal", reveal, threshold, _check_revealed(boxes))
        opened = [
            {name: bytes.fromhex(share) for name, share in reply.fields["shares"].items()}
            for reply in revealed.values()
        ]
        seeds = {name: bytes.fromhex(reply.fields["seed"]) for name, reply in revealed.items()}
        context = messages.round_digest(messages.run_digest(invitation), round, model)
        form = FixedPoint(find_largest(self.privacy, self.rounds), len(keys))
        try:
            total = form.decode(unmask(masked, seeds, opened[:threshold], [*boxes], keys, context))
            tree = read_sum(self.privacy, self.rounds, sent, like, total)
        except UsageError as problem:
            raise TooFew(str(problem)) from None
        return Opened([*masked], Reduced(tree, sum(values.nbytes for values in masked.values())))


def _require(
    ask: Ask, what: str, kind: str, requests: dict[str, Message], needed: int, check: Check
) -> dict[str, Message]:
    """The good replies to requests of a kind, by name in order; raises TooFew if they are fewer than needed."""
    replies = ask(kind, requests, needed, check)
    if len(replies) < needed:
        raise TooFew(f"{len(replies)} sites gave {what} of a masked round, and {needed} must, so its sum stays closed")
    return dict(sorted(replies.items()))


def _check_keys(client: str, reply: Message) -> str:
    """What is wrong with a client's keys."""
    try:
        PublicKeys.from_json(reply.fields.get("keys"))
    except UsageError as problem:
        return str(problem)
    return ""


def _checks(name: str, members: Collection[str]) -> Check:
    """A check that a reply holds bytes, as text, for each of the members."""

    def check(client: str, reply: Message) -> str:
        good = _are_bytes(reply.fields.get(name), members)
        return "" if good else f"its {name} are not those of the members of this round"

    return check


def _are_bytes(texts: Any, members: Collection[str]) -> bool:
    """Whether each of the members, and nobody else, has a text of bytes."""
    try:
        return texts.keys() == {*members} and all(len(bytes.fromhex(text)) < 256 for text in texts.values())
    except (AttributeError, TypeError, ValueError):
        return False


def _check_tags(uploaded: Collection[str]) -> Check:
    """A check that a reply holds tags for each of the other members that have uploaded."""
    return lambda client, reply: _checks("tags", {*uploaded} - {client})(client, reply)


def _check_revealed(members: Collection[str]) -> Check:
    """A check that a reply holds a seed, and shares of each of the members."""
    check_shares = _checks("shares", members)

    def check(client: str, reply: Message) -> str:
        if not _are_bytes({client: reply.fields.get("seed")}, [client]):
            return "its seed is no text of bytes"
        return check_shares(client, reply)

    return check


def _check_upload(round: int, like: Tree) -> Check:
    """A check that a reply holds masked numbers as many as an upload like this one has; [...] each."""
    forms: dict[str, tuple[str, tuple[int, ...]]] = {"masked": ("torch.int64", (count_numbers(like),))}

    def check(client: str, reply: Message) -> str:
        if reply.fields.get("round") != round:
            return f"it replies for round {reply.fields.get('round')!r:.20}"
        return messages.problem_with(reply.arrays, forms)

    return check
