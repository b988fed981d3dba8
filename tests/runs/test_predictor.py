"""Clients' models applied to new rows."""

import csv
import io
import json
import re

import numpy as np
import pandas
import polars
import pytest
import torch
from shops import HEAD, shop_lines, train

import kinfed
from kinfed.cli import main
from kinfed.runs.config import experiment as config


@pytest.fixture(scope="module")
def shops(tmp_path_factory):
    return train(tmp_path_factory.mktemp("shops"))


def predicted(capsys, *words):
    """Exit code, rows of the CSV, standard error."""
    code = main(["predict", *map(str, words)])
    out, err = capsys.readouterr()
    return code, list(csv.DictReader(io.StringIO(out))), err


def test_training_rows_are_answered_as_the_run_itself_does(shops, capsys):
    """The run's own federation, through its models, is the other way to compute the same."""
    experiment = config.of_run(shops / "run" / "config.toml")
    federation = experiment.federation(None, 0)
    code, rows, _ = predicted(capsys, shops / "run", shops / "shops.csv")
    assert code == 0
    assert len(rows) == 360
    assert [row["client"] for row in rows] == [f"shop {i % 6}" for i in range(360)]
    assert {row["method"] for row in rows} == {"knn-per"}
    for client in range(6):
        x, module = (
            federation.x[client::6],
            kinfed.load_model(shops / "run", position=client),
        )  # rows of a table keep their order
        chances = module(x).softmax(1).detach()
        mine = rows[client::6]
        found = torch.tensor([[float(row["P(no)"]), float(row["P(yes)"])] for row in mine])
        torch.testing.assert_close(found, chances, rtol=1e-5, atol=1e-6)
        assert [row["buys"] for row in mine] == [["no", "yes"][i] for i in chances.argmax(1)]


def test_a_frame_gets_what_its_file_gets_and_keeps_its_library_and_index(shops, capsys):
    without_target = [line.rpartition(",")[0] for line in (HEAD, *shop_lines(9, 1))]
    (shops / "new.csv").write_text("\n".join(without_target))
    _, rows, _ = predicted(capsys, shops / "run", "--client", "shop 3", shops / "new.csv")
    predict = kinfed.Run.open(shops / "run").predictor("shop 3")
    frame = polars.read_csv(shops / "new.csv")
    assert [str(one) for one in predict(frame)["buys"]] == [row["buys"] for row in rows]
    given = pandas.read_csv(shops / "new.csv").set_index(pandas.Index(range(100, 109)))
    found = predict(given)
    assert isinstance(found, pandas.DataFrame)
    assert list(found.index) == list(range(100, 109))
    assert found["P(yes)"].tolist() == pytest.approx([float(row["P(yes)"]) for row in rows])
    assert set(found["client"]) == {"shop 3"}


