"""Method: a federated method as pure functions of the server (all clients) and of one client."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .client import Client, Training
from .copies import check_tensors, duplicate
from .graph import Graph, Origin
from .layout import Layout, head_of
from .memo import Memo
from .model import Model
from .rows import put
from .seeding import fold, generator, key, normal
from .settings import Settings
from .tasks import Task
from .trees import Axis, ModelOf, PerClient, Shared, Tree, axes, model_of, rows_replaced

Normalisation = Literal["averaged", "local", "personal"]  # how normalisation layers are treated


class Params(NamedTuple):
    """A model for each client: the message or state that most methods need."""

    theta: ModelOf[PerClient]  # [d] to or from one client, [K, d] for a cohort, [N, d] for all


class SharedParams(NamedTuple):
    """One model for all clients."""

    theta: ModelOf[Shared]  # [d]


class Compared(NamedTuple):
    """What a server compares to choose whom each client learns from."""

    what: str  # in words, such as "cosine of updates"
    values: Tensor  # [N, N]: row i as client i's weights are made of it


@dataclass(frozen=True)
class Roster:
    """What the server knows about its clients. It never sees an example."""

    theta: Tensor  # [d] the common initial model
    layout: Layout
    sizes: Tensor  # [N] int64 training examples
    training: Training
    seed: int
    tags: Tensor  # [N] int64 hashes of the clients' names, which identify them in random draws
    graph: Graph | None = None  # a known relation, [N, N]
    client_statistics: Tree = ()  # what the clients reported before round 1, [N, ...]
    round: int = 0
    task: Task | None = None  # what the models answer
    memo: Memo = field(default_factory=Memo, repr=False, compare=False)  # what a method has computed in this run

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def everyone(self) -> Tensor:
        """[N] all client ids."""
        return torch.arange(len(self.sizes), device=self.theta.device)

    def others(self, ids: Tensor) -> Tensor:
        """[N - M] all client ids except ids: [M]."""
        return self.everyone[~torch.isin(self.everyone, ids)]

    def part(self, ids: Tensor) -> "Roster":
        """The roster of ids: [M] only: the other clients are unknown to it."""
        graph = self.graph
        if graph is not None:
            at = ids.to(graph.weights.device)
            graph = replace(graph, weights=graph.weights[..., at, :][..., at])
        statistics = tree_map(lambda table: table[ids], self.client_statistics)
        return replace(self, sizes=self.sizes[ids], tags=self.tags[ids], graph=graph, client_statistics=statistics)

    def copies(self) -> Tensor:
        """[N, d] a copy of the initial model for each client."""
        return self.theta.expand(len(self), -1).clone()

    def normal(self, purpose: str, size: int) -> Tensor:
        """[N, size] standard normal numbers; a client's row depends on its name only."""
        start = key(self.seed, purpose, device=self.tags.device)
        return vmap(lambda client_key: normal(client_key, self.theta.new_empty(size)))(fold(start, self.tags))

    def note(self, cohort: Tensor, values: Tensor) -> Tensor:
        """[N] values: [K] of the cohort, NaN for all other clients."""
        return put(values.new_full((len(self),), torch.nan), cohort, values)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator for the server's random draws of this round."""
        return generator(self.seed, purpose, self.round)


