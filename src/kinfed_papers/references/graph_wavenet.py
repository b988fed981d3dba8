"""Graph WaveNet: dilated gated convolutions, diffusion along roads and a learned graph (Wu et al., 2019)."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfed.core.field_checks import Count, In, NonNegative, Positive, Settings

DILATIONS = (1, 2) * 4
RECEPTIVE = 1 + sum(DILATIONS)  # steps that one output sees
WIDTH, SKIP, END = 32, 256, 512  # channels
EMBEDDING = 10
ORDER = 2  # steps of diffusion along each graph


@dataclass(frozen=True)
class GraphWaveNet(Settings):
    """Forecasts all steps at once; 309,400 parameters for the 207 sensors of METR-LA and two features."""

    epochs: Count = 100  # passes over the training windows
    batch: Count = 64  # windows in a step
    lr: Positive = 0.001  # learning rate
    weight_decay: NonNegative = 0.0001  # times a parameter, added to its gradient
    dropout: Annotated[float, In("[0, 1)")] = 0.3  # share of channels left out in training
    clip: Annotated[float, In("(0, inf]")] = 5.0  # greatest norm of a gradient; inf: no limit
    error: ClassVar[Literal["absolute", "squared"]] = "absolute"

    def network(self, weights: Tensor, past: int, horizon: int, features: int) -> nn.Module:
        """See `kinfed_papers.references.centralised.Reference`."""
        return _Network(weights, horizon, features, self.dropout)

    def optimiser(self, network: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """Adam with weight decay in the gradient, at a constant rate."""
        optimiser = torch.optim.Adam(network.parameters(), self.lr, weight_decay=self.weight_decay)
        return optimiser, torch.optim.lr_scheduler.ConstantLR(optimiser, 1.0)


def transitions(weights: Tensor) -> Tensor:
    """[2, N, N] random walks along the links and against them; a row without links stays zero."""
    both = torch.stack([weights, weights.T])
    degree = both.sum(2, keepdim=True)
    return both / torch.where(degree > 0, degree, 1.0)


class _Network(nn.Module):
    def __init__(self, weights: Tensor, horizon: int, features: int, dropout: float) -> None:
        super().__init__()
        count = len(weights)
        self.walks: Tensor
        self.register_buffer("walks", transitions(weights))
        self.source = nn.Parameter(torch.randn(count, EMBEDDING))
        self.target = nn.Parameter(torch.randn(EMBEDDING, count))
        self.start = nn.Conv2d(features, WIDTH, 1)
        self.layers = nn.ModuleList(_Layer(dilation, dropout) for dilation in DILATIONS)
        self.end = nn.Sequential(nn.ReLU(), nn.Conv2d(SKIP, END, 1), nn.ReLU(), nn.Conv2d(END, horizon, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = x.permute(0, 3, 1, 2)  # [B, F, N, T]
        h = self.start(F.pad(h, (max(RECEPTIVE - h.shape[3], 0), 0)))
        learned = torch.relu(self.source @ self.target).softmax(1)
        graphs = torch.cat([self.walks, learned[None]])  # [3, N, N]
        skipped = []
        for layer in self.layers:
            h, skipped_part = layer(h, graphs)
            skipped.append(skipped_part[..., -1:])  # the last step is the one that has seen all others
        return self.end(torch.stack(skipped).sum(0))[..., 0].transpose(1, 2)


class _Layer(nn.Module):
    def __init__(self, dilation: int, dropout: float) -> None:
        super().__init__()
        self.value = nn.Conv2d(WIDTH, WIDTH, (1, 2), dilation=dilation)
        self.gate = nn.Conv2d(WIDTH, WIDTH, (1, 2), dilation=dilation)
        self.skip = nn.Conv2d(WIDTH, SKIP, 1)
        # The published network has these too and never uses them beside a graph: part of its number of parameters.
        self.unused = nn.Conv2d(WIDTH, WIDTH, 1)
        self.mix = nn.Conv2d((3 * ORDER + 1) * WIDTH, WIDTH, 1)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor, graphs: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, C, N, T], graphs: [3, N, N] -> the same with fewer steps, and what is skipped to the end."""
        h = torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x))
        around = [h]
        for graph in graphs:
            walked = h
            for _ in range(ORDER):
                walked = torch.einsum("bcvt,vw->bcwt", walked, graph)
                around.append(walked)
        mixed = self.dropout(self.mix(torch.cat(around, 1)))
        return self.norm(mixed + x[..., -mixed.shape[3] :]), self.skip(h)
