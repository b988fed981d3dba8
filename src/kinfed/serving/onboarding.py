"""Onboarding: a newcomer to a finished run gets its model from the frozen federation, by the method's own rule."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core import trees
from ..core.graph import Graph
from ..core.method import Method, Roster
from ..core.mixins import Admits, Extends, Predicts, exporter, join, reduce_uploads
from ..core.model import Model
from ..core.seeding import tags
from ..core.sharing import Divided, unwrap
from ..core.summary import ClientScores, spread
from ..core.tasks import Task
from ..core.trees import Tree
from ..data.federation import Federation
from ..data.tables.schema import Own
from ..errors import UsageError
from ..files import replacing
from ..methods.fedavg_ft import FedAvgFT
from ..methods.local import Local
from ..runs.config import experiment as config
from ..runs.config.plugins import short_name
from ..runs.models_file import ALL, write_models
from ..runs.run import FinalServer, Run
from ..runs.run_folder import RunFolder
from ..simulation.execution import Execution
from ..simulation.simulation import Simulation
from .joining_clients import Newcomer, share_for_validation

ALONE, SHARED, BEST = "local", "fedavg", "best existing"  # what a newcomer could have without the method
TUNED = ", tuned"
NOT_THEIRS: Any = dict.fromkeys(("intervals", "recall", "relation", "attack", "verdict", "baselines", "sites"))


class Outcome(NamedTuple):
    """What a newcomer has with its first `shots` examples."""

    client: str
    shots: int
    scores: dict[str, float]  # in the task's metric, on its test examples, by where the model is from
    personal: Tree  # what its model by the method's rule consists of; None if it has none
    existing: str = ""  # whose model is the best existing one, by the newcomer's examples
    scales: Mapping[str, Own] = {}  # the newcomer's scale of columns in units of each client's own


class FrozenServer(FinalServer):
    """A finished federation that newcomers join one by one, each as if it were the only one; nothing else changes."""

    def __init__(self, saved: Run, task: Task, execution: Execution = Execution()) -> None:
        """Raises UsageError if the run kept no state, or if its method has nothing for a newcomer."""
        if saved.method is not None and (why := Admits.from_method(saved.method).refuses):
            raise UsageError(f"{saved.folder} was trained by {saved.summary.method}, which no newcomer can join: {why}")
        super().__init__(saved, task)
        self.execution = execution
        kind = type(unwrap(self.method))
        self.name = short_name(self.experiment.method_name)
        # Whether its models are tuned as any module is.
        self.plain = not issubclass(kind, Extends | Predicts)

    @cached_property
    def bare(self) -> Model:
        """The module as Local and FedAvg train it: without layers that the method adds; beside a choice their own."""
        beside = self.saved.folder.reference("fedavg")
        experiment = self.experiment
        summary = self.saved.summary
        if beside.is_finished and self.saved.summary.sites is None:
            experiment, summary = config.of_run(beside.config), beside.read_summary()
        return Model(experiment.architecture(summary), dtype=self.model.theta.dtype)

    def fleet(self, federation: Federation, method: Method, model: Model) -> Simulation:
        """A newcomer, alone, as clients of a method."""
        seed = self.roster.seed
        training = replace(self.experiment.training, privacy=None)  # as nothing leaves a newcomer
        return Simulation(federation, model, method, training, seed=seed, execution=self.execution)

    def with_room(self, newcomer: Newcomer, size: int, weight: float | None = None) -> Roster:
        """The roster with the newcomer as its last client, who has so many training examples of this weight in all."""
        roster, graph = self.roster, self.roster.graph
        if graph is not None:
            count = len(roster)
            weights = torch.nn.functional.pad(graph.weights, (0, 1, 0, 1))
            if newcomer.links is not None:
                weights[..., count, :count], weights[..., :count, count] = newcomer.links
            graph = Graph(weights, graph.origin)
        sizes = torch.cat([roster.sizes, roster.sizes.new_tensor([size])])
        counted = roster.example_weights
        if counted is not None:
            counted = torch.cat([counted, counted.new_tensor([size if weight is None else weight])])
        names = torch.cat([roster.tags, tags([newcomer.name])])
        return replace(roster, sizes=sizes, tags=names, graph=graph, example_weights=counted)

    def as_sent(self, sent: Tree) -> Tensor | None:
        """[d] the model that a message holds; None if a client makes it of what it is sent by its own examples."""
        field = trees.model_field(sent)
        if not field:
            return None
        theta: Tensor = getattr(sent, field)
        theta = theta.reshape(-1, theta.shape[-1])[0]
        if isinstance(self.method, Divided):
            sharing = self.method.sharing
            theta = sharing.compose(theta, sharing.cut(self.model.theta, "personal"))
        return theta

    def join(self, newcomer: Newcomer, count: int, rounds: int) -> tuple[dict[str, float], dict[str, Tree]]:
        """Scores and models that a newcomer is sent after so many rounds of its own with `count` examples, by name.

        Without examples it is the model that it is sent at once.
        """
        here, begin = torch.zeros(1, dtype=torch.int64), self.state.done
        fleet = self.fleet(self.make_federation(newcomer, count), self.method, self.model) if count else None
        weight = None if fleet is None or fleet.weights is None else float(fleet.weights[0])
        roster = self.with_room(newcomer, 1 if fleet is None else int(fleet.sizes[0]), weight)
        new = roster.everyone[-1:]
        server = self.method.add_clients(roster, self.server, new)

        def send(at: int) -> tuple[Roster, Tree]:
            now = replace(roster, round=at)
            return now, trees.pick(self.method.send(now, server, now.everyone), new)

        if fleet is None:
            theta = self.as_sent(send(begin)[1])
            scores = {} if theta is None else {"sent": self.score(newcomer, lambda x: self.model(theta, x))}
            return scores, {}
        for at in range(begin, begin + rounds):
            now, sent = send(at)
            _, uploads = fleet.train(at, here, sent)
            given = reduce_uploads(self.method, now, new, uploads)
            server = join(self.method, now, server, new, given)
        evaluation = fleet.evaluate(begin + rounds, here, send(begin + rounds)[1])
        named = {name: evaluation.scores[name, "test", self.task.metric] for name in evaluation.models}
        return {name: float(values[0]) for name, values in named.items()}, dict(evaluation.models)

    def make_federation(self, newcomer: Newcomer, count: int) -> Federation:
        """The federation of the newcomer and its first `count` examples."""
        return newcomer.federation(count, share_for_validation(self.experiment), self.saved.classes)

    def score(
        self, newcomer: Newcomer, answer: Callable[[Tensor], Tensor], rows: Tensor | None = None, metric: str = ""
    ) -> float:
        """The task's metric, or another, on the newcomer's test examples, or others."""
        rows = newcomer.test if rows is None else rows
        x, y = newcomer.x[rows], newcomer.y[rows]
        with torch.no_grad():
            outputs = torch.cat([answer(part) for part in x.split(512)])
            scores = self.task.score(outputs, y, torch.ones(len(y), dtype=outputs.dtype))
        return float(scores[metric or self.task.metric])

    def trained_alone(self, newcomer: Newcomer, count: int, rounds: int) -> float:
        """The score of a newcomer that learns by itself, for so many rounds."""
        fleet = self.fleet(self.make_federation(newcomer, count), Local(), self.bare)
        here = torch.zeros(1, dtype=torch.int64)
        for at in range(rounds):
            fleet.train(at, here, ())
        return float(fleet.evaluate(rounds, here, ()).scores["own", "test", self.task.metric][0])

    def score_tuned(self, newcomer: Newcomer, count: int, theta: Tensor, model: Model) -> float:
        """The score of a model: [d] after a few epochs on the newcomer's examples, as FedAvg-FT tunes it."""
        fleet = self.fleet(self.make_federation(newcomer, count), FedAvgFT(), model)
        here = torch.zeros(1, dtype=torch.int64)
        sent = FedAvgFT().send(self.roster, FedAvgFT().start(replace(self.roster, theta=theta)), here)
        return float(fleet.evaluate(self.state.done, here, sent).scores["tuned", "test", self.task.metric][0])

    @cached_property
    def existing(self) -> dict[str, nn.Module]:
        """The members' models, by their names."""
        return {name: self.saved.view_model(name) for name in self.saved.names}

    @cached_property
    def fedavg_model(self) -> Tensor | None:
        """[d] FedAvg's model, of the run beside this one; None if it has none. Of sites it is the last round's."""
        beside = self.saved.folder.reference("fedavg")
        if self.name == "fedavg" or not beside.is_finished:
            return None
        if self.saved.summary.sites is None:
            return Run.open(beside.path).theta(position=0)
        other = FrozenServer(Run(beside), self.task, self.execution)
        return other.as_sent(other.method.send(other.roster, other.server, other.roster.everyone[:1]))

    def best_existing(self, newcomer: Newcomer, count: int) -> tuple[str, float]:
        """The member whose model has the least loss on the newcomer's first examples, and its score on the others."""
        rows = newcomer.rows[:count]
        losses = {name: self.score(newcomer, model, rows, "loss") for name, model in self.existing.items()}
        best = min(losses, key=lambda name: losses[name])
        return best, self.score(newcomer, self.existing[best])


