"""What a server that turned against its sites learns from them, and what a site that lies does to the others."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kinfed import __version__
from kinfed.flower import messages, plan
from kinfed.flower.messages import Message
from kinfed.flower.site import Site
from kinfed.flower.site_reading import Reading
from kinfed.methods import METHODS

AGREED = {
    "targets": ["sick"],
    "inputs": [["age", "number"], ["stay", "number"]],
    "classes": ["0", "1"],
    "counts": False,
}


@pytest.fixture
def hospital(tmp_path):
    """Makes a site of so many rows, and a list of what its operator is told."""

    def make(rows=90, **reading):
        draw, said = np.random.default_rng(1), []
        cells = zip(draw.normal(60, 9, rows), draw.normal(5, 2, rows), draw.integers(0, 2, rows), strict=True)
        lines = [f"{age:.4f},{stay:.4f},{sick}" for age, stay, sick in cells]
        (tmp_path / "west.csv").write_text("\n".join(["age,stay,sick", *lines]) + "\n")
        site = Site("west", tmp_path / "west.csv", tmp_path, "cpu", Reading("sick", **reading), report=said.append)
        return site, said

    return make


def describe(site, split=None, seed=0, **agreed):
    words = {"agreed": AGREED | agreed, "split": split or {}, "seed": seed}
    return site.reply("describe", Message(words, {})).words


def invite(site, experiment="e", **raw):
    """The site's answer to a server that asks it to join with this plan."""
    planned = plan.resolve({"rounds": 1, "method": "fedavg", "model": "linear", **raw})
    own = {"kind": "number", "mean": 0.0, "deviation": 1.0, "median": 0.0, "missing": 0}
    inputs = [own | {"name": name} for name in ("age", "stay")]
    described = {"client": "", "inputs": inputs, "targets": [], "clients": {}}
    model = planned.model((2,), 2)
    words = {
        "experiment": experiment,
        "kinfed": __version__,
        "table": {key: value for key, value in planned.table.items() if key != "flower"},
        "agreed": AGREED,
        "description": described,
        "shape": [2],
        "task": {"name": "Classification", "classes": 2},
        "outputs": 2,
        "layout": messages.layout_digest(model.layout),
        "accepted": -1,
    }
    return site.reply("join", Message(words, {"theta": model.theta})).words


def test_a_server_cannot_compute_rows_from_the_differences_of_descriptions(hospital):
    """Each seed draws other training rows, so that as many descriptions as rows would give every cell."""
    site, said = hospital()
    replies = [describe(site, seed=seed) for seed in range(120)]
    assert "refused" not in replies[0]
    assert all("refused" in reply for reply in replies[1:])
    assert replies[1]["refused"].startswith("client west: it answers for one split and seed of its file")
    assert "has answered for seed 0; use that in every run" in replies[1]["refused"]
    assert said[-1] == replies[-1]["refused"]
    assert "split {" in describe(site, {"test": 0.3})["refused"]
    assert describe(site) == replies[0]  # the same again, as for another run of one plan


def test_neither_other_classes_nor_a_new_experiment_draw_other_rows(hospital):
    site, _ = hospital()
    assert "refused" not in describe(site)
    assert "other rows of the same" in describe(site, classes=["1"])["refused"]
    assert "refused" not in invite(site)
    assert "refused" not in invite(site, "another")
    assert "has answered for seed 0" in invite(site, "third", seed=1)["refused"]


def test_another_content_of_the_file_is_answered_for_anew(hospital, tmp_path):
    site, _ = hospital()
    describe(site)
    with (tmp_path / "west.csv").open("a") as file:
        file.write("50,5,1\n")
    assert "refused" not in describe(site, seed=1)
    assert "refused" in describe(site, seed=2)
    (tmp_path / "west.draws.json").write_text("[1")
    assert "west.draws.json is not what this site wrote" in describe(site, seed=1)["refused"]


@pytest.mark.parametrize(
    ("raw", "rows", "why"),
    [
        ({"training": {"batch": 1, "steps": 1}}, 90, "a step of training takes 1 row"),
        ({"training": {"batch": 7}}, 90, "a step of training takes 7 rows"),
        ({"federation": {"split": {"test": 0.8, "validation": 0.15}}}, 90, "it has 4 training rows"),
        ({"method": "fedaghn"}, 60, "the method takes feedback from"),
        ({"method": {"name": "per-fedavg", "batch": 2}}, 90, "a step of training takes 2 rows"),
    ],
)
def test_gradients_of_few_rows_leave_only_if_the_operator_says_so(hospital, raw, rows, why):
    site, said = hospital(rows)
    refused = invite(site, **raw)["refused"]
    assert why in refused
    assert refused.count("\n") == 0
    assert said == [refused]
    willing, _ = hospital(rows, few_rows=True)
    assert "refused" not in invite(willing, **raw)


@pytest.mark.parametrize("name", METHODS)
def test_no_sites_model_lies_in_the_folder_that_newcomers_are_given(trial, name, tmp_path, monkeypatch):
    """Nothing in any file of the run's folder is what a site uploaded in the last round."""
    made, uploads, train = trial(name, rounds=2), [], Site._train

    def watched(self, message, simulation, state, round):
        new = train(self, message, simulation, state, round)
        if round == 1:
            uploads.extend(t.flatten() for key, t in new.reply.arrays.items() if t.numel() > 10)
        return new

    monkeypatch.setattr(Site, "_train", watched)
    made.serve()
    assert uploads or name == "local"
    for path in (tmp_path / "out").rglob("*.safetensors"):
        for key, values in load_file(path).items():
            flat = values.flatten()
            for upload in uploads:
                rows = flat.unfold(0, len(upload), len(upload)) if len(flat) >= len(upload) else []
                assert not any(torch.allclose(row.to(upload), upload, atol=1e-5) for row in rows), key
    if name in ("fedamp", "pfedla", "pfedgraph", "fedaghn", "cfl", "pfedhn"):
        assert not (tmp_path / "out" / "state.safetensors").exists()
        assert any("wrote no state.safetensors" in line for line in made.lines)
