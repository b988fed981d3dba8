"""A user's words are data: names of columns, clients, classes and modules, whatever they are, and what a cell says."""

import contextlib
import csv
import io
import warnings
from pathlib import Path

import numpy as np
import pandas
import polars
import pytest
import torch
from torch import nn

import kinfed
from kinfed import UsageError
from kinfed.cli import main
from kinfed.runs.config.from_table import LEAST
from kinfed.serving.export import file_name

ROOT = Path(__file__).parents[2]
SITES = ("all", "a/b", "*", "007")


@pytest.mark.parametrize("number", [3, 26])
def test_names_of_all_sorts_go_through_every_command(number, tmp_path, monkeypatch):
    """Two cases of evidence/fuzz_names.py, which is run as a whole for docs/evidence/fuzz.md."""
    monkeypatch.syspath_prepend(str(ROOT / "evidence"))
    monkeypatch.chdir(tmp_path)
    import fuzz_names

    ends, *_ = fuzz_names.judge(number, 0, tmp_path / "case")
    assert [step for step, *_ in ends] == list(fuzz_names.STEPS)
    assert {step: said for step, outcome, said in ends if outcome != "ok"} == {}


def table(clients=SITES, each=30, **columns):
    draw = np.random.default_rng(0)
    who = [clients[i % len(clients)] for i in range(each * len(clients))]
    a = draw.normal(size=len(who))
    flip = np.array([name == clients[0] for name in who])
    y = np.where((a > 0) == flip, "yes", "no")
    return polars.DataFrame({"site": who, "a": a, **columns, "y": y})


