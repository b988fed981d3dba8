"""Test scores of finished runs: by client, by example, and over the examples of all clients."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap

from ..core.history import History
from ..core.summary import Summary
from ..core.tasks import Classification, Task
from ..data.federation import Federation
from ..errors import UsageError
from ..verdict import class_counts
from ..verdict.dependence import INDEPENDENT, Blocks
from ..verdict.statistics import interval
from ..verdict.verdict import Evidence, evidence
from .tested_examples import Tested

Array = NDArray[Any]

NO_VERDICT = "there is no verdict"  # begins the warning that says why
NO_STANDARD = "there is no comparison with standard models"  # and so does this
NOTHING: Array = np.empty(0, np.int64)
MANY = 1 << 16  # test examples that are scored in one pass
FEW = 512  # those that a module takes in one pass


def chose_otherwise(summaries: Sequence[Summary], model: str) -> str:
    """The models that a run chose with each seed, to be read by people; empty if all of them are `model`."""
    chosen = [summary.selection.chosen for summary in summaries]
    return ", ".join(f"'{name}'" for name in chosen) if set(chosen) - {model} else ""


def of_examples(task: Task, outputs: Tensor, y: Tensor, importance: Sequence[Tensor] | None = None) -> Tensor:
    """[n] the score of each example by itself, in the task's metric; outputs and y: [n, ...].

    With importance, example weights over their mean by client: [n] in all, scores are multiplied by it: then a client's
    score is the plain mean of them, and differences of two methods keep their signs.
    """

    def score(output: Tensor, truth: Tensor) -> Tensor:
        return task.score(output[None], truth[None], output.new_ones(1))[task.metric]

    blocks = zip(outputs.split(MANY), y.split(MANY), strict=True)
    scores = torch.cat([vmap(score)(*block) for block in blocks])
    return scores if importance is None else scores * torch.cat(list(importance))


def intervals(history: History) -> dict[str, dict[str, Any]]:
    """The interval of each named model's mean over the clients that are no attackers, as a summary has it."""
    scores = {name: history.test(name)[history.selector.honest].numpy() for name in history.named_models}
    return {name: interval(values).to_dict() for name, values in scores.items() if not np.isnan(values).all()}


def by_examples(mine: Sequence[Tested], others: Sequence[Tested], higher_is_better: bool) -> dict[str, Evidence]:
    """What each client's test examples say of a method against another; empty if their scores were not written."""
    if any(tests.examples is None for tests in (*mine, *others)):
        return {}
    names, (scores, theirs) = align([mine, others], True)
    return evidence(scores, theirs, names, higher_is_better, blocks_of(mine, names))


def blocks_of(runs: Sequence[Tested], names: Sequence[str]) -> Blocks:
    """Which test examples of a run belong together, by seed and client, in the order of names."""
    if any(tests.blocks is None for tests in runs):
        return INDEPENDENT
    ids = [[tests.blocks.get(name, NOTHING) for name in names] for tests in runs if tests.blocks is not None]
    declared, spanning = runs[0].declared, 0
    if declared:
        ids_of_clients = [np.concatenate([np.unique(block_ids) for block_ids in seed]) for seed in ids]
        spanning = max(int((np.unique(ids_of_seed, return_counts=True)[1] > 1).sum()) for ids_of_seed in ids_of_clients)
    totals = [[run.totals.get(name, 0.0) for name in names] for run in runs if run.totals is not None]
    return Blocks(ids, declared, spanning, totals if len(totals) == len(runs) else None)


def align(runs: Sequence[Sequence[Tested]], by_example: bool) -> tuple[list[str], list[list[list[Array]]]]:
    """The clients of the first of several runs, and of each run their scores by seed and client.

    There are none of a client that is not in all runs with the seed, as it attacks in one.
    """
    names = list(dict.fromkeys(name for tests in runs[0] for name in tests.means))
    shared = [set.intersection(*(set(tests.means) for tests in same)) for same in zip(*runs, strict=True)]

    def scores_of(tests: Tested, shared_names: set[str]) -> list[Array]:
        return [tests.scores(name, by_example) if name in shared_names else np.empty(0) for name in names]

    return names, [[scores_of(*pair) for pair in zip(seeds, shared, strict=True)] for seeds in runs]


def pooled_mean(federation: Federation, values: Tensor) -> float:
    """The mean over all clients' test examples of a metric that is one over a client's, values: [N]."""
    values, sizes = values.double(), federation.total_test_weights().cpu()
    scored = ~values.isnan()
    return float((values * sizes)[scored].sum() / sizes[scored].sum())


def reweighted_accuracy(federation: Federation, modules: Iterable[nn.Module]) -> Tensor:
    """[N] accuracy of each client's model on all clients' test examples, weighted by its shares of labels.

    The shares are those of its training examples. This is pFedGraph's protocol, which passes all clients' test
    examples through every model. Raises UsageError if the task has no classes.
    """
    task, federation = federation.task, federation.to(torch.device("cpu"))
    if not isinstance(task, Classification):
        raise UsageError("reweighted accuracy needs class labels; this task has none")
    rows = torch.cat(list(federation.rows["test"])).unique()
    x, y = federation.x[rows], federation.y[rows]
    weights = None if federation.weights is None else federation.weights[rows].double()
    counts = federation.class_counts(["train"], weighted=True).double()
    with torch.no_grad():
        correct = [class_counts.count_correct(_answer(module, x), y, task.classes, weights) for module in modules]
    total = torch.bincount(y, weights, task.classes)
    return class_counts.reweighted_accuracy(torch.stack(correct), total, counts / counts.sum(1, keepdim=True))


def _answer(module: nn.Module, x: Tensor) -> Tensor:
    """[n, C] outputs for x: [n, ...], of which a layer may write into a copy."""
    return torch.cat([module(part.clone()) for part in x.split(FEW)])
