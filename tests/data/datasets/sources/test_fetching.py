"""Downloads: checked, resumed, and refused in one line."""

import hashlib
import os
from pathlib import Path

import pytest

from kinfed.data.datasets.sources.download import Source, check_original, fetch
from kinfed.errors import RunError, UsageError

DATA = os.urandom(600_000)
GOOD = Source("https://example.org/sets/a.bin", f"sha256:{hashlib.sha256(DATA).hexdigest()}")
UNKNOWN = GOOD._replace(checksum=None)


@pytest.fixture(autouse=True)
def served(publisher):
    publisher.files["a.bin"] = DATA


def test_a_file_is_fetched_once(publisher, tmp_path):
    said = []
    path = fetch(GOOD, tmp_path / "new", lambda *args: said.append(args))
    assert path.read_bytes() == DATA
    assert said[-1] == ("a.bin", 600_000, 600_000)
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said)
    assert fetch(GOOD, tmp_path / "new") == path
    assert publisher.asked == [("a.bin", None)]
    assert os.listdir(tmp_path / "new") == ["a.bin"]


def test_an_interrupted_download_goes_on_where_it_stopped(publisher, tmp_path):
    publisher.breaks_after = 400_000
    with pytest.raises(
        RunError, match=r"a\.bin cannot be fetched .*connection broke off.*\d bytes are kept: run it again"
    ):
        fetch(GOOD, tmp_path)
    assert os.listdir(tmp_path) == ["a.bin.part"]
    kept = (tmp_path / "a.bin.part").stat().st_size
    assert 0 < kept <= 400_000
    said = []
    assert fetch(GOOD, tmp_path, lambda *args: said.append(args)).read_bytes() == DATA
    assert publisher.asked[-1] == ("a.bin", f"bytes={kept}-")
    assert said[0][1] > kept
    assert said[-1][1:] == (600_000, 600_000)
    assert os.listdir(tmp_path) == ["a.bin"]


def test_an_interrupted_download_that_cannot_be_proved_promises_no_going_on(publisher, tmp_path):
    publisher.breaks_after = 400_000
    with pytest.raises(RunError, match=r"connection broke off.*; try again later, or put"):
        fetch(UNKNOWN, tmp_path)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_part_that_does_not_fit_is_not_built_upon(publisher, tmp_path, ranges):
    publisher.ranges = ranges
    (tmp_path / "a.bin.part").write_bytes(b"x" * 700_000)  # longer than the whole file
    assert fetch(GOOD, tmp_path).read_bytes() == DATA
    # Without a checksum nothing could prove the result, so such downloads start anew.
    (tmp_path / "a.bin").unlink()
    (tmp_path / "a.bin.part").write_bytes(b"x" * 100)
    assert fetch(UNKNOWN, tmp_path).read_bytes() == DATA
    assert publisher.asked[-1] == ("a.bin", None)


def test_a_wrong_part_is_found_out_and_the_next_try_starts_anew(publisher, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(RunError, match=r"/a\.bin is not the expected file: its checksum differs from sha256:"):
        fetch(GOOD, tmp_path)
    assert os.listdir(tmp_path) == []
    assert fetch(GOOD, tmp_path).read_bytes() == DATA


def test_another_file_at_the_address_is_refused(publisher, tmp_path):
    publisher.files["a.bin"] = b"<html>sign in</html>"
    with pytest.raises(RunError, match="is not the expected file"):
        fetch(GOOD, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_missing_file_says_what_the_server_answered(publisher, tmp_path):
    del publisher.files["a.bin"]
    with pytest.raises(
        RunError, match=r"http://127.*/a\.bin answers 404 Client Error: Not Found; set KINFED_MIRROR"
    ) as e:
        fetch(GOOD, tmp_path)
    assert "\n" not in str(e.value)
    assert os.listdir(tmp_path) == []


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("KINFED_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(
        RunError, match=r"a\.bin cannot be fetched from 127\.0\.0\.1:9 \(connection refused\); try again"
    ):
        fetch(GOOD, tmp_path)
    monkeypatch.setenv("KINFED_MIRROR", "http://nowhere.invalid")
    with pytest.raises(RunError, match=r"nowhere\.invalid \(no (such host, or no )?network\)"):
        fetch(GOOD, tmp_path)
    monkeypatch.setenv("KINFED_MIRROR", "mirror.example")
    with pytest.raises(UsageError, match=r"KINFED_MIRROR must be an address, http://\.\.\. .*; got 'mirror\.example'"):
        fetch(GOOD, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full to play a full disk")
def test_a_full_disk(tmp_path):
    (tmp_path / "a.bin.part").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot write .*a\.bin: No space left on device"):
        fetch(GOOD, tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        fetch(GOOD, tmp_path / "file" / "folder")


def test_a_users_own_copy(tmp_path):
    (tmp_path / "a.bin").write_bytes(DATA)
    assert check_original(GOOD, tmp_path) == tmp_path / "a.bin"
    (tmp_path / "a.bin").write_bytes(DATA[:-1])
    with pytest.raises(RunError, match=r"a\.bin is not the expected file: its sha256 differs"):
        check_original(GOOD, tmp_path)
    assert check_original(UNKNOWN, tmp_path) == tmp_path / "a.bin"
    with pytest.raises(RunError, match=r"there is no b\.bin in .*; it is published at https://example.org/b.bin"):
        check_original(Source("https://example.org/b.bin"), tmp_path)
