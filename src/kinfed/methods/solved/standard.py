"""Standard: each client fits a model of scikit-learn to its own rows, and needs nobody else."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.client import Client
from ...core.field_checks import In
from ...core.method import Params
from ...core.mixins import Advises, Solves
from ...core.tasks import Classification, Counts, Forecasting, Quantiles, Regression
from ...errors import UsageError
from ...models.changes import Since
from ...models.estimator import Estimator
from ...models.trees import NOWHERE, Trees
from ..local import Local
from .monotone_leaves import read_signs
from .partial_pooling import model_of

Array = NDArray[np.float64]

FEWEST = 40  # rows of a client from which its trees split
PSEUDO = 0.1  # rows of all classes alike that are added to a client's where the shares of labels are its model
UNSEEN = math.log(1e-6)  # the output of a class that a client has no row of, where the others' are about 0
RARE = 1e-3  # of the mean of all counts, the least that a client's mean is taken for


class Line(NamedTuple):
    """A linear model of one client."""

    weight: Array  # [d, k]
    bias: Array  # [k]

    def answer(self, x: Array) -> Array:
        """[n, k] outputs for x: [n, d]."""
        return x @ self.weight + self.bias


class Forest(NamedTuple):
    """Boosted trees of one client: each of the models has trees for some of the outputs."""

    models: Sequence[Any]  # of scikit-learn
    places: Sequence[Any]  # of each, the outputs to which its trees add
    bias: Array  # [k] what the models' own outputs are added to

    def answer(self, x: Array) -> Array:
        """[n, k] outputs for x: [n, d], in which NaN is what is missing."""
        outputs = np.tile(self.bias, (len(x), 1))
        for model, places in zip(self.models, self.places, strict=True):
            outputs[:, places] += model._raw_predict(x)
        return outputs

    def fill(self, tensors: Mapping[str, Array], lanes: int) -> Array:
        """[k] what is added to all rows; the nodes [T, J] and leaves [T, L, k] of `Trees` are written in place.

        Trees of several outputs take turns, in so many `lanes`.
        """
        bias = self.bias.copy()
        for model, places in zip(self.models, self.places, strict=True):
            bias[places] += model._baseline_prediction.ravel()
            for step, grown in enumerate(model._predictors):
                for tree, place in zip(grown, places, strict=True):
                    t = step * lanes + place % lanes
                    nodes = (tensors[name][t] for name in ("column", "threshold", "lost"))
                    _write_tree(tree.nodes, 0, 0, (*nodes, tensors["leaf"][t, :, place]))
        return bias


def _write_tree(nodes: Any, at: int, j: int, places: tuple[Array, ...]) -> None:
    """Write scikit-learn's tree, from its node `at` on, into a heap from node j on: column, threshold, lost and leaf.

    A leaf that is not at the bottom of the heap stands in all leaves below its place, because nothing splits there.
    """
    (column, threshold, lost, leaf), node = places, nodes[at]
    if node["is_leaf"]:
        level = (j + 1).bit_length() - 1
        below = len(leaf) >> level  # leaves of the heap below node j
        first = (j + 1 - (1 << level)) * below
        leaf[first : first + below] = node["value"]
        return
    column[j], lost[j] = node["feature_idx"], not node["missing_go_to_left"]
    threshold[j] = min(node["num_threshold"], NOWHERE)
    _write_tree(nodes, int(node["left"]), 2 * j + 1, places)
    _write_tree(nodes, int(node["right"]), 2 * j + 2, places)


def lanes_of(task: Any, outputs: int) -> int:
    """How many trees a step of boosting grows: one for each output; two classes need one."""
    return 1 if isinstance(task, Classification) and outputs == 2 else outputs


def constants_of(task: Any, y: Any, w: Array | None) -> Array:
    """[k] the outputs that answer all rows alike: the mean of targets y: [n, k], or the shares of labels y: [n]."""
    if isinstance(task, Classification):  # logarithms, with a few of every class among them
        count = np.bincount(y, w, task.classes) + PSEUDO / task.classes
        return np.log(count / count.sum())
    mean = np.average(y, 0, w)
    return log_counts(mean, task.mean) if isinstance(task, Counts) else mean


def log_counts(counts: Array, middle: float) -> Array:
    """The logarithms of expected counts over `middle`, the mean of all, none of them below that of `RARE`."""
    return np.log(np.maximum(counts / middle, RARE))


def _is_constant(task: Any, y: Any, w: Array | None) -> bool:
    """Whether labels are of one class, or counts all zero, as nothing can be fitted to these."""
    if isinstance(task, Classification):
        return len(np.unique(y)) < 2
    return isinstance(task, Counts) and not np.average(y, 0, w) > 0


def fit_line(task: Any, x: Array, y: Any, penalty: float, w: Array | None = None) -> Line:
    """A ridge of rows x: [n, d], y: [n, k] with weights w: [n], or a Poisson or a logistic regression.

    Counts are y: [n, 1], and outputs logarithms of these over the mean of all; labels are y: [n]. With an infinite
    penalty, or of constant rows, only `constants_of` is left.
    """
    if math.isinf(penalty) or _is_constant(task, y, w):
        constants = constants_of(task, y, w)
        return Line(np.zeros((x.shape[1], len(constants))), constants)
    if isinstance(task, Classification):
        return _fit_logistic(x, y, task.classes, penalty, w)
    if isinstance(task, Counts):
        return _fit_poisson(x, y[:, 0], task.mean, penalty, w)
    middle, mean = np.average(x, 0, w), np.average(y, 0, w)
    root = 1.0 if w is None else np.sqrt(w)[:, None]
    away, rest = (x - middle) * root, (y - mean) * root
    n, d = x.shape
    if n < d:  # solved in the smaller of both sizes
        weight = away.T @ np.linalg.solve(away @ away.T + penalty * np.eye(n), rest)
    else:
        weight = np.linalg.solve(away.T @ away + penalty * np.eye(d), away.T @ rest)
    return Line(weight, mean - middle @ weight)


def _fit_logistic(x: Array, y: NDArray[np.int64], classes: int, penalty: float, w: Array | None) -> Line:
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fits that have not converged: validation rows say what they are worth
        model = LogisticRegression(C=1 / penalty, max_iter=50).fit(x, y, w)
    places, bias = _place_classes(model.classes_, classes)
    weight = np.zeros((x.shape[1], classes))
    weight[:, places], bias[places] = model.coef_.T, model.intercept_
    return Line(weight, bias)


def _place_classes(seen: NDArray[np.int64], classes: int) -> tuple[NDArray[np.int64], Array]:
    """Which outputs scikit-learn fits, of two classes the second alone, and [C] what the others are."""
    bias = np.full(classes, UNSEEN)
    bias[seen] = 0.0
    return seen if len(seen) > 2 else seen[1:], bias


def _fit_poisson(x: Array, y: Array, middle: float, penalty: float, w: Array | None) -> Line:
    from sklearn.linear_model import PoissonRegressor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        total = len(x) if w is None else w.sum()
        model = PoissonRegressor(alpha=penalty / total, solver="newton-cholesky", tol=1e-9).fit(x, y, w)
    return Line(model.coef_[:, None], np.array([model.intercept_ - math.log(middle)]))


def fit_forest(
    task: Any,
    x: Array,
    y: Any,
    trees: int,
    depth: int,
    w: Array | None = None,
    signs: Sequence[int] | None = None,
) -> Forest:
    """Boosting of rows as of `fit_line`; of fewer than `FEWEST`, or of constant ones, `constants_of`.

    With signs: [d], answers rise with inputs of 1, and fall with those of -1.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if len(x) < FEWEST or _is_constant(task, y, w):
        return Forest((), (), constants_of(task, y, w))
    how: dict[str, Any] = {"max_iter": trees, "max_depth": depth, "early_stopping": False, "random_state": 0}
    how["monotonic_cst"] = signs
    x = np.where(np.isnan(x).all(0), 0.0, x)  # scikit-learn has no bins for a column without values
    if isinstance(task, Classification):
        model = HistGradientBoostingClassifier(**how).fit(x, y, w)
        places, bias = _place_classes(model.classes_, task.classes)
        return Forest([model], [places], bias)
    if isinstance(task, Counts):
        how["loss"] = "poisson"
    models = [HistGradientBoostingRegressor(**how).fit(x, target, w) for target in y.T]
    start = -math.log(task.mean) if isinstance(task, Counts) else 0.0
    return Forest(models, [[i] for i in range(len(models))], np.full(len(models), start))


