"""Choose: which method, at which rate of local training, suits a federation."""

import itertools
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..core.engine import Participation, Rounds
from ..core.method import Method
from ..core.mixins import Advises, leak
from ..core.model import Model
from ..core.summary import Metric
from ..core.tasks import Classification, Counts, Forecasting, Quantiles, Regression
from ..core.training import Training
from ..data.federation import Federation, list_owned
from ..data.tables.table_reader import from_frame
from ..errors import RunError, UsageError, log_failure, nearest, note_failure
from ..methods.solved import KNOWN
from ..methods.solved.standard import lanes_of
from ..models.calendar_means import count_times
from ..models.repeat import WINDOWS, find_season
from ..models.trees import DEEPEST
from ..runs.baselines import Baseline, floor, rows, standard_baselines, verdict
from ..runs.config.experiment import CLIP, default_model
from ..runs.config.from_table import GROWING
from ..runs.config.named_baselines import read_baselines
from ..runs.reference_runs import BASES
from ..runs.run import client_index, make_baseline
from ..runs.standard_models import BY_TIME, LONGEST, REPEATS, SMOOTHS, TREES
from ..runs.test_scores import NO_STANDARD, NO_VERDICT
from ..runs.tested_examples import Tested
from ..runs.trained_run import TrainedRun
from ..verdict.verdict import Verdict, decide
from . import successive_halving
from .arena import Arena
from .budget import BEST, DRAWS, allowance, plan_rungs
from .successive_halving import STANDARD, Advance, Candidate, Entry, Standing

TRIED = (*BASES, "fedrep", "kin", "hedge", "cfl", "fedavg-ft")
WITH_GRAPH = ("sfl",)  # tried too where the clients' graph is known
FACTORS = (1, 3, 1 / 3)  # of the rate of local training
CAREFUL = (1 / 3, 1)  # the same of squared errors in the units of a table's target, which may have heavy tails
# models that are candidates, simplest first, of which partial pooling solves the head
SOLVED = ("repeat", "linear", "changes", "log-linear", "additive")
UNEQUAL = 0.3  # a target's deviation over its mean from which its logarithm is tried
MANY = 1 << 22  # numbers in all clients' sums up to which solving takes a moment
GROWN = "trees"  # the model that personal boosting grows
ROWS, LEAVES = 100_000, 1 << 24  # training rows up to which they are grown, and numbers in all clients' trees
FEW = 1000  # validation examples, up to which the best solved models are compared on more draws
SOLVING = 20  # rounds in which a model is solved, at the latest
CLOSE = 0.02  # of a score, a difference from which a model is worse than another
LEFT_OUT = "the budget left it out: a larger one admits it"
FORMS: tuple[dict[str, Any], ...] = ({}, {"units": "client"}, {"kin": 1})  # in which it is tried
WIDER = {"widen": 1.25}  # a further form in which it is tried for labels
ALONE = "linear", {"alone": 1}  # a model, and a further form in which it is tried where numbers are predicted


