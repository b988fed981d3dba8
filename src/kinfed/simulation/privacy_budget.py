"""The privacy budget of a simulation's clients: how much noise each adds, and what its uploads have cost."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.batches import Draw
from ..core.client import Client
from ..core.method import Method
from ..core.model import Model
from ..core.private.privacy import NoisedSteps, Privacy, choose_interval, count_epsilon, noise_for
from ..core.private.private_client import PrivateClient, StepCounter
from ..core.private.private_sums import ABLE, find_noise
from ..core.private.private_training import Lots, PrivateTrainer, SeededLots, count_steps
from ..core.sharing import unwrap
from ..core.trees import Tree
from ..core.trial import Trial, run_trial
from ..errors import RunError, UsageError

BY_CLIENT = ("noise", "steps", "spent")  # what a summary says of each client


class Budget:
    """What the uploads of a run's clients may reveal of single rows, and how their programs keep to it.

    Noise is as strong as a client needs that takes part in all rounds. A method that uploads nothing needs none.
    """

    def __init__(
        self, privacy: Privacy, method: Method, rounds: int, names: Sequence[str], sizes: Sequence[int]
    ) -> None:
        self.privacy, self.method, self.rounds, self.sizes = privacy, method, rounds, list(sizes)
        self.lots: Lots = SeededLots()
        self.draws: tuple[Draw, ...] | None = None  # of a client in a round; none: nothing is uploaded
        for name, size in zip(names, sizes, strict=True):
            privacy.check_size(name, size)

    @property
    def name(self) -> str:
        """The method's, for errors."""
        return type(unwrap(self.method)).__name__

    @property
    def is_planned(self) -> bool:
        """Whether it is known what a round takes."""
        return self.draws is not None

    def plan(self, client: Client, state: Tree, received: Tree) -> None:
        """Find what a round takes by running the method's program on a client without training it."""
        counted = PrivateClient(client, self.name, StepCounter())
        _, upload = self.method.train(counted, state, received)
        self.draws = tuple(counted.draws) if tree_leaves(upload) else ()

    def restrict(self, program: Callable[[Client], Tree]) -> Callable[..., Tree]:
        """A program before the first round, in which no client may read its rows."""

        def run(client: Client, *_: Any) -> Tree:
            private = PrivateClient(client, self.name, StepCounter())
            result = program(private)
            if private.draws:
                raise RunError(f"{self.name} trains before the first round, which has no price under privacy")
            return result

        return run

    @property
    def train(self) -> Callable[[Client, Tree, Tree], tuple[Tree, Tree]]:
        """The method's program with noised steps."""
        if not self.draws:
            return self.method.train
        trainer = PrivateTrainer(self.privacy, self.lots)

        def run(client: Client, state: Tree, received: Tree) -> tuple[Tree, Tree]:
            private = PrivateClient(client, self.name, trainer)
            result = self.method.train(private, state, received)
            if tuple(private.draws) != self.draws:
                raise RunError(
                    f"round {client.round + 1}: {self.name} takes other steps than in the first round, by which the "
                    "noise was chosen; privacy needs a method that takes the same in every round"
                )
            return result

        return run

    def steps(self, rows: int, rounds: int, noise: float) -> NoisedSteps:
        """The steps of a client with so many rows in so many rounds."""
        draws = self.draws or ()
        rate = min(1.0, draws[0].size / rows) if draws else 1.0
        return NoisedSteps(rate, noise, rounds * sum(count_steps(draw, rows) for draw in draws))

    @cached_property
    def noise(self) -> Tensor:
        """[N] float64: the deviation of each client's noise over the clip; raises UsageError if it is too large."""
        privacy, multipliers = self.privacy, []
        for rows in self.sizes:
            rate, _, count = self.steps(rows, self.rounds, 0.0)
            multipliers.append(noise_for(privacy.limit, privacy.delta, rate, count) if count else 0.0)
        return torch.tensor(multipliers, dtype=torch.float64)

    def count_spent(self, rounds: Sequence[int]) -> list[float]:
        """The epsilon that each client's uploads have cost, after so many rounds in which it took part."""
        costs: dict[NoisedSteps, float] = {}
        result = []
        for rows, noise, count in zip(self.sizes, self.noise.tolist(), rounds, strict=True):
            steps = self.steps(rows, count, noise)
            if steps not in costs:
                interval = choose_interval(self.privacy.limit)
                costs[steps] = count_epsilon([steps], self.privacy.delta, interval) if steps.steps else 0.0
            result.append(costs[steps])
        return result

    def describe(self, rounds: Sequence[int]) -> dict[str, Any]:
        """What a summary says: the promise, and by client its noise, the steps that it took and what they cost."""
        privacy, noise = self.privacy, self.noise.tolist()
        steps = [self.steps(rows, count, 0.0).steps for rows, count in zip(self.sizes, rounds, strict=True)]
        return {
            **_describe_promise(privacy),
            "noise": noise,
            "steps": steps,
            "spent": self.count_spent(rounds),
        }


class ClientBudget:
    """What all clients' uploads together may reveal of any client.

    Noise is as strong as a client needs that takes part in all rounds. It is added to sums, by `sum_privately`.
    """

    def __init__(self, privacy: Privacy, method: Method, rounds: int, clients: int) -> None:
        privacy.check_count(clients)
        self.privacy, self.method, self.rounds = privacy, method, rounds
        self.uploads = True  # whether anything is uploaded, which is known once a round was trained

    def check_statistics(self, statistics: Tree) -> None:
        """Raise UsageError if clients report something before the first round."""
        if tree_leaves(statistics):
            raise UsageError(
                f"{type(unwrap(self.method)).__name__} has each client report statistics before the first round, "
                f"which have no price under privacy; use another method, such as {ABLE}"
            )

    def describe(self, rounds: Sequence[int]) -> dict[str, Any]:
        """What a summary says: the promise, and by client its noise, the rounds that it took part in and their cost."""
        noise = find_noise(self.privacy, self.rounds) if self.uploads else 0.0
        interval = choose_interval(self.privacy.limit)
        costs = {
            count: count_epsilon([NoisedSteps(1.0, noise, count)], self.privacy.delta, interval) if noise else 0.0
            for count in {*rounds}
        }
        return {
            **_describe_promise(self.privacy),
            "noise": [noise] * len(rounds),
            "steps": list(rounds),
            "spent": [costs[count] for count in rounds],
        }


def _describe_promise(privacy: Privacy) -> dict[str, Any]:
    promise = {key: getattr(privacy, key) for key in ("epsilon", "delta", "clip", "unit")}
    return promise if privacy.columns is None else {**promise, "columns": privacy.columns}


def check_rows_are_separate(model: Model, x: Tensor) -> None:
    """Raise UsageError for a model that cannot be trained by gradients of single rows; x: [n, ...] are examples."""
    run_trial(model, x, Trial.check_single_rows)
