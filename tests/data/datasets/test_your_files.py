"""Your own pictures in folders, Hugging Face data sets on disk, and LEAF's JSON: small made data of each form."""

import json
import random
import re

import numpy as np
import polars
import pytest
import torch
from PIL import Image

from kinfed.cli import main
from kinfed.data.datasets import DATASETS
from kinfed.errors import UsageError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def picture(place, colour, size=(4, 3), mode="RGB"):
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(place)


def folders(root, clients=("u10", "u2"), classes=("cat", "dog"), each=6, **how):
    for c, client in enumerate(clients):
        for k, kind in enumerate(classes):
            for i in range(each):
                picture(root / client / kind / f"{i}.png", (40 * c + i, 200 * k, 255), **how)


def test_pictures_in_folders(here):
    folders(here / "pets")
    (here / "pets" / "u2" / "notes.txt").write_text("by hand")
    with pytest.warns(UserWarning, match=r"pets: left out 1 other file, such as pets/u2/notes.txt"):
        found = DATASETS["image_folder"](path="pets")()
    assert found.owners == ("u2", "u10")
    assert found.classes == ("cat", "dog")
    assert found.x.shape == (24, 3, 3, 4)
    assert found.y.tolist() == [0] * 6 + [1] * 6 + [0] * 6 + [1] * 6
    assert found.client.tolist() == [0] * 12 + [1] * 12
    # the third cat of u10, whose colour is (2, 0, 255), and the first dog of u2, which is (40, 200, 255)
    expected = torch.tensor([[2 / 127.5 - 1, -1, 1], [40 / 127.5 - 1, 200 / 127.5 - 1, 1]])
    torch.testing.assert_close(found.x[[14, 6], :, 1, 1], expected)


def test_pictures_without_colours_have_one_channel(here):
    for i, mode in enumerate(["L", "1", "L"]):
        picture(here / "p" / "a" / f"k{i}" / "x.png", i, mode=mode)
    assert DATASETS["image_folder"](path="p")().x.shape == (3, 1, 3, 4)
    assert DATASETS["image_folder"](path="p", grey=False)().x.shape == (3, 3, 3, 4)
    picture(here / "p" / "a" / "k0" / "y.png", (9, 0, 0, 5), mode="RGBA")
    assert DATASETS["image_folder"](path="p")().x.shape == (4, 3, 3, 4)
    assert DATASETS["image_folder"](path="p", grey=True, size=8)().x.shape == (4, 1, 8, 8)


def test_folders_train_from_the_command_line(here, capsys):
    folders(here / "pets", size=(5, 5))
    own = ["federation.dataset.name=image_folder", "federation.dataset.path=pets", "rounds=1"]
    assert main(["run", "fedavg", *own, "--out", "a", "--quiet"]) == 0
    assert main(["list", "datasets", "image_folder", "path=pets"]) == 0
    assert "2, 12 examples each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda p: picture(p / "u2" / "cat" / "odd.png", 0, (9, 9)),
            "pets/u2/cat/odd.png has 9 by 9 pixels, but pets/u2/",
        ),
        (
            lambda p: (p / "u2" / "cat" / "bad.png").write_bytes(b"\x89PNG broken"),
            "bad.png cannot be read as a picture (",
        ),
        (lambda p: (p / "u9").mkdir(), "pets/u9 holds no pictures; they belong in pets/u9/CLASS/*.png"),
        (lambda p: picture(p / "x.png", 0), "pets/x.png is not in a folder CLIENT/CLASS of pets"),
        (
            lambda p: picture(p / "u2" / "cat" / "old" / "x.png", 0),
            "pets/u2/cat/old/x.png is not in a folder CLIENT/CLASS",
        ),
        (
            lambda p: picture(p / "u2" / "cat" / "deep.png", 7, (4, 3), "I;16"),
            "deep.png has more than 8 bits a channel",
        ),
    ],
)
def test_folders_that_cannot_be_used(here, change, told):
    folders(here / "pets", each=1)
    change(here / "pets")
    with pytest.raises(UsageError, match=re.escape(told)):
        DATASETS["image_folder"](path="pets")()