def test_columns_that_training_dropped_are_ignored_and_others_are_named_once(tmp_path, capsys):
    """An identifier, an ignored column and a list beside the inputs; single rows are read as the whole file is."""
    draw = np.random.default_rng(0)
    lines = ["shop,id,note,day,price,sold"]
    for i in range(90):
        price = f'"{draw.integers(1, 9)}.{draw.integers(100, 999)},{i % 10} €"'
        lines.append(f"{'AB'[i % 2]},c{i}x,{i % 3},{1 + i % 28:02d}/{1 + i % 12:02d}/2025,{price},{draw.normal():.3f}")
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    asked = ["run", str(tmp_path / "all.csv"), "--client", "shop", "--target", "sold", "--ignore", "note", "rounds=1"]
    assert main([*asked, "--quiet", "--out", str(tmp_path / "run")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(
        r"line 2, column 'day': '01/01/2025' is not a date .* dates=\"%d/%m/%Y\" would read it as 01 Jan", told
    )
    asked += ["dates=%d/%m/%Y", "decimal=,", "thousands=.", "units=€"]
    assert main([*asked, "model.hidden=[3]", "--quiet", "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    code, whole, err = predicted(capsys, tmp_path / "run", tmp_path / "all.csv")
    assert (code, err) == (0, "")
    for row in (0, 5, 20):  # 01/01, 06/06, 21/09
        path = tmp_path / f"{row}.csv"
        path.write_text(f"{lines[0]},new,newer\n{lines[1 + row]},1,2\n")
        code, one, err = predicted(capsys, tmp_path / "run", path)
        assert code == 0
        assert float(one[0]["sold"]) == pytest.approx(float(whole[row]["sold"]), rel=1e-5)
        why = f"kinfed: warning: {path}: ignored columns that the run was not trained with: 'new', 'newer'\n"
        assert err.endswith(why)
        assert err.count("ignored") == 1
    (tmp_path / "one.csv").write_text(f"{lines[0]}\nA,c,1,12/31/2025,3 €,0\n")
    code, _, err = predicted(capsys, tmp_path / "run", tmp_path / "one.csv")
    assert code == 2
    assert "line 2, column 'day': '12/31/2025' is not a date such as 2012-03-01 00:05" in " ".join(err.split())


def test_a_choice_answers_with_the_model_that_each_client_keeps(shops, tmp_path, capsys, monkeypatch):
    winner = "kinfed.search.successive_halving.winner"
    monkeypatch.setattr(winner, lambda found: next(one for one in found if one.candidate.method_name == "hedge"))
    asked = ["choose", str(shops / "shops.csv"), "--client", "shop", "--target", "buys", "rounds=2", "--budget", "20"]
    assert main([*asked, "--method", "hedge", "model.hidden=[6]", "--quiet", "--out", str(tmp_path / "c")]) == 0
    choice = json.loads((tmp_path / "c" / "choice.json").read_text())
    choice |= {"keep_own_model": ["shop 1"], "keep_fedavg_model": ["shop 2"]}
    (tmp_path / "c" / "choice.json").write_text(json.dumps(choice))
    capsys.readouterr()
    _, rows, _ = predicted(capsys, tmp_path / "c", shops / "shops.csv")
    methods = {row["client"]: row["method"] for row in rows}
    assert (methods["shop 1"], methods["shop 2"], methods["shop 0"]) == ("local", "fedavg", "hedge")
    _, alone, _ = predicted(capsys, tmp_path / "c" / "beside" / "local", "--client", "shop 1", shops / "shops.csv")
    both = [[float(row["P(yes)"]) for row in found[1::6]] for found in (rows, alone)]
    assert both[0] == pytest.approx(both[1], abs=1e-6)


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        (f"{HEAD}\nshop 7,3,new,2024-01-01,yes\n", [], "line 2, column 'shop': there is no client 'shop 7'; did you"),
        (f"{HEAD}\n,3,new,2024-01-01,yes\n", [], "line 2, column 'shop': there is no value"),
        ("age,kind,seen\n3,new,2024-01-01\n", [], "has no column 'shop'"),
        ("age,kind,seen\n3,new,2024-01-01\n", ["--client", "shop3"], "no client 'shop3'; did you mean 'shop 3'?"),
        ("shop,ages,kind,seen\nshop 1,3,new,2024-01-01\n", [], "has no column 'age'; did you mean 'ages'?"),
        (f"{HEAD}\nshop 1,x,new,2024-01-01,yes\n", [], "line 2, column 'age': 'x' is not a number"),
        (f"{HEAD}\n", [], "has no rows"),
    ],
)
def test_rows_that_cannot_be_answered_are_told_in_one_line(text, words, why, shops, tmp_path, capsys):
    (tmp_path / "new.csv").write_text(text)
    code, rows, err = predicted(capsys, shops / "run", *words, tmp_path / "new.csv")
    assert (code, rows) == (2, [])
    assert why in err
    assert err.count("\n") == 1


def test_folders_and_files_that_are_none_are_told_in_one_line(shops, tmp_path, capsys):
    for words, why in (
        ([tmp_path, shops / "shops.csv"], "is not the folder of a finished run: it has no summary.json"),
        ([shops / "run", tmp_path / "no.csv"], "there is no file"),
        ([shops / "run", tmp_path / "no.npz"], "there is no file"),
        ([shops / "run", shops / "shops.csv", "-o", "x.txt"], "answers are written as .csv or .parquet; got 'x.txt'"),
        ([shops / "run", shops / "shops.csv", "-o", shops / "shops.csv"], "is the file of the rows themselves"),
        ([shops / "shops.csv", shops / "shops.csv"], "shops.csv is not the folder of a finished run"),
    ):
        code, _, err = predicted(capsys, *words)
        assert (code, why in err, err.count("\n")) == (2, True, 1), err
    (tmp_path / "checkpoint.safetensors").touch()
    code, _, err = predicted(capsys, tmp_path, shops / "shops.csv")
    assert f"as it has not ended: kinfed resume {tmp_path}" in err
    summary = json.loads((shops / "run" / "summary.json").read_text())
    for name in ("config.toml", "models.safetensors"):
        (tmp_path / name).write_bytes((shops / "run" / name).read_bytes())
    (tmp_path / "summary.json").write_text(
        json.dumps(summary | {"data": summary["data"] | {"columns": {"inputs": [{"kind": "number"}]}}})
    )
    code, _, err = predicted(capsys, tmp_path, shops / "shops.csv")
    assert (code, "its summary.json does not say in full what its columns are" in err) == (2, True)
    del summary["data"]["columns"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    code, _, err = predicted(capsys, tmp_path, shops / "shops.csv")
    assert (code, "has no description of its columns, so new rows cannot be read; run it again" in err) == (2, True)


def test_numbers_are_in_their_own_unit_and_runs_predict_without_a_folder():
    draw = np.random.default_rng(0)
    owner, x = np.arange(200) % 2, draw.normal(size=200)
    frame = polars.DataFrame({"who": owner.astype(str), "x": x, "level": 500 + 100 * x * np.where(owner, 1, -1)})
    federation = kinfed.from_frame(frame, client="who", target="level")
    net = torch.nn.Linear(1, 1)
    run = kinfed.fit(kinfed.Local(), federation, net, rounds=20, training=kinfed.Training(2, 10, kinfed.SGD(0.1)))
    found = run.predictor()(frame)
    assert found.columns == ["client", "method", "model", "level"]
    assert (found["level"] - frame["level"]).abs().max() < 20
    other = run.predictor("1")(frame)
    assert (other["level"] - (500 + 100 * frame["x"])).abs().max() < 20


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    """Two stations' levels by the hour, with a hole and a missing reading, and a run that forecasts them."""
    folder = tmp_path_factory.mktemp("levels")
    lines = ["station,when,level"]
    for i, who in enumerate(("Ulm", "Bonn")):
        for t in range(200):
            day = np.datetime64("2024-01-01T00:00") + np.timedelta64(t, "h")
            if t not in (50, 51):
                lines.append(f"{who},{day},{'' if t == 70 else round(10 * i + np.sin(t / 4), 3)}")
    return folder, lines


@pytest.fixture(scope="module")
def forecasts(levels):
    folder, lines = levels
    (folder / "levels.csv").write_text("\n".join(lines) + "\n")
    data = {"client": "station", "target": "level", "time": "when", "past": 6, "horizon": 2}
    settings = [f"federation.dataset.{name}={value}" for name, value in data.items()]
    settings += ["federation.dataset.name=csv", f"federation.dataset.path={folder / 'levels.csv'}", "rounds=1"]
    assert main(["run", "local", *settings, "--quiet", "--out", str(folder / "run")]) == 0
    return folder


def test_every_row_with_a_past_gets_the_forecast_that_its_window_gets(forecasts, capsys):
    federation = config.of_run(forecasts / "run" / "config.toml").federation(None, 0)
    code, rows, err = predicted(capsys, forecasts / "run", forecasts / "levels.csv")
    assert code == 0, err
    assert "rows with fewer than 6 steps without a gap" in err
    assert list(rows[0]) == ["client", "method", "model", "when", "level+1", "level+2"]
    scale = federation.task
    by_time = {(row["client"], row["when"]): [float(row["level+1"]), float(row["level+2"])] for row in rows}
    assert len(by_time) == len(rows) == 2 * (198 - 5 - 5)
    count = 198  # steps at which anybody has a row
    for client, name in enumerate(federation.names):
        module = kinfed.load_model(forecasts / "run", name)
        starts = torch.cat([federation.rows[split][client] for split in ("train", "validation", "test")])
        expected = module(federation.x[starts]).detach() * scale.deviation + scale.mean
        for start, forecast in zip(starts.tolist(), expected, strict=True):
            place = start - client * count + 5
            hour = place if place < 50 else place + 2
            when = str(np.datetime64("2024-01-01T00:00") + np.timedelta64(hour, "h"))
            assert by_time[name, when] == pytest.approx(forecast.tolist(), abs=1e-4)


def test_one_client_is_forecast_from_its_own_rows_and_its_pace_is_that_of_training(forecasts, tmp_path, capsys):
    hours = [f"2024-03-01T{t:02}:00,{t}" for t in range(7)]
    (tmp_path / "new.csv").write_text("\n".join(["when,level", *hours]) + "\n")
    code, rows, _ = predicted(capsys, forecasts / "run", "--client", "Ulm", tmp_path / "new.csv")
    assert (code, [row["when"] for row in rows]) == (0, ["2024-03-01T05:00", "2024-03-01T06:00"])
    for text, why in (
        (hours[::2], "all 4 rows have fewer than 6 steps without a gap"),
        ([*hours, "2024-03-01T07:30,1"], "line 9, column 'when': this time is not a whole number of steps of 3600 sec"),
        ([f"{t},{t}" for t in range(9)], "times are numbers, but the run was trained on dates"),
        ([*hours, hours[0]], "client 'Ulm' has another row at the time"),
    ):
        (tmp_path / "new.csv").write_text("\n".join(["when,level", *text]) + "\n")
        code, _, err = predicted(capsys, forecasts / "run", "--client", "Ulm", tmp_path / "new.csv")
        assert (code, why in err) == (2, True), err


def test_arrays_are_answered_too(tmp_path, capsys):
    small = ["rounds=1", "federation.clients=4", "federation.partition.groups=2", "model=linear"]
    assert main(["run", "local", *small, "--quiet", "--out", str(tmp_path / "run")]) == 0
    federation = config.of_run(tmp_path / "run" / "config.toml").federation(None, 0)
    x = federation.x[:7]
    np.savez(tmp_path / "new.npz", x=x.numpy(), client=np.array(["0", "1", "2", "3", "0", "1", "2"]))
    code, rows, err = predicted(capsys, tmp_path / "run", tmp_path / "new.npz")
    assert code == 0, err
    for i, row in enumerate(rows):
        chances = kinfed.load_model(tmp_path / "run", position=i % 4)(x[i : i + 1]).softmax(1)[0].tolist()
        assert [float(row[f"P({c})"]) for c in range(10)] == pytest.approx(chances, abs=1e-6)
    for arrays, why in (
        ({"x": np.zeros((2, 3))}, "examples are [1, 8, 8] each"),
        ({"x": np.full((2, 1, 8, 8), np.nan)}, "x holds NaN or infinity, first in example 0"),
        ({"z": np.zeros(2)}, "lacks the array x"),
    ):
        np.savez(tmp_path / "new.npz", **arrays)
        code, _, err = predicted(capsys, tmp_path / "run", tmp_path / "new.npz", "--client", "2")
        assert (code, why in err, err.count("\n")) == (2, True, 1), err
    code, _, err = predicted(capsys, tmp_path / "run", tmp_path / "new.npz")
    assert code == 2
    (tmp_path / "new.csv").write_text("a,b\n1,2\n")
    code, _, err = predicted(capsys, tmp_path / "run", tmp_path / "new.csv", "--client", "2")
    assert (code, "trained on arrays, not on a table" in err) == (2, True)


def test_counts_and_quantiles_are_told_as_what_they_are(forecasts, tmp_path, capsys):
    counts = kinfed.runs.predictor.Answers(("sold",), (), (4.0,), (2.0,), counts=True)
    assert counts.values(torch.tensor([[0.0], [1.0]]))[:, 0].tolist() == pytest.approx([4, 4 * np.e])
    settings = ["federation.dataset.quantiles=[0.1, 0.9]", "rounds=1"]
    assert (
        main(["run", str(forecasts / "run" / "config.toml"), *settings, "--quiet", "--out", str(tmp_path / "q")]) == 0
    )
    code, rows, err = predicted(capsys, tmp_path / "q", forecasts / "levels.csv")
    assert code == 0, err
    assert list(rows[0])[4:] == ["level+1@0.1", "level+1@0.9", "level+2@0.1", "level+2@0.9"]
    run = kinfed.Run.open(tmp_path / "q")
    assert (run.task.quantiles, round(run.task.deviation)) == ((0.1, 0.9), 5)
