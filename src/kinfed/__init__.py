"""kinfed: graph-guided personalised federated learning."""

from typing import TYPE_CHECKING

from .core.registry import lazy_attributes

if TYPE_CHECKING:
    from . import methods as methods, models as models, relations as relations
    from .core.engine import Participation as Participation, Rounds as Rounds
    from .core.graph import Graph as Graph
    from .core.history import History as History
    from .core.method import Method as Method, Params as Params, Roster as Roster
    from .core.model import Model as Model
    from .core.optimiser import SGD as SGD, Adam as Adam, Optimiser as Optimiser
    from .core.private.privacy import Privacy as Privacy
    from .core.summary import Summary as Summary
    from .core.tasks import (
        Classification as Classification,
        Counts as Counts,
        Forecasting as Forecasting,
        Quantiles as Quantiles,
        Regression as Regression,
        Task as Task,
    )
    from .core.training import Training as Training
    from .data import datasets as datasets, graphs as graphs, partitions as partitions
    from .data.dataset import Dataset as Dataset, Partition as Partition, Parts as Parts
    from .data.federation import Federation as Federation
    from .data.split import Split as Split
    from .data.tables.table_reader import from_csv as from_csv, from_frame as from_frame, from_sql as from_sql
    from .errors import DataError as DataError, RunError as RunError, UsageError as UsageError
    from .methods.fedavg import FedAvg as FedAvg
    from .methods.hedge import Hedge as Hedge
    from .methods.kin import Kin as Kin
    from .methods.local import Local as Local
    from .methods.mixture import Mixture as Mixture
    from .report.explain.reasons import explain as explain
    from .report.explain.relation_difference import diff as diff
    from .runs.estimators import Classifier as Classifier, Regressor as Regressor
    from .runs.fit import fit as fit
    from .runs.openers import load_model as load_model
    from .runs.results import save as save
    from .runs.run import Run as Run
    from .search.choose import Choice as Choice, choose as choose
    from .simulation import attacks as attacks
    from .simulation.attacks.attack import Attack as Attack
    from .simulation.execution import Execution as Execution
    from .verdict.verdict import Verdict as Verdict

__version__ = "0.1.0"

_PLACES = {  # each public name, by its module
    "core.training": ("Training",),
    "core.engine": ("Participation", "Rounds"),
    "core.graph": ("Graph",),
    "core.history": ("History",),
    "core.method": ("Method", "Params", "Roster"),
    "core.model": ("Model",),
    "core.optimiser": ("Adam", "Optimiser", "SGD"),
    "core.private.privacy": ("Privacy",),
    "core.summary": ("Summary",),
    "core.tasks": ("Classification", "Counts", "Forecasting", "Quantiles", "Regression", "Task"),
    "data.dataset": ("Dataset", "Partition", "Parts"),
    "data.federation": ("Federation",),
    "data.split": ("Split",),
    "data.tables.table_reader": ("from_csv", "from_frame", "from_sql"),
    "errors": ("DataError", "RunError", "UsageError"),
    "methods.fedavg": ("FedAvg",),
    "methods.hedge": ("Hedge",),
    "methods.kin": ("Kin",),
    "methods.local": ("Local",),
    "methods.mixture": ("Mixture",),
    "report.explain.reasons": ("explain",),
    "report.explain.relation_difference": ("diff",),
    "runs.estimators": ("Classifier", "Regressor"),
    "runs.fit": ("fit",),
    "runs.openers": ("load_model",),
    "runs.results": ("save",),
    "runs.run": ("Run",),
    "search.choose": ("Choice", "choose"),
    "simulation.attacks.attack": ("Attack",),
    "simulation.execution": ("Execution",),
    "verdict.verdict": ("Verdict",),
}
_REGISTRIES = {  # and packages of parts that have names, such as kinfed.methods.FedRep
    "attacks": "kinfed.simulation.attacks",
    "datasets": "kinfed.data.datasets",
    "graphs": "kinfed.data.graphs",
    "methods": "kinfed.methods",
    "models": "kinfed.models",
    "partitions": "kinfed.data.partitions",
    "relations": "kinfed.relations",
}
_MODULES = {name: f"kinfed.{module}:{name}" for module, names in _PLACES.items() for name in names}

__all__ = sorted([*_MODULES, *_REGISTRIES])
__dir__ = __all__.copy
__getattr__ = lazy_attributes(__name__, _MODULES | _REGISTRIES)  # so that PyTorch is not imported, which takes a second
