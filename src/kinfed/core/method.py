"""Method: a federated method as pure functions of the server (plural) and of one client (singular)."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from ..errors import UsageError
from .client import Client, Training
from .graph import Graph, Origin
from .layout import Layout, head_of
from .model import Model
from .seeding import fold, generator, key, normal
from .settings import Settings
from .tables import put
from .trees import Axis, ModelOf, PerClient, Shared, Tree, axes, model_of

Normalisation = Literal["averaged", "local", "personal"]  # what becomes of normalisation layers


class Params(NamedTuple):
    """A model for each client: the message or state that most methods need."""

    theta: ModelOf[PerClient]  # [d] to or from one client, [K, d] for a cohort, [N, d] for all


class SharedParams(NamedTuple):
    """One model for all clients."""

    theta: ModelOf[Shared]  # [d]


@dataclass(frozen=True)
class Roster:
    """What the server knows of its clients. It never sees an example."""

    theta: Tensor  # [d] the common initial model
    layout: Layout
    sizes: Tensor  # [N] int64 training examples
    training: Training
    seed: int
    tags: Tensor  # [N] int64 what stands for a client in random draws
    graph: Graph | None = None  # a known relation, [N, N]
    client_statistics: Tree = ()  # what the clients said before round 1, [N, ...]
    round: int = 0

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def everyone(self) -> Tensor:
        """[N] all client ids."""
        return torch.arange(len(self.sizes), device=self.theta.device)

    def others(self, ids: Tensor) -> Tensor:
        """[N - M] everybody but ids: [M]."""
        return self.everyone[~torch.isin(self.everyone, ids)]

    def part(self, ids: Tensor) -> "Roster":
        """The roster of ids: [M] alone: who is not among them is unknown."""
        graph = self.graph
        if graph is not None:
            at = ids.to(graph.weights.device)
            graph = replace(graph, weights=graph.weights[..., at, :][..., at])
        said = tree_map(lambda table: table[ids], self.client_statistics)
        return replace(self, sizes=self.sizes[ids], tags=self.tags[ids], graph=graph, client_statistics=said)

    def copies(self) -> Tensor:
        """[N, d] the initial model once a client."""
        return self.theta.expand(len(self), -1).clone()

    def normal(self, purpose: str, size: int) -> Tensor:
        """[N, size] standard normal numbers; a client's row depends on its name alone."""
        start = key(self.seed, purpose, device=self.tags.device)
        return vmap(lambda mine: normal(mine, self.theta.new_empty(size)))(fold(start, self.tags))

    def note(self, cohort: Tensor, values: Tensor) -> Tensor:
        """[N] values: [K] of the cohort, NaN for everybody else."""
        return put(values.new_full((len(self),), torch.nan), cohort, values)

    def generator(self, purpose: str) -> torch.Generator:
        """The server's random draws of this round."""
        return generator(self.seed, purpose, self.round)


