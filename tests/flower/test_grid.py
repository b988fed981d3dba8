"""What a hostile or broken peer can put into a message."""

import functools
import io
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from kinfed import UsageError
from kinfed_flower.wire import transport
from kinfed_flower.wire.messages import Message


def test_a_message_comes_back():
    arrays = {
        "train/theta": torch.randn(3, 4),
        "key": torch.tensor(-7),
        "none": torch.zeros(0, 5),
        "seen": torch.tensor([True, False]),
        "turned": torch.randn(4, 3).T,
    }
    words = {"round": 3, "name": "Bern \u00e9", "selected": {"own": 2}, "evaluate": ["tuple", None]}
    back = transport.unpack(transport.pack(Message(words, arrays)))
    assert back.fields == words
    assert back.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back.arrays[name].dtype == array.dtype
        assert torch.equal(back.arrays[name], array)


def content(data=None, words='{"client": "a"}'):
    arrays = {} if data is None else {"x": Array("float32", (1,), "numpy.ndarray", data)}
    return RecordDict({"words": ConfigRecord({"json": words}), "arrays": ArrayRecord(array_dict=arrays)})


def npy(array, **how):
    stream = io.BytesIO()
    np.save(stream, array, **how)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (RecordDict(), "words"),
        (content(words="not json"), "Expecting value"),
        (content(words="[1]"), "its fields are list, not a table"),
        (content(words="[" * 100_000), "recursion|Expecting value"),
        (content(b""), "magic"),
        (content(b"\x93NUMPY\x01\x00"), "EOF|header"),
        (content(npy(np.ones(4, np.float32))[:-1]), r"shape \[4\] comes with 15 bytes"),
        (content(npy(np.ones(4, np.float32)) + b"!"), r"shape \[4\] comes with 17 bytes"),
        (content(npy(np.ones(4, np.float32)).replace(b"(4,)", b"(9,)")), r"shape \[9\] comes with 16 bytes"),
        (content(npy(np.array([{}]), allow_pickle=True)), "type object"),
        (content(npy(np.array(["text"]))), "type <U4"),
        (content(npy(np.asfortranarray(np.ones((2, 2))))), "not in C order"),
    ],
)
def test_what_is_no_message_is_refused(broken, why):
    with pytest.raises(UsageError, match=rf"the message cannot be read: .*({why})"):
        transport.unpack(broken)


def test_a_message_has_no_id_if_the_superlink_is_started_anew_while_it_is_sent(monkeypatch):
    """So that the broker sends it again; any other problem is a fault."""
    monkeypatch.setattr(transport, "Envelope", lambda *what, **more: None)
    grid = Mock()
    grid.push_messages.side_effect = [ObjectPushError("an object", 1, "a session"), ValueError("another")]
    push = functools.partial(transport.GridTransport(grid).push, 1, "round", Message({"round": 0}, {}), 60.0)
    assert push() == ""
    with pytest.raises(ValueError, match="another"):
        push()


def test_a_message_loads_no_more_than_it_needs():
    """At a site a fresh program answers every message, so what it imports is most of a short round."""
    code = "import sys, kinfed_flower.programs.site_app; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"matplotlib", "scipy", "sklearn", "networkx", "polars", "pooch", "pandas"} & set(loaded)
