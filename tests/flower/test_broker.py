"""Clients that come, go, are late and pretend: on a scripted transport with a scripted clock."""

import re

import pytest

from kinfed import RunError, __version__
from kinfed_flower.server import broker as module
from kinfed_flower.server.broker import Broker
from kinfed_flower.server.node_traffic import Traffic
from kinfed_flower.server.nodes import Nodes
from kinfed_flower.wire.messages import Failure, Message, Node

EXAMPLES = {"shape": [6], "outputs": 3, "task": {"name": "Classification", "classes": 3}, "columns": []}


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now, self.plans = 0.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for when, what in [p for p in self.plans if p[0] <= self.now]:
            self.plans.remove((when, what))
            what()


class Transport:
    """Nodes answer after `delay` seconds, with what `replies[client]` makes of the message.

    A node does one thing at a time; `hiccups` are seconds that a client's next orders take besides.
    """

    def __init__(self, clock, clients):
        self.clock, self.clients = clock, dict(enumerate(clients, 1))
        self.online = {node: "first" for node in self.clients}
        self.delay, self.replies, self.sent, self._due = 1.0, {}, [], {}
        self.versions, self.keys, self.fields = {}, {}, {}
        self.delays, self.hiccups, self._free = {}, {}, {}
        self.refusals = []  # (client, why)

    def nodes(self):
        return {node: Node(stamp, self.keys.get(node, ""), b"%d" % node) for node, stamp in self.online.items()}

    def push(self, node, kind, message, seconds):
        id = f"{len(self.sent)}"
        client = self.clients[node]
        self.sent.append((client, kind, self.clock.now))
        if kind == "hello":
            words = {"client": client, "kinfed": self.versions.get(client, __version__)}
            answer = Message(words | EXAMPLES | self.fields.get(client, {}), {})
            if "refused" in message.fields:
                self.refusals.append((client, message.fields["refused"]))
        else:
            answer = self.replies.get(client, lambda m: Message({"client": client, "did": m.fields["do"]}, {}))(message)
        if answer is not None:
            took = self.delays.get(client, self.delay) if kind != "hello" else self.delay
            if kind != "hello" and self.hiccups.get(client):
                took += self.hiccups[client].pop(0)
            self._free[node] = max(self.clock.now, self._free.get(node, 0.0)) + took
            self._due[id] = (self._free[node], answer)
        return id

    def pull(self, ids):
        ready = [id for id in ids if id in self._due and self._due[id][0] <= self.clock.now]
        return {id: self._due.pop(id)[1] for id in ready}


@pytest.fixture
def world(monkeypatch):
    def make(clients, deadline=100.0, patience=1000.0):
        clock, lines = Clock(), []
        transport = Transport(clock, clients)
        monkeypatch.setattr(module, "time", clock)
        nodes = Nodes(lines.append, None)
        broker = Broker(nodes, Traffic(transport, nodes, patience), deadline, lines.append)
        return clock, transport, broker, lines

    return make


def requests(clients):
    return {client: Message({"do": f"{client}'s"}, {}) for client in clients}


def meet(broker, clients):
    broker.discover(lambda: set(clients) <= set(broker.nodes.clients), f"{len(clients)} sites")


def test_everyone_gets_one_request_and_replies_are_told_apart(world):
    _, transport, broker, _ = world("abc")
    meet(broker, "abc")
    replies = broker.request("round", requests("abc"))
    assert {client: answer.fields["did"] for client, answer in replies.items()} == {c: f"{c}'s" for c in "abc"}
    assert [kind for _, kind, _ in transport.sent] == ["hello"] * 3 + ["round"] * 3
    assert set(broker.traffic.bytes) == set("abc")
    for rounds in broker.traffic.bytes.values():
        ((down, up),) = rounds.values()
        assert down == len('{"do": "a\'s"}')
        assert up == len('{"client": "a", "did": "a\'s"}')


def test_a_silent_client_is_waited_for_until_the_deadline_and_no_longer(world):
    clock, transport, broker, lines = world("abc")
    meet(broker, "abc")
    transport.replies["b"] = lambda message: None
    begin = clock.now
    replies = broker.request("round", requests("abc"), needed=2)
    assert set(replies) == {"a", "c"}
    assert 100 < clock.now - begin < 103
    assert lines[-1] == "continuing without b: no reply in time; it is asked again in the next round"


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("hiccup", [0.8, 1.0])
def test_a_site_that_is_late_once_misses_one_round(world, share, hiccup):
    """A site that needs that share of the deadline, and the deadline besides in its second round."""
    clock, transport, broker, _ = world("abc")
    meet(broker, "abc")
    transport.delays["b"], transport.hiccups["b"] = share * 100, [0, hiccup * 100]
    answered = []
    for round in range(6):
        began = clock.now
        replies = broker.request("round", {c: Message({"do": f"{c} in {round}"}, {}) for c in "abc"}, needed=2)
        assert all(answer.fields["did"] == f"{c} in {round}" for c, answer in replies.items())
        assert clock.now - began < 2 * 100
        answered.append("b" in replies)
    assert answered == [True, False, True, True, True, True]
    assert sum(client == "b" and kind == "round" for client, kind, _ in transport.sent) == 6


