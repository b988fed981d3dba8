"""GRU encoder and decoder: reads a window of a series, then forecasts step by step, each step fed with the last."""

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..ops.fused import FORMS, forecaster


def gru(
    shape: tuple[int, ...],
    outputs: int,
    *,
    hidden: int = 100,  # width of encoder and decoder
) -> nn.Module:
    """Windows [B, L, F] -> forecasts [B, outputs] of the first feature; 62,501 parameters for F = 2.

    The other features of the steps ahead go on as they went between the last two steps read, wrapped to [0, 1): right
    for a clock. The client model of Panacea's traffic experiments, after CNFGNN (Meng et al., 2021), without that
    paper's feeding of true readings. Raises UsageError unless the shape is [L, F] with at least two steps.
    """
    check_series("gru", shape, hidden)
    return _Seq2Seq(shape[1], outputs, hidden)


def check_series(name: str, shape: tuple[int, ...], hidden: int) -> None:
    """Raise UsageError unless the examples are windows [L, F] of two steps or more, and a state has width."""
    if len(shape) != 2 or shape[0] < 2 or shape[1] < 1:
        raise UsageError(
            f"{name}: needs windows [steps, features] of at least 2 steps; got shape {list(shape)}; "
            "use the model 'mlp' for others"
        )
    if hidden < 1:
        raise UsageError(f"{name}: hidden is the width of the state, so it must be at least 1; got {hidden}")


class _Seq2Seq(nn.Module):
    def __init__(self, features: int, outputs: int, hidden: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.encoder = nn.GRU(features, hidden, batch_first=True)
        self.decoder = nn.GRUCell(features, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.encoder(x)[1][0]  # [B, hidden]
        value, clock = x[:, -1, :1], x[:, -1, 1:]  # [B, 1], [B, F - 1]
        tick = clock - x[:, -2, 1:]
        forecasts = []
        for _ in range(self.outputs):
            state = self.decoder(torch.cat([value, clock], 1), state)
            value, clock = self.head(state), (clock + tick) % 1
            forecasts.append(value)
        return torch.cat(forecasts, 1)


FORMS[_Seq2Seq] = lambda m, path: [forecaster(m.encoder, m.decoder, m.head, m.outputs, path)]