@dataclass(frozen=True, kw_only=True)
class Method(Settings, ABC):
    """Frozen hyper-parameters and pure functions.

    Server functions see tensors whose first axis counts clients; client functions see one client. `personalise` names
    every model that a client can be scored with, the headline first.

    The settings below are those of every method: what of a model does not travel. A method's functions see the rest
    alone, as if it were the model (`kinfed.core.sharing`).
    """

    personal: tuple[str, ...] = ()  # names or patterns of tensors that never leave a client, such as "head.*"
    frozen: tuple[str, ...] = ()  # names or patterns of tensors that stay as they are: never trained, never sent
    bn: Normalisation = "averaged"  # running statistics are averaged with the rest, or "local" to a client;
    #                                 "personal": the weights of normalisation layers stay there, too, as in FedBN
    feedback = "none"  # what client.held_out holds: "val" sets a ninth of the training examples aside,
    #                    "train" reuses them, "test" takes the test examples (results are marked as leaking)
    origin: ClassVar[Origin] = "given"  # of the relation it reports: given, learned or oracle
    rates: ClassVar[tuple[str, ...]] = ()  # its settings that local training goes by in place of training.optimiser

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.predict is not Method.predict and cls.export is Method.export:
            raise UsageError(
                f"{cls.__name__} has a predict of its own, so it needs an export of its own: a module that gives the "
                "same outputs, or else the models that are saved would not be those that were scored"
            )

    @property
    def remedy(self) -> str:
        """What to change when training diverges; a method whose own settings can be the cause names them."""
        return "lower the learning rate"

    @property
    def caution(self) -> str:
        """Why scores on test examples flatter its models, if they do."""
        return "the method used test examples as feedback" if self.feedback == "test" else ""

    def start(self, roster: Roster) -> Tree:
        """The server's first state."""
        return ()

    @abstractmethod
    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        """What each client of cohort: [K] receives, as [K, ...]; what is declared `Shared` has no axis of clients.

        Pure: it is called for evaluation too.
        """

    @abstractmethod
    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        """The server's next state from uploads: [K, ...]."""

    @abstractmethod
    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        """[N, N] or [L, N, N]: row i says how much of each client's model is in what client i would be sent now.

        [N] where all are sent the same, which is that one row. `cohort` took part in the round just ended. None where
        no models are mixed (hypernetworks).
        """

    @abstractmethod
    def train(self, client: Client, state: Tree, received: Tree) -> tuple[Tree, Tree]:
        """The client's next private state and its upload."""

    @abstractmethod
    def personalise(self, client: Client, state: Tree, received: Tree) -> dict[str, Tree]:
        """Named models, the headline first; one whose tensors are `Shared` is the same for all clients."""

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tree:
        """The server's state once newcomers: [M] have joined; `roster` lists them, `server` knows only the others.

        What is known of the others stays. Here a newcomer gets, in every table over clients, the row that `start`
        would give it, as if it had been there all along and never taken part; a method that can do better says so.
        Pure: what `send` then has for a newcomer among everybody is its first model, before it has trained at all.
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

    def origin_of(self, roster: Roster) -> Origin:
        """Where the relation comes from; a method that uses roster.graph answers for that graph too."""
        return self.origin

    def diagnostics(self, roster: Roster, server: Tree, cohort: Tensor, sent: Tree, uploads: Tree) -> dict[str, Tensor]:
        """What is worth writing down of an evaluated round, by name: numbers about all, [], or about each client, [N].

        `server` is the state after the round; NaN stands where there is nothing to say. Here: the length of each
        update, from the model that was sent to the one that came back, where both messages have one.
        """
        before, after = model_of(sent), model_of(uploads)
        if before is None or after is None:
            return {}
        layout, width = roster.layout, after.shape[1]
        buffers = layout.parameters < layout.size == width
        learned = layout.trainable_on(cohort.device) if buffers else slice(None)
        # Row by row: a table of all changes would be as large as the models.
        changes = ((new - old)[learned] for new, old in zip(after, before.expand_as(after), strict=True))
        squares = torch.stack([change @ change for change in changes])
        return {"update": roster.note(cohort, squares.sqrt())}

    def client_statistics(self, client: Client) -> Tree:
        """Said once, before round 1."""
        return ()

    def init_client(self, client: Client) -> Tree:
        """The client's first private state."""
        return ()

    def predict(self, client: Client, personal: Tree, x: Tensor) -> Tensor:
        """Outputs for x: [B, ...] by one of the models that `personalise` names."""
        return client.model(personal.theta, x)

    def extend(self, module: nn.Module, head: str | None) -> nn.Module:
        """The module with the layers that the method adds to it, such as a second head; here none.

        The module is a copy, which may be changed and returned; `head` names its head, None if it has none. Numbers
        that are drawn here are fixed by the run's seed.
        """
        return module

    def export(self, model: Model, personal: Tree) -> nn.Module:
        """A plain module in evaluation mode that gives what `predict` gives; it is overridden where that is.

        `personal` has the named fields of a model that `personalise` gives, whatever its type.
        """
        return model.export(personal.theta)


def model_for(
    method: Method, module: nn.Module, head: str | None = None, dtype: torch.dtype | None = None, seed: int = 0
) -> Model:
    """The model that a method trains: the module with what the method adds to it.

    `head` names the module's head (default: the last nn.Linear), which stays the head of the extended module.
    """
    module = copy.deepcopy(module)
    name = head_of(module) if head is None else head
    layers = dict(module.named_modules())
    if name is not None and name not in layers:
        return Model(module, name)  # which says what is wrong with it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "extend").initial_seed())
        extended = method.extend(module, name)
    if not isinstance(extended, nn.Module):
        raise UsageError(f"{type(method).__name__}.extend must return an nn.Module; got {extended!r:.80}")
    part = None if name is None else layers[name]
    at = next((path for path, layer in extended.named_modules() if layer is part), None)
    return Model(extended, at, dtype)
