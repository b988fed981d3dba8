"""Run folders: what a run that cannot begin leaves behind."""

import io
import json
import shutil
from functools import partial
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kinfed import load_model
from kinfed.cli import main
from kinfed.core import checkpoint
from kinfed.errors import RunError, UsageError
from kinfed.runs import results
from kinfed.runs.config import experiment as config
from kinfed.runs.fit import fit
from kinfed.runs.launch import launch, resume
from kinfed.runs.models_file import CHECKSUMS
from kinfed.runs.run_folder import RunFolder
from kinfed.simulation.execution import Execution

SMALL = ["rounds=1", "federation.clients=4", "federation.partition.groups=2", "model=linear"]


@pytest.mark.parametrize("seeds", ["seeds=1", "seeds=2"])
def test_a_request_that_cannot_be_carried_out_leaves_no_folder(tmp_path, seeds):
    refused = config.resolve(config.read("local", ["federation.clients=1500", seeds]))
    with pytest.raises(UsageError, match="too few examples"):
        launch(refused, tmp_path / "a" / "b", Execution())
    assert not (tmp_path / "a" / "b").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("keep me")
    with pytest.raises(UsageError, match="too few examples"):
        launch(refused, tmp_path / "mine", Execution())
    assert (tmp_path / "mine" / "note.txt").read_text() == "keep me"


def test_a_run_that_fails_keeps_its_config(tmp_path):
    diverging = config.resolve(config.read("local", [*SMALL, "training.optimiser.lr=1e38"]))
    with pytest.raises(RunError, match="diverged"):
        launch(diverging, tmp_path / "a", Execution("vmap"))
    assert (tmp_path / "a" / "config.toml").exists()


def test_data_that_cannot_be_read_leave_no_folder(tmp_path):
    (tmp_path / "mnist.npz").write_bytes(b"no archive")
    damaged = config.resolve(config.read("local", ["federation.dataset=mnist"]))
    with pytest.raises(RunError, match=r"mnist\.npz cannot be read"):
        launch(damaged, tmp_path / "a" / "b", data_dir=tmp_path)
    assert not (tmp_path / "a" / "b").exists()


def test_a_saved_run_says_that_its_module_must_be_given(tmp_path):
    experiment = config.resolve(config.read("local", SMALL))
    federation = experiment.federation(None, 0)
    module = experiment.module(federation, 0)
    results.save(fit(experiment.method, federation, module, rounds=1), tmp_path / "mine")
    with pytest.raises(UsageError, match=r"pass the module: kinfed\.Run\.open\(folder, module\)"):
        load_model(tmp_path / "mine", "3")
    assert load_model(tmp_path / "mine", "3", module).training is False


def test_what_a_first_seed_found_is_kept_where_a_later_one_is_refused(tmp_path, monkeypatch):
    experiment = config.resolve(config.read("local", [*SMALL, "seeds=2"]))
    begin = type(experiment).federation

    def refuse(self, data_dir, seed, former=None):
        if seed == 1:
            raise UsageError("no")
        return begin(self, data_dir, seed)

    monkeypatch.setattr(type(experiment), "federation", refuse)
    summary = launch(experiment, tmp_path / "a", Execution("vmap"))
    assert (summary.seeds, summary.warnings) == ([0], ["seed 1 failed: no"])
    assert (tmp_path / "a" / "seed-0" / "summary.json").exists()


def test_what_cannot_be_drawn_or_scored_takes_no_results_away(tmp_path, monkeypatch):
    monkeypatch.setattr("kinfed.plots.charts.accuracy_by_client", lambda *_: 1 / 0)
    monkeypatch.setattr("kinfed.runs.trained_run.TrainedRun.score_examples", lambda *_: {}["rows"])
    experiment = config.resolve(config.read("fedaghn", SMALL))
    with pytest.warns(
        UserWarning, match=r"accuracy-by-client\.png is missing, as it cannot be drawn: .*division by zero"
    ):
        summary = launch(experiment, tmp_path / "a", Execution("vmap"))
    assert [one.partition(" (")[0] for one in summary.warnings] == [
        "single test examples have no scores: unexpected KeyError: 'rows'"
    ]
    assert {path.name for path in (tmp_path / "a").glob("*.png")} == {
        "accuracy-by-round.png",
        "classes.png",
        "relation.png",
    }
    assert load_model(tmp_path / "a", 0).training is False


def test_models_of_several_seeds_are_loaded_from_one_of_them(tmp_path):
    launch(config.resolve(config.read("local", [*SMALL, "seeds=2", "seed=3"])), tmp_path / "a", Execution())
    with pytest.raises(UsageError, match=r"holds a run for each seed; name one, such as .*a/seed-3"):
        load_model(tmp_path / "a", position=0)
    assert load_model(tmp_path / "a" / "seed-3", position=0).training is False


@pytest.fixture
def folder(tmp_path):
    launch(config.resolve(config.read("local", SMALL)), tmp_path / "a", Execution("loop"))
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([], "it is not a table but"),
        ({}, "it has no 'method'"),
        ({"method": 3}, "its 'method' is 3"),
        ("[" * 9999, "cannot be read"),
    ],
)
def test_a_summary_that_no_run_wrote_is_told(folder, said, why):
    (folder / "summary.json").write_text(said if isinstance(said, str) else json.dumps(said))
    with pytest.raises(UsageError, match=rf"summary\.json .*{why}"):
        load_model(folder, position=0)


