"""Every data set from small originals, served by a local publisher, to arrays that its loader takes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from small_originals import SMALL, archive, idx, images, jpeg

from kinfed.data.datasets import DATASETS
from kinfed.data.datasets.sources.originals import ORIGINALS, Original, obtain
from kinfed.errors import RunError, UsageError


def load(path):
    with np.load(path, allow_pickle=False) as held:
        return dict(held)


@pytest.mark.parametrize("name", SMALL)
def test_what_is_fetched_can_be_read_again_and_leaves_nothing_else(name, publish, tmp_path):
    publish(name)
    told = []
    found = obtain(name, tmp_path, progress=lambda *said: told.append(said))
    assert found.path == tmp_path / f"{name}.npz"
    assert found.notes == ()
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.npz"]
    assert {name for name, _, _ in told} == {source.name for source in ORIGINALS[name].sources}
    assert all(done == whole for name, done, whole in told)
    short = {"past": 1, "horizon": 1} if name.startswith(("metr", "pems")) else {}
    data = DATASETS[name](tmp_path, **short)
    assert len(data.x)
    again = obtain(name, tmp_path)
    assert "was left alone" in again.notes[0]


def test_grey_images(publish, tmp_path):
    publish("fashion_mnist")
    held = load(obtain("fashion_mnist", tmp_path).path)
    assert held["x_train"].shape == (3, 1, 28, 28)
    np.testing.assert_array_equal(held["x_train"][:, 0], images(3, 28, 28))
    assert held["y_test"].tolist() == [0, 1]
    assert held["class_names"][9] == "Ankle boot"


def test_house_numbers_call_zero_ten(publish, tmp_path):
    publish("svhn")
    held = load(obtain("svhn", tmp_path).path)
    assert held["y_train"].tolist() == [0, 1, 9]
    np.testing.assert_array_equal(held["x_train"], images(3, 32, 32, 3).transpose(0, 3, 1, 2))


def test_cifar_records(publish, tmp_path):
    publish("cifar10")
    held = load(obtain("cifar10", tmp_path).path)
    assert held["y_train"].tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    np.testing.assert_array_equal(held["x_train"][4:6].reshape(2, -1), images(2, 3072, seed=3))
    assert held["class_names"].tolist()[6:8] == ["frog", "horse"]
    publish("cifar100")
    held = load(obtain("cifar100", tmp_path).path)
    assert held["y_train"].tolist() == [42, 0]
    assert (held["superclass"][42], held["superclass"][0]) == (3, 19)
    assert held["superclass_names"][3] == "coarse3"


def test_tiny_imagenet_is_labelled_by_its_sorted_classes(publish, tmp_path):
    publish("tiny_imagenet")
    held = load(obtain("tiny_imagenet", tmp_path).path)
    assert held["class_names"].tolist()[:3] == ["fish", "dog", "thing n03"]
    assert held["y_train"].tolist() == [0, 1]
    assert held["y_test"].tolist() == [1]
    assert abs(int(held["x_train"][0, 0, 5, 5]) - 250) < 5
    assert held["x_train"][0, 1:].max() < 12
    assert np.ptp(held["x_train"][1, :, 5, 5]) == 0  # grey


def test_speeds_get_dcrnns_graph_and_keep_their_gaps(publish, tmp_path):
    publish("metr_la")
    held = load(obtain("metr_la", tmp_path).path)
    assert held["sensor_ids"].tolist() == ["773869", "767541", "767542"]
    assert held["values"][:2].tolist() == [[60.5, 0, 0], [61.5, 1, 7]]
    assert held["minutes_from_start"].tolist() == [0, 5, 10, 15, 80]
    assert str(held["start"]) == "2012-03-01T00:00"
    # The distances listed between these detectors are 0, 1000, 0, 3000 and 0; the last link is too weak to keep.
    expected = np.eye(3)
    expected[0, 1] = np.exp(-((1000 / np.std([0, 1000, 0, 3000, 0])) ** 2))
    assert np.exp(-((3000 / np.std([0, 1000, 0, 3000, 0])) ** 2)) < 0.1 < expected[0, 1]
    np.testing.assert_allclose(held["adjacency"], expected, atol=1e-6)
    publish("pems_bay")
    np.testing.assert_array_equal(load(obtain("pems_bay", tmp_path).path)["adjacency"], held["adjacency"])


def test_flows_get_the_roads_that_join_detectors(publish, tmp_path):
    publish("pems08")
    held = load(obtain("pems08", tmp_path).path)
    assert held["adjacency"].tolist() == [[0, 0], [1, 0]]
    assert held["values"].shape == (4, 2, 3)
    assert str(held["start"]) == "2016-07-01T00:00"


def test_temperatures_of_the_right_years_and_element(publish, tmp_path):
    publish("tpt48")
    held = load(obtain("tpt48", tmp_path).path)
    assert held["values"].shape == (144, 48)
    assert held["values"][13, 2] == 3 + 13
    assert held["months"].tolist()[::143] == ["2008-01", "2019-12"]
    assert int(held["adjacency"].sum()) == 210
    names = held["sensor_ids"].tolist()
    utah = held["adjacency"][names.index("Utah")]
    assert {names[i] for i in np.flatnonzero(utah)} == {"Arizona", "Colorado", "Idaho", "Nevada", "Wyoming"}


@pytest.fixture
def cars(tmp_path):
    """Four photographs: two that count, one of another type and one of another year."""
    root = tmp_path / "compcars" / "data"
    kinds = {"7": 3, "8": 1, "9": 12}
    rows = [f"{model} 180 2.0 4 5 {kind}" for model, kind in kinds.items()]
    (root / "misc").mkdir(parents=True)
    (root / "misc" / "attributes.txt").write_text(
        "\n".join(["model_id maximum_speed displacement door_number seat_number type", *rows])
    )
    for model, year, view, shade in (("7", 2009, 1, 200), ("8", 2014, 4, 90), ("9", 2010, 1, 9), ("7", 2004, 1, 9)):
        for kind in ("image", "label"):
            (root / kind / "1" / model / str(year)).mkdir(parents=True)
        (root / "image" / "1" / model / str(year) / "a.jpg").write_bytes(jpeg(shade, size=100))
        (root / "label" / "1" / model / str(year) / "a.txt").write_text(f"{view}\n1\n10 20 90 80\n")
    return root.parent


def test_cars_come_from_the_users_folder(cars, tmp_path):
    held = load(obtain("compcars", tmp_path / "out", cars).path)
    assert held["x"].shape == (2, 3, 64, 64)
    assert held["y"].tolist() == [2, 0]
    assert [held["owners"][i] for i in held["client"]] == ["front 2009", "front-side 2014"]
    names = held["owners"].tolist()
    linked = {names[i] for i in np.flatnonzero(held["adjacency"][names.index("front 2009")])}
    # Near in viewpoint (front, front-side) or near in year (2009, 2010).
    assert linked == {n for n in names if n.startswith("front") or n.endswith(("2009", "2010"))} - {"front 2009"}
    data = DATASETS["compcars"](tmp_path / "out")
    assert (len(data.x), data.task.classes, len(data.owners)) == (2, 4, 30)


def test_cars_that_are_not_there(cars, tmp_path):
    with pytest.raises(UsageError, match="requested from its authors; download it, then pass its folder with --from"):
        obtain("compcars", tmp_path / "out")
    with pytest.raises(UsageError, match="--from: there is no folder"):
        obtain("compcars", tmp_path / "out", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="is not CompCars: it must hold image/"):
        obtain("compcars", tmp_path / "out", tmp_path / "empty")
    next((cars / "data" / "label").rglob("a.txt")).unlink()
    with pytest.raises(RunError, match=r"a\.jpg has no label"):
        obtain("compcars", tmp_path / "out", cars)
    assert not list((tmp_path / "out").iterdir())


def test_originals_from_a_folder_are_checked_too(publish, tmp_path):
    files = publish("mnist")
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(RunError, match=r"there is no train-images-idx3-ubyte\.gz in .*mine; it is published at http"):
        obtain("mnist", tmp_path / "out", folder)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    assert obtain("mnist", tmp_path / "out", folder).path.exists()
    assert sorted(p.name for p in folder.iterdir()) == sorted(files)  # the user's own files stay
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"another")
    with pytest.raises(RunError, match=r"t10k-labels.*is not the expected file: its md5 differs"):
        obtain("mnist", tmp_path / "other", folder)
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("name", "file", "data", "said"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", b"no gzip", "mnist: the originals cannot be read"),
        ("svhn", "train_32x32.mat", b"x" * 200, "svhn: the originals cannot be read"),
        ("cifar10", "cifar-10-binary.tar.gz", b"x", "cifar10: the originals cannot be read"),
        ("tiny_imagenet", "tiny-imagenet-200.zip", b"x", "tiny_imagenet: the originals cannot be read"),
        ("metr_la", "METR-LA.csv", b",a\n2012-03-01 00:00:00,fast\n", "metr_la: the originals cannot be read"),
        ("pems04", "PEMS04.npz", b"x", "pems04: the originals cannot be read"),
        (
            "tpt48",
            "climdiv-tmpcst-v1.0.0-20200106",
            b"0010022008" + b"  40.00" * 12,
            "has no line for Alabama in 2009; is it",
        ),
    ],
)
def test_broken_originals_leave_no_data_set(name, file, data, said, publish, publisher, tmp_path):
    publish(name, checksums=False)
    publisher.files[file] = data
    with pytest.raises(RunError, match=said) as found:
        obtain(name, tmp_path)
    assert "\n" not in str(found.value)
    assert not (tmp_path / f"{name}.npz").exists()


def test_a_mirror_has_a_folder_for_each_data_set(publisher, tmp_path, monkeypatch):
    for name, labels in (("mnist", [3, 1, 4]), ("fashion_mnist", [1, 5, 9])):  # their files have the same names
        files = SMALL[name]() | {"train-labels-idx1-ubyte.gz": idx(np.array(labels, np.uint8))}
        publisher.files |= {f"{name}/{file}": data for file, data in files.items()}
        known = ORIGINALS[name]
        sources = tuple(s._replace(checksum=f"md5:{hashlib.md5(files[s.name]).hexdigest()}") for s in known.sources)
        monkeypatch.setitem(ORIGINALS, name, Original(sources, known.convert))
    for name, labels in (("mnist", [3, 1, 4]), ("fashion_mnist", [1, 5, 9])):
        assert load(obtain(name, tmp_path).path)["y_train"].tolist() == labels


def test_a_wrong_file_without_a_checksum_is_fetched_anew(publish, publisher, tmp_path):
    good = publish("tpt48", checksums=False)
    (file,) = good
    publisher.files[file] = b"<html>please sign in</html>"
    with pytest.raises(RunError, match="tpt48: the originals cannot be read"):
        obtain("tpt48", tmp_path)
    assert not list(tmp_path.rglob(file))
    publisher.files[file] = good[file]
    assert obtain("tpt48", tmp_path).path.exists()


def test_distances_between_other_detectors_are_the_wrong_file(publish, publisher, tmp_path):
    publish("metr_la", checksums=False)
    publisher.files["distances_la_2012.csv"] = b"from,to,cost\n1,2,30.5\n"
    with pytest.raises(RunError, match=r"distances_la_2012\.csv has no distance between the detectors of METR-LA\.csv"):
        obtain("metr_la", tmp_path)


def test_the_wrong_version_of_cifar_and_cut_records(publish, publisher, tmp_path):
    publish("cifar10", checksums=False)
    publisher.files["cifar-10-binary.tar.gz"] = archive({"cifar-10-batches-py/data_batch_1": b"pickle"})
    with pytest.raises(
        RunError, match=r"has no file cifar-10-batches-bin/batches\.meta\.txt; is it the binary version"
    ):
        obtain("cifar10", tmp_path)


def test_checksums_that_nobody_published_are_recorded_once_and_checked_from_then_on(publish, publisher, tmp_path):
    publish("tpt48", checksums=False)
    found = obtain("tpt48", tmp_path)
    assert found.notes == (
        "no checksum of climdiv-tmpcst-v1.0.0-20200106 is published; that of this first download was recorded",
    )
    record = json.loads((tmp_path / "checksums.json").read_text())
    assert list(record) == [ORIGINALS["tpt48"].sources[0].url]
    found.path.unlink()
    assert obtain("tpt48", tmp_path).notes == ()
    found.path.unlink()
    publisher.files["climdiv-tmpcst-v1.0.0-20200106"] += b" "
    with pytest.raises(RunError, match="is not the expected file: its checksum differs from sha256:"):
        obtain("tpt48", tmp_path)
    for broken in ("[broken", "[3]"):
        (tmp_path / "checksums.json").write_text(broken)
        with pytest.raises(RunError, match=r"checksums\.json cannot be read"):
            obtain("tpt48", tmp_path)


def test_names_without_originals_are_refused(tmp_path):
    with pytest.raises(UsageError, match="there is nothing to fetch for 'cifar11'; did you mean 'cifar10'"):
        obtain("cifar11", tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full to play a full disk")
def test_a_full_disk_leaves_no_data_set(publish, tmp_path, monkeypatch):
    publish("mnist")
    real = Path.open

    def full(self, *arguments, **how):
        return real(Path("/dev/full") if self.name.startswith(".mnist.npz") else self, *arguments, **how)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RunError, match=r"cannot write .*mnist\.npz: No space left on device"):
        obtain("mnist", tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.glob("*mnist.npz*"))
