"""STGCN: gated convolutions in time around a graph convolution (Yu, Yin and Zhu, 2018), with its code's channels."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfed.core.field_checks import Count, Positive, Settings
from kinfed.errors import UsageError

KERNEL = 3  # steps of a convolution in time
ORDER = 3  # Chebyshev polynomials of the Laplacian
BLOCKS = ((1, 32, 64), (64, 32, 128))  # channels: in, inside, out


@dataclass(frozen=True)
class STGCN(Settings):
    """Reads the values alone and forecasts one step; later steps follow by feeding forecasts back.

    320,143 parameters for the 207 sensors of METR-LA. The graph is made symmetric by the larger weight of each pair.
    """

    epochs: Count = 50  # passes over the training windows
    batch: Count = 50  # windows in a step
    lr: Positive = 0.001  # learning rate, times 0.7 every 5 epochs
    clip: ClassVar[float] = math.inf
    error: ClassVar[Literal["absolute", "squared"]] = "squared"

    def network(self, weights: Tensor, past: int, horizon: int, features: int) -> nn.Module:
        """See `kinfed_papers.references.centralised.Reference`; raises UsageError for windows that are too short."""
        least = 4 * (KERNEL - 1) + 1
        if past < least:
            raise UsageError(f"stgcn: its convolutions need at least {least} past steps; got {past}")
        return _Network(weights, past, horizon)

    def optimiser(self, network: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """RMSProp whose rate falls to 0.7 times itself every 5 epochs."""
        optimiser = torch.optim.RMSprop(network.parameters(), self.lr)
        return optimiser, torch.optim.lr_scheduler.StepLR(optimiser, 5, 0.7)


def chebyshev(weights: Tensor) -> Tensor:
    r"""[ORDER, N, N] polynomials $T_k(\tilde L)$ of the scaled Laplacian $\tilde L = 2 L / \lambda_{max} - I$."""
    links = torch.maximum(weights, weights.T).double().fill_diagonal_(0)
    degree = links.sum(1)
    scale = torch.where(degree > 0, degree, 1.0).rsqrt()
    laplacian = torch.diag((degree > 0).double()) - scale[:, None] * links * scale
    eye = torch.eye(len(links), dtype=torch.float64)
    scaled = 2 * laplacian / torch.linalg.eigvalsh(laplacian)[-1].clamp(min=1e-9) - eye
    matrices = [eye, scaled]
    for _ in range(2, ORDER):
        matrices.append(2 * scaled @ matrices[-1] - matrices[-2])
    return torch.stack(matrices).to(torch.get_default_dtype())


class _Network(nn.Module):
    def __init__(self, weights: Tensor, past: int, horizon: int) -> None:
        super().__init__()
        count, width = len(weights), BLOCKS[-1][-1]
        self.horizon = horizon
        polynomials = chebyshev(weights)
        self.blocks = nn.Sequential(*(_Block(polynomials, *channels) for channels in BLOCKS))
        left = past - 2 * len(BLOCKS) * (KERNEL - 1)
        self.gather = _Temporal(width, width, left, "glu")
        self.norm = nn.LayerNorm([count, width], eps=1e-6)
        self.settle = _Temporal(width, width, 1, "sigmoid")
        self.weight = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(count))

    def forward(self, x: Tensor) -> Tensor:
        values = x[..., 0].transpose(1, 2)[:, None]  # [B, 1, T, N]
        if self.training:
            return self._next(values)[..., None]
        forecasts: list[Tensor] = []
        for _ in range(self.horizon):
            forecasts.append(self._next(values))
            values = torch.cat([values[:, :, 1:], forecasts[-1][:, None, None]], 2)
        return torch.stack(forecasts, -1)  # [B, N, horizon]

    def _next(self, values: Tensor) -> Tensor:
        h = self.gather(self.blocks(values))  # [B, C, 1, N]
        h = self.settle(_normalise(h, self.norm))
        return self.weight(h[:, :, 0].transpose(1, 2))[..., 0] + self.bias


class _Block(nn.Module):
    def __init__(self, polynomials: Tensor, before: int, inside: int, after: int) -> None:
        super().__init__()
        self.first = _Temporal(before, inside, KERNEL, "glu")
        self.graph = _Graph(polynomials, inside)
        self.second = _Temporal(inside, after, KERNEL, "relu")
        self.norm = nn.LayerNorm([polynomials.shape[1], after], eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(self.second(self.graph(self.first(x))), self.norm)


class _Temporal(nn.Module):
    """A convolution over `steps` in time beside a residual path, [B, before, T, N] -> [B, after, T - steps + 1, N]."""

    def __init__(self, before: int, after: int, steps: int, kind: Literal["glu", "relu", "sigmoid"]) -> None:
        super().__init__()
        self.after, self.steps, self.kind = after, steps, kind
        self.shrink = nn.Conv2d(before, after, 1, bias=False) if before > after else nn.Identity()
        self.convolution = nn.Conv2d(before, 2 * after if kind == "glu" else after, (steps, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.convolution(x)
        if self.kind == "sigmoid":
            return torch.sigmoid(out)
        kept = self.shrink(x)[:, :, self.steps - 1 :]
        kept = F.pad(kept, (0, 0, 0, 0, 0, self.after - kept.shape[1]))
        if self.kind == "relu":
            return torch.relu(out + kept)
        value, gate = out.chunk(2, 1)
        return (value + kept) * gate.sigmoid()


class _Graph(nn.Module):
    def __init__(self, polynomials: Tensor, width: int) -> None:
        super().__init__()
        self.polynomials: Tensor
        self.register_buffer("polynomials", polynomials)
        self.mix = nn.Conv2d(len(polynomials) * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        around = torch.einsum("knm,bctm->bkctn", self.polynomials, x).flatten(1, 2)
        return (self.mix(around) + x).relu()


def _normalise(x: Tensor, norm: nn.Module) -> Tensor:
    """LayerNorm over nodes and channels of x: [B, C, T, N]."""
    return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