@dataclass(frozen=True, kw_only=True)
class Method(Settings, ABC):
    """Frozen hyper-parameters and pure functions.

    Server functions see tensors whose first axis indexes clients; client functions see one client. `personalise` names
    every model that a client can be scored with, the headline model first.

    Every method has the settings below, which say what part of a model does not travel. A method's functions see only
    the rest, as if it were the model (`kinfed.core.sharing`).
    """

    personal: tuple[str, ...] = ()  # names or patterns of tensors that never leave a client, such as "head.*"
    frozen: tuple[str, ...] = ()  # names or patterns of tensors that stay as they are: never trained, never sent
    bn: Normalisation = "averaged"  # running statistics are averaged with the rest, or "local" to a client;
    #                                 "personal": the weights of normalisation layers stay there, too, as in FedBN
    feedback = "none"  # what client.held_out holds: "held-out" sets a ninth of the training examples aside,
    #                    "train" reuses them, "validation" takes the validation examples, which should fit a few
    #                    numbers at most, "test" the test examples (results are marked as leaking)
    origin: ClassVar[Origin] = "fixed"  # of the relation it reports: given, fixed, learned or oracle
    mixes: ClassVar[str] = ""  # the table [N, d] of the server's state that `send` mixes by the relation, if it does
    weighs: ClassVar[str] = ""  # how weights come about, in a clause, where `compared` has nothing
    refuses: ClassVar[str] = ""  # why a newcomer to a finished federation would be given nothing, if that is so
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # values that its paper tries, by setting: "cells.alpha", say
    keeps: ClassVar[tuple[str, ...]] = ()  # patterns of tensors, of layers that it adds, which are personal in any case

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.predict is not Method.predict and cls.export is Method.export:
            raise UsageError(
                f"{cls.__name__} overrides predict, so it must override export too: return a module with the same "
                "outputs; otherwise the saved models would not be those that were scored"
            )

    @property
    def rates(self) -> tuple[str, ...]:
        """Its settings that local training uses in place of training.optimiser, if it ignores that."""
        return ()

    @property
    def remedy(self) -> str:
        """What to change when training diverges; a method whose own settings can cause that names them."""
        return "lower the learning rate"

    @property
    def caution(self) -> str:
        """Why scores on test examples overstate how good its models are, if they do."""
        return "the method used test examples as feedback" if self.feedback == "test" else ""

    def start(self, roster: Roster) -> Tree:
        """The server's first state."""
        return ()

    @abstractmethod
    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        """What each client of cohort: [K] receives, as [K, ...]; a field declared `Shared` has no axis of clients.

        Pure: it is called for evaluation too.
        """

    @abstractmethod
    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        """The server's next state from uploads: [K, ...]."""

    @abstractmethod
    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        """[N, N] or [L, N, N]: row i has the weight of each client's model in what client i would be sent now.

        [N], a single row, if all are sent the same. `cohort` took part in the round just ended. None if no models are
        mixed (hypernetworks).
        """

    def compared(self, roster: Roster, server: Tree) -> Compared | None:
        """What the next relation is made of, for those who ask why; None if nothing is kept: see `weighs`."""
        return None

    @abstractmethod
    def train(self, client: Client, state: Tree, received: Tree) -> tuple[Tree, Tree]:
        """The client's next private state and its upload."""

    @abstractmethod
    def personalise(self, client: Client, state: Tree, received: Tree) -> dict[str, Tree]:
        """Models to score by name, the headline first; one whose tensors are `Shared` is the same for all clients."""

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tree:
        """The server's state once newcomers: [M] have joined; `roster` lists them, `server` knows only the others.

        What is known about the others stays. By default a newcomer gets, in every table over clients, the row that
        `start` would give it, as if it had been there all along and never taken part; a method that can do better
        overrides this. Pure: what `send` then returns for a newcomer is its first model, before it has ever trained.
        """
        known = roster.others(newcomers)

        def widen(axis: Axis, now: Tensor, wide: Tensor) -> Tensor:
            if axis is Axis.PER_CLIENT:
                return put(wide, known, now)
            if axis is Axis.PAIRWISE:
                wide = wide.clone()
                wide[..., known[:, None], known] = now
                return wide
            return now

        return tree_map(widen, axes(server), server, self.start(replace(roster, round=0)))

    def join(self, roster: Roster, server: Tree, newcomers: Tensor, uploads: Tree) -> Tree:
        """The state of a finished federation's server once newcomers: [M] have sent uploads: [M, ...].

        `add_clients` has made room for them. Nothing else changes: the others' rows and all that is shared are frozen.
        By default newcomers get the rows that `aggregate` would give them; a method that compares them with others
        only where these take part as well overrides this.
        """
        return rows_replaced(server, newcomers, self.aggregate(roster, server, newcomers, uploads))

    def origin_of(self, roster: Roster) -> Origin:
        """Where the relation comes from; a method that uses roster.graph takes that graph's origin into account."""
        return self.origin

    def diagnostics(self, roster: Roster, server: Tree, cohort: Tensor, sent: Tree, uploads: Tree) -> dict[str, Tensor]:
        """Numbers to record for an evaluated round, by name: one for all, [], or one per client, [N].

        `server` is the state after the round; NaN means that there is no value. By default: the length of each
        update, from the model that was sent to the one that came back, if both messages have one.
        """
        before, after = model_of(sent), model_of(uploads)
        if before is None or after is None:
            return {}
        layout, width = roster.layout, after.shape[1]
        buffers = layout.parameters < layout.size == width
        learned = layout.trainable_on(cohort.device) if buffers else slice(None)
        # Row by row, as a table of all changes would be as large as the models.
        changes = ((new - old)[learned] for new, old in zip(after, before.expand_as(after), strict=True))
        squares = torch.stack([change @ change for change in changes])
        return {"update": roster.note(cohort, squares.sqrt())}

    def client_statistics(self, client: Client) -> Tree:
        """What the client reports to the server once, before round 1."""
        return ()

    def init_client(self, client: Client) -> Tree:
        """The client's first private state."""
        return ()

    def predict(self, client: Client, personal: Tree, x: Tensor) -> Tensor:
        """Outputs for x: [B, ...] by one of the models that `personalise` names."""
        return client.model(personal.theta, x)

    def extend(self, module: nn.Module, head: str | None) -> nn.Module:
        """The module with the layers that the method adds to it, such as a second head; by default none.

        The module is a copy, which may be changed and returned; `head` names its head, None if it has none. That layer
        stays the head wherever it is put; if it is put nowhere, the layer that has its name is. Random numbers drawn
        here are fixed by the run's seed.
        """
        return module

    def export(self, model: Model, personal: Tree) -> nn.Module:
        """A plain module in evaluation mode with the outputs of `predict`; a method overrides both or neither.

        `personal` has the named fields of a model that `personalise` returns, whatever its type.
        """
        return model.export(personal.theta)


def exporter(method: Method) -> str:
    """The name of a method that extends or exports models in its own way, as their file says it; "" of any other."""
    kind = type(method)
    return kind.__name__ if kind.export is not Method.export or kind.extend is not Method.extend else ""


def model_for(
    method: Method, module: nn.Module, head: str | None = None, dtype: torch.dtype | None = None, seed: int = 0
) -> Model:
    """The model that a method trains: the module with the layers that the method adds to it.

    `head` names the module's head (default: the last nn.Linear), which stays the head of the extended module.
    """
    check_tensors(module)
    module = duplicate(module)
    name = head_of(module) if head is None else head
    layers = dict(module.named_modules())
    if (name is not None and name not in layers) or any(map(is_lazy, module.parameters())):
        return Model(module, name)  # which raises the error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "extend").initial_seed())
        extended = method.extend(module, name)
    if not isinstance(extended, nn.Module):
        raise UsageError(f"{type(method).__name__}.extend must return an nn.Module; got {extended!r:.80}")
    part = None if name is None else layers[name]
    found = dict(extended.named_modules())
    at = next((path for path, layer in found.items() if layer is part), name if name in found else None)
    return Model(extended, at, dtype)
