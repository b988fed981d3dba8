"""A site's connection, by a stand-in for Flower's calls."""

import time
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message as Envelope
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse, PushMessagesResponse
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from kinfed import RunError
from kinfed_flower.programs import authentication
from kinfed_flower.wire import connection, flower_names, transport
from kinfed_flower.wire.connection import Connection
from kinfed_flower.wire.link import Link
from kinfed_flower.wire.messages import Message


def refused(status, text, **headers):
    request = httpx.Request("POST", "http://x")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, text=text, headers=headers))


class Fleet:
    """What a SuperLink answers. `problems` are raised by the next calls of that name, one after another."""

    def __init__(self):
        self.calls, self.problems, self.asked, self.objects, self.pushed = [], {}, [], {}, {}
        self.tree = self.head = None

    def ask(self, words, arrays):
        """Have a message wait."""
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        sent = Envelope(transport.pack(Message(words, arrays)), 7, "query.hello")
        sent.metadata.__dict__["_message_id"] = sent.object_id
        self.objects = {id: one.deflate() for id, one in get_all_nested_objects(sent).items()}
        self.head, self.tree = (
            message_to_proto(connection.flower_names.load("site").remove_content_from_message(sent)),
            get_object_tree(sent),
        )

    def __getattr__(self, name):
        def call(request):
            self.calls.append(name)
            if self.problems.get(name):
                raise self.problems[name].pop(0)
            return getattr(type(self), f"_{name}", lambda self, request: None)(self, request)

        return call

    def close(self):
        pass

    def _ActivateNode(self, request):
        return ActivateNodeResponse(node_id=7)

    def _PullMessages(self, request):
        if self.head is None:
            return PullMessagesResponse()
        head, self.head = self.head, None
        return PullMessagesResponse(messages_list=[head], message_object_trees=[self.tree])

    def _PullObject(self, request):
        found = self.objects.get(request.object_id)
        return PullObjectResponse(object_found=found is not None, object_available=True, object_content=found or b"")

    def _PushMessages(self, request):
        self.reply = request
        ids = []

        def walk(tree):
            ids.append(tree.object_id)
            for child in tree.children:
                walk(child)

        walk(request.message_object_trees[0])
        return PushMessagesResponse(objects_to_push=ids, session_id="s")

    def _PushObject(self, request):
        self.pushed[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    """The stand-in, and what opens a connection to it; returns what is reported as well."""
    fleet, lines = Fleet(), []
    real = flower_names.load("site")
    fake = SimpleNamespace(**vars(real) | {"FleetHttpClient": lambda url, interceptors: fleet})
    monkeypatch.setattr(connection.flower_names, "load", lambda part: fake)
    monkeypatch.setattr(connection.time, "sleep", lambda seconds: None)
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    (tmp_path / "key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    fleet.lines = lines
    fleet.connect = lambda **how: Connection(Link("127.0.0.1:1"), tmp_path / "key", tmp_path, lines.append, **how)
    return fleet


def test_a_message_is_taken_and_answered_and_no_program_is_ever_asked_for(fleet):
    fleet.ask({"seed": 3}, {"theta": torch.arange(6.0)})
    with fleet.connect() as line:
        arrived = line.receive()
        assert arrived.kind == "query.hello"
        message = transport.unpack(arrived.content)
        assert message.fields == {"seed": 3}
        torch.testing.assert_close(message.arrays["theta"], torch.arange(6.0))
        line.answer(arrived, transport.pack(Message({"client": "a"}, {"upload": torch.ones(2, 2)})))
    reply = flower_names_inflate(fleet)
    assert reply.fields == {"client": "a"}
    torch.testing.assert_close(reply.arrays["upload"], torch.ones(2, 2))
    assert "GetFab" not in fleet.calls
    assert "GetRun" not in fleet.calls
    assert fleet.calls[-1] == "DeactivateNode"


def flower_names_inflate(fleet):
    """The reply that the stand-in was sent."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    return transport.unpack(
        inflate_object_from_contents(fleet.reply.message_object_trees[0].object_id, fleet.pushed).content
    )


def test_a_node_waits_for_a_server_that_is_away_and_says_so_once(fleet):
    fleet.problems["PullMessages"] = [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), refused(503, "busy")]
    with fleet.connect() as line:
        assert line.receive() is None
    assert fleet.lines == [
        "127.0.0.1:1 does not answer (refused); waiting for it",
        "connected to 127.0.0.1:1 again",
    ]


def test_a_reply_is_sent_again_until_it_has_arrived(fleet):
    fleet.ask({}, {})
    with fleet.connect() as line:
        arrived = line.receive()
        fleet.problems["PushMessages"] = [httpx.ConnectError("refused")] * 3
        fleet.problems["PushObject"] = [refused(502, "")]
        line.answer(arrived, transport.pack(Message({"client": "a"}, {})))
    assert flower_names_inflate(fleet).fields == {"client": "a"}


def test_a_node_whose_key_is_no_longer_a_members_ends(fleet):
    with fleet.connect() as line:
        fleet.problems["PullMessages"] = [refused(401, authentication.UNKNOWN)]
        with pytest.raises(RunError, match="the server no longer knows its key"):
            line.receive()


def test_a_clock_that_differs_is_named_with_its_distance(fleet):
    fleet.problems["ActivateNode"] = [refused(401, authentication.STALE, date="Thu, 01 Jan 1970 00:00:00 GMT")]
    with pytest.raises(RunError, match=r"this machine's clock is [\d,]+ s ahead of the server's"):
        fleet.connect().__enter__()


def test_a_site_whose_key_the_server_lacks_is_told_what_to_do(fleet):
    fleet.problems["ActivateNode"] = [refused(401, authentication.UNKNOWN)]
    with pytest.raises(RunError, match="does not know the key of this site: put its key"):
        fleet.connect().__enter__()


def test_two_nodes_with_one_key_are_one_too_many(fleet, monkeypatch):
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(connection.time, "monotonic", lambda: float(next(clock)))
    fleet.problems["ActivateNode"] = [refused(400, '{"error": {"code": 2004, "message": "failed"}}')] * 9
    with pytest.raises(RunError, match="another node with its key is running"):
        fleet.connect().__enter__()
    assert len(fleet.lines) == 1
    assert "not admitted yet" in fleet.lines[0]


def test_a_node_that_was_killed_takes_leave_before_it_comes_back(fleet, tmp_path):
    (tmp_path / "node.id").write_text("3")
    with fleet.connect():
        assert fleet.calls[:2] == ["DeactivateNode", "ActivateNode"]
        assert (tmp_path / "node.id").read_text() == "7"


def test_a_message_without_end_is_not_read(fleet):
    fleet.ask({}, {"theta": torch.zeros(5000)})
    with fleet.connect(longest=10_000) as line:
        arrived = line.receive()
    assert arrived.content is None
    assert "longer than 10,000 bytes" in fleet.lines[0]


def test_signs_of_life_are_given_while_the_site_is_at_work(fleet, monkeypatch):
    monkeypatch.setattr(connection, "BEAT", 0.03)
    with fleet.connect():
        deadline = time.monotonic() + 10
        while fleet.calls.count("SendNodeHeartbeat") < 3 and time.monotonic() < deadline:
            pass
    assert fleet.calls.count("SendNodeHeartbeat") >= 3
