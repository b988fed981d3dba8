"""Clients that come, go, hide and pretend: on a carrier that does as it is told, with time that does too."""

import re

import pytest

from kinfed import RunError, __version__
from kinfed.flower import broker as module
from kinfed.flower.broker import Courier, Failure, Node
from kinfed.flower.messages import Message

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


class Carrier:
    """Nodes answer after `delay` seconds, with what `answers[client]` makes of the message.

    A node does one thing at a time; `hiccups` are seconds that a client's next orders take besides.
    """

    def __init__(self, clock, clients):
        self.clock, self.clients = clock, dict(enumerate(clients, 1))
        self.online = {node: "first" for node in self.clients}
        self.delay, self.answers, self.sent, self._due = 1.0, {}, [], {}
        self.versions, self.keys, self.words = {}, {}, {}
        self.delays, self.hiccups, self._free = {}, {}, {}
        self.told = []  # (client, why it is refused)

    def nodes(self):
        return {node: Node(stamp, self.keys.get(node, ""), b"%d" % node) for node, stamp in self.online.items()}

    def push(self, node, kind, message, seconds):
        id = f"{len(self.sent)}"
        client = self.clients[node]
        self.sent.append((client, kind, self.clock.now))
        if kind == "hello":
            said = {"client": client, "kinfed": self.versions.get(client, __version__)}
            answer = Message(said | EXAMPLES | self.words.get(client, {}), {})
            if "refused" in message.words:
                self.told.append((client, message.words["refused"]))
        else:
            answer = self.answers.get(client, lambda m: Message({"client": client, "did": m.words["do"]}, {}))(message)
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
        clock, said = Clock(), []
        carrier = Carrier(clock, clients)
        monkeypatch.setattr(module, "time", clock)
        return clock, carrier, Courier(carrier, deadline, patience, said.append), said

    return make


def order(clients):
    return {client: Message({"do": f"{client}'s"}, {}) for client in clients}


def found(courier, clients):
    courier.discover(lambda: set(clients) <= set(courier.found), f"{len(clients)} sites")


def test_everyone_is_asked_once_and_answers_go_to_whom_they_belong(world):
    _, carrier, courier, _ = world("abc")
    found(courier, "abc")
    answers = courier.ask("round", order("abc"))
    assert {client: answer.words["did"] for client, answer in answers.items()} == {c: f"{c}'s" for c in "abc"}
    assert [kind for _, kind, _ in carrier.sent] == ["hello"] * 3 + ["round"] * 3
    assert set(courier.travelled) == set("abc")
    for rounds in courier.travelled.values():
        ((down, up),) = rounds.values()
        assert down == len('{"do": "a\'s"}')
        assert up == len('{"client": "a", "did": "a\'s"}')


def test_a_silent_client_is_waited_for_until_the_deadline_and_no_longer(world):
    clock, carrier, courier, said = world("abc")
    found(courier, "abc")
    carrier.answers["b"] = lambda message: None
    begin = clock.now
    answers = courier.ask("round", order("abc"), needed=2)
    assert set(answers) == {"a", "c"}
    assert 100 < clock.now - begin < 103
    assert said[-1] == "went on without b: no answer; a node that is started again is asked again"


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("hiccup", [0.8, 1.0])
def test_a_site_that_is_late_once_misses_one_round(world, share, hiccup):
    """A site that needs that share of the deadline, and the deadline besides in its second round."""
    clock, carrier, courier, _ = world("abc")
    found(courier, "abc")
    carrier.delays["b"], carrier.hiccups["b"] = share * 100, [0, hiccup * 100]
    answered = []
    for round in range(6):
        began = clock.now
        answers = courier.ask("round", {c: Message({"do": f"{c} in {round}"}, {}) for c in "abc"}, needed=2)
        assert all(answer.words["did"] == f"{c} in {round}" for c, answer in answers.items())
        assert clock.now - began < 2 * 100
        answered.append("b" in answers)
    assert answered == [True, False, True, True, True, True]
    assert sum(client == "b" and kind == "round" for client, kind, _ in carrier.sent) == 6


def test_a_site_that_is_always_late_costs_no_more_than_the_deadline_but_once(world):
    clock, carrier, courier, _ = world("abc")
    found(courier, "abc")
    carrier.delays["b"], took = 150.0, []
    for _ in range(5):
        began = clock.now
        assert set(courier.ask("round", order("abc"), needed=2)) == {"a", "c"}
        took.append(round(clock.now - began, -1))
    assert took == [100, 150, 100, 100, 100]


