"""RNN: one recurrent layer over a window of a series; all forecasts at once from its last state."""

from typing import Literal

from torch import Tensor, nn

from ..errors import UsageError
from ..ops.fused import FORMS, last_state, parts
from .gru import check_series

CELLS = {"rnn": nn.RNN, "gru": nn.GRU}


def rnn(
    shape: tuple[int, ...],
    outputs: int,
    *,
    hidden: int = 64,  # width
    cell: Literal["rnn", "gru"] = "rnn",  # kind of recurrent layer
) -> nn.Module:
    """Windows [B, L, F] -> [B, outputs]; for F = 2 and 12 outputs 5,132 parameters (13,836 as GRU).

    The client model of SFL's traffic experiments: a recurrent network of width 64. Raises UsageError unless the shape
    is [L, F] with at least two steps.
    """
    check_series("rnn", shape, hidden)
    if cell not in CELLS:
        raise UsageError(f"rnn: cell must be {' or '.join(CELLS)}; got '{cell}'")
    return _Last(CELLS[cell](shape[1], hidden, batch_first=True), nn.Linear(hidden, outputs))


class _Last(nn.Module):
    def __init__(self, cell: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.cell, self.head = cell, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


FORMS[_Last] = lambda m, path: [last_state(m.cell, f"{path}cell."), *parts(m.head, f"{path}head.")]
