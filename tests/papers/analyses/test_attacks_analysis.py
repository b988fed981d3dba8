import numpy as np
import pytest

from kinfed.errors import UsageError
from kinfed_papers.analyses.attacks import attacks


def test_scores_are_those_of_honest_clients_and_nobody_attacks_with_a_share_of_zero(study, tmp_path):
    asked = study("local", "rounds=2")
    found = attacks(asked, methods=["local", "fedavg"], shares=[0.0, 0.5], kinds=["poison", "label_flip"])
    table = {(row["attack"], row["method"]): row for row in found.rows}
    assert table["poison", "fedavg"]["0%"] == table["label_flip", "fedavg"]["0%"]  # one clean run for both
    assert table["poison", "fedavg"]["50%"] < table["poison", "fedavg"]["0%"]
    assert table["poison", "local"]["50%"] == pytest.approx(table["label_flip", "local"]["50%"])  # no attack reaches it
    assert len(list((tmp_path / "runs").iterdir())) == 6
    assert found.pictures[0].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("shares", [[0.1, 1.0], [-0.1], [0.2, 0.2], [np.nan]])
def test_shares_that_leave_nobody_or_say_nothing_are_refused(study, shares):
    with pytest.raises(UsageError, match=r"analysis\.shares are different shares"):
        attacks(study("local"), shares=shares)