@pytest.mark.parametrize(("lost", "rounds"), [(1, 1), (2, 3)])
def test_answers_that_never_come_do_not_keep_a_client_out(world, lost, rounds):
    _, carrier, courier, _ = world("abc")
    found(courier, "abc")
    carrier.answers["b"] = lambda message: None
    for _ in range(lost):
        assert set(courier.ask("round", order("abc"), needed=2)) == {"a", "c"}
    del carrier.answers["b"]
    for _ in range(rounds - lost):
        assert set(courier.ask("round", order("abc"), needed=2)) == {"a", "c"}
    for _ in range(2):
        assert set(courier.ask("round", order("abc"), needed=2)) == set("abc")


def test_orders_do_not_pile_up_at_a_site_that_is_always_late(world):
    clock, carrier, courier, _ = world("abc")
    found(courier, "abc")
    carrier.delays["b"] = 250.0
    for _ in range(20):
        assert set(courier.ask("round", order("abc"), needed=2)) == {"a", "c"}
    waiting = [due for due, answer in carrier._due.values() if due > clock.now]
    assert len(waiting) <= 3


def test_an_answer_of_before_is_nobodys_when_its_client_is_not_asked(world):
    clock, carrier, courier, _ = world("abc")
    found(courier, "abc")
    carrier.hiccups["b"] = [150.0]
    assert set(courier.ask("round", order("abc"), needed=2)) == {"a", "c"}
    began = clock.now
    assert set(courier.ask("round", order("ac"))) == {"a", "c"}
    assert clock.now - began < 5
    clock.sleep(100)
    assert courier.ask("round", {"b": Message({"do": "more"}, {})})["b"].words["did"] == "more"


def test_below_the_quorum_it_waits_on_and_then_gives_up(world):
    clock, carrier, courier, said = world("abc")
    found(courier, "abc")
    carrier.answers["b"] = carrier.answers["c"] = lambda message: None
    begin = clock.now
    with pytest.raises(RunError, match=r"only 1 of 3 clients .* and 2 must; look after b, c and go on with --resume"):
        courier.ask("round", order("abc"), needed=2)
    assert 1000 < clock.now - begin < 1003
    assert "waiting for 1 more of clients b, c" in said


def test_a_client_that_is_offline_costs_no_time_unless_it_is_needed(world):
    clock, carrier, courier, _ = world("abc")
    found(courier, "abc")
    del carrier.online[2]
    clock.sleep(5)
    begin = clock.now
    assert set(courier.ask("round", order("abc"), needed=2)) == {"a", "c"}
    assert clock.now - begin < 5
    clock.plans.append((clock.now + 50, lambda: carrier.online.update({2: "second"})))
    begin = clock.now
    assert set(courier.ask("round", order("abc"), needed=3)) == {"a", "b", "c"}
    assert 50 < clock.now - begin < 60


def test_a_node_that_was_away_is_asked_again(world):
    """Its process died with the message; it comes back under the same number, but later."""
    clock, carrier, courier, _ = world("ab")
    found(courier, "ab")
    carrier.answers["b"] = lambda message: None

    def back():
        carrier.online[2] = "second"
        del carrier.answers["b"]

    clock.plans.append((clock.now + 20, back))
    begin = clock.now
    assert set(courier.ask("round", order("ab"))) == {"a", "b"}
    assert 20 < clock.now - begin < 30
    assert [kind for client, kind, _ in carrier.sent if client == "b"] == ["hello", "round", "round"]


def test_a_node_with_a_new_number_is_the_client_that_it_says(world):
    clock, carrier, courier, _ = world("ab")
    found(courier, "ab")
    carrier.clients[7] = "b"
    carrier.online = {1: "first", 7: "first"}
    clock.sleep(5)
    assert set(courier.ask("round", order("ab"), needed=2)) == {"a", "b"}


def test_two_nodes_cannot_be_the_same_client(world):
    clock, carrier, courier, said = world("ab")
    found(courier, "ab")
    carrier.clients[7] = "b"
    carrier.online[7] = "first"
    clock.sleep(5)
    courier.ask("round", order("ab"))
    clock.sleep(5)
    courier.ask("round", order("ab"))
    assert [line for line in said if "node 7" in line] == [
        "cannot use the node 7: client b is at another node already; give every site a name of its own"
    ]
    assert sum(client == "b" and kind == "round" for client, kind, _ in carrier.sent) == 2


def test_another_version_of_kinfed_is_told_apart(world):
    _, carrier, courier, said = world("ab")
    carrier.versions["b"] = "0.0.9"
    found(courier, "a")
    assert set(courier.found) == {"a"}
    assert any(f"cannot use the node 2: it runs kinfed 0.0.9, the server {__version__}" in line for line in said)


