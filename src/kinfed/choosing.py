"""Which executor runs a simulation: as asked, by a rule for short jobs, by a measurement for the others."""

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from .client import Training
from .errors import UsageError
from .executors import Batched, Clients, Executor, Loop, threads
from .fused import Fused, Unfused
from .gemm import probe
from .model import Model
from .optimiser import SGD

SHARE = 0.05  # of the planned work that may be spent on measuring
SECONDS = 1.0  # that measuring may take
STEPS = (5, 2, 1)  # how many local steps of each client are timed together
TURNS = 6  # how often at most, twice at least: other work on the machine must not decide
HANDFUL = 20  # clients that are timed
BATCHED, FUSED = 20, 64  # clients of a chunk on a CPU, under vmap and in fused form
SMALL = 1 << 20  # multiplications, below which a product is not worth a probe of its library


class Candidate(NamedTuple):
    """An executor, and what speaks against it."""

    run: Executor
    problem: str = ""  # why it cannot run this model
    slow: str = ""  # why it need not be tried here


def candidates(clients: Clients, model: Model, training: Training, workers: int, chunk: int | None) -> list[Candidate]:
    """All executors, the most special first: the rule for short jobs takes the first that nothing speaks against."""
    form, unfused = None, "only plain SGD in full precision has a fused form"
    if isinstance(training.optimiser, SGD) and not (training.optimiser.momentum or model.bf16):
        try:
            form = Fused.of(model.original, model.layout, clients.task, clients.pool.x.shape[1:])
        except Unfused as problem:
            unfused = str(problem)
    unbatched, slow = _problem_with_vmap(clients, model), ""
    on_cpu = model.theta.device.type == "cpu"
    if on_cpu and any(isinstance(m, nn.modules.conv._ConvNd) for m in model.module.modules()):
        slow = "convolutions on a CPU run faster client by client"
    elif len(clients) < 4:
        slow = "with fewer than 4 clients there is little to batch"
    return [
        Candidate(Batched(chunk or FUSED, "fused", workers if on_cpu else 1, form), unbatched if form else unfused),
        Candidate(Batched(chunk or BATCHED, threads=workers if on_cpu else 1), unbatched, slow),
        Candidate(Loop(workers)),
    ]


def choose(
    asked: str, known: list[Candidate], clients: Clients, model: Model, training: Training, cohort: int, rounds: int
) -> tuple[Executor, str]:
    """The executor asked for, or for "auto" the one that suits `rounds` rounds with cohorts of this size; and why.

    Raises UsageError if the one asked for is unknown or cannot run the model.
    """
    if asked != "auto":
        named = [candidate for candidate in known if candidate.run.name == asked]
        if not named:
            names = ", ".join(["auto", *(candidate.run.name for candidate in known)])
            raise UsageError(f"executor must be one of {names}; got '{asked}'")
        if named[0].problem:
            raise UsageError(
                f"this model cannot run under executor '{asked}' ({named[0].problem}); use executor 'loop'"
            )
        return named[0].run, "as asked"
    able = [candidate for candidate in known if not (candidate.problem or candidate.slow)]
    if len(able) == 1:
        against = [c.slow or f"{c.run.name} cannot take this model: {c.problem}" for c in known if c.slow or c.problem]
        return able[0].run, min(reversed(against), key=lambda reason: "cannot take" in reason)  # the least special's
    handful = min(cohort, HANDFUL)
    planned = rounds * cohort * float(training.count_steps(torch.tensor(clients.sizes["train"])).double().mean())
    allowed = SHARE * planned / (len(able) * handful)
    if allowed < 1 + 2 * STEPS[-1]:
        return able[0].run, f"{planned:.0f} local steps are too few to measure; batching clients is the rule"
    return _measure(able, clients, model, training, handful, allowed)


def _measure(
    able: list[Candidate], clients: Clients, model: Model, training: Training, handful: int, allowed: float
) -> tuple[Executor, str]:
    """Time at most `allowed` local steps of a handful of clients, small and large, under each candidate."""
    order = torch.tensor(clients.sizes["train"]).argsort(stable=True)
    some = order[torch.linspace(0, len(order) - 1, handful).long()].to(model.theta.device)
    theta = model.theta.expand(handful, -1)

    def seconds(run: Executor, steps: int) -> float:
        started = time.perf_counter()
        run(clients, model, training, 0, some, lambda client, theta: client.descend(theta, steps=steps), theta)
        if theta.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    first = [seconds(candidate.run, 1) for candidate in able]  # warms up
    fits = [n for n in STEPS if 1 + 2 * n <= allowed and 2 * n * sum(first) < SECONDS]
    timed = [] if fits else [first]
    for turn in range(min(TURNS, int((allowed - 1) // fits[0])) if fits else 0):
        if turn >= 2 and fits[0] * (turn + 1) * sum(map(sum, timed)) / turn > SECONDS:
            break
        timed.append([seconds(candidate.run, fits[0]) for candidate in able])
    least = [min(times) for times in zip(*timed, strict=True)]
    said = ", ".join(f"{c.run.name} {1000 * s:.3g}" for c, s in zip(able, least, strict=True))
    return able[least.index(min(least))].run, f"measured, ms for a step of {handful} clients: {said}"


def _problem_with_vmap(clients: Clients, model: Model) -> str:
    """Why the model's training pass cannot be batched over clients; empty if it can."""
    rows = clients.rows["train"][0][:2]
    x, y = clients.pool.x[rows], clients.pool.y[rows]
    weight = torch.ones(len(rows), device=x.device, dtype=model.theta.dtype)

    def slope(theta: Tensor, x: Tensor) -> Tensor:
        key = torch.zeros((), dtype=torch.int64, device=x.device)
        outputs, _ = model.run(model.layout.tensors(theta), x, weight, key)
        return clients.task.loss(outputs, y).mean()

    try:
        vmap(grad(slope))(model.theta.expand(2, -1).clone(), x.expand(2, *x.shape))
    except Exception as problem:
        return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")[:160]
    return ""


def suits_onednn(model: Model, training: Training) -> bool:
    """Whether local training sends its products on the CPU to oneDNN: a probe of the largest says so."""
    theta, batch = model.theta, training.batch
    shapes = [e.shape for e in model.layout.entries if e.trainable and len(e.shape) == 2]
    out, inner = max(shapes, key=math.prod, default=(0, 0))
    if theta.dtype != torch.float32 or theta.device.type != "cpu" or batch * inner * out < SMALL:
        return False
    with threads(1):  # as the workers of `loop`; a fused pair shares a product client by client
        return probe((batch, inner, out)).verdict


def chunk_that_fits(clients: Clients, model: Model, training: Training) -> int:
    """How many clients' training half of a GPU's free memory holds, by what a step of the largest takes; 20 at least.

    What does not fit after all is halved by the executor.
    """
    if _problem_with_vmap(clients, model):
        return 20
    sizes = clients.sizes["train"]
    largest = torch.tensor([sizes.index(max(sizes))], device=model.theta.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Batched(1)(clients, model, training, 0, largest, lambda client, t: client.descend(t, steps=1), model.theta[None])
    each = torch.cuda.max_memory_allocated() - before
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return max(20, min(len(clients), free // 2 // max(each, 1)))
