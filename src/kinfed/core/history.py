"""History: scores, graphs and bytes of a run, and which round validation selects."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UsageError
from . import trees
from .fleet import Evaluation, Key
from .graph import NeighbourLists, Relation, whole_relation
from .metrics import ALWAYS, BY_CLASS, RECALL
from .round_selection import Selection, select_model, select_round
from .tasks import Task, is_higher_better
from .trees import Axis

Array = NDArray[Any]

KINDS = {  # what the models are that methods return under these names
    "own": "after local training",
    "mixed": "made for the client, before local training",
    "tuned": "received, then trained locally",
    "received": "as sent to the client",
    "shared": "one for all clients",
    "adapted": "shared, after a few local steps",
    "cluster": "its cluster's",
    "generated": "written by the server's network",
    "combined": "with the client's mixture of heads",
    "both": "shared, with its own head added",
    "generic": "shared, without its own head",
    "split": "features divided between two heads",
    "mixture": "the client's mixture of the shared models",
}


class Spent(NamedTuple):
    """What a run had taken when a round was over, since it began."""

    round: int
    bytes_down: int
    bytes_up: int
    examples: int  # of the local training that `Training` asks for
    seconds: float | None = None  # None if nobody has measured them


@dataclass
class History:
    """Every evaluated round of a run, as `run.history` has it; rounds count from 0.

    `test("own")`: [N] are the clients' test scores of a kind of model at the round that validation prefers, `chosen` is
    the kind that validation prefers. `bytes_down` and `bytes_up` are sums over the run, `every` is the number of rounds
    per evaluation.
    """

    names: tuple[str, ...]
    task: Task
    every: int = 1
    rounds: list[int] = field(default_factory=list)
    scores: list[dict[Key, Tensor]] = field(default_factory=list)  # [N] each, one dict per evaluated round
    kept_relations: list[Relation] = field(default_factory=list)  # one per evaluated round, or none; see `relations`
    diagnostics: list[dict[str, Tensor]] = field(default_factory=list)  # [] or [N] each, one dict per evaluated round
    bytes_down: int = 0  # sent by the server, whole run
    bytes_up: int = 0
    examples: int = 0  # in the steps of local training that `Training` asks for, whole run
    spent: list[Spent] = field(default_factory=list)  # by evaluated round
    chosen: str = ""  # the named model that validation prefers; the headline without validation data
    kept_models: dict[str, Tensor] = field(default_factory=dict)  # see `models`
    shared: list[str] = field(default_factory=list)  # which of these arrays all clients share: [...], not [N, ...]
    done: int = 0  # rounds
    taken: list[int] = field(default_factory=list)  # [N] in how many of them each client took part
    honest: Tensor | None = None  # [N] bool: False on attackers, who are ignored in selection; None: all are honest
    selection: Selection = Selection()
    _pending: Callable[[], None] | None = None  # waits for an evaluation in progress and keeps it
    _means: dict[tuple[int, Key], tuple[Any, Any, float]] = field(default_factory=dict, repr=False, compare=False)

    def is_due(self, round: int, rounds: int) -> bool:
        """Whether a round is evaluated: every `every`-th, and the last."""
        return (round + 1) % self.every == 0 or round + 1 == rounds

    def add(
        self,
        round: int,
        down: int,
        up: int,
        evaluation: Evaluation | Callable[[], Evaluation] | None = None,
        relation: Relation | None = None,
        diagnostics: dict[str, Tensor] | None = None,
        examples: int = 0,
    ) -> None:
        """Count what a round took, keep its evaluation, and its models if validation prefers them to all before.

        An evaluation still in progress is a function; it is called when the next round is added, or by `settle`.
        """
        self.settle()
        self.bytes_down += down
        self.bytes_up += up
        self.examples += examples
        self.done = round + 1
        if evaluation is not None:
            self.spent.append(Spent(round, self.bytes_down, self.bytes_up, self.examples))
        if isinstance(evaluation, Evaluation):
            self._keep(round, evaluation, relation, diagnostics)
        elif evaluation is not None:
            self.expect(round, evaluation, relation, diagnostics)

    def count_rounds(self, cohort: Tensor) -> None:
        """Count a round for the clients cohort: [K], which took part in it."""
        self.taken += [0] * (len(self.names) - len(self.taken))
        for i in cohort.tolist():
            self.taken[i] += 1

    def expect(
        self,
        round: int,
        evaluation: Callable[[], Evaluation],
        relation: Relation | None = None,
        diagnostics: dict[str, Tensor] | None = None,
    ) -> None:
        """Keep the evaluation of a round that has already been added, once it is complete."""
        self._pending = lambda: self._keep(round, evaluation(), relation, diagnostics)

    def clock(self, round: int, seconds: float) -> None:
        """Note how long the run has taken when a round is over."""
        if self.spent and self.spent[-1].round == round:
            self.spent[-1] = self.spent[-1]._replace(seconds=seconds)

    def settle(self) -> None:
        """Wait for the evaluation in progress, if there is one."""
        pending, self._pending = self._pending, None
        if pending:
            pending()

    def _keep(
        self, round: int, evaluation: Evaluation, relation: Relation | None, diagnostics: dict[str, Tensor] | None
    ) -> None:
        self._check_models(round, {model for model, _, _ in evaluation.scores})
        self.rounds.append(round)
        self.scores.append({key: values.detach().cpu() for key, values in evaluation.scores.items()})
        if relation is None:  # now there are too many clients for it, or the method mixes no models
            self.kept_relations = []
        elif len(self.kept_relations) == len(self.rounds) - 1:
            self.kept_relations.append(_keep_relation(relation))
        self.diagnostics.append({name: value.detach().cpu() for name, value in (diagnostics or {}).items()})
        if self.selection.by:
            self._check_selection()
        chosen = self.preference
        if self.select(chosen) == round:
            self.chosen, self.kept_models = chosen, {}  # whose room the next may need
            model = evaluation.models[chosen] if evaluation.models else ()  # none if they stay at their sites
            self.kept_models = trees.pack(model)
            self.shared = trees.names(model, Axis.SHARED)

    def _check_models(self, round: int, named: set[str]) -> None:
        """Raise UsageError unless these models are scored in every round."""
        if self.scores and named != {*self.named_models}:
            before, now = (", ".join(sorted(names)) for names in (self.named_models, named))
            raise UsageError(f"round {round + 1}: personalise names the models {now}, and named {before} before")

    def _check_selection(self) -> None:
        """Raise UsageError if all clients have validation scores, but none has the score to select by."""
        if "validation" not in {split for _, split, _ in self.scores[-1]}:
            raise UsageError(
                f"select_by={self.selection.by} needs validation examples; set federation.split.validation"
            )
        both = [self.scores[-1][self.headline, "validation", name] for name in (self.selects, self.task.metric)]
        wanted, plain = both if self.honest is None else [values[self.honest] for values in both]
        if wanted.isnan().all() and not plain.isnan().any():
            why = "have two classes" if self.selects in BY_CLASS else "define it"
            raise UsageError(
                f"select_by={self.selection.by} cannot select: no client's validation examples {why}; select by "
                f"{self.task.metric} or loss, or make federation.split.validation larger"
            )

    @property
    def models(self) -> dict[str, Tensor]:
        """[N, ...] the chosen models at their selected round, packed; views of what is kept."""
        count = len(self.names)
        return {n: t.expand(count, *t.shape) if n in self.shared else t for n, t in self.kept_models.items()}

    @property
    def lists(self) -> list[NeighbourLists]:
        """The relations of very many clients, one per evaluated round, or none at all."""
        return [relation for relation in self.kept_relations if isinstance(relation, NeighbourLists)]

    @property
    def relations(self) -> list[Tensor]:
        """[N, N] or [L, N, N], one per evaluated round, or none at all; views of what is kept. See `lists`.

        If some rounds have weights by layer, those of the others hold for each layer.
        """
        relations = [whole_relation(r) for r in self.kept_relations if isinstance(r, Tensor)]
        layers = next((len(relation) for relation in relations if relation.ndim == 3), 0)
        return [r.expand(layers, -1, -1) if layers and r.ndim == 2 else r for r in relations]

    @property
    def relation(self) -> Relation | None:
        """The relation of the round that is selected for the chosen model; None if the method mixes no models."""
        relations = self.lists or self.relations
        return relations[self.place()] if relations else None

    @property
    def selects(self) -> str:
        """The name of the validation score that selects rounds and models."""
        return self.selection.by or getattr(self.task, "selects", "") or self.task.metric

    @property
    def selects_highest(self) -> bool:
        """Whether the validation score that selects is better if it is higher."""
        return is_higher_better(self.task, self.selects)

    @property
    def preference(self) -> str:
        """The named model that validation prefers so far, unless one is to be kept; the headline under privacy."""
        if self.selection.keep in self.named_models:
            return self.selection.keep
        if self.selection.unseen:
            return self.headline
        return select_model({n: self._mean_validation(n) for n in self.named_models}, self.selects_highest)

    def _mean_validation(self, model: str) -> dict[str, float]:
        """The mean validation score at the selected round, as `validation`; nothing without validation data."""
        values = self.validation(model)
        return {} if values is None else {"validation": mean_over_clients(self.mask_attackers(values), self.selects)}

    def add_clients(self, names: Sequence[str]) -> None:
        """Make room for clients added at the end; they have no scores in the rounds before."""
        more = len(names) - len(self.names)
        self.names = tuple(names)

        def pad(t: Tensor, axes: int, value: float) -> Tensor:
            return torch.nn.functional.pad(t, (0, more) * axes, value=value)

        self.scores = [{k: pad(v, 1, torch.nan) for k, v in scores.items()} for scores in self.scores]
        self.kept_relations = [pad(relation, 2, 0.0) for relation in self.relations]  # lists are not kept
        self.diagnostics = [
            {k: pad(v, 1, torch.nan) if v.ndim else v for k, v in diagnostics.items()}
            for diagnostics in self.diagnostics
        ]

    def mask_attackers(self, values: Tensor) -> Tensor:
        """[..., N] values, with NaN for attackers."""
        return values if self.honest is None else values.masked_fill(~self.honest, torch.nan)

    @property
    def headline(self) -> str:
        """The first model that the method names."""
        return next(iter(self.scores[0]))[0]

    @property
    def named_models(self) -> list[str]:
        """Every model that is scored, headline first."""
        return list(dict.fromkeys(model for model, _, _ in self.scores[0]))

    def curve(self, model: str, split: str, metric: str) -> Tensor:
        """[T, N] one metric of one model over the evaluated rounds."""
        return torch.stack([scores[model, split, metric] for scores in self.scores])

    def select(self, model: str) -> int:
        """The round whose mean validation score is best, of equals the one with the lowest validation loss.

        It is the last without validation scores, and of a method that `Solves`. Attackers and clients without a score
        (NaN), such as those that have not answered yet, do not count.
        """
        if self.selection.last or (model, "validation", self.selects) not in self.scores[0]:
            return self.rounds[-1]
        means, losses = ([self._mean(at, model, by) for at in range(len(self.scores))] for by in (self.selects, "loss"))
        return select_round(self.rounds, means, self.selects_highest, losses)

    def tell_last(self) -> tuple[str, str, float]:
        """The last round's mean of the score that selects, of the headline, for progress: split, metric and mean.

        Of test examples without validation examples; NaN where all scores stay at their sites.
        """
        scores, model, metric = self.scores[-1], self.headline, self.selects
        split = "validation" if (model, "validation", metric) in scores else "test"
        return split, metric, float(scores[model, split, metric].nanmean())

    def _mean(self, at: int, model: str, score: str) -> float:
        """The mean over clients of a validation score, NaN without it; it is worked out once, as every round asks."""
        key = model, "validation", score
        if key not in self.scores[at]:
            return math.nan
        values, (of, honest, mean) = self.scores[at][key], self._means.get((at, key), (None, None, math.nan))
        if of is not values or honest is not self.honest:
            mean = mean_over_clients(self.mask_attackers(values), score)
            self._means[at, key] = values, self.honest, mean
        return mean

    def test(self, model: str, metric: str = "") -> Tensor:
        """[N] `metric` (by default the task's) on test examples, at the round that validation selects."""
        return self.scores[self.place(model)][model, "test", metric or self.task.metric]

    def validation(self, model: str = "") -> Tensor | None:
        """[N] the validation score that selects, of a model at its selected round; None without validation examples.

        Without a model it is that of the chosen one.
        """
        return self.scores[self.place(model)].get((model or self.chosen, "validation", self.selects))

    def place(self, model: str = "") -> int:
        """The selected round of a model, of the chosen one by default, as its place among the evaluated rounds."""
        return self.rounds.index(self.select(model or self.chosen))

    def clients_scores(self) -> dict[str, Any]:
        """Every client's test scores by named model: `scores`, of the task's metric.

        If another score selects, also `selecting`, of that score; None for a client without it.
        """
        result: dict[str, Any] = {"scores": {name: self.test(name).tolist() for name in self.named_models}}
        if self.selects != self.task.metric:
            scores = {name: self.test(name, self.selects).tolist() for name in self.named_models}
            result["selecting"] = {n: [None if math.isnan(v) else v for v in scores[n]] for n in scores}
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        """Per named model: the test metric over clients (see `spread`), the means of the task's other test metrics,
        the selected round (from 1), and its validation.
        """
        return {
            name: {
                **spread(self.test(name), self.task.higher_is_better),
                **self._mean_others(name),
                "round": self.select(name) + 1,
                **self._mean_validation(name),
            }
            for name in self.named_models
        }

    def _mean_others(self, model: str) -> dict[str, float]:
        """Means over clients of the test metrics other than the task's own and the loss, at the selected round.

        For a metric that not every client has, such as `auc` or `r2`, `auc_clients` is the number of clients with it.
        """
        scores, means = self.scores[self.place(model)], {}
        for (name, split, metric), values in scores.items():
            values = self.mask_attackers(values)
            defined = values[~values.isnan()]
            excluded = metric in (self.task.metric, "loss", ALWAYS) or metric.startswith(RECALL)
            if (name, split) != (model, "test") or excluded or not len(defined) or not defined.isfinite().all():
                continue
            means[metric] = mean_over_clients(defined, metric)
            clients = len(values) if self.honest is None else int(self.honest.sum())
            if metric in BY_CLASS or (metric.partition("@")[0] == "r2" and len(defined) < clients):
                means[f"{metric}_clients"] = len(defined)
        return means

    def under_attack(self) -> dict[str, dict[str, float]]:
        """Per named model: as in `summary`, over honest clients only; and the success of a backdoor on them."""
        result = {}
        for name in self.named_models:
            scores = self.mask_attackers(self.test(name))
            result[name] = spread(scores, self.task.higher_is_better) | self._mean_others(name)
            triggered = self.scores[self.place(name)].get((name, "triggered", self.task.metric))
            if triggered is not None:
                result[name]["success"] = float(self.mask_attackers(triggered).double().nanmean())
        return result

    def pack(self) -> tuple[dict[str, Tensor], str]:
        """Arrays and a line of text from which `restore` makes the same history."""
        arrays = {f"score.{t}.{i}": v for t, scores in enumerate(self.scores) for i, v in enumerate(scores.values())}
        for t, relation in enumerate(self.kept_relations):
            if isinstance(relation, Tensor):
                arrays[f"relation.{t}"] = relation
            else:
                arrays |= {f"relation.{t}.{name}": part for name, part in relation.tensors.items()}
        arrays |= {
            f"note.{t}.{name}": v for t, diagnostics in enumerate(self.diagnostics) for name, v in diagnostics.items()
        }
        arrays |= {f"model.{name}": t for name, t in self.kept_models.items()}
        keys = list(self.scores[0]) if self.scores else []
        noted = [list(diagnostics) for diagnostics in self.diagnostics]
        counts = [self.bytes_down, self.bytes_up, self.examples, self.done]
        return arrays, json.dumps([self.rounds, keys, noted, *counts, self.chosen, self.shared, self.spent, self.taken])

    def restore(self, arrays: dict[str, Tensor], text: str) -> None:
        """Become the history that was packed; raises KeyError, TypeError or ValueError if this is not one."""
        self.rounds, keys, noted, *counts, self.chosen, self.shared, spent, self.taken = json.loads(text)
        self.bytes_down, self.bytes_up, self.examples, self.done = counts
        self.spent = [Spent(*values) for values in spent]
        named: list[Key] = [(str(model), str(split), str(metric)) for model, split, metric in keys]
        integers = (*self.rounds, *counts, *self.taken)
        if not all(type(count) is int for count in integers) or type(self.chosen) is not str:
            raise ValueError("its history has another format")
        self.scores = [{key: arrays[f"score.{t}.{i}"] for i, key in enumerate(named)} for t in range(len(self.rounds))]
        kept = (_find_relation(arrays, f"relation.{t}") for t in range(len(self.rounds)))
        self.kept_relations = [relation for relation in kept if relation is not None]
        self.diagnostics = [{name: arrays[f"note.{t}.{name}"] for name in names} for t, names in enumerate(noted)]
        self.kept_models = {name.removeprefix("model."): t for name, t in arrays.items() if name.startswith("model.")}


def _keep_relation(relation: Relation) -> Relation:
    """A relation in memory of the CPU, with numbers of four bytes."""
    if isinstance(relation, Tensor):
        return relation.detach().cpu().to(torch.float32)
    return relation.map(lambda t: t.detach().cpu().to(torch.float32 if t.is_floating_point() else t.dtype))


def _find_relation(arrays: dict[str, Tensor], name: str) -> Relation | None:
    """The relation of this name among packed arrays."""
    if name in arrays:
        return arrays[name]
    parts = [arrays.get(f"{name}.{part.name}") for part in fields(NeighbourLists)]
    return None if parts[0] is None else NeighbourLists(*(part for part in parts if part is not None))


def over_seeds(summaries: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over seeds of several summaries; `std_seeds` is the deviation over seeds of the mean over clients."""
    scores = {}
    for name, first in summaries[0].items():
        of_model = [summary[name] for summary in summaries]
        shared = set[str].intersection(*map(set, of_model)) - {"round"}
        by_seed = {key: [scores_of_seed[key] for scores_of_seed in of_model] for key in first if key in shared}
        scores[name] = {key: statistics.fmean(values) for key, values in by_seed.items()}
        scores[name]["std_seeds"] = statistics.stdev(by_seed["mean"]) if len(summaries) > 1 else 0.0
    return scores


def mean_over_clients(values: Tensor, metric: str) -> float:
    """The mean of clients' scores: [N] without NaN.

    Of root mean squared errors it is the root of the clients' mean squared error, so the square of `rmse` is `mse`.
    """
    values = values.double()
    rooted = metric.partition("@")[0] == "rmse"
    return float(values.square().nanmean().sqrt() if rooted else values.nanmean())


def spread(values: Tensor, higher_is_better: bool) -> dict[str, float]:
    """Mean and standard deviation over clients: [N], and those of the worst and best 5 and 10 % (at least one).

    Clients without a score (NaN) are left out.
    """
    scored = values[~values.isnan()] if not values.isnan().all() else values[:1]  # NaN, where all scores stay at sites
    ordered = scored.double().sort(descending=not higher_is_better).values
    result = {"mean": float(ordered.mean()), "std": float(ordered.std(correction=0))}
    for percent in (5, 10):
        few = max(1, math.ceil(len(ordered) * percent / 100))
        for name, part in ((f"worst{percent}", ordered[:few]), (f"best{percent}", ordered[-few:])):
            result |= {name: float(part.mean()), f"{name}_std": float(part.std(correction=0))}
    return result
