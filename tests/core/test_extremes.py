"""Clients whose errors alone decide a mean."""

import math

import pytest
import torch

from kinfed import Federation, Local, Regression, fit
from kinfed.core.summary import name_extremes


@pytest.mark.parametrize(
    ("errors", "sentence"),
    [
        ([1, 2, 3, 9_000], "the mean mae of 2,252 comes from client d (9,000); that of the others is 2"),
        ([1, math.nan, 3, 2, 24], ""),  # 9.6 times the median of 2.5
        ([1, math.nan, 3, 2, 994], "the mean mae of 250 comes from client e (994); that of the others is 2"),
        (
            [2.0] * 39 + [200, 2e30],
            "the mean mae of 4.878e+28 comes from 2 clients: 40 (2e+30), 39 (200); that of the others is 2",
        ),
        ([1.0, 1.0, 1.5, 13.0], "the mean mae of 4.125 comes from client d (13); that of the others is 1.167"),
        ([1.0, 1.2, 0.9, 5.0], ""),  # harder than the others, not exploded
        ([1.0] * 10 + [40, 50, 60], ""),  # too many to be exceptions
        ([1.0] * 60 + [15], ""),  # it does not decide the mean
        ([1.0, 900.0], ""),
        ([0.0, 0.0, 0.0], ""),
        ([math.nan] * 4, ""),
    ],
)
def test_who_decides_a_mean(errors, sentence):
    names = list("abcdefghij") if len(errors) <= 10 else [str(i) for i in range(len(errors))]
    assert name_extremes(errors, names[: len(errors)], "mae") == sentence


def test_a_run_whose_mean_is_one_client_says_so():
    draw = torch.Generator().manual_seed(0)
    x, client = torch.randn(120, 2, generator=draw), torch.arange(120) % 4
    y = x.sum(1) * torch.tensor([1.0, 1.0, 90000.0, 1.0])[client]
    run = fit(Local(), Federation.from_arrays(x, y, client, task=Regression()), torch.nn.Linear(2, 1), rounds=1)
    tests = run.history.test(run.history.chosen).double()
    (warning,) = run.summary.warnings
    assert f" of {tests.mean():,.0f} comes from client 2 ({tests[2]:,.0f}); " in warning
    assert warning.endswith(f"that of the others is {tests[[0, 1, 3]].mean():.4g}")