class Paths(nn.Module):
    """Whose tensors have slashes in their names, as those of a client may have."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"b/weight": nn.Linear(1, 2), "*/x": nn.Linear(1, 2)})

    def forward(self, x):
        return sum(part(x) for part in self.parts.values())


def test_slashes_and_stars_in_names_of_clients_and_modules_are_read_back(tmp_path):
    federation = kinfed.from_frame(table(), client="site", target="y")
    run = kinfed.fit(kinfed.Local(), federation, Paths(), rounds=1)
    kinfed.save(run, tmp_path / "run")
    for name in SITES:
        loaded = kinfed.load_model(tmp_path / "run", name, Paths())
        for key, value in run.model(name).state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value)
    one = kinfed.fit(kinfed.FedAvg(), federation, Paths(), rounds=1)  # all share its tensors
    kinfed.save(one, tmp_path / "one")
    assert torch.equal(kinfed.Run.open(tmp_path / "one", Paths()).theta("*"), one.theta("*"))


def test_a_client_called_all_answers_its_own_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table().write_csv("t.csv")
    words = ["--client", "site", "--target", "y", "--method", "local", "--beside", "none", "--quiet"]
    assert main(["run", "t.csv", "rounds=2", *words, "--out", "r"]) == 0
    capsys.readouterr()

    def owners(*more):
        assert main(["predict", "r", "t.csv", *more]) == 0
        return {row["client"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}

    assert owners() == set(SITES)
    assert owners("--client", "all") == {"all"}
    with contextlib.redirect_stdout(io.StringIO()) as notebook:  # whose standard output takes no bytes
        assert main(["predict", "r", "t.csv"]) == 0
    assert len(notebook.getvalue().splitlines()) == 1 + len(table())
    assert main(["export", "r", "--format", "safetensors", "--out", "x"]) == 0
    assert len(list(Path("x").glob("*.safetensors"))) == len(SITES)
    assert main(["onboard", "r", "--client", '"a,b",c']) == 2
    # Rows that training left out are skipped and counted; a file of these alone is refused.
    more = polars.DataFrame({"site": ["new", None, "all"], "a": [1.0, 2.0, 3.0], "y": ["yes", None, None]})
    more.write_csv("more.csv")
    capsys.readouterr()
    assert main(["predict", "r", "more.csv"]) == 0
    said = capsys.readouterr()
    assert [row["client"] for row in csv.DictReader(io.StringIO(said.out))] == ["all"]
    assert "skipped 2 of 3 rows" in said.err
    assert "1 without one, new (1); the first: more.csv, line 2" in said.err
    more.head(1).write_csv("more.csv")
    assert main(["predict", "r", "more.csv"]) == 2
    frame = pandas.DataFrame(polars.concat([more, more]).to_dict(as_series=False))
    with pytest.warns(UserWarning, match="skipped 4 of 6 rows"):
        assert kinfed.Run.open("r").predictor()(frame).index.tolist() == [2, 5]


def test_newcomers_of_any_name_get_models_that_are_read_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table(("n", "s")).write_csv("t.csv")
    words = ["--client", "site", "--target", "y", "--method", "fedavg", "--beside", "none", "--quiet"]
    assert main(["run", "t.csv", "rounds=1", *words, "--out", "r"]) == 0
    table(("*", "x/y", "a,b")).write_csv("new.csv")
    assert main(["onboard", "r", "--data", "new.csv", "--client", '"a,b",*,x/y', "--shots", "5", "--out", "j"]) == 0
    capsys.readouterr()
    assert main(["predict", "j", "new.csv"]) == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["client"] for row in found] == ["*", "x/y", "a,b"] * 30


def test_a_number_is_a_name_and_a_position_has_a_keyword():
    federation = kinfed.from_frame(table([*"1234"]), client="site", target="y")
    run = kinfed.fit(kinfed.Local(), federation, nn.Linear(1, 2), rounds=1)
    for ask in (run.theta, lambda *of, **at: run.model(*of, **at).weight):
        assert torch.equal(ask(2), ask("2"))
        assert torch.equal(ask(np.int64(2)), ask(position=1))
        assert torch.equal(ask(position=-1), ask(4.0))
    assert run.predictor(3).client == "3"
    for wrong in (
        {"client": 0},
        {"client": True},
        {},
        {"client": 1, "position": 1},
        {"position": 4},
        {"position": "1"},
    ):
        with pytest.raises(UsageError, match=r"^(there is no client|name one client)[^\n]*$"):
            run.theta(**wrong)
    with pytest.raises(UsageError, match="for its position, from 0, write position=0"):
        run.model(0)


CELLS = [
    (["007", "7", "007", "7"], ["007", "7"]),
    (["1.0", "2.0", "1", "2"], ["1", "2"]),
    (["true", "False", "TRUE", "false"], ["False", "True"]),
    (["0", "1", "1.0", "x"], ["0", "1", "x"]),
]


@pytest.mark.parametrize(("cells", "names"), CELLS)
@pytest.mark.parametrize("more", [[], ["other"]])
def test_a_cell_is_called_the_same_whatever_else_is_in_its_column(cells, names, more, tmp_path):
    """As a client, a class and a category, in files and frames, with a neighbour that is no number and without."""
    column = [*cells, *more * 6] * 10
    draw = np.random.default_rng(0)
    rest = {"a": draw.normal(size=len(column)), "b": ["p", "q"] * (len(column) // 2)}
    frame = polars.DataFrame({"key": column, **rest})
    frame.write_csv(tmp_path / "t.csv")
    frame.write_parquet(tmp_path / "t.parquet")
    wanted = tuple(sorted([*names, *more]))
    for source in (tmp_path / "t.csv", tmp_path / "t.parquet", frame, pandas.DataFrame(frame.to_dict(as_series=False))):
        make = kinfed.from_csv if isinstance(source, Path) else kinfed.from_frame
        assert tuple(sorted(make(source, client="key", target="b").names)) == wanted
        assert tuple(sorted(make(source, client="b", target="key").classes)) == wanted
        if more:  # else numbers
            assert make(source, client="b", target="a").columns.inputs[0].categories == wanted


@pytest.mark.parametrize("hole", [False, True])
def test_truth_values_have_one_name_with_missing_ones_and_without(hole):
    cells = [True, False, None if hole else True] * 20
    frame = {"who": cells, "a": np.random.default_rng(0).normal(size=60), "y": [*"ab"] * 30}
    for data in (polars.DataFrame(frame), pandas.DataFrame(frame)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert kinfed.from_frame(data, client="who", target="a").names == ("False", "True")
            assert kinfed.from_frame(data, client="y", target="who").classes == ("False", "True")


def test_links_name_clients_as_cells_do(tmp_path):
    (tmp_path / "links.csv").write_text("from,to\n1.0,true\n007,TRUE\n")
    frame = table(("1.0", "true", "007", "x"))
    federation = kinfed.from_frame(frame, client="site", target="y", edges=tmp_path / "links.csv")
    assert federation.names == ("1", "007", "True", "x")
    assert federation.graph.weights.tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_an_input_that_is_constant_in_training_changes_no_answer(tmp_path):
    frame = table(year=[2024] * 120)
    with pytest.warns(UserWarning, match=r"'year' \(2024\) is the same in all training rows, so left out"):
        federation = kinfed.from_frame(frame, client="site", target="y")
    run = kinfed.fit(kinfed.FedAvg(), federation, nn.Linear(2, 2), rounds=1)
    kinfed.save(run, tmp_path / "run")
    loaded = kinfed.Run.open(tmp_path / "run", nn.Linear(2, 2))
    for predictor in (run.predictor(), loaded.predictor()):
        now, later = (predictor(frame.with_columns(year=polars.lit(year))) for year in (2024, 2100))
        assert now.equals(later)


def doubts(frame, **names):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kinfed.from_frame(frame, **{"client": "site", "target": "y"} | names)
    return [str(one.message) for one in said]


def test_what_is_doubtful_is_told_with_its_cell():
    draw = np.random.default_rng(1)
    sound = table(b=draw.normal(size=120), k=draw.integers(3, size=120))
    assert doubts(sound) == []
    absurd = sound.with_columns(b=polars.when(polars.int_range(120) == 17).then(1e9).otherwise("b"))
    [told] = doubts(absurd)
    assert told.startswith("the frame, row 18, column 'b': '1000000000.0' makes the deviation of all")
    [told] = doubts(sound.with_columns(zip=polars.Series(draw.integers(10_000, 99_999, 120))))
    assert told.startswith("the frame, row 1, column 'zip'")
    [told] = doubts(sound.with_columns(code=polars.Series([f"{i:03d}" for i in range(120)])))
    assert told.startswith("the frame, row 1, column 'code': '000' is read as the number 0")
    [told] = doubts(sound.with_columns(copy=polars.col("y").replace({"yes": "1", "no": "2"})))
    assert told.startswith("the frame, row 1, column 'copy'")
    [told] = doubts(sound.with_columns(y=3 * polars.col("a") + 10))
    assert told.startswith("the frame, row 1, column 'a'")


def test_columns_of_any_name_are_exported(tmp_path, monkeypatch):
    """Names of values in an ONNX graph, and those with quotation marks or line breaks."""
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(2)
    names = ["class", "predicted class", "probabilities", 'a"b', "a\nb", "place", "model.1.weight"]
    frame = table(("n", "s"), **{name: draw.normal(size=60) for name in names}, cat=[*"pqr"] * 20)
    frame.write_csv("t.csv")
    words = ["--client", "site", "--target", "y", "--method", "local", "--beside", "none", "--quiet"]
    assert main(["run", "t.csv", "rounds=1", *words, "--out", "r"]) == 0
    assert main(["export", "r", "--client", "n", "--out", "onnx"]) == 0
    import onnxruntime

    session = onnxruntime.InferenceSession("onnx/n.onnx", providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == ["a", *names, "cat"]
    assert [one.name for one in session.get_outputs()] == ["predicted predicted class", "predicted probabilities"]
    fed = {name: frame[name].to_numpy() for name in ["a", *names]} | {"cat": frame["cat"].to_numpy().astype(object)}
    answers, chances = session.run(None, fed)
    wanted = kinfed.Run.open("r").predictor("n")(frame)
    assert answers.tolist() == wanted["y"].to_list()
    np.testing.assert_allclose(chances[:, 1], wanted["P(yes)"].to_numpy(), atol=1e-6)


def test_files_named_after_clients_fit_every_disk():
    assert file_name("a/b") == "a%2Fb"
    one, other = (file_name("ß" * 200 + end) for end in "xy")
    assert one != other
    assert len(one.encode()) < 200


def test_small_clients_are_left_out_as_the_command_does():
    few = polars.concat([table(("n", "s")), table(("t",), each=LEAST - 1)])
    with pytest.warns(UserWarning, match=r"1 of 3 clients has fewer than 3 rows and was left out: t \(2\)"):
        assert kinfed.from_frame(few, client="site", target="y").names == ("n", "s")
