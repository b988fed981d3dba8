"""Scores by class: recall, which classes are taken for which, and accuracy weighted by a client's shares of labels."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.history import History
from ..core.metrics import ALWAYS, BY_CLASS, RECALL


def reweighted_accuracy(correct: Tensor, total: Tensor, shares: Tensor) -> Tensor:
    r"""[N] accuracy $\sum_c \pi_{ic} h_{ic} / \sum_c \pi_{ic} n_c$ of each client's model on a test set for all.

    `correct: [N, C]` counts what client i's model has right of class c, `total: [C]` how many there are, and
    `shares: [N, C]` how much of client i's own data is of class c (the protocol of pFedGraph's experiments). NaN for a
    client whose labels are not in the test set.
    """
    return (shares * correct).sum(1) / (shares * total).sum(1)


def count_correct(outputs: Tensor, y: Tensor, classes: int, weights: Tensor | None = None) -> Tensor:
    """[C] how many examples of each class the largest of outputs: [n, C] gets right, each as weights: [n] count it."""
    right = outputs.argmax(-1) == y
    return torch.bincount(y[right], None if weights is None else weights[right], classes)


def confusion(outputs: Tensor, y: Tensor, sizes: Sequence[int], classes: int) -> Tensor:
    """[N, C, C] how many examples of each class, the rows, the largest of outputs: [n, C] takes for each, the columns.

    It is sparse: many clients times many classes squared would not fit into memory, and few of them occur. y: [n] are
    the classes; the first sizes[0] examples are client 0's, and so on.
    """
    who = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    cells = torch.stack([who, y, outputs.argmax(-1)])
    shape = len(sizes), classes, classes
    return torch.sparse_coo_tensor(cells, torch.ones_like(y), shape, check_invariants=True).coalesce()


def recall_by_class(history: History, classes: Sequence[str], counts: Tensor | None = None) -> dict[str, Any]:
    """The chosen model's test scores for each class, at the selected round; empty without such scores.

    `classes: [C]` are names, `counts: [N, C]` the clients' test examples, if they are known. Attackers are left
    out. `by_class`: for each class its name, how many `clients` have examples of it, their mean `recall`, and with
    counts the number of `examples` and the recall `pooled` over them. `by_client: [N][C]`, None where a
    client has no such example. `always`, by class: the clients whose model predicts this class for every example
    although their examples are of several classes; `warnings` says so in one line.
    """
    scores, model = history.scores[history.place()], history.chosen
    if (model, "test", ALWAYS) not in scores:
        return {}
    names = dict(enumerate(classes))
    every = torch.stack([scores[model, "test", f"{RECALL}{c}"] for c in names], 1).double()  # [N, C]
    honest = history.selector.honest
    recall = every[honest]
    has_examples = ~recall.isnan()
    rows: list[dict[str, Any]] = []
    for c, name in names.items():
        recalls = recall[has_examples[:, c], c]
        row = {"class": name, "clients": len(recalls), "recall": float(recalls.mean()) if len(recalls) else None}
        if counts is not None:
            weights = counts[honest][has_examples[:, c], c].double()
            row["examples"] = int(weights.sum())
            row["pooled"] = float(recalls @ weights / weights.sum()) if len(recalls) else None
        rows.append(row)
    answers = history.selector.mask(scores[model, "test", ALWAYS])
    always: dict[str, list[str]] = {}
    for client, answer in zip(history.names, answers.tolist(), strict=True):
        if not math.isnan(answer):
            always.setdefault(names.get(int(answer), str(int(answer))), []).append(client)
    several = int((~history.selector.mask(scores[model, "test", BY_CLASS[0]]).isnan()).sum())
    return {
        "by_class": rows,
        "by_client": [[None if math.isnan(v) else v for v in row] for row in every.tolist()],
        "always": always,
        "warnings": _warn(always, several, len(recall)),
    }


def _warn(always: dict[str, list[str]], several: int, clients: int) -> list[str]:
    """A warning if models always predict one class; `several` counts clients tested on more than one class."""
    count = sum(map(len, always.values()))
    if not count:
        return []
    subject = f"{count} of {several}" if count < several else f"all {several}"
    subject += " clients that are tested on several classes" if several < clients else " clients"
    if len(always) == 1:
        return [f"the models of {subject} always answer '{next(iter(always))}'"]
    answers = ", ".join(f"'{name}' ({len(group)})" for name, group in always.items())
    return [f"the models of {subject} always give one answer: {answers}"]
