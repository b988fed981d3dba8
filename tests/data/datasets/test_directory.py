import zipfile

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kinfed.data.datasets.directory import labels, read
from kinfed.errors import RunError, UsageError

VALUES = np.arange(12, dtype=np.int64).reshape(3, 4)


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "toy.npz", values=VALUES, more=np.ones(2))
    return tmp_path


def test_reads_what_was_asked_for(folder):
    path, arrays = read(folder, "toy", ["values"], ["absent"])
    assert path == folder / "toy.npz"
    assert list(arrays) == ["values"]
    np.testing.assert_array_equal(arrays["values"], VALUES)


def test_the_environment_names_the_folder_unless_one_is_given(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("KINFED_DATA", str(folder))
    assert read(None, "toy", ["values"])[0].parent == folder
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(UsageError, match=str(other)):
        read(other, "toy", ["values"])


def test_without_a_folder_the_error_says_how_to_give_one(monkeypatch):
    monkeypatch.delenv("KINFED_DATA", raising=False)
    with pytest.raises(UsageError, match=r"'toy'.*KINFED_DATA or --data-dir.*toy\.npz"):
        read(None, "toy", ["values"])


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"no data directory .*nowhere.*KINFED_DATA"):
        read(tmp_path / "nowhere", "toy", ["values"])


def test_a_missing_file_lists_the_data_sets_that_are_there(folder):
    with pytest.raises(UsageError, match=r"'tot' is not.*tot\.npz; data sets there: toy;"):
        read(folder, "tot", ["values"])
    with pytest.raises(UsageError, match="get it with 'kinfed list datasets --fetch mnist' or choose one of these"):
        read(folder, "mnist", ["values"])


def test_a_missing_array_is_named_with_those_that_are_there(folder):
    with pytest.raises(UsageError, match=r"toy\.npz lacks the array x, z; it holds more, values;"):
        read(folder, "toy", ["x", "values", "z"])


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99, -1])
def test_a_file_cut_short_is_an_error(folder, kept):
    path = folder / "toy.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(RunError, match=r"toy\.npz cannot be read \(.*copy or write it again"):
        read(folder, "toy", ["values"])


def test_pickled_objects_are_never_loaded(folder):
    np.savez(folder / "toy.npz", values=np.array([{"a": 1}], dtype=object))
    with pytest.raises(RunError, match=r"toy\.npz cannot be read \(Object arrays.*plain arrays"):
        read(folder, "toy", ["values"])


def test_a_header_that_promises_less_than_the_file_holds_is_an_error(folder):
    with zipfile.ZipFile(folder / "toy.npz") as archive:
        member = archive.read("values.npy")
    with zipfile.ZipFile(folder / "toy.npz", "w") as archive:
        archive.writestr("values.npy", member.replace(b"(3, 4)", b"(2, 4)"))
    with pytest.raises(RunError, match="followed by more bytes"):
        read(folder, "toy", ["values"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    np.savez_compressed(folder / "packed.npz", values=VALUES)
    np.savez(folder / "plain.npz", values=VALUES)
    return folder, {name: (folder / f"{name}.npz").read_bytes() for name in ("packed", "plain")}


@given(name=st.sampled_from(["packed", "plain"]), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_damaged_byte_is_an_error_or_harmless(whole, name, place, flip):
    folder, content = whole
    damaged = bytearray(content[name])
    damaged[int(place * len(damaged))] ^= flip
    (folder / f"{name}.npz").write_bytes(damaged)
    try:
        found = read(folder, name, ["values"])[1]["values"]
    except (RunError, UsageError) as problem:
        assert f"{name}.npz" in str(problem)  # noqa: PT017 - a harmless flip, in a time stamp say, raises nothing
    else:
        assert found.dtype == VALUES.dtype
        np.testing.assert_array_equal(found, VALUES)


def test_labels_are_integers_of_the_right_number(tmp_path):
    path = tmp_path / "toy.npz"
    found = labels(path, "y", np.array([0, 2, 1], dtype=np.uint8), 3, 3)
    assert found.dtype == np.int64
    assert found.tolist() == [0, 2, 1]
    with pytest.raises(UsageError, match=r"toy\.npz: y must be integers \[3\].*got float64 \[3\]"):
        labels(path, "y", np.zeros(3), 3, 3)
    with pytest.raises(UsageError, match=r"toy\.npz: y must be integers \[4\].*got int64 \[3\]"):
        labels(path, "y", np.zeros(3, dtype=int), 4, 3)


@pytest.mark.parametrize("bad", [-1, 3])
def test_labels_out_of_range_name_the_first_entry(tmp_path, bad):
    with pytest.raises(UsageError, match=rf"y must lie in 0\.\.2; 2 of 4 do not, first entry 1, which is {bad};"):
        labels(tmp_path / "toy.npz", "y", np.array([0, bad, 2, bad]), 4, 3)


def test_arrays_of_the_other_order_of_bytes_are_turned(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3, dtype=">f4"), y=np.arange(3, dtype=">i8"))
    _, found = read(tmp_path, "a", ("x", "y"))
    assert {name: array.dtype.isnative for name, array in found.items()} == {"x": True, "y": True}
    assert found["x"].tolist() == [0, 1, 2]
