"""What a few methods have beside the hooks of `Method`: each class here is a base to add where it is needed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import UsageError
from .client import Client
from .copies import check_tensors, duplicate
from .graph import Origin
from .layout import head_of
from .method import Around, Compared, Method, Roster
from .model import Model
from .rows import weighted_mean
from .seeding import generator
from .trees import Reduction, Tree, read_reductions, replace_rows


class Mixin:
    """A base whose attributes hold for every method that does not derive from it, too."""

    @classmethod
    def from_method(cls, method: object) -> Self:
        """The method itself if it derives from this class, else that of the method that it is around, or defaults."""
        if isinstance(method, cls):
            return method
        return cls.from_method(method.method) if isinstance(method, Around) else cls()


class Explains(Mixin):
    """A method that says where its relation comes from, and what it compares to weigh clients."""

    origin: ClassVar[Origin] = "fixed"  # of the relation it reports: given, fixed, learned or oracle
    mixes: ClassVar[str] = ""  # the table [N, d] of the server's state that `send` mixes by the relation, if it does
    weighs: ClassVar[str] = ""  # how weights come about, in a clause, where `similarity` has nothing
    belongs: ClassVar[str] = ""  # the field [C] of a private state by how much a client belongs to each of C models

    def origin_of(self, roster: Roster) -> Origin:
        """Where the relation comes from; a method that uses roster.graph takes that graph's origin into account."""
        return self.origin

    def similarity(self, roster: Roster, server: Tree) -> Compared | None:
        """What the next relation is made of, for those who ask why; None if nothing is kept: see `weighs`."""
        return None

    def own_weights(self, roster: Roster, server: Tree) -> Tensor | None:
        """[N, f] how much a client's own rows weigh in its coefficient of each input, in 0..1; others' have the rest.

        None of a method whose models are no coefficients that are drawn to those of others.
        """
        return None


class Lists(Mixin):
    """A method whose clients may each learn from a few others alone, which they list."""

    sparse: ClassVar[bool] = False  # whether its tables take memory only of clients that have taken part, with lists

    def keeps_lists(self, count: int) -> bool:
        """Whether what belongs to pairs of `count` clients is held as lists, also where it is reported."""
        return False

    def prospect(self, roster: Roster, server: Tree, ids: Tensor) -> Tree:
        """What clients ids: [k] would be sent now if everyone was asked."""
        raise NotImplementedError


class Averages(Mixin):
    """A method that says by how much each client counts in the mean of what is declared `Averaged`."""

    def weights(self, roster: Roster, cohort: Tensor) -> Tensor:
        """[K] weights of the cohort, with any positive sum: by default as many as their training examples."""
        return roster.weights[cohort]


class Advises(Mixin):
    """A method that says how to set it."""

    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # values that its paper tries, by setting: "cells.alpha", say

    @property
    def rates(self) -> tuple[str, ...]:
        """Its settings that local training uses in place of training.optimiser, if it ignores that."""
        return ()

    @property
    def remedy(self) -> str:
        """What to change when training diverges; a method whose own settings can cause that names them."""
        return "lower the learning rate"


class Solves(Mixin):
    """A method that works a model out from sums over rows.

    Where its rounds are steps of a solver, none is selected on validation, as the last is the answer. Training ends
    once the state is solved. A round that fits validation better by chance has learned less.
    """

    solves: ClassVar[bool] = False  # whether the method's rounds are such steps
    takes_gradients: ClassVar[bool] = True  # through the model; what is made of sums over rows takes none
    keeps_order: ClassVar[bool] = False  # whether answers rise and fall with a model's `monotone` inputs, if it has any
    batched: ClassVar[bool] = True  # whether clients may run together; where another library fits, they do one by one

    def is_solved(self, server: Tree) -> bool:
        """Whether another round would not change the models, so that the server's state is the answer."""
        return False


class Admits(Mixin):
    """A method that says what a newcomer to a finished federation gets."""

    refuses: ClassVar[str] = ""  # why a newcomer would be given nothing, if that is so

    def join(self: Any, roster: Roster, server: Tree, newcomers: Tensor, uploads: Tree) -> Tree:
        """The state of a finished federation's server once newcomers: [M] have sent uploads: [M, ...].

        `add_clients` has made room for them. Nothing else changes: the others' rows and all that is shared are frozen.
        By default newcomers get the rows that `aggregate` would give them; a method that compares them with others
        only where these take part as well overrides this.
        """
        return replace_rows(server, newcomers, self.aggregate(roster, server, newcomers, uploads))


class Extends(Mixin):
    """A method that adds layers to a user's module."""

    keeps: ClassVar[tuple[str, ...]] = ()  # patterns of tensors, of layers that it adds, which are personal in any case

    def extend(self, module: nn.Module, head: str | None) -> nn.Module:
        """The module with the layers that the method adds to it, such as a second head; by default none.

        The module is a copy, which may be changed and returned; `head` names its head, None if it has none. That layer
        stays the head wherever it is put; if it is put nowhere, the layer that has its name is. Random numbers drawn
        here are fixed by the run's seed.
        """
        return module


