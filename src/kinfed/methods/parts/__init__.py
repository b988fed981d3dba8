"""Parts that methods are built from; `kinfed.methods` has those that a method of yours is made of."""

from typing import TYPE_CHECKING

from ...core.registry import lazy_attributes

if TYPE_CHECKING:
    from ...core.client import Client as Client, Quadratic as Quadratic, towards as towards
    from ...core.field_checks import (
        Count as Count,
        CountOrZero as CountOrZero,
        In as In,
        NonNegative as NonNegative,
        Positive as Positive,
        Settings as Settings,
        Share as Share,
    )
    from ...core.method import AveragedParams as AveragedParams, SharedParams as SharedParams
    from ...core.mixins import (
        Admits as Admits,
        Advises as Advises,
        Averages as Averages,
        Explains as Explains,
        Extends as Extends,
        Predicts as Predicts,
    )
    from ...core.optimiser import OptState as OptState
    from ...core.rows import put as put, take as take, weighted_mean as weighted_mean
    from ...core.trees import (
        Averaged as Averaged,
        ClusterSizes as ClusterSizes,
        Like as Like,
        ModelOf as ModelOf,
        Pairwise as Pairwise,
        PerClient as PerClient,
        Shared as Shared,
        Summed as Summed,
    )
    from ...ops.mixing import mix as mix
    from ..bases import Averaging as Averaging
    from .graph_mixing import GraphMethod as GraphMethod, RelationMixing as RelationMixing

PARTS = {  # beside kinfed.Method, Params and Roster: by the module
    "core.client": ("Client", "Quadratic", "towards"),
    "core.method": ("AveragedParams", "SharedParams"),
    "core.mixins": ("Admits", "Advises", "Averages", "Explains", "Extends", "Predicts"),
    "core.optimiser": ("OptState",),
    "core.rows": ("put", "take", "weighted_mean"),
    "core.field_checks": ("Count", "CountOrZero", "In", "NonNegative", "Positive", "Settings", "Share"),
    "core.trees": ("Averaged", "ClusterSizes", "Like", "ModelOf", "Pairwise", "PerClient", "Shared", "Summed"),
    "methods.bases": ("Averaging",),
    "methods.parts.graph_mixing": ("GraphMethod", "RelationMixing"),
    "ops.mixing": ("mix",),
}
PLACES = {name: f"kinfed.{module}:{name}" for module, names in PARTS.items() for name in names}

__getattr__ = lazy_attributes(__name__, PLACES)
