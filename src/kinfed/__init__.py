"""kinfed: graph-guided personalised federated learning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.client import Client, Training, towards
    from .core.engine import Participation
    from .core.graph import Graph
    from .core.method import Method, Params, Roster, SharedParams
    from .core.optimiser import SGD, Adam
    from .core.trees import ModelOf, Pairwise, PerClient, Shared
    from .data.federation import Federation
    from .data.split import Split
    from .data.tables import from_csv, from_parquet
    from .errors import RunError, UsageError
    from .experiments.fit import fit
    from .experiments.run import Run
    from .experiments.run_folder import load_model, save
    from .methods import METHODS
    from .methods.bases import Averaging, GraphMethod

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "SGD",
    "Adam",
    "Averaging",
    "Client",
    "Federation",
    "Graph",
    "GraphMethod",
    "Method",
    "ModelOf",
    "Pairwise",
    "Params",
    "Participation",
    "PerClient",
    "Roster",
    "Run",
    "RunError",
    "Shared",
    "SharedParams",
    "Split",
    "Training",
    "UsageError",
    "fit",
    "from_csv",
    "from_parquet",
    "load_model",
    "save",
    "towards",
]

_MODULES = (
    "core.client",
    "core.engine",
    "core.graph",
    "core.method",
    "core.optimiser",
    "core.trees",
    "data.federation",
    "data.split",
    "data.tables",
    "errors",
    "experiments.fit",
    "experiments.run",
    "experiments.run_folder",
    "methods",
    "methods.bases",
)


def __getattr__(name: str) -> Any:
    """What `__all__` lists, when it is first asked for: until then PyTorch is not imported, which takes a second."""
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f".{module}", __name__))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
