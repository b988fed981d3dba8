"""A model whose categories are learned vectors: by hand, and from a table to its answers."""

import json
from importlib import import_module

import polars
import pytest
import torch

import kinfed
from kinfed import UsageError
from kinfed.cli import main
from kinfed.data.tables.columns import Calendar, Category, Number, Unused
from kinfed.data.tables.schema import Description, Raw
from kinfed.models import MODELS
from kinfed.runs.config import parts

TOWN = Category("town", ("Bonn", "Ulm"), 4, 3, 2)  # 4 inputs, of which one is of other towns, one of none
PRICE = Number("price", 5.0, 2.0, 5.0, 1)  # 2 inputs
KIND = Category("kind", ("new", "old"), 2, 0, 0)  # 2 inputs, and none for another kind
COLUMNS = Description("shop", (TOWN, Unused("code", "empty"), PRICE, Calendar("day", 2025.0, 1.0, False, 0), KIND))
WIDTH = 4 + 2 + 10 + 2


OWN = """
from torch import nn

from kinfed.data.tables.schema import Description


class Net(nn.Sequential):
    def __init__(self, shape, outputs, columns: Description | None, width: int = 3):
        assert len(columns.names) == shape[0]
        super().__init__(nn.Linear(shape[0], outputs))
"""


def rows():
    """Rows with towns that are known, rare and missing, and with a kind that no training row had."""
    raw = {
        "town": Raw([0.0, 1.0, 2.0, float("nan")], ("Bonn", "Ulm", "Rome")),
        "price": Raw([5.0, float("nan"), 9.0, 1.0]),
        "day": Raw([1.7e9, 1.71e9, 1.72e9, 1.73e9]),
        "kind": Raw([0.0, 1.0, 2.0, 0.0], ("new", "old", "lent")),
        "code": Raw([0.0] * 4),
    }
    raw = {name: one._replace(values=torch.tensor(one.values).double().numpy()) for name, one in raw.items()}
    return COLUMNS.features(raw, ["A"], torch.zeros(4, dtype=torch.int64).numpy(), torch.float32)


def test_with_identities_for_embeddings_it_is_an_mlp():
    module = MODELS["embedded"]((WIDTH,), 3, COLUMNS, width=4, hidden=(5,))
    assert dict(module.embeddings.named_parameters()).keys() == {"town", "kind"}
    plain = MODELS["mlp"]((WIDTH + 2,), 3, hidden=(5,))
    state = module.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    with torch.no_grad():
        module.embeddings.town.copy_(torch.eye(4))
        module.embeddings.kind.copy_(torch.eye(2, 4))  # two of four places stay 0
    x = rows()
    assert torch.equal(module(x), plain(torch.nn.functional.pad(x, (0, 2))))


def test_a_category_is_a_row_of_its_matrix_and_a_new_one_is_zero():
    module = MODELS["embedded"]((WIDTH,), 3, COLUMNS).embeddings
    town, kind = module.town, module.kind
    assert (town.shape, kind.shape, module.outputs) == ((4, 2), (2, 1), 2 + 2 + 10 + 1)  # half of the inputs
    x = rows()
    found = module(x)
    assert torch.equal(found[:, :2], town)  # Bonn, Ulm, another, none
    assert torch.equal(found[:, 2:14], x[:, 4:16])
    assert torch.equal(found[:, 14:], torch.stack([kind[0], kind[1], torch.zeros(1), kind[0]]))
    wide = Category("town", tuple(map(str, range(50))), 50, 0, 0)
    assert MODELS["embedded"]((50,), 3, Description("shop", (wide,))).embeddings.town.shape == (50, 16)


def test_any_name_of_a_column_names_its_embedding():
    names = ["a.b", "a_b", "type", "training", "kind of shop", "größe", "import", 'a"b']
    columns = Description("shop", tuple(Category(name, ("x", "y"), 2, 0, 0) for name in names))
    module = MODELS["embedded"]((16,), 3, columns)
    assert list(dict(module.embeddings.named_parameters())) == [
        *("a_b", "a_b_", "type_", "training_", "kind of shop", "größe", "import_", "a_b__")
    ]
    assert module(torch.eye(16)).shape == (16, 3)


