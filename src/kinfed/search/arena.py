"""Arena: what the candidates of a choice are trained on and how, and the folder of their checkpoints."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..core import checkpoint
from ..core.engine import Participation, Rounds
from ..core.history import History
from ..core.model import Model
from ..core.training import Training
from ..data.federation import Federation, list_owned, take_fold
from ..errors import UsageError, log_failure
from ..methods import METHODS
from ..runs.config.named_baselines import NamedBaseline
from ..runs.fit import fit, seconds_by_round
from ..runs.run_folder import RunFolder
from ..runs.trained_run import TrainedRun
from ..simulation.execution import Execution
from . import successive_halving
from .successive_halving import Array, Candidate, Entry, plan_rounds

PRICE = 1.7  # a candidate's training round beside one of FedAvg, on the mean over the methods


@dataclass(frozen=True)
class Arena:
    """What candidates are trained on, how, and the folder of their checkpoints."""

    federation: Federation
    module: Callable[[int], nn.Module | Model]  # by seed
    folder: Path
    models: Mapping[str, Callable[[int], nn.Module | Model]] = field(
        default_factory=dict
    )  # more, which are candidates too
    standard: Mapping[str, Callable[[int], nn.Module | Model]] = field(
        default_factory=dict
    )  # those that hold a standard model of each client, by name
    rounds: Rounds = Rounds()
    training: Training = Training()
    participation: float | Participation = 1.0
    seed: int = 0
    execution: Execution = Execution()
    baselines: Sequence[NamedBaseline] = ()  # of the user, that the verdict is against too

    def __post_init__(self) -> None:
        if self.training.noise is not None:
            raise UsageError(
                "a choice trains many candidates on the same rows and scores them, and a privacy budget covers one "
                "run; leave privacy out, or run one method"
            )

    def build_model(self) -> Model:
        """The usual model, before training."""
        module = self.module(self.seed)
        return module if isinstance(module, Model) else Model(module)

    def find_model(self, candidate: Candidate) -> Callable[[int], nn.Module | Model]:
        """What makes a candidate's model, by seed."""
        return (self.standard if candidate.is_standard else self.models).get(candidate.model, self.module)

    def train(self, candidate: Candidate, fold: int, until: int) -> TrainedRun:
        """Train a candidate, from where it stands, and keep its checkpoint.

        Each fold has another seed and other examples for validation, and the same test examples. What a method warns
        of concerns the user once it has won; the runs of candidates are silent.
        """
        with warnings.catch_warnings():
            if until:
                warnings.simplefilter("ignore")
            return fit(
                candidate.method,
                take_fold(self.federation, fold),
                self.find_model(candidate)(self.seed + fold),
                rounds=plan_rounds(self.rounds, candidate.own_rounds, candidate.reach(until, self.rounds)),
                training=candidate.training,
                participation=self.participation,
                seed=self.seed + fold,
                execution=self.execution,
                folder=self.place(candidate, fold),
            )

    def refit(self, run: TrainedRun, candidate: Candidate) -> TrainedRun:
        """The candidate trained on all rows, those for validation and test too, as many rounds as were selected.

        A solver goes on until it has solved these. Its models are of the kind that was chosen for the run. Its own
        scores are of rows that it has learned from.
        """
        count = candidate.most if candidate.is_solved else run.history.select(run.history.chosen) + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fit(
                candidate.method,
                replace(self.federation, rows={**self.federation.rows, "train": list_owned(self.federation)}),
                self.find_model(candidate)(self.seed),
                rounds=Rounds(count, count, keep=run.history.chosen),
                training=candidate.training,
                participation=self.participation,
                seed=self.seed,
                execution=replace(self.execution, keep_state=False),
            )

    def place(self, candidate: Candidate, fold: int) -> Path:
        """The folder of one of a candidate's runs."""
        return self.folder / candidate.name / f"fold-{fold}"

    def history(self, entry: Entry) -> History:
        """The scores of a run so far; no rounds if it has not begun."""
        selection = self.rounds.selection._replace(last=entry.candidate.is_solved)
        history = History(tuple(self.federation.names), self.federation.task)
        history.selector.selection = selection
        path = RunFolder(self.place(*entry)).checkpoint
        if path.exists():
            checkpoint.read_scores(path, history)
        return history

    def look(self, entry: Entry, until: int) -> Array:
        """[N] the clients' validation scores after so many rounds."""
        return successive_halving.read_validation(self.history(entry), entry.candidate.reach(until, self.rounds))

    def has_reached(self, entry: tuple[Candidate, int], until: int) -> bool:
        """Whether a run has come so far already."""
        candidate, fold = entry
        last = plan_rounds(self.rounds, candidate.own_rounds, candidate.reach(until, self.rounds)).last
        return self.history(Entry(candidate, fold)).cost.done >= last

    def advance(
        self, entries: Sequence[Entry], until: int, on_begin: Callable[[Entry], None] = lambda entry: None
    ) -> dict[Entry, str]:
        """Train every entry until a round, one after the other; why those that could not go on ended."""
        ended: dict[Entry, str] = {}
        for entry in entries:
            if self.has_reached(entry, until):
                continue
            on_begin(entry)
            try:
                self.train(*entry, until)
            except Exception as problem:  # whatever a method raises is its own failure
                ended[entry] = log_failure(problem)
        return ended

    def seconds(self) -> float:
        """Of a training round of a candidate, measured with FedAvg, at a rate so small that it cannot diverge."""
        optimiser: Any = self.training.optimiser
        slow = replace(optimiser, lr=1e-12) if hasattr(optimiser, "lr") else optimiser
        *_, last = seconds_by_round(
            METHODS["fedavg"](),
            self.federation,
            self.module(self.seed),
            rounds=Rounds(3),
            training=replace(self.training, optimiser=slow),
            participation=self.participation,
            seed=self.seed,
            execution=self.execution,
        )
        return PRICE * last
