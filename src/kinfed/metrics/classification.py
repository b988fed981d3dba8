"""Accuracy on all clients' test examples, weighted by a client's own shares of labels."""

import torch
from torch import Tensor


def reweighted_accuracy(correct: Tensor, total: Tensor, shares: Tensor) -> Tensor:
    r"""[N] accuracy $\sum_c \pi_{ic} h_{ic} / \sum_c \pi_{ic} n_c$ of each client's model on a test set for all.

    `correct: [N, C]` counts what client i's model has right of class c, `total: [C]` how many there are, and
    `shares: [N, C]` how much of client i's own data is of class c (the protocol of pFedGraph's experiments). NaN for a
    client whose labels are not in the test set.
    """
    return (shares * correct).sum(1) / (shares * total).sum(1)


def count_correct(outputs: Tensor, y: Tensor, classes: int) -> Tensor:
    """[C] how many examples of each class the largest of outputs: [n, C] gets right."""
    return torch.bincount(y[outputs.argmax(-1) == y], minlength=classes)
