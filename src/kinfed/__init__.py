"""kinfed: graph-guided personalised federated learning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from .core.mixins import Admits as Admits
    from .core.mixins import Advises as Advises
    from .core.mixins import Explains as Explains
    from .core.mixins import Extends as Extends
    from .core.mixins import Predicts as Predicts
    from .core.model import Model as Model
    from .core.optimiser import SGD as SGD
    from .core.optimiser import Adam as Adam
    from .core.optimiser import Optimiser as Optimiser
    from .core.optimiser import OptState as OptState
    from .core.rows import put as put
    from .core.rows import take as take
    from .core.settings import Count as Count
    from .core.settings import CountOrZero as CountOrZero
    from .core.settings import In as In
    from .core.settings import NonNegative as NonNegative
    from .core.settings import Positive as Positive
    from .core.settings import Settings as Settings
    from .core.settings import Share as Share
    from .core.summary import Summary as Summary
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
    from .data.datasets import DATASETS as DATASETS
    from .data.federation import Federation as Federation
    from .data.graphs import GRAPHS as GRAPHS
    from .data.partitions import PARTITIONS as PARTITIONS
    from .data.partitions.dirichlet import Dirichlet as Dirichlet
    from .data.partitions.iid import IID as IID
    from .data.partitions.label_groups import LabelGroups as LabelGroups
    from .data.partitions.label_permutations import LabelPermutations as LabelPermutations
    from .data.partitions.natural import Natural as Natural
    from .data.partitions.pathological import Pathological as Pathological
    from .data.partitions.rotations import Rotations as Rotations
    from .data.partitions.shards import Shards as Shards
    from .data.partitions.topologies import Topologies as Topologies
    from .data.split import Split as Split
    from .data.tables.table_reader import from_csv as from_csv
    from .data.tables.table_reader import from_frame as from_frame
    from .data.tables.table_reader import from_parquet as from_parquet
    from .data.tables.table_reader import from_sql as from_sql
    from .errors import DataError as DataError
    from .errors import RunError as RunError
    from .errors import UsageError as UsageError
    from .flower.site.site_predictor import load_model as load_model
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
    from .models import MODELS as MODELS
    from .ops.mixing import mix as mix
    from .ops.mixing import weighted_mean as weighted_mean
    from .report.explain.reasons import Reasons as Reasons
    from .report.explain.reasons import explain as explain
    from .report.explain.relation_difference import Difference as Difference
    from .report.explain.relation_difference import diff as diff
    from .runs.estimators import Classifier as Classifier
    from .runs.estimators import Regressor as Regressor
    from .runs.fit import fit as fit
    from .runs.results import save as save
    from .runs.run import Run as Run
    from .search.choose import Choice as Choice
    from .search.choose import choose as choose
    from .simulation.attacks import ATTACKS as ATTACKS
    from .simulation.attacks.attack import Attack as Attack
    from .simulation.attacks.backdoor import Backdoor as Backdoor
    from .simulation.attacks.label_flip import LabelFlip as LabelFlip
    from .simulation.attacks.noise import Noise as Noise
    from .simulation.attacks.poison import Poison as Poison
    from .simulation.execution import Execution as Execution
    from .verdict.verdict import Verdict as Verdict

__version__ = "0.1.0"

_PLACES = {  # each public name, by its module
    "simulation.attacks": ("ATTACKS",),
    "simulation.attacks.attack": ("Attack",),
    "simulation.attacks.backdoor": ("Backdoor",),
    "simulation.attacks.label_flip": ("LabelFlip",),
    "simulation.attacks.noise": ("Noise",),
    "simulation.attacks.poison": ("Poison",),
    "core.client": ("Client", "Quadratic", "Training", "towards"),
    "core.engine": ("Participation", "Rounds"),
    "core.graph": ("Graph",),
    "core.history": ("History",),
    "core.method": ("Method", "Params", "Roster", "SharedParams"),
    "core.mixins": ("Admits", "Advises", "Explains", "Extends", "Predicts"),
    "core.model": ("Model",),
    "core.optimiser": ("Adam", "Optimiser", "OptState", "SGD"),
    "core.settings": ("Count", "CountOrZero", "In", "NonNegative", "Positive", "Settings", "Share"),
    "core.summary": ("Summary",),
    "core.rows": ("put", "take"),
    "core.tasks": ("Classification", "Counts", "Forecasting", "Quantiles", "Regression", "Task", "TASKS"),
    "core.trees": ("Like", "ModelOf", "Pairwise", "PerClient", "Shared"),
    "data.dataset": ("Dataset", "Partition", "Parts"),
    "data.federation": ("Federation",),
    "data.split": ("Split",),
    "data.tables.table_reader": ("from_csv", "from_frame", "from_parquet", "from_sql"),
    "data.datasets": ("DATASETS",),
    "errors": ("DataError", "RunError", "UsageError"),
    "search.choose": ("Choice", "choose"),
    "runs.estimators": ("Classifier", "Regressor"),
    "runs.fit": ("fit",),
    "runs.results": ("save",),
    "runs.run": ("Run",),
    "flower.site.site_predictor": ("load_model",),
    "data.graphs": ("GRAPHS",),
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
    "verdict.verdict": ("Verdict",),
    "models": ("MODELS",),
    "ops.mixing": ("mix", "weighted_mean"),
    "data.partitions": ("PARTITIONS",),
    "data.partitions.dirichlet": ("Dirichlet",),
    "data.partitions.iid": ("IID",),
    "data.partitions.label_groups": ("LabelGroups",),
    "data.partitions.label_permutations": ("LabelPermutations",),
    "data.partitions.natural": ("Natural",),
    "data.partitions.pathological": ("Pathological",),
    "data.partitions.rotations": ("Rotations",),
    "data.partitions.shards": ("Shards",),
    "data.partitions.topologies": ("Topologies",),
    "report.explain.relation_difference": ("Difference", "diff"),
    "report.explain.reasons": ("Reasons", "explain"),
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
