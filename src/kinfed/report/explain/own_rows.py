"""Own rows: how much of a client's solved model its own rows make, column by column, and how much all clients' do."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ...core.mixins import Explains
from ...core.sharing import unwrap
from ...data.tables.schema import Description
from ...models.additive import Additive
from ...models.log_linear import LogLinear
from ...runs.run import FinalServer, Run, client_index
from ..tables.text_table import Grid, number

Array = NDArray[Any]

CONSTANT, ALL = "constant", "all columns"
MEANING = (
    "own rows: 1 is a coefficient of the client's own, 0 is the mean of all clients'",
    "a column with several coefficients, such as a category or a curve, has their mean",
)


class OwnRows(NamedTuple):
    """The weight of own rows, in 0..1; the mean of all clients has the rest."""

    run: str
    method: str
    round: int
    clients: list[str]  # [N]
    columns: list[str]  # [C] of the table, the constant, and all of them
    weights: Array  # [N, C]

    @classmethod
    def from_run(cls, saved: Run) -> "OwnRows | None":
        """Those of a finished run; None if its method has no such weights, or if its state is not kept."""
        if not saved.folder.state.exists():
            return None
        if saved.method is None or type(Explains.from_method(unwrap(saved.method))).own_weights is Explains.own_weights:
            return None  # before the server's state is read
        server = FinalServer(saved, saved.task)
        weights = server.own_weights()
        if weights is None:
            return None
        places = _columns(server, saved.description, weights.shape[1])
        shown = np.stack([weights[:, at].mean(1).double().cpu().numpy() for at in places.values()], 1)
        return cls(
            run=str(saved.folder),
            method=saved.summary.method,
            round=server.state.done,
            clients=saved.names,
            columns=list(places),
            weights=shown,
        )

    def grid(self, client: str) -> Grid:
        """One client's weights as a table, beside those of the others."""
        i = client_index(self.clients, client)
        others = np.delete(self.weights, i, 0)
        rows = []
        for c, column in enumerate(self.columns):
            mine = float(self.weights[i, c])
            low, high = (number(float(end)) for end in (others[:, c].min(initial=1), others[:, c].max(initial=0)))
            rows.append([column, number(mine), number(1 - mine), f"{low} to {high}" if len(others) else ""])
        title = f"whose rows make the model of '{self.clients[i]}' in {self.run} ({self.method}, round {self.round})"
        headings = ("", "own rows", "mean of all", f"own rows of the {len(others)} others")
        return Grid("own", title, headings, [rows], MEANING)

    def to_dict(self, client: str) -> dict[str, Any]:
        """One client's weights for JSON."""
        i = client_index(self.clients, client)
        return dict(zip(self.columns, self.weights[i].tolist(), strict=True))


def _columns(server: FinalServer, description: Description | None, count: int) -> dict[str, list[int]]:
    """The places of each column's coefficients among `count`, of the constant's, and of all but it."""
    module, layout = server.model.original, server.model.layout
    head = module.get_submodule(server.model.head_name or "")
    assert isinstance(head, nn.Linear)  # as partial pooling solves no other
    inputs = head.in_features
    names = [] if description is None else description.sources
    sources = list[int]()
    if isinstance(module, Additive | LogLinear):
        sources = module.sources
    elif {entry.name for entry in layout.entries} == layout.head:  # one linear layer
        sources = list(range(inputs))
    places = dict[str, list[int]]()
    if len(set(sources)) == len(names):
        for at, source in enumerate(sources):
            places.setdefault(names[source], []).append(at)
    if len(places) != 1:
        places[ALL] = list(range(inputs))
    if count > inputs:
        places[CONSTANT] = list(range(inputs, count))
    return places
