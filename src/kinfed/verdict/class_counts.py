"""Which classes are taken for which, and accuracy on all clients' examples, weighted by a client's shares of labels."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
