"""kinfed: graph-guided personalised federated learning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client, Training, towards
    from .engine import Participation
    from .errors import RunError, UsageError
    from .experiment import Run, fit
    from .federation import Federation, Graph, Split
    from .method import Averaging, GraphMethod, Method, Params, Roster
    from .methods import METHODS
    from .optimiser import SGD, Adam
    from .runs import load_model, save

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
    "Params",
    "Participation",
    "Roster",
    "Run",
    "RunError",
    "Split",
    "Training",
    "UsageError",
    "fit",
    "load_model",
    "save",
    "towards",
]

_MODULES = ("client", "engine", "errors", "experiment", "federation", "method", "methods", "optimiser", "runs")


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
