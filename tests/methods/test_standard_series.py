"""Standard models of series as what a user gets: predicted, exported, served, explained and onboarded."""

import datetime
import json

import numpy as np
import onnxruntime
import polars
import pytest
import torch

from kinfed.cli import main
from kinfed.cli.predict import open_predictor
from kinfed.models.holt_winters import smooth
from kinfed.runs.run import Run
from kinfed.serving import joining_clients
from kinfed.serving.onboarding import FrozenServer, onboard
from kinfed.serving.requests import answer

MONDAY = datetime.date(2024, 1, 1)
TITLES = {
    "calendar-means,times=7": "the client's mean by the calendar",
    "holt-winters,season=4": "Holt-Winters for each client",
}


def weeks(names, days=98):
    """Shops with a week of their own, whose days differ from it by chance alone."""
    parts = []
    for name in names:
        draw = np.random.default_rng([4, ord(name)])
        sold = draw.normal(20, 6, 7)[np.arange(days) % 7] + draw.normal(0, 1, days)
        dates = [MONDAY + datetime.timedelta(days=i) for i in range(days)]
        parts.append(polars.DataFrame({"shop": [name] * days, "day": dates, "sold": sold.round(4)}))
    return polars.concat(parts)


def quarters(names, count=90):
    """Shops whose level wanders, in one more than in another, about a year of their own with noise."""
    parts = []
    for name in names:
        draw = np.random.default_rng([4, ord(name)])
        level = draw.normal(0, (0.05, 0.3, 1.0, 2.0)[ord(name) % 4], count).cumsum()
        sold = level + draw.normal(0, 6, 4)[np.arange(count) % 4] + draw.normal(0, 1, count)
        parts.append(polars.DataFrame({"shop": [name] * count, "day": np.arange(count), "sold": sold.round(4)}))
    return polars.concat(parts)


MADE = {  # by model: the series, and the readings of a window
    "calendar-means,times=7": (weeks, 7, 1),
    "holt-winters,season=4": (quarters, 12, 4),
}


@pytest.fixture(scope="module", params=MADE)
def chosen(request, tmp_path_factory):
    """A choice on series on which this standard model of each client is best: its folder, and the model."""
    folder = tmp_path_factory.mktemp("series")
    draw, past, horizon = MADE[request.param]
    draw("abcdefgh").write_csv(folder / "shops.csv")
    how = ["--client", "shop", "--target", "sold", "--time", "day", f"past={past}", f"horizon={horizon}"]
    how += ["rounds=2", "--budget", "60"]
    assert main(["run", str(folder / "shops.csv"), *how, "--quiet", "--out", str(folder / "run")]) == 0
    return folder, request.param


def test_a_choice_keeps_the_standard_model_that_is_best(chosen):
    folder, model = chosen
    choice = json.loads((folder / "run" / "choice.json").read_text())
    assert choice["candidate"] == f"standard,{model}"
    assert choice["verdict"]["baselines"]["alone"] == TITLES[model]
    assert choice["verdict"]["over"]["alone"]["mean"] == pytest.approx(0, abs=1e-4)
    assert choice["verdict"]["sentence"].startswith("Learning from others is not worth it here")


def windows_of(frame, past, horizon):
    """[n, past] and [n, horizon] the windows of one shop's readings."""
    cut = np.lib.stride_tricks.sliding_window_view(frame["sold"].to_numpy(), past + horizon)
    return cut[:, :past], cut[:, past:]


def test_forecasts_are_in_the_targets_unit_and_of_all_rows(chosen):
    folder, model = chosen
    draw, past, horizon = MADE[model]
    frame, run = draw("b"), Run.open(folder / "run")
    found = run.predict("b", frame)[:, -horizon:].to_numpy()
    x, y = windows_of(frame, past, horizon)
    if draw is weeks:
        place = np.arange(len(found)) % 7  # of a window's first day in the week
        expected = np.stack([y[np.arange(len(y)) % 7 == day].mean(0) for day in range(7)])[place]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    else:
        assert not any(parameter.any() for parameter in run.model("b").head.parameters())
        rates = run.model("b").constants.detach().double()
        expected = smooth(torch.from_numpy(x.copy()), rates, 4, horizon)[1]
        np.testing.assert_allclose(found[: len(x)], expected, rtol=1e-4, atol=1e-4)
        others = [smooth(torch.from_numpy(x.copy()), rates * share, 4, horizon)[1] for share in (0.3, 0.6)]
        errors = [float((torch.from_numpy(y.copy()) - answers).square().mean()) for answers in (expected, *others)]
        assert errors[0] == min(errors)


def test_models_are_exported_served_and_reported_as_any_other(chosen, tmp_path, capsys):
    folder, model = chosen
    draw, past, horizon = MADE[model]
    frame, run = draw("b"), Run.open(folder / "run")
    forecasts = run.predict("b", frame.tail(past + 3))[:, -horizon:]
    expected = forecasts.to_numpy()
    assert main(["export", str(folder / "run"), "--client", "b", "--out", str(tmp_path)]) == 0
    windows = [np.lib.stride_tricks.sliding_window_view(frame["sold"].to_numpy()[-past - 3 :], past)]
    if draw is weeks:
        first = np.array([date.weekday() == 0 for date in frame["day"]])[-past - 3 :]
        windows.append(np.lib.stride_tricks.sliding_window_view(first, past))
    session = onnxruntime.InferenceSession(tmp_path / "b.onnx")
    found = session.run(None, {"x": np.stack(windows, 2).astype(np.float32)})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    service = open_predictor(folder / "run")[0]
    served = answer(service, frame.tail(past + 3).write_csv().encode(), "text/csv")
    np.testing.assert_allclose(served[0][forecasts.columns[-1]], expected[:, -1], rtol=1e-6, atol=1e-6)
    capsys.readouterr()
    assert main(["explain", str(folder / "run"), "b"]) == 0
    assert main(["report", str(folder / "run"), "-o", str(tmp_path / "page.html")]) == 0
    assert TITLES[model] in (tmp_path / "page.html").read_text()


def test_a_newcomer_fits_its_own_and_repeating_the_winner_gives_the_same_models(chosen, tmp_path):
    folder, model = chosen
    draw, past, horizon = MADE[model]
    frame, saved = draw("n"), Run.open(folder / "run")
    frame.write_csv(tmp_path / "new.csv")
    (newcomer,) = joining_clients.of_table(saved, tmp_path / "new.csv", None)
    outcome = onboard(FrozenServer(saved, saved.task), newcomer, len(newcomer.rows))
    x, y = windows_of(frame, past, horizon)
    assert outcome.scores["standard"] < 0.5 * np.abs(y - x[:, -1:]).mean()  # than the last value
    assert main(["run", str(folder / "run" / "best.toml"), "--quiet", "--out", str(tmp_path / "again")]) == 0
    again, first = Run.open(tmp_path / "again"), json.loads((folder / "run" / "summary.json").read_text())
    scores = first["by_client"]["scores"]["own"]
    assert again.summary.clients.scores["own"] == pytest.approx(scores, rel=1e-6)
