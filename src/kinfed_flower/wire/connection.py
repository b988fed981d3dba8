"""A site's connection to the server: Flower's protocol for nodes, spoken by kinfed itself.

A node asks for messages and answers them. It never asks for a program: there is no way by which one could arrive. All
calls are made by one thread, one after another, except the sign of life that is given every few seconds.
"""

import email.utils
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kinfed.errors import RunError, UsageError
from kinfed.files import replacing

from . import flower_names
from .calls import Wire, reason, url_of
from .keys import write_key
from .link import STALE, UNKNOWN, Link

BEAT, BEATS = 15.0, 3  # seconds that a sign of life is good for, of which Flower allows two; how many are given in it
QUICK, SLOW = 0.3, 2.0  # seconds between two questions for messages, soon after one came and later
BUSY = 30.0  # seconds after a message in which another one is likely
FORGET = 80.0  # seconds after which a server has noticed that a node of an earlier kind is gone
LONGEST = 2 << 30  # bytes of one message
RETRIED = {429, 502, 503, 504}  # what time may mend
REMOVED = (
    "the server no longer knows its key; if that is a mistake, run kinfed flower up on the server and start the node "
    "again"
)


class Arrived(NamedTuple):
    """A message of the server's."""

    head: Any  # Flower's message without its content, for the reply
    kind: str  # what is asked, such as train.round
    content: Any  # Flower's records; None if they cannot be read
    run: int