def test_no_folders(here):
    with pytest.raises(UsageError, match="there is no folder nowhere"):
        DATASETS["image_folder"](path="nowhere")()
    (here / "empty").mkdir()
    with pytest.raises(UsageError, match="empty holds no pictures; they belong in empty/CLIENT/CLASS/"):
        DATASETS["image_folder"](path="empty")()
    folders(here / "one", classes=("cat",))
    with pytest.raises(UsageError, match="all pictures are of the class 'cat'"):
        DATASETS["image_folder"](path="one")()


def save_to_disk(folder, table, features, files=2):
    """What `datasets.Dataset.save_to_disk` writes, of what is read."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    size = -(-table.height // files)
    for i, name in enumerate(names):
        table[i * size : (i + 1) * size].write_ipc_stream(folder / name, compat_level=polars.CompatLevel.oldest())
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


LABEL = {"names": ["cat", "dog"], "_type": "ClassLabel"}


def pictures(tmp_path, count=12):
    cells = []
    for i in range(count):
        picture(tmp_path / "one.png", (i, 0, 255))
        cells.append({"bytes": (tmp_path / "one.png").read_bytes(), "path": None})
    return polars.DataFrame(
        {"image": cells, "label": [i % 2 for i in range(count)], "who": [i % 3 for i in range(count)]}
    )


def test_hugging_face_pictures(here, capsys):
    features = {"image": {"_type": "Image"}, "label": LABEL, "who": {"dtype": "int64", "_type": "Value"}}
    table = pictures(here)
    for split, rows in (("train", table[:8]), ("test", table[8:])):
        save_to_disk(here / "pets" / split, rows, features)
    (here / "pets" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found = DATASETS["huggingface"](path="pets", client="who", target="label")()
    assert (found.classes, found.owners) == (("cat", "dog"), ("0", "1", "2"))
    assert found.y.tolist() == [0, 1] * 6
    assert found.client.tolist() == [0, 1, 2] * 4
    torch.testing.assert_close(found.x[:, 0, 0, 0], torch.arange(12) / 127.5 - 1)
    free = DATASETS["huggingface"](path="pets", target="label")()
    assert free.client is None
    own = ["federation.dataset.name=huggingface", "federation.dataset.path=pets", "federation.dataset.target=label"]
    dealt = ["federation.partition=iid", "federation.clients=2", "rounds=1", "--quiet"]
    assert main(["run", "fedavg", *own, *dealt, "--out", "a"]) == 0
    assert main(["run", "fedavg", *own, "rounds=1", "--quiet", "--out", "b"]) == 2
    assert "partition" in capsys.readouterr().err


def test_a_hugging_face_table_is_a_table(here):
    table = polars.DataFrame(
        {"shop": [0, 0, 1, 1] * 5, "kind": ["a", "b"] * 10, "price": np.arange(20) / 2, "buys": [0, 1, 1, 0] * 5}
    )
    features = {"shop": {"names": ["Ulm", "Bonn"], "_type": "ClassLabel"}, "buys": {**LABEL, "names": ["no", "yes"]}}
    save_to_disk(here / "shops", table, features)
    found = DATASETS["huggingface"](path="shops", client="shop", target="buys", ignore=("kind",))()
    assert (found.owners, found.classes) == (("Bonn", "Ulm"), ("no", "yes"))
    assert found.x[:, 0].tolist() == [i / 2 for i in range(20)]
    assert found.y.tolist() == [0, 1, 1, 0] * 5


def test_a_hugging_face_table_without_a_client_is_told_what_to_name(here):
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": LABEL}
    save_to_disk(here / "texts", polars.DataFrame({"text": ["a b", "c"] * 6, "label": [0, 1] * 6}), features)
    with pytest.raises(
        UsageError, match=r"texts has no pictures, so .*: say whose each is by client=COLUMN; known: text"
    ):
        DATASETS["huggingface"](path="texts", target="label")()


@pytest.mark.parametrize(
    ("names", "classes"),
    [(["cat ", " dog"], ("cat", "dog")), (["true", "false"], ("True", "False")), (["2.0", "1.0"], ("2", "1"))],
)
def test_names_of_classes_are_those_of_cells_and_lists_beside_them_do_no_harm(here, names, classes):
    features = {"image": {"_type": "Image"}, "label": LABEL | {"names": names}, "tags": [{"dtype": "int64"}]}
    save_to_disk(here / "pets", pictures(here).with_columns(tags=polars.lit([1, 2])), features)
    found = DATASETS["huggingface"](path="pets", target="label")()
    assert (found.classes, found.y.tolist()) == (classes, [0, 1] * 6)


def break_label(folder):
    table = polars.read_ipc_stream(folder / "data-00000-of-00001.arrow").with_columns(label=polars.lit(7))
    table.write_ipc_stream(folder / "data-00000-of-00001.arrow")


def names(shard):
    """A set that has another file than its own for a shard."""
    return lambda folder: (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": shard}]}))


def splits(name):
    """A set that has another folder than its own for a split."""
    return lambda folder: (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))


@pytest.mark.parametrize(
    ("change", "settings", "told"),
    [
        (
            lambda f: (f / "state.json").unlink(),
            {},
            "pets is not a Hugging Face data set on disk: it has no state.json",
        ),
        (lambda f: (f / "state.json").write_text("{"), {}, "state.json is not what save_to_disk writes"),
        (
            names("../shards/0.arrow"),
            {},
            r"state.json names '../shards/0.arrow', which is not in this folder, so nothing",
        ),
        (names("/etc/0.arrow"), {}, r"state.json names '/etc/0.arrow', which is not in this folder"),
        (splits(".."), {}, r"dataset_dict.json names '..', which is not in this folder"),
        (lambda f: (f / "dataset_info.json").write_text("{}"), {}, "dataset_info.json has no 'features'"),
        (
            lambda f: (f / "data-00000-of-00001.arrow").unlink(),
            {},
            "lacks data-00000-of-00001.arrow, which its state.json",
        ),
        (lambda f: (f / "data-00000-of-00001.arrow").write_bytes(b"x" * 99), {}, "of-00001.arrow cannot be read ("),
        (break_label, {}, "pets, row 1, column 'label': 7 is none of its 2 classes"),
        (lambda f: None, {"target": "lable"}, "pets has no column 'lable'; did you mean 'label'?"),
        (lambda f: None, {"client": "wo"}, "pets has no column 'wo'; did you mean 'who'?"),
        (lambda f: None, {"path": "elsewhere"}, "there is no folder elsewhere"),
    ],
)
def test_hugging_face_folders_that_cannot_be_used(here, change, settings, told):
    features = {"image": {"_type": "Image"}, "label": LABEL, "who": {"dtype": "int64", "_type": "Value"}}
    save_to_disk(here / "pets", pictures(here, 4), features, files=1)
    change(here / "pets")
    with pytest.raises(UsageError, match=re.escape(told)):
        DATASETS["huggingface"](**{"path": "pets", "client": "who", "target": "label"} | settings)()


def leaf(place, users):
    place.parent.mkdir(parents=True, exist_ok=True)
    counts = [len(user["x"]) for user in users.values()]
    place.write_text(json.dumps({"users": [*users], "num_samples": counts, "user_data": users}))


def test_femnist(here, capsys):
    draw = random.Random(0)
    users = {
        f"f{i}": {
            "x": [[draw.choice([0.0, 1.0]) for _ in range(784)] for _ in range(12)],
            "y": [j % 3 for j in range(12)],
        }
        for i in (1, 0)
    }
    later = {"f0": {"x": [[0.5] * 784], "y": [61]}, "f1": {"x": [[0.5] * 784], "y": [61]}}
    leaf(here / "femnist" / "train" / "a.json", users)
    leaf(here / "femnist" / "test" / "a.json", later)
    found = DATASETS["leaf"](path="femnist")()
    assert found.owners == ("f0", "f1")
    assert found.classes == ("0", "1", "2", "61")
    assert found.x.shape == (26, 1, 28, 28)
    assert found.x[12].unique().tolist() == [0.5]
    assert found.y.tolist() == [*[0, 1, 2] * 4, 3] * 2
    assert found.x[13].flatten().tolist() == users["f1"]["x"][0]
    own = ["federation.dataset.name=leaf", "federation.dataset.path=femnist", "model.name=cnn", "rounds=1"]
    assert main(["run", "fedrep", *own, "--quiet", "--out", "a"]) == 0


def test_copies_that_leafs_scripts_leave_are_not_taken(here):
    users = {name: {"x": [[i / 2, 1.0] for i in range(12)], "y": [0, 1] * 6} for name in "ab"}
    for place in ("all_data", "sampled_data", "train", "test"):
        leaf(here / "data" / place / "a.json", users)
    assert len(DATASETS["leaf"](path="data")().x) == 48  # of train and test
    (here / "data" / "train" / "a.json").unlink()
    (here / "data" / "test" / "a.json").unlink()
    with pytest.raises(UsageError, match="several folders, as data/all_data and data/sampled_data"):
        DATASETS["leaf"](path="data")()


def plays(count=60, length=5):
    lines = {
        "HAMLET": "to be or not to be that is the question " * 3,
        "PUCK": "up and down up and down I will lead " * 3,
    }
    return {
        name: {"x": [line[i : i + length] for i in range(count)], "y": [line[i + length] for i in range(count)]}
        for name, line in lines.items()
    }


def test_shakespeare(here):
    leaf(here / "plays.json", plays())
    found = DATASETS["leaf_text"](path="plays.json")()
    assert found.owners == ("HAMLET", "PUCK")
    assert "".join(found.classes[int(place)] for place in found.x[0]) == "to be"
    assert found.classes[found.y[0]] == " "
    assert found.x.shape == (120, 5)
    own = ["federation.dataset.name=leaf_text", "federation.dataset.path=plays.json", "rounds=30"]
    assert main(["run", "local", *own, "training.optimiser.lr=1.0", "--quiet", "--out", "a"]) == 0
    summary = json.loads((here / "a" / "summary.json").read_text())
    assert summary["scores"]["own"]["mean"] > 0.6  # the lines are repeated: what follows was read in training


def test_a_text_is_split_in_its_order(here):
    from kinfed.runs.config import experiment

    leaf(here / "plays.json", plays())
    dataset = {"name": "leaf_text", "path": "plays.json"}
    federation = experiment.resolve({"method": "local", "federation": {"dataset": dataset}}).federation(None, 0)
    for train, test in zip(federation.rows["train"], federation.rows["test"], strict=True):
        assert train.max() < test.min()
        assert len(test) == 12


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("leaf", "{", "p.json is not valid JSON ("),
        ("leaf", "[]", "p.json is not LEAF's: it needs 'users', a list"),
        ("leaf", {"a": {"x": [[1.0]], "y": []}}, "p.json, user 'a': user_data must have x and y, lists of one length"),
        (
            "leaf",
            {"a": {"x": ["ab"], "y": ["b"]}, "b": {"x": ["ab"], "y": ["b"]}},
            "'a': these are texts; use the data set",
        ),
        ("leaf", {"a": {"x": [[1.0], [2.0, 3.0]], "y": [0, 1]}, "b": {"x": [[1.0]], "y": [0]}}, "all of one length"),
        ("leaf", {"a": {"x": [[1.0]], "y": [0.5]}}, "user 'a': labels (y) must be whole numbers or text"),
        ("leaf", {"a": {"x": [[10**400]], "y": [0]}, "b": {"x": [[1.0]], "y": [0]}}, "lists of finite numbers"),
        ("leaf", '{"users": [["a"]], "user_data": {}}', "p.json, user '['a']': user_data must have x and y"),
        ("leaf", {"a": {"x": [[1.0]], "y": [0]}, "b": {"x": [[1.0]], "y": [0]}}, "all labels are '0'"),
        (
            "leaf",
            {"a": {"x": [[1.0]], "y": [0]}},
            "1 of 1 user has 1 example or more, but at least two clients are needed",
        ),
        ("leaf_text", {"a": {"x": ["ab", "abc"], "y": ["c", "d"]}, "b": {"x": ["ab"], "y": ["b"]}}, "got 3, and 2"),
        (
            "leaf_text",
            {"a": {"x": [[1.0]], "y": [0]}, "b": {"x": ["ab"], "y": ["b"]}},
            "'a': x must be texts and y the",
        ),
    ],
)
def test_what_is_not_leafs(here, name, content, told):
    if isinstance(content, str):
        (here / "p.json").write_text(content)
    else:
        leaf(here / "p.json", content)
    with pytest.raises(UsageError, match=re.escape(told)):
        DATASETS[name](path="p.json", least=0)()


def test_users_with_few_examples_are_left_out(here):
    users = plays()
    leaf(here / "p.json", users | {"NOBODY": {"x": ["hello"], "y": ["!"]}})
    told = r"1 of 3 users has fewer than 10 examples \(.*\), such as 'NOBODY', and was left out"
    with pytest.warns(UserWarning, match=told):
        assert DATASETS["leaf_text"](path="p.json")().owners == ("HAMLET", "PUCK")
