"""Certificates that TLS accepts, keys that are nobody else's."""

import datetime
import re
import ssl
import stat

import pytest

pytest.importorskip("cryptography", reason="flwr is not installed: pip install 'kinfed[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from kinfed import UsageError
from kinfed_flower.masking.signatures import read_members
from kinfed_flower.wire import keys


def shake_hands(server_cert, server_key, ca, host):
    """A TLS handshake in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(server_cert, server_key)
    client = ssl.create_default_context(cafile=ca)
    pipes = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(*pipes, server_hostname=host),
        server.wrap_bio(*reversed(pipes), server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[0].getpeercert()


def test_the_server_is_known_by_the_names_given_and_as_this_machine(tmp_path):
    keys.make(tmp_path, ["hub.example.org", "10.1.2.3"], [])
    files = tmp_path / "server.crt", tmp_path / "server.key", tmp_path / "ca.crt"
    for host in ("hub.example.org", "10.1.2.3", "localhost", "127.0.0.1"):
        assert shake_hands(*files, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(*files, "other.example.org")
    keys.make(tmp_path / "other", [], [])
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake_hands(files[0], files[1], tmp_path / "other" / "ca.crt", "localhost")


def test_each_site_has_a_key_of_its_own_that_only_it_can_read(tmp_path):
    made = keys.make(tmp_path, [], ["a", "b"])
    assert made == [tmp_path / "sites" / "a", tmp_path / "sites" / "b"]
    publics = set()
    for folder in made:
        private = load_ssh_private_key((folder / "key").read_bytes(), None)
        public = load_ssh_public_key((folder / "key.pub").read_bytes())
        assert private.public_key().public_numbers() == public.public_numbers()
        publics.add(public.public_numbers())
        assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
        assert (folder / "ca.crt").read_bytes() == (tmp_path / "ca.crt").read_bytes()
    assert len(publics) == 2
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_what_is_there_stays(tmp_path):
    keys.make(tmp_path, ["one.example.org"], ["a"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert keys.make(tmp_path, [], ["a", "c"]) == [tmp_path / "sites" / "c"]
    publics = before.pop(tmp_path / "members.txt")  # lists all, one a line
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (tmp_path / "members.txt").read_bytes().startswith(publics)
    assert [*read_members(tmp_path / "members.txt")] == ["a", "c"]
    keys.make(tmp_path, ["two.example.org"], [])
    assert (tmp_path / "ca.crt").read_bytes() == before[tmp_path / "ca.crt"]
    names = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes()).extensions
    names = names.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert names == ["localhost", "two.example.org"]


def test_an_authority_whose_key_lies_elsewhere_is_not_replaced(tmp_path):
    keys.make(tmp_path, ["one.example.org"], ["a"])
    before = (tmp_path / "ca.crt").read_bytes()
    (tmp_path / "ca.key").unlink()
    keys.make(tmp_path, [], ["b"])  # needs no signature
    assert (tmp_path / "sites" / "b" / "ca.crt").read_bytes() == before
    with pytest.raises(
        UsageError, match=r"has the authority's ca\.crt but not its ca\.key, which must sign the certificate"
    ):
        keys.make(tmp_path, ["two.example.org"], [])
    assert (tmp_path / "ca.crt").read_bytes() == before


def test_a_site_may_make_its_own_key_and_send_the_public_half(tmp_path):
    (tmp_path / "sites" / "a").mkdir(parents=True)
    (tmp_path / "sites" / "a" / "key.pub").write_text("its own\n")
    assert keys.make(tmp_path, [], ["a"]) == []
    assert (tmp_path / "sites" / "a" / "key.pub").read_text() == "its own\n"


@pytest.mark.parametrize("name", ["../x", "a b", "", ".hidden", "a/b"])
def test_names_that_could_be_something_else_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match=r"^a site's name consists of letters, digits, '.', '_' and '-'; got "):
        keys.make(tmp_path, [], [name])


@pytest.mark.parametrize("host", ["https://hub", "hub:8000", "a b", "-x"])
def test_hosts_are_names_or_addresses(tmp_path, host):
    with pytest.raises(UsageError, match="leave out http:// and the port"):
        keys.make(tmp_path, [host], [])


def end(path):
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


@pytest.fixture
def today(monkeypatch):
    """Sets the date that keys are made on."""

    begin = keys._now()

    def set(days):
        monkeypatch.setattr(keys, "_now", lambda: begin + datetime.timedelta(days=days))

    return set


def test_the_authority_outlives_the_certificates_that_it_signs(tmp_path, today):
    keys.make(tmp_path, ["hub"], ["a"])
    years = [(end(tmp_path / name) - keys._now()).days / 365 for name in ("ca.crt", "server.crt")]
    assert years == pytest.approx([20, 2], abs=0.01)
    today(19 * 365)
    keys.make(tmp_path, ["hub"], [])
    assert end(tmp_path / "server.crt") == end(tmp_path / "ca.crt")  # longer is of no use


@pytest.mark.parametrize("days", [20 * 365 - 29, 20 * 365 + 1])
def test_nothing_is_signed_by_an_authority_that_is_about_to_end(tmp_path, today, days):
    keys.make(tmp_path, ["hub"], ["a"])
    before = (tmp_path / "server.crt").read_bytes()
    today(days)
    with pytest.raises(
        UsageError, match=r"the authority .*ca\.crt expires on 20..-..-.., with all that it signs; to make a new"
    ):
        keys.make(tmp_path, ["hub"], [])
    assert (tmp_path / "server.crt").read_bytes() == before


def test_a_new_authority_comes_with_all_that_hangs_on_it_and_leaves_the_keys(tmp_path):
    keys.make(tmp_path, ["hub.example.org"], ["a"])
    (tmp_path / "sites" / "b").mkdir()  # its own key, made at the site
    (tmp_path / "sites" / "b" / "key.pub").write_bytes((tmp_path / "sites" / "a" / "key.pub").read_bytes())
    before = {name: (tmp_path / "sites" / "a" / name).read_bytes() for name in ("key", "key.pub", "ca.crt")}
    (tmp_path / "ca.crt").unlink()
    (tmp_path / "ca.key").unlink()
    assert keys.make(tmp_path, [], ["a"]) == []
    assert shake_hands(tmp_path / "server.crt", tmp_path / "server.key", tmp_path / "ca.crt", "hub.example.org")
    after = {name: (tmp_path / "sites" / "a" / name).read_bytes() for name in before}
    assert after == {**before, "ca.crt": (tmp_path / "ca.crt").read_bytes()}
    assert after["ca.crt"] != before["ca.crt"]
    assert not (tmp_path / "sites" / "b" / "ca.crt").exists()


def test_a_month_ahead_of_its_end_a_certificate_is_warned_of(tmp_path, today):
    keys.make(tmp_path, [], ["a"])
    site = tmp_path / "sites" / "a"
    assert keys.endings(tmp_path) == keys.endings(site) == []
    today(2 * 365 - 29)
    (line,) = keys.endings(tmp_path)
    assert re.match(
        rf"CAUTION: {tmp_path}/server\.crt expires on 20..-..-..; nobody can connect after that; "
        "renew it: kinfed flower keys DIR --host NAME, then",
        line,
    )
    assert keys.endings(site) == []
    today(20 * 365 + 1)
    assert [re.search(r"(\w+\.crt) expired", line)[1] for line in keys.endings(tmp_path)] == ["ca.crt", "server.crt"]
    (line,) = keys.endings(site)
    assert line.endswith("ask the server's operator for the new ca.crt")


def test_members_are_those_whose_keys_are_there_and_files_that_hold_none_are_named(tmp_path):
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    keys.make(tmp_path, [], ["a", "b"])
    public = load_ssh_public_key((tmp_path / "sites" / "a" / "key.pub").read_bytes())
    assert keys.members(tmp_path)[public_key_to_bytes(public)] == "a"
    rsa = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBmTTyVWXRUI3UYVVIMGvxEvEmlRvRCyHRRTYIe5MPFi x"
    twin = (tmp_path / "sites" / "a" / "key.pub").read_text()
    for name, content in {"c": "no key", "d": rsa, "e": twin}.items():
        (tmp_path / "sites" / name).mkdir()
        (tmp_path / "sites" / name / "key.pub").write_text(content)
    said = []
    assert sorted(keys.members(tmp_path, said.append).values()) == ["a", "b"]
    assert [re.search(r"sites/(\w)/", line)[1] for line in said] == ["c", "d", "e"]
    assert "is also the key of a, so e is not admitted" in said[2]
