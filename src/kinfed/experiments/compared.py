"""Compared: what a finished run's method compared to choose whom each client hears, from what the run has left."""

from dataclasses import replace
from typing import Any

from ..core.method import Compared
from ..core.probe import Probe
from ..core.sharing import divide
from ..errors import UsageError
from . import own_parts
from .left import Former
from .run_folder import RunFolder
from .saved import Saved


def compared(folder: RunFolder) -> tuple[Compared, int] | None:
    """What was compared after the last round, and that round; None if the run kept nothing of it.

    No code of a user's own is loaded for it: of a run with such parts nothing is known. Its folder must be that of one
    seed.
    """
    if not (folder.state.exists() and folder.models.exists() and folder.is_begun):
        return None
    try:
        former = Former(folder)
        if _has_own_code(folder) or former.names != former.summary.client_names:
            return None
        saved = Saved.open(folder.path)
        experiment, method, model, summary = saved.experiment, saved.method, saved.model, saved.summary
        assert experiment is not None
        assert method is not None
        roster = former.roster(model.layout, experiment.training, summary.seed)
        model.theta = roster.theta.to(model.theta.dtype)
        method, model = divide(method, model)
        probe = Probe(model, tuple(summary.shape or ()), saved.task, summary.seed)
        roster = replace(roster, layout=model.layout, probe=probe)
        found = method.compared(roster, former.server(method.start(replace(roster, round=0))))
    except UsageError:  # of another version, or with parts that are gone: nothing else of the run is lost
        return None
    return None if found is None else (found, former.done)


def _has_own_code(folder: RunFolder) -> bool:
    """Whether its config names files of a user's own."""

    def names(table: dict[str, Any]) -> bool:
        return any(names(one) if isinstance(one, dict) else own_parts.is_path(one) for one in table.values())

    return names(folder.read_config())
