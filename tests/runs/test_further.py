"""A finished run goes on: to the bit as if it had not ended, and with clients that have joined."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch
from kinds import KINDS
from torch import nn

from kinfed.cli.program import execute
from kinfed.core import trees
from kinfed.core.engine import Participation
from kinfed.core.optimiser import SGD
from kinfed.core.training import Training
from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.methods import METHODS
from kinfed.methods.parts.graph_hypernetwork import MLP
from kinfed.runs.config import experiment as config
from kinfed.runs.fit import fit
from kinfed.runs.further_rounds import further, link
from kinfed.runs.launch import launch
from kinfed.runs.results import save
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.tested_examples import Tested
from kinfed.simulation.execution import Execution

NO_STATISTICS = {"pfedbayes"}
SETTINGS = {
    "panacea": {"encoder": MLP()},  # the clients have no graph
    "pfedla": {"embedding": 3, "hidden": 5},
    "pfedhn": {"hidden": 5},
}


def federation(clients=5):
    draw = torch.Generator().manual_seed(3)
    client = torch.arange(clients * 24) // 24
    x = torch.randn(len(client), 4, generator=draw)
    y = ((x[:, 0] * (1 - 2 * (client % 2)) + x[:, 1]) > 0).long()
    return Federation.from_arrays(x, y, [f"c{i}" for i in client.tolist()])


def module(name):
    torch.manual_seed(1)
    norm = nn.LayerNorm(4) if name in NO_STATISTICS else nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(), nn.Linear(4, 2))


def train(name, rounds, folder, data=None, **settings):
    return fit(
        METHODS[name](**SETTINGS.get(name, {})),
        data or federation(),
        module(name),
        rounds=rounds,
        training=Training(epochs=1, batch=8, optimiser=SGD(0.1)),
        execution=Execution("loop", 1),
        folder=folder,
        **settings,
    )


def finished(name, folder, **settings):
    run = train(name, 2, folder / "begun", **settings)
    save(run, folder / "begun")
    RunFolder(folder / "on").create()
    link(RunFolder(folder / "begun"), RunFolder(folder / "on"))
    return hashes(folder / "begun")


def hashes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def same(a, b):
    a, b = trees.pack(a), trees.pack(b)
    assert a.keys() == b.keys()
    assert not [key for key in a if not torch.equal(torch.nan_to_num(a[key]), torch.nan_to_num(b[key]))]


@pytest.mark.parametrize("name", KINDS)
def test_two_rounds_and_two_more_are_four(name, tmp_path):
    participation = Participation(0.6, late=0.3, joins=3)
    before = finished(name, tmp_path, participation=participation)
    on = train(name, 4, tmp_path / "on", participation=participation)
    once = train(name, 4, None, participation=participation)
    assert on.final is not None
    assert once.final is not None
    same(on.final.progress.server, once.final.progress.server)
    same(on.final.progress.state, once.final.progress.state)
    same(on.history.models, once.history.models)
    for a, b in zip(on.history.scores, once.history.scores, strict=True):
        same({"/".join(k): v for k, v in a.items()}, {"/".join(k): v for k, v in b.items()})
    assert (on.history.chosen, on.history.cost.bytes_up) == (once.history.chosen, once.history.cost.bytes_up)
    assert hashes(tmp_path / "begun") == before


@pytest.mark.parametrize("name", KINDS)
def test_clients_join_a_finished_run(name, tmp_path):
    """Those who were there keep what the server and they themselves know; newcomers are as `add_clients` has them."""
    finished(name, tmp_path, data=federation(4))
    run = train(name, 4, tmp_path / "on", data=federation(6))
    assert run.history.rounds == [2, 3]  # scores begin anew
    assert len(run.history.test(run.history.chosen)) == 6
    saved = RunFolder(tmp_path / "on")
    assert saved.read_origin()["clients"] == ["c0", "c1", "c2", "c3"]


def test_private_states_stay_with_their_clients_where_others_come_before(tmp_path):
    four = federation(4)
    begun = train("local", 2, tmp_path / "begun", data=four)
    save(begun, tmp_path / "begun")
    names = ("c0", "c1", "c2", "c3")
    rows = {split: [four.rows[split][i] for i in (3, 0, 1, 2)] for split in four.rows}
    rows = {split: [rows[split][0], rows[split][0], *rows[split][1:]] for split in rows}
    data = Federation(four.x, four.y, rows, four.task, names=(names[3], "a newcomer", *names[:3]))
    RunFolder(tmp_path / "on").create()
    link(RunFolder(tmp_path / "begun"), RunFolder(tmp_path / "on"))
    run = train("local", 3, tmp_path / "on", data=data)
    once = train("local", 3, None, data=four)
    mine, theirs = (one.final.progress.state[1].theta for one in (run, once))
    assert torch.equal(mine[[2, 3, 4, 0]], theirs)  # a client's batches are drawn by its name
    assert not torch.equal(mine[1], theirs[3])  # it has the same examples, but has trained for one round


def table(path, clients, seed=0):
    rng = np.random.default_rng(seed)
    lines = ["who,size,kind,buys"]
    for client in clients:
        for _ in range(30):
            size, kind = rng.normal(5, 2), rng.choice(["red", "blue"])
            lines.append(f"{client},{size:.4f},{kind},{'yes' if size + (kind == 'red') > 5 else 'no'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def launched(tmp_path, *overrides):
    data = [f"federation.dataset.{k}={v}" for k, v in {"client": "who", "target": "buys"}.items()]
    path = table(tmp_path / "four.csv", "abcd")
    data += ["federation.dataset.name=csv", f"federation.dataset.path={path}", "rounds=2", "model.hidden=[4]"]
    experiment = config.resolve(config.read("fedavg", [*data, *overrides]))
    return launch(experiment, tmp_path / "run", Execution("loop", 1))


def test_a_table_with_more_clients_keeps_the_scale_of_the_first(tmp_path):
    first = launched(tmp_path)
    before = hashes(tmp_path / "run")
    more = table(tmp_path / "six.csv", "abcdef", seed=5)
    experiment, former = further(tmp_path / "run", [f"federation.dataset.path={more}", "rounds=3"])
    summary = launch(experiment, tmp_path / "on", Execution("loop", 1), former=former)
    assert (summary.rounds, summary.data.clients) == (5, 6)
    assert summary.data.columns == first.data.columns  # not those of the other rows
    assert summary.provenance.former["joined"] == ["e", "f"]
    assert not summary.provenance.former["scores"]
    assert hashes(tmp_path / "run") == before
    again, _ = further(tmp_path / "on")  # by default as many as were added
    assert again.rounds.count == 8


def test_the_same_table_of_numbers_is_no_other_data(tmp_path):
    first = launched(tmp_path, "federation.dataset.target=size")  # whose mean is no number of float32
    experiment, former = further(tmp_path / "run", ["rounds=1"])
    summary = launch(experiment, tmp_path / "on", Execution("loop", 1), former=former)
    assert summary.provenance.former["scores"]
    assert summary.data.columns == first.data.columns


def test_seeds_and_runs_beside_go_on_too(tmp_path):
    launched(tmp_path, "seeds=2")
    experiment, former = further(tmp_path / "run", ["rounds=1"])
    summary = launch(experiment, tmp_path / "on", Execution("loop", 1), beside=("local",), former=former)
    assert summary.rounds == 3
    for seed in (0, 1):
        origin = RunFolder(tmp_path / "on" / f"seed-{seed}").read_summary().provenance.former
        assert origin == {"run": str(tmp_path / "run" / f"seed-{seed}"), "rounds": 2, "joined": [], "scores": True}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.name=local"], "was trained by fedavg and goes on with it; got local"),
        (["seed=4"], "has no run with seed 4 that could go on"),
        (["rounds=0"], "rounds must be a whole number, at least 1"),
    ],
)
def test_what_cannot_go_on_is_refused(overrides, message, tmp_path):
    launched(tmp_path)
    with pytest.raises(UsageError, match=message):
        further(tmp_path / "run", overrides)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda lines: [line for line in lines if line[0] != "d"],
            "1 of 4 clients has left the data .*: d; a run goes on",
        ),
        (
            lambda lines: [re.sub(",(kind|red|blue),", ",", line) for line in lines],
            "column 'kind', .* is missing or empty",
        ),
        (lambda lines: [*lines, *["z,1,red,perhaps"] * 20], "'perhaps' in column 'buys' is none of the 2 classes"),
        (
            lambda lines: [re.sub("(red|blue)", "2", line) for line in lines],
            "column 'kind' is a category in the existing models",
        ),
        (lambda lines: [re.sub("(yes|no)$", "0.5", line) for line in lines], "'buys' has classes in the existing"),
    ],
)
def test_other_data_that_do_not_fit_are_refused_in_one_line(change, message, tmp_path):
    launched(tmp_path)
    path = tmp_path / "other.csv"
    path.write_text("\n".join(change((tmp_path / "four.csv").read_text().splitlines())) + "\n")
    experiment, former = further(tmp_path / "run", [f"federation.dataset.path={path}"])
    with pytest.raises(UsageError, match=message):
        launch(experiment, tmp_path / "on", Execution("loop", 1), former=former)
    assert not (tmp_path / "on").exists()


def test_a_run_without_its_state_says_so(tmp_path):
    launched(tmp_path)
    (tmp_path / "run" / "state.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no state.safetensors, with which a finished run goes on"):
        further(tmp_path / "run")
    (tmp_path / "run" / "state.safetensors").write_bytes(b"no state")
    with pytest.raises(UsageError, match="is not the state of this run"):
        further(tmp_path / "run")


def test_models_and_a_state_of_another_run_are_refused(tmp_path):
    launched(tmp_path)
    (tmp_path / "run").rename(tmp_path / "first")
    launched(tmp_path, "seed=1")
    mine = (tmp_path / "run" / "state.safetensors").read_bytes()
    (tmp_path / "first" / "state.safetensors").replace(tmp_path / "run" / "state.safetensors")
    with pytest.raises(UsageError, match=r"state\.safetensors is of another run than"):
        further(tmp_path / "run")
    (tmp_path / "run" / "state.safetensors").write_bytes(mine)
    (tmp_path / "first" / "models.safetensors").replace(tmp_path / "run" / "models.safetensors")
    with pytest.raises(UsageError, match=r"models\.safetensors is of another run than"):
        further(tmp_path / "run")
    (tmp_path / "run" / "models.safetensors").write_bytes(b"broken")
    with pytest.raises(UsageError, match=r"models\.safetensors cannot be read \(.*; copy the whole folder again"):
        further(tmp_path / "run")


def test_states_that_the_server_knows_are_kept_once(tmp_path):
    finished("fedamp", tmp_path)
    size = (tmp_path / "begun" / "state.safetensors").stat().st_size
    models = (tmp_path / "begun" / "models.safetensors").stat().st_size
    assert size < 2 * models + 8192
    assert json.loads((tmp_path / "on" / "from.json").read_text())["rounds"] == 2


def test_the_command_needs_no_source_and_takes_settings_anywhere(tmp_path, capsys):
    launched(tmp_path)
    on = ["run", "--from", str(tmp_path / "run")]
    assert execute([*on, "--out", str(tmp_path / "a"), "--beside", "none", "rounds=1"]) == 0
    assert execute([*on, "rounds=1", "training.epochs=2", "--out", str(tmp_path / "b"), "--beside", "none"]) == 0
    assert execute([*on, "--out", str(tmp_path / "c"), "--beside", "none"]) == 0
    rounds = [RunFolder(tmp_path / name).read_summary().rounds for name in "abc"]
    assert rounds == [3, 3, 4]
    shown = " ".join(capsys.readouterr().err.split())
    assert "goes on after 2 rounds of" in shown
    assert execute([*on, "fedavg"]) == 2
    assert "--from goes on with the run's own method and config; leave out fedavg" in capsys.readouterr().err
    assert execute([*on, "--method", "fedavg"]) == 2
    assert "leave out --method, or --from" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        execute(["run"])
    assert execute(["run", "--quiet", "local", "rounds=1", "--out", str(tmp_path / "d")]) == 0  # options may come first


def test_models_that_were_trained_on_the_test_rows_too_score_none_of_them(tmp_path, capsys):
    """A choice ends with models trained on all rows. A run that goes on from it begins with its server's state."""
    draw = np.random.default_rng(0)
    lines = ["client,a,b,y"]
    for i, (a, b, noise) in enumerate(draw.normal(size=(240, 3))):
        lines.append(f"k{i % 6},{a:.4f},{b:.4f},{a * (i % 6) + noise:.4f}")
    table = tmp_path / "table.csv"
    table.write_text("\n".join(lines))
    command = ["run", str(table), "--client", "client", "--target", "y", "rounds=2", "--budget", "40", "--quiet"]
    assert execute([*command, "--out", str(tmp_path / "chosen")]) == 0
    chosen = RunFolder(tmp_path / "chosen").read_summary()
    assert chosen.provenance.refit
    assert execute(["run", "--from", chosen.out, "rounds=2", "--quiet", "--out", str(tmp_path / "on")]) == 0
    on = RunFolder(tmp_path / "on")
    after, tested = on.read_summary(), Tested.read(on)
    assert (after.provenance.refit, after.provenance.former["scores"]) == (False, False)
    for name, scores in tested.examples.items():
        assert np.mean(scores) == pytest.approx(tested.means[name], rel=1e-4)
    capsys.readouterr()
