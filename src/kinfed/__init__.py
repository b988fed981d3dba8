"""kinfed: graph-guided personalised federated learning."""

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
