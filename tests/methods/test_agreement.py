import pytest
import torch

from kinfed.methods.hedge import agreement, vary

float64 = torch.float64


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=float64), rtol=0, atol=1e-12)


def test_agreement_by_hand():
    # Mean 2, mean square 14 / 3: ratio^2 = 12 / 14 = 6 / 7, chance 14 / (9 * 4) = 7 / 18.
    found = agreement(torch.tensor([1.0, 2.0, 3.0], dtype=float64))
    close(found, (6 / 7) ** 0.5 * 11 / 18)
    close(agreement(torch.tensor([[2.0, 2.0], [-0.1, -0.1]], dtype=float64)), [0.5, -0.5])


@pytest.mark.parametrize("slopes", [[0.0, 0.0, 0.0], [1.0, -1.0], [5.0], [3.0, -1.0, -1.0, 0.0]])
def test_nothing_agreed_is_nothing(slopes):
    close(agreement(torch.tensor(slopes, dtype=float64)), 0.0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_only_directions_count(scale):
    slopes = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)) + 1.0
    torch.testing.assert_close(agreement(scale * slopes), agreement(slopes), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(agreement(-slopes), -agreement(slopes))
    assert (agreement(slopes).abs() <= 1).all()


def test_many_clients_who_agree_count_in_full_and_chance_counts_for_little():
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(500, 20, generator=draw)
    assert agreement(noise).abs().mean() < 0.1  # the plain ratio has 0.18
    assert agreement(noise + 10).min() > 0.9


def test_rounding_errors_are_no_differences():
    rows = torch.tensor([[1.0, 1.0 + 1e-6, 1.0], [0.0, 0.0, 0.0], [1.0, 1.001, 1.0], [0.0, 1e-30, 0.0]])
    assert vary(rows).tolist() == [False, False, True, True]
