import pytest
from scipy import stats

from kinfed.data.partitions import Dirichlet
from kinfed.errors import UsageError


def test_equal_shares_are_rounded_cumulatively(deal):
    # A huge alpha shares a class equally: 10 examples over 3 clients are cut at 3.33 and 6.67, so none is lost.
    counts = deal(Dirichlet(alpha=1e12, min_size=1, cap=False), [0] * 10 + [1] * 10, 3)
    assert counts.tolist() == [[3, 3], [4, 4], [3, 3]]


def test_a_tiny_alpha_gives_every_class_to_one_client(deal):
    counts = deal(Dirichlet(alpha=1e-6, min_size=1, cap=False), list(range(10)) * 20, 3)
    assert ((counts == 20).sum(0) == 1).all()
    assert ((counts == 0).sum(0) == 2).all()


def test_the_cap_closes_full_clients(deal):
    # 10 classes of 20 go to one client each. Of 5 clients each is full with 40: two classes, whatever was drawn.
    for seed in range(5):
        counts = deal(Dirichlet(alpha=1e-6, min_size=1), list(range(10)) * 20, 5, seed)
        assert ((counts == 20).sum(1) == 2).all()
        assert (counts.sum(1) == 40).all()


def test_the_cap_is_reached_even_where_open_shares_vanish(deal):
    # With alpha this small an open client's share is 0 beside that of a full one, unless logarithms are compared.
    counts = deal(Dirichlet(alpha=1e-300, min_size=1), list(range(10)) * 20, 5)
    assert (counts.sum(1) == 40).all()


def test_small_clients_are_filled_from_the_largest(deal):
    # One class, all of it with one of 10 clients: nine are raised to the least size, the giver keeps the rest.
    sizes = deal(Dirichlet(alpha=1e-6, min_size=4), [0] * 100, 10).sum(1)
    assert sorted(sizes.tolist()) == [4] * 9 + [64]
    sizes = deal(Dirichlet(alpha=1e-6, min_size=10), [0] * 100, 10).sum(1)
    assert sizes.tolist() == [10] * 10


def test_the_largest_gives_at_every_step(deal):
    # Two classes of 60 and 40 with two of five clients; three need 10 each. The larger gives until both hold 40, 20
    # times, then they give in turn: 35 and 35 are left.
    for seed in range(20):
        before = deal(Dirichlet(alpha=1e-6, min_size=1, cap=False), [0] * 60 + [1] * 40, 5, seed)
        counts = deal(Dirichlet(alpha=1e-6, min_size=10, cap=False), [0] * 60 + [1] * 40, 5, seed)
        if (before.sum(1) > 1).sum() == 2:
            assert sorted(counts.sum(1).tolist()) == [10, 10, 10, 35, 35]
            return
    pytest.fail("no seed gave the two classes to two clients")


@pytest.mark.parametrize("alpha", [0.7, 4.0])
def test_shares_follow_the_dirichlet_law(deal, alpha):
    # A share of Dir(alpha 1_4) is Beta(alpha, 3 alpha); classes are independent without the cap.
    counts = deal(Dirichlet(alpha=alpha, min_size=1, cap=False), list(range(800)) * 500, 4)
    shares = counts.double() / 500
    for client in range(4):
        assert stats.kstest(shares[client].numpy(), stats.beta(alpha, 3 * alpha).cdf).pvalue > 0.01
    # Var = (1/4) (3/4) / (4 alpha + 1); 3,200 values, correlated in fours, know it to about 3 %.
    assert float(shares.var()) == pytest.approx(0.1875 / (4 * alpha + 1), rel=0.08)


def test_too_many_clients_for_the_least_size(deal):
    with pytest.raises(
        UsageError, match=r"dirichlet: 11 clients need at least 10 examples each, 110 together.* has 100"
    ):
        deal(Dirichlet(), [0, 1] * 50, 11)
