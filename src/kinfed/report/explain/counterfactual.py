"""Counterfactual: what one client would score if it learned from others, by a finished run's last state."""

import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...core import trees
from ...core.mixins import Explains
from ...core.sharing import Divided, unwrap
from ...core.tasks import selected_task
from ...errors import UsageError
from ...ops.mixing import mix, mix_freely
from ...runs import further_rounds
from ...runs.run import FinalServer
from ...simulation.execution import Execution
from ...simulation.simulation import Simulation

MIXED = "mixed"  # the model that a client is scored with as it was sent
TOLERANCE = 1e-5  # of the largest number: how far a mixture may be from what the method sends


class Counterfactual:
    """One client of a reopened run, whose mixture of the clients' last models can be made and scored again.

    `row: [N]`, or [L, N] with one a layer, are its weights after the last round.
    """

    def __init__(self, run: FinalServer, client: int, data_dir: Path | None = None) -> None:
        """`client` is a position. Raises UsageError unless its mixture by `row` is what the method sends to it."""
        method, summary = run.method, run.saved.summary
        models = getattr(run.server, Explains.from_method(unwrap(method)).mixes, None)
        if models is None:
            raise UsageError(f"{summary.method} keeps no clients' models that its server mixes by these weights")
        if run.state.names != run.saved.names:
            raise UsageError(f"{run.saved.folder} ended before its late clients joined")
        self.run, self.client, self.data_dir, self._models = run, client, data_dir, models  # [N, d]
        roster = replace(run.roster, round=run.state.done - 1)  # as when the last round was scored
        self._sent = trees.pick(method.send(roster, run.server, roster.everyone), torch.tensor([client]))
        relation = method.relation(roster, run.server, roster.everyone)
        sent = trees.model_of(self._sent)
        if relation is None or sent is None:
            raise UsageError(f"what {summary.method} sends is no mixture of models")
        self.row = relation[..., client, :] if isinstance(relation, Tensor) else relation.row(client)
        mixed = self.mixture(self.row)
        most = TOLERANCE * max(1.0, float(sent[0].abs().max()))
        if mixed.shape != sent[0].shape or bool((mixed - sent[0]).abs().max() > most):
            raise UsageError(
                f"the clients' last models, mixed by these weights, are not what {summary.method} sends to this client"
            )

    def mixture(self, row: Tensor) -> Tensor:
        """[d] the mixture of the clients' models by a row: [N] or [L, N]."""
        method = self.run.method
        layout = method.sharing.shared_layout if isinstance(method, Divided) else self.run.model.layout
        return (mix_freely if row.ndim == 1 else mix)(row[..., None, :], self._models, layout)[0]

    def score(self, row: Tensor) -> float:
        """The task's metric of the mixture by a row: [N] or [L, N], on the client's test examples.

        Raises UsageError unless the data are those of the run.
        """
        fleet, run = self._fleet, self.run
        sent = self._sent._replace(**{trees.model_field(self._sent): self.mixture(row)[None]})
        here = torch.tensor([self.client], device=fleet.device)
        scores = fleet.evaluate(run.state.done - 1, here, tree_map(lambda t: t.to(fleet.device), sent)).scores
        key = MIXED, "test", fleet.task.metric
        if key not in scores:
            raise UsageError(f"{run.saved.summary.method} scores no model named '{MIXED}'")
        return float(scores[key][0])

    @cached_property
    def _fleet(self) -> Simulation:
        """All clients of the run with their examples."""
        run, experiment = self.run, self.run.experiment
        folder, seed = run.saved.folder, run.saved.summary.seeds[0]
        if experiment.attack is not None:
            raise UsageError(f"the clients of {folder} were trained under an attack")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself said what is to be known of its data
            federation = experiment.federation(self.data_dir, seed, former=further_rounds.read_former(folder, seed))
        if experiment.rounds.select_by:
            federation = replace(federation, task=selected_task(federation.task, experiment.rounds.select_by))
        if federation.digest() != run.state.how.get("data"):
            raise UsageError(f"the data differ from those that {folder} was trained with")
        fleet = Simulation(
            federation, run.model, run.method, experiment.training, seed=seed, execution=Execution("loop", 1)
        )
        fleet.states.restore(run.state.states(fleet.states.keep()))
        return fleet


def remove_client(row: Tensor, other: int) -> Tensor | None:
    """The row: [N] or [L, N] with the weight of one client taken out, divided by what is left; None if nothing is."""
    rest = row.index_fill(-1, torch.tensor([other], device=row.device), 0)
    left = rest.sum(-1, keepdim=True)
    return None if bool((left <= 1e-6).any()) else rest / left


def isolate_client(row: Tensor, client: int) -> Tensor:
    """The row with which a client hears nobody but itself."""
    return torch.zeros_like(row).index_fill(-1, torch.tensor([client], device=row.device), 1)
