"""Method: a federated method as pure functions of the server (all clients) and of one client."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from .client import Client
from .field_checks import Settings
from .graph import Graph, Relation
from .layout import Layout
from .rows import put
from .seeding import fold, generator, key, normal
from .tasks import Task
from .training import Training
from .trees import Averaged, Axis, ModelOf, PerClient, Shared, Tree, axes, model_of

_T = TypeVar("_T")
Normalisation = Literal["averaged", "local", "personal"]  # how normalisation layers are treated


class Params(NamedTuple):
    """A model for each client: the message or state that most methods need."""

    theta: ModelOf[PerClient]  # [d] to or from one client, [K, d] for a cohort, [N, d] for all


class SharedParams(NamedTuple):
    """One model for all clients."""

    theta: ModelOf[Shared]  # [d]


class AveragedParams(NamedTuple):
    """A model that a client uploads, of which the server gets the mean over the clients of the round."""

    theta: ModelOf[Averaged]  # [d] from one client; [d], their mean, for `aggregate`


class Compared(NamedTuple):
    """What a server compares to choose whom each client learns from."""

    what: str  # in words, such as "cosine of updates"
    values: Tensor  # [N, N]: row i as client i's weights are made of it; or [N, M] of those that it lists
    near: Tensor | None = None  # [N, M] int64 whom each client lists; None: everyone in order

    def row(self, client: int, count: int) -> Tensor:
        """[N] how all N = `count` clients compare with one; NaN of those that it does not list."""
        if self.near is None:
            return self.values[client]
        nothing = self.values.new_full((count,), torch.nan)
        return nothing.index_copy(0, self.near[client], self.values[client])


class Memo:
    """The last result of each computation, by name, and what it was made of.

    `send`, `relation` and `aggregate` of one round need the same weights and mixtures; what is sent for evaluation is
    often what is sent in the next round. It only saves time: copies, and what is saved of it, are empty.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def once(self, name: str, made_of: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """The result of make(), or the last one of this name if that was made of the same.

        `made_of` lists all that the result depends on and that may differ between two calls: the method, tensors of
        the server's state, the cohort, the round if random numbers are drawn. Tensors are the same if they are one
        object, since a state's never change; clients' ids also if they are equal, and anything else if it is equal.
        Nobody may write into the result.
        """
        former = self._last.pop(name, None)  # so that its memory is free for the next
        if former is None or len(former[0]) != len(made_of) or not all(map(_is_same, former[0], made_of)):
            former = made_of, make()
        self._last[name] = former
        return former[1]

    def clear(self) -> None:
        """Forget all results, which may be large."""
        self._last.clear()

    def __reduce__(self) -> tuple[type["Memo"], tuple[()]]:
        return Memo, ()


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
    rounds: int = 0  # of the run, at most
    task: Task | None = None  # what the models answer
    example_weights: Tensor | None = None  # [N] the sum of those of each client's training examples, if they have any
    columns: tuple[str, ...] = ()  # of a table: for each of a model's inputs the column that it is made of
    memo: Memo = field(default_factory=Memo, repr=False, compare=False)  # what a method has computed in this run

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def weights(self) -> Tensor:
        """[N] by how much each client counts in a mean: the sum of its examples' weights, else how many they are."""
        return self.sizes if self.example_weights is None else self.example_weights

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
        weights = None if self.example_weights is None else self.example_weights[ids]
        return replace(
            self,
            sizes=self.sizes[ids],
            tags=self.tags[ids],
            graph=graph,
            client_statistics=statistics,
            example_weights=weights,
        )

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

    Server functions see tensors whose first axis indexes clients; client functions see one client. The first six say
    what a round does: `start`, `send`, `train`, `aggregate`, then `personalise` and `relation` for who looks on. The
    other four have defaults that do for most methods; what few need is in `kinfed.core.mixins`.

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

    def start(self, roster: Roster) -> Tree:
        """The server's first state."""
        return ()

    @abstractmethod
    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        """What each client of cohort: [K] receives, as [K, ...]; a field declared `Shared` has no axis of clients.

        Pure: it is called for evaluation too.
        """

    @abstractmethod
    def train(self, client: Client, state: Tree, received: Tree) -> tuple[Tree, Tree]:
        """The client's next private state and its upload."""

    @abstractmethod
    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        """The server's next state from uploads: [K, ...]; of those declared `Averaged` or `Summed` their mean or sum.

        That mean, [...], has the weights of `kinfed.methods.Averages`. Nothing else is given of these uploads.
        """

    @abstractmethod
    def personalise(self, client: Client, state: Tree, received: Tree) -> dict[str, Tree]:
        """Models to score by name, the headline first; one whose tensors are `Shared` is the same for all clients."""

    @abstractmethod
    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Relation | None:
        """[N, N] or [L, N, N]: row i has the weight of each client's model in what client i would be sent now.

        [N], a single row, if all are sent the same; `NeighbourLists` of very many. `cohort` took part in
        the round just ended. None if no models are mixed (hypernetworks).
        """

    def init_client(self, client: Client) -> Tree:
        """The client's first private state."""
        return ()

    def client_statistics(self, client: Client) -> Tree:
        """What the client reports to the server once, before round 1."""
        return ()

    def add_clients(self, roster: Roster, server: Tree, newcomers: Tensor) -> Tree:
        """The server's state once newcomers: [M] have joined; `roster` lists them, `server` knows only the others.

        What is known about the others stays. By default a newcomer gets, in every table over clients, the row that
        `start` would give it, as if it had been there all along and never taken part; a method that can do better
        overrides this. Pure: what `send` then returns for a newcomer is its first model, before it has ever trained.
        """
        earlier = roster.others(newcomers)

        def widen(axis: Axis, now: Tensor, wide: Tensor) -> Tensor:
            if axis is Axis.PER_CLIENT:
                return put(wide, earlier, now)
            if axis is Axis.PAIRWISE:
                wide = wide.clone()
                wide[..., earlier[:, None], earlier] = now
                return wide
            return now

        return tree_map(widen, axes(server), server, self.start(replace(roster, round=0)))

    def diagnostics(self, roster: Roster, server: Tree, cohort: Tensor, sent: Tree, uploads: Tree) -> dict[str, Tensor]:
        """Numbers to record for an evaluated round, by name: one for all, [], or one per client, [N].

        `server` is the state after the round; NaN means that there is no value. By default: the length of each
        update, from the model that was sent to the one that came back, if both messages have one.
        """
        return measure_updates(roster, cohort, sent, uploads)


class Around(Method):
    """A method that calls another, which it is around."""

    method: Method


def measure_updates(roster: Roster, cohort: Tensor, sent: Tree, uploads: Tree) -> dict[str, Tensor]:
    """[N] the length of each update of the cohort, from the model in `sent` to that in its upload, as `update`.

    Nothing if one of them has none, or if `uploads` holds the mean of all.
    """
    before, after = model_of(sent), model_of(uploads)
    if before is None or after is None or after.ndim < 2:
        return {}
    layout, width = roster.layout, after.shape[1]
    buffers = layout.parameters < layout.size == width
    learned = layout.trainable_on(cohort.device) if buffers else slice(None)
    # Row by row, as a table of all changes would be as large as the models.
    changes = ((new - old)[learned] for new, old in zip(after, before.expand_as(after), strict=True))
    squares = torch.stack([change @ change for change in changes])
    return {"update": roster.note(cohort, squares.sqrt())}


def _is_same(former: Any, now: Any) -> bool:
    """Whether what is made of one is what is made of the other."""
    if former is now:
        return True
    if not isinstance(former, Tensor):
        return not isinstance(now, Tensor) and bool(former == now)
    if not isinstance(now, Tensor) or not former.dtype == now.dtype == torch.int64:
        return False
    return former.device == now.device and torch.equal(former, now)
