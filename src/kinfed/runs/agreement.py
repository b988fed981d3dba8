"""Agreement: the models that a run hands out, or writes to a folder, must be those that were scored."""

import torch
from torch import Tensor, nn

from ..core import trees
from ..core.copies import duplicate
from ..core.trial import differ
from ..errors import RunError, UsageError
from ..simulation.distributed import Distributed
from ..simulation.simulation import Simulation
from .models_file import UNREADABLE, ModelsFile
from .run_folder import RunFolder
from .trained_run import TrainedRun

CLIENTS, EXAMPLES = 64, 2  # the most whose models are asked, and the test examples of each


def check_agreement(run: TrainedRun, fleet: Simulation | Distributed) -> TrainedRun:
    """The run, if clients' plain modules answer their own test examples as the models that were scored; else RunError.

    With more than CLIENTS clients every so many of them are asked.
    """
    (models, shared), names = run.history.kept, run.federation.names
    if not models:  # they are elsewhere
        return run
    ids = fleet.own_ids[:: -(-len(fleet.own_ids) // CLIENTS)]
    personal = {name: values[ids.to(values.device)] for name, values in models.items() if name not in shared}
    common = {name: t for name in shared if isinstance(t := models[name], Tensor)}
    x, answers = fleet.answers(ids, personal, common, EXAMPLES)
    with torch.no_grad():
        for i, examples, scored in zip(ids.tolist(), x.cpu(), answers.cpu(), strict=True):
            module = run.model(position=i)
            kept = module(examples.clone())
            if differ(kept, scored) and not _is_rounding(module, examples, kept, scored):
                gap = float((kept - scored).abs().max()) if kept.shape == scored.shape else float("inf")
                raise RunError(
                    f"the model of client '{names[i]}' is not kept, as it would not be the one that was scored: as a "
                    f"plain module its outputs for the same test examples are off by up to {gap:.2g}; its forward pass "
                    "uses something other than its parameters and buffers, or export of the method is not its predict"
                )
    return run


def check_written(run: TrainedRun, folder: RunFolder) -> None:
    """Raise RunError, and remove the file, unless the models that were written are the run's."""
    file = ModelsFile(folder.models)
    models, names = run.history.models, run.federation.names
    for i in range(0, len(names), -(-len(names) // CLIENTS)):
        try:
            read = trees.pack(file.read_personal(names[i], run.architecture))
            same = read.keys() == models.keys() and all(torch.equal(models[name][i].cpu(), read[name]) for name in read)
        except (UsageError, *UNREADABLE):
            same = False
        if not same:
            folder.models.unlink()
            raise RunError(
                f"the models are not kept in {folder}, as that of client '{names[i]}' is not read from its file as it "
                "was written; write the run to another folder, by kinfed.save"
            )


def _is_rounding(module: nn.Module, x: Tensor, kept: Tensor, scored: Tensor) -> bool:
    """Whether rounding explains that two outputs differ: as it is off by as much from double precision."""
    try:
        exact = duplicate(module).double()(x.double())
    except Exception:  # not every module works in double precision
        return False
    return kept.shape == scored.shape and bool((kept - scored).abs().max() <= 10 * (kept - exact).abs().max())
