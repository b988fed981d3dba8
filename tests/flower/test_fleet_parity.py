"""Methods, unchanged, at six sites: the same models as in a simulation, one message a client and round."""

import numpy as np
import pytest
import torch
from kinds import KINDS
from safetensors.torch import load_file

from kinfed.core.summary import score_models

ROUNDS = 4


PARTS = {"personal": ["head.*"], "frozen": ["fc1.bias"]}  # of a model that do not travel


@pytest.mark.parametrize(("name", "parts"), [*((name, {}) for name in KINDS), ("fedavg", PARTS), ("sfl", PARTS)])
def test_sites_end_with_the_models_of_a_simulation(name, parts, trial, examples, tmp_path):
    trial = trial(name, share=0.5, rounds=ROUNDS, method=parts)
    expected = trial.simulate()
    summary = trial.serve()
    for i, client in enumerate(examples):
        (folder,) = (tmp_path / "sites" / client / client).iterdir()
        mine = load_file(folder / "model.safetensors")
        assert all(torch.equal(mine[key], value) for key, value in expected.frozen.items())
        assert expected.frozen.keys() == set(parts.get("frozen", ()))
        for leaf, values in expected.history.models.items():
            wanted = expected.layout.tensors(values[i]) if leaf == "theta" else {leaf: values[i]}
            for key, value in wanted.items():
                torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-5)
    assert summary.selection.chosen == expected.history.chosen
    assert {k: v["round"] for k, v in summary.scores.items()} == {
        k: v["round"] for k, v in score_models(expected.history).items()
    }
    # One message a client and round, and at the end two more: the last scores, and which model is best.
    kinds = [kind for _, kind, _ in trial.grid.log]
    assert kinds.count("hello") == kinds.count("join") == 6
    assert kinds.count("round") == 3 + 6 * (ROUNDS - 1) + 6 + 6  # in round 1, those who are drawn only
    trial.compare(expected)
    assert (tmp_path / "out" / "relations.npz").exists() == bool(expected.history.relations)
    if expected.history.relations:
        with np.load(tmp_path / "out" / "relations.npz") as file:
            for got, wanted in zip(file["relation"], expected.history.relations, strict=True):
                torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-5, atol=1e-5)
    for key, scores in summary.clients.scores.items():
        assert scores == pytest.approx(expected.history.test(key).tolist(), abs=1e-5)
