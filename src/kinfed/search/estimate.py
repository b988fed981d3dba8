"""Estimate: what a run will take in time and memory, from a few rounds of it with few examples a client."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.engine import Rounds
from ..core.mixins import model_for
from ..core.sharing import Sharing
from ..data.federation import Federation
from ..data.split import SPLITS
from ..runs.config.experiment import Experiment
from ..runs.fit import seconds_by_round
from ..runs.footprint import check, footprint
from ..simulation.devices import pick_device
from ..simulation.execution import Execution

TRIED = 3  # rounds of a trial: the first warms up, and the last is evaluated
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")  # where Linux keeps a process's peak


class Cost(NamedTuple):
    """What a run with one seed takes."""

    seconds: float
    memory: int  # bytes at the peak, of the whole process
    measured: str  # from what


class Trial(NamedTuple):
    """What a round and an evaluation took with so many training examples, all clients together."""

    examples: int
    rounds: int
    round: float
    evaluation: float


def estimate(experiment: Experiment, federation: Federation, execution: Execution, budget: float = 5.0) -> Cost:
    """Time the real clients with ever more of their examples, for about `budget` seconds, and extrapolate linearly.

    `federation` is the experiment's, of its first seed; the time that it takes to load is not counted.
    A trial is three rounds, the first to warm up and the last evaluated. Time grows with the examples of all clients
    and with a part that does not; local work in steps rather than epochs has only the latter. Raises UsageError, as
    `fit` would, if the server needs more memory than there is.
    """
    device, method, seed = pick_device(execution.device), experiment.method, experiment.seed
    model = model_for(method, experiment.module(federation, seed), None, federation.x.dtype, seed)
    layout = Sharing.from_method(method, model.layout).shared_layout
    share = experiment.participation.share
    needed = footprint(method, layout, len(federation), share, experiment.rounds, model.theta.element_size())
    check(needed, len(federation), device)
    _reset_peak(device)
    most = int(federation.sizes.max())
    total = int(federation.sizes.sum())
    few = experiment.training.batch
    trials: list[Trial] = []
    spent = 0.0
    while not trials or (trials[-1].examples < total and spent < budget):
        trials.append(_try(experiment, _short(federation, min(few, most)), execution))
        spent += TRIED * trials[-1].round + trials[-1].evaluation
        few *= 4
    rounds = experiment.rounds.count if trials[-1].rounds == TRIED else trials[-1].rounds  # or a model is solved before
    evaluations = -(-rounds // experiment.rounds.evaluate_every)
    seconds_of_round = _extrapolate(total, [(trial.examples, trial.round) for trial in trials])
    scored = _extrapolate(total, [(trial.examples, trial.evaluation) for trial in trials])
    tried = trials[-1].examples / total
    return Cost(
        rounds * seconds_of_round + evaluations * scored,
        max(_peak(device), sum(part.bytes for part in needed)),
        "all examples" if tried == 1 else f"{100 * tried:.2g} % of the examples",
    )


def _try(experiment: Experiment, federation: Federation, execution: Execution) -> Trial:
    *earlier, last = seconds_by_round(
        experiment.method,
        federation,
        experiment.module(federation, experiment.seed),
        rounds=Rounds(TRIED, evaluate_every=TRIED),
        training=experiment.training,
        participation=experiment.participation.share,
        seed=experiment.seed,
        execution=execution,
        attack=experiment.attack,
    )
    usual = earlier[-1] if earlier else last
    return Trial(int(federation.sizes.sum()), len(earlier) + 1, usual, max(0.0, last - usual))


def _short(federation: Federation, few: int) -> Federation:
    """The same clients with `few` training examples at most; in proportion as many to validate and test on.

    These are training examples too, so that no class is tested that nobody trains on.
    """
    rows: dict[str, list[Tensor]] = {split: [] for split in SPLITS}
    for train, *others in zip(*(federation.rows[split] for split in SPLITS), strict=True):
        kept = min(few, len(train))
        rows["train"].append(train[:kept])
        for split, other in zip(SPLITS[1:], others, strict=True):
            count = -(-len(other) * kept // len(train))
            rows[split].append(train[torch.arange(count) % kept])
    return replace(federation, rows=rows)


def _extrapolate(examples: int, points: Sequence[tuple[int, float]]) -> float:
    """Seconds for so many `examples`, along the line through the last two points; in proportion if there is but one."""
    (last, seconds), before = points[-1], points[-2] if len(points) > 1 else (0, 0.0)
    rate = max(0.0, (seconds - before[1]) / max(1, last - before[0]))
    return seconds + rate * (examples - last)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if RESET.exists():
        RESET.write_text("5")


def _peak(device: torch.device) -> int:
    """Bytes, of a GPU where that does the work; where the peak cannot be reset it is that of all the process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
