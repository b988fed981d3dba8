"""Models as files that need no kinfed."""

import hashlib
import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import onnxruntime
import polars
import pytest
import torch
from safetensors.torch import load_file

import kinfed
from kinfed.cli import main
from kinfed.cli.predict import open_predictor
from kinfed.data.tables.column_statistics import DateStatistics, NumberStatistics, years
from kinfed.data.tables.columns import Calendar
from kinfed.data.tables.schema import Description
from kinfed.models import MODELS
from kinfed.runs.predictor import Answers, Predictor
from kinfed.serving import export as export_module, onnx_file
from kinfed.serving.pipeline import Encode, Whole
from kinfed.serving.requests import answer

WITHOUT_KINFED = """
import json, sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
given = json.load(sys.stdin)
kinds = {"tensor(double)": np.float64, "tensor(string)": object}
fed = {one.name: np.array(given[one.name], kinds[one.type]) for one in session.get_inputs()}
found = dict(zip([one.name for one in session.get_outputs()], session.run(None, fed)))
assert "kinfed" not in sys.modules and "torch" not in sys.modules
print(json.dumps({name: values.tolist() for name, values in found.items()}))
"""


def raw_columns(frame):
    """A table's cells as an exported model takes them."""
    seconds = frame["seen"].str.to_date().cast(polars.Datetime("us")).to_numpy().astype("datetime64[s]").astype(float)
    age = frame["age"].cast(polars.Float64).fill_null(np.nan).to_list()
    return {"age": age, "kind": frame["kind"].fill_null("").to_list(), "seen": seconds.tolist()}


@pytest.mark.parametrize("client", ["shop 0", "shop 3"])
def test_an_onnx_model_answers_cells_as_the_run_does_without_kinfed(client, exported, shops):
    """Own scales, missing cells, categories, dates and kNN-Per's memory are inside."""
    frame = polars.read_csv(shops / "shops.csv").filter(polars.col("shop") == client)
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_KINFED, str(exported / f"{client}.onnx")],
        input=json.dumps(raw_columns(frame)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found, expected = json.loads(told), kinfed.Run.open(shops / "run").predictor()(frame)
    assert found["class"] == expected["buys"].to_list()
    chances = expected.select("P(no)", "P(yes)").to_numpy()
    np.testing.assert_allclose(found["probabilities"], chances, atol=1e-5)


def test_a_card_says_what_the_model_is(exported, shops):
    text = (exported / "shop 3.onnx.md").read_text()
    digest = hashlib.sha256((exported / "shop 3.onnx").read_bytes()).hexdigest()
    summary = json.loads((shops / "run" / "summary.json").read_text())
    score = summary["by_client"]["scores"][summary["selection"]["chosen"]][3]
    beside = kinfed.Run.open(shops / "run" / "beside" / "local").summary
    local = beside.clients.scores[beside.selection.chosen][3]
    for line in (
        "| licence | CC0 |",
        f"| sha256 | {digest} |",
        "| client | shop 3 |",
        f"| method | knn-per, model '{summary['selection']['chosen']}' |",
        f"| this model (knn-per) | {score:.4g} |",
        f"| Local: learning alone | {local:.4g} |",
        "- `age`: float64 [n], NaN where it is missing",
        "of the classes 'no', 'yes'",
    ):
        assert line in text, text
    relations = kinfed.Run.open(shops / "run").folder.read_relations()
    weights = relations.weights[relations.selected][3]
    assert f"- shop {weights.argmax()}" in text
    assert f": {weights.max():.3f}" in text


def test_safetensors_hold_the_same_model(shops, capsys):
    out = shops / "other"
    asked = ["export", str(shops / "run"), "--client", "shop 3", "--format", "safetensors", "--out", str(out), "--json"]
    assert main(asked) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["size"] == (out / "shop 3.safetensors").stat().st_size
    run = kinfed.Run.open(shops / "run")
    arrays = load_file(out / "shop 3.safetensors")
    assert torch.equal(arrays["features"], run.personal("shop 3").features)
    assert torch.equal(run.layout.flatten(arrays), run.theta("shop 3"))


def test_onnx_models_of_series_and_of_counts_answer_as_the_run_does(tmp_path):
    """Forecasts of windows, and expected counts, in their own units."""
    draw = np.random.default_rng(0)
    days, readings = [str(np.datetime64("2024-01-01") + day) for day in range(90)], 1000 + 30 * draw.normal(size=90)
    rain, soil = 5 + draw.normal(size=90).round(2), draw.choice(["dry", "wet"], 90)
    beside = {"rain": [*rain, *rain], "soil": [*soil, *soil]}
    levels = polars.DataFrame(
        {"who": ["a"] * 90 + ["b"] * 90, "day": days * 2, "level": [*readings, *readings]} | beside
    )
    levels.write_csv(tmp_path / "levels.csv")
    sold = polars.DataFrame({"who": ["a", "b"] * 40, "price": draw.normal(size=80), "sold": draw.poisson(3, 80)})
    sold.write_csv(tmp_path / "sold.csv")
    small = ["--client", "who", "--method", "local", "rounds=1", "--beside", "none", "--quiet"]
    series = ["--target", "level", "--time", "day", "past=4", "horizon=2", "future=rain", "calendar=[]"]
    inputs = [readings[:-2], rain[:-2], soil[:-2] == "dry", soil[:-2] == "wet", rain[2:]]
    inputs = np.stack(inputs).astype(
        np.float32
    )  # [5, 88] of each step but the last, which have nothing two steps later
    windows = np.lib.stride_tricks.sliding_window_view(inputs, 4, axis=1).transpose(1, 2, 0)  # [85, 4, 5]
    for name, words, given, rows, columns in (
        ("levels", series, {"x": windows}, levels.head(90), ["level+1", "level+2"]),
        (
            "sold",
            ["--target", "sold", "federation.dataset.counts=true"],
            {"price": sold["price"].to_numpy()},
            sold,
            ["sold"],
        ),
    ):
        run, out = tmp_path / name, tmp_path / "onnx" / name
        assert main(["run", f"{run}.csv", *words, *small, "--out", str(run)]) == 0
        assert main(["export", str(run), "--client", "a", "--out", str(out)]) == 0
        expected = kinfed.Run.open(run).predictor("a")(rows).select(columns).to_numpy()
        found = onnxruntime.InferenceSession(out / "a.onnx").run(None, given)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("model", "target"), [("log-linear", "paid"), ("additive", "paid"), ("additive", "size")])
