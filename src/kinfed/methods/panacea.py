"""Panacea: a graph network over the clients' graph writes each client's model (Lin et al., 2025, Algorithm 1)."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import UsageError
from ..hypernetwork import Dense, Hypernetwork, clip, dense, perceptron
from ..method import Params
from ..optimiser import OPTIMISERS, Memory

CHOICES = {
    "aggregation": ("row", "sym", "sage", "none"),
    "encoder": ("dense", "sparse"),
    "initial": ("learned", "random", "features", "spectral"),
    "mode": ("target", "frozen"),
    "sign": ("descent", "printed"),
    "optimiser": tuple(OPTIMISERS),
}


class Network(NamedTuple):
    """The graph hypernetwork: the paper's psi."""

    embedding: Tensor  # [N, m] what the graph network starts from
    encoder: Dense  # its layers
    decoder: Dense  # an MLP; its last layer is one linear head a tensor, side by side
    generator: Dense  # before the inner products that rebuild the graph; no layers without `project`


class Server(NamedTuple):
    """What the server remembers."""

    network: Network
    memory: Memory  # the optimiser's


@dataclass(frozen=True)
class Panacea(Hypernetwork):
    r"""$\theta_i = \theta_0 + M(z_i)$, $Z = f(P \cdots f(P H W_1) \cdots W_L)$, $P = D^{-1}(A + I)$.

    The server descends on $\frac{1}{2K} \sum_i \|\tilde\theta_i - \theta_i\|^2 + \lambda_d L_d$ over the cohort, where
    $\tilde\theta_i$ is the model after local training and $L_d$ the cross-entropy of $\sigma(z_u^\top z_v)$ with the
    links (Equations 3 to 5). `sign="printed"` moves along the printed first term, which is ascent; `mode="frozen"`
    pulls the change of the first of the `steps` back in all of them, as printed, and overshoots. Panacea-GN is
    `reconstruction=0`, Panacea-MLP is that with `aggregation="none"`. Links are the graph's positive weights; a graph
    with weights other than 0 and 1 aggregates by weight.
    """

    embedding: int = 100  # m; `initial="features"` brings its own
    hidden: int = 100  # width of every layer
    encoder_layers: int = 3
    decoder_layers: int = 3  # heads included
    aggregation: str = "row"  # "row": mean with oneself; "sym": D^-1/2 (A + I) D^-1/2; "sage"; "none": P = I
    encoder: str = "dense"  # "sparse" passes messages along edges alone; it needs kinfed[sparse]
    initial: str = "learned"  # H: "learned" or fixed "random" numbers, given "features", "spectral": of P
    features: tuple[tuple[float, ...], ...] | None = None  # [N, m] in the clients' order, for initial="features"
    residual: bool = True  # the network writes what is added to the common initial model
    lr: float = 0.1  # the paper's alpha
    optimiser: str = "sgd"
    steps: int = 10  # of the server in a round: the paper's K_s
    mode: str = "target"
    sign: str = "descent"
    clip: float = 50.0  # norm of the server's gradient
    reconstruction: float = 0.1  # weight of L_d: the paper's lambda_d
    balance: bool = False  # links weigh as much as non-links in L_d
    project: bool = False  # a two-layer MLP, trained by L_d alone, before the inner products
    all_pairs: int = 512  # most clients for which L_d looks at every pair
    pairs: int = 8192  # it looks at in each step otherwise
    origin = "given"

    def __post_init__(self):
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"panacea: {name} must be one of {', '.join(known)}; got '{getattr(self, name)}'")
        for name in ("embedding", "hidden", "encoder_layers", "decoder_layers", "steps", "pairs"):
            if getattr(self, name) < 1:
                raise UsageError(f"panacea: {name} must be at least 1; got {getattr(self, name)}")
        for name, least in (("lr", "positive"), ("clip", "positive"), ("reconstruction", "zero or more")):
            value = getattr(self, name)
            if not 0 <= value < float("inf") or (value == 0 and least == "positive"):
                raise UsageError(f"panacea: {name} must be finite and {least}; got {value}")
        if (self.features is not None) != (self.initial == "features"):
            raise UsageError(
                "panacea: initial='features' and features=[[...], ...], one row a client, go together; "
                f"got initial='{self.initial}' and {'no ' if self.features is None else ''}features"
            )
        if self.features is not None and len({len(row) for row in self.features} - {0}) != 1:
            raise UsageError("panacea: features needs one row a client, all of one length of at least 1")
        if self.encoder == "sparse" and find_spec("torch_geometric") is None:
            raise UsageError(
                "panacea: encoder='sparse' needs PyTorch Geometric, which is not installed; "
                "pip install 'kinfed[sparse]', or use encoder='dense'"
            )

    @property
    def _optimiser(self):
        return OPTIMISERS[self.optimiser](lr=self.lr)

    def start(self, roster):
        links = self._links(roster)
        embedding = self._embedding(roster, links)
        draw, like = roster.generator("panacea"), roster.theta
        widths = [embedding.shape[1]] + [self.hidden] * self.encoder_layers
        both = 2 if self.aggregation == "sage" else 1
        encoder = dense([(both * a, b) for a, b in pairwise(widths)], draw, like)
        widths = [self.hidden] * self.decoder_layers + [roster.layout.parameters]
        decoder = dense(pairwise(widths), draw, like)
        generator = dense([(self.hidden, self.hidden)] * (2 if self.project else 0), draw, like)
        network = Network(embedding, encoder, decoder, generator)
        if self.residual:
            z = self._encode(network, self._aggregate(links))
            network = network._replace(decoder=_scaled(decoder, z, roster))
        return Server(network, self._optimiser.init(tree_leaves(network)))

    def _links(self, roster):
        """[N, N] the graph's weights, 0 on the diagonal; None if nothing uses them."""
        if self.aggregation == "none" and not self.reconstruction and self.initial != "spectral":
            return None
        if roster.graph is None:
            raise UsageError(
                "panacea needs a graph of the clients: set federation.graph, take a data set that has one such as "
                "'synthetic', or run without a graph by aggregation='none' and reconstruction=0"
            )
        weights, count = roster.graph.weights.to(roster.theta), len(roster)
        if weights.shape != (count, count):
            raise UsageError(
                f"panacea needs one graph [{count}, {count}] for {count} clients; got {list(weights.shape)}"
            )
        links = weights - torch.diag(weights.diagonal())
        if (self.aggregation == "sym" or self.initial == "spectral") and not torch.equal(links, links.T):
            raise UsageError(
                "panacea: aggregation='sym' and initial='spectral' need a symmetric graph, and this one is not; "
                "use aggregation='row' with another initial, or symmetrise the graph"
            )
        return links

    def _embedding(self, roster, links):
        """[N, m] what the graph network starts from."""
        if self.initial == "features":
            if len(self.features) != len(roster):
                raise UsageError(
                    f"panacea: {len(roster)} clients need as many features; got {len(self.features)} rows "
                    "(features do not go with clients that join late)"
                )
            return roster.theta.new_tensor(self.features)
        noise = roster.normal("panacea.embedding", self.embedding)
        if self.initial != "spectral":
            return noise
        # P is similar to a symmetric matrix, whose eigenvectors are found reliably; u is one of P's.
        root = (1 + links.sum(1)).rsqrt()
        symmetric = root[:, None] * (links + torch.eye(len(links)).to(links)) * root
        u = root[:, None] * torch.linalg.eigh(symmetric).eigenvectors.flip(1)[:, : self.embedding]
        u = u / u.square().mean(0).sqrt()
        return u * (noise[:, : u.shape[1]] * u).sum(0).sign()  # a sign that does not hang on the clients' order

    def _aggregate(self, links):
        """P as a function of tables [N, m]."""
        if self.aggregation == "none":
            return lambda table: table
        if self.aggregation == "sage":  # oneself has a weight matrix of its own
            mean = links / links.sum(1, keepdim=True).clamp(min=torch.finfo(links.dtype).tiny)
        else:
            itself = links + torch.eye(len(links)).to(links)
            degree = itself.sum(1, keepdim=True)
            mean = itself / degree if self.aggregation == "row" else itself * degree.rsqrt() * degree.rsqrt().T
        if self.encoder == "dense":
            return lambda table: mean @ table
        to, source = mean.nonzero().T
        message = import_module("torch_geometric.nn").SimpleConv(aggr="sum")  # an optional part
        edges, weight = torch.stack((source, to)), mean[to, source]
        return lambda table: message(table, edges, weight)

    def _encode(self, network, aggregate):
        """[N, e] embeddings that know their neighbourhood, Z."""
        x, last = network.embedding, self.encoder_layers - 1
        for layer, (weight, bias) in enumerate(zip(*network.encoder, strict=True)):
            near = aggregate(x)
            x = torch.cat((x, near), 1) if self.aggregation == "sage" else near
            x = x @ weight.T + bias
            x = x.relu() if layer < last else x
        return x

    def _decode(self, roster, network, z):
        """[K, d'] models from z: [K, e]."""
        theta = perceptron(z, *network.decoder)
        return theta + roster.theta[roster.layout.trainable.to(theta.device)] if self.residual else theta

    def _reconstruct(self, network, z, links, pairs):
        """[] cross-entropy of the links with the inner products of z: [N, e], over pairs: [2, *] or all if None."""
        if not self.reconstruction or len(z) < 2:
            return z.new_zeros(())
        z = perceptron(z, *network.generator) if self.project else z
        balance = None
        if self.balance:
            edges = (links > 0).sum()
            balance = ((len(z) * (len(z) - 1) - edges) / edges.clamp(min=1)).to(z.dtype)
        if pairs is not None:
            u, v = pairs
            score, link, weight = (z[u] * z[v]).sum(1), links[u, v] > 0, None
        else:
            score, link, weight = z @ z.T, links > 0, 1 - torch.eye(len(z)).to(z)  # A_uu says nothing
        loss = F.binary_cross_entropy_with_logits(score, link.to(z.dtype), weight, reduction="sum", pos_weight=balance)
        return loss / (score.numel() if weight is None else weight.sum())

    def _pairs(self, roster, draw):
        """[2, pairs] two different clients each, drawn by name so that order means nothing; None for all."""
        count = len(roster)
        if count <= self.all_pairs:
            return None
        u = torch.randint(count, (self.pairs,), generator=draw)
        v = (u + 1 + torch.randint(count - 1, (self.pairs,), generator=draw)) % count
        return roster.tags.argsort()[torch.stack((u, v)).to(roster.tags.device)]

    def neighbours(self, roster):
        return self._links(roster)

    def admit(self, roster, server, newcomers):
        server = super().admit(roster, server, newcomers)
        if self.initial != "features":
            return server
        return server._replace(network=server.network._replace(embedding=self._embedding(roster, None)))

    def send(self, roster, server, cohort):
        z = self._encode(server.network, self._aggregate(self._links(roster)))
        return Params(self._decode(roster, server.network, z[cohort]))

    def aggregate(self, roster, server, cohort, uploads):
        links = self._links(roster)
        aggregate, draw = self._aggregate(links), roster.generator("panacea.pairs")
        values, structure = tree_flatten(server.network)
        memory, change = server.memory, None
        for _ in range(self.steps):
            pairs = self._pairs(roster, draw)

            def generate(network, pairs=pairs):
                z = self._encode(network, aggregate)
                return self._decode(roster, network, z[cohort]), self._reconstruct(network, z, links, pairs)

            (theta, apart), pull_back = vjp(generate, tree_unflatten(values, structure))
            if change is None or self.mode == "target":
                change = (uploads.theta - theta) / len(cohort)
            downhill = change if self.sign == "descent" else -change
            slopes = pull_back((-downhill, torch.full_like(apart, self.reconstruction)))[0]
            if self.initial != "learned":
                slopes = slopes._replace(embedding=torch.zeros_like(slopes.embedding))
            values, memory = self._optimiser.step(values, clip(tree_leaves(slopes), self.clip), memory)
        return Server(tree_unflatten(values, structure), memory)

    def notes(self, roster, server, cohort, sent, uploads):
        links = self._links(roster)
        z = self._encode(server.network, self._aggregate(links))
        away = uploads.theta - self._decode(roster, server.network, z[cohort])
        found = super().notes(roster, server, cohort, sent, uploads)
        found["distance"] = roster.note(cohort, away.square().sum(1) / 2)  # its share of the first term
        if self.reconstruction:
            pairs = self._pairs(roster, roster.generator("panacea.notes"))
            found["reconstruction"] = self._reconstruct(server.network, z, links, pairs)
        return found


def _scaled(decoder, z, roster):
    """The decoder with heads that write, for z: [N, e], tensors with a tenth of the spread of the initial model's."""
    x = perceptron(z, decoder.weights[:-1], decoder.biases[:-1]).relu() if len(decoder.weights) > 1 else z
    mean, square = x.mean(0), x.T @ x / len(x)  # so no table of N models is made
    head, parts, at = decoder.weights[-1], [], 0
    for entry in roster.layout.entries:
        if entry.trainable:
            rows = head[at : at + entry.shape.numel()]  # [*, hidden]
            at += len(rows)
            variance = ((rows @ square) * rows).sum(1).mean() - (rows @ mean).mean().square()
            wanted = 0.1 * roster.theta[entry.at].std(correction=0)
            parts.append(rows * wanted / variance.clamp(min=1e-12).sqrt())
    bias = torch.zeros_like(decoder.biases[-1])
    return Dense((*decoder.weights[:-1], torch.cat(parts)), (*decoder.biases[:-1], bias))
