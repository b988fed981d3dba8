"""Which executor runs a simulation: the requested one, or one by a rule on the model, the work per step and the device.

No timing is involved, so equal runs on a machine take the same executor and end with the same bits.
`benchmarks/choosing.py` compares the rule with measurements: docs/evidence/choosing.md.
"""

import math

import torch
from torch import nn

from ..core.mixins import Solves
from ..core.model import Model
from ..core.optimiser import SGD
from ..core.training import Training
from ..core.trial import Trial, run_trial
from ..errors import UsageError
from ..ops import gemm
from ..ops.fused import Fused, Unfused
from .clients import Clients
from .executors import Batched, Executor, Loop

NAMES = ("fused", "vmap", "loop")
FEW = 5  # clients in a round, below which there is little for a CPU to batch
WORK = 1 << 22  # parameters times examples of a step, and pixels of each if these are convolved: a CPU's for one client
BATCHED, FUSED = 20, 64  # clients of a chunk on a CPU, under vmap and in fused form
CACHED = 1 << 14  # rows of a chunk, up to which the sums of more clients at once stay in a CPU's cache


def choose(
    requested: str,
    clients: Clients,
    model: Model,
    training: Training,
    cohort: int,
    workers: int,
    chunk: int | None,
    solver: Solves | None = None,
) -> tuple[Executor, str]:
    """The requested executor, or for "auto" the one that suits rounds of `cohort` clients; and why.

    A method that is a `solver` says what it takes. Raises UsageError if the requested executor cannot run the model,
    or the method.
    """
    solver = solver or Solves()
    gradients = solver.takes_gradients
    if not solver.batched and requested in ("auto", "loop"):
        return Loop(workers), "the method fits one client after the other"
    if not solver.batched:
        raise UsageError(f"the method fits one client after the other, so not by '{requested}'; use executor 'loop'")
    form = _fused_form(clients, model, training)
    shares = False
    if isinstance(form, Unfused):
        model.draws, model.writes, shares = run_trial(model, clients.pool.x, Trial.check_training)
    name, reason = (
        _rule(clients, model, training, cohort, form, gradients) if requested == "auto" else (requested, "as requested")
    )
    if name == "loop" and shares:
        return Loop(1), f"{reason}; one after the other, as copies of the module keep numbers in a place of all"
    if name == "loop":
        return Loop(workers), reason
    fused = form if name == "fused" and isinstance(form, Fused) else None
    if requested != "auto" and not fused:
        problem = str(form) if name == "fused" else _problem_with_vmap(clients, model, gradients=gradients)
        if problem:
            raise UsageError(f"this model cannot run under executor '{name}' ({problem}); use executor 'loop'")
    on_cpu = model.theta.device.type == "cpu"
    if chunk is None:
        on_this_cpu = FUSED if fused else BATCHED
        if not gradients:  # a chunk of sums over few rows is mostly Python's
            on_this_cpu = max(on_this_cpu, min(FUSED, CACHED // max([1, *clients.sizes["train"]])))
        chunk = on_this_cpu if on_cpu else chunk_that_fits(clients, model, training, fused)
    return Batched(chunk, name, workers if on_cpu else 1, fused), reason


def _rule(
    clients: Clients, model: Model, training: Training, cohort: int, form: Fused | Unfused, gradients: bool
) -> tuple[str, str]:
    """The executor for a model and the work of its rounds, and the reason."""
    if isinstance(form, Fused):
        return "fused", "plain SGD on layers that have a fused form"
    if model.theta.device.type == "cpu":
        if cohort < FEW:
            return "loop", f"with fewer than {FEW} clients in a round there is little to batch"
        work = model.layout.whole.size * min(training.batch, max(clients.sizes["train"]))
        what = "large steps"
        if any(isinstance(m, nn.modules.conv._ConvNd) for m in model.module.modules()):
            work, what = work * math.prod(clients.pool.x.shape[2:]), "convolutions"
        if work > WORK:
            return "loop", f"{what} on a CPU run faster client by client"
    if problem := _problem_with_vmap(clients, model, slow=True, gradients=gradients):
        return "loop", f"vmap cannot take this model: {problem}"
    return "vmap", f"many small steps at once; {form}"


def _fused_form(clients: Clients, model: Model, training: Training) -> Fused | Unfused:
    """The fused form of local training, or why there is none."""
    if not isinstance(training.optimiser, SGD) or training.optimiser.momentum or model.bf16:
        return Unfused("only plain SGD in full precision has a fused form")
    try:
        return Fused.build(model.original, model.layout, clients.task, clients.pool.x.shape[1:], model.frozen)
    except Unfused as problem:
        return problem


def _problem_with_vmap(clients: Clients, model: Model, slow: bool = False, gradients: bool = True) -> str:
    """Why the model's passes cannot be batched over clients; empty if they can.

    With `slow`, also if vmap would process the clients one by one; without `gradients`, of its answers alone.
    """
    if model.draws:
        return "its training pass draws random numbers of its own"
    try:
        run_trial(model, clients.pool.x, Trial.check_filling)
        run_trial(model, clients.pool.x, lambda trial: trial.check_batched(slow, gradients))
    except Exception as problem:
        return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")[:160]
    return ""


def suits_onednn(model: Model, training: Training) -> bool:
    """Whether local training sends its products on the CPU to oneDNN: by the largest weight's, see `gemm.suits`."""
    if model.theta.dtype != torch.float32 or model.theta.device.type != "cpu":
        return False
    shapes = [e.shape for e in model.layout.entries if e.trainable and len(e.shape) == 2]
    return any(gemm.suits((training.batch, inner, out)) for out, inner in shapes)


def chunk_that_fits(clients: Clients, model: Model, training: Training, fused: Fused | None) -> int:
    """How many clients' training half of a GPU's memory holds, by what a step of the largest takes; 20 at least.

    Of all its memory, not of what other programs leave: equal runs must have equal chunks. What does not fit after all
    is halved by the executor.
    """
    device, sizes, single = model.theta.device, clients.sizes["train"], Batched(1, fused=fused)
    largest = torch.tensor([sizes.index(max(sizes))], device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    single(clients, model, training, 0, largest, lambda client, t, _: client.descend(t, steps=1), model.theta[None])
    bytes_each = torch.cuda.max_memory_allocated(device) - before
    free = torch.cuda.get_device_properties(device).total_memory - before
    return max(20, min(len(clients), free // 2 // max(bytes_each, 1)))
