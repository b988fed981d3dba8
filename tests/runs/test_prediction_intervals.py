"""Prediction intervals: as many truths inside as promised, however rows, errors and clients differ."""

import csv
import json
import shutil

import numpy as np
import polars
import pytest
import torch
from mapie.regression import SplitConformalRegressor
from sklearn.linear_model import LinearRegression

import kinfed
from kinfed.cli import main
from kinfed.errors import UsageError
from kinfed.runs.prediction_intervals import find_half_widths
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.tested_examples import write_errors


def columns(*errors):
    return [np.array(client, float).reshape(-1, 1) for client in errors]


def test_clients_whose_errors_differ_by_chance_alone_share_the_quantile_of_all():
    """By hand: means 2.5, 2.5 and 2.5, so there is one scale; of nine errors the ninth is the 90 % quantile."""
    errors = columns([1, -4], [-2, 3], [2.5], [1, 4], [-3, 2])
    assert find_half_widths(errors, 0.9)[:, 0] == pytest.approx([4] * 6)


def test_a_client_whose_errors_are_larger_has_a_wider_interval_by_hand():
    """The second client is ten times as far off, and 2,000 rows say so."""
    draw = np.random.default_rng(0)
    small, large = draw.uniform(-1, 1, 2000), 10 * draw.uniform(-1, 1, 2000)
    found = find_half_widths(columns(small, large), 0.9)[:, 0]
    assert found[:2] == pytest.approx([0.9, 9.0], rel=0.03)
    assert found[1] > found[2] > found[0]  # of a client without test rows


@pytest.mark.parametrize(
    ("clients", "rows", "spread", "tails"),
    [(5, 4, 1.0, False), (20, 5, 0.5, False), (100, 3, 0.8, False), (200, 1, 0.8, False), (60, 8, 0.6, True)],
)
def test_as_many_new_rows_lie_inside_as_were_asked_for(clients, rows, spread, tails):
    draw = np.random.default_rng(1)
    inside = []
    for _ in range(150):
        scale = np.exp(spread * draw.normal(size=(clients, 1)))
        errors = draw.standard_t(3, (clients, rows + 50)) if tails else draw.normal(size=(clients, rows + 50))
        errors *= scale
        half = find_half_widths([client[:rows, None] for client in errors], 0.9)[:-1]
        inside.append((np.abs(errors[:, rows:]) <= half).mean())
    error = np.std(inside) / np.sqrt(len(inside))
    assert 0.9 - 3 * error < np.mean(inside) < 0.9 + 0.02 + 3 * error


def test_of_a_single_client_the_interval_is_that_of_mapie():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 3))
    y = x @ [1, 2, 3] + draw.standard_t(4, 400)
    model = LinearRegression().fit(x[:200], y[:200])
    theirs = SplitConformalRegressor(model, confidence_level=0.9, prefit=True).conformalize(x[200:], y[200:])
    low, high = theirs.predict_interval(x[:1])[1][0]
    ours = find_half_widths([model.predict(x[200:])[:, None] - y[200:, None]], 0.9)
    assert ours[0, 0] == pytest.approx((high - low) / 2)


def test_missing_truths_and_clients_without_test_rows_and_answers_without_error():
    errors = columns([1, np.nan, -1], [], [np.nan])
    assert find_half_widths(errors, 0.5)[:, 0] == pytest.approx([1] * 4)
    assert find_half_widths(columns([0] * 10, [0] * 10), 0.9)[:, 0] == pytest.approx([0] * 3)
    two = find_half_widths([np.array([[1.0, 20]] * 10)], 0.9)
    assert two == pytest.approx(np.array([[1, 20]] * 2))


@pytest.mark.parametrize(("rows", "level"), [(8, 0.9), (0, 0.5), (98, 0.99)])
def test_too_few_rows_have_no_interval(rows, level):
    with pytest.raises(UsageError, match=f"need at least {round(level / (1 - level))} rows .* held out; got {rows}"):
        find_half_widths(columns([1] * rows), level)


@pytest.fixture(scope="module")
def sales(tmp_path_factory):
    """Shops' sales, noisier at later shops: a run that chose, and new rows."""
    folder, draw = tmp_path_factory.mktemp("sales"), np.random.default_rng(0)
    with open(folder / "old.csv", "w") as old, open(folder / "new.csv", "w") as new:
        files = [csv.writer(file) for file in (old, new)]
        for file in files:
            file.writerow(["shop", "price", "sold"])
        for shop in range(12):
            for row in range(80):
                price = draw.normal()
                sold = 20 + 3 * price * (1 + shop / 12) + draw.normal() * (0.3 + shop / 4)
                files[row >= 40].writerow([f"s{shop}", price, sold])
    data = {"name": "csv", "path": folder / "old.csv", "client": "shop", "target": "sold"}
    settings = [f"federation.dataset.{key}={value}" for key, value in data.items()]
    settings += ["model.name=linear", "rounds=3", "--beside", "none", "--quiet", "--out", str(folder / "run")]
    assert main(["run", "partial-pooling", *settings]) == 0
    return folder