@dataclass
class Connection:
    """A node's connection, open as a context. `key` is the site's private key; without one it registers itself.

    `home` is where it remembers its number, by which it takes leave after having been killed.
    """

    link: Link
    key: Path | None
    home: Path
    report: Callable[[str], object]
    longest: int = LONGEST
    _node: int = 0
    _away: bool = False  # whether it was reported that nobody answers
    _last: float = 0.0  # when the last message came
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Connection":
        self._flower = flower_names.load("site")
        self._private = _read_key(self.key or _ensure_trial_key(self.home / "trial-key"))
        signer = self._flower.NodeAuthHttpInterceptor(self._private, self._private.public_key())
        url, calls = url_of(self.link.address, self.link.ca), [signer, Wire(self.link.ca)]
        self._client = self._flower.FleetHttpClient(url, interceptors=calls)
        self._activate()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(httpx.HTTPError):
            self._client.DeactivateNode(self._flower.DeactivateNodeRequest(node_id=self._node))
        self._client.close()

    def receive(self) -> Arrived | None:
        """The next message; None after a pause if there is none."""
        flower = self._flower
        got = self._call(self._client.PullMessages, flower.PullMessagesRequest(node=self._who))
        if got is None or not got.messages_list:
            quick = time.monotonic() - self._last < BUSY
            time.sleep(QUICK if quick else SLOW * random.uniform(0.7, 1.3))  # so that many nodes do not call at once
            return None
        self._last = time.monotonic()
        head = flower.message_from_proto(got.messages_list[0])
        tree = got.message_object_trees[0]
        try:
            content = self._pull(head.metadata.run_id, tree).content
        except (ValueError, TypeError, KeyError, LookupError, AttributeError) as problem:
            self.report(f"a message of the server's cannot be read: {problem!r:.200}")
            content = None
        return Arrived(head, head.metadata.message_type, content, head.metadata.run_id)

    def answer(self, arrived: Arrived, content: Any) -> None:
        """Send the reply to a message."""
        flower, seconds = self._flower, time.monotonic() - self._last
        reply = flower.Message(content, reply_to=arrived.head)
        with flower.no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = flower.get_all_nested_objects(reply)
            tree = flower.get_object_tree(reply)
            request = flower.PushMessagesRequest(
                node=self._who,
                messages_list=[flower.message_to_proto(flower.remove_content_from_message(reply))],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            )
            accepted = self._call(self._client.PushMessages, request)
            if accepted is None:  # the run is over meanwhile
                return
            session = accepted.session_id
            for id in accepted.objects_to_push:
                piece = {"run_id": arrived.run, "object_id": id, "object_content": objects[id].deflate()}
                request = flower.PushObjectRequest(node=self._who, session_id=session, **piece)
                self._call(self._client.PushObject, request)
        self._last = time.monotonic()

    def _pull(self, run: int, tree: Any) -> Any:
        """The whole message, whose parts the server has for so long."""
        flower, contents, size = self._flower, {}, 0
        ids = [part.object_id for part in flower.iterate_object_tree(tree)]
        for id in dict.fromkeys(ids):
            for _ in range(60):
                request = flower.PullObjectRequest(node=self._who, run_id=run, object_id=id)
                got = self._call(self._client.PullObject, request)
                if got is None or not got.object_found:
                    raise ValueError("a part of it is missing")
                if got.object_available:
                    break
                time.sleep(QUICK)
            else:
                raise ValueError("a part of it does not come")
            contents[id] = got.object_content
            size += len(got.object_content)
            if size > self.longest:
                raise ValueError(f"it is longer than {self.longest:,} bytes")
        request = flower.ConfirmMessageReceivedRequest(node=self._who, run_id=run, message_object_id=tree.object_id)
        self._call(self._client.ConfirmMessageReceived, request)
        return flower.inflate_object_from_contents(tree.object_id, contents)

    @property
    def _who(self) -> Any:
        return self._flower.Node(node_id=self._node)

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Make a call, again and again while the server is away; None if it refuses what has become out of date."""
        waited = 0.5
        while True:
            try:
                answer = method(request)
            except httpx.HTTPStatusError as problem:
                if problem.response.status_code not in RETRIED:
                    return self._raise_refusal(problem.response)
            except httpx.TransportError as problem:
                self._report_away(problem)
            else:
                if self._away:
                    self.report(f"connected to {self.link.address} again")
                self._away = False
                return answer
            time.sleep(waited)
            waited = min(2 * waited, 5.0)

    def _report_away(self, problem: Exception) -> None:
        if not self._away:
            why = str(problem) or type(problem).__name__
            self.report(f"{self.link.address} does not answer ({why:.100}); waiting for it")
        self._away = True

    def _raise_refusal(self, answer: httpx.Response) -> None:
        """Raise RunError if the server does not want this node; connect again if it has forgotten it."""
        if answer.status_code == 401:
            if UNKNOWN in answer.text:
                raise RunError(REMOVED)
            if STALE in answer.text:
                raise RunError(_clock(answer))
            self._activate()
        elif answer.status_code == 404:
            raise RunError(f"{self.link.address} has no such call: it is no SuperLink that kinfed knows")

    def _activate(self) -> None:
        """Have the server count on this node, in place of an earlier one of the same site that was killed."""
        flower = self._flower
        public = self._flower.public_key_to_bytes(self._private.public_key())
        begin = None
        with suppress(OSError, ValueError, httpx.HTTPError):  # there was none, or it is forgotten
            before = int((self.home / "node.id").read_text())
            self._client.DeactivateNode(flower.DeactivateNodeRequest(node_id=before))
        request = flower.ActivateNodeRequest(public_key=public, heartbeat_interval=BEAT)
        while True:
            try:
                if self.key is None:
                    with suppress(httpx.HTTPStatusError):  # it is registered already
                        self._client.RegisterNode(flower.RegisterNodeFleetRequest(public_key=public))
                self._node = self._client.ActivateNode(request).node_id
                break
            except httpx.TransportError as problem:
                self._report_away(problem)
            except httpx.HTTPStatusError as problem:
                begin = self._wait_for_admission(problem.response, begin)
            time.sleep(2)
        with replacing(self.home / "node.id") as part:
            part.write_text(str(self._node))

    def _wait_for_admission(self, answer: httpx.Response, begin: float | None) -> float:
        """Note since when the server does not admit this node; raises RunError if time cannot mend that."""
        if UNKNOWN in answer.text:
            raise RunError(
                f"the SuperLink at {self.link.address} does not know the key of this site: put its key.pub into "
                "sites/NAME of the server's keys, and run kinfed flower up there again"
            )
        if STALE in answer.text:
            raise RunError(_clock(answer))
        now = time.monotonic()
        if begin is None:
            self.report(
                f"not admitted yet: {self.link.address} may not have noticed that this site's previous node is gone"
            )
            return now
        if now - begin > FORGET:
            raise RunError(
                f"{self.link.address} does not admit this site ({reason(answer)}): another node with its key is "
                "running, or kinfed flower up was not run since its key is there"
            )
        return begin

    def _beat(self) -> None:
        """Give signs of life until the connection is over."""
        flower = self._flower
        while not self._over.wait(BEAT / BEATS):
            with suppress(httpx.HTTPError, RuntimeError):  # the next question for messages finds out what is wrong
                self._client.SendNodeHeartbeat(flower.SendNodeHeartbeatRequest(node=self._who, heartbeat_interval=BEAT))


def _clock(answer: httpx.Response) -> str:
    """What is wrong with this machine's clock, by the time that the server's answer tells."""
    try:
        theirs = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return "the server does not accept this node's signatures; set the clocks of both machines"
    difference = time.time() - theirs
    side = "ahead of" if difference > 0 else "behind"
    return (
        f"this machine's clock is {abs(difference):,.0f} s {side} the server's, so its signatures are refused; set it"
    )


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as problem:
        raise UsageError(f"{path} is not a private key without a passphrase: {problem}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path}: Flower accepts only keys such as ssh-keygen -t ecdsa -b 384 makes")
    return key


def _ensure_trial_key(path: Path) -> Path:
    """The file of this node's own key for trials, made if it is not there."""
    if not path.exists():
        form = serialization.PrivateFormat.OpenSSH
        key = ec.generate_private_key(ec.SECP384R1())
        content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        write_key(path, content, secret=True)
    return path
