"""A site decides for itself: what no message of the server's can change."""

import csv
import json

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'kinfed[flower]'")

from kinfed import RunError, UsageError
from kinfed.cli import main
from kinfed.runs.config import experiment
from kinfed_flower import plan
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site import agreements
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.site.site_reading import Reading
from kinfed_flower.wire.messages import Message

PLAN = """
rounds = 3
method = "fedavg"
model = { name = "mlp", hidden = [4] }
training = { epochs = 2, batch = 8 }
[flower]
clients = 1
beside = []
patience = 1.0
"""


@pytest.fixture
def asked(tmp_path):
    """Runs a plan at one site with a policy; returns the summary, or raises with what its operator was told."""
    lines = [f"{i % 7},{i * 3 % 5},{'yes' if i % 7 > 3 else 'no'}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["p,q,y", *lines]) + "\n")
    (tmp_path / "plan.toml").write_text(PLAN)
    runs = []

    def go(rules, *overrides):
        told = []
        site = Site("a", tmp_path / "a.csv", tmp_path / "site", "cpu", Reading(), (), told.append, rules)
        planned = plan.resolve(experiment.read(str(tmp_path / "plan.toml"), list(overrides)))
        runs.append(overrides)
        try:
            return serve(planned, Here([site]), tmp_path / f"out-{len(runs)}", log=lambda line: None, poll=0.0)
        except RunError:
            raise RunError(told[-1]) from None

    return go


def test_by_default_only_plans_run_that_the_operator_agreed_to(asked, tmp_path, capsys):
    with pytest.raises(RunError, match="crafted ones can read rows"):
        asked(Policy())  # waits until its patience is over
    command = ["flower", "agree", "a", str(tmp_path / "plan.toml"), "--state", str(tmp_path / "site")]
    command += ["--data", str(tmp_path / "a.csv"), "--device", "cpu"]
    assert main(command) == main(command) == 0
    assert "what leaves this site for the server" in " ".join(capsys.readouterr().err.split())
    assert len(json.loads((tmp_path / "site" / f"a.{agreements.AGREED}").read_text())) == 1
    assert asked(Policy(), "flower.deadline=5.0").rounds == 3  # that is the server's own affair
    with pytest.raises(RunError, match="crafted ones can read rows"):
        asked(Policy(), "training.epochs=3")
    assert asked(Policy(runs="any"), "training.epochs=3").rounds == 3
    joined = max((tmp_path / "site" / "a").glob("*/join.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    site = Site("a", tmp_path / "a.csv", tmp_path / "site", "cpu", Reading(), policy=Policy())
    later = site.reply("round", Message({"experiment": joined.parent.name, "layout": ""}, {})).fields["refused"]
    assert later.startswith("its operator has not agreed to this plan")  # though it had joined it before
    with pytest.raises(RunError, match="crafted ones can read rows"):
        asked(Policy(), "seed=1")


@pytest.mark.parametrize(
    ("rules", "override", "why"),
    [
        ({"methods": ["fedaghn"]}, "rounds=3", "allows the methods fedaghn, not fedavg"),
        ({"models": ["linear"]}, "rounds=3", "allows the models linear, not mlp"),
        ({"rounds": 2}, "rounds=3", "allows 2 rounds, and the plan has 3"),
        ({}, "rounds=1000000", "allows 1,000 rounds, and the plan has 1,000,000"),
        ({"epochs": 5}, "training.epochs=6", "allows 5 epochs, and the plan has 6"),
        ({"parameters": 20}, "rounds=3", "allows 20 parameters, and the plan has"),
        ({"training_rows": 60}, "rounds=3", "has 42 training rows, and its sums reveal single rows"),
        ({"step_rows": 9}, "rounds=3", "a step of training takes 8 rows"),
    ],
)
def test_limits_hold_whatever_a_plan_asks(asked, rules, override, why):
    with pytest.raises(RunError, match=why):
        asked(Policy(runs="any", **rules), override)


def test_a_disk_is_not_filled_with_experiments(asked):
    assert asked(Policy(runs="any", experiments=1)).rounds == 3
    with pytest.raises(RunError, match="keeps 1 experiments; its operator may delete old ones"):
        asked(Policy(runs="any", experiments=1))


def test_a_full_folder_takes_part_in_nothing_more(asked, tmp_path):
    (tmp_path / "site" / "a").mkdir(parents=True)
    (tmp_path / "site" / "a" / "old").write_bytes(b"0" * 2_000_000)
    with pytest.raises(RunError, match="its policy allows 1 MB, and its folder takes 2"):
        asked(Policy(runs="any", disk=1))


def test_only_scores_that_the_policy_names_leave(asked, tmp_path):
    assert asked(Policy(runs="any", scores=["loss", "accuracy"]), "select_by=loss").rounds == 3
    rows = list(csv.DictReader((tmp_path / "out-1" / "history.csv").open()))
    assert {row["metric"] for row in rows} >= {"loss", "accuracy"}
    known = {row["metric"] for row in rows if row["value"] not in ("", "nan")}
    assert known == {"loss", "accuracy"}


def test_statistics_are_of_as_many_rows_as_the_policy_asks(tmp_path):
    """Of 60 rows: no category of fewer than 20, and no value that stands for fewer."""
    lines = [f"{i % 7},{'rare' if i < 12 else 'often'},{i % 2}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["p,q,y", *lines]) + "\n")
    agreed = {"targets": ["y"], "inputs": [["p", "number"], ["q", "category"]], "classes": ["0", "1"], "counts": False}
    words = {"agreed": agreed, "split": {}, "seed": 0}
    told = {}
    for rows in (5, 20):
        rules = Policy(runs="any", statistic_rows=rows)
        site = Site("a", tmp_path / "a.csv", tmp_path / "site", "cpu", Reading(), (), print, rules)
        told[rows] = site.reply("describe", Message(words, {})).fields["statistics"]
    assert set(told[5]["q"]["counts"]) == {"rare", "often"}
    assert set(told[20]["q"]["counts"]) == {"often"}
    assert told[20]["q"]["others"] == told[5]["q"]["counts"]["rare"]
    assert all(count >= 20 for _, count in told[20]["p"]["near"])
    assert sum(count for _, count in told[20]["p"]["near"]) == told[5]["p"]["present"]
    strict = Policy(runs="any", statistic_rows=1000)
    site = Site("a", tmp_path / "a.csv", tmp_path / "site", "cpu", Reading(), (), print, strict)
    assert site.reply("describe", Message(words, {})).fields["statistics"]["p"]["present"] == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("run = 'any'", "unknown key 'policy.run'; did you mean 'runs'"),
        ("runs = 'all'", "runs must be agreed or any; got 'all'"),
        ("rounds = 0", "rounds"),
        ("rounds = ", "cannot be read as a policy"),
    ],
)
def test_a_policy_with_a_mistake_is_refused(text, why, tmp_path):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(UsageError, match=why):
        Policy.read(tmp_path / "site.toml")