@dataclass(frozen=True)
class Choice:
    """The winner of a choice, and what it is worth on the test examples, which were used once.

    `choose` returns it. `run` is the winner's `Run`, `ranking()` has a line for each candidate, `verdict` says what the
    winner was worth over Local and FedAvg, and `load_model(client)` is the model that a client should keep.
    """

    standings: list[Standing]  # of all candidates, best first
    winner: Standing
    run: TrainedRun  # the winner's, on the first fold
    runs: dict[str, TrainedRun]  # those of Local and FedAvg at their best rates, without one that failed at every rate
    bases: dict[str, Standing]  # at these rates
    answers: dict[str, str]  # by client, whose model it keeps: the winner's ("kin"), its own, or FedAvg's
    verdict: Verdict | None  # None without Local, or if the scores cannot be compared
    problems: list[str]  # what failed and is missing, if anything
    folds: int
    budget: int  # training rounds that all candidates were given
    trained: int  # and those that it took
    standard: Sequence[Baseline] = ()  # standard models on the same rows
    refits: dict[str, TrainedRun] = field(default_factory=dict)  # "kin", "local", "fedavg": once more, on all rows

    def load_model(self, client: int | str | None = None, *, position: int | None = None) -> nn.Module:
        """The model that a client, given by name or `position`, keeps: a plain module in evaluation mode."""
        names = list(self.answers)
        name = names[client_index(names, client, position)]
        kept = self.answers[name]
        return self.refits.get(kept, self.runs.get(kept, self.run)).model(name)

    def ranking(self) -> list[dict[str, Any]]:
        """One row per candidate: its mean validation score, and its gain over the better of Local and FedAvg with a
        95 % interval, paired by client; both in the score's unit, higher being better, so that an error is negative.
        Solved models that were compared on more draws of validation examples have their mean score there, too.
        """
        rows = []
        for standing in self.standings:
            row: dict[str, Any] = {"candidate": standing.candidate.name, "rounds": standing.trained}
            if not standing.is_left:
                rows.append(row | {"problem": standing.problem or LEFT_OUT})
                continue
            row |= {"validation": standing.mean, "chosen": standing is self.winner}
            row |= {"validation_of_draws": standing.drawn} if math.isfinite(standing.drawn) else {}
            bases = [base for base in self.standings if base.candidate.base and base.rounds >= standing.rounds]
            base = max(bases, key=lambda base: base.mean, default=None)
            if base is not None and base.rounds == standing.rounds and base is not standing:
                gain, _, half = standing.gain_over(base)
                bounds = (gain - half, gain + half) if math.isfinite(half) else (None, None)
                row |= {"gain": gain, "low": bounds[0], "high": bounds[1]}
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        kept = {kind: [name for name, answer in self.answers.items() if answer == kind] for kind in ("local", "fedavg")}
        return {
            "method": self.winner.candidate.method_name,
            "candidate": self.winner.candidate.name,
            "budget": self.budget,
            "training_rounds": self.trained,
            "refit_rounds": sum(run.history.cost.done for run in self.refits.values()),
            "folds": self.folds,
            "ranking": self.ranking(),
            "keep_own_model": kept["local"],
            "keep_fedavg_model": kept["fedavg"],
            "verdict": self.verdict and self.verdict.to_dict(),
            "problems": self.problems,
            "refit": bool(self.refits),
            "baselines": rows([self.standard], self.run.federation.task.higher_is_better),
        }


def choose(
    federation: Federation | Any,
    module: nn.Module | Model | None = None,
    *,
    budget: int | str | None = None,
    methods: Sequence[str | Method] | None = None,
    seeds: int = 1,
    folder: str | Path | None = None,
    refit: bool = False,
    client: str = "",
    target: str | Sequence[str] = "",
    **how: Any,
) -> Choice:
    """Find the method and the learning rate that suit a federation, and train one model for each client with them.

    Candidates are compared on validation examples; test examples are used once, at the end.

    Args:
        federation: the clients' examples, or a frame of polars or pandas, of which `client` and `target` name columns.
        module: as in `fit`. Without it models are candidates too: a small MLP with each method and, where the task
            allows it, linear models that `partial-pooling` solves. A standard model of each client's own then wins if
            validation examples prefer it.
        budget: the most training rounds of all candidates together, draws of more validation examples included, or a
            time such as "5m" or "90s", which is converted to rounds at the beginning; by default nine runs of all
            rounds, and what solving takes. With `refit` what is kept is trained once more, for as many rounds again.
        methods: names, or methods with settings; by default seven, and SFL too if the graph is known.
        seeds: how often each candidate is trained, each time with other examples for validation.
        folder: where candidates are kept; the same call continues after an interruption.
        refit: train the models that clients keep once more, on all rows; scores stay those of the split.
        client, target: columns of a frame.
        how: what `fit` takes too: rounds, training, participation, seed and execution. Besides, `baselines` are
            estimators of your own that the verdict is against, each fitted for each client and to all rows: names
            such as "lightgbm:LGBMRegressor", or estimators as scikit-learn has them.

    Returns:
        The `Choice`: ranking, winner, verdict, and the model that each client should keep.

    Raises:
        UsageError: the request cannot work.
        RunError: no candidate could be trained.
    """
    settings = [field.name for field in fields(Arena)[5:]]
    if unknown := sorted(set(how) - set(settings)):
        raise UsageError(f"choose takes no '{unknown[0]}'; {nearest(unknown[0], settings)}")
    if isinstance(methods, str) or (methods is not None and not methods):
        raise UsageError(f"methods is a list of names, or of methods with settings; got {methods!r:.80}")
    if not isinstance(federation, Federation):
        if not (client and target):
            raise UsageError("choose takes a federation, or a frame with client= and target=, the names of its columns")
        federation = from_frame(federation, client=client, target=target, seed=how.get("seed", 0))
    how["baselines"] = read_baselines(how.get("baselines", ()))[0]
    how["rounds"] = successive_halving.plan_rounds(Rounds.parse(how.get("rounds", 20)))
    if module is None and federation.columns is not None:
        how.setdefault("training", Training(clip=CLIP))
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place:
        models = () if module is not None else candidate_models(federation)
        standard = standard_forms(federation) if models else ()
        more, forms = (
            {spec: partial(default_model, federation, *split_settings(spec)) for spec in specs}
            for specs in (models, standard)
        )
        usual_model = default_model(federation) if module is None else module
        arena = Arena(federation, lambda seed: usual_model, Path(place), more, forms, **how)
        entrants = [find_entrant(method) for method in methods or usual(federation)]
        tried = candidates(entrants, arena)
        return carry_out(arena, tried, {"budget": budget, "seeds": seeds}, arena.advance, refit=refit)


