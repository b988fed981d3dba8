"""kinfed's app as any Flower deployment runs it: the plan in the run's config, names and files in the nodes'."""

import json
import tomllib

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

import numpy as np
from flwr.app import Context, RecordDict

from kinfed import UsageError
from kinfed.cli import main
from kinfed_flower.programs import server_app, site_app

PLAN = """
rounds = 2
method = "fedaghn"
model = { name = "mlp", hidden = [4] }
[flower]
clients = 6
classes = 3
beside = []
"""


@pytest.fixture
def written(tmp_path):
    """The config of the app that the command writes."""
    (tmp_path / "plan.toml").write_text(PLAN)
    command = ["flower", "app", str(tmp_path / "app"), str(tmp_path / "plan.toml"), "rounds=3", "--target", "dead"]
    assert main(command) == 0
    table = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert sorted(path.name for path in (tmp_path / "app").iterdir()) == ["pyproject.toml"]
    assert table["tool"]["flwr"]["app"]["components"]["clientapp"] == "kinfed_flower.programs.site_app:app"
    return table["tool"]["flwr"]["app"]["config"]


def test_the_plan_travels_in_the_apps_config(written):
    plan = json.loads(written["plan"])
    assert plan["rounds"] == 3
    assert plan["flower"]["clients"] == 6
    assert json.loads(written["reading"])["target"] == "dead"


def test_nodes_of_a_simulation_are_the_files_of_a_folder(written, trial, tmp_path, examples, monkeypatch):
    """The plan, as six nodes with numbers alone run it: the same models as a simulation's."""
    trial = trial("fedaghn", rounds=2)
    (folder := tmp_path / "files").mkdir()
    for name, arrays in examples.items():
        np.savez(folder / f"{name}.npz", **arrays)
    run = {"data": str(folder), "reading": json.dumps({"few_rows": True})}
    own = [{"partition-id": i, "state-dir": str(tmp_path / "sites" / name)} for i, name in enumerate(examples)]
    trial.grid.sites = dict(
        enumerate(({"client-id": name, **one} for name, one in zip(examples, own, strict=True)), 101)
    )
    real = site_app.app

    def asked(message, context):
        bare = {key: value for key, value in context.node_config.items() if key != "client-id"}
        return real(message, Context(1, context.node_id, bare, RecordDict(), run))

    monkeypatch.setattr(site_app, "app", asked)
    context = Context(7, 0, {}, RecordDict(), {"plan": json.dumps(trial.planned.table), "out": str(tmp_path / "out")})
    server_app.main(trial.grid, context)
    trial.compare(trial.simulate())
    assert json.loads(context.state["summary"]["json"])["rounds"] == 2
    assert (tmp_path / "out" / "summary.json").exists()
    own = {site: (tmp_path / "sites" / site / site).stat().st_mode & 0o077 for site in examples}
    assert own == dict.fromkeys(examples, 0)  # no other user of the machine can look into them


@pytest.mark.parametrize(
    ("node", "run", "why"),
    [
        ({}, {}, "does not say where its examples are"),
        ({"partition-id": 1}, {"data": "."}, "node 1 of the simulation has no file"),
        ({"data": "a b.csv"}, {}, "a site's name consists of letters"),
    ],
)
def test_a_node_that_does_not_say_enough_is_refused_in_a_line(node, run, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=why):
        site_app._site(node, run)
