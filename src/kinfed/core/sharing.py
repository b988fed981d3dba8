"""Sharing: which part of a model travels, which stays with each client, and which never moves.

`personal`, `frozen` and `bn` are settings of every method. A method with such settings is wrapped in `Divided`; it sees
only the part that travels, d_s of the d numbers, as if that were the model, in its roster, messages, states and client.
That client puts the whole model together for every loss, gradient and training.

A client has one personal part, [d_p]. Each `descend` trains it together with the model that it is given, and continues
from where the one before left it, even if a method trains several models in a round. Frozen tensors are no part of
theta: the model itself has them, once for all clients. Buffers of integers and truth values are always personal.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..errors import UsageError
from . import trees
from .batches import Batch, Examples
from .client import Client, Objective, Quadratic
from .field_checks import validate
from .graph import Origin, Relation
from .layout import BASE, Layout
from .method import Around, Compared, Method, Params, Roster
from .mixins import (
    Admits,
    Averages,
    Explains,
    Extends,
    Lists,
    Predicts,
    export,
    join,
    predict,
    weigh,
)
from .model import Model
from .trees import Tree

Part = Literal["shared", "personal", "frozen"]
PARTS: tuple[Part, ...] = ("shared", "personal", "frozen")
SHOWN = 6  # names of tensors that a plan lists


@dataclass(frozen=True)
class Sharing:
    """Which tensors of a model are shared, personal to a client, or frozen."""

    layout: Layout  # of all that is not frozen
    personal: frozenset[str]  # names

    @staticmethod
    def from_method(method: Method, layout: Layout) -> "Sharing":
        """The sharing that a method's settings mean for a model; raises UsageError if the two do not fit."""
        validate(method)
        full, kept = layout.whole, layout.match(Extends.from_method(method).keeps)
        personal = kept | layout.match(pattern for pattern in method.personal if pattern != BASE)
        frozen = layout.match(pattern for pattern in method.frozen if pattern != BASE)
        if BASE in method.frozen:  # the model's: not what a method adds beside its head
            frozen |= layout.match((BASE,)) - kept
        if both := sorted(personal & frozen):
            if both[0] in kept:
                raise UsageError(_trained_by(method, both[0], frozen - kept))
            raise UsageError(
                f"'{both[0]}' cannot be both personal, which is trained, and frozen; take it out of "
                f"personal={list(method.personal)} or of frozen={list(method.frozen)}"
            )
        frozen |= layout.frozen | {e.name for e in full.entries if not (e.trainable or e.buffer)}
        if BASE in method.personal:
            personal |= layout.match((BASE,))
        personal |= {e.name for e in full.entries if e.buffer and (e.dtype or method.bn != "averaged")}
        if method.bn == "personal":
            personal |= layout.norms
        result = Sharing(layout.freeze(frozen), personal - frozen)
        if not result.shared_layout.layers:
            raise UsageError(
                "nothing is left to share: every trainable tensor is personal or frozen; name fewer, use a model with "
                "more layers, or let every client train alone with method 'local'"
            )
        return result

    @cached_property
    def shared_layout(self) -> Layout:
        """The layout of the part that travels."""
        return self.layout.part(self.layout.names - self.personal)

    @property
    def frozen(self) -> frozenset[str]:
        """The tensors that never change; parameters that need no gradient are among them."""
        return self.layout.frozen

    @property
    def layers(self) -> list[str]:
        """Names of the layers of which something travels: a relation may have a graph for each of these."""
        return [layer.name for layer in self.shared_layout.layers]

    @property
    def is_divided(self) -> bool:
        """Whether anything does not travel."""
        return bool(self.personal or self.frozen)

    @property
    def trains_personal(self) -> bool:
        """Whether any personal tensor is trained."""
        return not self.personal.isdisjoint(self.layout.trainable_names)

    def count(self, part: Part) -> tuple[int, int]:
        """How many tensors a part of the model has, and how many numbers."""
        sizes = [e.shape.numel() for e in self.layout.whole.entries if self._part(e.name) == part]
        return len(sizes), sum(sizes)

    @property
    def plan(self) -> str:
        """Which tensors travel, stay with the clients and never move, in a line."""
        lines = []
        for part in PARTS:
            names = [e.name for e in self.layout.whole.entries if self._part(e.name) == part]
            if names:
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                lines.append(f"{part} {', '.join(names[:SHOWN])}{more} ({self.count(part)[1]:,} numbers)")
        return "; ".join(lines)

    def summary(self, down: int, up: int, rounds: int) -> dict[str, Any]:
        """Tensors and numbers of each part, and the mean over rounds of the bytes down to the clients and up again."""
        result: dict[str, Any] = {}
        for part in PARTS:
            tensors, numbers = self.count(part)
            result[part] = {"tensors": tensors, "numbers": numbers}
        return result | {"bytes_down": down // max(1, rounds), "bytes_up": up // max(1, rounds)}

    def cut(self, theta: Tensor, part: Part = "shared") -> Tensor:
        """[..., d_s], or [..., d_p], of whole models: [..., d]."""
        result = [theta[..., run] for source, run, _ in self._runs if source == part]
        return torch.cat(result or [theta[..., :0]], -1) if len(result) != 1 else result[0]

    def compose(self, shared: Tensor, personal: Tensor) -> Tensor:
        """[..., d] whole models from their parts: [..., d_s], [..., d_p]."""
        parts = [(shared if source == "shared" else personal)[..., at] for source, _, at in self._runs]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _part(self, name: str) -> Part:
        if name in self.frozen:
            return "frozen"
        return "personal" if name in self.personal else "shared"

    @cached_property
    def _runs(self) -> list[tuple[Part, slice, slice]]:
        """Runs of neighbouring entries of the same part: the part, the place in the model, the place in the part."""
        runs: list[tuple[Part, slice, slice]] = []
        ends = {"shared": 0, "personal": 0}
        for entry in self.layout.entries:
            part, size = self._part(entry.name), entry.at.stop - entry.at.start
            run, at = entry.at, slice(ends[part], ends[part] + size)
            ends[part] += size
            if runs and runs[-1][0] == part:
                _, before, begun = runs.pop()
                run, at = slice(before.start, run.stop), slice(begun.start, at.stop)
            runs.append((part, run, at))
        return runs


def _trained_by(method: Method, name: str, others: frozenset[str]) -> str:
    """Why what a method adds for each client cannot be frozen; others: what else it was asked to freeze."""
    rest = sorted({f"{layer}.*" if layer else other for other in others for layer in [other.rpartition(".")[0]]})
    return (
        f"frozen={list(method.frozen)} matches '{name}', which {type(method).__name__} adds and trains at each client; "
        + (f"to freeze the rest of what it matches, use frozen={rest}" if rest else "name what your model has")
    )


def divide(method: Method, model: Model) -> tuple[Method, Model]:
    """The method and the model to run so that only the shared part travels; unchanged if everything is shared."""
    if isinstance(method, Divided):
        return method, model
    sharing = Sharing.from_method(method, model.layout)
    if not sharing.is_divided:
        return method, model
    return Divided(method, sharing, method.feedback), model.freeze(sharing.layout)


def unwrap(method: Method) -> Method:
    """The method as it was given to `divide`."""
    return method.method if isinstance(method, Divided) else method


def find_shared_layout(method: Method, layout: Layout) -> Layout:
    """The layout of the part of a model that travels."""
    while isinstance(method, Around):
        if isinstance(method, Divided):
            return method.sharing.shared_layout
        method = method.method
    return layout


class State(NamedTuple):
    """A client's private state."""

    inner: Tree  # the method's
    personal: Tensor  # [d_p] the client's own part of its model


@dataclass(frozen=True)
class Divided(Around, Explains, Lists, Averages, Admits, Predicts):
    """A method around another, which sees only the shared part of the model."""

    method: Method
    sharing: Sharing
    feedback: str = "none"
    _cut: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def origin_of(self, roster: Roster) -> Origin:
        return Explains.from_method(self.method).origin_of(self._inner(roster))

    def start(self, roster: Roster) -> Tree:
        return self.method.start(self._inner(roster))

    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        return self.method.send(self._inner(roster), server, cohort)

    def weights(self, roster: Roster, cohort: Tensor) -> Tensor:
        return weigh(self.method, self._inner(roster), cohort)

    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        return self.method.aggregate(self._inner(roster), server, cohort, uploads)

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Relation | None:
        return self.method.relation(self._inner(roster), server, cohort)

    def keeps_lists(self, count: int) -> bool:
        return Lists.from_method(self.method).keeps_lists(count)

    def prospect(self, roster: Roster, server: Tree, ids: Tensor) -> Tree:
        return Lists.from_method(self.method).prospect(self._inner(roster), server, ids)

    def similarity(self, roster: Roster, server: Tree) -> Compared | None:
        return Explains.from_method(self.method).similarity(self._inner(roster), server)

    def own_weights(self, roster: Roster, server: Tree) -> Tensor | None:
        return Explains.from_method(self.method).own_weights(self._inner(roster), server)

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tree:
        return self.method.add_clients(self._inner(roster), server, newcomers)

    def join(self, roster: Roster, server: Tree, newcomers: Tensor, uploads: Tree) -> Tree:
        return join(self.method, self._inner(roster), server, newcomers, uploads)

    def diagnostics(self, roster: Roster, server: Tree, cohort: Tensor, sent: Tree, uploads: Tree) -> dict[str, Tensor]:
        return self.method.diagnostics(self._inner(roster), server, cohort, sent, uploads)

    def client_statistics(self, client: Client) -> Tree:
        return self.method.client_statistics(_SharedView(client, self.sharing).as_client)

    def init_client(self, client: Client) -> Tree:
        view = _SharedView(client, self.sharing)
        return State(self.method.init_client(view.as_client), view.kept)

    def train(self, client: Client, state: State, received: Tree) -> tuple[Tree, Tree]:
        view = _SharedView(client, self.sharing, state)
        inner, upload = self.method.train(view.as_client, state.inner, received)
        if self.sharing.trains_personal and not view.moved:
            raise UsageError(
                f"{type(self.method).__name__} takes its own local steps, which would not train personal tensors; take "
                "them with client.for_whole_model from client.whole(theta), and upload client.part(theta)"
            )
        return State(inner, view.kept), upload

    def personalise(self, client: Client, state: State, received: Tree) -> dict[str, Tree]:
        view = _SharedView(client, self.sharing, state)
        result = self.method.personalise(view.as_client, state.inner, received)
        return {name: self._complete(view, name, personal) for name, personal in result.items()}

    def predict(self, client: Client, personal: Tree, x: Tensor) -> Tensor:
        return predict(self.method, client, personal, x)

    def export(self, model: Model, personal: Tree) -> nn.Module:
        return export(self.method, model, personal)

    def _complete(self, view: "_SharedView", name: str, personal: Tree) -> Tree:
        """A named model, whole; one per client if a part of it is personal, even if all received the same."""
        model = trees.model_field(personal)
        if not model:
            return personal
        theta = getattr(personal, model)
        if len(theta) < self.sharing.layout.size:
            if view.moved:
                raise UsageError(
                    f"{type(self.method).__name__}.personalise trains, so it must say which personal part belongs to "
                    f"'{name}': return client.whole(theta), taken before or after training"
                )
            theta = view.whole(theta)
        if not self.sharing.personal or getattr(trees.axes(personal), model) is trees.Axis.PER_CLIENT:
            return personal._replace(**{model: theta})
        if not isinstance(self.method, Predicts):
            return Params(theta)
        raise UsageError(
            f"{type(personal).__name__}.{model} is declared the same for all clients, but has a personal part that "
            "differs; declare it ModelOf[PerClient]"
        )

    def _inner(self, roster: Roster) -> Roster:
        if self._cut.get("whole") is not roster.theta:  # it is the same in all rounds
            self._cut.update(whole=roster.theta, shared=self.sharing.cut(roster.theta))
        return replace(roster, theta=self._cut["shared"], layout=self.sharing.shared_layout)


class _SharedView:
    """A client as a divided method sees it: every theta: [d_s] is the shared part of its model."""

    def __init__(self, client: Client, sharing: Sharing, state: State | None = None) -> None:
        self.for_whole_model, self.moved = client, False
        self.kept = sharing.cut(client.model.theta, "personal") if state is None else state.personal
        self.personal, self._sharing = sharing.personal, sharing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.for_whole_model, name)

    @property
    def as_client(self) -> Client:
        return cast(Client, self)

    @cached_property
    def model(self) -> "_SharedModel":
        return _SharedModel(self)

    def whole(self, theta: Tensor) -> Tensor:
        if len(theta) != self._sharing.shared_layout.size:
            raise UsageError(
                f"{self._sharing.shared_layout.size} numbers of the model are shared, but theta has {len(theta)}; run "
                "the method that kinfed.core.sharing.divide returns"
            )
        return self._sharing.compose(theta, self.kept)

    def part(self, theta: Tensor) -> Tensor:
        """[d_s] the part that travels; the rest is kept as the client's personal part."""
        self.kept, self.moved = self._sharing.cut(theta, "personal"), True
        return self._sharing.cut(theta)

    def loss(self, theta: Tensor, batch: Batch | Examples, objective: Objective | None = None) -> Tensor:
        return self.for_whole_model.loss(self.whole(theta), batch, objective)

    def gradient(self, theta: Tensor, batch: Batch | Examples, objective: Objective | None = None) -> Tensor:
        return self._sharing.cut(self.for_whole_model.gradient(self.whole(theta), batch, objective))

    def descend(self, theta: Tensor, *, penalty: Callable[[Tensor], Tensor] | None = None, **settings: Any) -> Tensor:
        """Trains the personal part as well, except what `only` leaves out; a penalty is on the shared part only."""
        penalty = None if penalty is None else self._widen(penalty)
        return self.part(self.for_whole_model.descend(self.whole(theta), penalty=penalty, **settings))

    def _widen(self, penalty: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The penalty as a function of the whole model."""
        sharing = self._sharing
        if not isinstance(penalty, Quadratic):
            return lambda theta: penalty(sharing.cut(theta))
        none = torch.zeros_like(self.kept)
        linear = sharing.compose(penalty.slope, none)
        if not sharing.trains_personal:  # only the shared part has a gradient
            return Quadratic(penalty.pull, linear)
        pull = sharing.compose(torch.full_like(penalty.slope, penalty.pull), none)
        return lambda theta: (0.5 * pull * theta + linear) @ theta


class _SharedModel:
    """The model of such a client."""

    def __init__(self, client: _SharedView) -> None:
        self._client, self.layout = client, client._sharing.shared_layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client.for_whole_model.model, name)

    @cached_property
    def theta(self) -> Tensor:
        """[d_s] of the initial model."""
        return self._client._sharing.cut(self._client.for_whole_model.model.theta)

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        return self._client.for_whole_model.model(self._client.whole(theta), x)

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        return self._client.for_whole_model.model.features(self._client.whole(theta), x)

    def head(self, theta: Tensor, z: Tensor) -> Tensor:
        return self._client.for_whole_model.model.head(self._client.whole(theta), z)

    def layer(self, name: str, theta: Tensor, z: Tensor) -> Tensor:
        return self._client.for_whole_model.model.layer(name, self._client.whole(theta), z)
