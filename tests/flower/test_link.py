"""Why a SuperLink cannot be reached, by stand-ins for it."""

import pytest

pytest.importorskip("cryptography", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed_flower.wire import keys
from kinfed_flower.wire.link import SILENT, Link


def test_a_superlink_is_reached_or_the_reason_is_given(tmp_path, server):
    keys.make(tmp_path / "keys", [], [])
    keys.make(tmp_path / "other", [], [])
    secured, open_ = server(tmp_path / "keys"), server()
    ca = str(tmp_path / "keys" / "ca.crt")
    assert Link(secured, ca).problem() == ""
    assert Link(open_).problem() == ""
    assert "cannot be trusted" in Link(secured, str(tmp_path / "other" / "ca.crt")).problem()
    assert "was its SuperLink started with --insecure?" in Link(open_, ca).problem()
    assert "if its SuperLink uses TLS, give --keys" in Link(secured).problem()
    assert Link("127.0.0.1:9", ca).problem() == SILENT
    assert "there is no host nowhere.invalid" in Link("nowhere.invalid:80", ca).problem()
    (tmp_path / "no.crt").write_text("no certificate")
    assert "no.crt is not a certificate" in Link(secured, str(tmp_path / "no.crt")).problem()
    assert "is not a certificate" in Link(secured, str(tmp_path / "none.crt")).problem()
