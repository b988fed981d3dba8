"""The grid of a run: Flower's own, except that nobody waits for a part of a reply that does not come."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx

SERVER = 1  # the number of the server among Flower's nodes
RETRIED = {429, 502, 503, 504}  # what time may mend
LONGEST = 2 << 30  # bytes of a reply


@dataclass
class _Coming:
    """A reply whose head has come."""

    message: str  # the number of the reply
    parts: list[str]  # the numbers of its parts, the reply itself among them
    contents: dict[str, bytes] = field(default_factory=dict)  # of those that have come


class RunGrid:
    """Pushes and lists as `grid` does; pulls the parts of each reply that are there, and gives those that are whole.

    Flower's own grid waits for the parts of one reply, for up to three minutes, and for no other one meanwhile.
    """

    def __init__(self, grid: Any, client: Any, run: int, flower: Any) -> None:
        """`client` makes a task's calls; `flower` are the names of the part "run"."""
        self._grid, self._client, self._run, self._flower = grid, client, run, flower
        self._coming: dict[str, _Coming] = {}  # by the number of the message that is replied to

    def get_nodes(self) -> Any:
        """The nodes that are online."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Any]) -> Any:
        """Send messages; returns their numbers."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Collection[str]) -> list[Any]:
        """The replies to these messages that are whole; one that is not asked for any more is forgotten."""
        flower, wanted = self._flower, {*message_ids}
        self._coming = {id: coming for id, coming in self._coming.items() if id in wanted}
        replies = []
        try:
            if new := wanted - self._coming.keys():
                got = self._client.PullMessages(flower.PullAppMessagesRequest(message_ids=new))
                for head, tree in zip(got.messages_list, got.message_object_trees, strict=True):
                    parts = [part.object_id for part in flower.iterate_object_tree(tree)]
                    coming = _Coming(head.metadata.message_id, [*dict.fromkeys(parts)])
                    self._coming[head.metadata.reply_to_message_id] = coming
            for id in [*self._coming]:
                if (reply := self._join_parts(id)) is not None:
                    del self._coming[id]
                    replies.append(reply)
        except httpx.TransportError:
            pass  # the SuperLink is away, and is asked again
        except httpx.HTTPStatusError as problem:
            if problem.response.status_code not in RETRIED:
                raise
        return replies

    def _join_parts(self, id: str) -> Any:
        """The reply to a message if all its parts are there, or an error if one is lost; otherwise None."""
        flower, coming = self._flower, self._coming[id]
        for part in coming.parts:
            if part in coming.contents:
                continue
            request = flower.PullObjectRequest(node=self._node, run_id=self._run, object_id=part)
            got = self._client.PullObject(request)
            if not got.object_found:
                return _make_error(id, "a part of its reply did not come")
            if not got.object_available:
                return None
            coming.contents[part] = got.object_content
            if sum(map(len, coming.contents.values())) > LONGEST:
                return _make_error(id, f"its reply is longer than {LONGEST:,} bytes")
        confirmation = flower.ConfirmMessageReceivedRequest(
            node=self._node, run_id=self._run, message_object_id=coming.message
        )
        self._client.ConfirmMessageReceived(confirmation)
        return flower.inflate_object_from_contents(coming.message, coming.contents)

    @property
    def _node(self) -> Any:
        return self._flower.Node(node_id=SERVER)


def _make_error(id: str, why: str) -> Any:
    """What stands for a reply that is lost, as Flower's errors do."""
    error = SimpleNamespace(reason=why, code=0)
    return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=id), error=error, has_error=lambda: True)
