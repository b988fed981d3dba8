"""Run folders: what a run that cannot begin leaves behind."""

import pytest

from kinfed import config, runs
from kinfed.errors import RunError, UsageError
from kinfed.experiment import fit
from kinfed.runs import Machine

SMALL = ["rounds=1", "federation.clients=4", "federation.partition.groups=2", "model=linear"]


@pytest.mark.parametrize("seeds", ["seeds=1", "seeds=2"])
def test_a_request_that_cannot_be_carried_out_leaves_no_folder(tmp_path, seeds):
    refused = config.resolve(config.read("local", ["federation.clients=1500", seeds]))
    with pytest.raises(UsageError, match="too few examples"):
        runs.launch(refused, tmp_path / "a" / "b", Machine())
    assert not (tmp_path / "a" / "b").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("keep me")
    with pytest.raises(UsageError, match="too few examples"):
        runs.launch(refused, tmp_path / "mine", Machine())
    assert (tmp_path / "mine" / "note.txt").read_text() == "keep me"


def test_a_run_that_fails_keeps_its_config(tmp_path):
    diverging = config.resolve(config.read("local", [*SMALL, "training.optimiser.lr=1e38"]))
    with pytest.raises(RunError, match="diverged"):
        runs.launch(diverging, tmp_path / "a", Machine(executor="vmap"))
    assert (tmp_path / "a" / "config.toml").exists()


def test_data_that_cannot_be_read_leave_no_folder(tmp_path):
    (tmp_path / "mnist.npz").write_bytes(b"no archive")
    damaged = config.resolve(config.read("local", ["federation.dataset=mnist"]))
    with pytest.raises(RunError, match=r"mnist\.npz cannot be read"):
        runs.launch(damaged, tmp_path / "a" / "b", Machine(data_dir=tmp_path))
    assert not (tmp_path / "a" / "b").exists()


def test_a_saved_run_says_that_its_module_must_be_given(tmp_path):
    experiment = config.resolve(config.read("local", SMALL))
    federation = experiment.federation(None, 0)
    module = experiment.module(federation, 0)
    runs.save(fit(experiment.method, federation, module, rounds=1), tmp_path / "mine")
    with pytest.raises(UsageError, match=r"pass a module of it: load_model\(folder, client, module\)"):
        runs.load_model(tmp_path / "mine", "3")
    assert runs.load_model(tmp_path / "mine", "3", module).training is False


def test_what_a_first_seed_found_is_kept_where_a_later_one_is_refused(tmp_path, monkeypatch):
    experiment = config.resolve(config.read("local", [*SMALL, "seeds=2"]))
    begin = type(experiment).federation

    def refuse(self, data_dir, seed):
        if seed == 1:
            raise UsageError("no")
        return begin(self, data_dir, seed)

    monkeypatch.setattr(type(experiment), "federation", refuse)
    with pytest.raises(UsageError, match="no"):
        runs.launch(experiment, tmp_path / "a", Machine(executor="vmap"))
    assert (tmp_path / "a" / "seed-0" / "summary.json").exists()


def test_models_of_several_seeds_are_loaded_from_one_of_them(tmp_path):
    runs.launch(config.resolve(config.read("local", [*SMALL, "seeds=2", "seed=3"])), tmp_path / "a", Machine())
    with pytest.raises(UsageError, match=r"holds a run for each seed; name one, such as .*a/seed-3"):
        runs.load_model(tmp_path / "a", 0)
    assert runs.load_model(tmp_path / "a" / "seed-3", 0).training is False
