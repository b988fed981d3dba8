"""kinfed: graph-guided personalised federated learning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attacks import ATTACKS as ATTACKS
    from .attacks.attack import Attack as Attack
    from .attacks.backdoor import Backdoor as Backdoor
    from .attacks.label_flip import LabelFlip as LabelFlip
    from .attacks.noise import Noise as Noise
    from .attacks.poison import Poison as Poison
    from .core.client import Client as Client
    from .core.client import Quadratic as Quadratic
    from .core.client import Training as Training
    from .core.client import towards as towards
    from .core.engine import Participation as Participation
    from .core.engine import Rounds as Rounds
    from .core.graph import Graph as Graph
    from .core.history import History as History
    from .core.method import Method as Method
    from .core.method import Params as Params
    from .core.method import Roster as Roster
    from .core.method import SharedParams as SharedParams
    from .core.model import Model as Model
    from .core.optimiser import SGD as SGD
    from .core.optimiser import Adam as Adam
    from .core.optimiser import Optimiser as Optimiser
    from .core.optimiser import OptState as OptState
    from .core.settings import Count as Count
    from .core.settings import CountOrZero as CountOrZero
    from .core.settings import In as In
    from .core.settings import NonNegative as NonNegative
    from .core.settings import Positive as Positive
    from .core.settings import Settings as Settings
    from .core.settings import Share as Share
    from .core.summary import Summary as Summary
    from .core.tables import put as put
    from .core.tables import take as take
    from .core.tasks import TASKS as TASKS
    from .core.tasks import Classification as Classification
    from .core.tasks import Counts as Counts
    from .core.tasks import Forecasting as Forecasting
    from .core.tasks import Quantiles as Quantiles
    from .core.tasks import Regression as Regression
    from .core.tasks import Task as Task
    from .core.trees import Like as Like
    from .core.trees import ModelOf as ModelOf
    from .core.trees import Pairwise as Pairwise
    from .core.trees import PerClient as PerClient
    from .core.trees import Shared as Shared
    from .data.dataset import Dataset as Dataset
    from .data.dataset import Partition as Partition
    from .data.dataset import Parts as Parts
    from .data.federation import Federation as Federation
    from .data.split import Split as Split
    from .data.tables import from_csv as from_csv
    from .data.tables import from_frame as from_frame
    from .data.tables import from_parquet as from_parquet
    from .data.tables import from_sql as from_sql
    from .datasets import DATASETS as DATASETS
    from .errors import DataError as DataError
    from .errors import RunError as RunError
    from .errors import UsageError as UsageError
    from .experiments.choose import Choice as Choice
    from .experiments.choose import choose as choose
    from .experiments.fit import fit as fit
    from .experiments.results import save as save
    from .experiments.run import Run as Run
    from .experiments.saved import Saved as Saved
    from .experiments.saved import load_run as load_run
    from .flower.site_predictor import load_model as load_model
    from .graphs import GRAPHS as GRAPHS
    from .methods import METHODS as METHODS
    from .methods.bases import Averaging as Averaging
    from .methods.bases import GraphMethod as GraphMethod
    from .methods.cfl import CFL as CFL
    from .methods.ditto import Ditto as Ditto
    from .methods.dpfl import DPFL as DPFL
    from .methods.fedaghn import FedAGHN as FedAGHN
    from .methods.fedah import FedAH as FedAH
    from .methods.fedala import FedALA as FedALA
    from .methods.fedamp import FedAMP as FedAMP
    from .methods.fedatt import FedAtt as FedAtt
    from .methods.fedavg import FedAvg as FedAvg
    from .methods.fedavg_ft import FedAvgFT as FedAvgFT
    from .methods.fedcedar import FedCedar as FedCedar
    from .methods.fedcp import FedCP as FedCP
    from .methods.fedfomo import FedFomo as FedFomo
    from .methods.fedpac import FedPAC as FedPAC
    from .methods.fedper import FedPer as FedPer
    from .methods.fedprox import FedProx as FedProx
    from .methods.fedprox_ft import FedProxFT as FedProxFT
    from .methods.fedrep import FedRep as FedRep
    from .methods.fedrod import FedRoD as FedRoD
    from .methods.fedsem import FedSem as FedSem
    from .methods.hedge import Hedge as Hedge
    from .methods.heurfedamp import HeurFedAMP as HeurFedAMP
    from .methods.ifca import IFCA as IFCA
    from .methods.kin import Kin as Kin
    from .methods.knn_per import KNNPer as KNNPer
    from .methods.lg_fedavg import LGFedAvg as LGFedAvg
    from .methods.local import Local as Local
    from .methods.panacea import Panacea as Panacea
    from .methods.per_fedavg import PerFedAvg as PerFedAvg
    from .methods.pfedbayes import PFedBayes as PFedBayes
    from .methods.pfedgat import PFedGAT as PFedGAT
    from .methods.pfedgraph import PFedGraph as PFedGraph
    from .methods.pfedhn import PFedHN as PFedHN
    from .methods.pfedla import PFedLA as PFedLA
    from .methods.pfedme import PFedMe as PFedMe
    from .methods.scaffold import Scaffold as Scaffold
    from .methods.sfl import SFL as SFL
    from .metrics.verdict import Verdict as Verdict
    from .models import MODELS as MODELS
    from .ops.mixing import mix as mix
    from .ops.mixing import weighted_mean as weighted_mean
    from .partitions import PARTITIONS as PARTITIONS
    from .partitions.dirichlet import Dirichlet as Dirichlet
    from .partitions.iid import IID as IID
    from .partitions.label_groups import LabelGroups as LabelGroups
    from .partitions.label_permutations import LabelPermutations as LabelPermutations
    from .partitions.natural import Natural as Natural
    from .partitions.pathological import Pathological as Pathological
    from .partitions.rotations import Rotations as Rotations
    from .partitions.shards import Shards as Shards
    from .partitions.topologies import Topologies as Topologies
    from .report.difference import Difference as Difference
    from .report.difference import diff as diff
    from .report.reasons import Reasons as Reasons
    from .report.reasons import explain as explain
    from .simulation.execution import Execution as Execution

__version__ = "0.1.0"

_PLACES = {  # each public name, by its module
    "attacks": ("ATTACKS",),
    "attacks.attack": ("Attack",),
    "attacks.backdoor": ("Backdoor",),
    "attacks.label_flip": ("LabelFlip",),
    "attacks.noise": ("Noise",),
    "attacks.poison": ("Poison",),
    "core.client": ("Client", "Quadratic", "Training", "towards"),
    "core.engine": ("Participation", "Rounds"),
    "core.graph": ("Graph",),
    "core.history": ("History",),
    "core.method": ("Method", "Params", "Roster", "SharedParams"),
    "core.model": ("Model",),
    "core.optimiser": ("Adam", "Optimiser", "OptState", "SGD"),
    "core.settings": ("Count", "CountOrZero", "In", "NonNegative", "Positive", "Settings", "Share"),
    "core.summary": ("Summary",),
    "core.tables": ("put", "take"),
    "core.tasks": ("Classification", "Counts", "Forecasting", "Quantiles", "Regression", "Task", "TASKS"),
    "core.trees": ("Like", "ModelOf", "Pairwise", "PerClient", "Shared"),
    "data.dataset": ("Dataset", "Partition", "Parts"),
    "data.federation": ("Federation",),
    "data.split": ("Split",),
    "data.tables": ("from_csv", "from_frame", "from_parquet", "from_sql"),
    "datasets": ("DATASETS",),
    "errors": ("DataError", "RunError", "UsageError"),
    "experiments.choose": ("Choice", "choose"),
    "experiments.fit": ("fit",),
    "experiments.results": ("save",),
    "experiments.run": ("Run",),
    "experiments.saved": ("Saved", "load_run"),
    "flower.site_predictor": ("load_model",),
    "graphs": ("GRAPHS",),
    "methods": ("METHODS",),
    "methods.bases": ("Averaging", "GraphMethod"),
    "methods.cfl": ("CFL",),
    "methods.ditto": ("Ditto",),
    "methods.dpfl": ("DPFL",),
    "methods.fedaghn": ("FedAGHN",),
    "methods.fedah": ("FedAH",),
    "methods.fedala": ("FedALA",),
    "methods.fedamp": ("FedAMP",),
    "methods.fedatt": ("FedAtt",),
    "methods.fedavg": ("FedAvg",),
    "methods.fedavg_ft": ("FedAvgFT",),
    "methods.fedcedar": ("FedCedar",),
    "methods.fedcp": ("FedCP",),
    "methods.fedfomo": ("FedFomo",),
    "methods.fedpac": ("FedPAC",),
    "methods.fedper": ("FedPer",),
    "methods.fedprox": ("FedProx",),
    "methods.fedprox_ft": ("FedProxFT",),
    "methods.fedrep": ("FedRep",),
    "methods.fedrod": ("FedRoD",),
    "methods.fedsem": ("FedSem",),
    "methods.ifca": ("IFCA",),
    "methods.hedge": ("Hedge",),
    "methods.heurfedamp": ("HeurFedAMP",),
    "methods.kin": ("Kin",),
    "methods.knn_per": ("KNNPer",),
    "methods.lg_fedavg": ("LGFedAvg",),
    "methods.local": ("Local",),
    "methods.panacea": ("Panacea",),
    "methods.per_fedavg": ("PerFedAvg",),
    "methods.pfedbayes": ("PFedBayes",),
    "methods.pfedgat": ("PFedGAT",),
    "methods.pfedgraph": ("PFedGraph",),
    "methods.pfedhn": ("PFedHN",),
    "methods.pfedla": ("PFedLA",),
    "methods.pfedme": ("PFedMe",),
    "methods.scaffold": ("Scaffold",),
    "methods.sfl": ("SFL",),
    "metrics.verdict": ("Verdict",),
    "models": ("MODELS",),
    "ops.mixing": ("mix", "weighted_mean"),
    "partitions": ("PARTITIONS",),
    "partitions.dirichlet": ("Dirichlet",),
    "partitions.iid": ("IID",),
    "partitions.label_groups": ("LabelGroups",),
    "partitions.label_permutations": ("LabelPermutations",),
    "partitions.natural": ("Natural",),
    "partitions.pathological": ("Pathological",),
    "partitions.rotations": ("Rotations",),
    "partitions.shards": ("Shards",),
    "partitions.topologies": ("Topologies",),
    "report.difference": ("Difference", "diff"),
    "report.reasons": ("Reasons", "explain"),
    "simulation.execution": ("Execution",),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """A public name, when it is first asked for: until then PyTorch is not imported, which takes a second."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
