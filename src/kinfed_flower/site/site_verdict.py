"""What learning from others was worth to a site: its model against others, on its own test examples, at the site."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kinfed.core import checkpoint, engine, trees
from kinfed.core.history import History, Recorder
from kinfed.core.mixins import export
from kinfed.core.model import Model
from kinfed.core.tasks import unit_of
from kinfed.data.federation import Federation
from kinfed.errors import note_failure
from kinfed.files import write_json
from kinfed.runs.baselines import Baseline, floor, rows as rows_of, standard_baselines
from kinfed.runs.config import plugins
from kinfed.runs.test_scores import NO_STANDARD, of_examples
from kinfed.runs.tested_examples import Tested
from kinfed.runs.trained_run import BLOCK
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation
from kinfed.verdict.dependence import Blocks
from kinfed.verdict.one_client import OwnVerdict, judge_one
from kinfed.verdict.verdict import LOCAL

from .. import plan
from ..plan import Plan
from .site_predictor import VERDICT

Scores = dict[str, list[float | None]]  # by baseline: its validation score, and its test score

ALONE = "alone.safetensors"  # in the folder of an experiment at a site


def compare(
    planned: Plan,
    federation: Federation,
    model: Model,
    kept: Mapping[str, nn.Module],
    folder: Path,
    device: str,
    beside: str = "",
) -> tuple[OwnVerdict, Scores]:
    """The verdict at a site of one client, and the scores of what it could do without others.

    `kept` are the site's models: "own", of the run's method, and perhaps "fedavg". `model` has the initial values. The
    site trains alone for as many rounds as it would have with others, and selects the round by its own validation
    examples; that model and the verdict are written to `folder`, with `beside`, the experiment that FedAvg's is of.
    Standard models of the site's own rows are baselines too, of which the site's validation examples choose.
    """
    learning, rounds, task = planned.learning, planned.learning.rounds, federation.task
    method = plan.with_method(planned, "local").learning.method
    execution = Execution("loop", onednn=False, device=device)
    fleet = Simulation(federation, model, method, learning.training, seed=learning.seed, execution=execution)
    history = History(tuple(federation.names), task)
    engine.run(fleet.method, fleet.roster(), fleet, Recorder(history), rounds=rounds)
    personal = {name: values[0].cpu() for name, values in history.models.items()}
    rows, groups = federation.rows["test"][0], federation.blocks
    modules = {**kept, "local": export(method, fleet.model, trees.nest(personal))}
    scores = {name: _scores(module, federation, rows) for name, module in modules.items()}
    (client,) = federation.names
    values = history.validation()
    selected = {} if values is None else {client: float(values[0])}
    tested = {name: Tested({client: float(np.mean(baseline))}, {client: baseline}) for name, baseline in scores.items()}
    baselines = [Baseline(LOCAL, False, False, selected, tested["local"])]
    problems = list[str]()
    if len(scores["own"]) == len(rows):  # test examples have scores of their own
        with note_failure(problems, NO_STANDARD):
            standard, left_out = standard_baselines(federation, history.selector.score, pool=False)
            baselines, problems = [*baselines, *standard], problems + left_out
    best = floor([baselines], task.higher_is_better, history.selector.higher_is_better).alone
    assert best is not None
    assert best.tested[0].examples is not None
    verdict = judge_one(
        plugins.short_name(learning.method_name),
        scores["own"],
        (best.name, best.tested[0].examples[client]),
        scores.get("fedavg"),
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        unit=unit_of(task),
        blocks=Blocks([[(rows if groups is None else groups[rows]).numpy()]], groups is not None),
    )
    checkpoint.write(fleet.model.all_tensors(personal["theta"]), folder / ALONE, {})
    fields = verdict.to_dict() | {"beside": beside, "baselines": rows_of([baselines], task.higher_is_better)}
    write_json(folder / VERDICT, fields | {"problems": problems})
    sent = {}
    for baseline in baselines:
        sent[baseline.name] = [_number(baseline.validation.get(client, math.nan)), _number(baseline.mean)]
    return verdict, sent


def _number(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def _scores(module: nn.Module, federation: Federation, rows: Tensor) -> NDArray[Any]:
    """[n] the score of each test example by a model, or [1] that of all together if single ones have none."""
    x, y = federation.x[rows].cpu(), federation.y[rows].cpu()
    with torch.no_grad():
        outputs = torch.cat([module(part) for part in x.split(BLOCK)])
        importance = federation.importance("test")
        scores = of_examples(federation.task, outputs, y, importance)
        if scores.isfinite().any():
            return scores.numpy()
        weights = outputs.new_ones(len(y)) if importance is None else importance[0]
        total = federation.task.score(outputs, y, weights)[federation.task.metric]
    return np.array([float(total)])