def candidate_models(federation: Federation) -> tuple[str, ...]:
    """The models that are candidates too, as name,key=value: those that suit the task and take moments or minutes.

    Partial pooling solves the last layer of each, and boosting grows the trees.
    """
    task = federation.task
    if not isinstance(task, Classification | Counts | Forecasting | Regression):
        return ()
    matrices = 1 if isinstance(task, Regression) else federation.outputs
    forecasts = isinstance(task, Forecasting)
    repeats = forecasts and not isinstance(task, Quantiles)  # an output for each step
    suits = {"log-linear": _spans_orders(federation), "changes": forecasts, "repeat": repeats}
    names = [name for name in SOLVED if suits.get(name, True)]
    if repeats and (season := usual_season(federation)) > 1:
        names.insert(1, f"repeat,season={season}")
    heads: dict[str, Any] = {name: [*default_model(federation, *split_settings(name)).children()][-1] for name in names}
    solved = [name for name in names if len(federation) * matrices * (heads[name].in_features + 1) ** 2 <= MANY]
    return (*solved, GROWN) if _can_grow(federation) else tuple(solved)


def standard_forms(federation: Federation) -> tuple[str, ...]:
    """The models that hold a standard model of each client of a table or of series, as name,key=value."""
    task = federation.task
    if isinstance(task, Forecasting):
        if isinstance(task, Quantiles) or federation.x.ndim != 3:
            return ()
        seasons = range(1, min(federation.x.shape[1], LONGEST) + 1)
        naive, smooth = ([f"{kind},season={season}" for season in seasons] for kind in (REPEATS, SMOOTHS))
        times = count_times(federation.x, torch.cat(list_owned(federation)))
        means = len(federation) * times * federation.outputs <= LEAVES
        return ("linear", "changes", *naive, *smooth, *([f"{BY_TIME},times={times}"] if means and times > 1 else []))
    if federation.x.ndim != 2:
        return ()
    trees = f"trees,trees={TREES * lanes_of(task, federation.outputs)},depth={DEEPEST}"
    leaves = sum(leaf.numel() for leaf in default_model(federation, *split_settings(trees)).parameters())
    return ("linear", trees) if len(federation) * leaves <= LEAVES else ("linear",)


def _can_grow(federation: Federation) -> bool:
    """Whether trees suit the examples, rows of numbers, and are grown in minutes and kept in little memory."""
    trees = default_model(federation, GROWN)
    leaves = len(federation) * sum(leaf.numel() for leaf in trees.parameters())
    is_table = federation.x.ndim == 2 and not isinstance(federation.task, Forecasting)
    return is_table and leaves <= LEAVES and sum(map(len, federation.rows["train"])) <= ROWS


