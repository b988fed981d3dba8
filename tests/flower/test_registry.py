"""Flower's own database, as its SuperLink keeps it, and what becomes of a key in it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from kinfed import RunError, UsageError
from kinfed.flower import keys, registry, superlink


@pytest.fixture
def link(tmp_path, monkeypatch):
    """A SuperLink's database in home/, and a stand-in for Flower's command that changes it; returns its state."""
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
        folder = Path(what).parent
        (public,) = (key for key, name in keys.members(folder.parents[1]).items() if name == folder.name)
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 30, name=rest[rest.index("--name") + 1])
        return {}

    monkeypatch.setattr(superlink, "flwr", flwr)
    return state


def test_a_key_that_was_unregistered_is_admitted_again(tmp_path, link):
    home, folder, lines = tmp_path / "home", tmp_path / "keys", []
    keys.make(folder, [], ["a", "b"])
    superlink.admit(home, folder, lines.append)
    assert lines == ["admitted: a", "admitted: b"]
    public = {name: key for key, name in keys.members(folder).items()}
    node = link.get_node_id_by_public_key(public["b"])
    assert registry.entries(home / "state.db")[public["b"]] == (node, "b", True)
    link.delete_node(NOOP_FLWR_AID, node)  # by another hand
    with pytest.raises(ValueError, match="already in use"):  # Flower's own way is closed
        link.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public["b"], 30)
    superlink.admit(home, folder, lines.append)
    assert lines[2:] == ["admitted again: b"]
    again = link.get_node_id_by_public_key(public["b"])
    assert again not in (None, node)
    assert link.activate_node(again, 30)
    superlink.admit(home, folder, lines.append)
    assert len(lines) == 3


def test_a_node_whose_key_is_not_in_the_folder_is_removed(tmp_path, link):
    home, folder, lines = tmp_path / "home", tmp_path / "keys", []
    keys.make(folder, [], ["a"])
    link.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, b"a stranger's", 30, name="mallory")
    superlink.admit(home, folder, lines.append)
    assert lines == [f"removed mallory: its key is not in {folder}/sites", "admitted: a"]
    assert link.get_node_id_by_public_key(b"a stranger's") is None


def test_a_site_is_revoked_until_its_key_is_back(tmp_path, link, monkeypatch):
    home, folder, lines = tmp_path / "home", tmp_path / "keys", []
    keys.make(folder, [], ["ann", "bob"])
    superlink.admit(home, folder, lambda line: None)
    (home / "link.json").write_text(json.dumps({"address": "127.0.0.1:1", "ca": str(folder / "ca.crt"), "pid": 1}))
    monkeypatch.setattr(superlink, "is_alive", lambda started: True)
    with pytest.raises(UsageError, match="has no key of 'bbo'; did you mean 'bob'"):
        superlink.revoke(home, "bbo", None, lines.append)
    ((public, _),) = ((key, name) for key, name in keys.members(folder).items() if name == "bob")
    superlink.revoke(home, "bob", None, lines.append)
    assert lines == [
        f"bob is no longer a member: its key is in {folder}/revoked/bob now, and runs in progress accept nothing from "
        "it",
        f"removed bob: its key is not in {folder}/sites",
    ]
    assert link.get_node_id_by_public_key(public) is None
    superlink.admit(home, folder, lines.append)
    assert len(lines) == 2
    (folder / "revoked" / "bob").rename(folder / "sites" / "bob")
    superlink.admit(home, folder, lines.append)
    assert lines[2] == "admitted again: bob"
    assert link.get_node_id_by_public_key(public)
    superlink.revoke(home, "bob", None, lines.append)
    keys.make(folder, [], ["bob"])  # another key under the old name
    superlink.admit(home, folder, lines.append)
    assert lines[-1] == "admitted: bob"
    superlink.revoke(home, "bob", None, lines.append)
    assert sorted(path.name for path in (folder / "revoked").iterdir()) == ["bob", "bob-2"]


def test_a_site_is_revoked_without_a_superlink_too(tmp_path):
    lines = []
    keys.make(tmp_path / "keys", [], ["ann"])
    with pytest.raises(UsageError, match="say where its keys are: --keys DIR"):
        superlink.revoke(tmp_path, "ann", None, lines.append)
    superlink.revoke(tmp_path, "ann", tmp_path / "keys", lines.append)
    assert lines[1] == "no SuperLink is running; the next kinfed flower up will reject its node"
    assert keys.members(tmp_path / "keys") == {}


def test_a_file_that_is_not_a_database_is_named(tmp_path):
    (tmp_path / "state.db").write_text("no database")
    with pytest.raises(RunError, match=r"state\.db cannot be read as the SuperLink's database"):
        registry.entries(tmp_path / "state.db")
    with pytest.raises(RunError, match="unable to open"):
        registry.entries(tmp_path / "none.db")