def test_predict_gives_bounds_that_hold_and_widen_with_a_shops_noise(sales, capsys):
    assert main(["predict", str(sales / "run"), str(sales / "new.csv"), "--interval", "90"]) == 0
    answers = polars.read_csv(capsys.readouterr().out.encode())
    assert answers.columns == ["client", "method", "model", "sold", "sold low", "sold high"]
    truth = polars.read_csv(sales / "new.csv")["sold"]
    inside = (truth >= answers["sold low"]) & (truth <= answers["sold high"])
    assert 0.85 < inside.mean() < 0.95
    width = (
        answers.with_columns(width=answers["sold high"] - answers["sold low"])
        .group_by("client")
        .agg(polars.col("width").first())
    )
    by_shop = dict(width.iter_rows())
    assert by_shop["s11"] > 2 * by_shop["s0"]
    run = kinfed.Run.open(sales / "run")
    frame = polars.read_csv(sales / "new.csv")
    assert run.predict(None, frame, interval=0.9)["sold low"].to_list() == pytest.approx(answers["sold low"].to_list())
    assert main(["predict", str(sales / "run"), str(sales / "new.csv"), "--interval", "90", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["sold high"] == pytest.approx(answers["sold high"][0])


def test_a_run_in_memory_has_the_intervals_of_its_folder(sales, tmp_path):
    federation = kinfed.from_csv(sales / "old.csv", client="shop", target="sold")
    run = kinfed.fit(kinfed.Local(), federation, torch.nn.Linear(1, 1), rounds=2)
    frame = polars.read_csv(sales / "new.csv")
    here = run.predict(None, frame, interval=0.8)
    truth, row = federation.y[federation.rows["test"][3]], federation.rows["test"][3]
    answers = run.predictor("s3").answers.in_units(run.model("s3")(federation.x[row]).detach().double())
    assert run.errors[3] == pytest.approx((answers - truth.reshape(-1, 1)).numpy(), rel=1e-4)
    kinfed.save(run, tmp_path / "run")
    opened = kinfed.Run.open(tmp_path / "run", torch.nn.Linear(1, 1))
    assert opened.predict(None, frame, interval=0.8).equals(here)
    stranger = frame.head(1).with_columns(shop=polars.lit("nobody"))
    asked = run.predict(None, stranger, "mean", 0.8)
    widths = here["sold high"] - here["sold low"]
    assert widths.min() < (asked["sold high"] - asked["sold low"])[0] < widths.max()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--interval", "0"], "--interval is in per cent, from 1 to below 100, such as 90; got 0"),
        (["--interval", "0.9"], "from 1 to below 100, such as 90; got 0.9"),
        (["--interval", "100"], "from 1 to below 100, such as 90; got 100"),
        (["--interval", "nan"], "from 1 to below 100, such as 90; got nan"),
        (["--interval", "99.9"], "need at least 999 rows of all clients together that were held out; got 96"),
    ],
)
def test_what_cannot_be_promised_is_told_in_one_line(words, why, sales, capsys):
    assert main(["predict", str(sales / "run"), str(sales / "new.csv"), *words]) == 2
    err = capsys.readouterr().err
    assert (why in err, err.count("\n")) == (True, 1)


def test_classes_have_probabilities_in_place_of_intervals(shops_run):
    with pytest.raises(UsageError, match="has no intervals: its answers are classes, each with a probability"):
        shops_run.predictor(interval=0.9)
    with pytest.raises(UsageError, match=r"interval is the share of truths between its bounds, such as 0.9; got 90"):
        shops_run.predictor(interval=90)


@pytest.fixture(scope="module")
def shops_run():
    x, client = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    federation = kinfed.Federation.from_arrays(x, (x[:, 0] > 0).long(), client)
    return kinfed.fit(kinfed.Local(), federation, torch.nn.Linear(4, 2), rounds=1)


def test_errors_of_another_run_and_broken_ones_are_told(sales, tmp_path, capsys):
    shutil.copytree(sales / "run", tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    write_errors(folder.errors, [np.zeros((3, 1), np.float32)] * 4)
    asked = ["predict", str(folder), str(sales / "new.csv"), "--interval", "50"]
    assert main(asked) == 2
    assert "another run" in capsys.readouterr().err
    folder.errors.write_bytes(b"cut")
    assert main(asked) == 2
    assert "delete it to do without intervals" in capsys.readouterr().err
    folder.errors.unlink()
    assert main(asked) == 2
    assert "it keeps no errors of test rows" in capsys.readouterr().err
