"""Flower's own database, as its SuperLink keeps it, and what becomes of a key in it."""

import json

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from kinfed import RunError, UsageError
from kinfed.flower import keys, processes, registry


@pytest.fixture
def link(tmp_path, monkeypatch):
    """A SuperLink's database at home, and Flower's command as it would change it; returns it and what was asked."""
    (tmp_path / "home").mkdir()
    factory = LinkStateFactory(
        str(tmp_path / "home" / "state.db"),
        NoOpFederationManager(),
        ObjectStoreFactory(str(tmp_path / "home" / "state.db")),
    )
    state = factory.state()

    def flwr(home, group, action, what, *rest):
        if action == "unregister":
            state.delete_node(NOOP_FLWR_AID, int(what))
            return {}
        folder = processes.Path(what).parent
        (public,) = (key for key, name in keys.members(folder.parents[1]).items() if name == folder.name)
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 30, name=rest[rest.index("--name") + 1])
        return {}

    monkeypatch.setattr(processes, "_flwr", flwr)
    return state


def test_a_key_that_was_unregistered_is_let_in_again(tmp_path, link):
    home, folder, said = tmp_path / "home", tmp_path / "keys", []
    keys.make(folder, [], ["a", "b"])
    processes._admit(home, folder, said.append)
    assert said == ["let in: a", "let in: b"]
    public = {name: key for key, name in keys.members(folder).items()}
    node = link.get_node_id_by_public_key(public["b"])
    assert registry.entries(home / "state.db")[public["b"]] == (node, "b", True)
    link.delete_node(NOOP_FLWR_AID, node)  # by another hand
    with pytest.raises(ValueError, match="already in use"):  # Flower's own way is closed
        link.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public["b"], 30)
    processes._admit(home, folder, said.append)
    assert said[2:] == ["let in again: b"]
    again = link.get_node_id_by_public_key(public["b"])
    assert again not in (None, node)
    assert link.activate_node(again, 30)
    processes._admit(home, folder, said.append)
    assert len(said) == 3


def test_who_has_no_key_in_the_folder_is_turned_away(tmp_path, link):
    home, folder, said = tmp_path / "home", tmp_path / "keys", []
    keys.make(folder, [], ["a"])
    link.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, b"a stranger's", 30, name="mallory")
    processes._admit(home, folder, said.append)
    assert said == [f"turned away, as its key is not in {folder}/sites: mallory", "let in: a"]
    assert link.get_node_id_by_public_key(b"a stranger's") is None


def test_a_site_is_revoked_until_its_key_is_back(tmp_path, link, monkeypatch):
    home, folder, said = tmp_path / "home", tmp_path / "keys", []
    keys.make(folder, [], ["ann", "bob"])
    processes._admit(home, folder, lambda line: None)
    (home / "link.json").write_text(json.dumps({"address": "127.0.0.1:1", "ca": str(folder / "ca.crt"), "pid": 1}))
    monkeypatch.setattr(processes, "_is_alive", lambda running: True)
    with pytest.raises(UsageError, match="has no key of 'bbo'; did you mean 'bob'"):
        processes.revoke(home, "bbo", None, said.append)
    ((public, _),) = ((key, name) for key, name in keys.members(folder).items() if name == "bob")
    processes.revoke(home, "bob", None, said.append)
    assert said == [
        f"the key of bob is no member's any more, and lies in {folder}/revoked/bob; runs under way take nothing of it",
        f"turned away, as its key is not in {folder}/sites: bob",
    ]
    assert link.get_node_id_by_public_key(public) is None
    processes._admit(home, folder, said.append)
    assert len(said) == 2
    (folder / "revoked" / "bob").rename(folder / "sites" / "bob")
    processes._admit(home, folder, said.append)
    assert said[2] == "let in again: bob"
    assert link.get_node_id_by_public_key(public)
    processes.revoke(home, "bob", None, said.append)
    keys.make(folder, [], ["bob"])  # another key under the old name
    processes._admit(home, folder, said.append)
    assert said[-1] == "let in: bob"
    processes.revoke(home, "bob", None, said.append)
    assert sorted(path.name for path in (folder / "revoked").iterdir()) == ["bob", "bob-2"]


def test_a_site_is_revoked_without_a_superlink_too(tmp_path):
    said = []
    keys.make(tmp_path / "keys", [], ["ann"])
    with pytest.raises(UsageError, match="say where its keys are: --keys DIR"):
        processes.revoke(tmp_path, "ann", None, said.append)
    processes.revoke(tmp_path, "ann", tmp_path / "keys", said.append)
    assert said[1] == "no SuperLink runs; kinfed flower up turns it away"
    assert keys.members(tmp_path / "keys") == {}


def test_a_database_that_is_none_is_named(tmp_path):
    (tmp_path / "state.db").write_text("no database")
    with pytest.raises(RunError, match=r"state\.db cannot be read as the SuperLink's database"):
        registry.entries(tmp_path / "state.db")
    with pytest.raises(RunError, match="unable to open"):
        registry.entries(tmp_path / "none.db")
