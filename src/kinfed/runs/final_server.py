"""FinalServer: the server of a finished run as it was after the last round, to ask it something."""

from dataclasses import replace

from ..core.method import Compared
from ..core.mixins import Explains
from ..core.sharing import divide
from ..core.tasks import Task
from ..errors import UsageError
from .final_state import StateFile
from .run import OpenedRun


class FinalServer:
    """A finished run's method, model, roster and server, from the state that its folder keeps."""

    def __init__(self, saved: OpenedRun, task: Task) -> None:
        """Raises UsageError if the run kept no state, or has no config."""
        experiment, method = saved.experiment, saved.method
        if experiment is None or method is None:
            raise UsageError(f"{saved.folder} has no config.toml, as kinfed.save writes none, so it cannot be reopened")
        self.saved, self.task, self.experiment = saved, task, experiment
        self.state = StateFile(saved.folder)
        if self.state.every_name != saved.names:
            raise saved.folder.of_another(saved.folder.state)
        model = saved.architecture
        roster = self.state.roster(model.layout, experiment.training, saved.summary.seed)
        model.theta = roster.theta.to(model.theta.dtype)
        self.method, self.model = divide(method, model)
        self.roster = replace(roster, layout=self.model.layout, task=task)
        self.server = self.state.server(self.method.start(replace(self.roster, round=0)))

    def compared(self) -> Compared | None:
        """What the method compared after the last round; None if nothing of it is kept, or clients never joined."""
        return (
            Explains.of(self.method).similarity(self.roster, self.server)
            if self.state.names == self.saved.names
            else None
        )