class Predicts(ABC):
    """A method whose models answer in another way than the user's module; saved models are those that were scored."""

    @abstractmethod
    def predict(self, client: Client, personal: Tree, x: Tensor) -> Tensor:
        """Outputs for x: [B, ...] by one of the models that `personalise` names."""

    @abstractmethod
    def export(self, model: Model, personal: Tree) -> nn.Module:
        """A plain module in evaluation mode with the outputs of `predict`.

        `personal` has the named fields of a model that `personalise` returns, whatever its type.
        """


def join(method: Method, roster: Roster, server: Tree, newcomers: Tensor, uploads: Tree) -> Tree:
    """The state of a finished federation's server once newcomers: [M] have sent uploads: [M, ...], see `Admits`."""
    if not isinstance(method, Admits):
        return Admits.join(method, roster, server, newcomers, uploads)
    return method.join(roster, server, newcomers, uploads)


def weigh(method: Method, roster: Roster, cohort: Tensor) -> Tensor:
    """[K] by how much each of the cohort counts in the mean of what it uploads, see `Averages`."""
    _check_base(method, Averages)  # here, as methods that upload no means may have weights of other kinds
    return Averages.from_method(method).weights(roster, cohort)


def reduce_uploads(method: Method, roster: Roster, cohort: Tensor, uploads: Tree) -> Tree:
    """What `method.aggregate` gets of the uploads of cohort: [K], whose tensors are [K, ...].

    Those that are declared `Averaged` or `Summed` lose that first axis, the others stay as they are.
    """
    kinds = read_reductions(uploads)
    if all(kind is Reduction.NONE for kind in tree_leaves(kinds)):
        return uploads
    weights = weigh(method, roster, cohort)

    def reduce(kind: Reduction, t: Tensor) -> Tensor:
        if kind is Reduction.NONE:
            return t
        return t.sum(0) if kind is Reduction.SUM else weighted_mean(t.flatten(1), weights).view(t.shape[1:])

    return tree_map(reduce, kinds, uploads)


def take_mean(method: Method, theta: Tensor) -> Tensor:
    """[d] the mean of uploads: [d]; raises UsageError if it is still the uploads, [K, d], as nothing declares them."""
    if theta.ndim == 1:
        return theta
    raise UsageError(
        f"{type(method).__name__} uses the mean of uploads alone, so its train must upload a NamedTuple that says so: "
        "kinfed.methods.AveragedParams(theta), or fields with the annotation kinfed.methods.Averaged"
    )


def predict(method: Method, client: Client, personal: Tree, x: Tensor) -> Tensor:
    """Outputs for x: [B, ...] by one of the models that `personalise` names."""
    return method.predict(client, personal, x) if isinstance(method, Predicts) else client.model(personal.theta, x)


def export(method: Method, model: Model, personal: Tree) -> nn.Module:
    """A plain module in evaluation mode with the outputs of `predict`."""
    return method.export(model, personal) if isinstance(method, Predicts) else model.export(personal.theta)


def exporter(method: Method) -> str:
    """The name of a method that extends or exports models in its own way, as their file says it; "" of any other."""
    return type(method).__name__ if isinstance(method, Extends | Predicts) else ""


def leak(method: Method) -> str:
    """Why scores on test examples overstate how good a method's models are; "" if they do not."""
    return "the method used test examples as feedback" if method.feedback == "test" else ""


def model_for(
    method: Method, module: nn.Module, head: str | None = None, dtype: torch.dtype | None = None, seed: int = 0
) -> Model:
    """The model that a method trains: the module with the layers that the method adds to it.

    `head` names the module's head (default: the last nn.Linear), which stays the head of the extended module.
    """
    _check_bases(method)
    check_tensors(module)
    if getattr(module, "monotone", None) is not None and not Solves.from_method(method).keeps_order:
        raise UsageError(
            f"{type(method).__name__} does not keep answers monotone; take personal-boosting or standard, or leave "
            "model.monotone out"
        )
    module = duplicate(module)
    name = head_of(module) if head is None else head
    layers = dict(module.named_modules())
    if (name is not None and name not in layers) or any(map(is_lazy, module.parameters())):
        return Model(module, name)  # which raises the error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "extend").initial_seed())
        extended = Extends.from_method(method).extend(module, name)
    if not isinstance(extended, nn.Module):
        raise UsageError(f"{type(method).__name__}.extend must return an nn.Module; got {extended!r:.80}")
    part = None if name is None else layers[name]
    paths = {id(layer): path for path, layer in extended.named_modules()}
    at = paths.get(id(part), name if name in paths.values() else None)
    return Model(extended, at, dtype)


def _check_bases(method: Method) -> None:
    """Raise UsageError if a method has what only counts in one that derives from a class above."""
    for base in (Explains, Advises, Solves, Admits, Extends, Predicts):
        _check_base(method, base)


def _check_base(method: object, base: type) -> None:
    hooks = [name for name in vars(base) if not name.startswith("_") and hasattr(method, name)]
    if hooks and not isinstance(method, base):
        name = type(method).__name__
        raise UsageError(
            f"{name} has '{hooks[0]}', which counts in a method that derives from kinfed.methods.{base.__name__} "
            f"only; add it to the bases of {name}, or choose another name"
        )
