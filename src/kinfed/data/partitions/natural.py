"""Natural: the clients that the examples came from."""

from dataclasses import dataclass

import torch

from ...errors import UsageError
from ..dataset import Dataset, Parts, rows_by_owner


@dataclass(frozen=True)
class Natural:
    """Every owner in `dataset.client` is a client, in that order; the data set's graph is theirs.

    `clients` is the number of owners, or 0 for as many as there are.
    """

    def __call__(self, dataset: Dataset, clients: int, draw: torch.Generator) -> Parts:
        """Give every example to its owner; nothing is drawn."""
        if dataset.client is None:
            raise UsageError(
                "natural: the examples of this data set have no owners; choose another partition, such as iid"
            )
        owned = rows_by_owner(dataset)
        empty = [dataset.owners[i] if dataset.owners else str(i) for i, rows in enumerate(owned) if not len(rows)]
        if empty or not owned:
            raise UsageError(f"natural: owner {', '.join(empty[:8]) or '0'} has no example; number the owners 0..N-1")
        if clients not in (0, len(owned)):
            raise UsageError(
                f"natural: the examples have {len(owned)} owners, so clients must be {len(owned)}; got {clients}"
            )
        return Parts(owned, dataset)
