"""Server halves that many methods share: averaging into one model, mixing along a graph."""

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ..core.client import Client
from ..core.graph import Origin
from ..core.layout import Layout
from ..core.method import Method, Params, Roster, SharedParams
from ..core.seeding import key, normal
from ..core.trees import Tree
from ..errors import UsageError
from ..ops.mixing import mix, weighted_mean


class Averaging(Method):
    """The server half of a method that averages into one shared vector."""

    uniform: bool = False  # every client of the cohort counts the same, whatever it has
    noise: float = 0.0  # standard deviation of what is added to each learned number of the mean
    bn: str = "averaged"  # running statistics; or "local": they never leave a client

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 <= self.noise < math.inf:
            raise UsageError(f"{name}: noise is a standard deviation, so it must be zero or more; got {self.noise}")
        if self.bn not in ("averaged", "local"):
            raise UsageError(f"{name}: bn must be 'averaged' or 'local'; got '{self.bn}'")

    def shared(self, layout: Layout) -> frozenset[str]:
        """Names of the tensors that leave a client; what a method keeps personal is left out."""
        return layout.names if self.bn == "averaged" else layout.learned

    def init_client(self, client: Client) -> Tree:
        """The client's whole model, if a part of it is personal."""
        layout = client.model.layout
        return () if self.shared(layout) == layout.names else Params(client.model.theta)

    def compose(self, client: Client, state: Tree, received: Tree) -> Tensor:
        """[d] what was received, within the client's own model if a part of that is personal."""
        if not isinstance(state, Params):
            return received.theta  # type: ignore[no-any-return]
        return state.theta.index_copy(0, self._places(client), received.theta)

    def composed(self, client: Client, state: Tree, received: Tree) -> Tree:
        """That model, as one that all clients share if nothing in it is personal."""
        return Params(self.compose(client, state, received)) if isinstance(state, Params) else received

    def part(self, client: Client, theta: Tensor) -> tuple[Tree, Params]:
        """Of a trained model: [d], the private state and the upload."""
        layout = client.model.layout
        if self.shared(layout) == layout.names:
            return (), Params(theta)
        return Params(theta), Params(theta[self._places(client)])

    def _places(self, client: Client) -> Tensor:
        layout = client.model.layout
        return layout.index(self.shared(layout), client.model.theta.device)

    def weights(self, roster: Roster, cohort: Tensor) -> Tensor:
        """[K] weights of the cohort's uploads, of any positive sum: here its training examples."""
        return torch.ones_like(cohort) if self.uniform else roster.sizes[cohort]

    def start(self, roster: Roster) -> Tree:
        return SharedParams(roster.theta[roster.layout.index(self.shared(roster.layout), roster.theta.device)])

    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        return SharedParams(server.theta)

    def aggregate(self, roster: Roster, server: Tree, cohort: Tensor, uploads: Tree) -> Tree:
        theta = weighted_mean(uploads.theta, self.weights(roster, cohort))
        if self.noise:
            layout = roster.layout
            learned = layout.trainable_on(theta.device)[layout.index(self.shared(layout), theta.device)]
            draw = key(roster.seed, "average.noise", roster.round, device=theta.device)
            theta = theta + self.noise * learned * normal(draw, theta)
        return SharedParams(theta)

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        weights = self.weights(roster, cohort).to(roster.theta.dtype)
        row = torch.zeros(len(roster), dtype=weights.dtype, device=weights.device)
        return row.index_copy(0, cohort, weights / weights.sum())


class GraphMethod(Method):
    """The server half of a method that mixes the clients' own models, `server.theta: [N, d]`, along a graph."""

    origin: ClassVar[Origin] = "learned"

    @abstractmethod
    def graph(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor:
        """[K, N], or [L, K, N] with one graph a layer: rows of the cohort, each summing to one."""

    def send(self, roster: Roster, server: Tree, cohort: Tensor) -> Tree:
        return Params(mix(self.graph(roster, server, cohort), server.theta, roster.layout))

    def relation(self, roster: Roster, server: Tree, cohort: Tensor) -> Tensor | None:
        return self.graph(roster, server, roster.everyone)

    def init_client(self, client: Client) -> Tree:
        return Params(client.model.theta)

    def personalise(self, client: Client, state: Tree, received: Tree) -> dict[str, Tree]:
        return {"own": state, "mixed": received}
