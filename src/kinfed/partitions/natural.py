"""Natural: the clients that the examples came from."""

from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..federation import Dataset, Parts


@dataclass(frozen=True)
class Natural:
    """Every owner in `dataset.client` is a client, in that order; the data set's graph is theirs.

    `clients` is the number of owners, or 0 for as many as there are.
    """

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        """Give every example to its owner; nothing is drawn."""
        if dataset.client is None:
            raise UsageError("natural: the examples of this data set have no owners; choose another partition")
        used = (dataset.client >= 0).nonzero().flatten()
        count = torch.bincount(dataset.client[used], minlength=len(dataset.owners))  # [N]
        empty = [str(i) for i in (count == 0).nonzero().flatten().tolist()]
        if empty or not len(count):
            empty = [dataset.owners[int(i)] for i in empty] if dataset.owners else empty
            raise UsageError(f"natural: owner {', '.join(empty[:8]) or '0'} has no example; number the owners 0..N-1")
        if clients not in (0, len(count)):
            raise UsageError(
                f"natural: the examples have {len(count)} owners, so clients must be {len(count)}; got {clients}"
            )
        return Parts(list(used[dataset.client[used].argsort(stable=True)].split(count.tolist())), dataset)
