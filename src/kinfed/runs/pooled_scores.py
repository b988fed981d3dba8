"""Scores of clients' models on the test examples of all clients together."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..core.metrics import calibration_errors
from ..core.tasks import Classification
from ..data.federation import Federation
from ..errors import UsageError
from ..verdict import class_counts

BLOCK = 512  # test examples in one pass through a model


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


def pooled_calibration(federation: Federation, modules: Iterable[nn.Module]) -> float:
    """The expected calibration error over all clients' test examples, each by its client's model.

    One client's examples are too few for its bins, so that the mean of clients' errors is mostly chance.
    """
    federation = federation.to(torch.device("cpu"))
    rows = list(federation.rows["test"])
    with torch.no_grad():
        outputs = [_answer(module, federation.x[at]) for module, at in zip(modules, rows, strict=True)]
    at = torch.cat(rows)
    weight = torch.ones(len(at)) if federation.weights is None else federation.weights[at]
    return float(calibration_errors(torch.cat(outputs).double(), federation.y[at], weight.double())["ece"])


def _answer(module: nn.Module, x: Tensor) -> Tensor:
    """[n, C] outputs for x: [n, ...], of which a layer may write into a copy."""
    return torch.cat([module(part.clone()) for part in x.split(BLOCK)])
