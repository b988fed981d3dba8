"""A run that has just been trained."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..core import trees
from ..core.graph import Relation
from ..core.history import History
from ..core.method import Method
from ..core.metrics import calibration_errors
from ..core.mixins import Predicts, export, leak
from ..core.model import Model
from ..core.sharing import Sharing
from ..core.summary import DataFacts, RunCost, Summary, score_models, summarise_history
from ..core.tasks import TASKS, Classification, Counts, Forecasting, Regression, Task
from ..core.trees import Tree
from ..data.federation import Federation
from ..data.tables.public_columns import is_public
from ..errors import UsageError
from ..simulation.attacks.attack import Attack
from ..verdict.class_counts import confusion, recall_by_class
from ..verdict.graph_quality import measure
from ..verdict.verdict import Verdict
from .baselines import Baseline, standard_baselines
from .final_state import FinalState
from .predictor import Answers
from .round_tables import add_seed, make_rows
from .run import Run, not_comparable
from .test_scores import intervals, of_examples, pooled_mean, reweighted_accuracy
from .tested_examples import Tested

if TYPE_CHECKING:
    from polars import DataFrame

BLOCK = 512  # test examples in one pass through a model
CALIBRATED = 2000  # clients up to which their probabilities are judged together, model by model
SCALED = "columns are scaled by statistics of all training rows, which the epsilon does not cover"


@dataclass
class TrainedRun(Run):
    """A run that has just been trained: with its federation and its whole history."""

    method: Method = field()  # without a default, which it would take from `Run`
    federation: Federation
    architecture: Model = field()
    history: History
    seed: int
    cost: RunCost
    attack: Attack | None = None
    final: FinalState | None = None  # what it can go on with; None if that was not asked for
    privacy: dict[str, Any] | None = None  # what uploads may reveal, and cost by client; None without a limit

    def __post_init__(self) -> None:
        # What a run in a folder reads from its files is at hand, and no config made this one.
        self.names, self.task = list(self.federation.names), self.federation.task
        self.description, self.experiment = self.federation.columns, None

    def __repr__(self) -> str:
        rounds = self.history.cost.done
        return f"TrainedRun({self.method}, {len(self.federation)} clients, {rounds} rounds, seed {self.seed})"

    @property
    def relation(self) -> Relation | None:
        history = self.history
        return history.relations[history.place()] if history.kept_relations else None

    def personal(self, client: str) -> Tree:
        return self._personal_at(self.names.index(client))

    def _personal_at(self, at: int) -> Tree:
        return trees.nest({name: values[at].cpu() for name, values in self.history.models.items()})

    def view_model(self, client: str) -> nn.Module:
        return export(self.method, self.architecture, self.personal(client))

    def find_kept_run(self, client: str) -> Run:
        return self

    def score_examples(self, split: str = "test") -> list[Tensor]:
        """The score of every example of a split in the task's metric: [n] for each client, by its chosen model.

        Accuracy: 1 if the answer is right, else 0; errors: the example's own. With example weights it is multiplied by
        the example's weight over the mean of the client's, so that their plain mean is the client's score. An empty
        list if the models stayed at their sites, if the metric is not defined for single examples, or if the split has
        none.
        """
        if (answered := self._test_answers if split == "test" else self._answer_split(split)) is None:
            return []
        task, federation, history = self.federation.task, self.federation, self.history
        scores = of_examples(task, *answered, federation.importance(split))
        by_client = list(scores.split([len(rows) for rows in federation.rows[split]]))
        recorded = history.scores[history.place()].get((history.chosen, split, task.metric))
        return by_client if _are_defined(by_client) and _average_to(task, by_client, recorded) else []

    def confusion(self) -> Tensor:
        """[N, C, C] int64 how many test examples of each class, the rows, a client's model takes for each, the columns.

        It is sparse: `.to_dense()` fills in the zeros. The models are the clients' chosen ones. Raises UsageError
        without classes, or if the models stayed at their sites.
        """
        task, answered = self.federation.task, self._test_answers
        if answered is None or not isinstance(task, Classification):
            raise UsageError(
                "a confusion table needs class labels, and models that are here; this run lacks one of them"
            )
        return confusion(*answered, [len(rows) for rows in self.federation.rows["test"]], task.classes)

    @property
    def errors(self) -> list[NDArray[Any]]:
        """The answers to test rows of a table or series less the truth, in its unit: float32 [n, C] for each client.

        None of classes, of a task of one's own, of rows that were trained on, or if the models stayed at their sites.
        """
        federation = self.federation
        if type(federation.task) not in (Regression, Counts, Forecasting) or self._test_answers is None:
            return []
        tested, trained = (torch.cat(list(federation.rows[split])) for split in ("test", "train"))
        if torch.isin(tested, trained).any():
            return []
        answers, truth = self._test_answers
        meaning = Answers.from_summary(self.summary, federation.columns)
        if not meaning.mean:
            return []
        errors = meaning.in_units(answers.flatten(1).double()) - truth.reshape(len(truth), -1)
        sizes = [len(rows) for rows in federation.rows["test"]]
        return [table.numpy() for table in errors.float().split(sizes)]

    @cached_property
    def _test_answers(self) -> tuple[Tensor, Tensor] | None:
        return self._answer_split("test")

    def _answer_split(self, split: str) -> tuple[Tensor, Tensor] | None:
        """[n, ...] each what the chosen models answer to a split's examples, client by client, and the truth.

        None if the models stayed at their sites, or if the split has no examples.
        """
        federation, model = self.federation, self.architecture
        rows = federation.rows[split]
        if not self.history.kept.arrays or not any(map(len, rows)):
            return None
        device, plain = model.theta.device, not isinstance(self.method, Predicts)
        x, y, names = federation.x, federation.y, self.names

        def outputs(at: Tensor, i: int) -> Tensor:
            apply = partial(model, self._personal_at(i).theta.to(device)) if plain else self.view_model(names[i])
            place = device if plain else torch.device("cpu")
            return torch.cat([apply(x[part].to(place)).cpu() for part in at.split(BLOCK)])

        with torch.no_grad():
            if plain and "theta" in self.history.kept.shared:  # one model for all clients
                outputs_of = [outputs(torch.cat(list(rows)), 0)]
            else:
                outputs_of = [outputs(at, i) for i, at in enumerate(rows)]
        return torch.cat(outputs_of), y[torch.cat(list(rows))].cpu()

    def verdict(self, local: Run, fedavg: Run | None = None) -> Verdict:
        """See `Run.verdict`; of runs that were just trained, test examples are compared one by one."""
        for other in (local, fedavg):
            if isinstance(other, TrainedRun) and other.names == self.names:
                rows = zip(self.federation.rows["test"], other.federation.rows["test"], strict=True)
                if not all(torch.equal(mine, theirs) for mine, theirs in rows):
                    raise not_comparable(self, other)
        return super().verdict(local, fedavg)

    def _is_scaled_publicly(self) -> bool:
        """Whether none of the table's rows has a say in how rows become inputs."""
        described, public = self.federation.columns, (self.privacy or {}).get("columns")
        return described is not None and public is not None and is_public(described, public)

    @property
    def scores(self) -> "DataFrame":
        return add_seed(make_rows(self.history), self.seed)

    @cached_property
    def standard_baselines(self) -> tuple[list[Baseline], list[str]]:
        """The standard models on this run's federation, with the score that selects, and what was left out."""
        return standard_baselines(self.federation, self.history.selector.score)

    @property
    def by_client(self) -> Tested:
        tested = Tested.from_summary(self.summary)
        federation = self.federation
        scores = self.score_examples()
        if not scores:
            return tested
        declared, totals = federation.blocks, federation.total_test_weights().tolist()
        blocks = [(at if declared is None else declared[at]).cpu().numpy() for at in federation.rows["test"]]
        return tested._replace(
            examples=dict(zip(self.names, (scores_of_client.numpy() for scores_of_client in scores), strict=True)),
            blocks=dict(zip(self.names, blocks, strict=True)),
            declared=declared is not None,
            totals=None if federation.weights is None else dict(zip(self.names, totals, strict=True)),
        )

    @cached_property
    def summary(self) -> Summary:
        history, task, federation = self.history, self.federation.task, self.federation
        cautions = [why for why in (leak(self.method), federation.caution) if why]
        scores = score_models(history)
        if type(task) in (Classification, Regression, Counts):  # whose scores are means over examples
            for name, score in scores.items():
                score["pooled"] = pooled_mean(federation, history.test(name))
        recall = {}
        if isinstance(task, Classification) and task.by_class:
            counts = federation.class_counts(["test"], weighted=True).cpu()
            recall = recall_by_class(history, federation.class_names, counts)
        judged = len(federation) <= CALIBRATED and not isinstance(self.method, Predicts)
        if isinstance(task, Classification) and task.by_class and judged and self._test_answers is not None:
            scores[history.chosen]["ece_pooled"] = _calibrate(federation, *self._test_answers)
        if isinstance(task, Classification) and task.reweighted and history.models:  # none where they stay at sites
            modules = map(self.view_model, self.names)
            scores[history.chosen]["reweighted"] = float(reweighted_accuracy(federation, modules).nanmean())
        relation = self.relation
        attack = None
        sharing = Sharing.from_method(self.method, self.architecture.layout)
        if self.attack is not None:
            attack = {
                "name": type(self.attack).__name__,
                **asdict(self.attack),
                "attackers": self.attack.list_attackers(self.names, self.seed),
                "scores": score_models(history, attacked=True),
            }
        return summarise_history(
            history,
            method=type(self.method).__name__.lower(),
            seeds=[self.seed],
            scores=scores,
            intervals=intervals(history),
            relation=None if relation is None else {"origin": history.origin, **measure(relation, federation.groups)},
            recall=recall,
            attack=attack,
            privacy=self.privacy,
            sharing=sharing.summary(history.cost.bytes_down, history.cost.bytes_up, history.cost.done),
            caution="; ".join(cautions),
            warnings=[SCALED] if self.privacy and federation.scale and not self._is_scaled_publicly() else [],
            data=DataFacts(
                clients=len(federation),
                shape=list(federation.x.shape[1:]),
                outputs=federation.outputs,
                classes=list(federation.classes),
                scale=dict(federation.scale),
                columns=None if federation.columns is None else federation.columns.to_dict(),
            ),
            cost=self.cost,
        )


def _calibrate(federation: Federation, outputs: Tensor, truth: Tensor) -> float:
    """The calibration error over all clients' test examples, as one client's are too few for its bins."""
    at = torch.cat(list(federation.rows["test"]))
    weights = torch.ones(len(at)) if federation.weights is None else federation.weights[at]
    return float(calibration_errors(outputs.double(), truth, weights.cpu().double())["ece"])


def _are_defined(scores: Sequence[Tensor]) -> bool:
    """Whether every client that has examples has a score of one."""
    return all(not len(by_example) or bool(by_example.isfinite().any()) for by_example in scores)


def _average_to(task: Task, scores: Sequence[Tensor], recorded: Tensor | None) -> bool:
    """Whether recorded: [N] are the means of examples' scores, as not every score of a user's own is."""
    if type(task) in TASKS.values() or recorded is None:
        return True
    means = torch.stack([by_example.nanmean() for by_example in scores]).double()
    return torch.allclose(means, recorded.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
