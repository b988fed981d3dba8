"""Local and FedAvg beside a run: when they are trained, and the verdict that they and the standard models allow."""

from collections.abc import Mapping, Sequence

from ..data.federation import Federation
from ..errors import UsageError
from ..methods.fedavg import FedAvg
from ..methods.local import Local
from ..verdict.verdict import Verdict
from . import baselines
from .config import experiment as config, plugins
from .config.experiment import Experiment
from .run import Run, make_baseline
from .run_folder import RunFolder
from .tested_examples import Tested

BASES = ("local", "fedavg")  # what every method is compared with
CHEAP = 1e10  # the work below which they are trained unasked: seconds on two cores, up to a minute
SMALLEST = 5000  # parameters: a smaller model costs as much
RULE = "training examples x epochs x rounds x seeds x parameters, counted as 5,000 at least"


def work(experiment: Experiment, federation: Federation) -> float:
    """Examples times parameters that local training goes through, in all rounds, with all seeds."""
    training, sizes = experiment.training, federation.sizes
    examples = int(training.count_steps(sizes).sum()) * training.batch if training.steps else int(sizes.sum())
    passes = examples * (1 if training.steps else training.epochs) * experiment.rounds.count * experiment.seeds
    parameters = sum(p.numel() for p in experiment.module(federation, experiment.seed).parameters())
    return experiment.participation.share * passes * max(parameters, SMALLEST)


def plan(
    experiment: Experiment, federation: Federation, requested: str | Sequence[str] = "auto"
) -> tuple[dict[str, Experiment], str]:
    """What is trained beside an experiment: what is asked for or, with "auto", by a rule whose answer is a line."""
    if requested != "auto":
        return companions(experiment, requested), ""
    wanted, amount = companions(experiment), work(experiment, federation)
    if not wanted:
        return {}, ""
    names = " and ".join(wanted)
    if amount <= CHEAP:
        return wanted, f"{names} will be trained beside it, as that is cheap: {amount:.2g} <= {CHEAP:.0e} ({RULE})"
    option = f"--beside {','.join(wanted)}"
    return {}, f"{names} will be trained beside it only with {option}: {amount:.2g}, above {CHEAP:.0e} ({RULE})"


def companions(experiment: Experiment, names: Sequence[str] = BASES) -> dict[str, Experiment]:
    """The experiments to train beside one, by name: the same with another method. None beside learning alone.

    What is frozen stays frozen, as it says which model is trained. Baselines may rise and fall as they like.
    """
    if isinstance(experiment.method, Local):
        return {}
    wanted = [name for name in names if name == "local" or type(experiment.method) is not FedAvg]
    table = {key: value for key, value in experiment.table.items() if key != "code"}
    frozen = experiment.table["method"].get("frozen", [])
    table["model"] = {key: value for key, value in table["model"].items() if key != "monotone"}
    return {name: config.resolve({**table, "method": {"name": name, "frozen": frozen}}) for name in wanted}


def parse(text: str) -> str | tuple[str, ...]:
    """What --beside asks for: "auto", or the names; raises UsageError for anything else."""
    choices: dict[str, str | tuple[str, ...]] = {"auto": "auto", "none": (), "local": ("local",)}
    choices["local,fedavg"] = choices["fedavg,local"] = BASES
    if text not in choices:
        raise UsageError(f"--beside is local,fedavg, local, none or auto; got {text!r:.80}")
    return choices[text]


def folders(out: RunFolder) -> dict[str, RunFolder]:
    """The folders of the runs beside a run that have begun, by name."""
    both = {name: out.reference(name) for name in BASES}
    return {name: folder for name, folder in both.items() if folder.is_begun}


def judge_run(
    experiment: Experiment,
    mine: Mapping[int, Tested],
    standard: Mapping[int, Sequence[baselines.Baseline]],
    out: RunFolder,
) -> Verdict | None:
    """The verdict on a run over the baselines beside it, with the seeds that all of them have ended with.

    `mine` are the run's test scores by seed, `standard` the standard models. None if Local was not trained to the end
    with any of these.
    """
    others = {name: folder for name, folder in folders(out).items() if folder.is_finished}
    if "local" not in others:
        return None
    runs = []
    for name, folder in others.items():
        repeats = [Run(repeat) for repeat in folder.repeats()]
        runs.append({run.summary.seeds[0]: make_baseline(run, name == "fedavg") for run in repeats})
    common = set(mine).intersection(*runs)
    seeds = [seed for seed in mine if seed in common]
    if not seeds:
        return None
    summary = others["local"].read_summary()
    floor = baselines.floor(
        [[*(run[seed] for run in runs), *standard.get(seed, ())] for seed in seeds],
        summary.metric.higher_is_better,
        summary.selection.higher_is_better,
    )
    method = plugins.short_name(experiment.method_name)
    return baselines.verdict(method, summary.metric, [mine[seed] for seed in seeds], floor, saved=method)
