"""The trainer that takes fused steps: plain SGD with quadratic penalties, for many clients at once."""

import math

from torch import Tensor

from ...core.batches import Batch, Examples
from ...core.client import Alignment, Client, Quadratic, Request
from ...core.metrics import positive
from ...core.optimiser import SGD
from .descent import Fused
from .step import Batches, Descent


class FusedTrainer:
    """Trains a model in its fused form."""

    def __init__(self, form: Fused) -> None:
        self._form = form

    def refuses(self, request: Request) -> str:
        """Why a request has no fused form; empty if it has one."""
        if request.objective is not None:
            return "an objective of the method's own"
        if not isinstance(request.penalty, Quadratic | Alignment | None):
            return "a penalty of the method's own"
        if isinstance(request.penalty, Alignment) and set(request.moving) != self._form.layout.trainable_names:
            return "an alignment where only a part of the model is trained"
        if not isinstance(request.optimiser, SGD) or request.optimiser.momentum:
            return "an optimiser other than plain SGD"
        bound = request.clip < math.inf and (request.penalty is not None or self._form.repeats)
        return "a bound on the gradient of a penalty, or of a recurrent layer" if bound else ""

    def train(self, client: Client, request: Request) -> Tensor:
        """The trained theta: [d]; under `torch.func.vmap` all clients are trained at once."""
        shuffler, penalty, optimiser = client.shuffler, request.penalty, request.optimiser
        assert isinstance(optimiser, SGD)
        assert isinstance(penalty, Quadratic | Alignment | None)
        (x, y, weights), plan = shuffler.pool, shuffler.plan(request.draw)
        importance = None if weights is None else shuffler.importance(shuffler.rows.at[plan.place])
        batches = Batches(shuffler.rows.at, *plan, client.class_weights, importance)
        descent = Descent(optimiser.lr, optimiser.weight_decay, clip=request.clip)
        if isinstance(penalty, Quadratic):
            descent = descent._replace(pull=descent.pull + penalty.pull, slope=penalty.slope)
        elif isinstance(penalty, Alignment):
            descent = descent._replace(slope=-penalty.pull * penalty.goal, aligned=True)
        moving = frozenset(request.moving)
        return self._form.descend_alone(request.theta, x, y, batches, descent, moving)

    def gradient(self, client: Client, theta: Tensor, batch: Batch | Examples) -> Tensor:
        """[d] gradient of the mean loss at theta: [d]; under `torch.func.vmap` of all clients at once."""
        weight = batch.x.new_ones(len(batch.y), dtype=theta.dtype) if batch.weight is None else batch.weight
        share = weight / positive(weight.sum())
        if isinstance(batch, Batch) and batch.importance is not None:
            share = share * batch.importance
        return self._form.gradient_alone(theta, batch.x, batch.y, share, client.class_weights)
