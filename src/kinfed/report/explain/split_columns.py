"""Split columns: which columns move the answers of boosted trees, those of all clients and those of each."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.metrics import positive
from ...core.sharing import unwrap
from ...data.tables.schema import Description
from ...errors import UsageError
from ...methods.solved.personal_boosting import PersonalBoosting
from ...methods.solved.standard import Standard
from ...models.trees import split_variances
from ...runs.run import Run, client_index
from ..tables.text_table import Grid, number

Array = NDArray[np.float64]

SHOWN = 12  # columns of a table; the others are summed up
MEANING = (
    "of the variance that splits make, the share of those on each column;",
    "a split counts as if it sent half of what reaches it either way",
)


class SplitColumns(NamedTuple):
    """The shares of columns in what splits do to answers, which add up to 1."""

    run: str  # its folder and method
    clients: list[str]  # [N]
    columns: list[str]  # [C], those that move answers most first
    shared: Array  # [C] of the clients' mean model, or the mean of the clients'
    weights: Array  # [N, C] of each client's; NaN of who keeps a model that is no trees

    @classmethod
    def from_run(cls, saved: Run) -> "SplitColumns | None":
        """Those of a finished run; None if it grew no trees."""
        method = None if saved.method is None else unwrap(saved.method)
        if not isinstance(method, PersonalBoosting | Standard) or "leaf" not in saved.layout.names:
            return None
        layout, names = saved.layout, list(saved.names)
        grown = [i for i, name in enumerate(names) if saved.find_kept_run(name) is saved]
        theta = torch.stack([saved.theta(position=i).double().cpu() for i in grown])  # [G, d]
        inputs = _name_inputs(saved.description, layout.tensors(theta[0])["head.weight"].shape[1])
        columns = list(dict.fromkeys(inputs))
        places = torch.tensor([columns.index(name) for name in inputs])

        def share(theta: torch.Tensor) -> Array:
            tensors = layout.tensors(theta)
            variances = split_variances(tensors["threshold"], tensors["leaf"]).flatten()
            total = variances.new_zeros(len(columns))
            total.index_add_(0, places[tensors["column"].long().flatten()], variances)
            return (total / positive(total.sum())).numpy()

        weights = np.full((len(names), len(columns)), np.nan)
        weights[grown] = [share(row) for row in theta]
        # Trees of all have a mean model; trees of each client's own do not, so their shares have one.
        shared = share(theta.mean(0)) if isinstance(method, PersonalBoosting) else weights[grown].mean(0)
        order = np.argsort(-shared, kind="stable")
        run = f"{saved.folder} ({saved.summary.method})"
        return cls(run, names, [columns[i] for i in order], shared[order], weights[:, order])

    def grid(self, client: str) -> Grid:
        """One client's shares as a table, beside those of all and of the others."""
        i = client_index(self.clients, client)
        if np.isnan(self.weights[i]).any():
            raise UsageError(f"'{self.clients[i]}' keeps a model that is no trees; explain another client")
        others = self.weights[~np.isnan(self.weights).any(1) & (np.arange(len(self.weights)) != i)]
        rows = []
        for c, column in enumerate(self.columns[:SHOWN]):
            ends = f"{number(float(others[:, c].min()))} to {number(float(others[:, c].max()))}" if len(others) else ""
            rows.append([column, number(float(self.shared[c])), number(float(self.weights[i, c])), ends])
        if len(self.columns) > SHOWN:
            rest = (number(float(shares[SHOWN:].sum())) for shares in (self.shared, self.weights[i]))
            rows.append([f"{len(self.columns) - SHOWN} more", *rest, ""])
        title = f"which columns move answers in {self.run}"
        headings = ("", "mean of all", f"'{self.clients[i]}'", f"the {len(others)} others")
        return Grid("columns", title, headings, [rows], MEANING)

    def to_dict(self, client: str) -> dict[str, Any]:
        """The shares of the mean of all and of one client for JSON."""
        shares = {"mean": self.shared, "client": self.weights[client_index(self.clients, client)]}
        return {name: dict(zip(self.columns, values.tolist(), strict=True)) for name, values in shares.items()}


def _name_inputs(description: Description | None, count: int) -> list[str]:
    """[f] the column that each input is of."""
    names = [] if description is None else description.sources
    return names if len(names) == count else [f"input {i + 1}" for i in range(count)]
