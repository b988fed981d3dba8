"""Clients at one place that evaluate and train together: what a round computes, for one client or as one batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kinfed.core import trees
from kinfed.core.fleet import Evaluation
from kinfed.core.trees import Axis, Tree
from kinfed.data.federation import Federation
from kinfed.errors import RunError, UsageError
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation


class Part(NamedTuple):
    """What a client's round needs. What is received is as for a cohort of one."""

    federation: Federation  # its examples
    simulation: Simulation  # of this client alone
    base: Tree  # its private state before
    evaluate: tuple[int, Tree] | None  # a round, and what its models are made of
    train: tuple[int, Tree] | None  # a round, and what training starts from


class Outcome(NamedTuple):
    """What came of it, [K, ...] for K clients."""

    evaluation: Evaluation | None
    upload: Tree
    state: Tree
    problem: str = ""  # why there is no evaluation, under privacy


@contextmanager
def computing() -> Iterator[None]:
    """Raise UsageError where the method's program cannot take what the server sent.

    The message names the kind of the error alone, because it goes to the server, and an error's text may quote rows.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as problem:
        cause = problem.__cause__
        is_quoted = cause is not None and type(cause).__name__ in str(problem)  # as by executors
        if isinstance(problem, UsageError | RunError) and not is_quoted:
            raise
        kind = type(cause if is_quoted else problem).__name__
        raise UsageError(
            f"the method cannot compute with what the server sent ({kind}); install the same version"
        ) from problem


@computing()
def compute(parts: Sequence[Part], simulation: Simulation | None = None) -> Outcome:
    """Evaluate and train K clients, of one round of one experiment; `simulation` is of all of them, in this order.

    Without it there is one client, whose own is used.
    """
    first, fleet = parts[0], simulation or parts[0].simulation
    ids = torch.arange(len(parts))
    base = tree_map(lambda *t: torch.stack(t), *(part.base for part in parts))
    evaluation: Evaluation | None = None
    upload: Tree = ()
    trouble = ""
    if first.evaluate is not None:
        fleet.state = tree_map(torch.clone, base)
        received = together([part.evaluate[1] for part in parts if part.evaluate is not None])
        try:
            evaluation = fleet.evaluate(first.evaluate[0], ids, received)
        except Exception as problem:
            if fleet.training.noise is None:
                raise
            trouble = f"{type(problem).__name__}: {problem}"  # a refusal would say something of rows
    if first.train is not None:
        fleet.state = tree_map(torch.clone, base)
        _, upload = fleet.train(
            first.train[0], ids, together([part.train[1] for part in parts if part.train is not None])
        )
    return Outcome(evaluation, upload, fleet.state, trouble)


def together(received: Sequence[Tree]) -> Tree:
    """Messages to cohorts of one as a message to all; raises ValueError if what is shared is not the same."""

    def join(axis: Axis, *parts: Tensor) -> Tensor:
        if axis is not Axis.SHARED:
            return torch.cat(parts)
        if not all(torch.equal(parts[0], other) for other in parts[1:]):
            raise ValueError("what all clients share differs")
        return parts[0]

    return tree_map(join, trees.axes(received[0]), *received)


def divide(outcome: Outcome, count: int) -> list[Outcome]:
    """The outcome of each of so many clients, as of a cohort of one."""

    def row(tree: Tree, i: int) -> Tree:
        return tree_map(lambda t: t[i : i + 1], tree)

    evaluation = outcome.evaluation
    return [
        Outcome(
            None
            if evaluation is None
            else Evaluation(
                {key: values[i : i + 1] for key, values in evaluation.scores.items()},
                {name: trees.pick(model, slice(i, i + 1)) for name, model in evaluation.models.items()},
            ),
            row(outcome.upload, i),
            row(outcome.state, i),
        )
        for i in range(count)
    ]


def _join_weights(federations: Sequence[Federation]) -> Tensor | None:
    """[n] the weights of several clients' examples, 1 where one has none; None if all count as one."""
    if all(federation.weights is None for federation in federations):
        return None
    weights = ((torch.ones(len(f.y)) if f.weights is None else f.weights) for f in federations)
    return torch.cat(list(weights))


def join_simulations(parts: Sequence[Part], device: str) -> Simulation:
    """One simulation of several clients, each of which has one of its own, of the same experiment."""
    first = parts[0].simulation
    federations = [part.federation for part in parts]
    *starts, _ = accumulate((len(f.y) for f in federations), initial=0)  # where the examples of each begin
    rows = {
        split: [f.rows[split][0] + start for f, start in zip(federations, starts, strict=True)]
        for split in federations[0].rows
    }
    federation = Federation(
        torch.cat([f.x for f in federations]),
        torch.cat([f.y for f in federations]),
        rows,
        federations[0].task,
        [name for f in federations for name in f.names],
        weights=_join_weights(federations),
    )
    execution = Execution("auto", onednn=False, device=device)
    return Simulation(federation, first.model, first.method, first.training, seed=first.seed, execution=execution)