def test_a_site_that_is_always_late_costs_no_more_than_the_deadline_but_once(world):
    clock, transport, broker, _ = world("abc")
    meet(broker, "abc")
    transport.delays["b"], took = 150.0, []
    for _ in range(5):
        began = clock.now
        assert set(broker.request("round", requests("abc"), needed=2)) == {"a", "c"}
        took.append(round(clock.now - began, -1))
    assert took == [100, 150, 100, 100, 100]


@pytest.mark.parametrize(("lost", "rounds"), [(1, 1), (2, 3)])
def test_replies_that_never_come_do_not_keep_a_client_out(world, lost, rounds):
    _, transport, broker, _ = world("abc")
    meet(broker, "abc")
    transport.replies["b"] = lambda message: None
    for _ in range(lost):
        assert set(broker.request("round", requests("abc"), needed=2)) == {"a", "c"}
    del transport.replies["b"]
    for _ in range(rounds - lost):
        assert set(broker.request("round", requests("abc"), needed=2)) == {"a", "c"}
    for _ in range(2):
        assert set(broker.request("round", requests("abc"), needed=2)) == set("abc")


def test_requests_do_not_pile_up_at_a_site_that_is_always_late(world):
    clock, transport, broker, _ = world("abc")
    meet(broker, "abc")
    transport.delays["b"] = 250.0
    for _ in range(20):
        assert set(broker.request("round", requests("abc"), needed=2)) == {"a", "c"}
    waiting = [due for due, answer in transport._due.values() if due > clock.now]
    assert len(waiting) <= 3


def test_a_reply_to_an_earlier_request_is_not_taken_for_another(world):
    clock, transport, broker, _ = world("abc")
    meet(broker, "abc")
    transport.hiccups["b"] = [150.0]
    assert set(broker.request("round", requests("abc"), needed=2)) == {"a", "c"}
    began = clock.now
    assert set(broker.request("round", requests("ac"))) == {"a", "c"}
    assert clock.now - began < 5
    clock.sleep(100)
    assert broker.request("round", {"b": Message({"do": "more"}, {})})["b"].fields["did"] == "more"


def test_below_the_quorum_it_waits_on_and_then_gives_up(world):
    clock, transport, broker, lines = world("abc")
    meet(broker, "abc")
    transport.replies["b"] = transport.replies["c"] = lambda message: None
    begin = clock.now
    with pytest.raises(RunError, match=r"only 1 of 3 clients .* but 2 must; check b, c"):
        broker.request("round", requests("abc"), needed=2)
    assert 1000 < clock.now - begin < 1003
    assert "waiting for 1 more of clients b, c" in lines


def test_a_client_that_is_offline_costs_no_time_unless_it_is_needed(world):
    clock, transport, broker, _ = world("abc")
    meet(broker, "abc")
    del transport.online[2]
    clock.sleep(5)
    begin = clock.now
    assert set(broker.request("round", requests("abc"), needed=2)) == {"a", "c"}
    assert clock.now - begin < 5
    clock.plans.append((clock.now + 50, lambda: transport.online.update({2: "second"})))
    begin = clock.now
    assert set(broker.request("round", requests("abc"), needed=3)) == {"a", "b", "c"}
    assert 50 < clock.now - begin < 60


def test_a_node_that_was_offline_is_tried_again(world):
    """Its process died with the message; it comes back under the same number, but later."""
    clock, transport, broker, _ = world("ab")
    meet(broker, "ab")
    transport.replies["b"] = lambda message: None

    def back():
        transport.online[2] = "second"
        del transport.replies["b"]

    clock.plans.append((clock.now + 20, back))
    begin = clock.now
    assert set(broker.request("round", requests("ab"))) == {"a", "b"}
    assert 20 < clock.now - begin < 30
    assert [kind for client, kind, _ in transport.sent if client == "b"] == ["hello", "round", "round"]