@pytest.mark.parametrize(
    ("shape", "columns", "settings", "said"),
    [
        ((3, 8, 8), None, {}, "embedded: the data has no categories; use model=mlp"),
        ((2,), Description("shop", (PRICE,)), {}, "embedded: the data has no categories; use model=mlp"),
        ((5,), COLUMNS, {}, r"embedded: the columns make 18 inputs, but the shape is \[5\]"),
        ((WIDTH,), COLUMNS, {"width": -1}, "embedded: width must be at least 1, or 0 for half .*; got -1"),
        ((WIDTH,), COLUMNS, {"hidden": (0,)}, r"hidden widths must be at least 1; got \[0\]"),
    ],
)
def test_what_it_cannot_be_made_for(shape, columns, settings, said):
    with pytest.raises(UsageError, match=said):
        MODELS["embedded"](shape, 3, columns, **settings)


def test_what_the_data_say_is_no_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(OWN)
    for name, width in (("embedded", 0), ("net.py:Net", 3)):
        make, table = parts.make(MODELS, name, "model", given=2)
        assert table == {"name": name, "width": width} | ({"hidden": [64]} if name == "embedded" else {})
        assert make((WIDTH,), 3, columns=COLUMNS)(rows()).shape == (4, 3)
        with pytest.raises(UsageError, match=r"unknown key 'model\.columns'"):
            parts.make(MODELS, {"name": name, "columns": 2}, "model", given=2)
    assert parts.make(MODELS, "mlp", "model", given=2)[0]((WIDTH,), 3, columns=COLUMNS)(rows()).shape == (4, 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of the shops of the examples, shops.csv, and of a run on them, run."""
    folder = tmp_path_factory.mktemp("embedded")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("examples/own_data/shops")
        import_module("make").main(folder / "shops.csv", rows=30)
    words = ["--client", "shop", "--target", "sold", "--method", "fedavg", "--beside", "none", "--quiet"]
    settings = ["model=embedded", "model.hidden=[6]", 'method.personal=["embeddings.article"]', "rounds=1"]
    settings += ["federation.newcomers=1"]
    assert main(["run", str(folder / "shops.csv"), *words, *settings, "--out", str(folder / "run")]) == 0
    return folder


def test_a_run_is_rebuilt_from_its_folder(trained, capsys):
    run = kinfed.Run.open(trained / "run")
    summary, config = run.summary, (trained / "run" / "config.toml").read_text()
    assert 'name = "embedded"\nwidth = 0' in config
    assert "columns" not in config
    inputs = {one.name: one.parts for one in run.description.inputs}
    first, second = (kinfed.load_model(trained / "run", position=i).state_dict() for i in (0, 1))
    assert first["embeddings.article"].shape == (len(inputs["article"]), -(-len(inputs["article"]) // 2))
    assert not torch.equal(first["embeddings.article"], second["embeddings.article"])  # each client's own
    assert torch.equal(first["embeddings.weather"], second["embeddings.weather"])
    frame = polars.read_csv(trained / "shops.csv").filter(polars.col("shop") == summary.clients.names[1])
    second = summary.clients.names[1]
    assert main(["predict", str(trained / "run"), str(trained / "shops.csv"), "--client", second]) == 0
    capsys.readouterr()
    answers = run.predictor(summary.clients.names[1])(frame)["sold"].to_numpy()
    x = run.description.encode(kinfed.data.tables.open_table.frame_of(frame), summary.clients.names[1])
    target = summary.data.scale["targets"]["sold"]
    with torch.no_grad():
        outputs = kinfed.load_model(trained / "run", position=1)(x)[:, 0] * target["deviation"] + target["mean"]
    assert answers == pytest.approx(outputs.numpy(), rel=1e-5)


def test_it_exports_and_takes_newcomers(trained, capsys):
    words = ["export", str(trained / "run"), "--client", "Shop 1", "--out", str(trained / "onnx"), "--json"]
    assert main(words) == 0
    [exported] = json.loads(capsys.readouterr().out)
    assert exported["difference"] < 1e-5
    assert main(["onboard", str(trained / "run"), "--shots", "6", "--out", str(trained / "joined")]) == 0
    [name] = kinfed.Run.open(trained / "joined").names
    assert "embeddings.article" in kinfed.load_model(trained / "joined", name).state_dict()


def test_data_without_text_are_refused_before_anything_is_written(trained, tmp_path, capsys):
    words = ["--client", "shop", "--target", "sold", "--ignore", "article,weather", "--out", str(tmp_path / "run")]
    assert main(["run", str(trained / "shops.csv"), *words, "model=embedded"]) == 2
    assert "embedded: the data has no categories; use model=mlp" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
