from copy import deepcopy

import pytest
import torch

from kinfed import load_model
from kinfed.errors import UsageError
from kinfed.runs.run_folder import RunFolder
from kinfed_papers.analyses.defence import defence

BACKDOOR = ("attack.name=backdoor", "attack.share=0.25")


def right(network, federation, client, split):
    """The share of a client's examples of a split that a network gets right."""
    rows = federation.rows[split][client]
    with torch.no_grad():
        return float((network(federation.x[rows]).argmax(1) == federation.y[rows]).double().mean())


def test_kept_models_score_as_in_their_runs_and_tuned_ones_differ_in_the_classifier_alone(study, tmp_path, figures):
    made = study("fedavg", *BACKDOOR, "training.batch=1000")  # whole passes: no draw of batches to agree on
    found = defence(made, ["fedavg", "local"], epochs=30)
    assert [row["method"] for row in found.rows] == ["fedavg", "local"]
    experiment = made.experiment()
    (clean,) = made.federations()
    attackers = experiment.attack.attackers(clean.names, 0)
    federation = experiment.attack.corrupt(clean, attackers, 0)
    first = experiment.module(clean, 0)
    for row in found.rows:
        folder = tmp_path / "runs" / row["method"]
        summary = RunFolder(folder).read_summary()
        scores = summary.honest_scores[summary.selection.chosen]
        assert row["accuracy (%)"] == pytest.approx(100 * scores["mean"], rel=1e-5)
        assert row["success of the backdoor (%)"] == pytest.approx(100 * scores["success"], rel=1e-5)
        tuned = {"test": [], "triggered": []}
        for i in (~attackers).nonzero().squeeze(1).tolist():
            network = deepcopy(load_model(folder, position=i))
            *body, head = [m for m in network.modules() if isinstance(m, torch.nn.Linear)]
            *_, start = [m for m in first.modules() if isinstance(m, torch.nn.Linear)]
            head.load_state_dict(start.state_dict())
            for parameter in (p for layer in body for p in layer.parameters()):
                parameter.requires_grad_(False)
            rows = federation.rows["train"][i]
            descent = torch.optim.SGD(head.parameters(), lr=experiment.training.optimiser.lr)
            for _ in range(30):
                descent.zero_grad()
                torch.nn.functional.cross_entropy(network(federation.x[rows]), federation.y[rows]).backward()
                descent.step()
            for split, each in tuned.items():
                each.append(100 * right(network, federation, i, split))
        assert row["tuned"] == pytest.approx(sum(tuned["test"]) / len(tuned["test"]), rel=1e-5)
        assert row["success, tuned"] == pytest.approx(sum(tuned["triggered"]) / len(tuned["triggered"]), rel=1e-5)
    labels = [label.get_text() for label in figures[-1].axes[0].get_yticklabels()]
    assert labels == ["fedavg", "fedavg, tuned", "local", "local, tuned"]


def test_without_an_attack_it_is_the_backdoor_and_another_is_refused(study, tmp_path):
    defence(study("local", "rounds=1"), ["local"], epochs=1)
    assert RunFolder(tmp_path / "runs" / "local").read_summary().attack["name"] == "backdoor"
    with pytest.raises(UsageError, match="Simple-Tuning is for backdoors, but the experiment has another attack"):
        defence(study("local", "attack.name=noise"), ["local"])
    with pytest.raises(UsageError, match=r"analysis\.epochs must be at least 1; got 0"):
        defence(study("local"), ["local"], epochs=0)