def test_a_node_that_breaks_down_is_asked_three_times_and_then_left_out(world):
    _, carrier, courier, said = world("ab")
    found(courier, "ab")
    carrier.answers["b"] = lambda message: Failure("ClientApp stopped responding.", True)
    assert set(courier.ask("round", order("ab"), needed=1)) == {"a"}
    assert sum(client == "b" and kind == "round" for client, kind, _ in carrier.sent) == 3
    assert said[-1] == "left client b out: ClientApp stopped responding."


def test_a_refusal_is_final_for_the_round(world):
    _, carrier, courier, said = world("ab")
    found(courier, "ab")
    carrier.answers["b"] = lambda message: Message({"client": "b", "refused": "client b: no"}, {})
    assert set(courier.ask("round", order("ab"))) == {"a"}
    assert sum(client == "b" and kind == "round" for client, kind, _ in carrier.sent) == 1
    assert said[-1] == "left client b out: client b: no"


def test_a_quorum_that_cannot_be_reached_any_more_ends_the_wait_at_once(world):
    clock, carrier, courier, _ = world("ab")
    found(courier, "ab")
    carrier.answers["b"] = lambda message: Message({"client": "b", "refused": "client b: no"}, {})
    begin = clock.now
    assert set(courier.ask("round", order("ab"), needed=2)) == {"a"}
    assert clock.now - begin < 5


def test_a_client_is_whom_its_key_says(world):
    _, carrier, courier, said = world("ab")
    carrier.keys = {1: "a", 2: "carol"}
    found(courier, "a")
    assert set(courier.found) == {"a"}
    assert said[-1] == "cannot use the node of carol: it says that it is client b, but its key is that of carol"


def test_only_the_keys_of_members_take_part_and_no_longer_than_they_are_members(world):
    """Whatever a node's key was registered as: who is a member is what the server's own folder of keys says."""
    clock, carrier, courier, said = world(["a", "mallory", "b"])
    carrier.keys = {1: "a", 2: "mallory", 3: "whoever"}
    members = {b"1": "a", b"3": "b"}
    courier.members = lambda: members
    found(courier, "ab")
    assert set(courier.found) == {"a", "b"}
    assert not any(client == "mallory" for client, *_ in carrier.sent)
    carrier.delays["b"] = 20.0
    clock.plans.append((clock.now + 10, lambda: members.pop(b"3")))  # with an order at b
    began = clock.now
    assert set(courier.ask("round", order("ab"), needed=1)) == {"a"}
    assert clock.now - began < 15
    assert not courier.is_online("b")
    assert [line for line in said if "takes no part" in line] == [
        "the node mallory takes no part: its key is not in sites/ of the server's keys",
        "the node whoever takes no part: its key is not in sites/ of the server's keys",
    ]
    members[b"3"] = "b"
    clock.sleep(5)
    assert set(courier.ask("round", order("ab"), needed=1)) == {"a", "b"}


def test_who_is_refused_is_told_why_once(world):
    clock, carrier, courier, said = world("ab")
    carrier.keys = {1: "a", 2: "carol"}
    found(courier, "a")
    for _ in range(30):
        clock.sleep(5)
        courier.wait("a")
    why = "it says that it is client b, but its key is that of carol"
    assert carrier.told == [("b", why)]
    assert said.count(f"cannot use the node of carol: {why}") == 1


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
    _, carrier, courier, said = world("ab")
    carrier.words["b"] = words
    found(courier, "a")
    assert set(courier.found) == {"a"}
    (line,) = [line for line in said if "node 2" in line]
    assert "\n" not in line
    assert re.search(why, line)


def test_who_was_sent_away_is_asked_again_and_told_why_once(world):
    clock, _, courier, said = world("ab")
    found(courier, "ab")
    for _ in range(2):
        courier.dismiss("b", "its examples are others")
        assert set(courier.found) == {"a"}
        clock.sleep(61)
        found(courier, "ab")
    assert said.count("left client b out: its examples are others") == 1


def test_before_the_first_round_a_site_that_was_started_again_is_asked_what_it_has_now(world):
    clock, carrier, courier, _ = world("ab")
    clock.plans.append((20, lambda: carrier.words.update(b={"outputs": 5}) or carrier.online.update({2: "second"})))
    courier.discover(lambda: courier.found.get("b", {}).get("outputs") == 5, "b with five outputs")
    assert 20 < clock.now < 40


def test_a_node_that_cannot_be_used_keeps_nobody_waiting(world):
    clock, carrier, courier, _ = world("ab")
    carrier.versions["b"] = "0.0.9"
    found(courier, "a")
    assert clock.now < 10


def test_too_few_sites_end_the_wait_for_them(world):
    clock, _, courier, said = world("a", patience=60)
    with pytest.raises(RunError, match=r"waited 6\d s for 2 sites; there are a"):
        courier.discover(lambda: len(courier.found) >= 2, "2 sites")
    assert said[0] == "waiting for 2 sites; none is there"
    assert clock.now < 62
