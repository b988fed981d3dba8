"""Further: a finished run goes on, with more rounds, and with clients that have joined."""

from collections.abc import Sequence
from pathlib import Path

from ..core.engine import check_count
from ..core.summary import Summary
from ..errors import UsageError
from ..files import write_json
from .config import experiment as config
from .config.experiment import Experiment
from .final_state import StateFile
from .run import open_models_file
from .run_folder import RunFolder

ROUNDS = "rounds="


def further(path: Path, overrides: Sequence[str] = ()) -> tuple[Experiment, RunFolder]:
    """The experiment in which a finished run goes on, and that run's folder.

    It is the run's own, with `overrides`; of these, rounds are those that are added, by default as many as the run
    trained itself. Raises UsageError for a run that cannot go on.
    """
    folder = RunFolder(path)
    summary = folder.read_summary()
    if not folder.is_begun:
        raise UsageError(f"{folder} has no config.toml, as kinfed.save writes none, so it cannot go on")
    if summary.sites is not None:
        raise UsageError(
            f"{folder} is of real sites, whose rows and private states stayed there, so it cannot go on here; a "
            "newcomer can join it: kinfed onboard"
        )
    for run in folder.repeats(summary):
        StateFile(run)
        if run.models.exists():
            open_models_file(run, run.read_summary())
    method = config.of_run(folder.config).method_name
    before = (summary.provenance.former or {"rounds": 0})["rounds"]
    table = config.read(str(folder.config), list(overrides))
    more = table["rounds"] if any(override.startswith(ROUNDS) for override in overrides) else summary.rounds - before
    check_count("rounds", more, 1, 31)
    experiment = config.resolve({**table, "rounds": summary.rounds + more, "patience": 0.0})
    if experiment.method_name != method:
        raise UsageError(f"{folder} was trained by {method} and goes on with it; got {experiment.method_name}")
    if lacking := sorted({*experiment.every_seed} - {*summary.seeds}):
        raise UsageError(
            f"{folder} has no run with seed {lacking[0]} that could go on; leave seed and seeds as they are"
        )
    return experiment, folder


def link(former: RunFolder, folder: RunFolder) -> None:
    """Note in a new run's folder from which run it goes on."""
    summary = former.read_summary()
    clients = [] if summary.by_client is None else summary.by_client.names
    write_json(folder.origin, {"run": str(former.path.resolve()), "rounds": summary.rounds, "clients": clients})


def former_of(out: RunFolder, seed: int) -> RunFolder | None:
    """The run with this seed from which a run goes on; None if it began by itself."""
    if not (origin := out.read_origin()):
        return None
    former = RunFolder(origin["run"])
    of_that_seed = former.of_seed(seed)  # one with a single seed has no folder for it
    return of_that_seed if of_that_seed.is_finished else former


def link_beside(out: RunFolder, folder: RunFolder, name: str, experiment: Experiment) -> None:
    """The same for a run beside one that goes on, if there was one beside its former that can: else it begins anew."""
    if not (origin := out.read_origin()):
        return
    former = RunFolder(origin["run"]).reference(name)
    if not former.is_finished or not all(run.state.exists() for run in former.repeats()):
        return
    begun = former.read_summary()
    same = {**experiment.table, "rounds": begun.rounds} == config.of_run(former.config).table
    if begun.rounds == origin["rounds"] and same:
        link(former, folder)


def read_former(out: RunFolder, seed: int) -> Summary | None:
    """The summary of the run with this seed from which a run goes on; its inputs stay scaled as they were there."""
    former = former_of(out, seed)
    return None if former is None else former.read_summary()
