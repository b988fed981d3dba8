"""Centralised training of one network on all clients' series at once, as a reference for federated results."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from kinfed.core.fleet import Evaluation
from kinfed.core.history import History, Recorder
from kinfed.core.seeding import generator
from kinfed.core.summary import DataFacts, RunCost, Summary, summarise_history
from kinfed.core.tasks import Forecasting
from kinfed.data.federation import Federation
from kinfed.data.split import SPLITS
from kinfed.errors import RunError, UsageError

JOINT = "joint"  # the one model there is, as histories name it
CHUNK = 64  # steps at a time in evaluation


class Reference(Protocol):
    """A published network for series on a graph, and how it is trained; settings are its constructor's arguments."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def clip(self) -> float: ...  # greatest norm of a gradient; infinity: no limit
    @property
    def error(self) -> Literal["absolute", "squared"]: ...  # what is minimised

    def network(self, weights: Tensor, past: int, horizon: int, features: int) -> nn.Module:
        """For the graph weights: [N, N]: x: [B, N, past, F] -> [B, N, horizon], in training perhaps fewer steps."""
        ...

    def optimiser(self, network: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """The optimiser, and the schedule that is moved on after every epoch."""
        ...


@dataclass
class Centralised:
    """A finished training; `history` has an entry an epoch, with the scores of each client's series."""

    federation: Federation
    history: History
    network: nn.Module  # of the selected epoch
    seed: int
    seconds: float

    def summary(self) -> Summary:
        """The results, as the summary of a federated run."""
        return summarise_history(
            self.history,
            method="centralised",
            seeds=[self.seed],
            caution=self.federation.caution,
            data=DataFacts(clients=len(self.federation)),
            cost=RunCost(
                parameters=sum(p.numel() for p in self.network.parameters()),
                seconds=round(self.seconds, 3),
                bytes_up=0,
                bytes_down=0,
                executor="centralised",
            ),
        )


def train(
    reference: Reference,
    federation: Federation,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[History, int], None] = lambda history, epochs: None,
) -> Centralised:
    """Train a reference on the training steps of all series together; validation data select the epoch.

    It is trained, selected and tested on the very readings that the clients of the federation are. Raises UsageError
    for a federation without series or graph, RunError if training diverges.
    """
    started = time.perf_counter()
    series = _Series(federation, torch.device(device))
    assert federation.graph is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "reference").initial_seed())
        network = reference.network(federation.graph.weights, series.past, series.horizon, series.features)
        network.to(device=device, dtype=federation.x.dtype)
        optimiser, schedule = reference.optimiser(network)
        task = replace(series.task, error=reference.error)
        history = History(tuple(federation.names), federation.task)
        recorder = Recorder(history)
        best: dict[str, Tensor] = {}
        steps = series.steps("train")
        for epoch in range(reference.epochs):
            network.train()
            order = torch.randperm(len(steps), generator=generator(seed, "reference", epoch)).to(steps.device)
            for at in steps[order].split(reference.batch):
                x, y = series.read_windows("train", at)
                outputs = network(x)  # [B, N, steps]
                y = y[..., : outputs.shape[-1]]
                loss = task.loss(outputs, y).sum() * y.shape[-1] / (~y.isnan()).sum().clamp(min=1)
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), reference.clip)
                optimiser.step()
            schedule.step()
            if not all(bool(p.isfinite().all()) for p in network.parameters()):
                raise RunError(f"epoch {epoch + 1}: training diverged to NaN or infinity; lower the learning rate")
            network.eval()
            scores = {
                (JOINT, split, metric): values
                for split in SPLITS[1:]
                if len(federation.rows[split][0])
                for metric, values in series.score(split, network).items()
            }
            recorder.add(epoch, 0, 0, Evaluation(scores, {JOINT: {}}))
            if history.select(JOINT) == epoch:
                best = {name: value.detach().clone() for name, value in network.state_dict().items()}
            progress(history, reference.epochs)
        network.load_state_dict(best)
    return Centralised(federation, history, network.eval(), seed, time.perf_counter() - started)


class _Series:
    """All windows that begin at one step, side by side: the pool holds the series end to end."""

    def __init__(self, federation: Federation, device: torch.device) -> None:
        x, y, count = federation.x, federation.y, len(federation)
        is_series = isinstance(federation.task, Forecasting) and x.ndim == 3
        length, odd = divmod(len(x) + x.shape[1] + y.shape[1] - 1, count) if is_series else (0, 0)
        if not is_series or odd or x.untyped_storage().nbytes() != count * length * x.shape[2] * x.element_size():
            raise UsageError("a centralised reference needs windows of series, such as of metr_la; this data has none")
        if federation.graph is None:
            raise UsageError("a centralised reference needs a graph of the series, and this federation has none")
        assert isinstance(federation.task, Forecasting)
        self.task = federation.task
        federation = federation.to(device)
        self.x, self.y = federation.x, federation.y
        self.past, self.features, self.horizon = x.shape[1], x.shape[2], y.shape[1]
        self._first = torch.arange(count, device=device) * length  # [N] where each series begins
        self._used = {split: torch.zeros(count * length, dtype=torch.bool, device=device) for split in SPLITS}
        for split, used in self._used.items():
            used[torch.cat(list(federation.rows[split]))] = True

    def steps(self, split: str) -> Tensor:
        """[T] int64: the steps at which a window of some series begins."""
        return self._used[split].view(len(self._first), -1).any(0).nonzero().flatten()

    def read_windows(self, split: str, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [B, N, past, F] and targets [B, N, horizon] from steps: [B]; NaN where a series has no such window."""
        rows = steps[:, None] + self._first  # [B, N]
        inside = rows.clamp(max=len(self.x) - 1)
        used = self._used[split][rows]
        return self.x[inside], torch.where(used[..., None], self.y[inside], torch.nan)

    @torch.no_grad()
    def score(self, split: str, network: nn.Module) -> dict[str, Tensor]:
        """[N] each: what `Forecasting` says of every client's windows."""
        windows = (self.read_windows(split, part) for part in self.steps(split).split(CHUNK))
        batches = [(network(x), y) for x, y in windows]
        outputs, y = (torch.cat(parts).transpose(0, 1) for parts in zip(*batches, strict=True))  # [N, W, horizon]
        return vmap(self.task.score)(outputs, y, torch.ones_like(y[..., 0]))
