"""History: scores, graphs and bytes of a run, and the recorder by which the engine writes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError
from . import trees
from .fleet import Evaluation, Key
from .graph import NeighbourLists, Origin, Relation, whole_relation
from .metrics import BY_CLASS
from .round_selection import Selector, select_model, select_round
from .rows import Part, Table
from .tasks import Task
from .trees import Axis

KINDS = {  # what the models are that methods return under these names
    "own": "after local training",
    "mixed": "a mixture of models for the client, before local training",
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
class Cost:
    """What a run has taken so far."""

    done: int = 0  # rounds
    bytes_down: int = 0  # sent by the server
    bytes_up: int = 0
    examples: int = 0  # in the steps of local training that `Training` asks for
    spent: list[Spent] = field(default_factory=list)  # by evaluated round
    taken: list[int] = field(default_factory=list)  # [N] in how many rounds each client took part

    def clock(self, round: int, seconds: float) -> None:
        """Note how long the run has taken when a round is over."""
        if self.spent and self.spent[-1].round == round:
            self.spent[-1] = self.spent[-1]._replace(seconds=seconds)


class KeptModels(NamedTuple):
    """The chosen models at their selected round, packed."""

    arrays: Mapping[str, Table]  # [N, ...], or [...] where all clients share one
    shared: Sequence[str]  # which arrays those are


@dataclass
class History:
    """Every evaluated round of a run, as `run.history` has it; rounds count from 0.

    `test("own")`: [N] are the clients' test scores of a kind of model at the round that validation prefers, `chosen` is
    the kind that validation prefers. `cost` has what the whole run took, such as `cost.bytes_up`.
    """

    names: tuple[str, ...]
    task: Task
    rounds: list[int] = field(default_factory=list)
    scores: list[dict[Key, Tensor]] = field(default_factory=list)  # [N] each, one dict per evaluated round
    kept_relations: list[Relation] = field(default_factory=list)  # one per evaluated round, or none; see `relations`
    diagnostics: list[dict[str, Tensor]] = field(default_factory=list)  # [] or [N] each, one dict per evaluated round
    origin: Origin = "fixed"  # of the relation
    cost: Cost = field(default_factory=Cost)
    chosen: str = ""  # the named model that validation prefers; the headline without validation data
    kept: KeptModels = KeptModels({}, ())  # see `models`
    selector: Selector = field(init=False)

    def __post_init__(self) -> None:
        self.selector = Selector(self.task)

    @property
    def models(self) -> dict[str, Table]:
        """[N, ...] the chosen models at their selected round, packed; views of what is kept.

        They are tensors. Where models are large, and some clients have the same, they are `Part`s, of which `[at]` is
        a tensor.
        """
        count, (arrays, shared) = len(self.names), self.kept
        return {n: t.expand(count, *t.shape) if n in shared and isinstance(t, Tensor) else t for n, t in arrays.items()}

    @property
    def relations(self) -> list[Relation]:
        """[N, N] or [L, N, N], or of very many clients their lists: one per evaluated round, or none at all.

        They are views of what is kept. If some rounds have weights by layer, those of the others hold for each layer.
        """
        relations = [whole_relation(r) if isinstance(r, Tensor) else r for r in self.kept_relations]
        layers = next((len(r) for r in relations if isinstance(r, Tensor) and r.ndim == 3), 0)
        return [r.expand(layers, -1, -1) if layers and isinstance(r, Tensor) and r.ndim == 2 else r for r in relations]

    @property
    def preference(self) -> str:
        """The named model that validation prefers so far, unless one is to be kept; the headline under privacy."""
        selection, selector = self.selector.selection, self.selector
        if selection.keep in self.named_models:
            return selection.keep
        if selection.unseen:
            return self.headline
        values = {name: self.validation(name) for name in self.named_models}
        means = {n: {} if v is None else {"validation": selector.mean(v, selector.score)} for n, v in values.items()}
        return select_model(means, selector.higher_is_better)

    def add_clients(self, names: Sequence[str]) -> None:
        """Make room for clients added at the end; they have no scores in the rounds before."""
        more = len(names) - len(self.names)
        self.names = tuple(names)

        def pad(t: Tensor, axes: int, value: float) -> Tensor:
            return torch.nn.functional.pad(t, (0, more) * axes, value=value)

        self.scores = [{k: pad(v, 1, torch.nan) for k, v in scores.items()} for scores in self.scores]
        tables = (relation for relation in self.relations if isinstance(relation, Tensor))  # lists are not kept
        self.kept_relations = [pad(relation, 2, 0.0) for relation in tables]
        self.diagnostics = [
            {k: pad(v, 1, torch.nan) if v.ndim else v for k, v in diagnostics.items()}
            for diagnostics in self.diagnostics
        ]

    @property
    def headline(self) -> str:
        """The first model that the method names."""
        return self.named_models[0]

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
        selector = self.selector
        if selector.selection.last or (model, "validation", selector.score) not in self.scores[0]:
            return self.rounds[-1]
        means, losses = (
            [selector.mean(scores.get((model, "validation", score)), score) for scores in self.scores]
            for score in (selector.score, "loss")
        )
        return select_round(self.rounds, means, selector.higher_is_better, losses)

    def tell_last(self) -> tuple[str, str, float]:
        """The last round's mean of the score that selects, of the headline, for progress: split, metric and mean.

        Of test examples without validation examples; NaN where all scores stay at their sites.
        """
        scores, model, metric = self.scores[-1], self.headline, self.selector.score
        split = "validation" if (model, "validation", metric) in scores else "test"
        return split, metric, float(scores[model, split, metric].nanmean())

    def test(self, model: str, metric: str = "") -> Tensor:
        """[N] `metric` (by default the task's) on test examples, at the round that validation selects."""
        return self.scores[self.place(model)][model, "test", metric or self.task.metric]

    def validation(self, model: str = "") -> Tensor | None:
        """[N] the validation score that selects, of a model at its selected round; None without validation examples.

        Without a model it is that of the chosen one.
        """
        return self.scores[self.place(model)].get((model or self.chosen, "validation", self.selector.score))

    def place(self, model: str = "") -> int:
        """The selected round of a model, of the chosen one by default, as its place among the evaluated rounds."""
        return self.rounds.index(self.select(model or self.chosen))

    def pack(self) -> tuple[dict[str, Table], str]:
        """Arrays and a line of text from which `restore` makes the same history."""
        arrays: dict[str, Table] = {
            f"score.{t}.{i}": v for t, scores in enumerate(self.scores) for i, v in enumerate(scores.values())
        }
        for t, relation in enumerate(self.kept_relations):
            if isinstance(relation, Tensor):
                arrays[f"relation.{t}"] = relation
            else:
                arrays |= {f"relation.{t}.{name}": part for name, part in relation.tensors.items()}
        arrays |= {
            f"note.{t}.{name}": v for t, diagnostics in enumerate(self.diagnostics) for name, v in diagnostics.items()
        }
        for name, models in self.kept.arrays.items():
            rows, places = models.separate() if isinstance(models, Part) else (models, None)
            arrays |= {f"model.{name}": rows} | ({} if places is None else {f"place.{name}": places})
        keys = list(self.scores[0]) if self.scores else []
        noted, cost = [list(diagnostics) for diagnostics in self.diagnostics], self.cost
        counts = [cost.bytes_down, cost.bytes_up, cost.examples, cost.done]
        record = [self.rounds, keys, noted, *counts, self.chosen, self.kept.shared, cost.spent, cost.taken]
        return arrays, json.dumps(record)

    def restore(self, arrays: dict[str, Tensor], text: str) -> None:
        """Become the history that was packed; raises KeyError, TypeError or ValueError if this is not one."""
        self.rounds, keys, noted, down, up, examples, done, self.chosen, shared, spent, taken = json.loads(text)
        self.cost = Cost(done, down, up, examples, [Spent(*values) for values in spent], taken)
        named: list[Key] = [(str(model), str(split), str(metric)) for model, split, metric in keys]
        integers = (*self.rounds, down, up, examples, done, *taken)
        if not all(type(count) is int for count in integers) or type(self.chosen) is not str:
            raise ValueError("its history has another format")
        self.scores = [{key: arrays[f"score.{t}.{i}"] for i, key in enumerate(named)} for t in range(len(self.rounds))]
        kept = (_find_relation(arrays, f"relation.{t}") for t in range(len(self.rounds)))
        self.kept_relations = [relation for relation in kept if relation is not None]
        self.diagnostics = [{name: arrays[f"note.{t}.{name}"] for name in names} for t, names in enumerate(noted)]
        models = {name.removeprefix("model."): t for name, t in arrays.items() if name.startswith("model.")}
        places = {name: arrays.get(f"place.{name}") for name in models}
        self.kept = KeptModels({n: t if (at := places[n]) is None else Part(t, at) for n, t in models.items()}, shared)


class Recorder:
    """Writes the rounds of a run into its history as they end."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._pending: Callable[[], None] | None = None  # waits for an evaluation in progress and keeps it

    def add(
        self,
        round: int,
        down: int,
        up: int,
        evaluation: Evaluation | Callable[[], Evaluation] | None = None,
        relation: Relation | None = None,
        diagnostics: dict[str, Tensor] | None = None,
        examples: int = 0,
        cohort: Tensor | None = None,
    ) -> None:
        """Count what a round took, in which the clients cohort: [K] took part; `keep` its evaluation, if it has one."""
        self.settle()
        cost = self.history.cost
        cost.bytes_down += down
        cost.bytes_up += up
        cost.examples += examples
        cost.done = round + 1
        cost.taken += [0] * (len(self.history.names) - len(cost.taken))
        for i in () if cohort is None else cohort.tolist():
            cost.taken[i] += 1
        if evaluation is not None:
            cost.spent.append(Spent(round, cost.bytes_down, cost.bytes_up, cost.examples))
            self.keep(round, evaluation, relation, diagnostics)

    def keep(
        self,
        round: int,
        evaluation: Evaluation | Callable[[], Evaluation],
        relation: Relation | None = None,
        diagnostics: dict[str, Tensor] | None = None,
    ) -> None:
        """Keep the evaluation of a round, and its models if validation prefers them to all before.

        An evaluation still in progress is a function; it is called when the next round is added, or by `settle`.
        """
        if not isinstance(evaluation, Evaluation):
            self._pending = lambda: self.keep(round, evaluation(), relation, diagnostics)
            return
        history = self.history
        self._check_models(round, {model for model, _, _ in evaluation.scores})
        history.rounds.append(round)
        history.scores.append({key: values.detach().cpu() for key, values in evaluation.scores.items()})
        if relation is None:  # now there are too many clients for it, or the method mixes no models
            history.kept_relations = []
        elif len(history.kept_relations) == len(history.rounds) - 1:
            history.kept_relations.append(_keep_relation(relation))
        history.diagnostics.append({name: value.detach().cpu() for name, value in (diagnostics or {}).items()})
        self._check_selection()
        chosen = history.preference
        if history.select(chosen) == round:
            history.chosen, history.kept = chosen, KeptModels({}, ())  # whose room the next may need
            model = evaluation.models[chosen] if evaluation.models else ()  # none if they stay at their sites
            history.kept = KeptModels(trees.pack(model), trees.names(model, Axis.SHARED))

    def settle(self) -> None:
        """Wait for the evaluation in progress, if there is one."""
        pending, self._pending = self._pending, None
        if pending:
            pending()

    def _check_models(self, round: int, named: set[str]) -> None:
        """Raise UsageError unless these models are scored in every round."""
        if self.history.scores and named != {*self.history.named_models}:
            before, now = (", ".join(sorted(names)) for names in (self.history.named_models, named))
            raise UsageError(f"round {round + 1}: personalise names the models {now}, and named {before} before")

    def _check_selection(self) -> None:
        """Raise UsageError if rounds are to be selected by a score that no client's validation examples have."""
        history, selector = self.history, self.history.selector
        scores, by = history.scores[-1], selector.selection.by
        if not by:
            return
        if "validation" not in {split for _, split, _ in scores}:
            raise UsageError(f"select_by={by} needs validation examples; set federation.split.validation")
        metric = history.task.metric
        wanted, plain = (scores[history.headline, "validation", name][selector.honest] for name in (by, metric))
        if wanted.isnan().all() and not plain.isnan().any():
            why = "have two classes" if by in BY_CLASS else "define it"
            raise UsageError(
                f"select_by={by} cannot select: no client's validation examples {why}; select by "
                f"{metric} or loss, or make federation.split.validation larger"
            )


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
