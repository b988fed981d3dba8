"""The methods, by the name that a config or the command line uses."""

from ..core.method import Method
from .cfl import CFL
from .fedaghn import FedAGHN
from .fedamp import FedAMP
from .fedavg import FedAvg
from .fedavg_ft import FedAvgFT
from .fedcedar import FedCedar
from .fedprox import FedProx
from .fedrep import FedRep
from .local import Local
from .panacea import Panacea
from .per_fedavg import PerFedAvg
from .pfedgat import PFedGAT
from .pfedhn import PFedHN
from .scaffold import Scaffold
from .sfl import SFL

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedrep": FedRep,
    "per-fedavg": PerFedAvg,
    "pfedhn": PFedHN,
    "panacea": Panacea,
    "cfl": CFL,
    "sfl": SFL,
    "fedcedar": FedCedar,
    "fedamp": FedAMP,
    "fedaghn": FedAGHN,
    "pfedgat": PFedGAT,
}

__all__ = ["METHODS", *sorted(cls.__name__ for cls in METHODS.values())]
