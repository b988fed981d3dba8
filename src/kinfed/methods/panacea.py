"""Panacea: a graph network over the clients' graph writes each client's model (Lin et al., 2025, Algorithm 1)."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch.func import vjp
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..core.method import Params
from ..core.optimiser import OPTIMISERS, OptState, shorten
from ..core.seeding import fold, key
from ..core.tables import put
from ..core.trees import Like, PerClient, Shared
from ..errors import UsageError
from .parts.hypernetwork import Dense, Form, Hypernetwork, check_size, dense, perceptron

CHOICES = {
    "aggregation": ("row", "sym", "sage", "none"),
    "encoder": ("dense", "sparse"),
    "initial": ("learned", "random", "features", "spectral"),
    "mode": ("target", "frozen"),
    "sign": ("descent", "printed"),
    "optimiser": tuple(OPTIMISERS),
    "heads": ("full", "chunked", "adapters"),
}


class Network(NamedTuple):
    """The graph hypernetwork: the paper's psi."""

    embedding: PerClient  # [N, m] what the graph network starts from
    encoder: Dense  # its layers
    decoder: Dense  # an MLP; its last layer is one linear head a tensor, side by side
    generator: Dense  # before the inner products that rebuild the graph; no layers without `project`
    chunks: Shared  # [C, m] what tells the C chunks of a model apart; [0, 0] without


