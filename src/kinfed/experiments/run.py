"""Run: the result of training."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.attack import Attack
from ..core import trees
from ..core.graph import Origin
from ..core.history import History
from ..core.method import Method
from ..core.model import Model
from ..core.sharing import Sharing
from ..core.summary import Summary
from ..core.tasks import Classification, Forecasting
from ..data.federation import Federation
from ..errors import UsageError
from ..metrics.classification import count_correct, reweighted_accuracy
from ..metrics.graphs import edge_auroc, group_weights


@dataclass
class Run:
    """A finished run."""

    method: Method
    federation: Federation
    model: Model
    history: History
    origin: Origin  # of the relation
    seed: int
    how: dict[str, Any]  # executor, workers, chunk, onednn, precision, device: the settings that affect rounding
    reason: str  # why this executor was chosen
    seconds: float
    attack: Attack | None = None

    def __repr__(self) -> str:
        return f"Run({self.method}, {len(self.federation)} clients, {self.history.done} rounds, seed {self.seed})"

    @property
    def executor(self) -> str:
        """The name of the executor that ran the clients."""
        return str(self.how["executor"])

    @property
    def sharing(self) -> Sharing:
        """Which tensors of the model travelled, which stayed with the clients, and which never moved."""
        return Sharing.of(self.method, self.model.layout)

    @property
    def relation(self) -> Tensor | None:
        """[N, N] or [L, N, N] the relation at the chosen model's selected round, if models are mixed."""
        if not self.history.relations:
            return None
        at = self.history.rounds.index(self.history.select(self.history.chosen))
        return self.history.relations[at]

    def theta(self, client: int | str) -> Tensor:
        """[d] one client's personalised model, by position or name: of the kind and round that validation prefers."""
        return self.history.models["theta"][client_index(self.federation.names, client)].cpu()

    def load_model(self, client: int | str) -> nn.Module:
        """The client's personalised model as a plain module in evaluation mode: what was scored."""
        i = client_index(self.federation.names, client)
        personal = trees.named({name: values[i].cpu() for name, values in self.history.models.items()})
        return self.method.export(self.model, personal)

    def reweighted_accuracy(self) -> Tensor:
        """[N] accuracy of each client's model on all clients' test examples, weighted by its shares of labels.

        The shares are those of its training examples. This is pFedGraph's protocol, which passes all clients' test
        examples through every model. Raises UsageError if the task has no classes.
        """
        task = self.federation.task
        if not isinstance(task, Classification):
            raise UsageError("reweighted accuracy needs class labels; this task has none")
        federation = self.federation.to(torch.device("cpu"))
        rows = torch.cat(list(federation.rows["test"])).unique()
        x, y = federation.x[rows], federation.y[rows]
        counts = federation.class_counts(["train"]).double()
        correct = []
        with torch.no_grad():
            for i in range(len(federation)):
                module = self.load_model(i)
                outputs = torch.cat([module(part) for part in x.split(512)])
                correct.append(count_correct(outputs, y, task.classes))
        total = torch.bincount(y, minlength=task.classes)
        return reweighted_accuracy(torch.stack(correct), total, counts / counts.sum(1, keepdim=True))

    def _pooled(self, model: str) -> dict[str, float]:
        """The test metric over the test examples of all clients pooled, if it is a mean over examples."""
        if isinstance(self.federation.task, Forecasting):
            return {}
        sizes = torch.tensor([len(rows) for rows in self.federation.rows["test"]]).double()
        values = self.history.test(model).double()
        known = ~values.isnan()
        return {"pooled": float((values * sizes)[known].sum() / sizes[known].sum())}

    def _by_class(self) -> dict[str, Any]:
        """See `History.by_class`."""
        task = self.federation.task
        if not isinstance(task, Classification) or not task.by_class:
            return {}
        return self.history.by_class(self.federation.class_names, self.federation.class_counts(["test"]).cpu())

    def summary(self) -> Summary:
        """The results as plain numbers: test scores per named model, the relation's quality, bytes, seconds."""
        history, task, federation = self.history, self.federation.task, self.federation
        cautions = [why for why in (self.method.caution, federation.caution) if why]
        scores = {name: score | self._pooled(name) for name, score in history.summary().items()}
        if isinstance(task, Classification) and task.reweighted and history.models:  # none where they stay at sites
            scores[history.chosen]["reweighted"] = float(self.reweighted_accuracy().nanmean())
        return Summary.of(
            history,
            method=type(self.method).__name__,
            seed=self.seed,
            parameters=self.model.layout.parameters,
            scores=scores,
            relation=self._quality(),
            **self._by_class(),
            attack=self._attacked(),
            **self.how,
            reason=self.reason,
            seconds=round(self.seconds, 3),
            sharing=self.sharing.summary(history.bytes_down, history.bytes_up, history.done),
            leaking=bool(cautions),
            caution="; ".join(cautions),
            names=list(federation.names),
            shape=list(federation.x.shape[1:]),
            outputs=federation.outputs,
            classes=list(federation.classes),
            scale=dict(federation.scale),
        )

    def _attacked(self) -> dict[str, Any] | None:
        """The attack, the attackers, and the scores of the others."""
        if self.attack is None:
            return None
        attackers = self.attack.attackers(self.federation.names, self.seed).tolist()
        return {
            "name": type(self.attack).__name__,
            **asdict(self.attack),
            "attackers": [name for name, lies in zip(self.federation.names, attackers, strict=True) if lies],
            "scores": self.history.under_attack(),
        }

    def _quality(self) -> dict[str, Any] | None:
        """Where the relation comes from and how well it finds hidden groups; None if no models are mixed."""
        relation, groups = self.relation, self.federation.groups
        if relation is None:
            return None
        result: dict[str, Any] = {"origin": self.origin}
        if groups is not None:
            quality = {"auroc": edge_auroc(relation, groups), **group_weights(relation, groups)._asdict()}
            # Values that are undefined with a single group, or groups of one, are left out.
            result |= {name: value for name, value in quality.items() if math.isfinite(value)}
        return result


def client_index(names: Any, client: int | str) -> int:
    """The position of a client given by position or by name."""
    if isinstance(client, str) and client in names:
        return int(list(names).index(client))
    if isinstance(client, int) and -len(names) <= client < len(names):
        return client
    raise UsageError(f"there is no client {client!r}; the {len(names)} clients are named {names[0]} to {names[-1]}")