def test_solved_models_answer_alike_in_a_run_in_onnx_and_in_a_service(model, target, tmp_path):
    """Logarithms of skewed inputs, a head with a link, and curves of straight pieces; and both against numpy."""
    draw = np.random.default_rng(5)
    n = 120
    weight, kind = draw.lognormal(1, 0.8, n), draw.choice(["new", "old"], n)
    paid = np.exp(1 + 0.7 * np.log(weight) + 0.3 * (kind == "new") + 0.1 * draw.normal(size=n))
    frame = polars.DataFrame({"who": ["a", "b", "c"] * 40, "weight": weight, "kind": kind, "paid": paid})
    frame = frame.with_columns(
        size=polars.when(frame["paid"] > np.median(paid)).then(polars.lit("L")).otherwise(polars.lit("S"))
    )
    frame = frame.drop("size" if target == "paid" else "paid")
    frame.write_csv(tmp_path / "sold.csv")
    asked = [
        "run",
        str(tmp_path / "sold.csv"),
        "--client",
        "who",
        "--target",
        target,
        f"model.name={model}",
        "rounds=3",
    ]
    asked += ["--method", "partial-pooling", "--beside", "none", "--quiet", "--out", str(tmp_path / "run")]
    assert main(asked) == 0
    assert main(["export", str(tmp_path / "run"), "--client", "b", "--out", str(tmp_path / "onnx")]) == 0
    asked_of = frame.drop(target).head(20).with_columns(who=polars.lit("b"))
    expected = kinfed.Run.open(tmp_path / "run").predictor("b")(asked_of)[target].to_list()
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "b.onnx")
    given = {"weight": asked_of["weight"].to_numpy(), "kind": asked_of["kind"].to_numpy().astype(object)}
    names = [one.name for one in session.get_outputs()]
    found = dict(zip(names, session.run(None, given), strict=True))
    served = answer(open_predictor(tmp_path / "run")[0], asked_of.write_csv().encode(), "text/csv")[0][target].to_list()
    if target == "size":
        assert found["class"].tolist() == expected == served
        return
    np.testing.assert_allclose(found[names[0]].reshape(-1), expected, rtol=1e-4)
    np.testing.assert_allclose([float(one) for one in served], expected, rtol=1e-6)
    if model == "log-linear":  # of a product of powers it finds the powers
        truth = np.exp(1 + 0.7 * np.log(given["weight"]) + 0.3 * (given["kind"] == "new"))
        assert np.abs(np.log(np.array(expected) / truth)).max() < 0.15


def test_exports_that_cannot_be_are_told_in_one_line(exported, shops, tmp_path, capsys):
    for words, why in (
        ([shops / "run", "--out", exported], "already exists; choose another --out, or overwrite it with --force"),
        ([shops / "run", "--client", "shop3", "--out", tmp_path], "no client 'shop3'; did you mean 'shop 3'?"),
        ([tmp_path, "--out", tmp_path], "is not the folder of a finished run"),
    ):
        assert main(["export", *map(str, words)]) == 2
        err = capsys.readouterr().err
        assert (why in err, err.count("\n")) == (True, 1), err


