"""Replies whose parts come late, or never, by a stand-in for the SuperLink's calls."""

from types import SimpleNamespace as Namespace

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed_flower.wire import flower_names
from kinfed_flower.wire.run_grid import RunGrid


class Calls:
    """A SuperLink with a reply to each message, of two parts; `there` are those parts that have come."""

    def __init__(self):
        self.there, self.gone, self.away, self.claimed, self.confirmed = set(), set(), False, set(), []

    def PullMessages(self, asked):
        if self.away:
            raise httpx.ConnectError("nobody")
        new = sorted({*asked.message_ids} - self.claimed)
        self.claimed |= {*new}
        heads = [Namespace(metadata=Namespace(message_id=f"to {id}", reply_to_message_id=id)) for id in new]
        return Namespace(messages_list=heads, message_object_trees=[f"to {id}" for id in new])

    def PullObject(self, asked):
        found = asked.object_id not in self.gone
        there = asked.object_id in self.there
        return Namespace(object_found=found, object_available=there, object_content=b"x" if there else b"")

    def ConfirmMessageReceived(self, asked):
        self.confirmed.append(asked.message_object_id)


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def grid(calls):
    names = vars(flower_names.load("run")) | {
        "iterate_object_tree": lambda tree: [Namespace(object_id=tree), Namespace(object_id=f"part of {tree}")],
        "inflate_object_from_contents": lambda id, contents: (id, sorted(contents)),
    }
    return RunGrid(None, calls, 7, Namespace(**names))


def test_a_reply_whose_parts_do_not_come_keeps_no_other_waiting(grid, calls):
    calls.there = {"to a", "to b", "part of to b"}
    assert grid.pull_messages(["a", "b"]) == [("to b", ["part of to b", "to b"])]
    assert grid.pull_messages(["a"]) == []
    calls.there.add("part of to a")
    assert grid.pull_messages(["a"]) == [("to a", ["part of to a", "to a"])]
    assert calls.confirmed == ["to b", "to a"]


def test_a_reply_that_is_lost_is_an_error_and_one_not_asked_for_is_forgotten(grid, calls):
    calls.there, calls.gone = {"to a", "to b"}, {"part of to a"}
    (lost,) = grid.pull_messages(["a", "b"])
    assert lost.has_error()
    assert lost.metadata.reply_to_message_id == "a"
    assert lost.error.reason == "a part of its reply did not come"
    grid.pull_messages([])
    assert grid._coming == {}


def test_a_superlink_that_is_away_is_asked_again(grid, calls):
    calls.away, calls.there = True, {"to a", "part of to a"}
    assert grid.pull_messages(["a"]) == []
    calls.away = False
    assert len(grid.pull_messages(["a"])) == 1
