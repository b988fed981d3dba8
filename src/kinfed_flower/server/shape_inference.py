"""The client's program, run by the server on made-up examples to know the form of what clients must send."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kinfed.core import trees
from kinfed.core.fleet import Key
from kinfed.core.mixins import weigh
from kinfed.core.model import Model
from kinfed.core.private.private_sums import check_masks
from kinfed.core.sharing import unwrap
from kinfed.core.tasks import Classification, Quantiles, Task
from kinfed.core.trees import Tree
from kinfed.data.federation import Federation
from kinfed.errors import UsageError
from kinfed.runs.fit import check_fit
from kinfed.simulation.execution import Execution
from kinfed.simulation.simulation import Simulation

from ..plan import Plan
from ..wire import messages

ALONE = torch.tensor([0])


class DryRun:
    """A client with two training examples that are all zero. Its numbers mean nothing; their shapes and types do."""

    def __init__(self, planned: Plan, model: Model, shape: tuple[int, ...], outputs: int, task: Task) -> None:
        """Raises UsageError for a model that cannot take such an example, or gives what the task cannot use."""
        self.task = task
        x = torch.zeros(4, *shape)
        width = outputs // len(task.quantiles) if isinstance(task, Quantiles) else outputs
        y = torch.zeros(4, dtype=torch.int64) if isinstance(task, Classification) else torch.zeros(4, width)
        rows: dict[str, list[Tensor]] = {
            "train": [torch.tensor([0, 1])],
            "validation": [torch.tensor([2])],
            "test": [torch.tensor([3])],
        }
        learning, self._validates = planned.learning, bool(planned.split.validation)
        federation = Federation(x, y, rows, task)
        check_fit(model, federation, made_up=True)
        self._simulation = Simulation(
            federation, model, learning.method, learning.training, execution=Execution("loop", onednn=False)
        )
        self.client_statistics: Tree = tree_map(lambda t: t[0], self._simulation.client_statistics())
        self._state = tree_map(torch.clone, self._simulation.state)
        self._uploads: dict[Any, Tree] = {}

    def scores(self, round: int, received: Tree) -> list[Key]:
        """Names of a client's scores, the headline model's first; of validation only if the split has such examples."""
        self._simulation.state = self._state
        scores = self._simulation.evaluate(round, ALONE, trees.for_one(received)).scores
        return [key for key in scores if self._validates or key[1] != "validation"]

    def check_masks(self, round: int, received: Tree) -> None:
        """Raise UsageError if a method cannot do with masked sums of what clients weigh by themselves."""
        method, sim = self._simulation.method, self._simulation
        check_masks(method, received, self.upload(round, received), self.client_statistics)
        privacy = sim.training.privacy
        equal = torch.ones(2) if privacy is not None and privacy.unit == "client" else None
        pair = replace(
            sim.roster(),
            sizes=torch.tensor([3, 5]),
            tags=torch.arange(2),
            client_statistics=(),
            example_weights=equal,
        )
        both = weigh(method, pair, pair.everyone)
        alone = [weigh(method, pair.part(torch.tensor([i])), ALONE) for i in range(2)]
        expected = both.new_tensor([1.0, 1.0]) if equal is not None else torch.cat(alone)
        if not torch.allclose(both / both.sum(), expected / expected.sum()):
            raise UsageError(
                f"{type(unwrap(method)).__name__} weighs a client by what others have, and with privacy.masked each "
                "site weighs itself; use another method, or leave masks out"
            )

    def upload(self, round: int, received: Tree) -> Tree:
        """What a client uploads in reply to `received`."""
        form = tuple(sorted(messages.forms(trees.pack(received)).items()))
        if form not in self._uploads:
            self._simulation.state = self._state
            _, uploads = self._simulation.train(round, ALONE, trees.for_one(received))
            self._uploads = {form: tree_map(lambda t: t[0], uploads)}
        return self._uploads[form]
