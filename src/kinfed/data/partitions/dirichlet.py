"""Dirichlet: every class is shared out in random, uneven shares (Yurochkin et al., 2019)."""

from dataclasses import dataclass

import numpy as np
import torch

from ...core.field_checks import Count, Positive, Settings
from ..dataset import Dataset, Parts
from .deal import check_clients, hand_over, rows_by_class


@dataclass(frozen=True)
class Dirichlet(Settings):
    r"""Every class is divided in random shares, which are more uneven for smaller alpha.

    Class c is divided among the clients in shares $q_c \sim \mathrm{Dir}(\alpha 1_N)$, cut with cumulative rounding.

    With `cap`, as in MOON's code, a client that already has n / N examples gets none of later classes. Clients that
    then have fewer than `min_size` get random examples from the client that is the largest at that moment, one at a
    time: nothing is drawn again, so a partition exists whenever N * min_size <= n.
    """

    alpha: Positive = 0.5  # the smaller, the more uneven
    min_size: Count = 10  # examples of every client, at least
    cap: bool = True  # whether a client that has an even share of the examples gets none of later classes

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        check_clients("dirichlet", dataset, clients, self.min_size)
        by_class = rows_by_class("dirichlet", dataset, draw)
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=draw)))
        owned: list[list[int]] = [[] for _ in range(clients)]
        for rows in by_class:
            # A gamma variable of small alpha underflows, its logarithm does not: G(alpha) = G(alpha + 1) U^(1 / alpha).
            size = np.log(random.standard_gamma(self.alpha + 1, clients))
            size += np.log1p(-random.random(clients)) / self.alpha
            if self.cap:
                full = np.array([len(client_rows) >= len(dataset.y) / clients for client_rows in owned])
                size[full] = -np.inf
            share = np.exp(size - size.max())
            cuts = np.rint(np.cumsum(share / share.sum()) * len(rows)).astype(int)
            for client_rows, part in zip(owned, rows.tensor_split(cuts[:-1].tolist()), strict=True):
                client_rows.extend(part.tolist())
        while len(smallest := min(owned, key=len)) < self.min_size:
            largest = max(owned, key=len)
            smallest.append(largest.pop(int(random.integers(len(largest)))))
        return hand_over("dirichlet", dataset, [torch.tensor(client_rows) for client_rows in owned])
