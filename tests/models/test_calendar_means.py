"""Calendar means by hand, and whether codes tell times apart."""

import numpy as np
import pytest
import torch

from kinfed.data.steps import calendar
from kinfed.errors import UsageError
from kinfed.models.calendar_means import SAME, calendar_means, count_times, encode_time

HOUR, DAY = 3600.0, 86400.0


def windows(length, steps, past, features):
    """[n, past, F] all windows of so many steps of this length in seconds, with readings of 0."""
    beside = torch.from_numpy(calendar(np.arange(steps) * length, features))
    return torch.cat([torch.zeros(steps, 1), beside], 1).unfold(0, past, 1).mT.float()


def test_means_are_those_of_the_rows_at_the_same_time():
    """Two times, weighted rows, and a time that training windows lack."""
    x = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.25]).view(5, 1, 1).expand(5, 3, 1)
    x = torch.cat([torch.randn(5, 3, 1), x], 2).double()
    y = torch.tensor([[1.0, 0.0], [7.0, 1.0], [4.0, 3.0], [9.0, 5.0]]).double()
    model = calendar_means((3, 2), 2, times=3).double()
    model.fit(x[:4], y, torch.tensor([1.0, 1.0, 2.0, 1.0]).double())
    # Time 0: (1 + 2 * 4) / 3 and (0 + 2 * 3) / 3. Time 0.5: (7 + 9) / 2 and (1 + 5) / 2. All: 25 / 5 and 12 / 5.
    expected = torch.tensor([[3.0, 2.0], [8.0, 3.0], [3.0, 2.0], [8.0, 3.0], [5.0, 2.4]]).double()
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.float()(x.float()), expected.float())


@pytest.mark.parametrize(
    ("length", "past", "features", "times"),
    [
        (HOUR, 24, ["clock"], 24),
        (HOUR, 168, ["clock"], 24),
        (HOUR / 12, 12, ["clock"], 288),
        (HOUR / 12, 288, ["clock"], 288),
        (HOUR / 12, 12, ["clock", "weekday"], 2016),
        (HOUR / 60, 30, ["clock"], 1440),
        (HOUR, 24, ["hour", "weekday"], 168),
        (DAY, 3, ["weekday"], 7),
        (DAY, 14, ["week"], 7),
        (DAY, 28, ["week"], 7),
    ],
)
def test_codes_tell_all_times_apart(length, past, features, times):
    steps = times + past - 1
    x = windows(length, steps, past, features)
    assert len(x) == times == count_times(x, torch.arange(times))
    code = encode_time(x.double())
    gaps = (code[:, None] - code).abs().amax(2).fill_diagonal_(1.0)
    assert gaps.min() > 5 * SAME
    assert (encode_time(x) - code).abs().max() < SAME / 20


def test_what_does_not_fit_is_said():
    with pytest.raises(UsageError, match=r"must be a window of readings \[past, features\]; got shape \[4\]"):
        calendar_means((4,), 2)
    with pytest.raises(UsageError, match="calendar-means needs the calendar beside the readings; set calendar"):
        calendar_means((4, 1), 2)
    x = windows(HOUR, 40, 3, ["clock"]).double()
    with pytest.raises(UsageError, match=r"places for 23 times, and a client's windows are at 24; set model.times=24"):
        calendar_means((3, 2), 1, times=23).double().fit(
            x, torch.zeros(len(x), 1).double(), torch.ones(len(x)).double()
        )
