"""Small federations of three classes, and random tensors, in double precision, the same whenever they are made."""

import torch

from kinfed.core.graph import Graph
from kinfed.core.tasks import Classification
from kinfed.data.federation import Federation


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, atol=1e-6):
    """Equal to printed digits."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def examples(count):
    """x: [count, 3] and y: [count]."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    return x, (x @ torch.randn(3, 3, generator=draw, dtype=torch.float64)).argmax(1)


def lists(sizes):
    """x: [n_i, 3] and y: [n_i] of each client."""
    return [list(tensor.split(sizes)) for tensor in examples(sum(sizes))]


def of_sizes(sizes, links):
    """Clients with so many training examples, and two each to validate and to test, in a graph of links: [N, N]."""
    x, y = examples(sum(sizes) + 4 * len(sizes))
    rows, at = {"train": [], "validation": [], "test": []}, 0
    for size in sizes:
        for split, count in (("test", 2), ("validation", 2), ("train", size)):
            rows[split].append(torch.arange(at, at + count))
            at += count
    return Federation(x, y, rows, Classification(3), graph=Graph(links, "given"))