@dataclass(frozen=True)
class Standard(Local, Advises, Solves):
    r"""$\theta_i$ is a ridge, a regression of labels or counts, or boosting, fitted to client $i$'s rows alone.

    scikit-learn fits it, and the model says which. The trees of the model `trees` are those of histogram gradient
    boosting. Of any other model the last layer is fitted to what the layers before it make of the rows, as a ridge to
    numbers and forecasts, as a logistic regression to labels, and as a Poisson regression to counts. Three models fit
    themselves. `repeat` is the last value or season once more, `holt-winters` smooths the readings of a window, and
    `calendar-means` has means at the same time of day, week or year.
    """

    penalty: Annotated[float, In("(0, inf]")] = 1.0  # of a last layer, in squared deviations; of labels 1 / C
    refuses: ClassVar[str] = ""  # a newcomer fits its model by itself, as the others did
    solves: ClassVar[bool] = True
    takes_gradients: ClassVar[bool] = False
    batched: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = True

    @property
    def rates(self):
        return ("penalty",)

    def start(self, roster):
        task = roster.task
        if isinstance(task, Quantiles) or not isinstance(task, Classification | Counts | Forecasting | Regression):
            raise UsageError(f"standard knows numbers, counts, labels and forecasts, not {type(task).__name__}")
        read_signs(task, roster.layout.tensors(roster.theta))
        return ()

    def is_solved(self, server):
        return True

    def init_client(self, client):
        return ()

    def train(self, client, state, received):
        return (), ()

    def personalise(self, client, state, received):
        module = client.model.module
        fit = self._fit_trees if isinstance(module, Trees) else self._fit_head
        return {"own": Params(_fit_estimator(client) if isinstance(module, Estimator) else fit(client))}

    def _fit_head(self, client: Client) -> Tensor:
        """[d] the model whose last layer is fitted to the client's rows."""
        model = client.model
        head = [e for e in model.layout.entries if e.name in model.layout.head]
        layer = model.module.get_submodule(model.head_name or "")
        if type(layer) not in (nn.Linear, Since) or len(head) != 2:
            raise UsageError(
                "standard fits a last layer that is linear, has a bias and travels; set model.name=linear, or trees"
            )
        x, y, w = rows_of(client, model.features(model.theta, client.data.x).flatten(1))
        if isinstance(layer, Since):  # the layer adds what a row starts from to its answer
            x, y = x[:, : -layer.starts], y - x[:, -layer.starts :]
        line = fit_line(client.task, x, y, self.penalty, w)
        coefficients = torch.from_numpy(np.vstack([line.weight, line.bias]))
        return model_of(model.layout, model.theta, coefficients[None].to(model.theta.device))[0]

    def _fit_trees(self, client: Client) -> Tensor:
        """[d] the model whose trees are grown from the client's rows."""
        layout, theta, task = client.model.layout, client.model.theta, client.task
        module: Any = client.model.module
        x, y, w = rows_of(client, module.with_holes(client.data.x.flatten(1)))
        made = {name: np.zeros(t.shape) for name, t in layout.tensors(theta).items()}
        made["threshold"][:] = NOWHERE
        lanes = lanes_of(task, made["leaf"].shape[2])
        signs = None
        if module.monotone is not None:
            made["monotone"][:] = module.monotone.cpu().numpy()
            signs = made["monotone"].astype(int).tolist()
        forest = fit_forest(task, x, y, len(made["leaf"]) // lanes, module.depth, w, signs)
        made["head.bias"][:] = forest.fill(made, lanes)
        made["threshold"] = round_down(made["threshold"], theta.dtype)
        return torch.cat([torch.from_numpy(made[e.name]).flatten() for e in layout.entries]).to(theta)


def _fit_estimator(client: Client) -> Tensor:
    """[d] the model that has fitted itself to the client's rows."""
    model = client.model
    module = cast(Estimator, model.module).fit_copy(*rows_of(client, client.data.x))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return torch.cat([tensors[e.name].flatten() for e in model.layout.entries]).detach().to(model.theta)


def rows_of(client: Client, x: Tensor) -> tuple[Array, Any, Array | None]:
    """[n, d] inputs, [n, k] targets in the units of outputs or [n] labels, and [n] weights of a client's own rows.

    None for weights where all count alike; x: [m, d] are the inputs of all of the client's rows.
    """
    task: Any = client.task
    y, weight = client.data.y, client.data.weight.double()
    if isinstance(task, Classification):
        target = y
        weight = weight if client.class_weights is None else weight * client.class_weights[y]
    elif isinstance(task, Forecasting):
        target = (y.double() - task.mean) / task.deviation
    else:
        target = (y if isinstance(task, Counts) else task.standardise(y.double())).double().reshape(len(y), -1)
    real = weight > 0 if isinstance(task, Classification) else (weight > 0) & ~target.isnan().any(1)
    rows, targets, weights = (t[real].cpu().numpy() for t in (x.double(), target, weight))
    return rows, targets, None if (weights == 1).all() else weights


def round_down(values: Array, dtype: torch.dtype) -> Array:
    """The largest numbers of a tensor's kind that are not above values, so that the same rows are above them."""
    if dtype != torch.float32:
        return values
    rounded = values.astype(np.float32)
    return np.where(rounded > values, np.nextafter(rounded, np.float32(-np.inf)), rounded).astype(np.float64)
