"""A run that has just been trained."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core import trees
from ..core.graph import NeighbourLists, Origin, Relation
from ..core.history import History
from ..core.method import Method
from ..core.metrics import calibration_errors
from ..core.mixins import Predicts, export, leak
from ..core.model import Model
from ..core.sharing import Sharing
from ..core.summary import DataFacts, RunCost, Summary, score_models
from ..core.tasks import TASKS, Classification, Counts, Forecasting, Regression
from ..core.trees import Tree
from ..data.federation import Federation
from ..errors import UsageError
from ..simulation.attacks.attack import Attack
from ..verdict.class_counts import confusion, count_correct, recall_by_class, reweighted_accuracy
from ..verdict.graph_quality import edge_auroc, group_weights, group_weights_of_lists
from ..verdict.verdict import Verdict
from .baselines import Baseline, standard_baselines
from .final_state import FinalState
from .predictor import Answers, Source
from .round_tables import add_seed, make_rows
from .run import Run, not_comparable
from .test_scores import Tested, intervals, of_examples
from .tested_examples import TestedExamples

if TYPE_CHECKING:
    from polars import DataFrame

BLOCK = 512  # test examples in one pass through a model
CALIBRATED = 2000  # clients up to which their probabilities are judged together, model by model
SCALED = "columns are scaled by statistics of all training rows, which the epsilon does not cover"


@dataclass
class TrainedRun(Run):
    """A run that has just been trained: with its federation and its whole history."""

    method: Method
    federation: Federation
    architecture: Model
    history: History
    origin: Origin  # of the relation
    seed: int
    how: dict[str, Any]  # executor, workers, chunk, onednn, precision, device: the settings that affect rounding
    reason: str  # why this executor was chosen
    seconds: float
    attack: Attack | None = None
    final: FinalState | None = None  # what it can go on with; None if that was not asked for
    privacy: dict[str, Any] | None = None  # what uploads may reveal, and cost by client; None without a limit

    def __repr__(self) -> str:
        rounds = self.history.cost.done
        return f"TrainedRun({self.method}, {len(self.federation)} clients, {rounds} rounds, seed {self.seed})"

    @property
    def executor(self) -> str:
        """The name of the executor that ran the clients."""
        return str(self.how["executor"])

    @property
    def sharing(self) -> Sharing:
        """Which tensors of the model travelled, which stayed with the clients, and which never moved."""
        return Sharing.from_method(self.method, self.architecture.layout)

    @property
    def relation(self) -> Relation | None:
        history = self.history
        return history.relations[history.place()] if history.kept_relations else None

    @property
    def names(self) -> list[str]:
        return list(self.federation.names)

    def source(self, client: str) -> Source:
        return Source(type(self.method).__name__.lower(), self.history.chosen)

    def personal(self, client: str) -> Tree:
        at = self.names.index(client)
        return trees.nest({name: values[at].cpu() for name, values in self.history.models.items()})

    def view_model(self, client: str) -> nn.Module:
        return export(self.method, self.architecture, self.personal(client))

    def score_examples(self, split: str = "test") -> list[Tensor]:
        """The score of every example of a split in the task's metric: [n] for each client, by its chosen model.

        Accuracy: 1 if the answer is right, else 0; errors: the example's own. With example weights it is multiplied by
        the example's weight over the mean of the client's, so that their plain mean is the client's score. An empty
        list if the models stayed at their sites, if the metric is not defined for single examples, or if the split has
        none.
        """
        return (self._of_test if split == "test" else self._score_split(split))[0]

    def confusion(self) -> Tensor:
        """[N, C, C] int64 how many test examples of each class, the rows, a client's model takes for each, the columns.

        It is sparse: `.to_dense()` fills in the zeros. The models are the clients' chosen ones. Raises UsageError
        without classes, or if the models stayed at their sites.
        """
        table = self._of_test[1]
        if table is None:
            raise UsageError(
                "a confusion table needs class labels, and models that are here; this run lacks one of them"
            )
        return table

    @property
    def errors(self) -> list[Tensor]:
        """The answers to test rows of a table or series less the truth, in its unit: float32 [n, C] for each client.

        None of classes, of a task of one's own, or if the models stayed at their sites.
        """
        return self._of_test[2]

    def errors_of(self, client: str) -> NDArray[Any] | None:
        return self.errors[self.names.index(client)].numpy() if self.errors else None

    @cached_property
    def _of_test(self) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        return self._score_split("test")

    def _score_split(self, split: str) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """What `score_examples`, of classes `confusion`, and of numbers `errors` return."""
        task, federation, model = self.federation.task, self.federation, self.architecture
        rows = federation.rows[split]
        if not self.history.kept.arrays or not any(map(len, rows)):
            return [], None, []
        device, plain = model.theta.device, not isinstance(self.method, Predicts)
        x, y, names = federation.x, federation.y, self.names

        def outputs(at: Tensor, i: int) -> Tensor:
            apply = partial(model, self.personal(names[i]).theta.to(device)) if plain else self.view_model(names[i])
            place = device if plain else torch.device("cpu")
            return torch.cat([apply(x[part].to(place)).cpu() for part in at.split(BLOCK)])

        with torch.no_grad():
            if plain and "theta" in self.history.kept.shared:  # one model for all clients
                outputs_of = [outputs(torch.cat(list(rows)), 0)]
            else:
                outputs_of = [outputs(at, i) for i, at in enumerate(rows)]
            truth = y[torch.cat(list(rows))].cpu()
            answers, sizes = torch.cat(outputs_of), [len(at) for at in rows]
            scores = of_examples(task, answers, truth, federation.importance(split)).split(sizes)
        undefined = any(len(client_scores) and not client_scores.isfinite().any() for client_scores in scores)
        kept = [] if undefined or not self._averages(scores, split) else list(scores)
        if isinstance(task, Classification):
            return kept, confusion(answers, truth, sizes, task.classes), []
        return kept, None, self._errors(answers, truth, sizes) if split == "test" else []

    def _errors(self, outputs: Tensor, truth: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """See `errors`; outputs: [n, ...] and truth: [n, ...] are of all clients after one another."""
        if type(self.federation.task) not in (Regression, Counts, Forecasting):
            return []
        meaning = Answers.from_summary(self.summary, self.federation.columns)
        if not meaning.mean:
            return []
        answers = meaning.in_units(outputs.flatten(1).double())
        return list((answers - truth.reshape(len(truth), -1)).float().split(list(sizes)))

    def _averages(self, scores: Sequence[Tensor], split: str) -> bool:
        """Whether clients' scores are the means of their examples', as not every score of a user's own is."""
        history, task = self.history, self.federation.task
        if type(task) in TASKS.values():
            return True
        recorded = history.scores[history.place()].get((history.chosen, split, task.metric))
        means = torch.stack([client_scores.nanmean() for client_scores in scores])
        return recorded is None or torch.allclose(
            means.double(), recorded.double(), rtol=1e-3, atol=1e-5, equal_nan=True
        )

    def verdict(self, local: Run, fedavg: Run | None = None) -> Verdict:
        """See `Run.verdict`; of runs that were just trained, test examples are compared one by one."""
        for other in (local, fedavg):
            if isinstance(other, TrainedRun) and other.names == self.names:
                rows = zip(self.federation.rows["test"], other.federation.rows["test"], strict=True)
                if not all(torch.equal(mine, theirs) for mine, theirs in rows):
                    raise not_comparable(self, other)
        return super().verdict(local, fedavg)

    @property
    def scores(self) -> "DataFrame":
        return add_seed(make_rows(self.history), self.seed)

    @property
    def validation(self) -> dict[str, float]:
        values = self.history.validation()
        return {} if values is None else dict(zip(self.names, values.tolist(), strict=True))

    @cached_property
    def standard_baselines(self) -> tuple[list[Baseline], list[str]]:
        """The standard models on this run's federation, with the score that selects, and what was left out."""
        return standard_baselines(self.federation, self.history.selector.score)

    @property
    def examples(self) -> TestedExamples | None:
        """The score of each test example and where it stands; None if single examples have none."""
        if not (scores := self.score_examples()):
            return None
        declared = self.federation.blocks
        rows = self.federation.rows["test"]
        blocks = [(at if declared is None else declared[at]).cpu().numpy() for at in rows]
        totals = None if self.federation.weights is None else self.federation.totals("test").numpy()
        return TestedExamples([client_scores.numpy() for client_scores in scores], blocks, declared is not None, totals)

    @property
    def by_client(self) -> Tested:
        history, names = self.history, self.names
        means = dict(zip(names, history.test(history.chosen).tolist(), strict=True))
        return Tested.from_means(
            means, self.examples, self._attackers, bool(leak(self.method) or self.federation.caution)
        )

    def reweighted_accuracy(self) -> Tensor:
        """[N] accuracy of each client's model on all clients' test examples, weighted by its shares of labels.

        The shares are those of its training examples. This is pFedGraph's protocol, which passes all clients' test
        examples through every model. Raises UsageError if the task has no classes.
        """
        task = self.federation.task
        if not isinstance(task, Classification):
            raise UsageError("reweighted accuracy needs class labels; this task has none")
        federation = self.federation.to(torch.device("cpu"))
        rows = torch.cat(list(federation.rows["test"])).unique()
        x, y = federation.x[rows], federation.y[rows]
        weights = None if federation.weights is None else federation.weights[rows].double()
        counts = federation.class_counts(["train"], weighted=True).double()
        correct = []
        with torch.no_grad():
            for name in self.names:
                module = self.view_model(name)
                correct.append(count_correct(_answer(module, x), y, task.classes, weights))
        total = torch.bincount(y, weights, task.classes)
        return reweighted_accuracy(torch.stack(correct), total, counts / counts.sum(1, keepdim=True))

    @cached_property
    def _pooled_calibration(self) -> float:
        """The expected calibration error over all clients' test examples, each by its client's model.

        One client's examples are too few for its bins, so that the mean of clients' errors is mostly chance.
        """
        federation = self.federation.to(torch.device("cpu"))
        rows = list(federation.rows["test"])
        with torch.no_grad():
            outputs = [
                _answer(self.view_model(name), federation.x[at]) for name, at in zip(self.names, rows, strict=True)
            ]
        at = torch.cat(rows)
        weight = torch.ones(len(at)) if federation.weights is None else federation.weights[at]
        return float(calibration_errors(torch.cat(outputs).double(), federation.y[at], weight.double())["ece"])

    def _score_pooled(self, model: str) -> dict[str, float]:
        """The test metric over the test examples of all clients pooled, if it is a mean over examples."""
        task = self.federation.task
        if type(task) not in (Classification, Regression, Counts):
            return {}
        sizes = self.federation.totals("test").cpu()
        values = self.history.test(model).double()
        scored = ~values.isnan()
        return {"pooled": float((values * sizes)[scored].sum() / sizes[scored].sum())}

    @property
    def summary(self) -> Summary:
        history, task, federation = self.history, self.federation.task, self.federation
        cautions = [why for why in (leak(self.method), federation.caution) if why]
        scores = {name: score | self._score_pooled(name) for name, score in score_models(history).items()}
        recall = {}
        if isinstance(task, Classification) and task.by_class:
            counts = federation.class_counts(["test"], weighted=True).cpu()
            recall = recall_by_class(history, federation.class_names, counts)
        judged = history.models and len(federation) <= CALIBRATED and not isinstance(self.method, Predicts)
        if isinstance(task, Classification) and task.by_class and judged:
            scores[history.chosen]["ece_pooled"] = self._pooled_calibration
        if isinstance(task, Classification) and task.reweighted and history.models:  # none where they stay at sites
            scores[history.chosen]["reweighted"] = float(self.reweighted_accuracy().nanmean())
        return Summary.from_history(
            history,
            method=type(self.method).__name__,
            seeds=[self.seed],
            scores=scores,
            intervals=intervals(history),
            relation=self._quality(),
            recall=recall,
            attack=self._describe_attack(),
            privacy=self.privacy,
            sharing=self.sharing.summary(history.cost.bytes_down, history.cost.bytes_up, history.cost.done),
            caution="; ".join(cautions),
            warnings=[SCALED] if self.privacy and federation.scale else [],
            data=DataFacts(
                clients=len(federation),
                shape=list(federation.x.shape[1:]),
                outputs=federation.outputs,
                classes=list(federation.classes),
                scale=dict(federation.scale),
                columns=None if federation.columns is None else federation.columns.to_dict(),
            ),
            cost=RunCost(
                parameters=self.architecture.layout.parameters,
                seconds=round(self.seconds, 3),
                bytes_up=history.cost.bytes_up,
                bytes_down=history.cost.bytes_down,
                reason=self.reason,
                **self.how,
            ),
        )

    @property
    def _attackers(self) -> list[str]:
        """The names of the clients that attack."""
        names = self.federation.names
        lie = [] if self.attack is None else self.attack.attackers(names, self.seed).nonzero().flatten().tolist()
        return [names[i] for i in lie]

    def _describe_attack(self) -> dict[str, Any] | None:
        if self.attack is None:
            return None
        return {
            "name": type(self.attack).__name__,
            **asdict(self.attack),
            "attackers": self._attackers,
            "scores": score_models(self.history, attacked=True),
        }

    def _quality(self) -> dict[str, Any] | None:
        """Where the relation comes from and how well it finds hidden groups; None if no models are mixed."""
        relation, groups = self.relation, self.federation.groups
        if relation is None:
            return None
        result: dict[str, Any] = {"origin": self.origin}
        if isinstance(relation, NeighbourLists):
            quality = {} if groups is None else group_weights_of_lists(relation, groups)._asdict()
            result |= {name: value for name, value in quality.items() if math.isfinite(value)}
        elif groups is not None:
            quality = {"auroc": edge_auroc(relation, groups), **group_weights(relation, groups)._asdict()}
            # Values that are undefined with a single group, or groups of one, are left out.
            result |= {name: value for name, value in quality.items() if math.isfinite(value)}
        return result


def _answer(module: nn.Module, x: Tensor) -> Tensor:
    """[n, C] outputs for x: [n, ...], of which a layer may write into a copy."""
    return torch.cat([module(part.clone()) for part in x.split(BLOCK)])