def test_a_finished_run_with_a_summary_that_no_run_wrote_is_told(folder, capsys):
    (folder / "summary.json").write_text('{"method": "local"}')
    assert main(["resume", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.strip() == f"kinfed: {folder}/summary.json is not a run's summary: it has no 'rounds'"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t[:1].clone(), r"not floating-point \["),
        (lambda t: t.int(), r"is torch\.int32 \["),
    ],
)
def test_models_that_do_not_fit_are_told_in_one_line(folder, change, why):
    arrays = load_file(folder / "models.safetensors")
    with safe_open(folder / "models.safetensors", "pt") as file:
        about = file.metadata()
    del about[CHECKSUMS]
    save_file({name: change(t) for name, t in arrays.items()}, folder / "models.safetensors", about)
    with pytest.raises(UsageError, match=f"the models do not fit this module or cannot be read .*{why}") as found:
        load_model(folder, position=0)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("module", ["net", torch.nn.Linear])
def test_a_module_that_is_none_is_told(folder, module):
    with pytest.raises(UsageError, match=r"module must be an nn.Module, such as torch.nn.Linear\(8, 2\); got"):
        load_model(folder, module=module, position=0)


def test_a_checkpoint_of_another_content_is_told_in_one_line(tmp_path):
    experiment = config.resolve(config.read("fedaghn", [*SMALL, "rounds=2"]))
    with (
        mock.patch("kinfed.runs.launch.write_run", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        launch(experiment, tmp_path / "a", Execution("loop", checkpoint_seconds=0))
    path = tmp_path / "a" / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        said = file.metadata()
    save_file({name: t[:1].clone() if t.ndim else t for name, t in load_file(path).items()}, path, said)
    with pytest.raises(
        RunError, match=r"a/checkpoint.safetensors is not a checkpoint of this version .*; delete it to start over"
    ) as found:
        resume(tmp_path / "a", Execution("loop"))
    assert "\n" not in str(found.value)


def test_names_of_clients_do_not_hang_on_the_systems_encoding(tmp_path, monkeypatch):
    rows = [f"{name},{i % 5},{i % 2}" for name in ("Köln ☃", "Łódź") for i in range(12)]
    (tmp_path / "Städte.csv").write_text("\n".join(["who,x,y", *rows]), encoding="utf-8")
    monkeypatch.setattr(io, "text_encoding", lambda encoding, level=2: encoding or "ascii")
    table = {"name": "csv", "path": str(tmp_path / "Städte.csv"), "client": "who", "target": "y"}
    federation = {"dataset": table, "partition": "natural"}
    asked = {"rounds": 1, "method": "fedaghn", "model": "linear", "federation": federation}
    launch(config.resolve(asked), tmp_path / "a", Execution("loop"))
    assert load_model(tmp_path / "a", "Köln ☃").training is False
    assert "Łódź" in (tmp_path / "a" / "history.csv").read_text(encoding="utf-8")


OLD = {"method": "fedaghn", "rounds": 2, "seed": 0, "executor": "fused"}  # of what a run wrote before its records


def test_a_folder_of_an_older_version_is_refused_in_one_line(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    table = config.resolve(config.read("fedaghn", [])).table
    config.write(table | {"method": table["method"] | {"sign": "descent"}}, folder.config)
    with pytest.raises(UsageError, match=r"not a config that this version of kinfed can run \(unknown key 'method.si"):
        resume(tmp_path)
    folder.summary.write_text(json.dumps(OLD))
    for ask in (resume, partial(load_model, position=0)):
        with pytest.raises(UsageError, match=r"summary\.json was written by an older version of kinfed, .*; run again"):
            ask(tmp_path)
    # A checkpoint whose history has another form.
    new, old = tmp_path / "new", tmp_path / "old"
    experiment = config.resolve(config.read("fedavg", ["rounds=2", "federation.clients=4", "model=linear"]))

    def stop(history, rounds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(experiment, new, Execution("loop", checkpoint_seconds=0, progress=stop))
    shutil.copytree(new, old)
    path = RunFolder(old).checkpoint
    with safe_open(path, "pt") as file:
        arrays, words = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    words["history"] = json.dumps(json.loads(words["history"])[:-1])
    checkpoint.write(arrays, path, words)
    with pytest.raises(RunError, match=r"is not a checkpoint of this run and this version of kinfed .* delete it"):
        resume(old)


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_finished_run_whose_config_was_edited_is_not_taken_for_one_with_these_settings(seeds, tmp_path):
    experiment = config.resolve(config.read("local", [*SMALL, f"seeds={seeds}"]))
    launch(experiment, tmp_path / "a")
    assert resume(tmp_path / "a").rounds == 1
    path = tmp_path / "a" / "config.toml"
    path.write_text(path.read_text().replace("rounds = 1\n", "rounds = 2\n"))
    with pytest.raises(UsageError, match=r"has finished with other settings than .*config\.toml"):
        resume(tmp_path / "a")


def test_a_flipped_bit_in_a_file_of_models_is_named(tmp_path):
    experiment = config.resolve(config.read("local", SMALL))
    launch(experiment, tmp_path / "a")
    path = tmp_path / "a" / "models.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    damaged = []
    for client in json.loads((tmp_path / "a" / "summary.json").read_text())["by_client"]["names"]:
        try:
            load_model(tmp_path / "a", client)
        except UsageError as problem:
            damaged.append(str(problem))
    assert len(damaged) == 1
    assert "is not what was written, as its checksum differs" in damaged[0]