def test_a_message_that_could_not_be_sent_is_sent_again(world, monkeypatch):
    _, transport, broker, _ = world("ab")
    meet(broker, "ab")
    before, push, lost = len(transport.sent), transport.push, iter([""])
    monkeypatch.setattr(transport, "push", lambda *what: next(lost, push(*what)))
    assert set(broker.request("round", requests("ab"), needed=2)) == {"a", "b"}
    assert sorted(client for client, *_ in transport.sent[before:]) == ["a", "a", "b"]


def test_a_node_with_a_new_number_can_be_a_known_client(world):
    clock, transport, broker, _ = world("ab")
    meet(broker, "ab")
    transport.clients[7] = "b"
    transport.online = {1: "first", 7: "first"}
    clock.sleep(5)
    assert set(broker.request("round", requests("ab"), needed=2)) == {"a", "b"}


def test_two_nodes_cannot_be_the_same_client(world):
    clock, transport, broker, lines = world("ab")
    meet(broker, "ab")
    transport.clients[7] = "b"
    transport.online[7] = "first"
    clock.sleep(5)
    broker.request("round", requests("ab"))
    clock.sleep(5)
    broker.request("round", requests("ab"))
    assert [line for line in lines if "node 7" in line] == [
        "cannot use the node 7 (b): client b is already at another node; give every site its own name"
    ]
    assert sum(client == "b" and kind == "round" for client, kind, _ in transport.sent) == 2


def test_another_version_of_kinfed_is_refused(world):
    _, transport, broker, lines = world("ab")
    transport.versions["b"] = "0.0.9"
    meet(broker, "a")
    assert set(broker.nodes.clients) == {"a"}
    assert any(f"cannot use the node 2 (b): it runs kinfed 0.0.9, the server {__version__}" in line for line in lines)


def test_a_node_that_breaks_down_is_tried_three_times_and_then_left_out(world):
    _, transport, broker, lines = world("ab")
    meet(broker, "ab")
    transport.replies["b"] = lambda message: Failure("ClientApp stopped responding.", True)
    assert set(broker.request("round", requests("ab"), needed=1)) == {"a"}
    assert sum(client == "b" and kind == "round" for client, kind, _ in transport.sent) == 3
    assert lines[-1] == "left client b out: ClientApp stopped responding."


def test_a_refusal_is_final_for_the_round(world):
    _, transport, broker, lines = world("ab")
    meet(broker, "ab")
    transport.replies["b"] = lambda message: Message({"client": "b", "refused": "no"}, {})
    assert set(broker.request("round", requests("ab"))) == {"a"}
    assert sum(client == "b" and kind == "round" for client, kind, _ in transport.sent) == 1
    assert lines[-1] == "left client b out: no"


def test_a_quorum_that_cannot_be_reached_any_more_ends_the_wait_at_once(world):
    clock, transport, broker, _ = world("ab")
    meet(broker, "ab")
    transport.replies["b"] = lambda message: Message({"client": "b", "refused": "no"}, {})
    begin = clock.now
    assert set(broker.request("round", requests("ab"), needed=2)) == {"a"}
    assert clock.now - begin < 5


def test_a_client_is_identified_by_its_key(world):
    _, transport, broker, lines = world("ab")
    transport.keys = {1: "a", 2: "carol"}
    meet(broker, "a")
    assert set(broker.nodes.clients) == {"a"}
    assert broker.problems["carol"].startswith("it claims to be client b")
    assert lines[-1] == "cannot use the node of carol: it claims to be client b, but its key is that of carol"


def test_a_client_that_went_away_is_not_said_to_be_silent(world):
    clock, transport, broker, lines = world("abc")
    meet(broker, "abc")
    del transport.online[2]
    begin = clock.now
    assert set(broker.request("round", requests("abc"), needed=2)) == {"a", "c"}
    assert clock.now - begin < 5
    assert lines[-1] == "continuing without b: not connected; it is asked again once it is"
    assert broker.problems["b"] == "it is not connected"


@pytest.mark.parametrize("keys", [{1: "a", 2: "b", 3: "c"}, {}], ids=["keys", "none"])
def test_only_sites_that_the_plan_names_are_asked(world, keys):
    """By their keys they are not even greeted; without keys each says who it is, and is told that it is not asked."""
    _, transport, broker, lines = world("abc")
    transport.keys = keys
    broker.nodes.members = (lambda: {b"%d" % node: name for node, name in keys.items()}) if keys else None
    broker.nodes.sites = ("a", "c")
    meet(broker, "ac")
    assert set(broker.nodes.clients) == {"a", "c"}
    if keys:
        assert {client for client, *_ in transport.sent} == {"a", "c"}
    else:
        assert any("the plan does not name it (flower.sites)" in line for line in lines)
    assert set(broker.request("round", requests("ac"))) == {"a", "c"}