def onboard(frozen: FrozenServer, newcomer: Newcomer, count: int, rounds: int | None = None) -> Outcome:
    """What a newcomer has with `count` examples: by the method's rule and tuned, alone, from FedAvg, from a member."""
    rounds = rounds or frozen.saved.summary.rounds
    scores, models = frozen.join(newcomer, count, rounds)
    chosen, personal, best = frozen.saved.summary.selection.chosen, None, ""
    if chosen not in scores:  # which members use: else the first that is not its own
        chosen = next((name for name in scores if name != "own"), next(iter(scores), ""))
    result = {frozen.name: scores[chosen]} if scores else {}
    if chosen in models:
        personal = trees.pick(models[chosen], 0)
        if frozen.plain:
            result[frozen.name + TUNED] = frozen.score_tuned(newcomer, count, personal.theta, frozen.model)
    if count:
        result[ALONE] = frozen.trained_alone(newcomer, count, rounds)
        if frozen.saved.summary.sites is None:
            best, result[BEST] = frozen.best_existing(newcomer, count)
    if (theta := frozen.fedavg_model) is not None:
        result[SHARED] = frozen.score(newcomer, lambda x: frozen.bare(theta, x))
        if count:
            result[SHARED + TUNED] = frozen.score_tuned(newcomer, count, theta, frozen.bare)
    return Outcome(
        client=newcomer.name, shots=count, scores=result, personal=personal, existing=best, scales=newcomer.scales
    )