def test_of_an_export_that_fails_nothing_is_left(shops, tmp_path, monkeypatch, capsys):
    asked = ["export", str(shops / "run"), "--format", "safetensors", "--out"]
    assert main([*asked, str(tmp_path / "whole")]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    write, done = export_module._write_export, []

    def fails_at_the_third(saved, name, *rest):
        if len(done) == 2:
            raise kinfed.UsageError("there is no operator for it")
        done.append(name)
        return write(saved, name, *rest)

    monkeypatch.setattr(export_module, "_write_export", fails_at_the_third)
    assert main([*asked, str(tmp_path / "new" / "models")]) == 2
    done.clear()
    assert main([*asked, str(tmp_path / "whole"), "--licence", "CC0", "--force"]) == 2
    assert "there is no operator for it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()} == before
    monkeypatch.setattr(export_module, "_write_export", write)
    (tmp_path / "whole" / "notes.txt").write_text("mine")
    assert main([*asked, str(tmp_path / "whole"), "--licence", "CC0", "--force"]) == 0
    assert "CC0" in (tmp_path / "whole" / "shop 3.safetensors.md").read_text()
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {*before, "notes.txt"}


def test_a_client_whose_model_cannot_be_written_is_named_and_the_others_are_written(
    shops, tmp_path, monkeypatch, capsys
):
    write = export_module._write_export

    def fails(saved, name, *rest):
        made = write(saved, name, *rest)
        if name == "shop 3":
            raise LookupError("no such tensor")
        return made

    monkeypatch.setattr(export_module, "_write_export", fails)
    words = ["export", str(shops / "run"), "--format", "safetensors", "--out", str(tmp_path / "models")]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert "client shop 3: unexpected LookupError: no such tensor" in err
    whole = {f"{name}.safetensors" for name in kinfed.Run.open(shops / "run").names}
    files = {path.name for path in (tmp_path / "models").iterdir()}
    assert files == {name + ending for name in whole - {"shop 3.safetensors"} for ending in ("", ".md")}


OWN = '''
"""Models of my own."""

import torch
from torch import nn


class Wave(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, outputs)

    def forward(self, x):
        return self.last(torch.sin(self.first(x.flatten(1))))


class Spectrum(Wave):
    def forward(self, x):
        return self.last(torch.linalg.eigvals(x[:, 0]).real)


class Fork(Wave):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)
'''


def test_a_model_of_ones_own_is_exported_or_the_operator_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    small = ["rounds=1", "federation.clients=4", "federation.partition.groups=2", "training.epochs=1", "--quiet"]
    assert main(["run", "local", *small, "model=mine.py:Wave", "--out", "run"]) == 0
    assert main(["export", "run", "--client", "2", "--out", "out"]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "out" / "2.onnx")
    x = torch.randn(5, 1, 8, 8)
    chances = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x.numpy()}), strict=True))
    expected = kinfed.load_model("run", "2")(x).softmax(1).detach().numpy()
    np.testing.assert_allclose(chances["probabilities"], expected, atol=1e-5)
    predictor = Predictor(["a"], "a", (1, 8, 8), Answers((), ("x", "y")), lambda _: None, lambda _: None)
    spec = spec_from_file_location("mine", tmp_path / "mine.py")
    mine = module_from_spec(spec)
    spec.loader.exec_module(mine)
    with pytest.raises(kinfed.UsageError, match=r"there is no ONNX operator for aten::linalg_eig"):
        onnx_file.convert(Whole(mine.Spectrum((1, 8, 8), 2), predictor, "a"), predictor)
    capsys.readouterr()
    with pytest.raises(kinfed.UsageError, match=r"branches on the values of its inputs; write it with torch.where"):
        onnx_file.convert(Whole(mine.Fork((1, 8, 8), 2), predictor, "a"), predictor)
    assert capsys.readouterr().err == ""  # where PyTorch prints what it has traced so far


@pytest.mark.parametrize("name", ["cnn-bn", "rnn"])
def test_another_clients_numbers_in_a_converted_architecture_are_its_model(name, tmp_path):
    shape, series = ((12, 2), True) if name == "rnn" else ((3, 32, 32), False)
    answers = Answers(("level",), (), (50.0,) * 3, (10.0,) * 3) if series else Answers((), tuple("0123456789"))
    readings = ((50.0, 10.0),) if series else ()
    predictor = Predictor(["a"], "a", shape, answers, lambda _: None, lambda _: None, readings=readings)
    one, other = (Whole(MODELS[name](shape, 3 if series else 10).eval(), predictor, "a").eval() for _ in range(2))
    proto = onnx_file.fill_weights(onnx_file.convert(one, predictor), other, {})
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    assert onnx_file.measure_gap(tmp_path / "model.onnx", other, predictor) < 1e-6
    assert onnx_file.measure_gap(tmp_path / "model.onnx", one, predictor) > 1e-4


def test_dates_are_the_same_by_arithmetic_and_by_numpys_calendar():
    days = np.concatenate([np.arange(-200_000, 200_000, 37), np.arange(10_900, 11_400), np.arange(-26_000, -25_000)])
    seconds = np.append(days * 86_400.0 + 4_321, np.nan)
    known = years(seconds[:-1])
    column = Calendar.from_statistics(
        "when", DateStatistics(NumberStatistics.from_values(np.append(known, np.nan), median=False), True)
    )
    encode = Encode(Description("who", (column,)), "a")
    found = encode({"when": torch.from_numpy(seconds)}).numpy()
    np.testing.assert_allclose(found, column.features(seconds), atol=1e-5)