class Server(NamedTuple):
    """What the server remembers."""

    network: Network
    memory: Annotated[OptState, Like("network")]  # the optimiser's


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
    heads: str = "full"  # a linear head a tensor; "chunked": one head for all chunks; "adapters": of low rank
    chunk: int = 4096  # numbers in such a chunk
    rank: int = 4  # of such an adapter
    memory: float = 4.0  # GiB that the network, its gradient and its optimiser may take; more is refused
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
    fan_out: int = 0  # neighbours that a client hears in a step of training, drawn anew; 0: all
    origin = "given"

    def __post_init__(self):
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"panacea: {name} must be one of {', '.join(known)}; got '{getattr(self, name)}'")
        for name in ("embedding", "hidden", "encoder_layers", "decoder_layers", "steps", "pairs", "chunk", "rank"):
            if getattr(self, name) < 1:
                raise UsageError(f"panacea: {name} must be at least 1; got {getattr(self, name)}")
        for name in ("lr", "clip", "memory", "reconstruction", "fan_out"):
            value, least = getattr(self, name), "zero or more" if name in ("reconstruction", "fan_out") else "positive"
            if not 0 <= value < float("inf") or (value == 0 and least == "positive"):
                raise UsageError(f"panacea: {name} must be finite and {least}; got {value}")
        if self.heads == "adapters" and not self.residual:
            raise UsageError("panacea: heads='adapters' are added to the common initial model; leave residual=true")
        if self.heads == "chunked" and self.decoder_layers < 2:
            raise UsageError("panacea: heads='chunked' needs decoder_layers of 2 or more, or all chunks would be alike")
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
        form, count = self._form(roster.layout), 0
        size = len(form)
        if self.heads == "chunked":
            count, size = -(-size // self.chunk), min(self.chunk, size)
        widths = [self.hidden + self.embedding * (count > 0)] + [self.hidden] * (self.decoder_layers - 1) + [size]
        copies = 2 + 2 * (self.optimiser == "adam")  # weights and gradient, and what the optimiser remembers
        check_size("panacea", pairwise(widths), copies, self.memory, like, "heads='chunked' or 'adapters'")
        decoder = dense(pairwise(widths), draw, like)
        chunks = torch.randn(count, self.embedding if count else 0, generator=draw).to(like)
        generator = dense([(self.hidden, self.hidden)] * (2 if self.project else 0), draw, like)
        network = Network(embedding, encoder, decoder, generator, chunks)
        if self.residual:
            asked = self._ask(network, self._encode(network, self._aggregate(links)))
            spreads = form.spreads(like)
            if count:  # whose head is the same for all tensors
                numbers = torch.tensor([size for size, _ in spreads]).to(like)
                stds = torch.stack([std for _, std in spreads])
                spreads = [(size, (numbers @ stds.square() / numbers.sum()).sqrt())]
            network = network._replace(decoder=_scaled(decoder, asked.flatten(0, -2), spreads))
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
        _, u = self._spectrum(links)
        return u * (noise[:, : u.shape[1]] * u).sum(0).sign()  # a sign that does not hang on the clients' order

    def _spectrum(self, links):
        """[m] the leading eigenvalues of P and [N, m] its eigenvectors, of mean square 1."""
        # P is similar to a symmetric matrix, whose eigenvectors are found reliably; u is one of P's.
        root = (1 + links.sum(1)).rsqrt()
        values, vectors = torch.linalg.eigh(root[:, None] * (links + torch.eye(len(links)).to(links)) * root)
        u = root[:, None] * vectors.flip(1)[:, : self.embedding]
        return values.flip(0)[: self.embedding], u / u.square().mean(0).sqrt()

    def _sample(self, roster, links, step):
        """[N, N] links of which each client keeps `fan_out`, drawn by name, so that its mean is right on average."""
        if links is None:
            return None
        start = key(roster.seed, "panacea.neighbours", roster.round, step, device=roster.tags.device)
        lots = fold(fold(start, roster.tags[:, None]), roster.tags) & 0x3FFFFFFFFFFFFFFF
        kept = torch.where(links != 0, lots, 1 << 62).argsort(1).argsort(1) < self.fan_out
        count = (links != 0).sum(1, keepdim=True)
        return links * kept * (count / self.fan_out).clamp(min=1)

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

    def _form(self, layout):
        """How what the decoder says becomes the d entries of a model."""
        self.check_written(layout)
        return Form(layout.entries, self.rank if self.heads == "adapters" else 0)

    def _ask(self, network, z):
        """[K, e] what the decoder sees, from z: [K, e]; [K, C, e + m] of C chunks."""
        count = len(network.chunks)
        if not count:
            return z
        return torch.cat((z[:, None].expand(-1, count, -1), network.chunks.expand(len(z), -1, -1)), -1)

    def _decode(self, roster, network, z):
        """[K, d'] models from z: [K, e]."""
        form = self._form(roster.layout)
        said = perceptron(self._ask(network, z), *network.decoder).flatten(1)[:, : len(form)]
        theta = form.assemble(said)
        return theta + roster.theta if self.residual else theta

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
        if count <= max(self.all_pairs, 1):
            return None
        u = torch.randint(count, (self.pairs,), generator=draw)
        v = (u + 1 + torch.randint(count - 1, (self.pairs,), generator=draw)) % count
        return roster.tags.argsort()[torch.stack((u, v)).to(roster.tags.device)]

    def neighbours(self, roster):
        return self._links(roster)

    def add_clients(self, roster, server, newcomers):
        """As above; embeddings that are not learned are found for a newcomer as they were for the others.

        Of `spectral` ones that is the extension of Nyström: the mean of its neighbours' divided by the eigenvalue (by 1
        where that is below 0.1, which would only make noise large).
        """
        server = super().add_clients(roster, server, newcomers)
        embedding = server.network.embedding
        if self.initial == "features":
            embedding = self._embedding(roster, None)
        if self.initial == "spectral":
            known, links = roster.others(newcomers), self._links(roster)
            values, _ = self._spectrum(links[known][:, known])
            linked = links[newcomers][:, known].sum(1, keepdim=True) > 0
            scale = torch.where((values.abs() >= 0.1) & linked, 1 / values, 1.0)
            embedding = put(embedding, newcomers, embedding[newcomers] * scale)
        return server._replace(network=server.network._replace(embedding=embedding))

    def send(self, roster, server, cohort):
        z = self._encode(server.network, self._aggregate(self._links(roster)))
        return Params(self._decode(roster, server.network, z[cohort]))

    def aggregate(self, roster, server, cohort, uploads):
        links, draw = self._links(roster), roster.generator("panacea.pairs")
        values, structure = tree_flatten(server.network)
        memory, change = server.memory, None
        whole = None if self.fan_out else self._aggregate(links)
        for step in range(self.steps):
            pairs = self._pairs(roster, draw)
            aggregate = whole or self._aggregate(self._sample(roster, links, step))

            def generate(network, pairs=pairs, aggregate=aggregate):
                z = self._encode(network, aggregate)
                return self._decode(roster, network, z[cohort]), self._reconstruct(network, z, links, pairs)

            (theta, apart), pull_back = vjp(generate, tree_unflatten(values, structure))
            if change is None or self.mode == "target":
                change = (uploads.theta - theta) / len(cohort)
            downhill = change if self.sign == "descent" else -change
            slopes = pull_back((-downhill, torch.full_like(apart, self.reconstruction)))[0]
            if self.initial != "learned":
                slopes = slopes._replace(embedding=torch.zeros_like(slopes.embedding))
            values, memory = self._optimiser.step(values, shorten(tree_leaves(slopes), self.clip), memory)
        return Server(tree_unflatten(values, structure), memory)

    def diagnostics(self, roster, server, cohort, sent, uploads):
        links = self._links(roster)
        z = self._encode(server.network, self._aggregate(links))
        away = uploads.theta - self._decode(roster, server.network, z[cohort])
        found = super().diagnostics(roster, server, cohort, sent, uploads)
        found["distance"] = roster.note(cohort, away.square().sum(1) / 2)  # its share of the first term
        if self.reconstruction:
            pairs = self._pairs(roster, roster.generator("panacea.notes"))
            found["reconstruction"] = self._reconstruct(server.network, z, links, pairs)
        return found


def _scaled(decoder, asked, spreads):
    """The decoder with heads that say, for asked: [*, e], so many numbers in a row with such standard deviations."""
    x = perceptron(asked, decoder.weights[:-1], decoder.biases[:-1]).relu() if len(decoder.weights) > 1 else asked
    mean, square = x.mean(0), x.T @ x / len(x)  # so no table of N models is made
    parts = []
    for rows, (_, wanted) in zip(decoder.weights[-1].split([size for size, _ in spreads]), spreads, strict=True):
        variance = ((rows @ square) * rows).sum(1).mean() - (rows @ mean).mean().square()
        parts.append(rows * wanted / variance.clamp(min=1e-12).sqrt())
    bias = torch.zeros_like(decoder.biases[-1])
    return Dense((*decoder.weights[:-1], torch.cat(parts)), (*decoder.biases[:-1], bias))