def write(frozen: FrozenServer, outcomes: Sequence[Outcome], folder: RunFolder) -> None:
    """Write the newcomers' models as a run's folder, which kinfed predict and export read, and the table of scores.

    Each has the model that it got with the most examples.
    """
    folder.create()
    best = {
        outcome.client: outcome for outcome in outcomes if outcome.personal is not None
    }  # the last has the most examples
    with replacing(folder.path / "onboarding.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["client", "examples", "model", "score", "whose"])
        for outcome in outcomes:
            for name, score in outcome.scores.items():
                table.writerow(
                    [outcome.client, outcome.shots, name, f"{score:.7g}", outcome.existing if name == BEST else ""]
                )
    if not best:
        return
    owned: dict[str, dict[str, Tensor]] = {ALL: frozen.model.frozen}
    for name, outcome in best.items():
        owned[name] = dict(outcome.personal._asdict())
        owned[name] |= frozen.model.layout.tensors(owned[name].pop("theta"))
    summary, columns = frozen.saved.summary, frozen.saved.description
    data, chosen = replace(summary.data, clients=len(best)), summary.selection.chosen
    if columns is not None and columns.clients:
        columns = replace(columns, clients={name: outcome.scales for name, outcome in best.items()})
        scale = {**(data.scale or {}), **columns.scale()}
        data = replace(data, columns=columns.to_dict(), scale=scale)
    identity = summary.provenance.identity or ""
    write_models(folder.models, owned, frozen.model, exporter(unwrap(frozen.method)), identity)
    folder.config.write_bytes(frozen.saved.folder.config.read_bytes())
    scores = [outcome.scores[frozen.name] for outcome in best.values()]
    former = {"run": str(frozen.saved.folder), "rounds": summary.rounds, "joined": list(best), "scores": False}
    folder.write_summary(
        replace(
            summary,
            data=data,
            by_client=ClientScores(names=list(best), scores={chosen: scores}),
            scores={chosen: spread(torch.tensor(scores), summary.metric.higher_is_better) | {"round": summary.rounds}},
            **NOT_THEIRS,
            warnings=[],
            provenance=replace(summary.provenance, former=former, refit=False),
            out=str(folder),
        )
    )
