"""Masks in a simulation: methods that need sums alone run as without them, all others are refused in a line."""

import pytest
import torch
from test_private_clients import MLP, PAGE, federation, train

import kinfed
from kinfed.methods.solved import KNOWN, SOLVED
from kinfed.models.trees import trees

MASKED = kinfed.Privacy(masked=True)
ROW = next(line for line in PAGE.splitlines() if line.startswith("| run with masks |"))
ABLE = {part.strip(" `") for part in ROW.split("|")[2].split(",")}


def play(name, **how):
    """A run of a method, of a table of numbers where it needs one."""
    method, data = KNOWN[name](**({"encoder": MLP()} if name == "panacea" else {})), federation()
    if name in SOLVED:
        data = kinfed.Federation.from_arrays(data.x, data.x[:, :1].clone(), torch.arange(80) % 4)
        grows = name == "personal-boosting"
        how["net"] = trees((5,), 1, trees=2, depth=2) if grows else torch.nn.Sequential(torch.nn.Linear(5, 1))
        how["rounds"] = 7 if grows else 2
    return train(method, data=data, **{"rounds": 2, **how})


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_method_runs_as_without_masks_or_says_what_of_each_upload_it_uses(name):
    if name in ABLE:
        masked, plain = (play(name, privacy=privacy).history for privacy in (MASKED, None))
        for field, models in plain.models.items():
            assert torch.equal(models, masked.models[field])
        return
    with pytest.raises(kinfed.UsageError, match=r"of each client's upload, and privacy\.masked=true") as problem:
        play(name, privacy=MASKED)
    assert "\n" not in str(problem.value)
    assert "'fedavg'" in str(problem.value)


def test_masks_and_noise_go_together():
    for unit in ("row", "client"):
        noised, both = (
            train(privacy=kinfed.Privacy(8.0, unit=unit, masked=masked)).history.models["theta"]
            for masked in (False, True)
        )
        assert torch.equal(noised, both)


class Reports(kinfed.FedAvg):
    """Has clients report before the first round."""

    def client_statistics(self, client):
        return client.data.x.mean(0)


def test_what_each_client_says_before_the_first_round_is_refused():
    with pytest.raises(kinfed.UsageError, match="Reports has each client report statistics"):
        train(Reports(), privacy=MASKED)
