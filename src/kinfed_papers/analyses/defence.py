"""Defence: a backdoor's success after clients train a new classifier (Panacea, Table V)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kinfed.core.client import Client
from kinfed.core.method import Params
from kinfed.core.model import Model
from kinfed.errors import UsageError
from kinfed.methods.local import Local
from kinfed.plots.drawing import Array, scale_metric
from kinfed.runs.config.experiment import Experiment
from kinfed.runs.run import Run
from kinfed.runs.run_folder import RunFolder
from kinfed.search.study import Finding, Row, Study, setting
from kinfed.simulation.attacks.backdoor import Backdoor
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

from ..plots.scores import score_by_source


@dataclass(frozen=True)
class SimpleTuning(Local):
    """A client keeps its model up to the classifier, which it trains again from its initial values on its own data."""

    epochs: int

    def personalise(self, client: Client, state: Params, received: object) -> dict[str, Params]:
        layout = client.model.layout
        head = layout.index(layout.head, state.theta.device)
        fresh = state.theta.index_copy(0, head, client.model.theta[head])
        return {"kept": state, "tuned": Params(client.descend(fresh, only=layout.head, epochs=self.epochs))}


def defence(study: Study, methods: Sequence[str] = ("local", "fedavg", "fedaghn"), epochs: int = 10) -> Finding:
    """Accuracy and a backdoor's success at honest clients, before and after Simple-Tuning, for each of `methods`.

    Simple-Tuning: every client trains a new classifier under the finished model, for so many `epochs` on its own
    examples. The model is the one that validation prefers. The experiment's attack is a backdoor, with its defaults if
    it names none.
    """
    if epochs < 1:
        raise UsageError(f"analysis.epochs must be at least 1; got {epochs}")
    attack = [] if study.experiment().attack else [setting("attack.name", "backdoor")]
    if not isinstance(study.experiment(attack).attack, Backdoor):
        raise UsageError("Simple-Tuning is for backdoors, but the experiment has another attack; see attack.name")
    requested = {name: [*attack, setting("method.name", name)] for name in methods}
    notes = list[str]()
    folders = study.runs(requested, failed=notes)
    rows: list[Row] = []
    plain: dict[str, Array] = {}
    marked: dict[str, Array] = {}
    for name, folder in folders.items():
        by_seed = [_score_tuned(study, study.experiment(requested[name]), run, epochs) for run in folder.repeats()]
        scores_by_seed = np.array(by_seed)  # [S, 2, 2]
        for i, source in enumerate((name, f"{name}, tuned")):
            plain[source], marked[source] = scores_by_seed[:, i].T
        accuracy, success = scale_metric(scores_by_seed.mean(0), "accuracy").T  # [2] each
        rows.append(
            {
                "method": name,
                "model": folder.read_summary().selection.chosen,
                "accuracy (%)": float(accuracy[0]),
                "tuned": float(accuracy[1]),
                "success of the backdoor (%)": float(success[0]),
                "success, tuned": float(success[1]),
            }
        )
    picture = study.out / "defence.png"
    panels = {"test examples": plain, "with the pattern, the target is right": marked}
    score_by_source(panels, "honest clients' accuracy", picture)
    return Finding(
        f"a backdoor before and after {epochs} epochs of Simple-Tuning, honest clients", rows, [picture], notes
    )


def _score_tuned(study: Study, experiment: Experiment, folder: RunFolder, epochs: int) -> list[list[float]]:
    """Accuracy and success, means over honest clients, of the models of a run with one seed: kept, and tuned."""
    seed, attack = folder.read_summary().seeds[0], experiment.attack
    assert attack is not None
    federation = experiment.federation(study.data_dir, seed)
    attackers = attack.attackers(federation.names, seed)
    federation = attack.corrupt(federation, attackers, seed)
    model = Model(experiment.module(federation, seed), dtype=federation.x.dtype)
    method = SimpleTuning(epochs)
    how = Execution(study.execution.executor, study.execution.workers, device="cpu")
    fleet = Simulation(federation, model, method, experiment.training, seed=seed, execution=how)
    saved = Run.open(folder.path)
    theta = torch.stack([Model(saved.model(position=i)).theta for i in range(len(federation))])  # [N, d]
    fleet.state = Params(theta)
    scores = fleet.evaluate(0, torch.arange(len(federation)), ()).scores
    metric = federation.task.metric
    return [
        [float(scores[name, split, metric][~attackers].mean()) for split in ("test", "triggered")]
        for name in ("kept", "tuned")
    ]