def test_only_the_keys_of_members_take_part_and_no_longer_than_they_are_members(world):
    """Whatever a node's key was registered as: who is a member is what the server's own folder of keys says."""
    clock, transport, broker, lines = world(["a", "mallory", "b"])
    transport.keys = {1: "a", 2: "mallory", 3: "whoever"}
    members = {b"1": "a", b"3": "b"}
    broker.nodes.members = lambda: members
    meet(broker, "ab")
    assert set(broker.nodes.clients) == {"a", "b"}
    assert not any(client == "mallory" for client, *_ in transport.sent)
    transport.delays["b"] = 20.0
    clock.plans.append((clock.now + 10, lambda: members.pop(b"3")))  # with an order at b
    began = clock.now
    assert set(broker.request("round", requests("ab"), needed=1)) == {"a"}
    assert clock.now - began < 15
    assert not broker.nodes.is_online("b")
    assert lines[-1] == "continuing without b: removed from sites/ of the server's keys"
    assert broker.problems["b"] == "it was removed"
    assert [line for line in lines if "ignoring the node" in line] == [
        "ignoring the node mallory: its key is not in sites/ of the server's keys",
        "ignoring the node whoever: its key is not in sites/ of the server's keys",
    ]
    members[b"3"] = "b"
    clock.sleep(5)
    assert set(broker.request("round", requests("ab"), needed=1)) == {"a", "b"}


def test_a_refused_node_is_told_why_once(world):
    clock, transport, broker, lines = world("ab")
    transport.keys = {1: "a", 2: "carol"}
    meet(broker, "a")
    for _ in range(30):
        clock.sleep(5)
        broker.wait("a")
    why = "it claims to be client b, but its key is that of carol"
    assert transport.refusals == [("b", why)]
    assert lines.count(f"cannot use the node of carol: {why}") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"task": 7}, "its task is 7"),
        ({"task": {"name": "Classification", "classes": "x"}}, "its labels show 'x' classes"),
        ({"task": {"name": "Classification", "classes": 10**30}}, "classes"),
        ({"columns": [[1]]}, r"its columns are \[\[1\]\]"),
        ({"columns": 7}, "its columns are 7"),
        ({"shape": [-1]}, "its examples have the shape"),
        ({"shape": {"a": 1}}, "its examples have the shape"),
        ({"outputs": None}, "its examples have the shape"),
        ({"client": "b\nkinfed: done: {}"}, "it does not say which client it is"),
        ({"refused": "no\nkinfed: done: {}"}, "no kinfed: done: {}$"),
    ],
)
def test_a_greeting_that_is_made_up_does_not_disturb(world, words, why):
    _, transport, broker, lines = world("ab")
    transport.fields["b"] = words
    meet(broker, "a")
    assert set(broker.nodes.clients) == {"a"}
    (line,) = [line for line in lines if "node 2" in line]
    assert "\n" not in line
    assert re.search(why, line)


def test_a_dismissed_client_is_greeted_again_and_told_why_once(world):
    clock, _, broker, lines = world("ab")
    meet(broker, "ab")
    for _ in range(2):
        broker.dismiss("b", "its examples are others")
        assert set(broker.nodes.clients) == {"a"}
        clock.sleep(61)
        meet(broker, "ab")
    assert lines.count("left client b out: its examples are others") == 1


def test_a_dismissed_site_that_is_started_again_is_greeted_at_once(world):
    clock, transport, broker, _ = world("ab")
    meet(broker, "ab")
    broker.dismiss("b")
    transport.online[2] = "second"
    begin = clock.now
    meet(broker, "ab")
    assert clock.now - begin < 10


def test_before_the_first_round_a_restarted_site_is_greeted_again(world):
    clock, transport, broker, _ = world("ab")
    clock.plans.append(
        (20, lambda: transport.fields.update(b={"outputs": 5}) or transport.online.update({2: "second"}))
    )
    broker.discover(lambda: broker.nodes.clients.get("b", {}).get("outputs") == 5, "b with five outputs")
    assert 20 < clock.now < 40


def test_a_node_that_cannot_be_used_keeps_nobody_waiting(world):
    clock, transport, broker, _ = world("ab")
    transport.versions["b"] = "0.0.9"
    meet(broker, "a")
    assert clock.now < 10


def test_too_few_sites_end_the_wait_for_them(world):
    clock, _, broker, lines = world("a", patience=60)
    with pytest.raises(RunError, match=r"waited 6\d s for 2 sites; connected: a"):
        broker.discover(lambda: len(broker.nodes.clients) >= 2, "2 sites")
    assert lines[0] == "waiting for 2 sites; connected: none"
    assert clock.now < 62
