"""Runs of any size with known numbers, written as kinfed writes them."""

import json

import numpy as np
import pytest
import torch

from kinfed.core.history import History
from kinfed.core.tasks import Classification
from kinfed.runs.run_folder import RunFolder
from kinfed.runs.tested_examples import Tested

CONFIG = """
rounds = 3
seed = 0
[participation]
share = 1.0
[method]
name = "{method}"
[federation]
clients = {clients}
[federation.dataset]
name = "{dataset}"
"""


@pytest.fixture
def run_of(finished):
    """Writes the folder of a run: `scores` [T, N] on test examples, `weights` [T, N, N] or none; gives its path.

    Every client has ten test examples, of which its last score says how many are right.
    """

    def write(
        path,
        scores,
        weights=None,
        *,
        method="fedaghn",
        names=None,
        dataset="digits",
        facts=None,
        layers=(),
        **facts_given,
    ):
        scores = np.asarray(scores, np.float32)
        rounds, count = scores.shape
        names = names or [f"c{i}" for i in range(count)]
        history = History(tuple(names), Classification(2))
        for t in range(rounds):
            values = torch.from_numpy(scores[t])
            history.rounds.append(t)
            history.scores.append({("own", "test", "accuracy"): values, ("own", "test", "loss"): 1 - values})
            if weights is not None:
                history.kept_relations.append(torch.from_numpy(np.asarray(weights[t], np.float32)))
        history.chosen = "own"
        last = scores[-1].astype(float)
        few = {"mean": last.mean(), "std": last.std(), "worst5": last.min(), "best5": last.max(), "round": rounds}
        few |= {"worst5": last.min(), "best5": last.max(), "validation": last.mean()}
        facts_given = {"relation": None if weights is None else {"origin": "learned"}, "bytes_up": 4000} | facts_given
        given = {"clients": count, "names": names, "dataset": dataset, "federation": {"dataset": {"name": dataset}}}
        finished(
            path,
            {"own": {key: float(value) for key, value in few.items()}},
            method=method,
            rounds=rounds,
            clients_scores={"own": last.tolist()},
            out=str(path),
            **given | facts_given,
        )
        folder = RunFolder(path)
        history.origin = "learned"
        folder.write_history(history, list(layers))
        right = [np.arange(10) < round(10 * score) for score in last]
        scores = {name: hits.astype(np.float32) for name, hits in zip(names, right, strict=True)}
        blocks = {name: np.arange(10) + 10 * i for i, name in enumerate(names)}
        Tested({}, scores, blocks=blocks).write(folder.tested)
        folder.config.write_text(CONFIG.format(method=method, clients=count, dataset=dataset))
        if facts:
            folder.clients.write_text(json.dumps({"names": names, **facts}))
        return folder.path

    return write