def split_settings(spec: str) -> tuple[str, dict[str, int]]:
    """A model's name and its settings, of name,key=value."""
    name, *settings = spec.split(",")
    pairs = [setting.split("=") for setting in settings]
    return name, {key: int(value) for key, value in pairs}


def usual_season(federation: Federation) -> int:
    """The steps after which readings of training windows are most like they were; 1 if they are most like the last."""
    rows = torch.cat(list(federation.rows["train"]))
    rows = rows[:: -(-len(rows) // WINDOWS)]
    task: Any = federation.task
    readings = federation.x[rows][..., 0]
    y = (federation.y[rows] - task.mean) / task.deviation
    return find_season(readings, y, range(1, min(readings.shape[1], LONGEST) + 1))


def _spans_orders(federation: Federation) -> bool:
    """Whether targets are a table's single numbers above zero, some many times as large as others."""
    task = federation.task
    if not isinstance(task, Regression) or len(task.mean) != 1 or federation.columns is None:
        return False
    y = federation.y[torch.cat(list(federation.rows["train"]))]
    return bool((y > 0).all()) and task.deviation[0] > UNEQUAL * task.mean[0]


def usual(federation: Federation) -> tuple[str, ...]:
    """The methods that are tried if none is named."""
    return TRIED if federation.graph is None else TRIED + WITH_GRAPH


class Entrant(NamedTuple):
    """A method that is tried, by name, and those of its settings that are told apart, as key=value."""

    name: str
    method: Method
    settings: tuple[str, ...] = ()


def find_entrant(method: str | Method) -> Entrant:
    """A method, by its name or with settings; raises UsageError if there is none of this name."""
    if isinstance(method, Method):
        names = [name for name, kind in KNOWN.items() if kind is type(method)]
        changed = [field for field in fields(method) if getattr(method, field.name) != field.default]
        settings = tuple(f"{field.name}={getattr(method, field.name)}" for field in changed)
        return Entrant((names or [type(method).__name__.lower()])[0], method, settings)
    if method not in KNOWN:
        raise UsageError(f"there is no method {method!r:.80}; {nearest(str(method), KNOWN)}")
    return Entrant(method, KNOWN[method]())


def candidates(entrants: Sequence[Entrant], arena: Arena) -> list[Candidate]:
    """Every method at every rate, Local and FedAvg first; a method with rates of its own once.

    Where models are candidates too, partial pooling solves the last layer of each, in each of its `FORMS`, and boosting
    grows the trees.
    """
    factors = CAREFUL if arena.models and isinstance(arena.federation.task, Regression) else FACTORS
    entrants = list(dict.fromkeys(entrants))
    every = {entrant.name for entrant in entrants}
    entrants = [Entrant(name, KNOWN[name]()) for name in BASES if name not in every] + list(entrants)
    result: dict[str, Candidate] = {}
    optimiser: Any = arena.training.optimiser
    rate = getattr(optimiser, "lr", None)
    for factor in factors:
        for name, method, settings in sorted(entrants, key=lambda entrant: entrant.name not in BASES):
            if why := leak(method):
                raise UsageError(f"{name} cannot be chosen fairly: {why}")
            full, how = ",".join([name, *settings]), arena.training
            if rate is None or Advises.from_method(method).rates:
                if factor != factors[0]:
                    continue
            else:
                lr = float(f"{factor * rate:.6g}")
                full = f"{full},lr={lr:g}"
                how = replace(how, optimiser=replace(optimiser, lr=lr))
            result[full] = Candidate(full, name, method, how, settings)
    made = list(result.values())
    return [*made[: len(BASES)], *_list_solved(arena), *_list_boosted(arena), *made[len(BASES) :]]


def _list_solved(arena: Arena) -> list[Candidate]:
    """Partial pooling of each of the models that are candidates too."""
    name, made = "partial-pooling", []
    most = SOLVING if arena.participation in (1.0, Participation()) else max(SOLVING, arena.rounds.count)
    forms = (*FORMS, WIDER) if isinstance(arena.federation.task, Classification) else FORMS
    tried = list(itertools.product([model for model in arena.models if model != GROWN], forms))
    if ALONE[0] in arena.models and isinstance(arena.federation.task, Regression):
        tried.append(ALONE)
    for model, form in tried:
        settings = tuple(f"{key}={value}" for key, value in form.items())
        full, method = ",".join([name, model, *settings]), KNOWN[name](**form)
        made.append(Candidate(full, name, method, arena.training, settings, model=model, own_rounds=Rounds(most, most)))
    return made


def _list_boosted(arena: Arena) -> list[Candidate]:
    """Personal boosting, where trees are among the models; it ends when validation has stopped improving."""
    if GROWN not in arena.models:
        return []
    name = "personal-boosting"
    full, method = f"{name},{GROWN}", KNOWN[name]()
    return [Candidate(full, name, method, arena.training, model=GROWN, own_rounds=GROWING)]


def carry_out(
    arena: Arena,
    tried: Sequence[Candidate],
    terms: dict[str, Any],
    advance: Advance,
    on_rung: Callable[[int, Sequence[Candidate]], None] = lambda rung, left: None,
    on_begin: Callable[[Entry], None] = lambda entry: None,
    refit: bool = False,
) -> Choice:
    """Compare the candidates, and train the winner, Local and FedAvg to the end on the first fold.

    What a candidate raises is its own failure: the others go on, and so does the choice without Local or FedAvg.
    `terms` has the `budget` and the `seeds`, and whatever else a choice that goes on must share with its begin.
    """
    folds = terms["seeds"]
    _check_folds(arena.federation, folds)
    allowed = allowance(arena, tried, terms)
    plan = plan_rungs(arena, tried, allowed, folds)
    standings = successive_halving.run(tried, plan, folds, advance, arena.look, on_rung)
    bases, runs, problems = _train_bases(arena, standings, on_begin)
    ahead = successive_halving.winner(standings)
    few = sum(map(len, arena.federation.rows["validation"])) < FEW
    if folds == 1 and not arena.federation.in_order and few and ahead is not None and ahead.candidate.is_solved:
        left = allowed - sum(sum(_count_rounds(standing, arena, folds)) for standing in standings)
        best = _take_best(standings, arena.rounds.count, left)
        _compare_again(sorted(best, key=lambda standing: tried.index(standing.candidate)), arena, advance)
        standings.sort(key=successive_halving.rank)
    won = _train_to_end(arena, partial(successive_halving.winner, standings), on_begin)
    if won is None:
        raise RunError(f"no candidate could be trained: {'; '.join(problems)}")
    standard = list[Baseline]()
    with note_failure(problems, NO_STANDARD):
        score = won[1].history.selector.score
        standard, left_out = standard_baselines(arena.federation, score, named=arena.baselines)
        problems += left_out
    won = _prefer_standard(arena, won, standard, standings, on_begin)
    answers, worth = dict.fromkeys(arena.federation.names, "kin"), None
    with note_failure(problems, NO_VERDICT):
        answers = safest(won[1], runs)
        entered = sum(standing.rounds > 0 or bool(standing.problem) for standing in standings)
        worth = _judge(*won, runs, standard, answers, entered)
    rounds = [_count_rounds(standing, arena, folds) for standing in standings]
    for standing, counts in zip(standings, rounds, strict=True):
        standing.trained = counts[0]
    trained = sum(map(sum, rounds))
    again: dict[str, TrainedRun] = {}
    if refit:
        with note_failure(problems, "models are not trained once more on all rows"):
            every = {"kin": won, **{base: (bases[base], runs[base]) for base in runs}}
            for kind in dict.fromkeys(["kin", *answers.values()]):
                standing, run = every[kind]
                on_begin(Entry(standing.candidate, 0))
                again[kind] = arena.refit(run, standing.candidate)
    return Choice(standings, *won, runs, bases, answers, worth, problems, folds, allowed, trained, standard, again)


def _check_folds(federation: Federation, folds: Any) -> None:
    """Raise UsageError unless candidates can be compared on so many sets of validation examples."""
    if not any(len(rows) for rows in federation.rows["validation"]):
        raise UsageError(
            "choosing needs validation examples, and no client has any; set federation.split.validation above 0"
        )
    if not isinstance(folds, int) or isinstance(folds, bool) or folds < 1:
        raise UsageError(f"seeds counts how often a candidate is trained: a whole number from 1; got {folds!r:.80}")
    if federation.in_order and folds > 1:
        raise UsageError("examples that are split in time order have one set for validation; leave seeds out")


def _prefer_standard(
    arena: Arena,
    won: tuple[Standing, TrainedRun],
    standard: Sequence[Baseline],
    standings: list[Standing],
    on_begin: Callable[[Entry], None],
) -> tuple[Standing, TrainedRun]:
    """The winner so far, or the best standard model of each client's own if validation rows prefer that.

    It takes the winner's place if it is clearly better. It does so too if it is shown to be worse by no more than
    `CLOSE`, because it needs nobody else.
    """
    stood = _list_standard(arena, standard, 1.0 if won[1].history.selector.higher_is_better else -1.0)
    best = max(stood, key=lambda standing: standing.mean, default=None)
    if best is None or not (best.is_clearly_above(won[0]) or best.is_close_to(won[0], CLOSE)):
        return won
    entry = Entry(best.candidate, 0)
    best.problem = arena.advance([entry], best.rounds, on_begin).get(entry, "")
    trained = _train_to_end(arena, partial(successive_halving.winner, [best]), on_begin)
    standings.append(best)
    standings.sort(key=successive_halving.rank)
    return trained or won


def _list_standard(arena: Arena, standard: Sequence[Baseline], sign: float) -> list[Standing]:
    """The standings of the standard models that a client can have by itself, as validation rows scored them.

    sign is 1 where a higher score is better, and -1 where a lower one is.
    """
    specs: dict[str, str] = {split_settings(spec)[0]: spec for spec in arena.standard}
    specs |= {spec: spec for spec in arena.standard}
    stood = []
    for baseline in standard:
        if baseline.form is None or baseline.form.model not in specs:
            continue
        model, penalty = baseline.form
        settings = (f"penalty={penalty}",) if model in ("linear", "changes") else ()
        candidate = Candidate(
            name=",".join([STANDARD, model, *settings]),
            method_name=STANDARD,
            method=KNOWN[STANDARD](penalty=penalty),
            training=arena.training,
            settings=settings,
            model=specs[model],
            own_rounds=Rounds(1, 1),
            title=baseline.name,
        )
        scores = [sign * baseline.validation.get(name, math.nan) for name in arena.federation.names]
        stood.append(Standing(candidate, arena.rounds.count, np.array([scores])))
    return stood


def _train_bases(
    arena: Arena, standings: Sequence[Standing], on_begin: Callable[[Entry], None]
) -> tuple[dict[str, Standing], dict[str, TrainedRun], list[str]]:
    """Local and FedAvg at their best rates, and their finished runs; and why one is missing."""
    bases, runs, problems = dict[str, Standing](), dict[str, TrainedRun](), list[str]()
    for base in BASES:
        trained = _train_to_end(arena, partial(successive_halving.base_of, standings, base), on_begin)
        if trained is not None:
            bases[base], runs[base] = trained
        else:
            failed = (standing for standing in standings if standing.candidate.base == base)
            why = next(standing.problem for standing in failed if standing.problem)
            problems.append(f"{base} failed at every rate: {why}")
    return bases, runs, problems


def _take_best(standings: Sequence[Standing], rounds: int, left: int) -> list[Standing]:
    """The best solved models, as many as the rounds that are left admit on more draws."""
    solved = [standing for standing in standings if standing.candidate.is_solved and standing.is_left]
    best: list[Standing] = []
    for standing in sorted(solved, key=lambda standing: -standing.mean)[:BEST]:
        left -= (DRAWS - 1) * (standing.candidate.most or rounds)
        best += [standing] if left >= 0 else []
    return best


def _count_rounds(standing: Standing, arena: Arena, folds: int) -> list[int]:
    """How many rounds a candidate has trained on each fold, or draw."""
    return [arena.history(Entry(standing.candidate, fold)).cost.done for fold in range(max(folds, DRAWS))]


def _compare_again(solved: Sequence[Standing], arena: Arena, advance: Advance) -> None:
    """Prefer the simplest of models that are solved, the first, whose score on three draws is close to the best's."""
    count = arena.rounds.count
    ended = advance([Entry(standing.candidate, fold) for standing in solved for fold in range(DRAWS)], count)
    for standing in solved:
        entries = [Entry(standing.candidate, fold) for fold in range(DRAWS)]
        standing.problem = next((ended[entry] for entry in entries if entry in ended), standing.problem)
        standing.rounds = count
        standing.values = np.stack([arena.look(entry, count) for entry in entries])
    left = [standing for standing in solved if not standing.problem]
    if best := max(left, key=lambda standing: standing.mean, default=None):
        next(standing for standing in left if best.mean - standing.mean <= CLOSE * abs(best.mean)).preferred = True
    for standing in solved:
        standing.drawn, standing.values = standing.mean, standing.values[:1]


def _train_to_end(
    arena: Arena, pick: Callable[[], Standing | None], on_begin: Callable[[Entry], None]
) -> tuple[Standing, TrainedRun] | None:
    """A picked candidate and its finished run; one that fails is out, and another is picked. None if none is left."""
    while (standing := pick()) is not None:
        on_begin(Entry(standing.candidate, 0))
        try:
            return standing, arena.train(standing.candidate, 0, 0)
        except Exception as problem:
            standing.problem = log_failure(problem)
    return None


def safest(run: TrainedRun, bases: Mapping[str, TrainedRun]) -> dict[str, str]:
    """Whose model each client keeps: "kin", or "local" or "fedavg" where its validation examples clearly prefer it.

    `bases` has those of the two runs that there are. All keep the method's where examples have no scores of their own.
    """
    task, names = run.federation.task, list(run.federation.names)
    mine = run.score_examples("validation")
    others = {kind: run_of_base.score_examples("validation") for kind, run_of_base in bases.items()}
    answers = dict.fromkeys(names, "kin")
    if not mine or not all(others.values()):
        return answers
    best = [_mean(scores) for scores in mine]
    for kind, scores in others.items():
        preferred = decide([mine], [scores], names, task.higher_is_better)[1]
        for i, name in enumerate(names):
            value = _mean(scores[i])
            if name in preferred and (answers[name] == "kin" or (value > best[i]) == task.higher_is_better):
                answers[name], best[i] = kind, value
    return answers


def _mean(scores: Tensor) -> float:
    return float(np.nanmean(scores)) if len(scores) else math.nan


def _judge(
    winner: Standing,
    run: TrainedRun,
    bases: Mapping[str, TrainedRun],
    standard: Sequence[Baseline],
    answers: Mapping[str, str],
    candidates: int,
) -> Verdict | None:
    """What the choice is worth, each client keeping the model of its answer; None without any baseline."""
    baselines = [make_baseline(base, name == "fedavg") for name, base in bases.items()]
    highest, method = run.federation.task.higher_is_better, winner.candidate.method_name
    return verdict(
        winner.candidate.title or method,
        Metric.from_task(run.federation.task),
        [merge_tested({"kin": run, **bases}, answers)],
        floor([[*baselines, *standard]], highest, run.history.selector.higher_is_better),
        candidates=candidates,
        saved=" and ".join(method if kind == "kin" else kind for kind in sorted({*answers.values()})),
    )


def merge_tested(runs: Mapping[str, TrainedRun], answers: Mapping[str, str]) -> Tested:
    """The test scores of the choice: each client's by the model that it keeps, which is of one of the runs."""
    tested = {kind: run.by_client for kind, run in runs.items()}
    examples = {kind: tested_run.examples for kind, tested_run in tested.items()}
    by_example = {name: of_run[name] for name, kind in answers.items() if (of_run := examples[kind]) is not None}
    return Tested(
        means={name: tested[kind].means[name] for name, kind in answers.items()},
        examples=by_example if len(by_example) == len(answers) else None,
        leaking=tested["kin"].leaking,
        blocks=tested["kin"].blocks,
        declared=tested["kin"].declared,
        totals=tested["kin"].totals,
    )
