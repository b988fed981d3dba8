"""Holt-Winters by hand, against statsmodels, and its constants against those that a search over windows finds."""

import math
from statistics import fmean

import numpy as np
import pytest
import torch

from kinfed import Federation, Local, Quantiles, UsageError, fit
from kinfed.models.holt_winters import _list_constants, holt_winters, smooth
from kinfed.models.repeat import repeat

DOUBLE = torch.float64


def set_constants(module, *constants):
    module.constants.data = torch.tensor(constants, dtype=DOUBLE)
    for parameter in module.head.parameters():
        torch.nn.init.zeros_(parameter)
    return module.double()


def test_a_level_a_trend_and_a_season_follow_the_readings_by_hand():
    """Seasons of two steps: the first has mean 2 and the second 6, so a step is 2 higher than the one before."""
    window = torch.tensor([[[1.0], [3.0], [5.0], [7.0], [10.0]]], dtype=DOUBLE)
    model = set_constants(holt_winters((5, 1), 3, season=2), 0.5, 0.5, 0.25, 1.0)
    # The level is 2 + 1/2 * 2 = 3 after the first season, whose profile is 1 - 1 = 0 and 3 - 3 = 0. Readings 5 and 7
    # are as expected. 9 is expected in place of 10: level 9.5, trend 2.25 and profile 0.25, 0 follow.
    assert model(window).tolist() == [[11.75, 14.25, 16.25]]
    # Without a trend the level is 2 and the profile -1, 1. Errors are 5 - 1 = 4, 7 - 5 = 2 and 10 - (5 + 0) = 5, so
    # levels are 4, 5 and 7.5, and the profile 0, then 1.5, then 1.25.
    model = set_constants(model, 0.5, 0.5, 0.25, 0.0)
    assert model(window).tolist() == [[9.0, 8.75, 9.0]]
    # The head adds a constant, and a share of the way from the last level to the window's mean: 5.2 - 7.5 = -2.3.
    model.head.weight.data[0], model.head.bias.data[1] = 0.1, 3.0
    torch.testing.assert_close(model(window), torch.tensor([[8.77, 11.75, 9.0]], dtype=DOUBLE))


def test_the_last_value_and_a_straight_line_are_special_cases():
    x = torch.randn(6, 9, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    model = set_constants(holt_winters((9, 2), 4), 1.0, 0.3, 0.0, 0.0)
    torch.testing.assert_close(model(x), x[:, -1:, 0].expand(-1, 4))
    line = 3 + 2.5 * torch.arange(13, dtype=DOUBLE)
    for season in (1, 2, 3, 4):
        model = set_constants(holt_winters((9, 1), 4, season=season), 0.3, 0.2, 0.4, 1.0)
        torch.testing.assert_close(model(line[None, :9, None]), line[None, 9:])


@pytest.mark.parametrize(
    ("season", "constants"),
    [(4, (0.3, 0.2, 0.4, 0.9)), (4, (0.6, 0.05, 0.1, 1.0)), (1, (0.3, 0.2, 0.0, 0.9)), (3, (0.3, 0.0, 0.2, 0.0))],
)
def test_forecasts_are_those_of_the_textbooks_components(season, constants):
    """The equations in components, without errors: Hyndman and Athanasopoulos 2021, 8.3, with a damped trend."""
    alpha, beta, gamma, phi = constants
    step = np.arange(30)
    y = 10 + 0.3 * step + 3 * np.sin(step * 2 * np.pi / 4) + np.random.default_rng(0).normal(size=30)
    begin = fmean(y[:season])
    b = (fmean(y[season : 2 * season]) - begin) / season if phi else 0.0
    middle = (season - 1) / 2
    level, s = begin + middle * b, [y[i] - begin - (i - middle) * b for i in range(season)]
    for t in range(season, 30):
        before = level + phi * b
        level = alpha * (y[t] - s[t - season]) + (1 - alpha) * before
        s.append(gamma * (y[t] - before) + (1 - gamma) * s[t - season])
        b = beta * (level - before + phi * b) + (1 - beta) * phi * b
    damped = np.cumsum(phi ** np.arange(1.0, 8.0))
    expected = level + damped * b + np.array(s[-season:])[np.arange(7) % season]
    forecasts = smooth(torch.from_numpy(y), torch.tensor(constants, dtype=DOUBLE), season, 7)[1].numpy()
    np.testing.assert_allclose(forecasts, expected, rtol=1e-12)


@pytest.mark.parametrize(("past", "season"), [(8, 4), (8, 1), (5, 3)])
def test_fitted_constants_have_the_least_error_of_all_that_are_tried(past, season):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, past, 1, dtype=DOUBLE, generator=draw).cumsum(1)
    y = x[:, -2:, 0] + torch.randn(40, 2, dtype=DOUBLE, generator=draw)
    w = torch.rand(40, dtype=DOUBLE, generator=draw)
    model = holt_winters((past, 1), 2, season=season).double()
    torch.nn.init.ones_(model.head.weight)
    model.fit(x, y, w)
    fitted = tuple(model.constants.tolist())
    assert not any(parameter.any() for parameter in model.head.parameters())
    errors = {}
    for constants in _list_constants(season).double():
        answers = smooth(x[..., 0], constants, season, 2)[1]
        errors[tuple(constants.tolist())] = float((w[:, None] * (answers - y).square()).sum())
    assert len(errors) == len(_list_constants(season))
    assert math.isclose(errors[fitted], min(errors.values()), rel_tol=1e-9)
    assert max(errors.values()) > 1.1 * min(errors.values())


@pytest.mark.parametrize("build", [holt_winters, repeat])
def test_quantiles_which_need_several_outputs_for_a_step_are_refused(build):
    data = Federation.from_arrays(torch.randn(40, 5, 1), torch.randn(40, 2), torch.arange(40) % 2, task=Quantiles())
    with pytest.raises(UsageError, match="has one output for each step, and quantiles need several; use linear"):
        fit(Local(), data, build((5, 1), data.outputs), rounds=1)
