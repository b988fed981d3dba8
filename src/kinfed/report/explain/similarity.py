"""Compared: what a finished run's method compared to weigh the clients against each other, from what the run left."""

from typing import Any

from ...core.method import Compared
from ...core.mixins import Explains
from ...core.sharing import undivided
from ...errors import log_failure
from ...runs.config import plugins
from ...runs.final_server import FinalServer
from ...runs.run import Run
from ...runs.run_folder import RunFolder


def compared(folder: RunFolder) -> tuple[Compared, int] | str:
    """What was compared after the last round, and that round; or in a clause how weights come about instead.

    No code of a user's own is loaded for it: of a run with such parts nothing is known, and the clause is empty, as it
    is of one that has kept nothing. Its folder must be that of one seed.
    """
    if not (folder.state.exists() and folder.models.exists() and folder.is_begun):
        return ""
    try:
        if _has_own_code(folder):
            return ""
        saved = Run.open(folder.path)
        run = FinalServer(saved, saved.task)
        found = run.compared()
    except Exception as problem:  # of another version, or with parts that are gone: nothing else of the run is lost
        log_failure(problem)
        return ""
    return Explains.of(undivided(run.method)).weighs if found is None else (found, run.state.done)


def _has_own_code(folder: RunFolder) -> bool:
    """Whether its config names files of a user's own."""

    def names(table: dict[str, Any]) -> bool:
        return any(names(one) if isinstance(one, dict) else plugins.is_path(one) for one in table.values())

    return names(folder.read_config())
